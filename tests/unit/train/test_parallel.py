from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.config.sections import TrainConfig
from agentrl.errors import ConfigError
from agentrl.train.context import ContextGroup, check_context_parallel
from agentrl.train.parallel import arrange_ranks, split_layers
from tiny_model import tiny_qwen3

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 32,
}  # fmt: skip


class OfTwo:
    """Stands for a mesh of two ranks: what is refused is refused before anything is sent."""

    def size(self) -> int:
        return 2


def test_ranks_without_a_split_each_have_sequences_of_their_own() -> None:
    ranks = arrange_ranks(TrainConfig(), num_processes=4, process_index=3, device_type="cpu")

    assert (ranks.num_data, ranks.data_rank, ranks.num_gradients, ranks.counts) == (4, 3, 4, True)


def test_sizes_that_do_not_divide_the_processes_are_refused() -> None:
    config = TrainConfig(tp_size=2, cp_size=2)

    with pytest.raises(ConfigError, match=r"tp_size x cp_size = 2 x 2, num_processes = 6: .* no multiple"):
        arrange_ranks(config, num_processes=6, process_index=0, device_type="cpu")


def test_a_model_with_too_few_heads_for_the_tensor_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp_size = 2: num_key_value_heads = 1 of the model is no multiple"):
        split_layers(tiny_qwen3(), mesh=OfTwo())


def test_layers_of_experts_are_not_split() -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=2, moe_intermediate_size=16)

    with pytest.raises(ConfigError, match=r"tp_size = 2: Qwen3MoeForCausalLM has layers of style .* not split here"):
        split_layers(Qwen3MoeForCausalLM(config), mesh=OfTwo())


@pytest.mark.parametrize(
    "model",
    [
        Gemma2ForCausalLM(Gemma2Config(**SIZES)),
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_attention_that_does_not_see_all_positions_is_not_split_by_position(model: Any) -> None:
    check_context_parallel(tiny_qwen3())

    with pytest.raises(ConfigError, match=r"cp_size: .* splits full causal attention alone"):
        check_context_parallel(model)


@pytest.mark.parametrize("num_positions", [1, 7, 8, 29])
@pytest.mark.parametrize("size", [2, 3])
def test_every_position_is_computed_by_one_rank_and_gathered_in_order(num_positions: int, size: int) -> None:
    shares = [
        ContextGroup(group=None, rank=rank, size=size).share_of(num_positions, device=torch.device("cpu"))
        for rank in range(size)
    ]

    gathered = torch.cat([share.positions_T for share in shares])
    padded = gathered.numel()
    assert torch.equal(gathered[shares[0].natural_order], torch.arange(padded))
    assert num_positions <= padded < num_positions + 2 * size
    assert len({share.positions_T.numel() for share in shares}) == 1
    assert len({sum(share.ends) for share in shares}) == 1, "equal work under a causal mask"
    predictors_N = torch.arange(2 * num_positions)
    owned = torch.stack([share.own(predictors_N, num_positions=num_positions)[0] for share in shares])
    assert torch.equal(owned.sum(dim=0), torch.ones_like(predictors_N))
    ids_BT = torch.arange(2 * num_positions).view(2, -1)
    for share in shares:
        is_own_N, at = share.own(predictors_N, num_positions=num_positions)
        assert torch.equal(share.tokens(ids_BT).flatten()[at], predictors_N[is_own_N])
