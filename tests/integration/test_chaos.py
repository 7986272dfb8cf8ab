"""`agentrl chaos` with every real process on a tiny random model: at least eight sorts of faults, a clean end."""

import json
from pathlib import Path

import pytest

from launched_run import DEADLINE_S, agentrl, wait_until_nothing_is_left, write_run

pytestmark = pytest.mark.timeout(600)

KINDS = (
    "kill-sampler", "kill-engine", "kill-database", "kill-tool", "freeze-engine", "pause-trainer", "reset-connection",
    "blackhole-connection", "repeat-turn", "late-claim", "full-disk",
)  # fmt: skip
MAX_STEPS = 50


def test_a_run_under_chaos_finishes_with_a_clean_audit(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, max_steps=MAX_STEPS, lease_s=2, heartbeat_s=0.5, tasks_per_step=6, num_generations=3, num_samplers=2,
        save_steps=5,
    )  # fmt: skip
    flags = ("--config", "run.yaml", "--seed", "5", "--minutes", "6", "--faults", "9", "--kinds", ",".join(KINDS))
    with agentrl(folder, "chaos", "tiny", *flags) as chaos:
        out, _ = chaos.communicate(timeout=3 * DEADLINE_S)
    assert chaos.returncode == 0, out
    assert "the run finished and its audit is clean" in out
    wait_until_nothing_is_left(folder)
    journal = (folder / "output" / "tiny" / "chaos.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in journal]
    faults = [event for event in events if event["event"] == "fault"]
    assert len({fault["planned"]["kind"] for fault in faults}) >= 8, out
    assert [fault["planned"]["index"] for fault in faults] == [*range(len(faults))]
    assert len([event for event in events if event["event"] == "recovered"]) == len(faults)
    assert events[-1]["event"] == "audit"
    steps = (folder / "output" / "tiny" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in steps] == [*range(1, MAX_STEPS + 1)]
