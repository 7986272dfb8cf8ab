from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from agentrl.algo.losses import LossConfig, LossInputs, build_loss, policy_term
from agentrl.algo.losses.registry import POLICY_TERMS
from agentrl.config.loss import BUILT_IN_LOSSES
from agentrl.errors import ConfigError

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
