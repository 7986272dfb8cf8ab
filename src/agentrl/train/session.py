"""Opens everything a trainer process needs, and closes it again: accelerator, model, database, planner, sinks.

open_session: seeds -> Accelerator -> only trainer? -> newest checkpoint? -> weights -> head check -> sharding
-> optimizer state -> store feed -> rank 0 only: sinks and trackers, planner, publisher
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh

from agentrl.algo.layouts import LayoutRule
from agentrl.config.sections import RunConfig
from agentrl.errors import ConfigError, UnavailableError
from agentrl.protocols import MetricSink, TrainStore
from agentrl.train.checkpoint import Checkpoint, load_training_state, newest_checkpoint, readable
from agentrl.train.distribution import offload_policy, start_accelerator
from agentrl.train.export import model_state, remove_unfinished, unwrapped
from agentrl.train.feed import StoreFeed
from agentrl.train.fingerprint import weights_fingerprint
from agentrl.train.forward import Learner
from agentrl.train.gradients import Gradients, TorchGradients
from agentrl.train.layout_check import layout_rule
from agentrl.train.lock import only_trainer
from agentrl.train.lora import is_adapter_folder, merged_state
from agentrl.train.metrics import Report
from agentrl.train.model import PolicyModule, check_head, load_policy
from agentrl.train.optimizer import build_optimizer
from agentrl.train.parallel import Ranks, arrange_ranks, broadcast_parameters, shard_over_data_ranks, split_layers
from agentrl.train.planner import StepPlanner, is_supervised
from agentrl.train.publish import PolicyPublisher
from agentrl.train.stability import StabilityWatch
from agentrl.train.trackers import TrackerSink, parse_trackers
from agentrl.train.zero3 import ZeroGradients, asks_for_deepspeed, partition

FEED_TIMEOUT_FACTOR = 6  # opening is several store operations, each bounded by db_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankZero:
    """What only rank 0 has: it alone decides, announces and tells."""

    planner: StepPlanner
    publisher: PolicyPublisher
    watch: StabilityWatch
    sinks: tuple[MetricSink, ...]
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The parts of a running trainer, on this rank."""

    config: RunConfig
    accelerator: Accelerator
    ranks: Ranks
    feed: StoreFeed
    learner: Learner
    checkpoint: Checkpoint | None  # what this process started from; None: the start model
    start_fingerprint: str  # of the start model's weights
    rank_zero: RankZero | None

    @property
    def first_step(self) -> int:
        """The step after the checkpoint."""
        return 1 if self.checkpoint is None else self.checkpoint.step + 1

    @property
    def policy(self) -> PolicyModule:
        """The module inside Accelerate's wrappers."""
        return unwrapped(self.accelerator, self.learner.policy)

    def report(self, phase: str, step: int) -> None:
        """Sign of life; rank 0 passes it on."""
        if self.rank_zero is not None:
            self.rank_zero.report(phase, step)

    def served_weights(self) -> dict[str, torch.Tensor]:
        """Full weights, an adapter merged in, in the dtype engines run them in.

        Every rank must call it; only rank 0 gets the result.
        """
        state = model_state(self.accelerator, self.learner.policy)
        if self.config.model.lora_rank:
            state = merged_state(state, config=self.config.model)
        if not self.config.model.bf16:
            return state
        return {name: weight.to(torch.bfloat16) for name, weight in state.items()}


@contextmanager
def open_session(
    config: RunConfig,
    *,
    open_store: Callable[[], Awaitable[TrainStore]],
    sinks: Callable[[], Sequence[MetricSink]],
    report: Report,
) -> Iterator[Session]:
    """Everything opened in order, everything closed in reverse. Raises UserError for what the user can fix."""
    accelerator = start_accelerator(config)
    ranks = arrange_ranks(
        config.train,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        device_type=accelerator.device.type,
    )
    with ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(only_trainer(config.run.run_dir))
        start_fingerprint = weights_fingerprint(start_model_dir(config))
        checkpoint = _find_checkpoint(config, start_fingerprint=start_fingerprint)
        learner, rule = load_learner(config, accelerator=accelerator, ranks=ranks, checkpoint=checkpoint)
        timeout_s = FEED_TIMEOUT_FACTOR * config.store.db_timeout_s
        feed = stack.enter_context(StoreFeed(open_store, timeout_s=timeout_s))
        rank_zero = None
        if accelerator.is_main_process:
            opened = list(sinks())
            if parse_trackers(config.train.report_to):
                first_step = 1 if checkpoint is None else checkpoint.step  # that one is told again
                opened.append(TrackerSink(accelerator, run_name=config.run.run_name, first_step=first_step))
            for sink in opened:
                stack.enter_context(closing(sink))
            remove_unfinished(checkpoints_dir(config))
            publisher = PolicyPublisher(
                feed,
                run_dir=config.run.run_dir,
                tokenizer_source=start_model_dir(config),
                keep=config.train.policy_total_limit,
            )
            planner = StepPlanner(
                feed,
                config=config,
                num_ranks=ranks.num_data,
                report=report,
                rule=rule,
                check=publisher.check_newest,
            )
            rank_zero = RankZero(
                planner=planner,
                publisher=publisher,
                watch=StabilityWatch(feed, first_step=1 if checkpoint is None else checkpoint.step + 1),
                sinks=tuple(opened),
                report=report,
            )
        yield Session(
            config=config,
            accelerator=accelerator,
            ranks=ranks,
            feed=feed,
            learner=learner,
            checkpoint=checkpoint,
            start_fingerprint=start_fingerprint,
            rank_zero=rank_zero,
        )


