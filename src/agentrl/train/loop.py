"""The training loop, run by every process that `accelerate launch` starts.

                    samplers settle groups                                      engines load the version
                             |                                                            ^
    =========================|====================== database ============================|==================
                             v                                                            |           ^
    +-> 1 plan (rank 0) -> 2 load -> 3 forward, backward -> 4 clip, step -> 5 checkpoint -> 6 publish -> 7 commit -+
    |     by id, into the    each rank   exact weights        once            when due        version =    metrics |
    |     ledger first       its share   over all ranks                                       step                 |
    +--------------------------------------------------------------------------------------------------------------+

    waits for                            bounded by                     then
    1    tasks_per_step settled groups   data_timeout_s                 UnavailableError, on every rank
         which a spent budget ends early                                BudgetSpentError
    1-7  a database that is slow         db_timeout_s                   StoreError
    1-7  a database that is away         nothing                        goes on when it is back
    1-6  other ranks                     the process group's timeout    torch's error

What a kill leaves behind, by the phase it hit, and what the next start does (S3, L4):

    1-4  a plan in the ledger, no commit          newest checkpoint; every later plan in the ledger is replayed as it is
    5    `step_<n>.tmp`                           removed; as above
    6-7  a checkpoint whose step is not committed published and committed from the checkpoint, not repeated
    7    a commit the sinks were not told of      they are told again: a step they know is replaced

So the multiset of (sequence, step) and, in float32 on one CPU, every bit of the weights equal an uninterrupted run's.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from accelerate.utils import broadcast_object_list

from agentrl.algo.losses import policy_term
from agentrl.config.sections import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.protocols import MetricSink, TrainStore
from agentrl.train.batch import PassBatch, build_pass
from agentrl.train.canary import canary_reference
from agentrl.train.checkpoint import Checkpoint, checkpoint_path, prune_checkpoints, save_checkpoint
from agentrl.train.export import adapter_state, write_model, written_beside
from agentrl.train.lora import write_adapter
from agentrl.train.loss_inputs import StepSize
from agentrl.train.metrics import PhaseClock, Report
from agentrl.train.on_alarm import is_waited_for, may_go_on
from agentrl.train.optimizer import learning_rate_at
from agentrl.train.padding import widened
from agentrl.train.planner import StepPlan, is_supervised
from agentrl.train.publish import PolicyLostError
from agentrl.train.row_check import faults_for_model, first_faults, refuse_on_all_ranks
from agentrl.train.row_stats import RowStats
from agentrl.train.session import Session, checkpoints_dir, open_session, start_model_dir
from agentrl.train.whitening import whitened
from agentrl.types import Alarm, StepStatus, TrainStep

log = logging.getLogger(__name__)

PLANNED_METRICS = ("num_sequences", "num_tokens", "num_trained_tokens", "num_groups", "score", "reward")
"""Numbers of a step that its plan decides, so a replay repeats them exactly."""


def train(
    config: RunConfig,
    *,
    open_store: Callable[[], Awaitable[TrainStore]],
    sinks: Callable[[], Sequence[MetricSink]],
    report: Report = lambda phase, step: None,
) -> tuple[Alarm, ...]:
    """Train from the newest checkpoint (or the start model) to `max_steps`, then export run_dir/final.

    Returns the alarms that ended it before, with `on_alarm` stop or pause; none if the run is complete.
    `open_store` runs on a thread of its own in every process; `sinks` and `report` are only called on rank 0.
    Raises UserError for what the user can fix, TrainingError before a wrong update, StoreError if the database is lost.
    """
    policy_term(config.loss)  # an unknown loss is refused before anything is opened
    with open_session(config, open_store=open_store, sinks=sinks, report=report) as session:
        alarms = finish_interrupted_step(session)
        if config.train.on_alarm == "pause" and not may_go_on(session, step=session.first_step - 1, alarms=alarms):
            return alarms
        for step in range(session.first_step, config.train.max_steps + 1):
            alarms = train_step(session, step)
            if not may_go_on(session, step=step, alarms=alarms):
                return alarms
        export_final(session)
    return ()


def train_step(session: Session, step: int) -> tuple[Alarm, ...]:
    """One optimizer step, from plan to commit. Raises before the weights change, or returns its alarms."""
    clock = PhaseClock(step=step, report=session.report)
    with clock.phase("wait"):
        plan = broadcast_plan(session, step)
    with clock.phase("load"):
        passes, returns = whiten(session, load_passes(session, plan))
    size = StepSize(
        num_sequences=len(plan.sequences),
        num_trained_tokens=sum(sequence.num_trained_tokens for sequence in plan.sequences),
    )
    with clock.phase("forward_backward"):
        tally = session.learner.forward_backward(passes, size=size, policy_version=plan.entry.policy_version)
    learning_rate = learning_rate_at(step, session.config.train)
    with clock.phase("optimizer"):
        gradient_norm = session.learner.update(passes, size=size, learning_rate=learning_rate)
    metrics = {
        **plan.entry.metrics,
        **returns,
        **tally.metrics(),
        "grad_norm": gradient_norm,
        "lr": learning_rate,
        "num_tokens": float(sum(sequence.num_tokens for sequence in plan.sequences)),
        "num_sequences": float(len(plan.sequences)),
    }
    alarms = raise_alarms(session, plan.entry, metrics=metrics, rows=tally.rows)
    told = {**metrics, **{f"alarm_{alarm.name}": 1.0 for alarm in alarms}}
    finish_step(session, replace(plan.entry, alarms=alarms), metrics=told, clock=clock)
    return alarms


def load_passes(session: Session, plan: StepPlan) -> list[PassBatch]:
    """The passes of this rank. Raises TrainingError, on every rank, for rows that no rank could train right."""
    own = plan.passes[session.ranks.data_rank]
    rows = [session.feed.load(one.row_ids) for one in own]
    session.feed.forget_rows()
    find = partial(
        faults_for_model,
        is_supervised=is_supervised(session.config),
        vocabulary_size=session.policy.vocabulary_size,
        policy_version=plan.entry.policy_version,
    )
    refuse_on_all_ranks(first_faults(chain.from_iterable(rows), find=find))
    multiple = session.config.train.pad_to_multiple_of
    return [
        widened(build_pass(some, layout=one.layout), multiple=multiple) for some, one in zip(rows, own, strict=True)
    ]


def raise_alarms(
    session: Session, entry: TrainStep, *, metrics: Mapping[str, float], rows: Sequence[RowStats]
) -> tuple[Alarm, ...]:
    """What the stability watch says of a step, the same on every rank."""
    message: list[tuple[Alarm, ...]] = [()]
    if session.rank_zero is not None:
        message[0] = session.rank_zero.watch.alarms(entry, metrics=metrics, rows=rows)
    broadcast_object_list(message)
    return message[0]


def whiten(session: Session, passes: Sequence[PassBatch]) -> tuple[list[PassBatch], dict[str, float]]:
    """The passes as they are, or with returns turned into advantages where the advantage method leaves that to us."""
    if is_supervised(session.config) or not session.config.algo.is_whitened_per_step:
        return list(passes), {}
    accelerator = session.accelerator
    share = float(session.ranks.counts)  # of ranks with the same rows, one adds them
    return whitened(
        passes, sum_over_ranks=lambda sums: accelerator.reduce(sums.to(accelerator.device) * share, reduction="sum")
    )


def broadcast_plan(session: Session, step: int) -> StepPlan:
    """Rank 0 plans; every rank gets the plan, or raises what rank 0 raised.

    A policy folder that is lost meanwhile is written again by all ranks: without it no engine could start, and no group
    would ever come.
    """
    while isinstance(plan := _plan_of_rank_zero(session, step), PolicyLostError):
        publish(session, version=step - 1)
    if isinstance(plan, AgentRLError):
        raise plan
    if plan is None:
        raise AssertionError("rank 0 broadcast no plan")
    return plan


def _plan_of_rank_zero(session: Session, step: int) -> StepPlan | AgentRLError | None:
    message: list[StepPlan | AgentRLError | None] = [None]
    if session.rank_zero is not None:
        try:
            message[0] = session.rank_zero.planner.plan(step)
        except AgentRLError as error:
            message[0] = error
    broadcast_object_list(message)
    return message[0]


def finish_step(session: Session, entry: TrainStep, *, metrics: Mapping[str, float], clock: PhaseClock) -> None:
    """Make the updated weights durable and known, in this order: checkpoint, policy version, ledger, sinks."""
    config = session.config.train
    is_last = entry.step == config.max_steps
    is_due = is_last or entry.step % config.save_steps == 0 or is_waited_for(session, entry.alarms)
    path = checkpoint_path(checkpoints_dir(session.config), entry.step)
    if is_due:
        with clock.phase("checkpoint"):
            save_checkpoint(
                path,
                accelerator=session.accelerator,
                policy=session.learner.policy,
                optimizer=session.learner.optimizer,
                tokenizer_source=start_model_dir(session.config),
                start_fingerprint=session.start_fingerprint,
                step=entry.step,
                metrics={**metrics, **clock.metrics()},
                alarms=entry.alarms,
            )
            if session.accelerator.is_main_process:
                prune_checkpoints(path.parent, keep=config.save_total_limit)
    if is_due or not is_supervised(session.config):  # nobody samples from the versions between
        with clock.phase("publish"):
            publish(session, version=entry.step)
    commit(session, entry, metrics=metrics, clock=clock, checkpoint=str(path) if is_due else None)


def publish(session: Session, *, version: int) -> None:
    """Write and announce the current weights and their canaries, unless the store knows this version already."""
    known = [session.rank_zero is not None and session.rank_zero.publisher.is_announced(version)]
    if broadcast_object_list(known)[0]:
        return
    canary = canary_reference(session)
    weights = session.served_weights()
    if session.rank_zero is not None:
        session.rank_zero.publisher.publish(version, causal_lm=session.policy.causal_lm, state=weights, canary=canary)


def commit(
    session: Session, entry: TrainStep, *, metrics: Mapping[str, float], clock: PhaseClock, checkpoint: str | None
) -> None:
    """Close the ledger entry, then tell the sinks and the log. Only rank 0 does anything."""
    if session.rank_zero is None:
        return
    known = {**metrics, **clock.metrics()}
    committed = replace(entry, status=StepStatus.COMMITTED, metrics=known, checkpoint=checkpoint)
    with clock.phase("commit"):
        session.feed.call(lambda store: store.commit_step(committed))
    told = {**metrics, **clock.metrics()}
    tell_sinks(session, step=entry.step, metrics=told)
    if entry.step % session.config.train.logging_steps == 0:
        shown = " ".join(f"{name}={value:.4g}" for name, value in told.items())
        log.info("step %d/%d %s", entry.step, session.config.train.max_steps, shown)


def tell_sinks(session: Session, *, step: int, metrics: Mapping[str, float]) -> None:
    """The numbers of a step to every sink of rank 0."""
    for sink in () if session.rank_zero is None else session.rank_zero.sinks:
        sink.write(step, metrics)


def finish_interrupted_step(session: Session) -> tuple[Alarm, ...]:
    """Publish version 0 of a new run; finish the checkpoint's step where a kill left it unpublished, open or untold.

    Returns that step's alarms, on every rank.
    Raises ConfigError, before anything is published, for a checkpoint of another run.
    """
    checkpoint = session.checkpoint
    entry = None
    if session.rank_zero is not None and checkpoint is not None:
        entry = session.feed.call(lambda store: store.get_step(checkpoint.step))
        _check_same_run(checkpoint, entry=entry)
    publish(session, version=0 if checkpoint is None else checkpoint.step)
    alarms: list[tuple[Alarm, ...]] = [()]
    if checkpoint is not None and entry is not None:
        alarms[0] = _close_step_of(checkpoint, entry=entry, session=session)
    broadcast_object_list(alarms)
    return alarms[0]


def _check_same_run(checkpoint: Checkpoint, *, entry: TrainStep | None) -> None:
    """The ledger's step is the one the checkpoint was written after: it has the same rows, and so the same counts."""
    other = f"so it belongs to another run; choose another run_name, or move {checkpoint.path.parent} away"
    if entry is None:
        raise ConfigError(
            f"checkpoint {checkpoint.path}: step {checkpoint.step} is not in this database's ledger, {other}"
        )
    for name in PLANNED_METRICS:
        was, now = checkpoint.metrics.get(name), entry.metrics.get(name)
        if was is not None and now is not None and was != now:
            raise ConfigError(
                f"checkpoint {checkpoint.path}: it was written after a step with {name} = {was:g}, step "
                f"{checkpoint.step} of this database's ledger has {now:g}, {other}"
            )


