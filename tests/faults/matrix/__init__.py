"""The fault matrix: what a user meets when something goes wrong between ranks.

    python -m faults.matrix            all cases, one row each; `make faults` calls it
    python -m faults.matrix --list     their names
    python -m faults.matrix --only network --json found.json

    case       what goes wrong, and how each rank must end
    cases      all of them, by what goes wrong
    programs   what the ranks run; `worker` is the process of one rank
    ranks      starts the processes of a case, watches them, cleans up
    forkserver forks ranks from one process that has imported torch
    traces     processes and files that are left behind
    judge      whether a case ended as it must: a function of what was seen
    table      rows and summary

Ranks that no launcher starts are forked after the imports; with `--exec` each is a fresh process, as a user
starts it. Nothing here but `programs`, `worker` and the server itself imports torch.
"""

from __future__ import annotations
