"""Run passes written for DeepSpeed's DeepCompile unchanged.

forms     the signatures that a pass may have, and how its arguments are found
handles   the objects that passes receive: parameters of a graph, and the runtime (`nz3`)
profile   the figures of a captured graph under DeepCompile's names
site      the graph that a pass runs on, and the records of all graphs of the session
"""

from __future__ import annotations
