"""Model directories as users have them: older and newer layouts, and broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer

from agentrl.chat import ChatFormat
from agentrl.errors import ConfigError, UnavailableError
from agentrl.types import ToolSpec
from chat_models import KINDS, write_chat_model

TOOL = ToolSpec(name="f", description="", parameters={})
QUESTION = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "model", KINDS["thinking"])


def update_json(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**content, **entries}), encoding="utf-8")


def ids_of_transformers(path: Path, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    return ids


def test_names_the_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"tokenizer\.json does not exist"):
        ChatFormat.load(tmp_path)


def test_names_the_missing_template_and_the_way_out(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(UnavailableError, match=r"has no chat template.*set chat_template to a Jinja file"):
        ChatFormat.load(model)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"{", "not a readable tokenizer"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "holds a list"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
        ("generation_config.json", b"\xff", "cannot be read"),
    ],
)
def test_names_an_unreadable_file(model: Path, file: str, content: bytes, message: str) -> None:
    (model / file).write_bytes(content)
    with pytest.raises(UnavailableError, match=rf"{file} .*{message}"):
        ChatFormat.load(model)


def test_names_the_line_of_a_template_that_is_no_jinja(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("a\n{% for %}", encoding="utf-8")
    with pytest.raises(ConfigError, match="chat template, line 2"):
        ChatFormat.load(model, chat_template=template)
    with pytest.raises(UnavailableError, match=r"absent\.jinja cannot be read"):
        ChatFormat.load(model, chat_template=tmp_path / "absent.jinja")


def test_a_given_template_replaces_the_models_own(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}!", encoding="utf-8")
    chat = ChatFormat.load(model, chat_template=template)
    assert chat.decode(chat.render_prompt(QUESTION, tools=())) == "hi!"


@pytest.mark.parametrize("layout", ["string", "named list", "extra files"])
def test_finds_templates_in_every_layout(model: Path, layout: str) -> None:
    (model / "chat_template.jinja").unlink()
    if layout == "string":
        update_json(model / "tokenizer_config.json", chat_template="plain{{ eos_token }}")
    elif layout == "named list":
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "with {{ tools | length }}"},
        ]
        update_json(model / "tokenizer_config.json", chat_template=named)
    else:
        (model / "chat_template.jinja").write_text("plain", encoding="utf-8")
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text("with", encoding="utf-8")
    chat = ChatFormat.load(model)
    assert list(chat.render_prompt(QUESTION, tools=())) == ids_of_transformers(model, QUESTION)
    assert list(chat.render_prompt(QUESTION, tools=[TOOL])) == ids_of_transformers(
        model, QUESTION, tools=[TOOL.as_openai()]
    )


def test_names_templates_none_of_which_is_the_default(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    update_json(model / "tokenizer_config.json", chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(UnavailableError, match=r"\['rag'\] but no \"default\""):
        ChatFormat.load(model)


def test_adds_the_tokens_that_only_the_configuration_declares(model: Path) -> None:
    size = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    options = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
    decoder = {str(size + 1): {"content": "<two>", **options}, str(size): {"content": "<one>", **options}}
    update_json(
        model / "tokenizer_config.json",
        added_tokens_decoder=decoder,
        eos_token={"__type": "AddedToken", "content": "<stop>", **options, "special": True},
        extra_special_tokens=["<extra>"],
    )
    messages = [{"role": "assistant", "content": "<two><one>"}]
    chat = ChatFormat.load(model)
    expected = ids_of_transformers(model, messages)
    assert {size, size + 1} <= set(expected)
    assert list(chat.render_prompt(messages, tools=())) == expected
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert chat.stop_token_ids[0] == tokenizer.eos_token_id
    assert chat.vocab_size == len(tokenizer)


def test_reads_the_older_special_tokens_map(model: Path) -> None:
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    update_json(model / "special_tokens_map.json", eos_token={"content": "<|endoftext|>"}, bos_token="<|im_start|>")
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert list(ChatFormat.load(model).render_prompt(QUESTION, tools=())) == ids_of_transformers(model, QUESTION)


def test_completions_stop_at_every_end_that_the_model_knows(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    turn, text = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    assert ChatFormat.load(model).stop_token_ids == (turn, text)
    (model / "generation_config.json").unlink()
    update_json(model / "config.json", eos_token_id=text)
    assert ChatFormat.load(model).stop_token_ids == (turn, text)
    update_json(model / "tokenizer_config.json", eos_token="<|endoftext|>")
    update_json(model / "config.json", eos_token_id=10**6)
    assert ChatFormat.load(model).stop_token_ids == (text, turn)


def test_ids_of_a_padded_embedding_are_within_the_vocabulary_and_have_no_text(model: Path) -> None:
    size = ChatFormat.load(model).vocab_size
    update_json(model / "config.json", vocab_size=size + 100)
    chat = ChatFormat.load(model)
    assert chat.vocab_size == size + 100
    assert chat.decode((*chat.encode_text("a"), size + 99)) == "a"
    update_json(model / "config.json", vocab_size=10, text_config={"vocab_size": size + 7})
    assert ChatFormat.load(model).vocab_size == size + 7


def test_a_truncating_tokenizer_file_does_not_cut_prompts(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(model / "tokenizer.json"))
    chat = ChatFormat.load(model)
    assert (
        chat.decode(chat.render_prompt(QUESTION, tools=())) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_loads_what_transformers_saves_for_a_qwen_tokenizer(model: Path, tmp_path: Path) -> None:
    serialized = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=serialized["model"]["vocab"], merges=[tuple(pair) for pair in serialized["model"]["merges"]]
    )
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["<tool_call>", "<think>"])
    tokenizer.chat_template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(tmp_path / "saved")
    messages = [*QUESTION, {"role": "assistant", "content": "<think> don't <tool_call> 東京 1234\n\n x"}, *QUESTION]
    chat = ChatFormat.load(tmp_path / "saved")
    assert list(chat.render_prompt(messages, tools=[TOOL])) == ids_of_transformers(
        tmp_path / "saved", messages, tools=[TOOL.as_openai()]
    )


def test_loads_without_torch_and_transformers(model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from agentrl.chat import ChatFormat; "
        "ChatFormat.load(Path(sys.argv[1])); print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
