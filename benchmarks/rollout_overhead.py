"""CPU per turn of the rollout loop itself, with an engine and a tool that cost next to nothing.

    python benchmarks/rollout_overhead.py [--rollouts 256] [--turns 8]

256 rollouts run at the same time, each turn one model call and one tool call. The engine returns ready-made ids, the
tool is an async function, turns are committed to memory; the CPU of both stubs is measured alone and taken off. What is
left is rendering, decoding, parsing, the argument check, deadlines and bookkeeping. Its bound is 5 ms per turn.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl.chat import ChatFormat
from agentrl.config import InferenceConfig, RolloutConfig
from agentrl.rollout.agent import Agent
from agentrl.rollout.sampler import MCPSampler
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import (
    GenerateReply,
    GenerateRequest,
    Record,
    RecordStatus,
    Recovery,
    StopReason,
    Task,
    Turn,
    VersionSpan,
)

BOUND_MS = 5.0
THINKING = "I look this up before I answer, because a guess is worth nothing here. " * 4
CALL = THINKING + '<tool_call>\n{{"name": "lookup", "arguments": {{"query": "turn {turn}"}}}}\n</tool_call>'
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


async def lookup(query: str) -> str:
    """Look something up."""
    return query


def write_chat(directory: Path) -> Path:
    """A byte-level tokenizer with a ChatML template: more ids per text, so more work, than a real one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}'
    (directory / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


class ReadyEngine:
    """Implements GenerationClient: the reply of turn n is made before the clock starts."""

    def __init__(self, model_dir: Path, *, num_turns: int) -> None:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        texts = [CALL.format(turn=turn) for turn in range(num_turns - 1)] + ["<answer>5</answer>"]
        self._replies = [self._reply(tokenizer.encode(f"{text}<|im_end|>").ids) for text in texts]
        self._turns: dict[str, int] = {}

    def _reply(self, ids: list[int]) -> GenerateReply:
        return GenerateReply(
            output_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            version_spans=(VersionSpan(version=0, start=0, end=len(ids)),),
            finish_reason="stop",
            service_id="ready",
        )

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        turn = self._turns.get(request.session, 0)
        self._turns[request.session] = turn + 1
        await asyncio.sleep(0)  # every rollout gets its turn, as with a real engine
        return self._replies[turn]

    async def close(self) -> None:
        """Nothing to release."""


def make_agent(model_dir: Path, *, num_turns: int) -> Agent:
    async def commit(record: Record, turn: Turn) -> Record:
        return replace(record, turn_ids=(*record.turn_ids, turn.model.id))

    return Agent(
        chat=ChatFormat.load(model_dir),
        client=ReadyEngine(model_dir, num_turns=num_turns),
        toolbox=FunctionToolbox([lookup], recovery=Recovery.STATELESS, max_in_flight=256),
        journal=MemoryStore(),
        commit_turn=commit,
        rollout=RolloutConfig(max_turns=num_turns, max_new_tokens=1024, max_prompt_tokens=60_000),
        inference=InferenceConfig(context_length=65_536),
        tool_timeout_s=30.0,
        clock=lambda: datetime.now(UTC),
    )


async def sample(agent: Agent, number: int) -> int:
    task = Task(
        id=f"train:0:{number}", item_id=str(number), split="train", epoch=0, query="2 + 3?", answer="5",
        num_generations=1,
    )  # fmt: skip
    record = Record(
        id=f"{task.id}/g0", task_id=task.id, split="train", generation=0, fence=1, status=RecordStatus.RUNNING
    )
    final, turns = await MCPSampler(task, record=record, committed=(), agent=agent).sample()
    assert final.stop_reason is StopReason.ANSWER, final
    return len(turns)


async def cost_of_rollouts(agent: Agent, *, num_rollouts: int) -> tuple[float, int]:
    """CPU seconds and turns."""
    began = time.process_time()
    turns = await asyncio.gather(*(sample(agent, number) for number in range(num_rollouts)))
    return time.process_time() - began, sum(turns)


async def cost_of_stubs(*, num_turns: int) -> float:
    """CPU seconds of so many calls of the stub engine's and the stub tool's bodies."""

    async def one() -> None:
        await asyncio.sleep(0)
        await lookup("turn")

    began = time.process_time()
    for _ in range(num_turns):
        await one()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_chat(Path(folder))
        asyncio.run(cost_of_rollouts(make_agent(model_dir, num_turns=flags.turns), num_rollouts=8))  # warm up
        agent = make_agent(model_dir, num_turns=flags.turns)
        cpu_s, num_turns = asyncio.run(cost_of_rollouts(agent, num_rollouts=flags.rollouts))
    stubs_s = asyncio.run(cost_of_stubs(num_turns=num_turns))
    overhead_ms = 1000 * (cpu_s - stubs_s) / num_turns
    print(f"{flags.rollouts} rollouts, {num_turns} turns: {overhead_ms:.2f} ms CPU per turn (bound {BOUND_MS:g} ms)")
    if overhead_ms > BOUND_MS:
        raise SystemExit(f"overhead of {overhead_ms:.2f} ms per turn is above {BOUND_MS:g} ms")


if __name__ == "__main__":
    main()
