"""The leak filter: addresses of benchmark answers in arguments and results."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.leaks import LeakFilter

FILTER = LeakFilter(("huggingface.co/datasets", "huggingface.co/spaces"))
LEAK = "https://huggingface.co/datasets/org/benchmark"


@pytest.mark.parametrize(
    "text",
    [
        LEAK,
        "see HTTPS://HuggingFace.co/Datasets/org",
        "https://www.huggingface.co/spaces/org/app?x=1",
        "https%3A%2F%2Fhuggingface.co%2Fdatasets%2Forg",
        "https:\\/\\/huggingface.co\\/datasets\\/org",
        "https://huggingface.co:443/datasets/org",
        "https://user:password@huggingface.co/datasets",
        "https://huggingface.co./datasets/org",
        "https://huggingface.co//datasets/org",
        "https://huggingface.co/./datasets/org",
        "https://huggingface.co/docs/../datasets/org",
        "https:\\\\huggingface.co\\datasets",
        "huggingface%252Eco/datasets",
        "huggingface.co&#47;datasets",
        "\uff48uggingface.co/datasets",
        "huggingface\u3002co/datasets",
        "hugging\u00adface.co/data\u200bsets",
    ],
)
def test_a_blocked_address_is_found_however_it_is_spelt(text: str) -> None:
    assert FILTER.find({"url": ["https://example.org", text]}) is not None


@pytest.mark.parametrize(
    "text", ["https://huggingface.co/docs", "https://nothuggingface.co/datasets", "huggingface.co/datasetsheet"]
)
def test_another_address_is_left_alone(text: str) -> None:
    assert FILTER.find(text) is None
    assert FILTER.clean(text) == (text, 0)


def test_only_the_search_results_that_leak_are_left_out_of_a_wrapped_list() -> None:
    content = {"result": [{"query": "q", "results": [{"url": LEAK}, {"url": "https://example.org", "n": 1}]}]}
    cleaned, count = FILTER.clean(json.dumps(content))
    assert json.loads(cleaned) == {"result": [{"query": "q", "results": [{"url": "https://example.org", "n": 1}]}]}
    assert count == 1


def test_json_inside_a_string_of_json_is_cleaned_too() -> None:
    cleaned, count = FILTER.clean(json.dumps({"result": json.dumps([LEAK, "kept"])}))
    assert json.loads(json.loads(cleaned)["result"]) == ["kept"]
    assert count == 1


def test_of_a_text_the_paragraph_goes_and_of_a_single_paragraph_the_line() -> None:
    assert FILTER.clean(f"First.\n\n{LEAK}\nits answers\n\nLast.") == ("First.\n\n\n\nLast.", 1)
    assert FILTER.clean(f"First.\n{LEAK}\nLast.") == ("First.\nLast.", 1)


LEAVES = st.sampled_from(["a", LEAK, f"b\n{LEAK}"]) | st.integers()


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("xyz"), inner)))
def test_no_result_of_any_shape_names_a_blocked_address_afterwards(value: object) -> None:
    cleaned, count = FILTER.clean(json.dumps(value))
    assert LEAK not in cleaned
    assert (count > 0) is (LEAK in json.dumps(value))


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_a_result_nested_beyond_all_measure_loses_what_leaks_too(depth: int) -> None:
    cleaned, count = FILTER.clean("[" * depth + f'"{LEAK}"' + "]" * depth)
    assert "huggingface" not in cleaned
    assert count == 1
