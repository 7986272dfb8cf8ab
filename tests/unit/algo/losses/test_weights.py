from __future__ import annotations

import pytest
import torch

from agentrl.algo.losses import LossConfig, build_loss, token_weights
from golden_losses import Golden

#                    a  a  a  b  b  c
MASK = torch.tensor([1, 0, 1, 1, 0, 0], dtype=torch.bool)
IDS = torch.tensor([9, 9, 9, 4, 4, 7])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 3, 0, 1 / 3, 1 / 3, 0, 0]),
        ("seq_mean_token_mean", [1 / 6, 0, 1 / 6, 1 / 3, 0, 0]),  # the masked row c counts in B = 3
        ("seq_mean_token_sum", [1 / 3, 0, 1 / 3, 1 / 3, 0, 0]),
        ("constant", [1 / 30, 0, 1 / 30, 1 / 30, 0, 0]),
    ],
)
def test_each_aggregation_has_its_closed_form(aggregation: str, expected: list[float]) -> None:
    weights = token_weights(MASK, IDS, aggregation=aggregation, num_sequences=3, constant_length=10)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"])
def test_a_micro_batch_gets_the_weights_of_the_whole_step(aggregation: str) -> None:
    whole = token_weights(MASK, IDS, aggregation=aggregation, num_sequences=3, constant_length=10)
    part = token_weights(MASK[:3], IDS[:3], aggregation=aggregation, num_sequences=3, num_tokens=3, constant_length=10)
    assert part.tolist() == whole[:3].tolist()


def test_a_step_without_trained_tokens_has_zero_weights() -> None:
    weights = token_weights(torch.zeros(4, dtype=torch.bool), IDS[:4], aggregation="token_mean", num_sequences=2)
    assert weights.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregation": "constant", "num_sequences": 3}, "constant_length"),
        ({"aggregation": "seq_mean_token_sum", "num_sequences": 0}, "num_sequences = 0"),
        ({"aggregation": "median", "num_sequences": 3}, "unknown"),
    ],
)
def test_impossible_denominators_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_weights(MASK, IDS, **settings)


def test_golden_ranks_and_micro_batches_add_up_to_the_global_token_mean() -> None:
    golden = Golden("aggregation_2ranks_x_2microbatches", torch.float64)
    config = LossConfig(epsilon=0.2, epsilon_higher=0.08)
    outputs = build_loss(config)(golden.inputs(config))
    golden.close(outputs.loss, "global_token_mean")
    inputs = golden.inputs(config)
    total = torch.zeros((), dtype=torch.float64)
    for index, rows in enumerate(golden.options["rank_microbatch_rows"]):
        in_part = torch.isin(golden.sequence_ids, torch.tensor(rows))
        golden.mask = golden.flat("mask").bool() & in_part
        part = build_loss(config)(golden.inputs(config, weights=inputs.weights))
        token_sum = part.token_losses[golden.mask].sum().item()
        assert int(golden.mask.sum()) == golden.expected["token_counts"][index]
        assert token_sum == pytest.approx(golden.expected["token_loss_sums"][index], abs=1e-9)
        part.loss.backward()
        total += part.loss.detach()
    golden.close(total, "global_token_mean")
