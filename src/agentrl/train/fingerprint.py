"""A fingerprint of a model's weights that costs milliseconds: sizes of its files and samples of their bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHT_FILES = ("*.safetensors", "*.bin")
NUM_SAMPLES = 64
SAMPLE_BYTES = 4096


def weights_fingerprint(directory: Path) -> str:
    """SHA-256 of names, sizes and NUM_SAMPLES evenly spread pieces of every weight file; equal for equal copies.

    Any training changes nearly every weight, so nearly every piece.
    """
    digest = hashlib.sha256()
    for path in sorted(path for pattern in WEIGHT_FILES for path in directory.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for index in range(NUM_SAMPLES):
                file.seek(size * index // NUM_SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
