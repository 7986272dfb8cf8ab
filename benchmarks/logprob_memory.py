"""Peak extra memory of log-probs + entropy + backward: chunked against full logits, each in a process of its own.

    .venv/bin/python benchmarks/logprob_memory.py                    4,096 tokens x 152,000 words, 12 GB, 2 minutes
    .venv/bin/python benchmarks/logprob_memory.py --tokens 1024

Extra is the highest resident memory of the process minus what it held before the computation, less the gradients, which
both need. `full` makes logits, log-softmax and probabilities as a plain loss would. Gradients of both are compared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from agentrl.algo.logprobs import default_chunk_size, token_logprobs

FLOAT_BYTES = 4
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """N tokens, V words, D numbers per hidden state."""

    tokens: int
    vocabulary: int
    width: int


def main() -> None:
    """Measure every way, compare gradients, print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    shape = Shape(tokens=arguments.tokens, vocabulary=arguments.vocabulary, width=arguments.width)
    chosen = default_chunk_size(shape.vocabulary)
    chunk_sizes = [None, *sorted({64, chosen, 1024})]
    with TemporaryDirectory() as scratch:
        measured = [measure(shape, chunk_size, Path(scratch) / f"{chunk_size}.pt") for chunk_size in chunk_sizes]
    print_table(shape, chunk_sizes, measured, chosen=chosen)


def print_table(
    shape: Shape, chunk_sizes: Sequence[int | None], measured: Sequence[tuple[int, float, float]], *, chosen: int
) -> None:
    """One row per way; the first is the one with full logits."""
    logits_bytes = shape.tokens * shape.vocabulary * FLOAT_BYTES
    full_bytes = measured[0][0]
    print(f"{shape.tokens} tokens x {shape.vocabulary} words, float32: logits alone are {logits_bytes / MIB:.0f} MiB\n")
    print("| positions at a time | extra memory | of full | of the logits alone | seconds | gradient difference |")
    print("|---|---|---|---|---|---|")
    for chunk_size, (extra_bytes, seconds, difference) in zip(chunk_sizes, measured, strict=True):
        name = "all (full logits)" if chunk_size is None else f"{chunk_size}{' (default)' * (chunk_size == chosen)}"
        print(
            f"| {name} | {extra_bytes / MIB:.0f} MiB | {extra_bytes / full_bytes:.3f} | "
            f"{extra_bytes / logits_bytes:.3f} | {seconds:.1f} | {difference:.1e} |"
        )


def measure(shape: Shape, chunk_size: int | None, gradients: Path) -> tuple[int, float, float]:
    """Extra bytes, seconds, and the relative difference of the gradients from those of full logits."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=compute, args=(shape, chunk_size, gradients, sender))
    process.start()
    sender.close()  # so that a child killed for its memory ends the wait
    try:
        extra_bytes, seconds = receiver.recv()
    except EOFError:
        raise SystemExit(f"chunk size {chunk_size}: the process died, probably for lack of memory") from None
    process.join()
    expected, found = (torch.load(path) for path in (gradients.with_name("None.pt"), gradients))
    differences = [float((a - b).norm() / a.norm()) for a, b in zip(expected, found, strict=True)]
    return extra_bytes, seconds, max(differences)


def compute(
    shape: Shape, chunk_size: int | None, gradients: Path, sender: multiprocessing.connection.Connection
) -> None:
    """One forward and backward in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    hidden = torch.randn(shape.tokens, shape.width).requires_grad_()
    weight = torch.randn(shape.vocabulary, shape.width).div_(shape.width**0.5).requires_grad_()
    labels = torch.randint(0, shape.vocabulary, (shape.tokens,))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    logprobs, entropy = logprobs_of(hidden, weight, labels, chunk_size=chunk_size)
    (-(logprobs.mean()) - 0.01 * entropy.mean()).backward()
    seconds = time.perf_counter() - started
    extra_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    torch.save([hidden.grad, weight.grad], gradients)
    sender.send((extra_bytes, seconds))


def logprobs_of(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_size: int | None) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy; chunk_size None: by way of the full logits."""
    if chunk_size is None:
        log_probabilities = torch.log_softmax(hidden @ weight.T, dim=-1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        return log_probabilities.gather(-1, labels[:, None]).squeeze(-1), entropy
    logprobs, entropy = token_logprobs(
        hidden, weight, labels, temperature=1.0, chunk_size=chunk_size, with_entropy=True
    )
    if entropy is None:
        raise AssertionError("entropy was asked for")
    return logprobs, entropy


if __name__ == "__main__":
    main()
