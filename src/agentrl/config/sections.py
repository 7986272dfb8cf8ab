"""The settings, by section. Every field is a flag by its leaf name, so leaf names are unique across sections.

A field's `description` is its documentation: docs/configuration.md is generated from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.config.context import ContextConfig
from agentrl.config.costs import CostConfig as CostConfig
from agentrl.config.costs import JournalConfig as JournalConfig
from agentrl.config.credit import CreditConfig
from agentrl.config.inference_section import InferenceConfig as InferenceConfig
from agentrl.config.loss import LossConfig as LossConfig
from agentrl.config.model_section import ModelConfig as ModelConfig
from agentrl.config.reflection import ReflectionConfig as ReflectionConfig
from agentrl.config.reflection import check_episode_credit
from agentrl.config.scoring import ScoringConfig
from agentrl.config.section import Section as Section
from agentrl.config.train_section import TrainConfig as TrainConfig


class RunSection(Section):
    """Which run this is and where it keeps its files."""

    run_name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$",
        description="Name of the run = name of its database.",
    )
    fleet_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$",
        description="`agentrl sample` and `agentrl serve`: work for the runs of this fleet instead of one run "
        "(docs/fleet.md).",
    )
    profile: str | None = Field(None, description="Named set of defaults, e.g. `laptop` (assets/profiles/).")
    output_dir: Path = Field(Path("output"), description="Checkpoints, policies and metrics go to OUTPUT_DIR/RUN_NAME.")
    log_dir: Path = Field(Path("logs/as"), description="Log files of every process: LOG_DIR/<run>_<process>_<n>.log.")
    data_dir: Path = Field(Path("data"), description="Embedded database and cached laptop models.")
    seed: int = Field(
        0, ge=0, lt=2**32, description="Seed of task order, model initialisation, data order and of every model call."
    )
    hang_timeout_s: float = Field(
        180.0,
        gt=0,
        description="Seconds without a sign of life, or stopped, after which `agentrl launch` restarts a process.",
    )
    train_file: Path | None = Field(None, description="JSONL of training tasks.")
    eval_file: Path | None = Field(None, description="JSONL of held-out tasks.")

    @field_validator("run_name")
    @classmethod
    def _is_no_database_of_the_server(cls, run_name: str) -> str:
        if run_name.lower() in {"admin", "local", "config"}:
            raise ValueError(f"run_name = {run_name}: MongoDB keeps its own data under this name; choose another one")
        return run_name

    @property
    def run_dir(self) -> Path:
        """Folder of this run's files."""
        return self.output_dir / self.run_name


class StoreConfig(Section):
    """The database both sides meet in."""

    db_connection_string: str | None = Field(
        None, description="MongoDB URI. Empty: `agentrl db` starts an embedded server on loopback."
    )
    db_port: int = Field(27117, ge=1, le=65535, description="Port of the embedded database.")
    db_proxy_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port of a TCP proxy on this machine through which a launch reaches the embedded database; "
        "`agentrl chaos` sets it. Empty: directly.",
    )
    db_timeout_s: float = Field(
        20.0, gt=0, description="Seconds a database operation may take. Later on, one that is away is waited for."
    )
    lease_s: float = Field(30.0, gt=0, description="Seconds a claim lives without a heartbeat.")
    heartbeat_s: float = Field(5.0, gt=0, description="Seconds between heartbeats of workers, services and claims.")

    @model_validator(mode="after")
    def _check_claims_outlive_a_heartbeat(self) -> StoreConfig:
        if self.lease_s <= self.heartbeat_s:
            raise ValueError(
                f"lease_s = {self.lease_s:g}, heartbeat_s = {self.heartbeat_s:g}: claims would lapse between two "
                "heartbeats; lease_s should be several times heartbeat_s"
            )
        return self


class ToolsConfig(Section):
    """MCP servers."""

    mcp_config: Path | None = Field(None, description="JSON file with `mcpServers` (stdio commands or URLs).")
    tool_config_path: Path | None = Field(None, description="MiroRL's YAML tool file, beside or instead of mcp_config.")
    mcp_manager_url: str | None = Field(
        None, description="One endpoint: AgentDock's gateway if it ends in /mcpapi, else streamable HTTP, else SSE."
    )
    mcp_server_name: str = Field("all", description="Expose only this server's tools; `all` for every server.")
    mcp_auth_token: str | None = Field(None, description="Bearer token for HTTP servers. Prefer the environment.")
    tool_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds one tool call may take, retries included, where its server sets no `timeout_s`.",
    )
    tool_connect_timeout_s: float = Field(30.0, gt=0, description="Seconds a tool server may take to start or answer.")
    tool_sessions_per_server: int = Field(1, ge=1, description="Sessions (stdio: processes) per tool server.")
    tool_max_in_flight: int = Field(16, ge=1, description="Concurrent calls per session.")
    max_tool_result_chars: int = Field(20_000, ge=100, description="A longer tool result is cut, and says so.")


