"""Generated tokens per second of the embedded engine against Hugging Face `generate`, in the same process.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/engine_throughput.py [--model DIR] [--rounds N]

Without --model: a random Qwen3 of 0.93 M parameters. Both sides continue the same random prompts by the same number of
tokens at temperature 1; rounds alternate, and the best of each side counts, since other processes disturb the clock.
CPU seconds are those of the whole process.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.inference.engine import Engine
from agentrl.inference.parameters import parse_sampling
from agentrl.inference.runner import EngineSettings
from agentrl.inference.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Generated tokens per second of wall time and of CPU time."""

    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory; default: a random 0.93 M Qwen3")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = arguments.model or write_model(Path(scratch))
        settings = EngineSettings(
            model_path=model_dir,
            max_running_requests=max(arguments.batch),
            context_length=max(512, 2 * (arguments.prompt + arguments.new)),
            num_threads=arguments.threads,
        )
        engine = Engine(settings, decode=str)
        engine.start()
        warm_up(engine, prompt=arguments.prompt, new=arguments.new)
        for batch in arguments.batch:
            measure(engine, batch=batch, prompt=arguments.prompt, new=arguments.new, rounds=arguments.rounds)
        engine.stop()


def write_model(directory: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=602,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=384,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def warm_up(engine: Engine, *, prompt: int, new: int) -> None:
    """Touch every slot of the cache once: the system's first delivery of its memory is not what is measured."""
    rng = random.Random(0)
    count = engine.runner.lanes.num_slots
    run_engine(engine, [[rng.randrange(engine.vocab_size) for _ in range(prompt)] for _ in range(count)], new=new)


def measure(engine: Engine, *, batch: int, prompt: int, new: int, rounds: int) -> None:
    rng = random.Random(batch)
    vocab_size = engine.vocab_size

    def fresh_prompts() -> list[list[int]]:  # new ones each round: nothing may come from a cache
        return [[rng.randrange(vocab_size) for _ in range(prompt)] for _ in range(batch)]

    ours, theirs = Rate(wall=0, cpu=0), Rate(wall=0, cpu=0)
    for _ in range(rounds):
        prompts = fresh_prompts()
        ours = better(ours, timed(run_engine, engine, prompts, new=new))
        theirs = better(theirs, timed(run_generate, engine, prompts, new=new))
    row = {
        "batch": batch,
        "engine_tokens_per_s": round(ours.wall),
        "generate_tokens_per_s": round(theirs.wall),
        "ratio": round(ours.wall / theirs.wall, 2),
        "engine_tokens_per_cpu_s": round(ours.cpu),
        "generate_tokens_per_cpu_s": round(theirs.cpu),
        "cpu_ratio": round(ours.cpu / theirs.cpu, 2),
    }
    print(json.dumps(row), flush=True)


def better(first: Rate, second: Rate) -> Rate:
    return Rate(wall=max(first.wall, second.wall), cpu=max(first.cpu, second.cpu))


def timed(run: Callable[..., None], engine: Engine, prompts: list[list[int]], *, new: int) -> Rate:
    num_tokens = len(prompts) * new
    wall, cpu = time.perf_counter(), time.process_time()
    run(engine, prompts, new=new)
    return Rate(wall=num_tokens / (time.perf_counter() - wall), cpu=num_tokens / (time.process_time() - cpu))


def run_engine(engine: Engine, prompts: list[list[int]], *, new: int) -> None:
    sampling = parse_sampling({"max_new_tokens": new, "ignore_eos": True}, vocab_size=engine.vocab_size)
    remaining = threading.Semaphore(0)
    for index, prompt in enumerate(prompts):
        engine.submit(
            Sequence(
                rid=f"bench-{index:04d}", input_ids=prompt, sampling=sampling, on_event=lambda _: remaining.release()
            )
        )
    for _ in prompts:
        remaining.acquire()


@torch.inference_mode()
def run_generate(engine: Engine, prompts: list[list[int]], *, new: int) -> None:
    ids = torch.tensor(prompts)
    engine.runner.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        temperature=1.0,
        min_new_tokens=new,
        max_new_tokens=new,
        pad_token_id=0,
    )


if __name__ == "__main__":
    main()
