from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import EngineError, EngineErrorKind
from agentrl.inference.replies import (
    PromptScore,
    check_input_ids,
    error_message,
    parse_prompt_score,
    parse_reply,
    parse_spans,
    status_error,
)
from agentrl.types import GenerateRequest, SamplingParams, VersionSpan

REQUEST = GenerateRequest(rid="r", input_ids=[1, 2, 3], params=SamplingParams(max_new_tokens=4), deadline_s=1)


def body(**meta: Any) -> dict[str, Any]:
    return {
        "output_ids": [7, 8, 9],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 9},
            "output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None], [0.0, 9, None]],
            "weight_version": "4",
            "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
            **meta,
        },
    }


def test_a_reply_across_an_update_has_a_span_per_version() -> None:
    reply = parse_reply(body(cached_tokens=2), request=REQUEST, service_id="s")
    assert reply.output_ids == (7, 8, 9)
    assert reply.logprobs == (-1.0, -2.0, 0.0)
    assert reply.version_spans == (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3))
    assert (reply.finish_reason, reply.service_id, reply.num_cached_tokens) == ("stop", "s", 2)


def test_servers_without_spans_give_one_of_their_only_version() -> None:
    answer = body()
    del answer["meta_info"]["weight_versions"]
    reply = parse_reply(answer, request=REQUEST, service_id="s")
    assert reply.version_spans == (VersionSpan(version=4, start=0, end=3),)


@pytest.mark.parametrize(
    "meta",
    [
        {"output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]]},
        {"output_token_logprobs": [[-1.0, 7, None], [-2.0, 5, None], [-1.0, 9, None]]},
        {"output_token_logprobs": [[math.nan, 7, None], [-2.0, 8, None], [-1.0, 9, None]]},
        {"output_token_logprobs": [[None, 7, None], [-2.0, 8, None], [-1.0, 9, None]]},
        {"output_token_logprobs": [[0.5, 7, None], [-2.0, 8, None], [-1.0, 9, None]]},
        {"weight_versions": [{"version": "3", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "3", "start": 1, "end": 3}]},
        {"weight_versions": "3"},
        {"finish_reason": {"type": "stop", "matched": "NaN happened"}},
        {"finish_reason": {"type": "mystery"}},
        {"finish_reason": None},
        {"prompt_tokens": 13},
    ],
)
def test_whatever_does_not_line_up_is_an_invalid_sample(meta: dict[str, Any]) -> None:
    with pytest.raises(EngineError) as caught:
        parse_reply(body(**meta), request=REQUEST, service_id="s")
    assert caught.value.kind is EngineErrorKind.INVALID_SAMPLE


@pytest.mark.parametrize("answer", [None, [], "text", {}, {"meta_info": {}}, [body()]])
def test_bodies_of_another_form_are_invalid_samples(answer: Any) -> None:
    with pytest.raises(EngineError) as caught:
        parse_reply(answer, request=REQUEST, service_id="s")
    assert caught.value.kind is EngineErrorKind.INVALID_SAMPLE


def test_an_abort_in_the_queue_without_the_usual_keys_is_an_abort() -> None:
    answer = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}}
    with pytest.raises(EngineError, match="waiting queue") as caught:
        parse_reply(answer, request=REQUEST, service_id="s")
    assert caught.value.kind is EngineErrorKind.ABORTED


def test_an_empty_completion_is_invalid_unless_none_was_asked_for() -> None:
    answer = {
        "output_ids": [],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 0},
            "output_token_logprobs": [],
            "weight_versions": [],
        },
    }
    with pytest.raises(EngineError, match="empty completion"):
        parse_reply(answer, request=REQUEST, service_id="s")
    nothing = GenerateRequest(rid="r", input_ids=[1], params=SamplingParams(max_new_tokens=0), deadline_s=1)
    assert parse_reply(answer, request=nothing, service_id="s").output_ids == ()


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "bad thing"},
        {"error": {"message": "bad thing"}},
        {"object": "error", "message": "bad thing", "type": "BadRequest", "param": None, "code": 400},
        {"detail": "bad thing"},
        {"success": False, "message": "bad thing"},
        "bad thing\n",
    ],
)
def test_every_error_shape_yields_its_message(answer: Any) -> None:
    assert error_message(answer) == "bad thing"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "rejected"),
        (401, "rejected"),
        (404, "rejected"),
        (429, "overloaded"),
        (500, "overloaded"),
        (503, "overloaded"),
    ],
)
def test_the_status_decides_whether_a_retry_can_help(status: int, kind: str) -> None:
    assert status_error(status, {}, where="x").kind == kind


