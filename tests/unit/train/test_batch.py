import numpy as np
import pytest
import torch

from agentrl.errors import TrainingError
from agentrl.train.batch import build_pass
from agentrl.train.model import PolicyModule
from agentrl.types import DBRecordData
from tiny_model import random_row, tiny_qwen3


def row(name: str, token_ids: list[int], loss_mask: list[int], *, sampled: bool = True) -> DBRecordData:
    mask = np.array(loss_mask, dtype=np.bool_)
    values = np.arange(mask.size, dtype=np.float32)
    return DBRecordData(
        id=name,
        task_id="train:0:q",
        record_id=name,
        split="train",
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=mask,
        advantages=np.where(mask, values + 100, 0).astype(np.float32),
        behaviour_logprobs=np.where(mask, -values, 0).astype(np.float32) if sampled else None,
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        reward=1.0,
    )


def test_only_trained_tokens_become_labels_and_nothing_after_them_is_fed() -> None:
    batch = build_pass(
        [
            #               P0  P1  A0  A1  T0  A2  T1                   P0  A0
            row("two-turns", [10, 11, 20, 21, 30, 22, 31], [0, 0, 1, 1, 0, 1, 0]),
            row("short", [12, 23], [0, 1]),
        ]
    )

    assert batch.input_ids_BT.tolist() == [[10, 11, 20, 21, 30], [12, 0, 0, 0, 0]]
    assert batch.predictors_N.tolist() == [1, 2, 4, 5]
    assert batch.labels_N.tolist() == [20, 21, 22, 23]
    assert batch.sequence_ids_N.tolist() == [0, 0, 0, 1]
    assert batch.advantages_N.tolist() == [102, 103, 105, 101]
    assert batch.behaviour_logprobs_N is not None
    assert batch.behaviour_logprobs_N.tolist() == [-2, -3, -5, -1]
    assert batch.policy_versions_N.tolist() == [3, 3, 3, 3]


def test_a_row_that_trains_nothing_takes_part_without_labels() -> None:
    batch = build_pass([row("nothing", [1, 2, 3], [0, 0, 0]), row("one", [4, 5], [0, 1])])

    assert batch.labels_N.tolist() == [5]
    assert batch.sequence_ids_N.tolist() == [1]


def test_a_pass_without_rows_is_one_pad_token() -> None:
    batch = build_pass([])

    assert batch.input_ids_BT.shape == (1, 1)
    assert batch.num_trained_tokens == 0


def test_a_trained_first_token_is_refused_by_name() -> None:
    with pytest.raises(TrainingError, match="row bad trains its first token"):
        build_pass([row("bad", [1, 2], [1, 1])])


def test_supervised_and_sampled_rows_do_not_mix() -> None:
    with pytest.raises(TrainingError, match="rows without behaviour log-probs among sampled ones: sft"):
        build_pass([row("rl", [1, 2], [0, 1]), row("sft", [1, 2], [0, 1], sampled=False)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padded_log_probs_equal_each_row_alone_through_full_logits(temperature: float) -> None:
    model = tiny_qwen3().eval()
    rows = [random_row(f"r{k}", rng=np.random.default_rng(k), length=length) for k, length in enumerate((9, 25, 14))]
    policy = PolicyModule(model, temperature=temperature, chunk_size=7, with_entropy=True)
    batch = build_pass(rows)

    logprobs_N, entropy_N = policy(batch.input_ids_BT, batch.predictors_N, batch.labels_N)

    expected, expected_entropy = [], []
    for one in rows:
        ids = torch.from_numpy(one.token_ids.astype(np.int64)).unsqueeze(0)
        all_V = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, dim=-1)
        at = np.flatnonzero(one.loss_mask)
        expected.append(all_V[at - 1, ids[0, at]])
        expected_entropy.append(-(all_V.exp() * all_V).sum(-1)[at - 1])
    torch.testing.assert_close(logprobs_N, torch.cat(expected), atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy_N, torch.cat(expected_entropy), atol=5e-6, rtol=0)
