from pathlib import Path

import pytest
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentrl.errors import ConfigError
from agentrl.train.trackers import TrackerSink, parse_trackers, tracker_arguments


def test_trackers_are_parsed_and_unknown_or_missing_ones_refused() -> None:
    assert parse_trackers("none") == []
    assert parse_trackers("tensorboard") == ["tensorboard"]
    with pytest.raises(ConfigError, match="report_to = 'tensorbord': unknown; choose from tensorboard"):
        parse_trackers("tensorbord")
    with pytest.raises(ConfigError, match="pip install swanlab"):
        parse_trackers("tensorboard, swanlab")


def test_metrics_reach_tensorboard_and_repeated_steps_replace_old_ones(tmp_path: Path) -> None:
    for first_step, reward in ((1, 0.25), (2, 0.5)):
        accelerator = Accelerator(cpu=True, **tracker_arguments(["tensorboard"], run_dir=tmp_path))
        sink = TrackerSink(accelerator, run_name="tiny", first_step=first_step)
        for step in range(first_step, 4):
            sink.write(step, {"reward": reward * step})
        sink.close()

    events = EventAccumulator(str(tmp_path / "trackers" / "tiny"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 1.0), (3, 1.5)]
