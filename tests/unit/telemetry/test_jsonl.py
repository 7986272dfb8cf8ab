import json
from pathlib import Path

from agentrl.telemetry import JsonlSink


def steps_in(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["reward"]) for line in map(json.loads, path.read_text().splitlines())]


def test_each_step_is_one_line_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)

    sink.write(1, {"reward": 0.25, "loss": float("nan")})

    assert json.loads(path.read_text()) == {"step": 1, "reward": 0.25, "loss": None}
    sink.close()


def test_a_resume_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (1, 2, 3, 4):
        sink.write(step, {"reward": 0.1 * step})
    sink.close()

    resumed = JsonlSink(path)
    resumed.write(3, {"reward": 9.0})
    resumed.write(4, {"reward": 9.5})
    resumed.close()

    assert steps_in(path) == [(1, 0.1), (2, 0.2), (3, 9.0), (4, 9.5)]


def test_a_line_cut_off_by_a_kill_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')

    sink = JsonlSink(path)
    sink.write(2, {"reward": 0.75})
    sink.close()

    assert steps_in(path) == [(1, 0.5), (2, 0.75)]


def test_opening_a_file_without_writing_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward": 0.5}\n')

    JsonlSink(path).close()

    assert steps_in(path) == [(1, 0.5)]


def test_a_line_of_zeros_left_by_a_power_cut_does_not_stop_the_trainer_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "reward": 0.5}\n' + b"\0" * 20 + b"\n")

    sink = JsonlSink(path)
    sink.write(2, {"reward": 0.75})
    sink.close()

    assert steps_in(path) == [(1, 0.5), (2, 0.75)]
