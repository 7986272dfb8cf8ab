"""Scores by version of their scorer, the judge calls made for them, and the verdicts judges gave before.

All three are insert-only: an id that is there already keeps its content, so whatever is repeated after a crash or a
lost reply finds its own work done. Judge calls are dispatches of the Record under the turn id "<record>/judge".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from agentrl.errors import StoreError
from agentrl.store import codec
from agentrl.store.connection import Database
from agentrl.store.dispatch_documents import call_to_documents, dispatch_from_document
from agentrl.store.documents import Document
from agentrl.store.indexes import DISPATCH, JUDGE_VERDICT, SCORE, TOKEN_PART
from agentrl.store.parts import load_parts
from agentrl.types import SCHEMA_VERSION, DispatchedSamplingTask, JudgeVerdict, Record, Score

_CHUNK: Final = 500


def judge_turn_id(record_id: str) -> str:
    """What the judge calls of a Record are found by."""
    return f"{record_id}/judge"


class Scores:
    """agentrl.protocols.ScoreStore on MongoDB."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find_verdicts(self, keys: Sequence[str]) -> dict[str, JudgeVerdict]:
        """See VerdictCache.find_verdicts."""
        found = await self._find(JUDGE_VERDICT, keys)
        return {
            document["_id"]: JudgeVerdict(key=document["_id"], verdict=document["verdict"], model=document["model"])
            for document in found
        }

    async def put_verdict(self, verdict: JudgeVerdict) -> JudgeVerdict:
        """See VerdictCache.put_verdict."""
        document = {
            "_id": verdict.key,
            "schema_version": SCHEMA_VERSION,
            "verdict": verdict.verdict,
            "model": verdict.model,
            "at": await self._database.stamp(None),
        }
        await self._insert(JUDGE_VERDICT, [document])
        return (await self.find_verdicts([verdict.key]))[verdict.key]

    async def put_calls(self, calls: Sequence[DispatchedSamplingTask]) -> None:
        """See ScoreStore.put_calls."""
        encoded = [call_to_documents(call, turn_id=judge_turn_id(call.record_id)) for call in calls]
        parts = [part for item in encoded for part in item.parts]
        if parts:
            await self._insert(TOKEN_PART, parts)
        if encoded:
            await self._insert(DISPATCH, [item.document for item in encoded])

    async def list_calls(self, record_id: str) -> list[DispatchedSamplingTask]:
        """See ScoreStore.list_calls."""
        dispatches = self._database.durable(DISPATCH)
        query = {"turn_id": judge_turn_id(record_id)}
        found = await self._database.run("list judge calls", lambda: dispatches.find(query).to_list())
        parts = await load_parts(self._database, collection=DISPATCH, documents=found)
        calls = [dispatch_from_document(document, parts=parts.get(document["_id"], ())) for document in found]
        return sorted(calls, key=lambda call: (call.started_at, call.id))

    async def put_score(self, score: Score) -> Score:
        """See ScoreStore.put_score."""
        document = score_to_document(score)
        document["scored_at"] = await self._database.stamp(score.scored_at)
        await self._insert(SCORE, [document])
        found = await self._find(SCORE, [score.id])
        if not found:
            raise StoreError(f"score {score.id} was written, but is not there")
        return score_from_document(found[0])

    async def find_scores(self, records: Sequence[Record], *, version: str) -> dict[str, Score]:
        """See ScoreStore.find_scores."""
        ids = [
            Score(record_id=record.id, attempt=record.attempt, version=version, scorer="", value=0.0).id
            for record in records
        ]
        return {score.record_id: score for score in map(score_from_document, await self._find(SCORE, ids))}

    async def count_scores(self) -> dict[str, int]:
        """See ScoreStore.count_scores."""
        scores = self._database.durable(SCORE)
        found = await self._database.run(
            "count scores", lambda: scores.find({}, {"version": 1}, batch_size=10_000).to_list()
        )
        counts: dict[str, int] = {}
        for document in found:
            counts[document["version"]] = counts.get(document["version"], 0) + 1
        return dict(sorted(counts.items()))

    async def _find(self, name: str, ids: Sequence[str]) -> list[Document]:
        collection = self._database.durable(name)
        found: list[Document] = []
        for start in range(0, len(ids), _CHUNK):
            query = {"_id": {"$in": list(ids[start : start + _CHUNK])}}
            found += await self._database.run(f"read {name}", partial(_to_list, collection, query))
        return found

    async def _insert(self, name: str, documents: Sequence[Document]) -> None:
        collection = self._database.durable(name)
        await self._database.run(f"write {name}", partial(self._database.insert_new, collection, documents))


async def _to_list(collection: Any, query: Document) -> list[Document]:
    found: list[Document] = await collection.find(query).to_list()
    return found


def score_to_document(score: Score) -> Document:
    """A Score; its id is made of the Record, its attempt and the version."""
    return {
        "_id": score.id,
        "schema_version": SCHEMA_VERSION,
        "record_id": score.record_id,
        "attempt": score.attempt,
        "version": score.version,
        "scorer": score.scorer,
        "value": codec.encode_json_value(score.value),
        "episode_values": list(score.episode_values),
        "call_ids": list(score.call_ids),
        "scored_at": score.scored_at,
    }


def score_from_document(document: Mapping[str, Any]) -> Score:
    """A Score."""
    return Score(
        record_id=document["record_id"],
        attempt=document["attempt"],
        version=document["version"],
        scorer=document["scorer"],
        value=codec.decode_json_value(document["value"]),
        episode_values=tuple(document.get("episode_values", ())),  # earlier versions scored meta-episodes as a whole
        call_ids=tuple(document["call_ids"]),
        scored_at=document["scored_at"],
    )
