import os
from pathlib import Path

import pytest
from accelerate import Accelerator, DistributedType

from agentrl.errors import ConfigError, UnavailableError
from agentrl.protocols import TrainStore
from agentrl.store import MemoryStore
from agentrl.train.distribution import check_distribution
from agentrl.train.session import open_session
from tiny_model import run_config, write_tiny_model


async def fresh_store() -> TrainStore:
    return MemoryStore()


def ignore(phase: str, step: int) -> None:
    """No one listens."""


def test_ranks_that_do_not_see_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    check_distribution(accelerator, num_wanted=1)
    with pytest.raises(ConfigError, match="num_processes = 2, but the number of trainer processes started is 1; give"):
        check_distribution(accelerator, num_wanted=2)
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ConfigError, match="2 trainer processes were launched, but Accelerate sees 1"):
        check_distribution(accelerator, num_wanted=1)


def test_a_distribution_the_loop_cannot_guard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.MEGATRON_LM)

    with pytest.raises(ConfigError, match=r"distributed_type MEGATRON_LM is not supported, because .* fsdp_version: 2"):
        check_distribution(accelerator, num_wanted=1)


def test_a_session_without_a_model_says_which_setting_is_missing(tmp_path: Path) -> None:
    config = run_config(tmp_path, model_dir=tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"model_name_or_path": None})})

    refused = pytest.raises(ConfigError, match="model_name_or_path is not set")
    with refused, open_session(config, open_store=fresh_store, sinks=list, report=ignore):
        pass


def test_a_second_trainer_of_the_run_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    config = run_config(tmp_path, model_dir=write_tiny_model(tmp_path / "start"))

    with open_session(config, open_store=fresh_store, sinks=list, report=ignore):
        being_written = config.run.run_dir / "checkpoints" / "step_1.tmp"
        being_written.mkdir(parents=True)
        refused = pytest.raises(UnavailableError, match=f"is being trained by process {os.getpid()}: wait for it")
        with refused, open_session(config, open_store=fresh_store, sinks=list, report=ignore):
            pass
        assert being_written.exists()

    with open_session(config, open_store=fresh_store, sinks=list, report=ignore):
        assert not being_written.exists()


def test_sinks_are_closed_and_half_written_checkpoints_removed(tmp_path: Path) -> None:
    class Sink:
        is_closed = False

        def write(self, step: int, metrics: object) -> None:
            raise AssertionError("nothing was trained")

        def close(self) -> None:
            self.is_closed = True

    config = run_config(tmp_path, model_dir=write_tiny_model(tmp_path / "start"))
    leftover = config.run.run_dir / "checkpoints" / "step_3.tmp"
    leftover.mkdir(parents=True)
    sink = Sink()

    with open_session(config, open_store=fresh_store, sinks=lambda: [sink], report=ignore) as session:
        assert session.first_step == 1
        assert not leftover.exists()
    assert sink.is_closed
