"""`agentrl whatif RUN_NAME STEP --loss A --loss B`: a stored step under other losses. Reads only, also beside a run.

ledger entry of the step ─► its rows ─┐
weights before the step on disk ──────┴─► every loss: value, gradient, cosines ─► table or JSON
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from pydantic import ValidationError
from rich.console import Console

from agentrl.algo.trie import summarise_groups
from agentrl.cli.audit import stored_config
from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation, positive_int
from agentrl.cli.whatif_report import render_comparison
from agentrl.config import RunConfig
from agentrl.config.loss import is_used
from agentrl.config.sections import LossConfig
from agentrl.config.settings import settings_index
from agentrl.errors import ConfigError, UnavailableError
from agentrl.types import DBRecordData, TrainStep

if TYPE_CHECKING:
    from agentrl.train.kept_weights import KeptWeights
    from agentrl.train.whatif import Comparison, NamedLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """What the database knows of a step, and how its run was made."""

    config: RunConfig
    entry: TrainStep
    rows: tuple[DBRecordData, ...]
    replayable: tuple[int, ...]  # steps of the run whose weights are still on disk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the step, the losses, and for whom the report is."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    parser.add_argument("step", metavar="STEP", nargs="?", type=positive_int, help="the optimizer step to replay")
    parser.add_argument(
        "--loss",
        action="append",
        default=[],
        metavar="NAME[,OPTION=VALUE...]",
        help="a loss to compare, e.g. GSPO,epsilon=0.0003; options not given are the run's. Repeat for more",
    )
    parser.add_argument("--policy", type=Path, metavar="FOLDER", help="weights to use instead of those before the step")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(invocation: Invocation) -> int:
    """Replay, print."""
    from agentrl.train.kept_weights import KeptWeights

    arguments = invocation.arguments
    if arguments.step is None:
        raise ConfigError("STEP is missing: the number of the optimizer step to replay; see agentrl whatif --help")
    stored = uvloop.run(_read_step(invocation.config, step=arguments.step))
    if arguments.policy is None:
        weights = _weights_before(stored)
    else:
        source = f"--policy {arguments.policy}, not those of the step"
        weights = KeptWeights(version=stored.entry.policy_version, path=arguments.policy, source=source)
    losses = [
        named_loss("", base=stored.config.loss),
        *(named_loss(text, base=stored.config.loss) for text in arguments.loss),
    ]
    comparison = replay(stored, losses=losses, weights=weights)
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(stored, losses=losses, weights=weights, comparison=comparison), indent=2))
        sys.stdout.write("\n")
    else:
        recorded = {name: stored.entry.metrics[name] for name in ("loss", "grad_norm") if name in stored.entry.metrics}
        Console().print(
            render_comparison(
                comparison, step=stored.entry.step, num_rows=len(stored.rows), weights=weights.source, recorded=recorded
            )
        )
    return 0


async def _read_step(config: RunConfig, *, step: int) -> StoredStep:
    """Raises UnavailableError for a run or step that is not there, or whose rows are gone."""
    from agentrl.train.kept_weights import replayable_steps

    async with open_run_store(config, may_start=True, must_exist=True) as store:
        made_with = await stored_config(store, otherwise=config)
        made_with = made_with.model_copy(update={"run": config.run})  # where the files are is this machine's business
        recorded = (await store.get_run() or {}).get("loss_module")
        if recorded is not None:
            loss = made_with.loss.model_copy(update={"loss_module": _same_module(recorded)})
            made_with = made_with.model_copy(update={"loss": loss})
        known = [entry.step for entry in await store.list_steps()]
        entry = await store.get_step(step)
        if entry is None:
            there = f"its steps are {known[0]} to {known[-1]}" if known else "it has no steps yet"
            raise UnavailableError(f"run {config.run.run_name} has no step {step}; {there}")
        rows = await store.find_sequences(entry.sequence_ids)
    if len(rows) < len(entry.sequence_ids):
        missing = sorted(set(entry.sequence_ids) - {row.id for row in rows})
        raise UnavailableError(f"step {step}: {len(missing)} of its rows are not in the database, {missing[0]} first")
    replayable = tuple(replayable_steps(made_with, known))
    return StoredStep(config=made_with, entry=entry, rows=tuple(rows), replayable=replayable)


def _same_module(recorded: Mapping[str, str]) -> Path:
    """The loss file the run was made with; says so if its content is another one now."""
    from agentrl.algo.losses import file_sha256

    path = Path(recorded["path"])
    if file_sha256(path) != recorded["sha256"]:
        sys.stderr.write(f"loss_module = {path}: its content is not the one the run was trained with\n")
    return path


def _weights_before(stored: StoredStep) -> KeptWeights:
    from agentrl.train.kept_weights import find_weights

    version = stored.entry.policy_version
    weights = find_weights(stored.config, version=version)
    if weights is None:
        steps = ", ".join(map(str, stored.replayable)) or "none"
        raise UnavailableError(
            f"step {stored.entry.step} trained policy v{version}, whose weights are gone from "
            f"{stored.config.run.run_dir}; steps that can be replayed: {steps}. Or give weights with --policy FOLDER"
        )
    return weights


def named_loss(text: str, *, base: LossConfig) -> NamedLoss:
    """The loss of one `--loss`; an empty text is the run's own loss. What it leaves out, and uses, is as in the run.

    Raises ConfigError naming the option that is unknown or wrong.
    """
    from agentrl.algo.losses import policy_term
    from agentrl.train.whatif import NamedLoss

    if not text:
        return NamedLoss(name=f"{base.loss} (as trained)", config=base)
    name, *options = [part.strip() for part in text.split(",")]
    values: dict[str, Any] = {"loss": name}
    index = settings_index()
    for option in options:
        key, has_value, value = option.partition("=")
        if not has_value or key not in LossConfig.model_fields or key == "loss":
            raise ConfigError(
                f"--loss {text}: {option!r} is no option=value of a loss; see docs/configuration.md, loss"
            )
        values[key] = index[key].parse(value, origin=f"--loss {text}: {key}")
    wanted = {**base.model_dump(), **values}
    inherited = {key: value for key, value in wanted.items() if key in values or is_used(key, wanted)}
    try:
        config = LossConfig.model_validate(inherited)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--loss {text}: {message}") from None
    policy_term(config)
    return NamedLoss(name=text, config=config)


def replay(stored: StoredStep, *, losses: Sequence[NamedLoss], weights: KeptWeights) -> Comparison:
    """The comparison, on this machine's GPU if there is one."""
    import torch
    from transformers.utils import logging as transformers_logging

    from agentrl.train.batch import build_pass
    from agentrl.train.layout_check import layout_rule
    from agentrl.train.loss_inputs import StepSize
    from agentrl.train.model import load_policy, prepare_torch
    from agentrl.train.passes import forward_passes
    from agentrl.train.row_check import faults_for_model, first_faults
    from agentrl.train.session import start_model_dir
    from agentrl.train.whatif import compare_losses
    from agentrl.train.whitening import whitened

    config = stored.config
    prepare_torch(config)
    transformers_logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_policy(weights.path, config=config, with_entropy=True)
    rule = layout_rule(policy, config=config)
    policy = policy.to(device)
    reference = None
    if any(named.config.kl_coef > 0 for named in losses):
        reference = load_policy(start_model_dir(config), config=config, with_entropy=False).to(device)
    find = partial(
        faults_for_model,
        is_supervised=config.is_supervised,
        vocabulary_size=policy.vocabulary_size,
        policy_version=stored.entry.policy_version,
    )
    if faults := first_faults(stored.rows, find=find):
        raise UnavailableError(f"step {stored.entry.step} cannot be replayed with {weights.source}: {faults[0]}")
    by_id = {row.id: row for row in stored.rows}
    groups = summarise_groups(stored.rows)
    (planned,) = forward_passes(groups, num_ranks=1, max_tokens=config.train.max_tokens, rule=rule)
    passes = [build_pass([by_id[row_id] for row_id in one.row_ids], layout=one.layout) for one in planned]
    if config.algo.is_whitened_per_step and not config.is_supervised:
        passes, _ = whitened(passes, sum_over_ranks=lambda sums: sums)
    return compare_losses(
        [batch.to(device) for batch in passes],
        losses=losses,
        policy=policy,
        reference=reference,
        size=StepSize(
            num_sequences=len(stored.rows),
            num_trained_tokens=sum(int(row.loss_mask.sum()) for row in stored.rows),
        ),
        policy_version=stored.entry.policy_version,
    )


def as_json(
    stored: StoredStep, *, losses: Sequence[NamedLoss], weights: KeptWeights, comparison: Comparison
) -> dict[str, Any]:
    """The report for programs."""
    return {
        "run_name": stored.config.run.run_name,
        "step": stored.entry.step,
        "policy_version": stored.entry.policy_version,
        "weights": {"path": str(weights.path), "source": weights.source},
        "num_rows": len(stored.rows),
        "recorded": _finite(stored.entry.metrics),
        "losses": [
            {**_finite(asdict(found)), "settings": named.config.model_dump(mode="json")}
            for named, found in zip(losses, comparison.replays, strict=True)
        ],
        "cosines": [list(row) for row in comparison.cosines],
    }


def _finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has neither NaN nor infinities: they are null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in numbers.items()
    }
