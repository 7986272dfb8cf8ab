from pathlib import Path

import pytest

from agentrl.train.export import remove_unfinished, written_beside


def test_a_folder_appears_under_its_name_only_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "models" / "v1"
    with written_beside(target) as unfinished:
        (unfinished / "weights").write_text("new")
        assert not target.exists()

    assert (target / "weights").read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["v1"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "v1"
    with written_beside(target) as unfinished:
        (unfinished / "weights").write_text("old")

    def fail_half_way() -> None:
        with written_beside(target) as unfinished:
            (unfinished / "weights").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert (target / "weights").read_text() == "old"
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_writing_again_replaces_everything(tmp_path: Path) -> None:
    target = tmp_path / "v1"
    for name in ("a", "b"):
        with written_beside(target) as unfinished:
            (unfinished / name).write_text("x")

    assert [path.name for path in target.iterdir()] == ["b"]
