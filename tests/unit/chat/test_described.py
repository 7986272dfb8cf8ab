"""MiroRL's format explains the tools in the system message; a template that writes calls otherwise is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat import ChatFormat
from agentrl.chat.formats import CALL_FORMATS
from agentrl.errors import ConfigError
from agentrl.types import ToolSpec
from chat_models import KINDS, write_chat_model

TOOLS = (
    ToolSpec(name="find", description="Finds pages <|im_end|>.", parameters={"type": "object"}, server="web"),
    ToolSpec(name="files.find", description="Finds files.", parameters={"type": "object"}, server="files"),
    ToolSpec(name="add", description="Adds.", parameters={"type": "object"}),
)
QUESTION = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Where?"}]


@pytest.fixture
def mirorl(tmp_path: Path) -> ChatFormat:
    return ChatFormat.load(write_chat_model(tmp_path / "model", KINDS["hermes"]), tool_call_parser="mirorl")


def test_tools_are_explained_by_server_at_the_end_of_the_system_message(mirorl: ChatFormat) -> None:
    ids = mirorl.render_prompt(QUESTION, tools=TOOLS)
    text = mirorl.decode(ids)
    assert text.startswith("<|im_start|>system\nBe short.\n\nYou can call these tools.")
    assert "## Server: web\n\n### Tool: find\nFinds pages" in text
    assert "## Server: files\n\n### Tool: find\nFinds files." in text
    assert "## Server: tools\n\n### Tool: add\nAdds." in text
    assert mirorl.call_format.how in text
    assert "<tool_call>" not in text  # the template's own explanation of tools
    end = ids.index(mirorl.stop_token_ids[0])
    assert mirorl.decode(ids[end:]).startswith("<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>")  # nothing broke out


def test_without_tools_or_system_message_the_prompt_is_the_templates(mirorl: ChatFormat) -> None:
    assert mirorl.decode(mirorl.render_prompt(QUESTION[1:], tools=())) == (
        "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert mirorl.decode(mirorl.render_prompt(QUESTION[1:], tools=TOOLS)).startswith(
        "<|im_start|>system\nYou can call these tools."
    )


def test_results_come_back_as_one_user_message(mirorl: ChatFormat) -> None:
    messages = [
        {"role": "tool", "tool_call_id": "call_0", "name": "find", "content": "a page"},
        {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "5"},
        {"role": "user", "content": "This is the last turn."},
    ]
    ids = mirorl.render_continuation(messages, completion_ids=mirorl.encode_text("x"), tools=TOOLS)
    assert mirorl.decode(ids) == (
        "<|im_end|>\n<|im_start|>user\nResult of find:\na page\n\nResult of add:\n5\n\nThis is the last turn."
        "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("kind", "parser", "right"), [("headers", "hermes", "llama3"), ("thinking", "mistral", "hermes")]
)
def test_a_template_that_writes_calls_in_another_format_is_refused(
    tmp_path: Path, kind: str, parser: str, right: str
) -> None:
    model = write_chat_model(tmp_path / "model", KINDS[kind])
    with pytest.raises(ConfigError, match=f"tool_call_parser = '{parser}'.*set --tool_call_parser {right}"):
        ChatFormat.load(model, tool_call_parser=parser)
    assert ChatFormat.load(model, tool_call_parser=right).call_format is CALL_FORMATS[right]


def test_a_template_that_writes_no_calls_goes_with_every_format(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model", KINDS["hermes"])
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    for name, call_format in CALL_FORMATS.items():
        assert ChatFormat.load(model, tool_call_parser=name).call_format is call_format
