"""The database both sides meet in: `open_store` for MongoDB and the embedded server, `MemoryStore` for unit tests."""

from agentrl.store.fleet_runs import MongoFleetRuns, open_fleet_runs
from agentrl.store.memory import MemoryStore
from agentrl.store.memory_fleet_runs import MemoryFleetRuns
from agentrl.store.mongo import MongoStore, open_store

__all__ = ["MemoryFleetRuns", "MemoryStore", "MongoFleetRuns", "MongoStore", "open_fleet_runs", "open_store"]
