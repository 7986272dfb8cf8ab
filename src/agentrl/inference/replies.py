"""Turns bodies of SGLang's native HTTP API into checked values or an EngineError, for `EngineClient`. Pure.

Nothing leaves here unaligned: ids, log-probabilities and version spans have equal lengths, no number is NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import EngineError, EngineErrorKind
from agentrl.fleets import read_weight_label
from agentrl.types import GenerateReply, GenerateRequest, VersionSpan

_NAN_STOP = "NaN happened"
_MAX_MESSAGE_CHARS = 500
_LOGPROB_SLACK = 1e-3  # float32 rounding may push log(1) slightly above 0


def decode_body(text: str) -> Any:
    """Parse a body as JSON; text that is no JSON stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def error_message(body: Any) -> str:
    """Find the message in any of the shapes the server uses.

    `{"error": "..."}` (schema), `{"error": {"message": "..."}}` (engine), `{"object": "error", "message": "..."}`
    (validation), `{"detail": "..."}` (HTTP exception), `{"success": false, "message": "..."}` (weight update), or text.
    """
    if isinstance(body, Mapping):
        error = body.get("error")
        if isinstance(error, Mapping):
            error = error.get("message")
        body = error or body.get("message") or body.get("detail") or json.dumps(dict(body))
    return str(body).strip()[:_MAX_MESSAGE_CHARS]


def status_error(status: int, body: Any, *, where: str) -> EngineError:
    """Map a status other than 200 to the kind of failure: 408, 429 and 5xx may pass, other 4xx never will."""
    retry = status in {408, 429} or status >= 500
    kind = EngineErrorKind.OVERLOADED if retry else EngineErrorKind.REJECTED
    return EngineError(f"{where} answered {status}: {error_message(body)}", kind=kind)


def check_input_ids(input_ids: Sequence[int], *, vocab_size: int | None) -> None:
    """Refuse ids outside the vocabulary before they are sent: one of them ends a whole SGLang server.

    Raises EngineError(REJECTED) naming the id and its position.
    """
    if not input_ids:
        raise EngineError("input_ids is empty: a prompt needs at least one token", kind=EngineErrorKind.REJECTED)
    upper = vocab_size if vocab_size is not None else 2**31
    if min(input_ids) >= 0 and max(input_ids) < upper:
        return
    position, token_id = next((i, t) for i, t in enumerate(input_ids) if not 0 <= t < upper)
    raise EngineError(
        f"input_ids[{position}] = {token_id} is outside the vocabulary of {upper} tokens; "
        "the tokenizer does not belong to the served model",
        kind=EngineErrorKind.REJECTED,
    )


def parse_version(label: Any, *, run_name: str | None = None) -> int:
    """Policy version of a weight label: the decimal version, or in a fleet the versions of the runs that are served.

    Raises EngineError(OVERLOADED, worth a retry) for another label: no registrar has taken that service over yet, or
    the weights are those of other runs.
    """
    if isinstance(label, str) and label.isascii() and label.isdigit():
        return int(label)
    versions = read_weight_label(label) if isinstance(label, str) else None
    if versions is not None:
        if run_name in versions:
            return versions[run_name]
        raise EngineError(
            f"weights {label!r} are not those of run {run_name}: the service serves other runs now",
            kind=EngineErrorKind.OVERLOADED,
        )
    raise EngineError(
        f"weight version {label!r} is no policy version: the service was not loaded by a registrar (yet)",
        kind=EngineErrorKind.OVERLOADED,
    )


