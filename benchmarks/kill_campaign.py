"""Kill processes of a run by the hundred and show that nothing was lost: the long mode of the kill campaign.

    .venv/bin/python benchmarks/kill_campaign.py --kills 500 --seed 1 --output kills

A database server, three samplers, two engines and a trainer are real processes, killed with SIGKILL at instants that
the seed chooses. Prints a line per blow, and at the end (or at Ctrl-C, of what happened so far) a Markdown table, which
`--output` also writes to kills.md, with all figures in kills.json. Exit code 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kill_campaign import BOUND_S, Campaign, run_campaign, table  # shared with the tests
from kill_plan import REAL, SCRIPTED


def main() -> int:
    """Run the campaign; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills_per_run", type=int, default=25)
    parser.add_argument("--most_victims", type=int, default=3, help="of one blow")
    parser.add_argument("--output", type=Path, help="OUTPUT.md and OUTPUT.json are written")
    parser.add_argument("--folder", type=Path, help="where logs and data stay; default: a temporary folder, removed")
    parser.add_argument("--real", action="store_true", help="the commands of a launch, with torch on a tiny model")
    arguments = parser.parse_args()
    cast = REAL if arguments.real else SCRIPTED
    campaign = Campaign(seed=arguments.seed, cast=cast, tell=lambda line: print(line, flush=True))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if arguments.folder is None else arguments.folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run_campaign(
                folder,
                campaign=campaign,
                num_kills=arguments.kills,
                kills_per_run=arguments.kills_per_run,
                num_victims=(1, arguments.most_victims),
            )
        except KeyboardInterrupt:
            print("\ninterrupted: the table is of what happened until then")
    show(campaign, output=arguments.output)
    return 1 if campaign.problems else 0


def show(campaign: Campaign, *, output: Path | None) -> None:
    """Print the result and write it."""
    text = (
        f"{table(campaign)}\n\n{len(campaign.kills)} kills in {campaign.seconds:.0f} s, seed {campaign.seed}: "
        f"{campaign.num_runs} audited runs, {campaign.num_records:,} Records, {campaign.num_turns:,} committed turns, "
        f"{campaign.num_steps:,} steps; {len(campaign.problems)} broken promises; bound of the recovery {BOUND_S:g} s."
    )
    print(text)
    for problem in campaign.problems:
        print(f"  {problem}")
    if output is not None:
        figures = {item.name: getattr(campaign, item.name) for item in fields(campaign) if item.name != "tell"}
        figures |= {"kills": [asdict(kill) for kill in campaign.kills], "at_the_end": list(campaign.at_the_end)}
        figures["cast"] = dict(campaign.cast.counts)
        output.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
        output.with_suffix(".json").write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
