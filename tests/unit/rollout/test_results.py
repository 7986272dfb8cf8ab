"""What of a tool's result reaches the model: leaks, browse summaries, cuts; all of it kept in the calls."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentrl.errors import ChatError, ChatErrorKind
from agentrl.rollout.browse import Browser
from agentrl.types import DispatchKind, ToolStatus
from scripted_chat_model import ScriptedChatModel
from scripted_rollout import Rollout
from tiny_chat import write_tiny_chat


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def fetch(url: str, purpose: str = "") -> str:
    """A page of sentences."""
    return f"This is {url}. " + "It goes on. " * 50


def call(url: str, purpose: str = "") -> str:
    arguments = f'{{"url": "{url}", "purpose": "{purpose}"}}'
    return f'<tool_call>{{"name": "fetch", "arguments": {arguments}}}</tool_call>'


def make(model_dir: Path, first: str, **settings: object) -> Rollout:
    script = lambda context, depth: first if depth == 0 else "<answer>5</answer>"  # noqa: E731
    return Rollout(model_dir=model_dir, script=script, tools=[fetch], settings=settings)


def browser(model: ScriptedChatModel) -> Browser:
    return Browser(
        model=model, tools=("fetch",), min_result_tokens=50, max_result_tokens=300, timeout_s=5.0, encode=str.encode,
        default_purposes={"fetch": "the gist"}, clock=lambda: datetime.now(UTC),
    )  # fmt: skip


async def test_a_long_result_is_cut_at_a_sentence_end_and_its_length_is_kept(model_dir: Path) -> None:
    result = await make(model_dir, call("a.org"), max_tool_result_tokens=100).run()
    (shown,) = result.turns[0].tools
    assert str(shown.response["content"]).startswith("This is a.org. It goes on.")
    assert "It goes on.\n[Cut here:" in str(shown.response["content"])
    assert shown.response["full_characters"] == len(fetch("a.org"))


async def test_a_call_of_a_blocked_address_is_answered_and_not_sent(model_dir: Path) -> None:
    result = await make(model_dir, call("https://huggingface.co/datasets/x")).run()
    (refused,) = result.turns[0].tools
    assert refused.status == ToolStatus.BAD_ARGUMENTS
    assert "may not be opened" in str(refused.response["content"])
    assert "huggingface.co/datasets" in str(refused.error)
    assert refused.response["num_leaks"] == 1


async def test_blocked_addresses_in_a_result_are_taken_out_and_counted(model_dir: Path) -> None:
    def fetch(url: str) -> str:
        """Finds the answer sheet."""
        return '{"results": [{"link": "https://huggingface.co/datasets/x"}, {"link": "https://a.org"}]}'

    rollout = make(model_dir, '<tool_call>{"name": "fetch", "arguments": {"url": "a.org"}}</tool_call>')
    rollout.tools = [fetch]
    (shown,) = (await rollout.run()).turns[0].tools
    assert shown.response == {"content": '{"results": [{"link": "https://a.org"}]}', "num_leaks": 1}
    rollout.settings["blocked_addresses"] = ""
    (whole,) = (await rollout.run()).turns[0].tools
    assert "huggingface" in str(whole.response["content"])


async def test_a_long_result_is_summarised_for_its_purpose_and_the_request_is_a_call_of_its_own(
    model_dir: Path,
) -> None:
    model = ScriptedChatModel(lambda request: "It goes on fifty times.")
    rollout = make(model_dir, call("a.org", "how often") + call("b.org"))
    rollout.browser = browser(model)
    result = await rollout.run()
    first, second, *browsed = result.turns[0].tools
    assert [one.response["content"] for one in (first, second)] == ["It goes on fifty times."] * 2
    assert [one.kind for one in browsed] == [DispatchKind.BROWSE] * 2
    assert [one.cost_nano_usd for one in (first, second, *browsed)] == [0, 0, 7, 7]
    assert [one.index for one in (first, second, *browsed)] == [1, 2, 3, 4]
    assert sorted(one.split("\n")[0] for one in model.requests) == [
        "Summarise for this purpose: how often",
        "Summarise for this purpose: the gist",
    ]
    prompt = rollout.engine.tokenizer.decode(list(result.turns[1].tokens.prompt_ids))
    assert prompt.count("<tool_response>") == 2


@pytest.mark.parametrize("purpose", ["the full content", "raw page text"])
async def test_a_model_that_asks_for_all_of_it_gets_all_of_it(model_dir: Path, purpose: str) -> None:
    rollout = make(model_dir, call("a.org", purpose))
    rollout.browser = browser(ScriptedChatModel(lambda request: "short"))
    (shown,) = (await rollout.run()).turns[0].tools
    assert shown.response["content"] == fetch("a.org")


async def test_pages_are_summarised_each_on_its_own(model_dir: Path) -> None:
    model = ScriptedChatModel(lambda request: "one" if "first page" in request else "two")
    rollout = make(model_dir, call("a.org"))

    def fetch(url: str, purpose: str = "") -> str:
        """Two pages."""
        return f"first page {'a ' * 50}\n=======\nlast page {'b ' * 50}"

    rollout.tools, rollout.browser = [fetch], browser(model)
    shown = (await rollout.run()).turns[0].tools[0]
    assert shown.response["content"] == "one\n---\ntwo"


async def test_without_the_browse_agent_a_result_is_cut_and_the_failure_is_kept(model_dir: Path) -> None:
    error = ChatError("scripted: 503", kind=ChatErrorKind.OVERLOADED)
    rollout = make(model_dir, call("a.org"), max_tool_result_tokens=100)
    rollout.browser = browser(ScriptedChatModel(lambda request: error))
    shown, failed = (await rollout.run()).turns[0].tools
    assert "It goes on.\n[Cut here:" in str(shown.response["content"])
    assert (failed.status, failed.error) == ("overloaded", "scripted: 503")


async def test_an_error_of_a_tool_is_never_summarised_into_a_success(model_dir: Path) -> None:
    model = ScriptedChatModel(lambda request: "all is well")
    rollout = make(model_dir, call("a.org"))

    def fetch(url: str, purpose: str = "") -> str:
        """Fails at length."""
        raise ValueError("no such page. " * 50)

    rollout.tools, rollout.browser = [fetch], browser(model)
    (shown,) = (await rollout.run()).turns[0].tools
    assert (shown.status, model.requests) == (ToolStatus.TOOL_ERROR, [])
    assert "no such page" in str(shown.response["content"])


async def test_what_a_page_says_to_the_browse_agent_is_marked_as_data(model_dir: Path) -> None:
    model = ScriptedChatModel(lambda request: "short")
    rollout = make(model_dir, call("a.org"))
    rollout.browser = browser(model)
    await rollout.run()
    assert model.requests[0].index("<material>\nThis is a.org.") < model.requests[0].index("</material>")
