"""Name of a loss (LossConfig.loss) -> its policy term. A new loss is one file, one line here, one test."""

from __future__ import annotations

from agentrl.algo.losses.ce_gppo import ce_gppo
from agentrl.algo.losses.cispo import cispo
from agentrl.algo.losses.cross_entropy import cross_entropy
from agentrl.algo.losses.grpo import grpo
from agentrl.algo.losses.gspo import gspo
from agentrl.algo.losses.interface import PolicyTerm
from agentrl.algo.losses.minirl import minirl
from agentrl.algo.losses.reinforce import reinforce

POLICY_TERMS: dict[str, PolicyTerm] = {
    "GRPO": grpo,
    "GSPO": gspo,
    "MINIRL": minirl,
    "CISPO": cispo,
    "CE_GPPO": ce_gppo,
    "REINFORCE": reinforce,
    "CROSS_ENTROPY": cross_entropy,
}
