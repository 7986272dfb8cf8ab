"""Payloads for the store: token arrays and JSON values to bytes that BSON can hold, and back bit for bit.

    document            {"_id": "r/0.1", ..., "payload": {"layout": "prompt_ids int32 3, logprobs float32 2",
                                                          "bytes": Binary}}
    large document      {"_id": "r/0.1", ..., "payload": {"layout": ..., "num_bytes": ..., "encoding": "zstd",
                                                          "num_parts": 2, "sha256": ...}}
    its parts           {"_id": "DispatchedSamplingTask:r/0.1#0", "bytes": Binary}, "...#1"

All arrays of a document form one payload, little endian. Payloads above 256 KB are compressed (zstd level 1), and what
is then still above 4 MiB is cut into immutable parts, so that no document comes near MongoDB's 16 MB limit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from bson.binary import USER_DEFINED_SUBTYPE, Binary

from agentrl.errors import StoreError

COMPRESS_ABOVE_BYTES = 256 * 1024
PART_BYTES = 4 * 1024 * 1024
_ZSTD_LEVEL = 1
_MAX_NATIVE_DEPTH = 32  # MongoDB refuses documents nested deeper than 100
_INT64 = range(-(2**63), 2**63)
_DTYPES: Mapping[str, npt.DTypeLike] = {"int32": "<i4", "float32": "<f4", "bool": "?", "bytes": "<u1"}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Packed arrays: `header` goes into the document, `parts` (often none) into TokenPart documents first."""

    header: dict[str, Any]
    parts: tuple[bytes, ...]


def pack(arrays: Mapping[str, Array | bytes]) -> Payload:
    """Pack named 1-D arrays (int32, float32, bool) and byte strings for one document.

    Raises ValueError for another dtype: a silent cast would not read back equal.
    """
    layout: list[str] = []
    chunks: list[bytes] = []
    for name, array in arrays.items():
        kind = "bytes" if isinstance(array, bytes) else str(array.dtype)
        if kind not in _DTYPES:
            raise ValueError(f"array {name} has dtype {kind}: the store keeps {', '.join(_DTYPES)}; convert it first")
        layout.append(f"{name} {kind} {len(array)}")
        chunks.append(array if isinstance(array, bytes) else array.astype(_DTYPES[kind], copy=False).tobytes())
    raw = b"".join(chunks)
    header: dict[str, Any] = {"layout": ", ".join(layout)}
    if len(raw) > COMPRESS_ABOVE_BYTES:  # else as it is
        header |= {"num_bytes": len(raw), "encoding": "zstd"}
        raw = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)
    if len(raw) <= PART_BYTES:
        return Payload(header={**header, "bytes": Binary(raw)}, parts=())
    parts = tuple(raw[start : start + PART_BYTES] for start in range(0, len(raw), PART_BYTES))
    header |= {"num_parts": len(parts), "sha256": hashlib.sha256(raw).hexdigest()}
    return Payload(header=header, parts=parts)


def pack_apart(name: str, array: Array) -> Payload:
    """Pack one int32 array all of whose bytes go into parts, so that several documents can name the same ones."""
    payload = pack({name: array})
    if payload.parts:
        return payload
    raw = bytes(payload.header["bytes"])
    header = {key: value for key, value in payload.header.items() if key != "bytes"}
    return Payload(
        header={"num_bytes": array.nbytes, **header, "num_parts": 1, "sha256": hashlib.sha256(raw).hexdigest()},
        parts=(raw,),
    )


def unpack(header: Mapping[str, Any], *, parts: Sequence[bytes] = ()) -> dict[str, Array | bytes]:
    """The arrays of a payload: writable copies with the dtypes they were packed with.

    `parts` are the TokenParts in order; needed where `header` has `num_parts`. Raises StoreError if they do not add up.
    """
    stored = b"".join(parts) if "num_parts" in header else bytes(header["bytes"])
    if "num_parts" in header and hashlib.sha256(stored).hexdigest() != header["sha256"]:
        raise StoreError(f"{len(parts)} of {header['num_parts']} payload parts do not match their checksum")
    raw = stored
    if header.get("encoding") == "zstd":
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=header["num_bytes"])
    arrays: dict[str, Array | bytes] = {}
    offset = 0
    for entry in filter(None, header["layout"].split(", ")):
        name, kind, length = entry.split(" ")
        dtype = np.dtype(_DTYPES[kind])
        end = offset + int(length) * dtype.itemsize
        piece = raw[offset:end]
        arrays[name] = piece if kind == "bytes" else np.frombuffer(piece, dtype=dtype).astype(dtype.newbyteorder("="))
        offset = end
    return arrays


def is_known(header: Mapping[str, Any]) -> bool:
    """Whether `unpack` knows the form of a payload."""
    return isinstance(header.get("layout"), str) and header.get("encoding") in {None, "zstd"}


def part_ids(collection: str, document_id: str, header: Mapping[str, Any]) -> list[str]:
    """Ids of the TokenParts of a document, in order; empty when its payload is inline.

    They are named after the document, or where two writers may differ over its content after `parts_of`.
    """
    owner = header.get("parts_of", document_id)
    return [f"{collection}:{owner}#{index}" for index in range(header.get("num_parts", 0))]


def encode_json_value(value: Any) -> Any:
    """A JSON value as BSON: itself where BSON keeps it exactly, else its JSON text in a Binary of the user subtype.

    Exact means: no integers beyond 64 bits, no lone surrogates (models write them as escapes in tool arguments), no
    keys that MongoDB gives a meaning to. Tuples come back as lists.
    """
    if _is_bson_exact(value, depth=0):
        return value
    return Binary(json.dumps(value, ensure_ascii=True).encode("ascii"), USER_DEFINED_SUBTYPE)


def decode_json_value(value: Any) -> Any:
    """What `encode_json_value` was given."""
    if isinstance(value, Binary) and value.subtype == USER_DEFINED_SUBTYPE:
        return json.loads(value)
    return value


def json_value_bytes(value: Any) -> int:
    """About how many bytes a JSON value takes in a document."""
    if isinstance(value, str | bytes):
        return len(value) if isinstance(value, bytes) or value.isascii() else 4 * len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + json_value_bytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(json_value_bytes(item) + 8 for item in value)
    return 8


def _is_bson_exact(value: Any, *, depth: int) -> bool:
    if value is None or isinstance(value, bool | float | datetime):
        return True
    if isinstance(value, int):
        return value in _INT64
    if isinstance(value, str):
        return _is_plain_text(value)
    if depth > _MAX_NATIVE_DEPTH:
        return False
    if isinstance(value, Mapping):
        return all(_is_plain_key(k) and _is_bson_exact(item, depth=depth + 1) for k, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_bson_exact(item, depth=depth + 1) for item in value)
    return False


def _is_plain_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain_key(key: Any) -> bool:
    return isinstance(key, str) and key != "" and key[0] != "$" and "\0" not in key and _is_plain_text(key)
