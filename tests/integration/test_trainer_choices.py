"""What a user chooses of the mathematics reaches the optimizer step: own losses, and advantages known only there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, UnavailableError
from agentrl.store import MemoryStore
from tiny_model import write_tiny_model
from trained_run import run_training, settle_groups, tiny_run

OWN_LOSS = """
from agentrl.algo.losses import LossConfig, Tokens, TokenTerms
from agentrl.algo.losses.reinforce import reinforce

def twice(tokens: Tokens, config: LossConfig) -> TokenTerms:
    terms = reinforce(tokens, config)
    return TokenTerms(
        losses_N=2.0 * terms.losses_N,
        ratios_N=terms.ratios_N,
        clipped_low_N=terms.clipped_low_N,
        clipped_high_N=terms.clipped_high_N,
    )

LOSSES = {"TWICE": twice}
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "start")


def test_a_loss_of_the_users_own_file_trains(tmp_path: Path, start: Path) -> None:
    module = tmp_path / "my_losses.py"
    module.write_text(OWN_LOSS)
    norms = {}
    for name, loss in (("REINFORCE", {}), ("TWICE", {"loss_module": str(module)})):
        store = MemoryStore()
        settle_groups(store, 2, start=start)
        config = tiny_run(tmp_path / name, start, train={"max_steps": 1}, loss={"loss": name, **loss})
        norms[name] = run_training(config, store).lines[0][1]["grad_norm"]
    assert norms["TWICE"] == pytest.approx(2 * norms["REINFORCE"], rel=1e-5)


def test_a_broken_loss_file_is_refused_before_anything_is_opened(tmp_path: Path, start: Path) -> None:
    module = tmp_path / "my_losses.py"
    module.write_text("1 / 0")
    config = tiny_run(tmp_path, start, loss={"loss": "MINE", "loss_module": str(module)})
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError"):
        run_training(config, MemoryStore())
    assert not config.run.run_dir.exists()


def test_reinforce_pp_whitens_the_returns_of_a_step(tmp_path: Path, start: Path) -> None:
    store = MemoryStore()
    settle_groups(store, 2, start=start, returns=(1.0, 0.0))
    config = tiny_run(tmp_path, start, train={"max_steps": 1}, algo={"advantage": "reinforce_plus_plus"})
    metrics = run_training(config, store).lines[0][1]
    assert 0.0 < metrics["return_mean"] < 1.0
    assert metrics["advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["grad_norm"] > 0


def test_a_step_in_which_all_returns_are_equal_is_not_made(tmp_path: Path, start: Path) -> None:
    store = MemoryStore()
    settle_groups(store, 2, start=start, returns=(1.0, 1.0))
    config = tiny_run(tmp_path, start, train={"max_steps": 1}, algo={"advantage": "reinforce_plus_plus"})
    with pytest.raises(UnavailableError, match="0 of tasks_per_step"):
        run_training(config, store)
    assert asyncio.run(store.list_steps()) == []
