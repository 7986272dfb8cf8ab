"""Losses of a user's file (`loss_module`): they can neither spoil a step silently nor end it in a traceback.

    load_losses   the file is run, its LOSSES are read              ConfigError where it is no such file
    try_loss      the chosen loss is run once, on six made-up tokens  ConfigError before any work starts
    guarded       in every pass: on copies, its result is checked     TrainingError before the optimizer step

What a loss changes in place are its own copies, so metrics, masks and other losses never see it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from agentrl.algo.losses.interface import PolicyTerm, Tokens, TokenTerms, clamp_log_ratio
from agentrl.config.sections import LossConfig
from agentrl.errors import AgentRLError, ConfigError, TrainingError
from agentrl.user_modules import import_user_module, place_in_user_code

_FLAGS = ("clipped_low_N", "clipped_high_N")


class _BadTermsError(AgentRLError):
    """What is wrong with what a loss gave back."""


def load_losses(path: Path) -> dict[str, PolicyTerm]:
    """`LOSSES` of a user's file. Raises ConfigError naming the file and what is wrong with it."""
    where = f"loss_module = {str(path)!r}"
    if path.suffix != ".py":
        raise ConfigError(f"{where}: no Python file; give a path that ends in .py")
    losses = getattr(import_user_module(str(path), setting="loss_module"), "LOSSES", None)
    is_table = isinstance(losses, dict) and all(isinstance(name, str) and callable(losses[name]) for name in losses)
    if not is_table or not losses:
        raise ConfigError(f'{where}: defines no losses; it needs LOSSES = {{"MY_LOSS": my_loss}} at its top level')
    return dict(losses)


def file_sha256(path: Path) -> str:
    """Fingerprint of a loss file, so that a run can say which one it trained with. Raises ConfigError if not there."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"loss_module = {path}: cannot be read ({error.strerror}); give a Python file") from error


def guarded(term: PolicyTerm, *, name: str) -> PolicyTerm:
    """The loss on copies of its tokens, with its result checked: it raises TrainingError and nothing else."""

    def checked(tokens: Tokens, config: LossConfig) -> TokenTerms:
        try:
            return _run(term, tokens, config)
        except _BadTermsError as error:
            raise TrainingError(f"loss = {name}: {error}; the step was not made, weights are unchanged") from error

    return checked


def try_loss(term: PolicyTerm, *, name: str, config: LossConfig) -> None:
    """Run a loss on six made-up tokens. Raises ConfigError in one line if it could not train."""
    tokens = _made_up_tokens(config)
    try:
        terms = _run(term, tokens, config)
        if not bool(torch.isfinite(terms.losses_N).all()):
            raise _BadTermsError(f"losses_N is {terms.losses_N.tolist()} for log-ratios {tokens.log_ratio_N.tolist()}")
        (gradient_N,) = torch.autograd.grad(terms.losses_N.sum(), tokens.policy_N, allow_unused=True)
        if gradient_N is None:
            raise _BadTermsError("losses_N has no gradient to tokens.policy_N, so nothing would be learned")
        if not bool(torch.isfinite(gradient_N).all()):
            raise _BadTermsError(f"its gradient is {gradient_N.tolist()} for ratios near 1")
    except _BadTermsError as error:
        raise ConfigError(f"loss_module = {config.loss_module}, loss = {name}: {error}") from error


def _run(term: PolicyTerm, tokens: Tokens, config: LossConfig) -> TokenTerms:
    try:
        terms = term(_copied(tokens), config)
    except (Exception, SystemExit) as error:  # a user's code may raise anything; it is told in one line
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise _BadTermsError(f"it raised {what}{place_in_user_code(error)}") from error
    if not isinstance(terms, TokenTerms):
        raise _BadTermsError(f"it returned {type(terms).__name__} instead of TokenTerms")
    for field in ("losses_N", "ratios_N", *_FLAGS):
        _check_tensor(field, getattr(terms, field), like=tokens.policy_N)
    if tokens.policy_N.requires_grad and not terms.losses_N.requires_grad:
        raise _BadTermsError("losses_N has no gradient to tokens.policy_N (detached?), so nothing would be learned")
    return replace(terms, ratios_N=terms.ratios_N.detach())


def _check_tensor(field: str, values: object, *, like: Tensor) -> None:
    if not isinstance(values, Tensor):
        raise _BadTermsError(f"{field} is {type(values).__name__} instead of a tensor")
    if values.shape != like.shape:
        raise _BadTermsError(
            f"{field} has shape {list(values.shape)} instead of one number per token, {list(like.shape)}"
        )
    if values.device != like.device:
        raise _BadTermsError(f"{field} is on {values.device} instead of {like.device}")
    wanted = "bool" if field in _FLAGS else "float32 or float64"
    if str(values.dtype).removeprefix("torch.") not in wanted.split(" or "):
        raise _BadTermsError(f"{field} is {values.dtype} instead of {wanted}")


def _copied(tokens: Tokens) -> Tokens:
    """The same numbers and graph in tensors of their own."""
    return replace(
        tokens,
        policy_N=tokens.policy_N.clone(),
        old_N=tokens.old_N.clone(),
        behaviour_N=None if tokens.behaviour_N is None else tokens.behaviour_N.clone(),
        advantages_N=tokens.advantages_N.clone(),
        log_ratio_N=tokens.log_ratio_N.clone(),
        mask_N=tokens.mask_N.clone(),
        sequences_N=tokens.sequences_N.clone(),
    )


def _made_up_tokens(config: LossConfig) -> Tokens:
    """Two sequences of three tokens: ratios around 1, advantages of both signs, one token under the mask."""
    policy_N = torch.tensor([-1.0, -0.5, -2.0, -1.5, -0.1, 0.0], requires_grad=True)
    old_N = torch.tensor([-1.0, -0.6, -1.9, -1.5, -0.2, 0.0])
    return Tokens(
        policy_N=policy_N,
        old_N=old_N,
        behaviour_N=old_N.clone(),
        advantages_N=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.0]) * config.adv_scaling,
        log_ratio_N=clamp_log_ratio(policy_N - old_N),
        mask_N=torch.tensor([True, True, True, True, True, False]),
        sequences_N=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_sequences=2,
    )
