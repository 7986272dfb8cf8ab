from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, Qwen3ForCausalLM

from agentrl.errors import ConfigError
from agentrl.train.layout_check import layout_rule, tree_obstacle
from agentrl.train.model import PolicyModule
from agentrl.train.tree_attention import attention_name
from tiny_model import VOCABULARY_SIZE, run_config, tiny_qwen3


def policy_of(model: torch.nn.Module) -> PolicyModule:
    return PolicyModule(model.train(), temperature=1.0, chunk_size=8, with_entropy=False)


def qwen3(*, attention: str = "agentrl_sdpa") -> Qwen3ForCausalLM:
    model = tiny_qwen3()
    model.set_attn_implementation(attention)
    return model


def mamba() -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCABULARY_SIZE, hidden_size=16, num_hidden_layers=2, state_size=4)
    return MambaForCausalLM(config)


def test_a_decoder_with_our_attention_can_compute_trees_and_stays_in_training_mode() -> None:
    policy = policy_of(qwen3())
    assert tree_obstacle(policy, attention_implementation="sdpa") is None
    assert policy.training


def test_a_model_that_mixes_tokens_by_their_place_in_the_input_is_found_out(tmp_path: Path) -> None:
    obstacle = tree_obstacle(policy_of(mamba()), attention_implementation="sdpa")
    assert obstacle is not None
    assert obstacle.startswith("MambaForCausalLM ")
    wants_trees = run_config(tmp_path, model_dir=tmp_path, train={"sequence_layout": "tree"})
    with pytest.raises(ConfigError, match=r"sequence_layout = tree: MambaForCausalLM .*; use linear"):
        layout_rule(policy_of(mamba()), config=wants_trees)


def test_auto_is_linear_where_the_model_cannot_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule = layout_rule(policy_of(mamba()), config=run_config(tmp_path, model_dir=tmp_path))
    assert rule.layout == "linear"
    assert "always linear, because MambaForCausalLM" in caplog.text


def test_a_plan_that_the_attention_ignores_is_found_out() -> None:
    obstacle = tree_obstacle(policy_of(qwen3(attention="sdpa")), attention_implementation="sdpa")
    assert obstacle is not None
    assert "computes a tree differently from its rows" in obstacle


def test_dropout_and_other_kernels_are_obstacles() -> None:
    assert attention_name("flash_attention_2") is None
    policy = policy_of(qwen3())
    obstacle = tree_obstacle(policy, attention_implementation="flash_attention_2")
    assert obstacle == "attention_implementation = flash_attention_2 cannot compute trees, sdpa and eager can"
    policy.causal_lm.config.attention_dropout = 0.1
    assert "attention_dropout = 0.1" in (tree_obstacle(policy, attention_implementation="sdpa") or "")


def test_the_cost_model_is_that_of_the_models_width(tmp_path: Path) -> None:
    rule = layout_rule(policy_of(qwen3()), config=run_config(tmp_path, model_dir=tmp_path))
    assert rule.layout == "auto"
    assert rule.segment_tokens > 0
