"""What counts as a score, for whoever makes, stores or uses one."""

from __future__ import annotations

import math
from numbers import Real

LARGEST_SCORE = 1e9
"""A larger one is a broken scorer: advantages are float32, and differences of scores must stay meaningful."""


def is_score(value: object) -> bool:
    """Whether a scorer may say this: a finite number of at most LARGEST_SCORE in size."""
    return isinstance(value, Real) and math.isfinite(value) and abs(float(value)) <= LARGEST_SCORE
