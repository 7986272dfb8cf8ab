"""Does training to reflect pay? Trains each variant with each seed, measures test-time scaling, and sums it up.

    .venv/bin/python benchmarks/mr_search_study.py OUT --profile mr_search_laptop --seeds 0,1,2 [-- --setting value ...]

    mr       the profile as it is: several episodes, turn-level credit
    gamma0   the same, an episode is not paid for what later ones achieve
    single   one episode with the turns and tool calls of all of them, rewarded for its outcome (GRPO)

Runs one process tree at a time. A run that is finished is not repeated, one that was stopped goes on; neither is an
evaluation. What follows `--` are settings of every launch. Writes OUT.json and OUT.png and prints Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from agentrl.config import RunConfig
from agentrl.config.load import load_config
from agentrl.evaluate.scaling import SamplePoint, TurnPoint
from agentrl.evaluate.scaling_report import ScalingReport, draw_reports, read_report

STOP_S = 60.0
Point = TypeVar("Point", TurnPoint, SamplePoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is run, and where."""

    profile: str
    name: str
    minutes: float
    turns: int
    settings: tuple[str, ...]
    eval_settings: tuple[str, ...]
    output_dir: Path

    def flags(self, variant: str) -> list[str]:
        """The settings of a variant."""
        config = load_config(profile=self.profile, config_file=None, environ=os.environ, argv_flags=[*self.settings])
        return [*self.settings, *variant_flags(variant, config=config)]


def variant_flags(variant: str, *, config: RunConfig) -> list[str]:
    """How a variant differs from the profile."""
    if variant == "mr":
        return []
    if variant == "gamma0":
        return ["--gamma", "0"]
    episodes, calls = config.reflection.episodes, config.reflection.tool_calls_per_episode
    return [
        "--episodes", "1",
        "--max_turns", str(episodes * config.rollout.max_turns),
        "--tool_calls_per_episode", "none" if calls is None else str(episodes * calls),
        "--advantage", "group_norm", "--gamma", "1",
    ]  # fmt: skip


def main() -> None:
    """Train, evaluate, sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="results go to OUT.json and OUT.png")
    parser.add_argument("--profile", default="mr_search_laptop")
    parser.add_argument("--name", default="study", help="start of every run's name (default: %(default)s)")
    parser.add_argument("--variants", default="mr,gamma0,single")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", type=float, default=25.0, help="of one training (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=6, help="turns, and samples, at test time (default: %(default)s)")
    parser.add_argument("--eval_settings", default="", help='settings of every evaluation, e.g. "--temperature 0.7"')
    parser.add_argument("--output_dir", type=Path, default=Path("output"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # so that the command under way is stopped too
    own, settings = split_at_dashes(sys.argv[1:])
    arguments = parser.parse_args(own)
    study = Study(
        profile=arguments.profile, name=arguments.name, minutes=arguments.minutes, turns=arguments.turns,
        settings=tuple(settings), eval_settings=tuple(shlex.split(arguments.eval_settings)),
        output_dir=arguments.output_dir,
    )  # fmt: skip
    reports: dict[str, list[ScalingReport]] = {}
    for seed in arguments.seeds.split(","):  # seed by seed: what is there after each is a whole comparison
        for variant in arguments.variants.split(","):
            report = run_one(study, variant=variant, seed=int(seed))
            if report is not None:
                reports.setdefault(variant, []).append(report)
                sum_up(reports, out=arguments.out)
    print(markdown({variant: averaged(variant, found) for variant, found in reports.items()}))


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]


def run_one(study: Study, *, variant: str, seed: int) -> ScalingReport | None:
    """Train and evaluate one run; None if it did not finish in time."""
    run = f"{study.name}-{variant}-s{seed}"
    folder = study.output_dir / run
    if not (folder / "final").is_dir():
        flags = ["--profile", study.profile, "--seed", str(seed), *study.flags(variant)]
        if not agentrl("launch", run, *flags, "--output_dir", str(study.output_dir), timeout_s=60 * study.minutes):
            print(f"{run} did not finish within {study.minutes:g} minutes; start again to go on", flush=True)
            return None
    if (path := newest_report(folder, turns=study.turns)) is None:
        scaling = ["--reflection_turns", f"1..{study.turns}", "--parallel", f"1..{study.turns}"]
        flags = ["--versions", "latest", *scaling, *study.eval_settings, "--output_dir", str(study.output_dir)]
        agentrl("eval", run, *flags, timeout_s=60 * study.minutes)
        path = newest_report(folder, turns=study.turns)
    return None if path is None else read_report(path)


def newest_report(folder: Path, *, turns: int) -> Path | None:
    """The report of the last evaluation with so many turns and samples."""
    found = (folder / "eval").glob(f"v*-turns{turns}-samples{turns}-t*.json")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def agentrl(*arguments: str, timeout_s: float) -> bool:
    """Whether a command came to its end in time and well. One that did not is stopped as Ctrl-C would."""
    print("$ agentrl", shlex.join(arguments), flush=True)
    process = subprocess.Popen([sys.executable, "-m", "agentrl.cli.main", *arguments])
    try:
        return process.wait(timeout=timeout_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=STOP_S)


def sum_up(reports: dict[str, list[ScalingReport]], *, out: Path) -> None:
    """Write what is known so far."""
    means = {variant: averaged(variant, found) for variant, found in reports.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {
        variant: {"mean": asdict(means[variant]), "seeds": [asdict(report) for report in found]}
        for variant, found in reports.items()
    }
    out.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draw_reports(out.with_suffix(".png"), list(means.values()))


def averaged(variant: str, reports: Sequence[ScalingReport]) -> ScalingReport:
    """Means over seeds. The errors are standard deviations over seeds, 0 for one."""
    return replace(
        reports[0],
        run_name=f"{variant}, {len(reports)} seeds",
        num_failed=sum(report.num_failed for report in reports),
        splits=(),
        turns=tuple(mean_point(list(points)) for points in zip(*(report.turns for report in reports), strict=False)),
        samples=tuple(
            mean_point(list(points)) for points in zip(*(report.samples for report in reports), strict=False)
        ),
    )


def mean_point(points: Sequence[Point]) -> Point:
    """The mean of one point over seeds."""
    means = {
        field.name: statistics.fmean(getattr(point, field.name) for point in points) for field in fields(points[0])
    }
    for name in ("accuracy", "pass_at"):
        if f"{name}_error" in means:
            means[f"{name}_error"] = spread([getattr(point, name) for point in points])
    counts = {
        name: round(means[name]) for name in ("turn", "samples", "num_trajectories", "num_questions") if name in means
    }
    return replace(points[0], **(means | counts))


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def markdown(means: dict[str, ScalingReport]) -> str:
    """Accuracy by turn and by number of samples, with the tool calls each took."""
    lines = []
    for title, kind in (("turn", "turns"), ("majority vote of", "samples")):
        points = {variant: getattr(report, kind) for variant, report in means.items()}
        numbers = range(1, max(map(len, points.values()), default=0) + 1)
        lines += [
            "",
            "| | " + " | ".join(f"{title} {number}" for number in numbers) + " |",
            "|---" * (len(numbers) + 1) + "|",
        ]
        for variant, found in points.items():
            cells = [f"{p.accuracy:.3f} ± {p.accuracy_error:.3f} ({p.total_tool_calls:.2f})" for p in found]
            lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "mean ± standard deviation over seeds (tool calls per question so far)"])


if __name__ == "__main__":
    main()
