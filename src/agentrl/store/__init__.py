"""The database both sides meet in: `open_store` for MongoDB and the embedded server, `MemoryStore` for unit tests."""

from agentrl.store.memory import MemoryStore
from agentrl.store.mongo import MongoStore, open_store

__all__ = ["MemoryStore", "MongoStore", "open_store"]
