"""What the layouts of training rows cost: tokens and CPU time of forward and backward, on shapes of agent groups.

    .venv/bin/python benchmarks/merge_layouts.py                    # tokens and times by shape, some minutes
    .venv/bin/python benchmarks/merge_layouts.py --merge_share      # merge and collate against a step of 128k tokens
    .venv/bin/python benchmarks/merge_layouts.py --calibrate        # the constants of the cost model

All ratios come from the same process. A Qwen3 with 8 layers of width 256 (grouped heads, tied embeddings, a vocabulary
of 8192) trains one group; the loss is the sum of advantage x log-prob. Rows come from turns through `merge_record`, and
passes from the planner, as in a run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.algo.layouts import LayoutRule, RowLayout
from agentrl.algo.merge import merge_record
from agentrl.algo.trie import build_trie, input_tokens, summarise_group
from agentrl.train.batch import PassBatch, build_pass
from agentrl.train.model import PolicyModule
from agentrl.train.passes import forward_passes
from agentrl.train.tree_attention import attention_name
from agentrl.types import (
    DBRecordData,
    DispatchedSamplingTask,
    DispatchKind,
    Record,
    RecordStatus,
    Turn,
    TurnTokens,
    VersionSpan,
)

VOCABULARY_SIZE = 8192
HIDDEN_SIZE = 256
NUM_LAYERS = 8
MAX_TOKENS = 16_384
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of agent: turns per branch, and branches that start over from the prompt."""

    name: str
    num_generations: int
    prompt: int
    num_turns: int = 1
    completion: int
    tool: int = 0
    num_branches: int = 1
    has_large_prompt: bool = False


SHAPES = (
    Shape(name="single turn, G = 8", num_generations=8, prompt=512, completion=128, has_large_prompt=True),
    Shape(name="ReAct, G = 4, 6 turns", num_generations=4, prompt=256, num_turns=6, completion=48, tool=64),
    Shape(name="ReAct, G = 4, 12 turns", num_generations=4, prompt=256, num_turns=12, completion=48, tool=64),
    Shape(
        name="research, G = 8, prompt 1536", num_generations=8, prompt=1536, num_turns=4, completion=48, tool=48,
        has_large_prompt=True,
    ),
    Shape(
        name="context reset, 3 branches", num_generations=4, prompt=384, num_turns=4, completion=48, tool=96,
        num_branches=3,
    ),
    Shape(name="meta-episodes, G = 5, N = 3", num_generations=5, prompt=384, num_turns=9, completion=64, tool=96),
    Shape(
        name="meta-episodes, short context", num_generations=5, prompt=384, num_turns=3, completion=64, tool=96,
        num_branches=3,
    ),
)  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--merge_share", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.calibrate:
        calibrate(rounds=arguments.rounds)
        return
    shapes = [shape for shape in SHAPES if arguments.only in shape.name]
    policy = build_policy(hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS)
    if arguments.merge_share:
        print_merge_share(policy)
    else:
        print_layouts(shapes, policy, rounds=arguments.rounds)


# --- groups ---------------------------------------------------------------------------------------------------------


def group_turns(shape: Shape, *, rng: np.random.Generator, task: int = 0) -> list[tuple[Record, list[Turn]]]:
    """The Records of one group. Generations sample different tokens from the first one on."""
    prompt = tuple(rng.integers(0, VOCABULARY_SIZE, shape.prompt).tolist())
    return [
        (_record(task, generation), _turns(shape, _record(task, generation), prompt=prompt, rng=rng))
        for generation in range(shape.num_generations)
    ]


def merge_group(records: Sequence[tuple[Record, list[Turn]]]) -> list[DBRecordData]:
    """Rows of a group, as a settlement makes them."""
    return [
        row
        for index, (record, turns) in enumerate(records)
        for row in merge_record(record, turns, reward=1.0, advantages=[1.0 if index % 2 else -1.0] * len(turns))
    ]


def _record(task: int, generation: int) -> Record:
    return Record(
        id=f"train:0:q{task}/g{generation}", task_id=f"train:0:q{task}", split="train", generation=generation, fence=1,
        status=RecordStatus.FINISHED, score=1.0,
    )  # fmt: skip


