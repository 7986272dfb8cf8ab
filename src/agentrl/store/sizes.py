"""How large a run is, collection by collection, and what sharing prompts saves: `agentrl db stats`."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.store.connection import Database
from agentrl.store.dispatch_documents import PROMPT, prompt_part_ids
from agentrl.store.indexes import DISPATCH, RECORD, TOKEN_PART
from agentrl.store.scan import Progress, collection_names, no_progress, read_all


@dataclass(slots=True)
class CollectionSize:
    """Documents of one collection and the TokenParts that belong to them; bytes as BSON, without indexes."""

    name: str
    num_documents: int = 0
    num_bytes: int = 0
    num_parts: int = 0
    part_bytes: int = 0


@dataclass(slots=True)
class RunSize:
    """What `measure` found. `prompt_*` are about prompts that are stored apart from their dispatches."""

    collections: dict[str, CollectionSize] = field(default_factory=dict)
    prompt_bytes_named: int = 0  # what the dispatches would hold if each had its own copy
    prompt_bytes_stored: int = 0

    @property
    def num_bytes(self) -> int:
        """All documents and parts."""
        return sum(size.num_bytes + size.part_bytes for size in self.collections.values())

    @property
    def num_trajectories(self) -> int:
        """Records."""
        return self.collections[RECORD].num_documents if RECORD in self.collections else 0

    @property
    def trajectory_bytes(self) -> int:
        """Records, their dispatches and the TokenParts of those."""
        sizes = [self.collections[name] for name in (RECORD, DISPATCH) if name in self.collections]
        return sum(size.num_bytes + size.part_bytes for size in sizes)

    @property
    def share_saved(self) -> float:
        """Bytes that shared prompts save, as a fraction of what trajectories would take without them."""
        saved = self.prompt_bytes_named - self.prompt_bytes_stored
        return saved / (self.trajectory_bytes + saved) if saved > 0 else 0.0


async def measure(database: Database, *, progress: Progress = no_progress) -> RunSize:
    """Read the whole database and add it up."""
    run = RunSize()
    for name in await collection_names(database):
        if name == TOKEN_PART:
            continue
        size = run.collections[name] = CollectionSize(name=name)
        async for document in read_all(database, name):
            size.num_documents += 1
            size.num_bytes += len(document.raw)
            if name == DISPATCH and prompt_part_ids(document):
                run.prompt_bytes_named += document["tokens"]["prompt"]["num_bytes"]
            progress(name, size.num_documents, size.num_bytes)
    await _add_parts(database, run, progress)
    return run


async def _add_parts(database: Database, run: RunSize, progress: Progress) -> None:
    num_parts = num_bytes = 0
    async for part in read_all(database, TOKEN_PART):
        owner = part["_id"].partition(":")[0]
        size = run.collections.setdefault(DISPATCH if owner == PROMPT else owner, CollectionSize(name=owner))
        size.num_parts += 1
        size.part_bytes += len(part.raw)
        if owner == PROMPT:
            run.prompt_bytes_stored += len(part.raw)
        num_parts, num_bytes = num_parts + 1, num_bytes + len(part.raw)
        progress(TOKEN_PART, num_parts, num_bytes)
