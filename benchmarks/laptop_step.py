"""Where a step of a running run spends its time: CPU seconds by process and wall seconds by trainer phase.

    ./grpo_example.sh my_run &                      # in one terminal
    .venv/bin/python benchmarks/laptop_step.py my_run --steps 10

Watches the run for some steps and prints a Markdown table; shares are of the wall time of a step times the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path

import psutil

POLL_S = 0.1
WAIT_S = 600.0


def main() -> None:
    """Watch and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_name")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output_dir", type=Path, default=Path("output"))
    arguments = parser.parse_args()
    metrics = arguments.output_dir / arguments.run_name / "metrics.jsonl"
    first = wait_for_step(metrics, after=0)
    started, before = time.monotonic(), cpu_seconds(arguments.run_name)
    last = wait_for_step(metrics, after=first + arguments.steps - 1)
    wall_s, after = time.monotonic() - started, cpu_seconds(arguments.run_name)
    num_steps = last - first
    print_table(num_steps, wall_s / num_steps, {name: after[name] - before.get(name, 0.0) for name in after})
    print_phases([row for row in read_rows(metrics) if first < row["step"] <= last])


def wait_for_step(metrics: Path, *, after: int) -> int:
    """The newest step once it is beyond `after`."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        steps = [int(row["step"]) for row in read_rows(metrics)]
        if steps and steps[-1] > after:
            return steps[-1]
        time.sleep(POLL_S)
    raise SystemExit(f"{metrics}: no step after {after} within {WAIT_S:g} s; is the run going?")


def read_rows(metrics: Path) -> list[dict[str, float]]:
    """Complete lines of metrics.jsonl."""
    if not metrics.is_file():
        return []
    lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def cpu_seconds(run_name: str) -> dict[str, float]:
    """CPU seconds so far, by kind of process: the launcher of the run and all its descendants."""
    totals: dict[str, float] = defaultdict(float)
    for launcher in psutil.process_iter(["cmdline"]):
        command = launcher.info["cmdline"] or []
        if "launch" in command and run_name in command and launcher.pid != os.getpid():
            for process in [launcher, *launcher.children(recursive=True)]:
                try:
                    times, words = process.cpu_times(), process.cmdline()
                except psutil.NoSuchProcess:
                    continue
                totals[kind_of(words)] += times.user + times.system
    return dict(totals)


def kind_of(command: list[str]) -> str:
    """A name for the table."""
    text = " ".join(command)
    kinds = {
        "secantusd": "database", "mongod": "database", "tools.servers": "MCP servers", " serve ": "inference engine",
        " sample ": "sampler", " train ": "trainer", " launch ": "launcher (live view)",
    }  # fmt: skip
    return next((kind for mark, kind in kinds.items() if mark in text), "other")


def print_table(num_steps: int, wall_s: float, cpu_s: dict[str, float]) -> None:
    """CPU by process."""
    cores = os.cpu_count() or 1
    print(f"{num_steps} steps, {wall_s:.2f} s wall per step, {cores} cores\n")
    print("| process | CPU s per step | share of the machine |\n|---|---|---|")
    for kind, seconds in sorted(cpu_s.items(), key=lambda item: -item[1]):
        print(f"| {kind} | {seconds / num_steps:.2f} | {100 * seconds / num_steps / wall_s / cores:.0f} % |")


def print_phases(rows: list[dict[str, float]]) -> None:
    """Wall time by trainer phase."""
    phases = sorted({name for row in rows for name in row if name.startswith("seconds_")})
    means = {phase: sum(row.get(phase, 0.0) for row in rows) / len(rows) for phase in phases}
    print("\n| trainer phase | wall s per step |\n|---|---|")
    for phase, seconds in sorted(means.items(), key=lambda item: -item[1]):
        print(f"| {phase.removeprefix('seconds_')} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
