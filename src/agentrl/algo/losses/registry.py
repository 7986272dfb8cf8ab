"""Name of a loss (LossConfig.loss) -> its policy term. A new loss is one file, one line here, one test.

A loss that is not part of the package is one file of the user's with a dict `LOSSES` of the same form (`loss_module`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from agentrl.algo.losses.ce_gppo import ce_gppo
from agentrl.algo.losses.cispo import cispo
from agentrl.algo.losses.cross_entropy import cross_entropy
from agentrl.algo.losses.grpo import grpo
from agentrl.algo.losses.gspo import gspo
from agentrl.algo.losses.interface import PolicyTerm
from agentrl.algo.losses.minirl import minirl
from agentrl.algo.losses.reinforce import reinforce
from agentrl.config.loss import unknown_loss
from agentrl.config.sections import LossConfig
from agentrl.errors import ConfigError
from agentrl.user_modules import import_user_module

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
    """The loss a configuration names, built in or of its `loss_module`, whose file is run for it.

    Raises ConfigError in one line for a module that is not there, fails or defines no loss, and for an unknown name.
    """
    own = {} if config.loss_module is None else load_losses(config.loss_module)
    known = {**POLICY_TERMS, **own}
    if config.loss not in known:
        way_out = f"add it to LOSSES in {config.loss_module}" if own else "set loss_module"
        raise ConfigError(unknown_loss(config.loss, known=list(known), way_out=way_out))
    return known[config.loss]


def load_losses(path: Path) -> dict[str, PolicyTerm]:
    """`LOSSES` of a user's file. Raises ConfigError naming the file and what is wrong with it."""
    where = f"loss_module = {str(path)!r}"
    if path.suffix != ".py":
        raise ConfigError(f"{where}: no Python file; give a path that ends in .py")
    losses = getattr(import_user_module(str(path), setting="loss_module"), "LOSSES", None)
    if not isinstance(losses, dict) or not losses or not all(callable(term) for term in losses.values()):
        raise ConfigError(f'{where}: defines no losses; it needs LOSSES = {{"MY_LOSS": my_loss}} at its top level')
    if taken := sorted(losses.keys() & POLICY_TERMS.keys()):
        raise ConfigError(f"{where}: {taken[0]} is a built-in loss; give yours another name")
    return losses


def file_sha256(path: Path) -> str:
    """Fingerprint of a loss file, so that a run can say which one it trained with. Raises ConfigError if not there."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"loss_module = {path}: cannot be read ({error.strerror}); give a Python file") from error
