"""The shapes of benchmarks/merge_layouts.py: what is fed stays at the optimum, whatever the width of the model."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from agentrl.algo.layouts import LayoutRule
from agentrl.algo.trie import build_trie, input_tokens

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "merge_layouts.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("merge_layouts", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("hidden_size", [96, 256, 4096])
@pytest.mark.parametrize("index", range(7))
def test_the_chosen_layout_feeds_hardly_more_than_the_trie(benchmark: ModuleType, hidden_size: int, index: int) -> None:
    shape = benchmark.SHAPES[index]
    rows = benchmark.merge_group(benchmark.group_turns(shape, rng=np.random.default_rng(0)))
    passes = benchmark.plan_passes(rows, rule=LayoutRule.of_model("auto", hidden_size=hidden_size))
    optimum = build_trie([input_tokens(row) for row in rows]).num_tokens
    assert optimum < sum(row.token_ids.size for row in rows)
    assert sum(batch.input_ids_BT.numel() for batch in passes) <= 1.02 * optimum