def _turns(shape: Shape, record: Record, *, prompt: tuple[int, ...], rng: np.random.Generator) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(shape.num_branches):
        for turn in range(shape.num_turns):
            # A branch after the first begins with the prompt and a summary of what came before it.
            summary = shape.tool if turns else 0
            new = rng.integers(0, VOCABULARY_SIZE, shape.tool if turn else summary).tolist()
            turns.append(
                _turn(
                    record,
                    index=len(turns),
                    parent=len(turns) - 1 if turn else -1,
                    prompt_ids=tuple(new) if turn else (*prompt, *new),
                    completion_ids=tuple(rng.integers(0, VOCABULARY_SIZE, shape.completion).tolist()),
                )
            )
    return turns


def _turn(
    record: Record, *, index: int, parent: int, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]
) -> Turn:
    tokens = TurnTokens(
        parent_turn=parent, prompt_ids=prompt_ids, completion_ids=completion_ids,
        logprobs=(-9.0,) * len(completion_ids),
        version_spans=(VersionSpan(version=0, start=0, end=len(completion_ids)),), finish_reason="stop",
    )  # fmt: skip
    return Turn(
        model=DispatchedSamplingTask(
            id=f"{record.id}/{index}.1", record_id=record.id, task_id=record.task_id, turn=index, index=0,
            kind=DispatchKind.MODEL, target="e", status="ok", request={}, response={}, started_at=NOW, finished_at=NOW,
            tokens=tokens,
        )
    )  # fmt: skip


# --- measuring ------------------------------------------------------------------------------------------------------


def build_policy(*, hidden_size: int, num_layers: int) -> PolicyModule:
    """A random Qwen3 on the CPU, float32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=max(hidden_size // 64, 2),
        num_key_value_heads=max(hidden_size // 128, 1),
        head_dim=64 if hidden_size >= 128 else hidden_size // 2,
        intermediate_size=3 * hidden_size,
        tie_word_embeddings=True,
        max_position_embeddings=65_536,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation(attention_name("sdpa"))
    return PolicyModule(model.train(), temperature=1.0, chunk_size=1024, with_entropy=False)


def plan_passes(rows: Sequence[DBRecordData], *, rule: LayoutRule) -> list[PassBatch]:
    """The passes of a step with this group alone, as the trainer plans them."""
    by_id = {row.id: row for row in rows}
    (planned,) = forward_passes([summarise_group(rows)], num_ranks=1, max_tokens=MAX_TOKENS, rule=rule)
    return [build_pass([by_id[row_id] for row_id in one.row_ids], layout=one.layout) for one in planned]


def forward_backward(policy: PolicyModule, passes: Sequence[PassBatch]) -> None:
    """One step without the update."""
    for batch in passes:
        logprobs_N, _ = policy(batch.input_ids_BT, batch.predictors_N, batch.labels_N, batch.tree)
        (logprobs_N * batch.advantages_N).sum().backward()
    policy.zero_grad()


def cpu_seconds(work: Callable[[], None]) -> float:
    """CPU seconds of this process, all threads: on a shared machine wall time measures the neighbours."""
    started = time.process_time()
    work()
    return time.process_time() - started


def medians(policy: PolicyModule, candidates: dict[str, list[PassBatch]], *, rounds: int) -> dict[str, float]:
    """Median CPU seconds; candidates take turns, so that a slow minute hits all."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(rounds + 1):
        for name, passes in candidates.items():
            seconds = cpu_seconds(lambda passes=passes: forward_backward(policy, passes))
            if round_number:  # the first round warms up
                times[name].append(seconds)
    return {name: median(values) for name, values in times.items()}


