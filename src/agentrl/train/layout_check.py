"""Whether a model computes a token tree as it computes its rows, found out by trying, before it is sharded."""

from __future__ import annotations

import logging

import numpy as np
import torch

from agentrl.algo.layouts import LayoutRule, RowLayout
from agentrl.config.sections import RunConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.train.batch import build_pass
from agentrl.train.model import PolicyModule
from agentrl.train.tree_attention import attention_name
from agentrl.types import DBRecordData

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
PROBE_SHARED = 6
PROBE_LENGTHS = (9, 11, 10)


def layout_rule(policy: PolicyModule, *, config: RunConfig) -> LayoutRule:
    """The rule for this model. Costs a forward of a few tokens; call it before sharding.

    Raises ConfigError where `sequence_layout` is tree and the model cannot; `auto` is linear there, and says so once.
    """
    layout = config.train.sequence_layout
    if layout in {"auto", "tree"}:
        obstacle = _obstacle_of_ranks(config.train) or tree_obstacle(
            policy, attention_implementation=config.model.attention_implementation
        )
        if obstacle is not None and layout == "tree":
            raise ConfigError(f"sequence_layout = tree: {obstacle}; use linear")
        if obstacle is not None:
            log.warning("sequence_layout = auto: always linear, because %s", obstacle)
            layout = "linear"
    return LayoutRule.of_model(layout, hidden_size=policy.causal_lm.config.get_text_config().hidden_size)


def _obstacle_of_ranks(train: TrainConfig) -> str | None:
    if train.tp_size > 1 or train.cp_size > 1:
        return f"ranks that share a sequence (tp_size = {train.tp_size}, cp_size = {train.cp_size}) compute rows"
    return None


def tree_obstacle(policy: PolicyModule, *, attention_implementation: str) -> str | None:
    """Why this model cannot be given token trees; None if it can."""
    name = type(policy.causal_lm).__name__
    if attention_name(attention_implementation) is None:
        return f"attention_implementation = {attention_implementation} cannot compute trees, sdpa and eager can"
    dropout = getattr(policy.causal_lm.config.get_text_config(), "attention_dropout", 0.0)
    if dropout:
        return f"{name} has attention_dropout = {dropout:g}, which trees do not have"
    was_training = policy.training
    policy.eval()
    try:
        linear_N = _logprobs(policy, layout=RowLayout.LINEAR)
        try:
            tree_N = _logprobs(policy, layout=RowLayout.TREE)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:  # what its own code makes of the keywords
            return f"{name} does not take a tree ({error})"
    finally:
        policy.train(was_training)
    difference = (linear_N - tree_N).abs().max().item()
    if not difference <= TOLERANCE:
        return f"{name} computes a tree differently from its rows (log-probs differ by {difference:.2g})"
    return None


@torch.no_grad()
def _logprobs(policy: PolicyModule, *, layout: RowLayout) -> torch.Tensor:
    batch = build_pass(_probe_rows(vocabulary=policy.causal_lm.config.get_text_config().vocab_size), layout=layout)
    device = policy.causal_lm.device
    tree = None if batch.tree is None else batch.tree.to(device)
    logprobs_N: torch.Tensor = policy(
        batch.input_ids_BT.to(device), batch.predictors_N.to(device), batch.labels_N.to(device), tree
    )[0]
    return logprobs_N


def _probe_rows(*, vocabulary: int) -> list[DBRecordData]:
    return [_probe_row(index, length, vocabulary=vocabulary) for index, length in enumerate(PROBE_LENGTHS)]


def _probe_row(index: int, length: int, *, vocabulary: int) -> DBRecordData:
    """The same tokens up to PROBE_SHARED, others from there on."""
    tokens = np.arange(length) + np.where(np.arange(length) >= PROBE_SHARED, 7 * (index + 1), 0)
    mask = np.arange(length) > 0
    return DBRecordData(
        id=f"probe/s{index}",
        task_id="probe",
        record_id="probe",
        split="probe",
        token_ids=(tokens % vocabulary).astype(np.int32),
        loss_mask=mask,
        advantages=np.zeros(length, dtype=np.float32),
        behaviour_logprobs=None,
        policy_versions=np.full(length, -1, dtype=np.int32),
        reward=0.0,
    )
