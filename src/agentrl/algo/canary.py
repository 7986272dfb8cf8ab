"""Canary prompts: a fingerprint of the weights a service really computes with, and which fingerprint is wrong. Pure.

    trainer publishes v ─► log-probs of the prompts (reference) ─┐
    service loaded v    ─► its log-probs of the same prompts    ─┴─► deviation > tolerance?  quarantine
    no reference        ─► three or more services at v: the distance from their median, token by token

The statistic is the mean of |difference| in nats over all canary tokens. A maximum would be decided by the least likely
token, whose log-prob bfloat16 rounds by a tenth of a nat and more; wrong weights, a wrong cache or a broken kernel move
every token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean, median

from agentrl.types import CanaryReference

NUM_PROMPTS = 4
PROMPT_TOKENS = 14  # with the token generated after it, it fits the shortest context_length there is
_SMALLEST_MAJORITY = 3  # services, of which one can be outvoted


def canary_prompts(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The fixed prompts of a vocabulary: the same ids in every process and version.

    Taken from the middle of the vocabulary, away from both ends, where special tokens lie.
    """
    rng = random.Random(vocab_size)
    low, high = vocab_size // 16, max(vocab_size // 16 + 1, vocab_size * 3 // 4)
    return tuple(tuple(rng.randrange(low, high) for _ in range(PROMPT_TOKENS)) for _ in range(NUM_PROMPTS))


def deviation(logprobs: Sequence[float], reference: Sequence[float]) -> float:
    """Mean |difference| in nats; infinite where a number is not finite. Raises ValueError for unequal lengths."""
    differences = [abs(one - other) for one, other in zip(logprobs, reference, strict=True)]
    mean = fmean(differences)
    return mean if math.isfinite(mean) else math.inf


def judged_deviation(
    logprobs: Sequence[float], *, reference: CanaryReference | None, peers: Sequence[Sequence[float]]
) -> float | None:
    """How far a service is from what is right, or None where nothing says what that is.

    `peers` are the answers of the other services at the same version. With a reference they do not matter; without one
    there must be a majority: with two services, nobody knows which one is wrong.
    """
    if reference is not None:
        return deviation(logprobs, reference.logprobs)
    answers = [logprobs, *(peer for peer in peers if len(peer) == len(logprobs))]
    if len(answers) < _SMALLEST_MAJORITY:
        return None
    return deviation(logprobs, [median(values) for values in zip(*answers, strict=True)])
