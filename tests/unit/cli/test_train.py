from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.cli.train import record_loss_module
from agentrl.config.sections import LossConfig
from agentrl.errors import ConfigError
from agentrl.store import MemoryStore

OWN_LOSS = """
from agentrl.algo.losses import TokenTerms

def mine(tokens, config):
    ratios_N = tokens.log_ratio_N.exp()
    never_N = ratios_N < 0
    return TokenTerms(
        losses_N=-tokens.advantages_N * ratios_N, ratios_N=ratios_N.detach(), clipped_low_N=never_N,
        clipped_high_N=never_N,
    )

LOSSES = {"MINE": mine}
"""


async def test_the_run_knows_the_file_its_loss_comes_from_and_tells_when_it_changed(
    memory_store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "my_losses.py"
    path.write_text(OWN_LOSS)
    loss = LossConfig(loss="MINE", loss_module=path)
    await record_loss_module(memory_store, loss=loss)
    await record_loss_module(memory_store, loss=loss)
    first = (await memory_store.get_run() or {})["loss_module"]
    assert first["path"] == str(path)
    assert "changed" not in caplog.text

    path.write_text(OWN_LOSS + "# another day\n")
    await record_loss_module(memory_store, loss=loss)
    second = (await memory_store.get_run() or {})["loss_module"]
    assert second["sha256"] != first["sha256"]
    assert "its content changed" in caplog.text


async def test_a_file_without_the_loss_is_not_recorded(memory_store: MemoryStore, tmp_path: Path) -> None:
    path = tmp_path / "my_losses.py"
    path.write_text(OWN_LOSS)
    with pytest.raises(ConfigError, match="no such loss"):
        await record_loss_module(memory_store, loss=LossConfig(loss="THEIRS", loss_module=path))
    assert not await memory_store.get_run()