class RolloutConfig(ContextConfig, ScoringConfig):
    """How trajectories are made."""

    num_generations: int = Field(8, ge=1, description="Records per Task: the group size.")
    max_turns: int = Field(8, ge=1, description="Model calls per Record; of a meta-episode, per episode.")
    min_turns: int = Field(0, ge=0, description="Correct Records with fewer turns than this are not trained.")
    max_new_tokens: int = Field(64, ge=1, description="Tokens per completion.")
    max_prompt_tokens: int = Field(768, ge=1, description="Context at which a rollout stops with `context_limit`.")
    max_concurrent_samples_per_process: int = Field(96, ge=1, description="Records in flight per sampler process.")
    num_samplers: int = Field(1, ge=1, description="Sampler processes started by the launcher.")
    tool_call_parser: Literal[
        "hermes", "qwen", "qwen25", "qwen3_coder", "llama3", "pythonic", "deepseekv3", "deepseekv31", "mistral",
        "minicpm", "mirorl",
    ] = Field("hermes", description="Format of the model's tool calls (docs/tool_call_formats.md).")  # fmt: skip
    system_prompt: str | None = Field(None, description="System prompt of Tasks that bring none.")
    force_final_answer: bool = Field(
        False, description="At the turn or context limit, ask once more for the answer; room for it is kept free."
    )
    repetition_early_stop_times: int = Field(
        4, ge=-1, description="Stop a Record after this many identical completions; -1 never."
    )
    turn_timeout_s: float = Field(180.0, gt=0, description="Seconds one turn may take, its tool calls included.")
    record_timeout_s: float = Field(600.0, gt=0, description="Seconds one Record may take.")
    max_task_attempts: int = Field(20, ge=1, description="Claims of a Task before it is settled as failed.")
    resample_error_records: bool = Field(
        False,
        description="Sample a Record again that failed by infrastructure; the failed attempt is kept in Quarantine.",
    )
    max_record_attempts: int = Field(3, ge=1, description="Attempts at a Record with `resample_error_records`.")
    nudge_prompt: str = Field(
        "Call a tool, or give the final answer.", description="User message after a turn with neither call nor answer."
    )
    final_answer_prompt: str = Field(
        "This is the last turn. Give the final answer now.", description="User message of a forced final answer."
    )
    num_train_epochs: int | None = Field(
        None, ge=1, description="Passes over the training tasks; empty: as many as max_steps needs."
    )
    sampler_module: str | None = Field(
        None, description="Python file or dotted module with the AsyncSampler that makes the Records."
    )
    enable_sampling: bool = Field(True, description="Off: train on the rows that are in the database.")
    sync_sampling: bool = Field(False, description="Sample only at the newest policy version (max_staleness = 0).")

    @model_validator(mode="after")
    def _check_turns(self) -> RolloutConfig:
        last_turn = self.max_turns + self.force_final_answer
        if self.min_turns > last_turn:
            raise ValueError(
                f"min_turns = {self.min_turns}, max_turns = {self.max_turns}: no correct Record would be trained; "
                "lower min_turns or raise max_turns"
            )
        return self

    @model_validator(mode="after")
    def _check_final_answer(self) -> RolloutConfig:
        if self.force_final_answer and self.max_new_tokens >= self.max_prompt_tokens:
            raise ValueError(
                f"force_final_answer with max_new_tokens = {self.max_new_tokens}, max_prompt_tokens = "
                f"{self.max_prompt_tokens}: no room is left for a final answer; raise max_prompt_tokens"
            )
        return self


