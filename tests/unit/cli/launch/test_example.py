import asyncio
import io
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from agentrl.cli.examples import EXAMPLES
from agentrl.cli.launch import example as module
from agentrl.cli.launch.example import insert_demonstrations, set_up_example, start_model_key
from agentrl.cli.launch.supervisor import Guard, Supervisor
from agentrl.config import RunConfig
from agentrl.config.load import load_config
from agentrl.store import MemoryStore


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(*flags: str) -> RunConfig:
    return load_config(profile=None, config_file=None, environ={}, argv_flags=flags)


def set_up(config: RunConfig) -> RunConfig:
    async def run() -> RunConfig:
        with closing(Guard(lock_descriptors=())) as guard:
            async with Supervisor(guard=guard) as supervisor:
                console = Console(file=io.StringIO())
                return await set_up_example(config, uri="mongodb://nowhere/", supervisor=supervisor, console=console)

    return asyncio.run(run())


def test_other_profiles_are_left_alone():
    assert set_up(load()) == load()
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("profile", EXAMPLES)
def test_a_cached_start_model_is_used_and_missing_problems_are_generated(profile):
    cached = Path("data") / "models" / f"laptop-{start_model_key(EXAMPLES[profile], seed=7)}"
    cached.mkdir(parents=True)
    config = set_up(load("--profile", profile, "--seed", "7"))
    assert config.model.model_name_or_path == cached
    for path in (config.run.train_file, config.run.eval_file):
        assert path is not None
        assert len(path.read_text().splitlines()) > 100


def test_a_users_own_files_are_neither_made_up_nor_overwritten():
    own = Path("own.jsonl")
    own.write_text("mine")
    set_up(load("--profile", "laptop", "--model_name_or_path", "m", "--train_file", "own.jsonl"))
    assert own.read_text() == "mine"
    assert Path("data/laptop/heldout.jsonl").is_file()
    typo = ("--train_file", "typo.jsonl", "--eval_file", "own.jsonl")
    set_up(load("--profile", "laptop", "--model_name_or_path", "m", *typo))
    assert not Path("typo.jsonl").exists()


def test_the_key_depends_on_the_example_the_seed_and_every_input(tmp_path, monkeypatch):
    laptop, reflection = EXAMPLES["laptop"], EXAMPLES["mr_search_laptop"]
    assert start_model_key(laptop, seed=0) == start_model_key(laptop, seed=0)
    assert (
        len({start_model_key(laptop, seed=0), start_model_key(laptop, seed=1), start_model_key(reflection, seed=0)})
        == 3
    )
    monkeypatch.setattr(module, "ASSETS_DIR", tmp_path)
    profile, builder = tmp_path / "profiles" / "laptop_start.yml", tmp_path / "laptop" / "build_start.py"
    profile.parent.mkdir()
    builder.parent.mkdir()
    keys = set()
    for content in [("a", "b"), ("a", "c"), ("d", "b")]:
        profile.write_text(content[0])
        builder.write_text(content[1])
        keys.add(start_model_key(replace(laptop, builder=builder), seed=0))
    assert len(keys) == 3


async def test_demonstrations_become_supervised_rows(tmp_path):
    path = tmp_path / "demonstrations.jsonl"
    rows = [{"id": f"d{i}", "token_ids": [1, 2, i], "weights": [0, 1, 8]} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = MemoryStore()
    await store.prepare()
    for _ in range(2):  # a set-up that was interrupted starts over
        await insert_demonstrations(store, path=path)
    assert await store.list_sequences(split="train") == ["d0", "d1", "d2"]
    (row,) = await store.load_sequences(["d2"])
    assert row.token_ids.tolist() == [1, 2, 2]
    assert row.loss_mask.tolist() == [False, True, True]
    assert row.advantages.tolist() == [0, 1, 8]
    assert row.behaviour_logprobs is None
    assert np.all(row.policy_versions == -1)
