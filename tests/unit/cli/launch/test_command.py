"""A launch and the database it started."""

from pathlib import Path

import pytest

from agentrl.cli.launch.command import _connect_once
from agentrl.cli.launch.supervisor import Guard, Supervisor
from agentrl.config import RunConfig, RunSection
from agentrl.errors import UnavailableError


async def test_a_launch_never_works_in_a_database_that_another_one_started(tmp_path: Path, mongo_uri: str) -> None:
    config = RunConfig(run=RunSection(run_name="mine", data_dir=tmp_path))
    with pytest.raises(UnavailableError, match="the database of this launch does not answer at"):
        await _connect_once(config, uri=mongo_uri, supervisor=Supervisor(guard=Guard(lock_descriptors=[])))
