from __future__ import annotations

from types import TracebackType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.algo.logprobs import token_logprobs
from golden_losses import golden_file


def direct(hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """The same with full logits."""
    log_probabilities = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return log_probabilities.gather(-1, labels[:, None]).squeeze(-1), entropy


def random_inputs(seed: int, *, positions: int, vocabulary: int, width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(positions, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    return hidden, weight, torch.randint(0, vocabulary, (positions,), generator=generator)


@given(
    seed=st.integers(0, 1000),
    positions=st.integers(0, 9),
    chunk_size=st.integers(1, 12),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    with_entropy=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_equal_the_direct_computation(
    seed: int, positions: int, chunk_size: int, temperature: float, with_entropy: bool
) -> None:
    hidden, weight, labels = random_inputs(seed, positions=positions, vocabulary=7)
    outer = torch.linspace(-1, 2, max(positions, 1), dtype=torch.float64)[:positions]
    results = []
    for is_chunked in (True, False):
        inputs = (hidden.clone().requires_grad_(), weight.clone().requires_grad_())
        if is_chunked:
            logprobs, entropy = token_logprobs(
                *inputs, labels, temperature=temperature, chunk_size=chunk_size, with_entropy=with_entropy
            )
        else:
            logprobs, entropy = direct(*inputs, labels, temperature=temperature)
        loss = (outer * logprobs).sum()
        if with_entropy:
            assert entropy is not None
            loss = loss + (outer.flip(0) * entropy).sum()
        loss.backward()
        results.append((logprobs, entropy if with_entropy else None, inputs[0].grad, inputs[1].grad))
    for chunked, expected in zip(*results, strict=True):
        torch.testing.assert_close(chunked, expected, rtol=0, atol=1e-12)


def test_gradients_pass_the_numeric_check() -> None:
    hidden, weight, labels = random_inputs(1, positions=4, vocabulary=6)

    def both(hidden: Tensor, weight: Tensor) -> Any:
        return token_logprobs(hidden, weight, labels, temperature=0.7, chunk_size=3, with_entropy=True)

    assert torch.autograd.gradcheck(both, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_does_not_disturb_the_other(frozen: str) -> None:
    hidden, weight, labels = random_inputs(2, positions=5, vocabulary=6)
    live = weight if frozen == "hidden" else hidden
    live.requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight, labels, temperature=1.0, chunk_size=2, with_entropy=False)
    logprobs.sum().backward()
    expected, _ = direct(hidden.detach().requires_grad_(), weight, labels, temperature=1.0)
    assert live.grad is not None
    (gradient,) = torch.autograd.grad(direct(hidden, weight, labels, temperature=1.0)[0].sum(), live)
    torch.testing.assert_close(live.grad, gradient)
    torch.testing.assert_close(logprobs, expected)
    assert (hidden if frozen == "hidden" else weight).grad is None


def test_temperature_matches_the_golden_logits() -> None:
    vectors = golden_file()["inputs"]["logits"]
    logits = torch.tensor(vectors["logits"], dtype=torch.float64).reshape(12, -1)
    labels = torch.tensor(vectors["targets"]).reshape(-1)
    identity = torch.eye(logits.shape[1], dtype=torch.float64)
    logprobs, _ = token_logprobs(logits, identity, labels, temperature=0.7, chunk_size=5, with_entropy=False)
    old = torch.tensor(vectors["old_log_probs"]).reshape(-1).double()
    noise = torch.tensor(vectors["noise_old"]).reshape(-1).double()
    torch.testing.assert_close(logprobs + noise, old, rtol=0, atol=2e-6)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor any operation creates, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)


def test_full_logits_never_exist_and_little_is_kept_for_the_backward_pass() -> None:
    positions, vocabulary, width, chunk_size = 512, 1000, 8, 32
    hidden = torch.randn(positions, width).requires_grad_()
    weight = torch.randn(vocabulary, width).requires_grad_()
    labels = torch.randint(0, vocabulary, (positions,))
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with LargestTensor() as chunked, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logprobs, entropy = token_logprobs(
            hidden, weight, labels, temperature=1.0, chunk_size=chunk_size, with_entropy=True
        )
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
    assert chunked.num_elements == chunk_size * vocabulary
    assert saved <= positions * width + vocabulary * width + 4 * positions

    with LargestTensor() as full:
        direct(hidden, weight, labels, temperature=1.0)[0].sum().backward()
    assert full.num_elements == positions * vocabulary  # the measurement does see full logits


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_products_are_reduced_in_float32(autocast: bool) -> None:
    hidden, weight, labels = (
        tensor.to(torch.float32) if tensor.is_floating_point() else tensor
        for tensor in random_inputs(3, positions=6, vocabulary=50)
    )
    if not autocast:
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logprobs, _ = token_logprobs(hidden, weight, labels, temperature=1.0, chunk_size=4, with_entropy=False)
    logprobs.sum().backward()
    assert logprobs.dtype is torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype is hidden.dtype
    rounded = (hidden.bfloat16() @ weight.bfloat16().T).float()
    expected = torch.log_softmax(rounded, dim=-1).gather(-1, labels[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_impossible_settings_are_refused() -> None:
    hidden, weight, labels = random_inputs(0, positions=2, vocabulary=3)
    with pytest.raises(ValueError, match="temperature = 0"):
        token_logprobs(hidden, weight, labels, temperature=0.0, chunk_size=1, with_entropy=False)
    with pytest.raises(ValueError, match="chunk_size = 0"):
        token_logprobs(hidden, weight, labels, temperature=1.0, chunk_size=0, with_entropy=False)
