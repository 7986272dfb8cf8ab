import numpy as np
import pytest
import torch

from agentrl.train.batch import PAD_TOKEN_ID, build_pass
from agentrl.train.padding import widened
from tiny_model import random_row


@pytest.mark.parametrize("multiple", [1, 7, 8, 64])
def test_a_wider_pass_feeds_the_same_tokens_to_the_same_predictors(multiple: int) -> None:
    rng = np.random.default_rng(3)
    batch = build_pass([random_row(f"r{k}", rng=rng, version=0) for k in range(3)])

    wide = widened(batch, multiple=multiple)

    width = batch.input_ids_BT.shape[1]
    assert wide.input_ids_BT.shape[1] % multiple == 0
    assert wide.input_ids_BT.shape[1] - width < multiple
    assert torch.equal(wide.input_ids_BT[:, :width], batch.input_ids_BT)
    assert torch.all(wide.input_ids_BT[:, width:] == PAD_TOKEN_ID)
    columns = torch.arange(wide.input_ids_BT.numel()) % wide.input_ids_BT.shape[1]
    assert torch.equal(columns[wide.predictors_N], batch.predictors_N % width)
    assert torch.equal(wide.input_ids_BT.flatten()[wide.predictors_N], batch.input_ids_BT.flatten()[batch.predictors_N])
    assert torch.equal(wide.labels_N, batch.labels_N)


def test_an_empty_pass_stays_empty() -> None:
    assert widened(build_pass([]), multiple=8).num_trained_tokens == 0
