import numpy as np
import pytest
import torch

from agentrl.train.batch import PassBatch
from agentrl.train.metrics import PhaseClock, StepTally, merge

LOSS_PART = {"weight_total": 0.5, "loss": 0.25, "ratio_max": 1.5, "clip_fraction_low": 0.05, "clip_fraction_high": 0.1}


def batch_of(behaviour: list[float], versions: list[int]) -> PassBatch:
    zeros_N = torch.zeros(len(behaviour), dtype=torch.int64)
    return PassBatch(
        row_ids=("r",),
        input_ids_BT=torch.zeros(1, 4, dtype=torch.int64),
        predictors_N=zeros_N,
        labels_N=zeros_N,
        sequence_ids_N=zeros_N,
        advantages_N=torch.ones(len(behaviour)),
        policy_versions_N=torch.tensor(versions),
        behaviour_logprobs_N=torch.tensor(behaviour),
    )


def tally_of(policy: list[float], behaviour: list[float], versions: list[int]) -> StepTally:
    tally = StepTally(policy_version=5)
    tally.add(batch_of(behaviour, versions), logprobs_N=torch.tensor(policy), loss_metrics=dict(LOSS_PART))
    return tally


def test_mismatch_looks_only_at_tokens_of_the_version_being_trained() -> None:
    metrics = tally_of([-1.0, -1.0, -1.0], [-1.25, -1.5, -9.0], [5, 5, 4]).metrics()

    assert metrics["mismatch"] == pytest.approx(0.375)
    assert metrics["mismatch_max"] == pytest.approx(0.5)
    assert metrics["mismatch_p50"] == pytest.approx(0.375)
    assert metrics["mismatch_p95"] == pytest.approx(0.4875)
    assert metrics["mismatch_p99"] == pytest.approx(0.4975)
    by_hand = [np.exp(0.25) - 1 - 0.25, np.exp(0.5) - 1 - 0.5]
    assert metrics["mismatch_k3"] == pytest.approx(np.mean(by_hand))
    assert metrics["staleness_mean"] == pytest.approx(1 / 3)
    assert metrics["staleness_max"] == 1
    assert metrics["clip_fraction"] == pytest.approx(0.3)


def test_a_policy_below_the_engine_has_the_same_mismatch_but_another_kl() -> None:
    above, below = tally_of([-1.0], [-2.0], [5]).metrics(), tally_of([-2.0], [-1.0], [5]).metrics()

    assert above["mismatch_p99"] == below["mismatch_p99"] == 1.0
    assert above["mismatch_k3"] == pytest.approx(np.e - 2)
    assert below["mismatch_k3"] == pytest.approx(1 / np.e)


def test_metrics_do_not_depend_on_how_a_step_is_split_over_ranks() -> None:
    rng = np.random.default_rng(0)
    policy, behaviour = rng.normal(-1, 0.1, 6).tolist(), rng.normal(-1, 0.1, 6).tolist()
    versions = [5, 4, 5, 5, 3, 5]
    ranks = [tally_of(policy[:2], behaviour[:2], versions[:2]), tally_of(policy[2:], behaviour[2:], versions[2:])]

    together = StepTally(policy_version=5)
    for part in (slice(0, 2), slice(2, 6)):
        together.add(
            batch_of(behaviour[part], versions[part]),
            logprobs_N=torch.tensor(policy[part]),
            loss_metrics=dict(LOSS_PART),
        )

    assert merge(ranks).metrics() == pytest.approx(together.metrics())
    assert merge(ranks).metrics()["loss"] == pytest.approx(0.5)


def test_phases_report_as_they_begin_and_add_up_their_seconds() -> None:
    calls: list[tuple[str, int]] = []
    clock = PhaseClock(step=7, report=lambda phase, step: calls.append((phase, step)))

    with clock.phase("load"):
        pass
    with pytest.raises(RuntimeError), clock.phase("commit"):
        raise RuntimeError
    with clock.phase("load"):
        pass

    assert calls == [("load", 7), ("commit", 7), ("load", 7)]
    assert set(clock.metrics()) == {"seconds_load", "seconds_commit"}
    assert all(seconds >= 0 for seconds in clock.metrics().values())
