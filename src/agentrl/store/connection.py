"""The connection to MongoDB or to the embedded server: options, bounded retries, the server's clock.

Two write concerns are used. `durable` waits for the journal (or a majority) and is the default. `relaxed` does not: for
heartbeats, and for header batches that a durable write and a read-back follow (turns.py). An acknowledged relaxed write
may be gone after a crash, and the driver may reconnect without an error, so nothing else may build on one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import AutoReconnect, BulkWriteError, ConfigurationError, InvalidURI, OperationFailure, PyMongoError
from pymongo.write_concern import WriteConcern

from agentrl.config.secrets import masked_uri
from agentrl.errors import ConfigError, DatabaseUnavailableError, StoreError, UnavailableError
from agentrl.store.documents import Document, utc_milliseconds
from agentrl.store.indexes import IMPORT, INDEXES
from agentrl.store.outage import SAY_EVERY_S, Outage

logger = logging.getLogger(__name__)
T = TypeVar("T")

DUPLICATE_KEY: Final = 11000
RESERVED_DATABASES: Final = frozenset({"admin", "local", "config"})
_RETRYABLE_CODES: Final = frozenset(
    {11600, 11602, 91, 189, 10107, 13435, 112, 24}
)  # shutdown, step-down, write conflict
_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 1.0
_CLOCK_REFRESH_S: Final = 30.0
_PROBE_TIMEOUT_S: Final = 5.0
_CODEC: Final[CodecOptions[Document]] = CodecOptions(tz_aware=True, tzinfo=UTC)

_EMBEDDED_OPTIONS: Final = "directConnection=true&retryWrites=false&maxIdleTimeMS=120000&journal=true"
_SERVER_OPTIONS: Final[Mapping[str, Any]] = {"retryWrites": True, "w": "majority", "journal": True}


def embedded_uri(port: int) -> str:
    """URI of an embedded server on loopback.

    The options are not optional: the embedded server slows down by an order of magnitude with retryable writes, loses
    acknowledged writes on kill -9 without the journal, and closes idle connections after 300 s. It also names itself as
    the only member of a replica set, which would lead clients around a proxy in front of it.
    """
    return f"mongodb://127.0.0.1:{port}/?{_EMBEDDED_OPTIONS}"


def redact_uri(uri: str) -> str:
    """The URI without its password, for messages."""
    return masked_uri(uri)


class _NoAnswerError(StoreError):
    """The time of an operation is up."""


class Database:
    """One run's database. Created synchronously; connects on first use, and belongs to that event loop."""

    def __init__(self, uri: str, *, name: str, timeout_s: float) -> None:
        self.uri = redact_uri(uri)
        self.name = name
        self.timeout_s = timeout_s
        given = {key.lower() for key, _ in parse_qsl(urlsplit(uri).query)}
        options = {key: value for key, value in _SERVER_OPTIONS.items() if key.lower() not in given}
        if "retrywrites" in given and "w" not in given:
            options.pop("w", None)
        timeout_ms = int(timeout_s * 1000)
        self._outage = Outage(f"the database at {self.uri.partition('?')[0]}")
        try:
            self._client: AsyncMongoClient[Document] = AsyncMongoClient(
                uri,
                serverSelectionTimeoutMS=min(timeout_ms, int(SAY_EVERY_S * 1000)),
                connectTimeoutMS=timeout_ms,
                socketTimeoutMS=timeout_ms,
                appname="agentrl",
                **options,
            )
        except (InvalidURI, ConfigurationError, ValueError) as error:  # ValueError: what it says of a port like "s3/x"
            raise ConfigError(f"db_connection_string = {self.uri}: {error}; write mongodb://host:port") from error
        self._database = self._client.get_database(name, codec_options=_CODEC)
        self.clock = ServerClock(self._read_server_time)

    def durable(self, collection: str) -> AsyncCollection[Document]:
        """The collection; writes wait for the journal."""
        return self._database.get_collection(collection)

    def relaxed(self, collection: str) -> AsyncCollection[Document]:
        """The collection; an acknowledged write may be lost if the server crashes."""
        return self._database.get_collection(collection, write_concern=WriteConcern(w=1))

    def raw(self, collection: str) -> AsyncCollection[RawBSONDocument]:
        """The collection, its documents as the bytes the server keeps."""
        options: Any = CodecOptions(document_class=RawBSONDocument)
        return cast("AsyncCollection[RawBSONDocument]", self.durable(collection).with_options(codec_options=options))

    async def prepare(self) -> None:
        """Check that the server answers and create the indexes. Raises UnavailableError."""
        await self.connect()
        await self.create_indexes()
        unfinished = await self.run("look for an import", lambda: self.durable(IMPORT).find_one({}))
        if unfinished is not None:
            raise UnavailableError(
                f"run {self.name} holds part of an import that broke off: repeat `agentrl db import` to complete it"
            )

    async def connect(self) -> None:
        """Check that the server answers. Raises DatabaseUnavailableError."""
        try:
            await self.run("connect", self.clock.refresh)
        except StoreError as error:
            raise DatabaseUnavailableError(
                f"no MongoDB answers at {self.uri} within {self.timeout_s:g} s ({error.__cause__}): start one with "
                f"`agentrl db`, or set db_connection_string to one that runs"
            ) from error

    async def create_indexes(self) -> None:
        """Create the indexes that are missing."""
        for collection, indexes in INDEXES.items():
            await self.run("create indexes", partial(self.durable(collection).create_indexes, list(indexes)))

    def outlast_outages(self, stop: asyncio.Event) -> None:
        """From now on, wait for a server that is away as long as it takes, or until `stop` is set.

        For the processes of a run, once they have connected: what they hold in memory is worth more than an early end.
        """
        self._outage.outlast(stop)

    async def run(self, what: str, operation: Callable[[], Awaitable[T]]) -> T:
        """Run an idempotent operation; repeat it with jitter while the server is away, `timeout_s` in all.

        Raises StoreError naming `what` once the time is up, and at once for anything repeating cannot mend. Where
        outages are outlasted, only a server that answers, but not to this operation, uses the time up.
        """
        num_unanswered = 0
        while True:
            try:
                result = await self._run_bounded(what, operation)
            except _NoAnswerError as error:
                if not self._outage.is_outlasted:
                    raise
                num_unanswered = num_unanswered + 1 if await self._answers() else 0
                if num_unanswered > 1:  # once is no proof: the server may have come back just now
                    raise
                self._outage.note(error.__cause__ or error)
                continue
            self._outage.end()
            return result

    async def _answers(self) -> bool:
        """Whether the server says hello."""
        try:
            async with asyncio.timeout(min(self.timeout_s, _PROBE_TIMEOUT_S)):
                await self._read_server_time()
        except (PyMongoError, TimeoutError):
            return False
        return True

    async def _run_bounded(self, what: str, operation: Callable[[], Awaitable[T]]) -> T:
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        backoff_s = _FIRST_BACKOFF_S
        last: Exception | None = None
        try:
            async with asyncio.timeout_at(deadline):
                while last is None or not self._outage.is_given_up:
                    try:
                        return await operation()
                    except (PyMongoError, BSONError) as error:
                        if not _is_retryable(error):
                            raise StoreError(f"{what} in {self.name} at {self.uri}: {error}") from error
                        last = error
                    self._outage.note(last)
                    self.clock.invalidate()
                    await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))  # jitter: all clients lost it at once
                    backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        except TimeoutError:
            pass
        message = f"{what} in {self.name} at {self.uri}: no answer within {self.timeout_s:g} s"
        raise _NoAnswerError(f"{message} ({last or 'the server is slow'})") from last

    async def insert_new(
        self, collection: AsyncCollection[Document], documents: Iterable[Mapping[str, Any]]
    ) -> set[Any]:
        """Insert documents; ids already there are left alone. Returns the ids that were there."""
        try:
            await collection.insert_many(cast("list[Document]", list(documents)), ordered=False)
        except BulkWriteError as error:
            return duplicate_ids(error)
        return set()

    async def stamp(self, moment: datetime | None) -> datetime:
        """The moment as BSON keeps it; None stands for now on the server."""
        return utc_milliseconds(await self.run("read the clock", self.clock.now) if moment is None else moment)

    async def server_time(self) -> datetime:
        """The server's clock, asked now."""
        return await self.run("read the clock", self._read_server_time)

    async def _read_server_time(self) -> datetime:
        reply = await self._client.admin.command("hello")
        moment: datetime = reply["localTime"]
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)

    async def list_databases(self) -> list[str]:
        """Names of all databases that may hold a run. Creates nothing, so it may be asked before `prepare`."""
        names = await self.run("list databases", self._client.list_database_names)
        return sorted(set(names) - RESERVED_DATABASES)

    async def list_collections(self) -> list[str]:
        """Names of the collections that are there."""
        return await self._database.list_collection_names()

    async def exists(self) -> bool:
        """Whether the server has a database of this name. Creates nothing."""
        return self.name in await self.list_databases()

    async def drop_collection(self, collection: str) -> None:
        """Remove a collection."""
        await self.run(f"drop {collection}", lambda: self._database.drop_collection(collection))

    async def drop(self) -> None:
        """Remove the database. The caller has verified a copy, or owns the database (tests)."""
        await self.run("drop the database", lambda: self._client.drop_database(self.name))

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()


