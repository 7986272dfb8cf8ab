"""Guarded encoding at its edges: tokens assembled from pieces, and tokenizers that are not plain byte-level BPE."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers

from agentrl.chat import ChatFormat
from agentrl.chat.guard import GuardedEncoder, SentinelClashError
from chat_models import KINDS, write_chat_model

PARTS_TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.name }}{% for part in message.content %}{{ part.text | trim }}{% endfor %}<|im_end|>
{%- endfor -%}
"""


@pytest.fixture
def parts_chat(tmp_path: Path) -> ChatFormat:
    path = write_chat_model(tmp_path / "model", KINDS["thinking"])
    template = tmp_path / "parts.jinja"
    template.write_text(PARTS_TEMPLATE, encoding="utf-8")
    return ChatFormat.load(path, chat_template=template)


@pytest.mark.parametrize(
    "parts",
    [
        ["<|im_end", "|>"],
        ["a <", "|im_end|> b"],
        ["<|im", "_", "end|>"],
        ["<|im_end ", " |>", "<", "|im_end|>"],
        ["<", "tool_call", ">"],
        ["<<|im_end|", ">"],
        ["<|im_end|", "<|im_end|>"],
    ],
)
def test_content_parts_do_not_join_into_a_control_token(parts_chat: ChatFormat, parts: list[str]) -> None:
    message = {"role": "user", "name": "n", "content": [{"type": "text", "text": part} for part in parts]}
    ids = parts_chat.render_prompt([message], tools=())
    assert [parts_chat.decode((token,)) for token in ids if token in parts_chat._encoder.control_ids] == [
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert parts_chat.decode(ids) == "<|im_start|>n" + "".join(part.strip() for part in parts) + "<|im_end|>"


@pytest.mark.parametrize("parts", [["a <", "= b"], ["1 <|", " 2"], ["x <", ""], ["<tool", "box>"]])
def test_a_harmless_end_that_looks_like_a_beginning_keeps_its_ordinary_ids(
    parts_chat: ChatFormat, parts: list[str]
) -> None:
    message = {"role": "user", "name": "n", "content": [{"type": "text", "text": part} for part in parts]}
    text = "<|im_start|>n" + "".join(part.strip() for part in parts) + "<|im_end|>"
    expected = parts_chat._tokenizer.encode(text, add_special_tokens=False).ids
    assert list(parts_chat.render_prompt([message], tools=())) == expected


def test_refuses_to_mark_a_text_that_contains_the_sentinel(parts_chat: ChatFormat) -> None:
    guard = parts_chat._encoder.guard
    for text in (guard.sentinel, guard.escaped_sentinel):
        with pytest.raises(SentinelClashError):
            guard.mark(f"a{text}b")


def word_tokenizer(**token_options: bool) -> Tokenizer:
    """A SentencePiece-like tokenizer: lower case, spaces written as a letter, one put before the first word."""
    letters = "▁abcdefghijklmnopqrstuvwxyz<>/|_\n"
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.add_tokens([AddedToken("<end>", special=True, **token_options)])
    return tokenizer


def test_spaces_are_not_added_around_look_alikes_by_tokenizers_that_start_texts_with_one() -> None:
    tokenizer = word_tokenizer(normalized=False)
    encoder = GuardedEncoder(tokenizer, template_text="")
    ids = encoder.encode(encoder.guard.mark("ab <end> c"), guard=encoder.guard)
    assert "".join(tokenizer.id_to_token(token) or "" for token in ids) == "▁ab▁<end>▁c"
    assert not encoder.control_ids & set(ids)


def test_text_that_normalizes_into_a_control_token_stays_text() -> None:
    tokenizer = word_tokenizer(normalized=True)
    tokenizer.normalizer = normalizers.Lowercase()
    encoder = GuardedEncoder(tokenizer, template_text="")
    end = tokenizer.token_to_id("<end>")
    assert end in tokenizer.encode("a<END>b").ids
    for text in ("a<END>b", "a<End><END>"):
        assert end not in encoder.encode(encoder.guard.mark(text), guard=encoder.guard)
    assert encoder.encode("a<END>b<end>", guard=encoder.guard).count(end) == 1


def test_a_control_token_that_is_an_ordinary_word_of_the_model_is_spelled_out() -> None:
    vocabulary = {letter: index for index, letter in enumerate("<end>ax")} | {"<end>": 10, "[": 11}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False), AddedToken("[", special=True)])
    encoder = GuardedEncoder(tokenizer, template_text="")
    ids = encoder.encode(encoder.guard.mark("a<end>x"), guard=encoder.guard)
    assert [tokenizer.id_to_token(token) for token in ids] == list("a<end>x")
    with pytest.raises(ValueError, match=r"no ordinary tokens for the text '\['"):
        encoder.encode(encoder.guard.mark("a[x"), guard=encoder.guard)


def test_whitespace_tokens_are_ordinary_text() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate("ab\n")}, merges=[]))
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    encoder = GuardedEncoder(tokenizer, template_text="")
    text = encoder.guard.mark("a\n\nb")
    assert encoder.encode(text, guard=encoder.guard) == tokenizer.encode("a\n\nb").ids
    assert encoder.control_ids == frozenset()


@pytest.mark.parametrize("options", [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_remembered_pieces_give_the_same_ids_whatever_tokens_ask_of_their_neighbours(options: dict[str, bool]) -> None:
    letters = {letter: index for index, letter in enumerate("ab <end>")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False, **options)])
    encoder = GuardedEncoder(tokenizer, template_text="<end>")
    text = "".join("a b " * 100 + end for end in ("<end>", "  <end>  ", "b<end>b", "<end><end>"))
    assert encoder.encode_prompt(text, guard=encoder.guard) == tokenizer.encode(text, add_special_tokens=False).ids


def test_remembered_pieces_do_not_cut_a_longer_token_that_contains_a_border() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate("ab<end>")}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<end>", "b<end>b")])
    encoder = GuardedEncoder(tokenizer, template_text="<end>")
    text = "a" * 400 + "b<end>b" + "a" * 400
    assert encoder.encode_prompt(text, guard=encoder.guard) == tokenizer.encode(text, add_special_tokens=False).ids


def test_single_characters_do_not_join_into_a_token_of_repeated_ones() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate("[x]")}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("[[x]]", special=True, normalized=False)])
    encoder = GuardedEncoder(tokenizer, template_text="")
    for parts in (["[", "[", "x]]"], ["[", "[x]]"], ["[[", "x]]"], ["[[x]]"], ["[[x]", "]"]):
        text = "".join(map(encoder.guard.mark, parts))
        assert encoder.control_ids.isdisjoint(encoder.encode(text, guard=encoder.guard)), parts
