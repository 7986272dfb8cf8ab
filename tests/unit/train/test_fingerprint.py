import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from agentrl.train.fingerprint import weights_fingerprint
from tiny_model import write_tiny_model


def test_a_copy_has_the_same_fingerprint_and_trained_weights_another(tmp_path: Path) -> None:
    start = write_tiny_model(tmp_path / "start")
    copy = shutil.copytree(start, tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{}")  # no weights
    assert weights_fingerprint(copy) == weights_fingerprint(start)

    weights = load_file(copy / "model.safetensors")
    trained = {name: weight + 1e-5 * torch.ones_like(weight) for name, weight in weights.items()}
    save_file(trained, copy / "model.safetensors", metadata={"format": "pt"})
    assert weights_fingerprint(copy) != weights_fingerprint(start)


def test_a_file_shorter_than_the_samples_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    short = weights_fingerprint(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"y")
    assert weights_fingerprint(tmp_path) != short