class ServerClock:
    """The database server's time without a round trip per use: one measurement, carried on by the monotonic clock.

    Leases are written and judged by this clock alone, so a wrong wall clock on a worker does no harm. The error is at
    most half a round trip plus the drift of 30 s.
    """

    def __init__(self, read: Callable[[], Awaitable[datetime]]) -> None:
        self._read = read
        self._server_time: datetime | None = None
        self._measured_at = 0.0

    async def now(self) -> datetime:
        """Server time, UTC."""
        if self._server_time is None or time.monotonic() - self._measured_at > _CLOCK_REFRESH_S:
            await self.refresh()
        assert self._server_time is not None
        return self._server_time + timedelta(seconds=time.monotonic() - self._measured_at)

    async def refresh(self) -> None:
        """Measure again. The reply is taken as of the middle of the round trip."""
        sent = time.monotonic()
        server_time = await self._read()
        self._server_time, self._measured_at = server_time, (sent + time.monotonic()) / 2

    def invalidate(self) -> None:
        """Forget the measurement: the server may have changed."""
        self._server_time = None


def duplicate_ids(error: BulkWriteError) -> set[Any]:
    """Ids an unordered insert found already there. Re-raises for any other failure among them."""
    write_errors = error.details["writeErrors"]
    if error.details.get("writeConcernErrors") or any(entry["code"] != DUPLICATE_KEY for entry in write_errors):
        raise error
    return {entry["op"]["_id"] for entry in write_errors}


def _is_retryable(error: Exception) -> bool:
    if isinstance(error, AutoReconnect):
        return True
    if isinstance(error, BulkWriteError):
        entries = [*error.details.get("writeErrors", []), *error.details.get("writeConcernErrors", [])]
        return any(entry.get("code") in _RETRYABLE_CODES for entry in entries)
    return isinstance(error, OperationFailure) and error.code in _RETRYABLE_CODES
