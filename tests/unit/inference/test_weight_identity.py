from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.inference.weight_identity import WeightIdentities


def write(folder: Path, content: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


@pytest.fixture
def identities() -> WeightIdentities:
    return WeightIdentities()


async def test_start_models_are_the_same_if_their_files_are(identities: WeightIdentities, tmp_path: Path) -> None:
    one, copy = write(tmp_path / "one", b"weights"), write(tmp_path / "copy", b"weights")
    other = write(tmp_path / "other", b"WEIGHTS")
    keys = [await identities.key(path, version=0) for path in (one, copy, other)]
    assert keys[0] == keys[1] != keys[2]


async def test_a_folder_that_is_written_again_is_read_again(identities: WeightIdentities, tmp_path: Path) -> None:
    before = await identities.key(write(tmp_path / "one", b"weights"), version=0)
    assert await identities.key(write(tmp_path / "one", b"other weights"), version=0) != before


async def test_trained_weights_and_folders_that_cannot_be_read_are_known_by_their_path(
    identities: WeightIdentities, tmp_path: Path
) -> None:
    one, copy = write(tmp_path / "one", b"weights"), write(tmp_path / "copy", b"weights")
    assert [await identities.key(path, version=1) for path in (one, copy)] == [one, copy]
    assert await identities.key("not/here", version=0) == "not/here"
