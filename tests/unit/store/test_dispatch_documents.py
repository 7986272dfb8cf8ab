"""Calls survive the trip through their documents, and say nothing twice."""

from __future__ import annotations

import json
from dataclasses import replace

import bson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.store import codec
from agentrl.store.dispatch_documents import dispatch_from_document, turn_to_documents
from agentrl.types import Turn, TurnTokens, VersionSpan
from bson_trip import through_bson
from factories import make_record, make_turn

token = st.integers(0, 2**31 - 1)
turns = st.builds(
    lambda prompt, sampled, split: TurnTokens(
        parent_turn=-1,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(t for t, _ in sampled),
        logprobs=tuple(logprob for _, logprob in sampled),
        version_spans=(
            VersionSpan(version=1, start=0, end=split),
            VersionSpan(version=2, start=split, end=len(sampled)),
        ),
        finish_reason="stop",
    ),
    st.lists(token, max_size=20),
    st.lists(st.tuples(token, st.floats(max_value=0, width=32)), max_size=20),
    st.integers(0, 20),
)


@given(turns)
def test_tokens_of_a_turn_read_back_equal(tokens: TurnTokens) -> None:
    turn = make_turn()
    turn = Turn(model=replace(turn.model, tokens=tokens))
    (encoded,) = turn_to_documents(turn)
    assert dispatch_from_document(through_bson(encoded.document), parts=()) == turn.model


def test_a_turn_stores_only_its_own_tokens_under_the_id_of_its_model_call() -> None:
    record = make_record()
    turn = make_turn(record, prompt_ids=range(100), completion_ids=range(10), tool_results=("3",))
    model, tool = (encoded.document for encoded in turn_to_documents(turn))
    assert model["turn_id"] == tool["turn_id"] == turn.model.id
    assert len(model["payload"]["bytes"]) == 4 * 100 + 8 * 10
    assert "payload" not in tool
    assert {document["schema_version"] for document in (model, tool)} == {2}


def test_a_tool_call_says_only_what_its_ids_do_not() -> None:
    turn = make_turn(tool_results=("3",))
    model, tool = (encoded.document for encoded in turn_to_documents(turn))
    assert {"record_id", "task_id", "turn"} <= model.keys(), "people look for a Record's calls by these"
    assert not {"record_id", "task_id", "turn", "index", "error"} & tool.keys()
    assert dispatch_from_document(through_bson(tool), parts=()) == turn.tools[0]


@given(record_id=st.text(min_size=1), task_id=st.text(min_size=1), suffix=st.text(), number=st.integers(0, 99))
def test_calls_with_ids_of_any_form_read_back_equal(record_id, task_id, suffix, number) -> None:
    turn = make_turn(tool_results=("3",))
    strange = {"record_id": record_id, "task_id": task_id, "turn": number, "index": number}
    model = replace(turn.model, id=f"{record_id}/{suffix}", **{**strange, "index": 0})
    tool = replace(turn.tools[0], id=f"{model.id}/{suffix}", **strange)
    for call, encoded in zip((model, tool), turn_to_documents(Turn(model=model, tools=(tool,))), strict=True):
        assert dispatch_from_document(through_bson(encoded.document), parts=()) == call


def test_a_completion_of_one_policy_version_names_it_once() -> None:
    (encoded,) = turn_to_documents(make_turn())
    tokens = make_turn().model.tokens
    assert encoded.document["tokens"]["policy_version"] == tokens.version_spans[0].version
    assert "version_spans" not in encoded.document["tokens"]


def test_documents_of_the_first_schema_read_as_before() -> None:
    turn = make_turn(tool_results=("3",))
    for call, encoded in zip((turn.model, *turn.tools), turn_to_documents(turn), strict=True):
        spelled_out = {
            **encoded.document,
            "schema_version": 1,
            "record_id": call.record_id,
            "task_id": call.task_id,
            "turn": call.turn,
            "index": call.index,
            "error": None,
        }
        if call.tokens is not None:
            spans = [[span.version, span.start, span.end] for span in call.tokens.version_spans]
            tokens = {**encoded.document["tokens"], "version_spans": spans}
            spelled_out["tokens"] = {name: value for name, value in tokens.items() if name != "policy_version"}
            payload = encoded.document["payload"]
            spelled_out["payload"] = {**payload, "num_bytes": len(payload["bytes"])}
        assert dispatch_from_document(through_bson(spelled_out), parts=()) == call


@pytest.mark.parametrize("text", ["page " * 600_000, "é" * 700_000])
def test_a_reply_of_megabytes_moves_out_of_the_readable_part(text: str) -> None:
    turn = make_turn(tool_results=(text,))
    _, encoded = turn_to_documents(turn)
    assert "response" not in encoded.document
    assert len(bson.encode(encoded.document)) < codec.PART_BYTES + 10_000
    stored = through_bson(encoded.document)
    assert dispatch_from_document(stored, parts=()).response == {"content": text}


def test_an_incompressible_reply_beyond_the_document_limit_becomes_parts() -> None:
    noise = json.dumps([hash((k, "x")) for k in range(700_000)])
    _, encoded = turn_to_documents(make_turn(tool_results=(noise,)))
    assert len(encoded.parts) >= 1
    parts = [part["bytes"] for part in encoded.parts]
    stored = through_bson(encoded.document)
    assert dispatch_from_document(stored, parts=parts).response == {"content": noise}
