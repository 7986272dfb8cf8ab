from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from agentrl.algo.losses import LossConfig, LossInputs, build_loss, policy_term
from agentrl.algo.losses.registry import POLICY_TERMS
from agentrl.config.loss import BUILT_IN_LOSSES
from agentrl.errors import ConfigError, TrainingError

DOCS = Path(__file__).parents[4] / "docs" / "algorithms.md"
SOFT_CLIP = {"loss": "SOFT_CLIP", "epsilon": 0.2, "epsilon_higher": 0.0}


@pytest.fixture
def documented_module(tmp_path: Path) -> Path:
    """The example file of docs/algorithms.md as a user would copy it."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    path = tmp_path / "my_losses.py"
    path.write_text(source, encoding="utf-8")
    return path


def loss_and_gradient(
    config: LossConfig, *, ratios: list[float], mask: list[bool]
) -> tuple[dict[str, float], list[float]]:
    policy = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    old = policy - torch.tensor(ratios, dtype=torch.float64).log()
    outputs = build_loss(config)(
        LossInputs(
            policy_logprobs=policy.requires_grad_(),
            advantages=torch.tensor([1.0, -2.0, 0.5][: len(ratios)], dtype=torch.float64),
            mask=torch.tensor(mask),
            sequence_ids=torch.zeros(len(ratios), dtype=torch.int64),
            weights=torch.ones(len(ratios), dtype=torch.float64),
            old_logprobs=old,
        )
    )
    outputs.loss.backward()
    assert policy.grad is not None
    return outputs.metrics, policy.grad.tolist()


def test_every_loss_of_the_configuration_has_a_policy_term() -> None:
    assert tuple(POLICY_TERMS) == BUILT_IN_LOSSES


def test_the_documented_loss_of_a_user_trains_like_one_of_the_package(documented_module: Path) -> None:
    config = LossConfig(loss_module=documented_module, **SOFT_CLIP)
    metrics, gradient = loss_and_gradient(config, ratios=[1.0, 1.0, 1.0], mask=[True, True, False])
    assert gradient == pytest.approx([-1.0, 2.0, 0.0], abs=1e-12)  # REINFORCE at ratio one, nothing under the mask
    assert metrics["clip_fraction_high"] == 0.0

    metrics, gradient = loss_and_gradient(config, ratios=[3.0, 1.0, 1.0], mask=[True, True, True])
    assert -0.3 < gradient[0] < 0.0  # 3 x 4 sigmoid'(4): fades, but is not cut
    assert metrics["clip_fraction_high"] == 1.0


def test_the_drop_mask_and_kl_apply_to_a_users_loss(documented_module: Path) -> None:
    config = LossConfig(loss_module=documented_module, strict_in_bound=True, **SOFT_CLIP)
    metrics, gradient = loss_and_gradient(config, ratios=[3.0, 1.0, 1.0], mask=[True, True, True])
    assert gradient[0] == 0.0
    assert metrics["drop_fraction"] == 1.0


def test_an_unknown_loss_is_refused_with_the_nearest_name(documented_module: Path) -> None:
    with pytest.raises(ValidationError, match="did you mean GSPO"):
        LossConfig(loss="GSPOO")
    with pytest.raises(ConfigError, match=r"did you mean SOFT_CLIP\?.*LOSSES"):
        policy_term(LossConfig(loss="SOFT_CLAP", loss_module=documented_module))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('no licence')", r"cannot be imported: RuntimeError: no licence \(.*bad.py, line 1\)"),
        ("import not_there", "cannot be imported: ModuleNotFoundError"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit"),
        ("LOSSES = {}", "defines no losses"),
        ("LOSSES = {'A': 1}", "defines no losses"),
        ("LOSSES = {1: print}", "defines no losses"),
        ("LOSSES = {'GRPO': print}", "GRPO is a built-in loss"),
    ],
)
def test_a_module_that_gives_no_loss_is_one_line(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as refusal:
        policy_term(LossConfig(loss="A", loss_module=path))
    assert "\n" not in str(refusal.value)


def test_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.py' cannot be imported: ImportError: no such file"):
        policy_term(LossConfig(loss="A", loss_module=tmp_path / "gone.py"))
    with pytest.raises(ConfigError, match=r"gone.txt': no Python file; give a path that ends in .py"):
        policy_term(LossConfig(loss="A", loss_module=tmp_path / "gone.txt"))


GOOD = "-tokens.advantages_N * tokens.policy_N"


def write_loss(
    path: Path,
    *,
    losses: str = GOOD,
    first: str = "",
    ratios: str = "tokens.log_ratio_N.exp()",
    clipped: str = "~tokens.mask_N",
) -> LossConfig:
    lines = [
        "import torch",
        "from agentrl.algo.losses import TokenTerms",
        "def mine(tokens, config):",
        f"    {first or 'pass'}",
        f"    losses = {losses}",
        f"    flags = {clipped}",
        f"    return TokenTerms(losses_N=losses, ratios_N={ratios}, clipped_low_N=flags, clipped_high_N=flags)",
        'LOSSES = {"MINE": mine}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return LossConfig(loss="MINE", loss_module=path)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"first": "raise ValueError('no\\nluck')"}, r"it raised ValueError: no luck \(.*mine.py, line 4\)"),
        ({"first": "import sys; sys.exit(0)"}, "it raised SystemExit: 0"),
        ({"first": "return None"}, "it returned NoneType instead of TokenTerms"),
        ({"losses": "tokens.no_such_field"}, "it raised AttributeError"),
        ({"losses": f"({GOOD}) * float('nan')"}, r"losses_N is \[nan"),
        ({"losses": f"({GOOD}) * 1e38 * 1e38"}, r"losses_N is \[inf"),
        ({"losses": f"({GOOD}).mean()"}, r"losses_N has shape \[\] instead of one number per token"),
        ({"losses": f"({GOOD})[:, None]"}, r"losses_N has shape \[6, 1\]"),
        ({"losses": f"({GOOD})[:-1]"}, r"losses_N has shape \[5\]"),
        ({"losses": f"({GOOD}).half()"}, "losses_N is torch.float16 instead of float32"),
        ({"losses": f"({GOOD}).detach().numpy()"}, "losses_N is ndarray instead of a tensor"),
        ({"losses": "torch.empty_like(tokens.policy_N, device='meta')"}, "losses_N is on meta instead of cpu"),
        ({"losses": f"({GOOD}).detach()"}, "losses_N has no gradient"),
        ({"losses": "torch.ones_like(tokens.policy_N)"}, "losses_N has no gradient"),
        ({"losses": "(tokens.policy_N - tokens.policy_N).sqrt()"}, r"its gradient is \[nan"),
        ({"ratios": "None"}, "ratios_N is NoneType instead of a tensor"),
        ({"clipped": "tokens.policy_N"}, "clipped_low_N is torch.float32 instead of bool"),
        ({"clipped": "torch.tensor(False)"}, r"clipped_low_N has shape \[\]"),
    ],
)
def test_a_loss_that_could_not_train_is_refused_in_one_line_before_anything_starts(
    tmp_path: Path, fault: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"loss = MINE: {message}") as refusal:
        policy_term(write_loss(tmp_path / "mine.py", **fault))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"first": "assert tokens.policy_N.numel() == 6"}, "it raised AssertionError"),
        ({"losses": f"({GOOD})[:6]"}, r"losses_N has shape \[6\] instead of one number per token, \[8\]"),
        ({"losses": f"({GOOD}) if tokens.policy_N.numel() == 6 else tokens.old_N"}, "losses_N has no gradient"),
    ],
)
def test_a_loss_that_breaks_later_stops_the_step_in_one_line(
    tmp_path: Path, fault: dict[str, str], message: str
) -> None:
    config = write_loss(tmp_path / "mine.py", **fault)
    policy_term(config)
    with pytest.raises(TrainingError, match=f"loss = MINE: {message}.*weights are unchanged") as refusal:
        build_loss(config)(_eight_tokens())
    assert "\n" not in str(refusal.value)


def test_what_a_users_loss_changes_in_place_is_seen_by_nobody_else(tmp_path: Path) -> None:
    spoil = (
        "[t.detach().fill_(0) for t in (tokens.policy_N, tokens.old_N, tokens.behaviour_N, tokens.advantages_N, "
        "tokens.log_ratio_N, tokens.mask_N, tokens.sequences_N)]"
    )
    polite, rude = (_eight_tokens() for _ in range(2))
    expected = build_loss(write_loss(tmp_path / "polite.py", ratios="tokens.log_ratio_N.exp().detach()"))(polite)
    found = build_loss(
        write_loss(
            tmp_path / "rude.py",
            first=f"kept = {GOOD}; ratios = tokens.log_ratio_N.exp(); flags = ~tokens.mask_N; {spoil}",
            losses="kept",
            ratios="ratios",
            clipped="flags",
        )
    )(rude)
    assert found.metrics == expected.metrics
    assert torch.equal(rude.mask, polite.mask)
    assert torch.equal(rude.policy_logprobs.detach(), polite.policy_logprobs.detach())


def _eight_tokens() -> LossInputs:
    generator = torch.Generator().manual_seed(0)
    policy = -torch.rand(8, generator=generator)
    return LossInputs(
        policy_logprobs=policy.clone().requires_grad_(),
        advantages=torch.randn(8, generator=generator),
        mask=torch.tensor([True] * 7 + [False]),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]),
        weights=torch.full((8,), 1 / 8),
        old_logprobs=policy + 0.1,
        behaviour_logprobs=policy + 0.1,
    )
