from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.algo.layouts import RowLayout
from agentrl.algo.trie import build_trie
from agentrl.errors import ConfigError
from agentrl.train.batch import build_pass
from agentrl.train.flex_tree import flex_tree_attention
from agentrl.train.model import PolicyModule
from agentrl.train.tree_attention import attention_name, tree_attention
from agentrl.train.tree_plan import TreePlan
from tiny_model import VOCABULARY_SIZE
from trees import branching_rows, group_rows

SHAPE = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 6}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {}),
    "gemma2-softcap": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"sliding_window": 6, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3-window": (Gemma3TextConfig, Gemma3ForCausalLM, {"sliding_window": 6, "query_pre_attn_scalar": 8}),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def family(name: str, *, attention: str) -> PolicyModule:
    config_class, model_class, options = FAMILIES[name]
    torch.manual_seed(0)
    model = model_class(config_class(**SHAPE, **options)).double().train()
    model.set_attn_implementation(attention)
    return PolicyModule(model, temperature=1.0, chunk_size=16, with_entropy=True)


def loss_and_gradient(policy: nn.Module, *, layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token log-probs and entropies, and the gradient of a sum that weighs every one of them differently."""
    batch = build_pass(group_rows(), layout=layout)
    logprobs_N, entropy_N = policy(batch.input_ids_BT, batch.predictors_N, batch.labels_N, batch.tree)
    weights_N = torch.linspace(-1.0, 1.0, logprobs_N.numel(), dtype=logprobs_N.dtype)
    (weights_N @ logprobs_N + 0.1 * weights_N.square() @ entropy_N).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    return torch.cat([logprobs_N, entropy_N]).detach(), gradient


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tree_gives_the_log_probs_and_gradients_of_the_rows_in_every_family(name: str) -> None:
    base = "eager" if "softcap" in name else "sdpa"
    plain, plain_gradient = loss_and_gradient(family(name, attention=base), layout=RowLayout.LINEAR)

    for layout in RowLayout:
        policy = family(name, attention=attention_name(base) or "")
        values, gradient = loss_and_gradient(policy, layout=layout)
        # transformers computes norms and rotary angles in float32 even in a float64 model
        torch.testing.assert_close(values, plain, rtol=1e-6, atol=2e-6)
        assert (gradient - plain_gradient).norm() <= 1e-6 * plain_gradient.norm()
        if layout is RowLayout.LINEAR:
            assert torch.equal(values, plain)
            assert torch.equal(gradient, plain_gradient)


def test_activation_checkpointing_recomputes_the_tree() -> None:
    plain, plain_gradient = loss_and_gradient(family("qwen3", attention="agentrl_sdpa"), layout=RowLayout.TREE)
    policy = family("qwen3", attention="agentrl_sdpa")
    policy.causal_lm.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    values, gradient = loss_and_gradient(policy, layout=RowLayout.TREE)
    assert torch.equal(values, plain)
    assert torch.equal(gradient, plain_gradient)


def test_autocast_runs_a_tree_in_bfloat16_as_it_runs_rows() -> None:
    outputs = {}
    for layout in (RowLayout.LINEAR, RowLayout.TREE):
        policy = family("qwen3", attention="agentrl_sdpa").float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs[layout] = loss_and_gradient(policy, layout=layout)
    (rows, rows_gradient), (tree, tree_gradient) = outputs.values()
    assert tree.dtype == torch.float32
    torch.testing.assert_close(tree, rows, rtol=0, atol=0.05)
    assert (tree_gradient - rows_gradient).norm() <= 0.05 * rows_gradient.norm()


def attention_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rows: list[list[int]],
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Every row alone, with a dense mask; [1, T, heads, D]."""
    trie = build_trie([np.array(row, dtype=np.int32) for row in rows])
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    output = torch.zeros_like(query)
    for path in trie.paths:
        at = torch.from_numpy(path)
        scores = query[:, :, at] @ key[:, :, at].mT * query.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(len(path))[:, None] - torch.arange(len(path))[None, :]
        hidden = (distance < 0) | (distance >= (window or len(path) + 1))
        output = output.index_copy(2, at, scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[:, :, at])
    return output.transpose(1, 2)


def tensors(num_nodes: int, *, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, heads, num_nodes, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]


@settings(max_examples=60, deadline=None)
@given(
    rows=branching_rows(max_token=1).filter(lambda rows: any(rows)),
    window=st.sampled_from([None, 1, 2, 5]),
    softcap=st.sampled_from([None, 1.5]),
)
def test_pieces_equal_dense_attention_of_each_row_in_float64(
    rows: list[list[int]], window: int | None, softcap: float | None
) -> None:
    trie = build_trie([np.array(row, dtype=np.int32) for row in rows])
    inputs = tensors(trie.num_tokens, seed=len(rows))
    weights = torch.randn(trie.num_tokens, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    output = tree_attention(
        *inputs, plan=TreePlan.of_trie(trie), dropout=0.0, scaling=None, sliding_window=window, softcap=softcap
    )
    expected = attention_by_hand(*inputs, rows=rows, window=window, softcap=softcap)

    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad((output[0] * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected[0] * weights).sum(), inputs)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-12)


@given(rows=branching_rows(), window=st.sampled_from([None, 1, 2, 5]), block=st.sampled_from([None, 2, 512]))
def test_pieces_hold_every_visible_pair_once(rows: list[list[int]], window: int | None, block: int | None) -> None:
    trie = build_trie([np.array(row, dtype=np.int32) for row in rows])
    pairs: list[tuple[int, int]] = []
    for piece in TreePlan.of_trie(trie).pieces(window=window, block=block):
        for q in range(piece.q_start, piece.q_end):
            for k in range(piece.k_start, min(piece.k_end, q + 1) if piece.is_causal else piece.k_end):
                is_inside = window is None or trie.depths_N[q] - trie.depths_N[k] < window
                assert is_inside or piece.is_masked
                if is_inside:
                    pairs.append((q, k))
    visible = {
        (int(q), int(k))
        for path in trie.paths
        for at, q in enumerate(path)
        for k in path[max(0, at + 1 - (window or at + 1)) : at + 1]
    }
    assert sorted(pairs) == sorted(visible)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_block_mask_for_gpus_sees_what_the_pieces_see(window: int | None, softcap: float | None) -> None:
    rows = [[1, 1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [0, 1]]
    trie = build_trie([np.array(row, dtype=np.int32) for row in rows])
    plan = TreePlan.of_trie(trie)
    with torch.no_grad():
        query, key, value = (tensor.float() for tensor in tensors(trie.num_tokens, seed=3))
        flex = flex_tree_attention(query, key, value, plan=plan, scale=8**-0.5, window=window, softcap=softcap)
        pieces = tree_attention(
            query, key, value, plan=plan, dropout=0.0, scaling=None, sliding_window=window, softcap=softcap
        )
    torch.testing.assert_close(flex.transpose(1, 2), pieces, rtol=0, atol=2e-6)


def test_dropout_is_refused() -> None:
    plan = TreePlan.of_trie(build_trie([np.array([1, 2], dtype=np.int32)]))
    with pytest.raises(ConfigError, match=r"attention_dropout = 0\.1"):
        tree_attention(*tensors(2, seed=0), plan=plan, dropout=0.1, scaling=None, sliding_window=None, softcap=None)