def print_layouts(shapes: Sequence[Shape], policy: PolicyModule, *, rounds: int) -> None:
    """Tokens and times by shape."""
    print("| group | tokens per call / linear / chosen / trie | chosen / trie | per call s | linear s | chosen s | "
          "linear / chosen | per call / chosen |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for shape in shapes:
        rows = merge_group(group_turns(shape, rng=np.random.default_rng(0)))
        auto = LayoutRule.of_model("auto", hidden_size=HIDDEN_SIZE)
        candidates = {
            "per_call": plan_passes(rows, rule=replace(auto, layout="per_call")),
            "linear": plan_passes(rows, rule=replace(auto, layout="linear")),
            "chosen": plan_passes(rows, rule=auto),
        }
        tokens = {name: sum(one.input_ids_BT.numel() for one in passes) for name, passes in candidates.items()}
        optimum = build_trie([input_tokens(row) for row in rows]).num_tokens
        seconds = medians(policy, candidates, rounds=rounds)
        print(
            f"| {shape.name} | {tokens['per_call']:,} / {tokens['linear']:,} / {tokens['chosen']:,} / {optimum:,} | "
            f"{tokens['chosen'] / optimum:.3f} | {seconds['per_call']:.2f} | {seconds['linear']:.2f} | "
            f"{seconds['chosen']:.2f} | {seconds['linear'] / seconds['chosen']:.2f}x | "
            f"{seconds['per_call'] / seconds['chosen']:.2f}x |",
            flush=True,
        )


def print_merge_share(policy: PolicyModule) -> None:
    """Merge, planning and collate of a large step, against its forward and backward."""
    shape = next(shape for shape in SHAPES if "12 turns" in shape.name)
    rng = np.random.default_rng(0)
    groups = []
    while sum(shape.prompt + shape.num_turns * (shape.completion + shape.tool) for _ in groups) * 4 < 131_072:
        groups.append(group_turns(shape, rng=rng, task=len(groups)))
    rule = LayoutRule.of_model("auto", hidden_size=HIDDEN_SIZE)
    started = time.process_time()
    rows = [merge_group(records) for records in groups]
    merged = time.process_time()
    by_id = {row.id: row for group in rows for row in group}
    summaries = [summarise_group(group) for group in rows]
    (planned,) = forward_passes(summaries, num_ranks=1, max_tokens=MAX_TOKENS, rule=rule)
    passes = [build_pass([by_id[row_id] for row_id in one.row_ids], layout=one.layout) for one in planned]
    collated = time.process_time()
    forward_backward(policy, passes)
    trained = time.process_time()
    tokens = sum(row.token_ids.size for group in rows for row in group)
    layouts = {one.layout.value for one in planned if one.layout is not RowLayout.LINEAR or one.row_ids}
    print(f"\n{tokens:,} tokens in {len(by_id)} rows, {len(passes)} passes ({', '.join(sorted(layouts))}): "
          f"merge {merged - started:.3f} s, plan and collate {collated - merged:.3f} s, forward and backward "
          f"{trained - collated:.1f} s: {(collated - started) / (trained - started):.2%} of the step")  # fmt: skip


# --- calibration ----------------------------------------------------------------------------------------------------


def calibrate(*, rounds: int) -> None:
    """The two constants of the cost model, from times of short rows, a long row, and a prompt with many short ends."""
    shared, num_ends, end = 192, 384, 8
    print("| width | s per token, short rows | quadratic length / width | tokens per segment | x width squared |")
    print("|---|---|---|---|---|")
    for hidden_size in (96, 256, 512):
        policy = build_policy(hidden_size=hidden_size, num_layers=4)
        rng = np.random.default_rng(0)
        short, long = (_rows([length] * (4096 // length), shared=0, rng=rng) for length in (256, 4096))
        comb = _rows([shared + end] * num_ends, shared=shared, rng=rng)
        candidates = {
            "short": [build_pass(short)],
            "long": [build_pass(long)],
            "comb": [build_pass(comb, layout=RowLayout.TREE)],
        }
        times = medians(policy, candidates, rounds=rounds)
        short_pairs, long_pairs = 4096 * 256, 4096 * 4096
        per_pair = (times["long"] - times["short"]) / (long_pairs - short_pairs)
        per_token = times["short"] / 4096 - 256 * per_pair
        comb_tokens = shared + num_ends * end
        comb_pairs = shared**2 + num_ends * ((shared + end) ** 2 - shared**2)
        segment = (times["comb"] - comb_tokens * per_token - comb_pairs * per_pair) / per_token / num_ends
        print(f"| {hidden_size} | {per_token:.2e} | {per_token / per_pair / hidden_size:.1f} | {segment:.2f} | "
              f"{segment * hidden_size**2:,.0f} |", flush=True)  # fmt: skip


def _rows(lengths: Sequence[int], *, shared: int, rng: np.random.Generator) -> list[DBRecordData]:
    """Rows with a common prefix; only the last token is trained, so that the head costs nothing."""
    prefix = rng.integers(0, VOCABULARY_SIZE, shared).astype(np.int32)
    rows = []
    for index, length in enumerate(lengths):
        token_ids = rng.integers(0, VOCABULARY_SIZE, length + 1).astype(np.int32)
        token_ids[:shared] = prefix
        mask = np.arange(length + 1) == length
        rows.append(
            DBRecordData(
                id=f"r{index}/s0", task_id="t", record_id=f"r{index}", split="train", token_ids=token_ids,
                loss_mask=mask, advantages=mask.astype(np.float32), behaviour_logprobs=None,
                policy_versions=np.full(length + 1, -1, dtype=np.int32), reward=1.0,
            )
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