def parse_spans(meta: Mapping[str, Any], *, num_tokens: int, run_name: str | None = None) -> tuple[VersionSpan, ...]:
    """Spans of policy versions that cover `num_tokens` output tokens without gaps.

    Servers without `weight_versions` give one span of `weight_version`. Raises EngineError(INVALID_SAMPLE) on gaps.
    """
    raw = meta.get("weight_versions")
    if raw is None:
        raw = [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
    spans: list[VersionSpan] = []
    position = 0
    label = None
    for item in raw:
        start, end = int(item["start"]), int(item["end"])
        if start != position or end < start:
            raise _invalid(f"weight_versions {raw} do not join at token {position}")
        position = end
        if end == start:
            continue
        version = parse_version(item["version"], run_name=run_name)
        if spans and spans[-1].version == version and item["version"] != label:  # another run joined these weights
            start = spans.pop().start
        label = item["version"]
        spans.append(VersionSpan(version=version, start=start, end=end))
    if position != num_tokens:
        raise _invalid(f"weight_versions end at {position} but there are {num_tokens} output tokens")
    return tuple(spans)


def parse_reply(body: Any, *, request: GenerateRequest, service_id: str, run_name: str | None = None) -> GenerateReply:
    """Check a 200 body of /generate and turn it into a GenerateReply.

    Raises EngineError: ABORTED when the engine stopped the generation (its partial output is dropped),
    INVALID_SAMPLE for NaN stops and for anything that does not line up.
    """
    try:
        return _parse_reply(body, request=request, service_id=service_id, run_name=run_name)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _invalid(f"/generate returned a malformed body ({error!r}): {str(body)[:200]}") from error


def _parse_reply(body: Any, *, request: GenerateRequest, service_id: str, run_name: str | None) -> GenerateReply:
    meta = body["meta_info"]
    finish = meta["finish_reason"]
    if finish["type"] == "abort":
        raise EngineError(f"{request.rid}: {finish.get('message') or 'aborted'}", kind=EngineErrorKind.ABORTED)
    if finish["type"] not in {"stop", "length"}:
        raise _invalid(f"{request.rid}: unknown finish reason {finish}")
    if finish.get("matched") == _NAN_STOP:
        raise _invalid(f"{request.rid}: the engine sampled from NaN logits")
    if meta.get("prompt_tokens", len(request.input_ids)) != len(request.input_ids):
        raise _invalid(
            f"{request.rid}: the engine saw {meta['prompt_tokens']} of {len(request.input_ids)} prompt tokens"
        )
    output_ids = tuple(int(token_id) for token_id in body["output_ids"])
    if not output_ids and request.params.max_new_tokens > 0:
        raise _invalid(f"{request.rid}: empty completion with finish reason {finish}")
    return GenerateReply(
        output_ids=output_ids,
        logprobs=_parse_logprobs(meta["output_token_logprobs"], output_ids=output_ids, rid=request.rid),
        version_spans=parse_spans(meta, num_tokens=len(output_ids), run_name=run_name),
        finish_reason=finish["type"],
        service_id=service_id,
        num_cached_tokens=int(meta.get("cached_tokens") or 0),
        engine_times=parse_engine_times(meta),
    )


def parse_engine_times(meta: Mapping[str, Any]) -> tuple[float, float] | None:
    """When the engine began and ended, seconds since 1970 by its own clock; None where it does not tell."""
    sent, latency = meta.get("response_sent_to_client_ts"), meta.get("e2e_latency")
    if sent is None or latency is None:
        return None
    return float(sent) - float(latency), float(sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScore:
    """Log-probs of a prompt's tokens but the first, and the policy version that gave them."""

    logprobs: tuple[float, ...]
    policy_version: int
    engine_times: tuple[float, float] | None


def parse_prompt_score(body: Any, *, input_ids: Sequence[int], run_name: str | None = None) -> PromptScore:
    """Check a 200 body of /generate with `logprob_start_len` 0. NaN log-probs pass: they are the caller's finding.

    Raises EngineError: ABORTED when the engine stopped it, INVALID_SAMPLE if the ids are not those of the prompt.
    """
    try:
        meta = body["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            raise EngineError(f"canary: {meta['finish_reason'].get('message')}", kind=EngineErrorKind.ABORTED)
        entries = meta["input_token_logprobs"]
        if [entry[1] for entry in entries] != list(input_ids):
            raise _invalid(f"{len(entries)} prompt log-probs are not those of the {len(input_ids)} ids sent")
        values = [entry[0] for entry in entries[1:]]
        return PromptScore(
            logprobs=tuple(math.nan if value is None else float(value) for value in values),
            policy_version=parse_version(meta["weight_version"], run_name=run_name),
            engine_times=parse_engine_times(meta),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _invalid(f"/generate scored a prompt with a malformed body ({error!r}): {str(body)[:200]}") from error


def _parse_logprobs(entries: Sequence[Sequence[Any]], *, output_ids: tuple[int, ...], rid: str) -> tuple[float, ...]:
    if tuple(entry[1] for entry in entries) != output_ids:
        raise _invalid(f"{rid}: {len(entries)} log-probs are not those of the {len(output_ids)} output ids")
    logprobs = tuple(float(entry[0]) for entry in entries)
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob) or logprob > _LOGPROB_SLACK:
            raise _invalid(f"{rid}: log-prob {logprob} of output token {position} is not possible")
    return logprobs


def _invalid(message: str) -> EngineError:
    return EngineError(message, kind=EngineErrorKind.INVALID_SAMPLE)
