import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


PRINTABLE = st.characters(
    min_codepoint=33, max_codepoint=0x2FF, exclude_characters="\"'", exclude_categories=["C", "Z"]
)


@given(
    user=st.text("abc/@.%+-", max_size=8),
    password=st.text(PRINTABLE, max_size=30).map(lambda text: f"sEc{text}sEc"),
    around=st.sampled_from(
        ["no answer from {} within 5 s", "{}", '{{"uri": "{}", "mail": "a@b"}}', "at {} and http://h:1/v1"]
    ),
)
def test_no_part_of_a_password_in_an_address_is_logged_whatever_it_contains(user, password, around):
    address = f"mongodb://{user}:{{}}@h:1,i:2/db"
    assert mask_secrets(around.format(address.format(password))) == around.format(address.format("***"))


@pytest.mark.parametrize("text", ["http://h:30000/v1 for ann@example.org", "mongodb://h:1,i:2/?w=1", "12:30 me@x"])
def test_an_address_without_a_password_stays_as_it_is(text):
    assert mask_secrets(text) == text
