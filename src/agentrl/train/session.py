"""Opens everything a trainer process needs, and closes it again: accelerator, model, database, planner, sinks.

open_session: seeds -> Accelerator -> only trainer? -> newest checkpoint? -> weights -> head check -> sharding
-> optimizer state -> store feed -> rank 0 only: sinks and trackers, planner, publisher
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.utils import logging as transformers_logging

from agentrl.config.sections import RunConfig
from agentrl.errors import ConfigError
from agentrl.protocols import MetricSink, TrainStore
from agentrl.train._compat import allow_fsdp_on_cpu
from agentrl.train.checkpoint import Checkpoint, load_training_state, newest_checkpoint
from agentrl.train.export import model_state, remove_unfinished, unwrapped
from agentrl.train.feed import StoreFeed
from agentrl.train.forward import Learner
from agentrl.train.lock import only_trainer
from agentrl.train.lora import is_adapter_folder, merged_state
from agentrl.train.metrics import Report
from agentrl.train.model import PolicyModule, check_head, load_policy, prepare_torch
from agentrl.train.optimizer import build_optimizer
from agentrl.train.planner import StepPlanner, is_supervised
from agentrl.train.publish import PolicyPublisher
from agentrl.train.stability import StabilityWatch
from agentrl.train.trackers import TrackerSink, parse_trackers, tracker_arguments

FEED_TIMEOUT_FACTOR = 6  # opening is several store operations, each bounded by db_timeout_s
COLLECTIVE_MARGIN_S = 1800.0  # ranks wait in a collective while rank 0 waits for data, then writes weights


SUPPORTED_DISTRIBUTION = frozenset(
    {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP}
)


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
    feed: StoreFeed
    learner: Learner
    checkpoint: Checkpoint | None  # what this process started from; None: the start model
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
    accelerator = _start_accelerator(config)
    with ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(only_trainer(config.run.run_dir))
        checkpoint = _find_checkpoint(config)
        learner = _load_learner(config, accelerator=accelerator, checkpoint=checkpoint)
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
                num_ranks=accelerator.num_processes,
                report=report,
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
            feed=feed,
            learner=learner,
            checkpoint=checkpoint,
            rank_zero=rank_zero,
        )


def start_model_dir(config: RunConfig) -> Path:
    """The model directory the run starts from; tokenizer files are always copied from there."""
    if config.model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is not set: give the directory of the start model")
    return config.model.model_name_or_path


def checkpoints_dir(config: RunConfig) -> Path:
    """Where the run's checkpoints lie."""
    return config.run.run_dir / "checkpoints"


def _start_accelerator(config: RunConfig) -> Accelerator:
    prepare_torch(config)
    transformers_logging.disable_progress_bar()
    wait_s = config.train.data_timeout_s + COLLECTIVE_MARGIN_S
    plugin = _fsdp_plugin(config)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=plugin,
        mixed_precision="bf16" if config.model.bf16 else "no",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=wait_s))],
        **tracker_arguments(parse_trackers(config.train.report_to), run_dir=config.run.run_dir),
    )
    if plugin is not None:
        allow_fsdp_on_cpu(accelerator, plugin)
    check_distribution(accelerator)
    return accelerator


def _fsdp_plugin(config: RunConfig) -> FullyShardedDataParallelPlugin | None:
    """What the accelerate_config says about FSDP, with a precision of our own; None where it says nothing.

    Accelerate's bf16 policy would also reduce gradients and return log-probs in bfloat16: too coarse for ratios.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    compute_dtype = torch.bfloat16 if config.model.bf16 else None
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    return FullyShardedDataParallelPlugin(mixed_precision_policy=precision)


def check_distribution(accelerator: Accelerator) -> None:
    """Refuse launches in which ranks would not train together, or not as the loop assumes."""
    num_launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != num_launched:
        raise ConfigError(
            f"{num_launched} trainer processes were launched, but Accelerate sees {accelerator.num_processes}: each "
            "would train on its own. Check accelerate_config, and that every process has its device"
        )
    kind = accelerator.distributed_type
    is_fsdp1 = kind is DistributedType.FSDP and not accelerator.is_fsdp2
    if kind not in SUPPORTED_DISTRIBUTION or is_fsdp1:
        raise ConfigError(
            f"accelerate_config: distributed_type {kind.value}{' with fsdp_version 1' if is_fsdp1 else ''} is not "
            "supported, because the loop checks the gradient before the optimizer step and needs full state dicts; "
            "use FSDP with fsdp_version: 2 (assets/fsdp2_dst.yml) or plain data parallel"
        )


def _find_checkpoint(config: RunConfig) -> Checkpoint | None:
    checkpoint = newest_checkpoint(checkpoints_dir(config))
    if checkpoint is not None and not config.train.resume_from_checkpoint:
        raise ConfigError(
            f"resume_from_checkpoint = false, but {checkpoint.path} exists; choose another run_name or resume"
        )
    return checkpoint


def _load_learner(config: RunConfig, *, accelerator: Accelerator, checkpoint: Checkpoint | None) -> Learner:
    """The newest weights, sharded as Accelerate is configured to, with the optimizer state that belongs to them."""
    policy = _load_newest(config, checkpoint=checkpoint)
    if accelerator.is_main_process:
        check_head(policy)
    reference = None
    if config.loss.kl_coef > 0:
        plain = config.model_copy(update={"model": config.model.model_copy(update={"lora_rank": 0})})
        reference = load_policy(start_model_dir(config), config=plain, with_entropy=False)
        # Every rank holds all of it: it is never updated, and only runs forward.
        reference = accelerator.prepare_model(reference.requires_grad_(False).eval(), evaluation_mode=True)
    policy, optimizer = accelerator.prepare(policy, build_optimizer(policy, config.train))
    if checkpoint is not None:
        load_training_state(checkpoint, accelerator=accelerator, policy=policy, optimizer=optimizer)
    return Learner(
        accelerator,
        policy=policy,
        optimizer=optimizer,
        reference=reference,
        loss=config.loss,
        max_grad_norm=config.train.max_grad_norm,
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
