from pathlib import Path

import pytest

from agentrl.train import launcher

ONE_PROCESS = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_machines: 1\nuse_cpu: true\n"


@pytest.mark.parametrize(
    ("codes", "expected"), [((2, -15), 2), ((-15, 2), 2), ((2, 2), 2), ((1, -15), 1), ((-9,), 1), ((3,), 1)]
)
def test_a_setting_that_a_rank_refuses_is_told_from_a_crash(codes: tuple[int, ...], expected: int) -> None:
    assert launcher.exit_code(codes) == expected


@pytest.mark.parametrize(("ending", "expected"), [("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", 1), ("", 0)])
def test_one_process_ends_the_launcher_as_it_ended(tmp_path: Path, ending: str, expected: int) -> None:
    (tmp_path / "one.yml").write_text(ONE_PROCESS)
    (tmp_path / "rank.py").write_text(f"import os\n{ending}\n")
    given = ["--config_file", str(tmp_path / "one.yml"), "--num_processes", "1", str(tmp_path / "rank.py")]
    assert launcher.main(given) == expected
