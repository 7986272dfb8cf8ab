"""The losses there are by name, for the settings; their mathematics is in `agentrl.algo.losses`, which needs torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

BUILT_IN_LOSSES = ("GRPO", "GSPO", "MINIRL", "CISPO", "CE_GPPO", "REINFORCE", "CROSS_ENTROPY")


def unknown_loss(name: str, *, known: Sequence[str], way_out: str) -> str:
    """The message for a loss nobody knows, with the nearest one that exists."""
    near = difflib.get_close_matches(name.upper(), known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"loss = {name}: there is no such loss; {hint}Known are {', '.join(known)}; for one of your own {way_out}"
