"""Rows that share prefixes as the rows of a group do, and what their trie must come to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from agentrl.types import DBRecordData
from tiny_model import VOCABULARY_SIZE, random_row


@st.composite
def branching_rows(draw: st.DrawFn, *, max_rows: int = 7, max_token: int = 3) -> list[list[int]]:
    """Any rows of a few different tokens: each begins with a part of an earlier one. Equal rows occur, prefixes too."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_rows))):
        base = draw(st.sampled_from(rows)) if rows else []
        kept = draw(st.integers(0, len(base)))
        rows.append(base[:kept] + draw(st.lists(st.integers(0, max_token), max_size=6)))
    return rows


def group_rows(
    *, seed: int = 0, num_generations: int = 4, prompt: int = 12, version: int | None = 0
) -> list[DBRecordData]:
    """One group: a shared prompt; generation 2 shares less of it, the last also sampled what the first had sampled."""
    rng = np.random.default_rng(seed)
    prompt_ids = rng.integers(0, VOCABULARY_SIZE, prompt).astype(np.int32)
    rows: list[DBRecordData] = []
    for generation in range(num_generations):
        row = random_row(
            f"train:0:q/g{generation}/s0",
            rng=rng,
            length=int(rng.integers(prompt + 8, prompt + 25)),
            version=version,
            advantage=1.0 if generation % 2 else -0.7,
        )
        token_ids = row.token_ids.copy()
        shared = prompt // 2 if generation == 2 else prompt
        token_ids[:shared] = prompt_ids[:shared]
        if generation == num_generations - 1 and rows:
            token_ids[: prompt + 5] = rows[0].token_ids[: prompt + 5]
        rows.append(replace(row, token_ids=token_ids))
    return rows
