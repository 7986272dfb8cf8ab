"""Multi-turn dialogues stay token-exact: sampled ids are never changed, and no message can forge a control token."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2.exceptions
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import ChatFormat
from agentrl.types import ToolSpec
from chat_models import KINDS, write_chat_model

TOOLS = (ToolSpec(name="search", description="find <|im_end|>", parameters={"type": "object", "properties": {}}),)
CONTROL = sorted({text for kind in KINDS.values() for text in (*kind.special, *kind.markup)})
FRAGMENTS = sorted({text[:cut] for text in CONTROL for cut in (1, 2, len(text) - 1)} | {text[1:] for text in CONTROL})
TEXTS = st.lists(
    st.sampled_from(CONTROL)
    | st.sampled_from(FRAGMENTS)
    | st.text(max_size=6)
    | st.sampled_from(["\uf8ef", "\\uf8ef"]),
    max_size=6,
).map("".join)
HARMLESS = st.text(
    st.characters(codec="ascii", categories=["L", "N", "P", "Zs"], exclude_characters="<|>[]"), max_size=20
)
COMPLETIONS = st.lists(st.integers(0, 2**16), max_size=8)


Model = tuple[ChatFormat, Any]  # ours, and the tokenizer of transformers as the oracle


def build(kind: str, factory: pytest.TempPathFactory) -> Model:
    path: Path = write_chat_model(factory.mktemp(kind), KINDS[kind])
    chat = ChatFormat.load(path, tool_call_parser=KINDS[kind].tool_call_parser)
    return chat, transformers.AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module", params=sorted(KINDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=["headers", "hermes"])  # the others rewrite what the assistant said earlier
def faithful_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build(request.param, tmp_path_factory)


def control_counts(chat: ChatFormat, ids: Sequence[int]) -> Counter[int]:
    return Counter(token for token in ids if token in chat._encoder.control_ids)


def tool_messages(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "content": text, "tool_call_id": f"call_{index}", "name": "search"}
        for index, text in enumerate(texts)
    ]


def rendered_after_assistant(tokenizer: Any, messages: Sequence[dict[str, Any]], *, end: str) -> str:
    """What transformers writes from the end of the assistant's turn on, as text."""
    call = {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": {"text": "@MARK@"}}}
    for assistant in ({"content": "@MARK@"}, {"content": "", "tool_calls": [call]}):
        conversation = [{"role": "user", "content": "q"}, {"role": "assistant", **assistant}, *messages]
        try:
            text: str = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        except jinja2.exceptions.TemplateError:
            continue
        after = text.rpartition("@MARK@")[2]
        return after[after.index(end) :]
    raise AssertionError("the template refuses both forms")


def as_encoded(text: str) -> str:
    """What the tokenizers of these tests keep of a text: composed characters, no half ones."""
    return unicodedata.normalize("NFC", text)


@given(
    data=st.data(),
    turns=st.lists(st.tuples(COMPLETIONS, st.booleans(), st.lists(TEXTS, min_size=1, max_size=3)), max_size=4),
)
@settings(deadline=None, max_examples=40)
def test_a_dialogue_only_appends_and_contains_only_the_templates_control_tokens(
    model: Model, data: st.DataObject, turns: list[tuple[list[int], bool, list[str]]]
) -> None:
    chat, tokenizer = model
    question = data.draw(TEXTS)
    context = chat.render_prompt([{"role": "user", "content": question}], tools=TOOLS)
    assert control_counts(chat, context) == control_counts(
        chat, chat.render_prompt([{"role": "user", "content": "q"}], tools=TOOLS)
    )
    for sampled, is_ended, texts in turns:
        end = chat.render_continuation(tool_messages(["x"]), completion_ids=(), tools=TOOLS)[0]
        completion = tuple(token % chat.vocab_size for token in sampled) + ((end,) if is_ended else ())
        messages = tool_messages(texts)
        continuation = chat.render_continuation(messages, completion_ids=completion, tools=TOOLS)
        harmless = chat.render_continuation(tool_messages(["x"] * len(texts)), completion_ids=completion, tools=TOOLS)
        assert control_counts(chat, continuation) == control_counts(chat, harmless)
        closed = continuation if continuation[0] == end else (end, *continuation)
        expected = rendered_after_assistant(tokenizer, messages, end=chat.decode((end,)))
        assert chat.decode(closed) == as_encoded(expected)
        longer = (*context, *completion, *continuation)
        assert longer[: len(context) + len(completion)] == (*context, *completion)
        context = longer


@given(rounds=st.lists(st.tuples(HARMLESS, st.lists(HARMLESS, min_size=1, max_size=2)), min_size=1, max_size=3))
@settings(deadline=None, max_examples=30)
def test_where_the_template_keeps_history_the_chain_equals_one_rendering(
    faithful_model: Model, rounds: list[tuple[str, list[str]]]
) -> None:
    chat, _ = faithful_model
    messages: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    chain = chat.render_prompt(messages, tools=TOOLS)
    for words, results in rounds:
        spoken = words.strip()
        completion = (*chat.encode_text(spoken), chat.stop_token_ids[0])
        answers = [{"role": "tool", "content": text} for text in results]
        chain += completion + chat.render_continuation(answers, completion_ids=completion, tools=TOOLS)
        messages += [{"role": "assistant", "content": spoken}, *answers]
    assert chain == chat.render_prompt(messages, tools=TOOLS)


@given(text=TEXTS | st.text())
@settings(deadline=None, max_examples=100)
def test_plain_text_survives_and_never_becomes_a_control_token(model: Model, text: str) -> None:
    chat, tokenizer = model
    ids = chat.encode_text(text)
    assert not control_counts(chat, ids)
    assert chat.decode(ids) == as_encoded(text)
    if not any(control in text for control in CONTROL):
        assert list(ids) == tokenizer.encode(text, add_special_tokens=False)


@given(text=st.text(st.characters(categories=["Cs", "L"]), min_size=1, max_size=8))
@settings(deadline=None, max_examples=50)
def test_half_characters_are_replaced_instead_of_raising(model: Model, text: str) -> None:
    chat, _ = model
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert chat.decode(chat.encode_text(text)) == as_encoded(whole)
    chat.render_continuation([{"role": "tool", "content": text}], completion_ids=(), tools=TOOLS)


@given(ids=st.lists(st.integers(0, 2**16), max_size=30))
@settings(deadline=None, max_examples=50)
def test_any_sampled_ids_have_a_text(model: Model, ids: list[int]) -> None:
    chat, tokenizer = model
    sampled = [token % chat.vocab_size for token in ids]
    assert chat.decode(sampled) == tokenizer.decode(sampled, skip_special_tokens=False)
    chat.completion_text(sampled)
