"""`accelerate launch` with an exit code that says what became of the ranks: what `agentrl launch` starts for several.

    python -m agentrl.train.launcher --config_file FILE --num_processes N ... -m agentrl.cli.main train RUN

torchrun ends with 1 whatever its ranks ended with. A supervisor that restarts what crashed must know a setting that is
wrong, which no restart corrects.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Sequence

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

CRASHED = 1
REFUSED = 2  # what a rank ends with when the user can fix it; argparse, too


def main(arguments: Sequence[str]) -> int:
    """Run the ranks to their end; the exit code."""
    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        shown = ", ".join(f"rank {rank} with exit code {code}" for rank, code in sorted(codes.items()))
        sys.stderr.write(f"the ranks failed: {shown}\n")
        return exit_code(codes.values())
    except subprocess.CalledProcessError as error:  # of a configuration that starts one process
        return max(error.returncode, CRASHED)  # below 0 for a signal
    return 0


def exit_code(codes: Collection[int]) -> int:
    """Of a launcher whose ranks ended with these; the others of a failed rank were ended by a signal, below 0."""
    return REFUSED if REFUSED in codes else CRASHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
