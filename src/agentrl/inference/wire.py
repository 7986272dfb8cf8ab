"""JSON of SGLang's /generate: request bodies to checked calls, sequences to response bodies. Pure."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.inference.parameters import EngineSampling, ErrorShape, RequestRefusedError, parse_sampling
from agentrl.inference.sequence import Sequence

_UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "token_ids_logprob",
    "lora_path",
    "session_id",
    "session_params",
    "return_hidden_states",
    "return_sampling_mask",
    "return_routed_experts",
)
_MAX_TOP_LOGPROBS = 100


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer the server needs for `text` requests and replies."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Ids to text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One generation of a call."""

    rid: str
    input_ids: list[int]
    sampling: EngineSampling
    return_logprob: bool
    logprob_start: int
    top_logprobs_num: int
    extra_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A checked /generate body. `is_list`: the reply is an array."""

    prompts: tuple[Prompt, ...]
    is_list: bool
    stream: bool
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a prompt is checked against."""

    vocab_size: int
    context_length: int


def error_body(error: RequestRefusedError) -> dict[str, Any]:
    """The three error bodies of SGLang."""
    message = str(error)
    if error.shape is ErrorShape.SCHEMA:
        return {"error": message}
    if error.shape is ErrorShape.ENGINE:
        return {"error": {"message": message}}
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": error.status}


def parse_generate(body: Any, *, tokenizer: Tokenizer, limits: ModelLimits) -> GenerateCall:
    """Check a /generate body. Unknown top-level keys are ignored; anything else wrong raises RequestRefusedError."""
    if not isinstance(body, Mapping):
        raise RequestRefusedError("the body must be a JSON object", shape=ErrorShape.VALIDATION)
    for name in _UNSUPPORTED:
        if body.get(name):
            raise RequestRefusedError(f"{name} is not supported by the embedded engine; use an SGLang server")
    inputs, is_list = _inputs(body, tokenizer)
    count = len(inputs)
    prompts: list[Prompt] = []
    for index, input_ids in enumerate(inputs):
        raw_sampling = _item(body, "sampling_params", index=index, count=count)
        if raw_sampling is not None and not isinstance(raw_sampling, Mapping):
            raise RequestRefusedError("sampling_params must be an object", shape=ErrorShape.VALIDATION)
        sampling = parse_sampling(raw_sampling, vocab_size=limits.vocab_size)
        _check_prompt(input_ids, sampling, limits=limits)
        prompt = _prompt(body, input_ids, sampling, index=index, count=count)
        copies = (_with_fresh_rid(prompt) for _ in range(sampling.n))
        prompts.extend(copies if sampling.n > 1 else (prompt,))
    return GenerateCall(
        prompts=tuple(prompts),
        is_list=is_list or len(prompts) > 1,
        stream=_flag(body.get("stream"), "stream"),
        return_text_in_logprobs=_flag(body.get("return_text_in_logprobs"), "return_text_in_logprobs"),
        return_prompt_token_ids=_flag(body.get("return_prompt_token_ids"), "return_prompt_token_ids"),
    )