def start_model_dir(config: RunConfig) -> Path:
    """The model directory the run starts from; tokenizer files are always copied from there.

    Raises ConfigError if it is not set, UnavailableError if there is no model.
    """
    directory = config.model.model_name_or_path
    if directory is None:
        raise ConfigError("model_name_or_path is not set: give the directory of the start model")
    if not (directory / "config.json").is_file():
        raise UnavailableError(f"model_name_or_path = {directory}: no config.json there; give a local model directory")
    return directory


def checkpoints_dir(config: RunConfig) -> Path:
    """Where the run's checkpoints lie."""
    return config.run.run_dir / "checkpoints"


def _find_checkpoint(config: RunConfig, *, start_fingerprint: str) -> Checkpoint | None:
    checkpoint = newest_checkpoint(checkpoints_dir(config))
    if checkpoint is None:
        return None
    if not config.train.resume_from_checkpoint:
        raise ConfigError(
            f"resume_from_checkpoint = false, but {checkpoint.path} exists; choose another run_name or resume"
        )
    if checkpoint.start_fingerprint not in {None, start_fingerprint}:
        raise ConfigError(
            f"model_name_or_path = {config.model.model_name_or_path} has other weights than the model that "
            f"{checkpoint.path} was trained from; set it back, or choose another run_name"
        )
    return checkpoint


def load_learner(
    config: RunConfig, *, accelerator: Accelerator, ranks: Ranks, checkpoint: Checkpoint | None
) -> tuple[Learner, LayoutRule]:
    """The newest weights, sharded as Accelerate is configured to, with the optimizer state that belongs to them.

    The rule is rank 0's, which plans for all.
    """
    with nullcontext() if checkpoint is None else readable(checkpoint, what="weights"):
        policy = _load_newest(config, checkpoint=checkpoint)
    rule = LayoutRule()
    if accelerator.is_main_process:
        check_head(policy)
        rule = layout_rule(policy, config=config)
    reference = _load_reference(config) if config.loss.kl_coef > 0 else None
    if ranks.context is not None:
        policy.split_positions(ranks.context)
        if reference is not None:
            reference.split_positions(ranks.context)
    if reference is not None:
        # Every rank holds all of it: it is never updated, and only runs forward.
        reference = accelerator.prepare_model(reference, evaluation_mode=True)
    policy, optimizer, gradients = _prepare(policy, config=config, accelerator=accelerator, ranks=ranks)
    if checkpoint is not None:
        load_training_state(checkpoint, accelerator=accelerator, policy=policy, optimizer=optimizer)
    learner = Learner(
        accelerator,
        policy=policy,
        optimizer=optimizer,
        reference=reference,
        loss=config.loss,
        gradients=gradients,
        ranks=ranks,
    )
    return learner, rule


def _prepare(
    policy: PolicyModule, *, config: RunConfig, accelerator: Accelerator, ranks: Ranks
) -> tuple[PolicyModule, torch.optim.Optimizer, Gradients]:
    """Shard the policy over the ranks, by DeepSpeed, tensor parallel beside FSDP2, or as Accelerate is configured."""
    if asks_for_deepspeed():
        engine = partition(policy, optimizer=build_optimizer(policy, config.train), config=config)
        return engine, engine.optimizer, ZeroGradients(engine)
    if ranks.mesh is None:
        policy, optimizer = accelerator.prepare(policy, build_optimizer(policy, config.train))
    else:
        _split(policy, config=config, accelerator=accelerator, mesh=ranks.mesh)
        optimizer = accelerator.prepare_optimizer(build_optimizer(policy, config.train))
    gradients = TorchGradients(
        accelerator, policy=policy, optimizer=optimizer, ranks=ranks, max_norm=config.train.max_grad_norm
    )
    return policy, optimizer, gradients


def _load_reference(config: RunConfig) -> PolicyModule:
    """The start model, frozen and without an adapter."""
    plain = config.model_copy(update={"model": config.model.model_copy(update={"lora_rank": 0})})
    reference = load_policy(start_model_dir(config), config=plain, with_entropy=False)
    return reference.requires_grad_(False).eval()


def _split(policy: PolicyModule, *, config: RunConfig, accelerator: Accelerator, mesh: DeviceMesh) -> None:
    """Tensor parallel layers under FSDP2, in place. Accelerate 1.15 does either, not both (train/parallel.py)."""
    policy.to(accelerator.device)
    broadcast_parameters(policy)
    split_layers(policy.causal_lm, mesh=mesh["tensor"])
    shard_over_data_ranks(
        policy,
        mesh=mesh["shard"],
        compute_dtype=torch.bfloat16 if config.model.bf16 else None,
        offload=offload_policy(accelerator),
    )


def _load_newest(config: RunConfig, *, checkpoint: Checkpoint | None) -> PolicyModule:
    """The checkpoint's model; with LoRA the start model and the checkpoint's adapter."""
    with_entropy = not is_supervised(config)
    if config.model.lora_rank:
        adapter_dir = None if checkpoint is None else checkpoint.path
        return load_policy(start_model_dir(config), config=config, with_entropy=with_entropy, adapter_dir=adapter_dir)
    if checkpoint is not None and is_adapter_folder(checkpoint.path):
        raise ConfigError(
            f"lora_rank = 0, but {checkpoint.path} holds a LoRA adapter; set lora_rank and lora_alpha back to what the "
            "run was trained with, or choose another run_name"
        )
    model_dir = start_model_dir(config) if checkpoint is None else checkpoint.path
    return load_policy(model_dir, config=config, with_entropy=with_entropy)
