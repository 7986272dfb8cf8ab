"""What a launch is given: files, model and tool servers, looked at before anything is started or written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import yaml

from agentrl.chat import ChatFormat
from agentrl.cli.agents import check_score_version
from agentrl.cli.calls import check_call_files
from agentrl.cli.examples import example_of, is_made_by_profile
from agentrl.cli.tasks import read_task_file
from agentrl.config import RunConfig
from agentrl.config.sections import TrainConfig
from agentrl.errors import ConfigError, UnavailableError
from agentrl.rollout.custom import sampler_of
from agentrl.scoring import load_scorers
from agentrl.tools import load_server_configs

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
STARTS_RANKS = ("FSDP", "DEEPSPEED", "MULTI_GPU")
"""Values of distributed_type with which `accelerate launch` starts num_processes processes; CPUs with gloo included."""


def check_inputs(config: RunConfig) -> None:
    """Refuse what would stop the run later. Raises UserError naming the setting and what is wrong with it."""
    _check_model(config)
    _check_launcher(config.train)
    if config.loss.loss_module is not None:
        from agentrl.algo.losses import policy_term  # loads torch: only where a file of the user's needs it

        policy_term(config.loss)
    _check_ranks(config)
    if config.is_supervised:
        return
    check_call_files(config)
    if config.journal.tool_journal != "replay":  # which needs no server
        load_server_configs(config.tools)
    if config.rollout.scorer_module is not None:
        load_scorers(config.rollout.scorer_module)
    check_score_version(config)
    sampler_of(config)
    if not is_made_by_profile(config, "train_file"):
        read_task_file(config, "train_file")
    if config.run.eval_file is not None and not is_made_by_profile(config, "eval_file"):
        read_task_file(config, "eval_file")


def _check_launcher(train: TrainConfig) -> None:
    """Of which `accelerate launch` would make a traceback, or one process where several are wanted."""
    path = train.accelerate_config
    if path is None:
        return
    if not path.is_file():
        raise ConfigError(f"accelerate_config = {path}: there is no such file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"accelerate_config = {path}: no YAML ({' '.join(str(error).split())})") from error
    kind = content.get("distributed_type") if isinstance(content, dict) else None
    if kind not in STARTS_RANKS and train.num_processes > 1:
        raise ConfigError(
            f"accelerate_config = {path}: with distributed_type = {kind} not num_processes = {train.num_processes} "
            f"but one is started; use {', '.join(STARTS_RANKS)} (assets/fsdp2_dst.yml)"
        )
    if kind == "DEEPSPEED" and find_spec("deepspeed") is None:
        raise ConfigError(
            f'accelerate_config = {path}: deepspeed is not installed; run pip install "agentrl[gpu]", or use '
            "assets/fsdp2_dst.yml"
        )


def _check_ranks(config: RunConfig) -> None:
    train = config.train
    if train.num_processes % (train.tp_size * train.cp_size):
        raise ConfigError(
            f"num_processes = {train.num_processes}: needs a multiple of tp_size x cp_size = {train.tp_size} x "
            f"{train.cp_size}"
        )


def _check_model(config: RunConfig) -> None:
    folder = config.model.model_name_or_path
    if folder is None:
        if example_of(config) is not None:
            return
        raise ConfigError("model_name_or_path is not set: give the folder of the policy model with its tokenizer")
    check_model_folder(folder)
    ChatFormat.load(folder, chat_template=config.model.chat_template, tool_call_parser=config.rollout.tool_call_parser)


def check_model_folder(folder: Path) -> None:
    """Refuse a folder without configuration or weights. Raises UnavailableError."""
    if not folder.is_dir():
        raise UnavailableError(f"model_name_or_path = {folder}: there is no such folder; give a local model directory")
    if not (folder / "config.json").is_file():
        raise UnavailableError(f"model_name_or_path = {folder}: it has no config.json; give a model directory")
    if not any(found for pattern in WEIGHTS for found in folder.glob(pattern)):
        raise UnavailableError(f"model_name_or_path = {folder}: it has no weights ({', '.join(WEIGHTS)})")
