"""An environment of the `verifiers` package from PyPI, run as a sampler.

    pip install verifiers==0.2.0      # not a requirement of AgentRL: see docs/custom_samplers.md
    agentrl sample RUN --sampler_module assets/examples/verifiers_environment.py

with rows such as {"id": "q1", "query": "What is 6 times 7?", "answer": "42", "scorer": "em",
"metadata": {"environment": "assets/examples/times_table.py"}}.

The environment drives: it makes the prompts, answers the model, runs its tools, decides when to stop, and scores.
`EngineClient` stands where its OpenAI client would. It renders only the messages that are new to the engine and keeps
the ids that the engine sampled, so nothing is tokenized twice, and every turn is committed like any other sampler's.
"""

from __future__ import annotations

import importlib.util
import time
from functools import cache
from pathlib import Path
from typing import Any

import verifiers
from verifiers.clients import Client
from verifiers.errors import OverlongPromptError
from verifiers.types import Messages, Response, ResponseMessage, SamplingArgs, Tool, ToolCall

from agentrl.chat.formats.json_calls import dump
from agentrl.errors import AgentRLError, RolloutError
from agentrl.rollout import AsyncSampler, Conversation, Reply, RolloutResult
from agentrl.types import StopReason, ToolSpec


class VerifiersSampler(AsyncSampler):
    """One rollout of the environment that the Task names, scored by the environment's rubric."""

    _score: float

    async def run(self) -> RolloutResult:
        """The environment's own loop. Raises RolloutError where the environment failed."""
        environment = load_environment(str(self.task.metadata["environment"]))
        conversation = Conversation(self.record, committed=self.committed, agent=self.agent)
        client = EngineClient(conversation, max_turns=self.agent.rollout.max_turns)
        system = [{"role": "system", "content": environment.system_prompt}] if environment.system_prompt else []
        prompt = [*system, {"role": "user", "content": self.task.query}]
        row = {"prompt": prompt, "answer": self.task.answer, "info": dict(self.task.metadata), "example_id": 0}
        state = await environment.rollout(row, client, model="policy")
        if client.failure is not None:
            raise client.failure
        if state["error"] is not None:
            raise RolloutError(f"environment {self.task.metadata['environment']}: {state['error']!r}")
        await environment.rubric.score_rollout(state)
        self._score = float(state["reward"])
        return conversation.end(client.stop_reason, answer=client.last_text)

    async def evaluate_record(self, result: RolloutResult) -> float:
        """What the rubric said."""
        return self._score


class EngineClient(Client[None, Messages, Reply, ToolSpec]):
    """The engine behind one Record, as verifiers asks for completions."""

    def __init__(self, conversation: Conversation, *, max_turns: int) -> None:
        super().__init__(None)
        self.failure: Exception | None = None  # verifiers would make its own error of it
        self.stop_reason = StopReason.ANSWER  # the environment stops; else a limit did
        self.last_text: str | None = None
        self._conversation = conversation
        self._max_turns = max_turns
        self._known: list[Any] = []  # the conversation so far, as the environment sees it
        self._call_names: dict[str, str] = {}

    async def get_native_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: SamplingArgs,
        tools: list[ToolSpec] | None = None,
        **kwargs: Any,
    ) -> Reply:
        """The completion behind the messages that are new. Sampling parameters are those of the run."""
        if list(prompt[: len(self._known)]) != self._known:
            raise self._failed(RolloutError("the environment rewrites its context; only appending is token-exact"))
        new = [self._message(message) for message in prompt[len(self._known) :]]
        if len(self._conversation.turns) >= self._max_turns:
            self.stop_reason = StopReason.MAX_TURNS
            raise OverlongPromptError
        try:
            reply = await self._conversation.ask(new, tools=tools or ())
        except (AgentRLError, TimeoutError) as error:
            raise self._failed(error) from error
        if reply is None:
            self.stop_reason = StopReason.CONTEXT_LIMIT
            raise OverlongPromptError
        self._known = list(prompt)
        return reply

    async def from_native_response(self, response: Reply) -> Response:
        """The reply in the form environments read. A call that cannot be read carries its error as arguments."""
        calls = [
            ToolCall(
                id=f"{len(self._known)}_{call.call_id}", name=call.name, arguments=call.error or dump(call.arguments)
            )
            for call in response.parsed.tool_calls
        ]
        self._call_names |= {call.id: call.name for call in calls}
        self.last_text = response.parsed.content
        message = ResponseMessage(
            content=response.parsed.content,
            reasoning_content=response.parsed.reasoning or None,
            tool_calls=calls or None,
            finish_reason="length" if response.is_truncated else "tool_calls" if calls else "stop",
            is_truncated=response.is_truncated,
        )
        self._known += await verifiers.utils.response_utils.parse_response_message(
            whole := Response(id=response.turn.model.id, created=int(time.time()), model="policy", message=message)
        )
        return whole

    def _message(self, message: Any) -> dict[str, str]:
        """A message of the environment as a chat template takes it. Raises RolloutError for anything but text."""
        content = message.content
        if not isinstance(content, str):
            parts = [part["text"] for part in content if part["type"] == "text"]
            if len(parts) != len(content):
                raise self._failed(RolloutError("the environment sends something else than text"))
            content = "\n".join(parts)
        if message.role != "tool":
            return {"role": message.role, "content": content}
        name = self._call_names[message.tool_call_id]
        return {"role": "tool", "tool_call_id": message.tool_call_id, "name": name, "content": content}

    def _failed(self, error: Exception) -> Exception:
        self.failure = error
        return error

    async def to_native_tool(self, tool: Tool) -> ToolSpec:
        """The tool as prompts show it."""
        return ToolSpec(name=tool.name, description=tool.description, parameters=tool.parameters)

    async def to_native_prompt(self, messages: Messages) -> tuple[Messages, dict[str, Any]]:
        """As it is."""
        return messages, {}

    def setup_client(self, config: Any) -> None:
        """There is no connection to set up."""

    async def raise_from_native_response(self, response: Reply) -> None:
        """Failures are raised by the engine client."""

    async def close(self) -> None:
        """Nothing to close: the engine serves other Records."""


@cache
def load_environment(name: str) -> verifiers.Environment:
    """The environment of an installed environment package, or of a .py file with `load_environment()`."""
    if not name.endswith(".py"):
        return verifiers.load_environment(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None:
        raise RolloutError(f"environment {name}: no such file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    environment: verifiers.Environment = module.load_environment()
    return environment
