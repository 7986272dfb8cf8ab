"""Weights for the inference services: run_dir/policy/v<version>, complete on disk before they are announced."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import AgentRLError
from agentrl.train.export import is_whole_model, remove_unfinished, write_model, written_beside
from agentrl.train.feed import StoreFeed
from agentrl.types import CanaryReference, PolicyVersion

log = logging.getLogger(__name__)

CHECK_S = 5.0
_VERSION_NAME = re.compile(r"v(\d+)")


class PolicyLostError(AgentRLError):
    """The folder of the newest policy version is no longer whole: engines that start cannot load it."""


class PolicyPublisher:
    """Writes, announces and prunes policy versions. Rank 0 only.

    A version that was announced is not written again: engines may have loaded it, and a replayed step makes the same
    weights. Unless it is the newest and its folder was lost, damaged or moved: no engine could start any more.
    """

    def __init__(self, feed: StoreFeed, *, run_dir: Path, tokenizer_source: Path, keep: int) -> None:
        """`keep`: folders of the newest versions that stay; version 0 always does."""
        self._feed = feed
        self._keep = keep
        self._policy_dir = (run_dir / "policy").resolve()
        self._tokenizer_source = tokenizer_source
        self._policy_dir.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self._policy_dir)
        latest = feed.call(lambda store: store.latest_policy())
        self._latest = -1 if latest is None else latest.version
        self._latest_path = None if latest is None else latest.path
        self._checked_at = float("-inf")  # monotonic seconds

    def is_announced(self, version: int) -> bool:
        """Whether the store has this version or a newer one, and engines can load the newest."""
        directory = self._policy_dir / f"v{version}"
        if version == self._latest and not (self._latest_path == str(directory) and is_whole_model(directory)):
            log.warning("policy version %d is not whole at %s: written again", version, self._latest_path)
            return False
        return version <= self._latest

    def check_newest(self) -> None:
        """Look, every few seconds at most, whether engines can load the newest version. Raises PolicyLostError."""
        if self._latest < 0 or time.monotonic() - self._checked_at < CHECK_S:
            return
        self._checked_at = time.monotonic()
        if not self.is_announced(self._latest):
            raise PolicyLostError(f"policy version {self._latest} is lost")

    def publish(
        self, version: int, *, causal_lm: Any, state: Mapping[str, torch.Tensor], canary: CanaryReference
    ) -> None:
        """Write the weights as a model directory, then announce it with its canaries, then prune old ones."""
        directory = self._policy_dir / f"v{version}"
        with written_beside(directory) as unfinished:
            write_model(unfinished, causal_lm=causal_lm, state=state, tokenizer_source=self._tokenizer_source)
        announced = PolicyVersion(version=version, path=str(directory), canary=canary)
        self._feed.call(lambda store: store.publish_policy(announced))
        self._latest, self._latest_path = version, str(directory)
        self._prune()

    def _prune(self) -> None:
        found = ((_VERSION_NAME.fullmatch(path.name), path) for path in self._policy_dir.iterdir())
        by_version = {int(match.group(1)): path for match, path in found if match}
        for version in sorted(by_version)[: -self._keep]:
            if version != 0:
                shutil.rmtree(by_version[version])
