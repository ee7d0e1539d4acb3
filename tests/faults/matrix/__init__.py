"""The fault matrix: what a user meets when something goes wrong between ranks.

    python -m faults.matrix            all cases, one row each; `make faults` calls it
    python -m faults.matrix --list     their names
    python -m faults.matrix --only network --json found.json

    case       what goes wrong, and how each rank must end
    cases      all of them, by what goes wrong
    programs   what the ranks run; `worker` is the process of one rank
    ranks      starts the processes of a case, watches them, cleans up
    traces     processes and files that are left behind
    judge      whether a case ended as it must: a function of what was seen
    table      rows and summary

Ranks are fresh processes, as a user starts them. Nothing here but `programs` and `worker` imports torch.
"""

from __future__ import annotations
