"""The scripts a user starts with: they are short, clean, and resolve to the configuration they promise."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    "grpo_example.sh", "minirl_example.sh", "mr_search_example.sh", "eval_example.sh", "tests/run.sh", ".ci/run",
    "assets/setup.sh",
]  # fmt: skip


def dry_run(script: str, *arguments: str) -> dict[str, dict[str, object]]:
    done = subprocess.run(
        [ROOT / script, *arguments, "--dry_run"],
        cwd=ROOT.parent,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    config: dict[str, dict[str, object]] = json.loads(done.stdout[done.stdout.index("{") :])
    return config


def test_all_scripts_pass_shellcheck_and_end_no_process_by_name():
    subprocess.run([ROOT / ".venv/bin/shellcheck", "-x", *SCRIPTS], cwd=ROOT, check=True, timeout=60)
    for script in SCRIPTS:
        text = (ROOT / script).read_text(encoding="utf-8")
        assert len(text.splitlines()) < 40, script
        assert "pkill" not in text
        assert "killall" not in text


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "assets/setup.sh"])
def test_scripts_can_be_executed(script):
    assert os.access(ROOT / script, os.X_OK)


def test_the_grpo_example_uses_the_laptop_profile_and_passes_flags_on():
    config = dry_run("grpo_example.sh", "my_run", "--max_steps", "7")
    assert config["run"]["run_name"] == "my_run"
    assert config["run"]["profile"] == "laptop"
    assert config["loss"]["loss"] == "GRPO"
    assert config["train"]["max_steps"] == 7
    assert dry_run("grpo_example.sh")["run"]["run_name"] == "demo"


def test_the_reflection_example_makes_three_attempts_with_credit_for_each():
    config = dry_run("mr_search_example.sh", "my_run")
    assert config["run"]["run_name"] == "my_run"
    assert config["run"]["profile"] == "mr_search_laptop"
    assert config["reflection"]["episodes"] == 3
    assert config["algo"]["advantage"] == "turn_rloo"


def test_the_minirl_example_selects_its_loss_by_the_names_users_know():
    config = dry_run("minirl_example.sh")
    assert config["loss"]["loss"] == "MINIRL"
    assert config["loss"]["aggregation"] == "seq_mean_token_sum"
    assert config["loss"]["strict_in_bound"] is True


def test_the_eval_example_takes_the_run():
    assert dry_run("eval_example.sh", "my_run")["run"]["run_name"] == "my_run"
