"""Which published weights are the same, so that one service may serve several runs at once.

Version 0 is the start model: runs of one model publish copies of it, so it is known by the content of its weight files.
A trained version is known by its folder: nobody else has it.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

_PATTERN = "*.safetensors"


class WeightIdentities:
    """Keys of weight folders: equal keys, equal weights. Folders that were read are remembered while unchanged."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int, int], ...], str] = {}

    async def key(self, path: str, *, version: int) -> str:
        """The key of policy `version` in `path`. A folder this machine cannot read is known by its path."""
        if version > 0:
            return path
        try:
            return await asyncio.to_thread(self._content_key, Path(path))
        except OSError:
            return path

    def _content_key(self, folder: Path) -> str:
        files = sorted(folder.glob(_PATTERN))
        if not files:
            return str(folder)
        states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        known = tuple(states)
        if known not in self._known:
            digest = hashlib.sha256()
            for file in files:
                digest.update(f"{file.name} {file.stat().st_size}\n".encode())
                with file.open("rb") as content:
                    digest.update(hashlib.file_digest(content, "sha256").digest())
            self._known[known] = digest.hexdigest()
        return self._known[known]