def _close_step_of(checkpoint: Checkpoint, *, entry: TrainStep, session: Session) -> tuple[Alarm, ...]:
    if session.rank_zero is None:
        return ()
    if entry.status is not StepStatus.COMMITTED:
        clock = PhaseClock(step=checkpoint.step, report=session.report)
        entry = replace(entry, alarms=checkpoint.alarms)
        session.rank_zero.watch.remember(entry, metrics=checkpoint.metrics)
        commit(session, entry, metrics=checkpoint.metrics, clock=clock, checkpoint=str(checkpoint.path))
    else:
        tell_sinks(session, step=entry.step, metrics=entry.metrics)  # maybe a second time; they keep one
    return entry.alarms


def export_final(session: Session) -> None:
    """The trained model, for transformers and SGLang: run_dir/final; a LoRA adapter alone: run_dir/final_adapter."""
    weights = session.served_weights()
    if session.config.model.lora_rank:
        factors = adapter_state(session.accelerator, session.learner.policy)
        if session.accelerator.is_main_process:
            with written_beside(session.config.run.run_dir / "final_adapter") as directory:
                write_adapter(directory, causal_lm=session.policy.causal_lm, state=factors)
    if session.accelerator.is_main_process:
        with written_beside(session.config.run.run_dir / "final") as directory:
            write_model(
                directory,
                causal_lm=session.policy.causal_lm,
                state=weights,
                tokenizer_source=start_model_dir(session.config),
            )
    session.accelerator.wait_for_everyone()
