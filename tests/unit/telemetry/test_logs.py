import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.telemetry import setup_logging
from agentrl.telemetry.logs import mask_secrets


@pytest.fixture(autouse=True)
def root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_each_process_and_rank_has_its_file_with_utc_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")

    path = setup_logging("trainer", log_dir=tmp_path / "logs", run_name="demo")
    logging.getLogger("agentrl.train").info("step %d", 7)

    assert path == tmp_path / "logs" / "demo_trainer_3.log"
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO agentrl\.train: step 7\n"
    assert re.fullmatch(pattern, path.read_text())


def test_nothing_reaches_the_terminal_unless_verbose(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    setup_logging("sampler", log_dir=tmp_path, run_name="demo")
    logging.getLogger("x").warning("quiet")
    setup_logging("sampler", log_dir=tmp_path, run_name="demo", is_verbose=True)
    logging.getLogger("x").warning("loud")

    out, err = capfd.readouterr()
    assert out == ""
    assert "quiet" not in err
    assert "loud" in err


@pytest.mark.parametrize(
    "text",
    [
        "connecting to mongodb://user:{}@db:27017/run",
        "Authorization: Bearer {}",
        "api_key={}&x=1",
        '{{"mcp_auth_token": "{}"}}',
        "OPENAI_API_KEY: {}",
    ],
)
def test_secrets_are_masked_and_the_rest_is_kept(text: str) -> None:
    masked = mask_secrets(text.format("hunter2hunter2"))

    assert "hunter2" not in masked
    assert masked == text.format("***")


def test_secrets_in_arguments_and_tracebacks_are_masked(tmp_path: Path) -> None:
    path = setup_logging("trainer", log_dir=tmp_path, run_name="demo")
    try:
        raise ValueError("mongodb://u:hunter2@db failed")
    except ValueError:
        logging.getLogger("x").exception("uri %s", "mongodb://u:hunter2@db")

    assert "hunter2" not in path.read_text()
    assert path.read_text().count("mongodb://u:***@db") == 3
