"""Payloads and JSON values survive the trip into BSON and back, bit for bit."""

from __future__ import annotations

import bson
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agentrl.errors import StoreError
from agentrl.store import codec

arrays = st.one_of(
    *(hnp.arrays(dtype, st.integers(0, 50)) for dtype in (np.int32, np.float32, np.bool_)),
    st.binary(max_size=50),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def through_bson(header: dict[str, object]) -> dict[str, object]:
    return bson.decode(bson.encode(header))


@given(st.dictionaries(st.text("abc_", min_size=1), arrays, max_size=5))
def test_arrays_read_back_bit_equal_with_their_dtype(given_arrays: dict[str, codec.Array | bytes]) -> None:
    payload = codec.pack(given_arrays)
    assert payload.parts == ()
    unpacked = codec.unpack(through_bson(payload.header))
    assert list(unpacked) == list(given_arrays)
    for name, array in given_arrays.items():
        loaded = unpacked[name]
        if isinstance(array, bytes) or isinstance(loaded, bytes):
            assert loaded == array
            continue
        assert loaded.dtype == array.dtype
        assert loaded.tobytes() == array.tobytes()
        assert loaded.flags.writeable


def test_small_payloads_are_raw_and_large_ones_compressed() -> None:
    small = codec.pack({"ids": np.zeros(1000, dtype=np.int32)}).header
    large = codec.pack({"ids": np.zeros(100_000, dtype=np.int32)}).header
    assert (small.get("encoding"), large["encoding"]) == (None, "zstd")
    assert len(large["bytes"]) < 4_000
    assert codec.unpack(large)["ids"] == pytest.approx(np.zeros(100_000))


def test_payloads_above_four_mebibytes_are_cut_into_parts_that_join_again() -> None:
    noise = np.random.default_rng(0).integers(0, 2**31 - 1, 3_000_000).astype(np.int32)
    payload = codec.pack({"ids": noise})
    assert "bytes" not in payload.header
    assert len(payload.parts) == payload.header["num_parts"] > 2
    assert max(map(len, payload.parts)) <= codec.PART_BYTES
    ids = codec.unpack(payload.header, parts=payload.parts)["ids"]
    assert isinstance(ids, np.ndarray)
    assert np.array_equal(ids, noise)
    assert codec.part_ids("DBRecordData", "r/s0", payload.header)[1] == "DBRecordData:r/s0#1"


def test_missing_or_swapped_parts_are_noticed() -> None:
    noise = np.random.default_rng(0).integers(0, 2**31 - 1, 3_000_000).astype(np.int32)
    payload = codec.pack({"ids": noise})
    for parts in (payload.parts[:-1], payload.parts[::-1], ()):
        with pytest.raises(StoreError, match="checksum"):
            codec.unpack(payload.header, parts=parts)


def test_a_dtype_the_store_does_not_keep_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="array ids has dtype int64"):
        codec.pack({"ids": np.zeros(3, dtype=np.int64)})


@given(json_values)
def test_any_json_value_reads_back_equal(value: object) -> None:
    document = bson.decode(bson.encode({"value": codec.encode_json_value(value)}))
    assert codec.decode_json_value(document["value"]) == value


def test_ordinary_values_stay_readable_in_the_database() -> None:
    value = {"temperature": 1.0, "stop": ["a", "é"], "nested": {"a.b": None}}
    assert codec.encode_json_value(value) is value


@pytest.mark.parametrize("value", [2**63, "\ud800", {"$set": 1}, {"": 1}, {"a\0": 1}, [[["x" * 9]] * 3, {"$x": 0}]])
def test_values_that_bson_would_change_or_refuse_become_json_text(value: object) -> None:
    encoded = codec.encode_json_value(value)
    assert isinstance(encoded, bson.Binary)
    assert codec.decode_json_value(encoded) == value


def test_deep_nesting_does_not_reach_the_limit_of_the_server() -> None:
    value: object = 1
    for _ in range(200):
        value = [value]
    assert codec.decode_json_value(codec.encode_json_value(value)) == value