@given(st.lists(st.integers(-5, 120), max_size=20))
def test_ids_pass_exactly_when_all_are_in_the_vocabulary(ids: list[int]) -> None:
    if ids and all(0 <= token_id < 100 for token_id in ids):
        check_input_ids(ids, vocab_size=100)
    else:
        with pytest.raises(EngineError):
            check_input_ids(ids, vocab_size=100)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=6))
def test_joined_spans_survive_parsing(parts: list[tuple[int, int]]) -> None:
    raw, position = [], 0
    for version, length in parts:
        raw.append({"version": str(version), "start": position, "end": position + length})
        position += length
    spans = parse_spans({"weight_versions": raw}, num_tokens=position)
    assert [(span.version, span.end - span.start) for span in spans] == parts
    with pytest.raises(EngineError):
        parse_spans({"weight_versions": raw}, num_tokens=position + 1)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["output_ids", "meta_info", "finish_reason", "type", "output_token_logprobs"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_arbitrary_json_never_raises_anything_but_engine_errors(answer: Any) -> None:
    with pytest.raises(EngineError):
        parse_reply(answer, request=REQUEST, service_id="s")


def scored(*entries: tuple[float | None, int], **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": [1],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 1},
            "input_token_logprobs": [[logprob, token_id, None] for logprob, token_id in entries],
            "weight_version": "4",
            **meta,
        },
    }


def test_a_scored_prompt_has_a_log_prob_for_every_token_but_the_first_and_the_engines_times() -> None:
    answer = scored((None, 5), (-1.5, 6), (-0.5, 7), response_sent_to_client_ts=100.5, e2e_latency=0.25)
    score = parse_prompt_score(answer, input_ids=[5, 6, 7])
    assert score == PromptScore(logprobs=(-1.5, -0.5), policy_version=4, engine_times=(100.25, 100.5))


def test_a_nan_in_a_scored_prompt_is_left_to_the_judge() -> None:
    assert math.isnan(parse_prompt_score(scored((None, 5), (None, 6)), input_ids=[5, 6]).logprobs[0])


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (scored((None, 5), (-1.0, 9)), EngineErrorKind.INVALID_SAMPLE),
        (scored((None, 5)), EngineErrorKind.INVALID_SAMPLE),
        ({"output_ids": []}, EngineErrorKind.INVALID_SAMPLE),
        (scored((None, 5), (-1.0, 6), finish_reason={"type": "abort", "message": "Aborted"}), EngineErrorKind.ABORTED),
        (scored((None, 5), (-1.0, 6), weight_version="default"), EngineErrorKind.OVERLOADED),
    ],
    ids=["other ids", "too few", "no meta", "aborted", "no version"],
)
def test_a_prompt_that_was_not_scored_is_an_error_of_its_kind(answer: Any, kind: EngineErrorKind) -> None:
    with pytest.raises(EngineError) as caught:
        parse_prompt_score(answer, input_ids=[5, 6])
    assert caught.value.kind is kind


def test_engines_that_tell_no_time_give_none() -> None:
    assert parse_reply(body(), request=REQUEST, service_id="s").engine_times is None
    timed = body(response_sent_to_client_ts=9.0, e2e_latency=2.0)
    assert parse_reply(timed, request=REQUEST, service_id="s").engine_times == (7.0, 9.0)


def test_a_run_of_a_fleet_finds_its_own_version_in_the_label() -> None:
    raw = [{"version": "a=3,b=7", "start": 0, "end": 2}, {"version": "a=3,b=7,c=0", "start": 2, "end": 4}]
    raw.append({"version": "a=4", "start": 4, "end": 5})
    spans = parse_spans({"weight_versions": raw}, num_tokens=5, run_name="a")
    assert [(span.version, span.start, span.end) for span in spans] == [(3, 0, 4), (4, 4, 5)]


@pytest.mark.parametrize("run_name", ["c", "", None])
def test_tokens_under_a_label_that_does_not_name_the_run_are_refused(run_name: str | None) -> None:
    raw = [{"version": "c=0,a=3", "start": 0, "end": 1}, {"version": "a=3,b=7", "start": 1, "end": 4}]
    with pytest.raises(EngineError, match="serves other runs now") as caught:
        parse_spans({"weight_versions": raw}, num_tokens=4, run_name=run_name)
    assert caught.value.retryable