def _inputs(body: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise RequestRefusedError("Either text or input_ids should be provided.")
    if ids is None:  # with both, SGLang takes the ids
        texts: list[Any] = text if isinstance(text, list) else [text]
        if not texts or any(not isinstance(item, str) for item in texts):
            raise RequestRefusedError("text must be a string or a list of strings", shape=ErrorShape.VALIDATION)
        return [list(tokenizer.encode(item)) for item in texts], isinstance(text, list)
    if not isinstance(ids, list):
        raise RequestRefusedError("input_ids must be a list of integers", shape=ErrorShape.VALIDATION)
    is_list = bool(ids) and isinstance(ids[0], list)
    rows = ids if is_list else [ids]
    for row in rows:
        if not isinstance(row, list) or not all(type(token_id) is int for token_id in row):
            raise RequestRefusedError("input_ids must be a list of integers", shape=ErrorShape.VALIDATION)
    return rows, is_list


def _check_prompt(input_ids: list[int], sampling: EngineSampling, *, limits: ModelLimits) -> None:
    if not input_ids:
        raise RequestRefusedError("The input_ids should not be empty.")
    low, high = min(input_ids), max(input_ids)
    if low < 0 or high >= limits.vocab_size:
        raise RequestRefusedError(
            f"input_ids contains {low if low < 0 else high}: token ids must be in [0, {limits.vocab_size - 1}]."
        )
    if len(input_ids) >= limits.context_length:
        raise RequestRefusedError(
            f"The input ({len(input_ids)} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens)."
        )
    total = len(input_ids) + sampling.max_new_tokens
    if total > limits.context_length:
        raise RequestRefusedError(
            f"Requested token count exceeds the model's maximum context length of {limits.context_length} tokens: "
            f"{len(input_ids)} tokens from the input and {sampling.max_new_tokens} for the completion, {total} in all."
        )


def _prompt(
    body: Mapping[str, Any], input_ids: list[int], sampling: EngineSampling, *, index: int, count: int
) -> Prompt:
    rid = _item(body, "rid", index=index, count=count)
    if rid is not None and not isinstance(rid, str):
        raise RequestRefusedError("rid must be a string", shape=ErrorShape.VALIDATION)
    return_logprob = _flag(_item(body, "return_logprob", index=index, count=count), "return_logprob")
    start = _integer(_item(body, "logprob_start_len", index=index, count=count), "logprob_start_len", default=-1)
    if start > len(input_ids):
        raise RequestRefusedError(
            f"logprob_start_len ({start}) is higher than the number of input tokens ({len(input_ids)})."
        )
    num_top = _integer(_item(body, "top_logprobs_num", index=index, count=count), "top_logprobs_num", default=0)
    if not 0 <= num_top <= _MAX_TOP_LOGPROBS:
        raise RequestRefusedError(f"top_logprobs_num must be in [0, {_MAX_TOP_LOGPROBS}], got {num_top}.")
    return Prompt(
        rid=rid or uuid.uuid4().hex,
        input_ids=input_ids,
        sampling=sampling,
        return_logprob=return_logprob,
        logprob_start=start if return_logprob and 0 <= start < len(input_ids) else -1,
        top_logprobs_num=num_top if return_logprob else 0,
        extra_key=str(_item(body, "extra_key", index=index, count=count) or ""),
    )


def _with_fresh_rid(prompt: Prompt) -> Prompt:
    return Prompt(
        rid=uuid.uuid4().hex,
        input_ids=prompt.input_ids,
        sampling=prompt.sampling,
        return_logprob=prompt.return_logprob,
        logprob_start=prompt.logprob_start,
        top_logprobs_num=prompt.top_logprobs_num,
        extra_key=prompt.extra_key,
    )


def _item(body: Mapping[str, Any], name: str, *, index: int, count: int) -> Any:
    value = body.get(name)
    if not isinstance(value, list):
        if name == "rid" and value is not None and count > 1:
            raise RequestRefusedError("The rids provided for a batch must be a list, one per prompt.")
        return value
    if len(value) != count:
        raise RequestRefusedError(f"{name} has {len(value)} items for {count} prompts.")
    return value[index]


def _flag(value: Any, name: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestRefusedError(f"{name} must be a boolean, got {value!r}", shape=ErrorShape.VALIDATION)
    return value


def _integer(value: Any, name: str, *, default: int) -> int:
    if value is None:
        return default
    if type(value) is not int:
        raise RequestRefusedError(f"{name} must be an integer, got {value!r}", shape=ErrorShape.VALIDATION)
    return value


def render(
    sequence: Sequence, prompt: Prompt, *, call: GenerateCall, tokenizer: Tokenizer, version: str, num_tokens: int
) -> dict[str, Any]:
    """Body for the first `num_tokens` output tokens: a chunk in mid-stream, else the whole.

    `output_ids` keep the stop token, `text` is trimmed. A generation aborted in the queue lacks the keys SGLang
    leaves out there.
    """
    is_final = sequence.finish_reason is not None and num_tokens == len(sequence.output_ids)
    output_ids = sequence.output_ids[:num_tokens]
    body: dict[str, Any] = {
        "text": _text(sequence, output_ids, tokenizer=tokenizer, is_final=is_final),
        "output_ids": output_ids,
    }
    if call.return_prompt_token_ids:
        body["prompt_token_ids"] = sequence.input_ids
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish_reason if is_final else None,
        "weight_version": sequence.spans[-1][0] if sequence.spans else version,
        "completion_tokens": num_tokens,
    }
    if not sequence.was_queued_only:
        meta |= {
            "prompt_tokens": len(sequence.input_ids),
            "cached_tokens": sequence.num_cached_tokens,
            "cached_tokens_details": None,
            "num_retractions": sequence.num_retractions,
            "reasoning_tokens": 0,
            "dp_rank": None,
        }
    if prompt.return_logprob:
        meta |= _logprobs(
            sequence, prompt, tokenizer=tokenizer if call.return_text_in_logprobs else None, end=num_tokens
        )
    if is_final:
        meta["weight_versions"] = [
            {"version": label, "start": start, "end": end} for label, start, end in sequence.spans
        ]
    meta |= {"e2e_latency": time.monotonic() - sequence.arrived_at, "response_sent_to_client_ts": time.time()}
    body["meta_info"] = meta
    return body


def _text(sequence: Sequence, output_ids: list[int], *, tokenizer: Tokenizer, is_final: bool) -> str:
    sampling = sequence.sampling
    matched = (sequence.finish_reason or {}).get("matched") if is_final and not sampling.no_stop_trim else None
    shown = output_ids[:-1] if isinstance(matched, int) else output_ids
    text = tokenizer.decode(shown, skip_special_tokens=sampling.skip_special_tokens)
    if isinstance(matched, str) and matched in text:
        text = text[: text.index(matched)]
    return text if is_final else text.rstrip("�")  # the rest of that character has not come yet


def _logprobs(sequence: Sequence, prompt: Prompt, *, tokenizer: Tokenizer | None, end: int) -> dict[str, Any]:
    def entry(logprob: float | None, token_id: int) -> list[Any]:
        text = None if tokenizer is None else tokenizer.decode([token_id])
        return [None if logprob is None or math.isnan(logprob) else logprob, token_id, text]

    def entries(top: list[tuple[float, int]] | None) -> list[list[Any]] | None:
        return None if top is None else [entry(logprob, token_id) for logprob, token_id in top]

    outputs = zip(sequence.logprobs[:end], sequence.output_ids[:end], strict=True)
    scored_ids = sequence.input_ids[prompt.logprob_start :] if sequence.input_logprobs else []
    found: dict[str, Any] = {
        "input_token_logprobs": [
            entry(logprob, token_id) for logprob, token_id in zip(sequence.input_logprobs, scored_ids, strict=True)
        ],
        "output_token_logprobs": [entry(logprob, token_id) for logprob, token_id in outputs],
        "output_token_logprobs_length": end,
    }
    if prompt.top_logprobs_num:
        found["input_top_logprobs"] = [entries(top) for top in sequence.input_top_logprobs]
        found["output_top_logprobs"] = [entries(top) for top in sequence.top_logprobs[:end]]
    return found
