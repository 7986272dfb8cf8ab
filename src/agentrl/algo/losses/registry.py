"""Name of a loss (LossConfig.loss) -> its policy term. A new loss is one file, one line here, one test.

A loss that is not part of the package is one file of the user's with a dict `LOSSES` of the same form (`loss_module`).
"""

from __future__ import annotations

from agentrl.algo.losses.ce_gppo import ce_gppo
from agentrl.algo.losses.cispo import cispo
from agentrl.algo.losses.cross_entropy import cross_entropy
from agentrl.algo.losses.grpo import grpo
from agentrl.algo.losses.gspo import gspo
from agentrl.algo.losses.interface import PolicyTerm
from agentrl.algo.losses.minirl import minirl
from agentrl.algo.losses.reinforce import reinforce
from agentrl.algo.losses.user_loss import guarded, load_losses, try_loss
from agentrl.config.loss import unknown_loss
from agentrl.config.sections import LossConfig
from agentrl.errors import ConfigError

POLICY_TERMS: dict[str, PolicyTerm] = {
    "GRPO": grpo,
    "GSPO": gspo,
    "MINIRL": minirl,
    "CISPO": cispo,
    "CE_GPPO": ce_gppo,
    "REINFORCE": reinforce,
    "CROSS_ENTROPY": cross_entropy,
}


def policy_term(config: LossConfig) -> PolicyTerm:
    """The loss a configuration names, built in or of its `loss_module`, whose file is run and whose loss is tried out.

    Raises ConfigError in one line for a module that is not there, fails or defines no loss, for an unknown name, and
    for a loss that raises or gives back something that could not be trained on.
    """
    own = {} if config.loss_module is None else load_losses(config.loss_module)
    if taken := sorted(own.keys() & POLICY_TERMS.keys()):
        raise ConfigError(f"loss_module = {config.loss_module}: {taken[0]} is a built-in loss; give yours another name")
    if config.loss in own:
        try_loss(own[config.loss], name=config.loss, config=config)
        return guarded(own[config.loss], name=config.loss)
    if config.loss not in POLICY_TERMS:
        way_out = f"add it to LOSSES in {config.loss_module}" if own else "set loss_module"
        raise ConfigError(unknown_loss(config.loss, known=[*POLICY_TERMS, *own], way_out=way_out))
    return POLICY_TERMS[config.loss]