class AlgoConfig(CreditConfig):
    """From rewards to what is trained."""

    drop_zero_advantage: bool = Field(True, description="Records whose advantage is zero are not trained.")
    minimal_advantage: float | None = Field(
        None, description="Records with a smaller advantage are not trained; 0 leaves out the negative ones."
    )
    skip_non_positive_advantage: bool = Field(False, description="Train only Records with a positive advantage.")
    efficient_rewarding: bool = Field(
        False,
        description="Reward = score plus a shift within +-0.1 by number of turns: fewer are better for correct "
        "Records, more for wrong ones; the shifts of each half sum to zero.",
    )
    balance_sample: bool = Field(
        False,
        description="Train a random m + 1 wrong and m + 2 correct Records of a group, m being the smaller count.",
    )
    reserve_context_error_count: int | None = Field(
        None,
        ge=0,
        description="Train only so many, at random, of a group's Records that stopped at the context or turn limit; "
        "empty: all.",
    )
    max_staleness: int = Field(1, ge=0, description="Oldest token trained, in policy versions. A hard bound.")
    max_trained_count: int = Field(
        1,
        ge=1,
        description="Steps that may train a group. Above 1, a step that lacks new groups takes trained ones again, "
        "within max_staleness.",
    )
    retrained_interval: int = Field(1, ge=1, description="Steps from one training of a group to the next, at least.")
    score_version: str | None = Field(
        None,
        description="Train on the scores of this scorer (`agentcpm`), or of one version of it (`agentcpm @1a2b3c4d`), "
        "that stand beside the Records' own (docs/scoring.md); empty: each Record's own score.",
    )
    tasks_per_step: int = Field(12, ge=1, description="Groups per optimizer step.")

    @model_validator(mode="after")
    def _check_advantages_can_choose_records(self) -> AlgoConfig:
        if self.is_whitened_per_step and (self.minimal_advantage is not None or self.skip_non_positive_advantage):
            raise ValueError(
                f"advantage = {self.advantage} is known only in the optimizer step: minimal_advantage and "
                "skip_non_positive_advantage cannot choose Records by it; unset them"
            )
        return self

    @model_validator(mode="after")
    def _check_retraining_is_possible(self) -> AlgoConfig:
        if self.max_trained_count > 1 and self.retrained_interval > self.max_staleness:
            raise ValueError(
                f"max_trained_count = {self.max_trained_count}: {self.retrained_interval} steps later "
                f"(retrained_interval) every group is older than max_staleness = {self.max_staleness}; raise "
                "max_staleness or set max_trained_count = 1"
            )
        return self


class RunConfig(Section):
    """Everything. Built by `agentrl.config.load`."""

    run: RunSection = RunSection()
    store: StoreConfig = StoreConfig()
    model: ModelConfig = ModelConfig()
    inference: InferenceConfig = InferenceConfig()
    tools: ToolsConfig = ToolsConfig()
    rollout: RolloutConfig = RolloutConfig()
    reflection: ReflectionConfig = ReflectionConfig()
    journal: JournalConfig = JournalConfig()
    costs: CostConfig = CostConfig()
    algo: AlgoConfig = AlgoConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="before")
    @classmethod
    def _sync_sampling_means_no_staleness(cls, values: Any) -> Any:
        if isinstance(values, dict) and dict(values.get("rollout", {})).get("sync_sampling"):
            values = {**values, "algo": {**dict(values.get("algo", {})), "max_staleness": 0}}
        return values

    @model_validator(mode="after")
    def _check_partial_rollouts(self) -> RunConfig:
        is_partial = self.rollout.partial_rollout_tokens is not None or self.rollout.partial_rollout_s is not None
        if is_partial and self.algo.max_staleness == 0:
            raise ValueError(
                "partial_rollout_tokens and partial_rollout_s need max_staleness >= 1: a Record that goes on under the "
                "next policy version has tokens of the last one; raise max_staleness or leave them empty"
            )
        return self

    @model_validator(mode="after")
    def _check_episodes(self) -> RunConfig:
        # A sampler of the user's may score its turns on its own.
        if self.rollout.sampler_module is None or self.reflection.is_meta:
            check_episode_credit(self.reflection, credit=self.algo)
        return self

    @model_validator(mode="after")
    def _check_context(self) -> RunConfig:
        new, length = self.rollout.max_new_tokens, self.inference.context_length
        if new >= length:
            raise ValueError(
                f"max_new_tokens = {new}, context_length = {length}: no prompt would fit; raise context_length"
            )
        return self

    @model_validator(mode="after")
    def _check_ranks_fit_the_model(self) -> RunConfig:
        if self.train.tp_size > 1 and self.model.lora_rank:
            raise ValueError(
                f"tp_size = {self.train.tp_size}, lora_rank = {self.model.lora_rank}: layers with an adapter are not "
                "split; FSDP2 shards them, so set tp_size = 1 or lora_rank = 0"
            )
        if self.train.cp_size > 1 and self.model.attention_implementation != "sdpa":
            raise ValueError(
                f"cp_size = {self.train.cp_size}, attention_implementation = "
                f'"{self.model.attention_implementation}": context parallelism computes its own attention with sdpa; '
                'set attention_implementation = "sdpa"'
            )
        return self

    @model_validator(mode="after")
    def _check_group_baseline(self) -> RunConfig:
        if self.rollout.num_generations < 2 and self.algo.needs_group:
            raise ValueError(
                f"num_generations = {self.rollout.num_generations}: a group baseline needs at least 2; "
                'raise it or set advantage = "none"'
            )
        return self

    @property
    def is_supervised(self) -> bool:
        """Whether steps train on rows that are in the database, instead of on groups that samplers settle."""
        return not self.rollout.enable_sampling or self.loss.loss == "CROSS_ENTROPY"
