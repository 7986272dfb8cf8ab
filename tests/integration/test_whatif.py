"""`agentrl whatif` on a run that was really trained, against a database and the files it left behind."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config import RunConfig
from agentrl.store import open_store
from tiny_model import write_tiny_model
from trained_run import run_training_on, settle_groups_in, tiny_run
from trainer_process import mongo_opener

OWN_LOSS = """
from agentrl.algo.losses.grpo import grpo
LOSSES = {"MINE": grpo}
"""


@pytest.fixture
def trained(tmp_path: Path, mongo_uri: str, database_name: str) -> RunConfig:
    """Six steps of a run named like its database, with the folders a launcher would know."""
    start = write_tiny_model(tmp_path / "start")

    async def settle() -> None:
        store = open_store(mongo_uri, database=database_name)
        await store.prepare()
        await settle_groups_in(store, 12, start=start)
        await store.close()

    asyncio.run(settle())
    config = tiny_run(
        tmp_path,
        start,
        run={"run_name": database_name},
        store={"db_connection_string": mongo_uri},
        loss={"epsilon": 0.05, "epsilon_higher": 0.0},
        train={"max_steps": 6, "save_steps": 6, "learning_rate": 3e-3},
    )
    run_training_on(config, mongo_opener(mongo_uri, database_name))
    (config.run.run_dir / "config.json").write_text(config.model_dump_json(exclude_unset=True))
    return config


def whatif(config: RunConfig, *arguments: str) -> int:
    uri = config.store.db_connection_string or ""
    place = ["--output_dir", str(config.run.output_dir), "--db_connection_string", uri]
    return main(["whatif", config.run.run_name, *arguments, *place])


def test_a_step_is_replayed_from_the_database_and_the_weights_on_disk(
    trained: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.run.run_dir.rglob("*")}
    losses = ["--loss", "GSPO,epsilon=0.0003,epsilon_higher=0.0001", "--loss", "CISPO"]
    assert whatif(trained, "6", "--json", *losses) == 0
    report = json.loads(capsys.readouterr().out)
    own, gspo, cispo = report["losses"]
    assert own["name"] == "GRPO (as trained)"
    assert own["loss"] == pytest.approx(report["recorded"]["loss"], rel=1e-4, abs=1e-6)
    assert own["grad_norm"] == pytest.approx(report["recorded"]["grad_norm"], rel=1e-4)
    assert own["clip_fraction"] == pytest.approx(report["recorded"]["clip_fraction"], abs=1e-4)
    assert report["weights"]["source"] == "published policy v5, exact"
    assert gspo["settings"]["epsilon"] == 0.0003
    assert cispo["settings"]["epsilon"] == 0.05, "what is not given is the run's"
    assert len(report["cosines"]) == 3
    assert before == {path: path.stat().st_mtime_ns for path in trained.run.run_dir.rglob("*")}, "it only reads"

    assert whatif(trained, "6", *losses) == 0
    shown = capsys.readouterr().out
    assert "the run itself logged loss" in shown
    assert "cosine between gradients" in shown


def test_a_step_whose_weights_are_gone_names_those_that_can_be_replayed(
    trained: RunConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert whatif(trained, "2") == 2, "the trainer keeps v0 and the newest four"
    assert "policy v1, whose weights are gone" in (problem := capsys.readouterr().err)
    assert "can be replayed: 1, 4, 5, 6" in problem

    assert whatif(trained, "2", "--policy", str(tmp_path / "start"), "--json") == 0
    assert "not those of the step" in json.loads(capsys.readouterr().out)["weights"]["source"]

    shutil.rmtree(trained.run.run_dir / "policy" / "v0")
    assert whatif(trained, "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["weights"]["source"] == "the start model, exact"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["9"], "has no step 9; its steps are 1 to 6"),
        (["6", "--loss", "GSPOO"], "did you mean GSPO"),
        (["6", "--loss", "GRPO,epsilonn=1"], "'epsilonn=1' is no option=value of a loss"),
        (["6", "--loss", "GRPO,epsilon=high"], 'epsilon = "high"'),
        (["6", "--loss", "CISPO,dual_clip=3"], "has no clipped surrogate"),
        (["six"], "needs a whole number"),
        (["9" * 20], "needs a whole number from 1, of 18 digits at most"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    trained: RunConfig, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert whatif(trained, *arguments) == 2
    problem = capsys.readouterr().err
    assert message in problem
    assert problem.count("\n") == 1


def test_the_loss_file_of_the_run_is_found_again(
    trained: RunConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path, database_name: str, mongo_uri: str
) -> None:
    module = tmp_path / "my_losses.py"
    module.write_text(OWN_LOSS)

    async def record() -> None:
        store = open_store(mongo_uri, database=database_name)
        await store.put_run({"loss_module": {"path": str(module), "sha256": "of another day"}})
        await store.close()

    asyncio.run(record())
    assert whatif(trained, "6", "--json", "--loss", "MINE") == 0
    shown = capsys.readouterr()
    own, mine = json.loads(shown.out)["losses"]
    assert mine["grad_norm"] == own["grad_norm"]
    assert "its content is not the one the run was trained with" in shown.err
