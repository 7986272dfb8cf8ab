"""What the hard staleness bound costs and gains, in virtual time: sync, one step off, and async with K = 1, 2, 4.

    .venv/bin/python benchmarks/staleness.py

The engines' latencies are log-normal (median 12 units), a step takes 20 units, 32 slots, 32 groups per step; admission,
planning and the ledger are the product's own. Prints a Markdown table; the same arguments print the same table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from staleness_simulation import measure, modes, table  # the simulation is shared with the tests


def main() -> None:
    """Measure every mode at every spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.3, 0.8])
    parser.add_argument("--num_steps", type=int, default=110)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    measured = [
        (sigma, mode, measure(scenario))
        for sigma in arguments.sigma
        for mode, scenario in modes(sigma=sigma, num_steps=arguments.num_steps, seed=arguments.seed).items()
    ]
    print(table(measured))  # the product of this script


if __name__ == "__main__":
    main()
