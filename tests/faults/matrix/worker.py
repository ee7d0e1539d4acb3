"""The process of one rank: runs one program of `programs`."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

from faults.matrix.programs import PROGRAMS, Rank


def main() -> None:
    """Run `worker PROGRAM SETTINGS`."""
    program, settings = sys.argv[1], json.loads(sys.argv[2])
    # A rank that hangs is asked for its stacks, for whoever reads the output of the case.
    logs = Path(os.environ["FAULTS_FOLDER"]) / "logs"
    stacks = (logs / f"stacks {program} {os.environ.get('RANK')} {os.getpid()}").open("w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    PROGRAMS[program](Rank(**settings))


if __name__ == "__main__":
    main()
