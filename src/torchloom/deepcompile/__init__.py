"""The dialect of DeepSpeed's DeepCompile: passes written for it run here unchanged.

forms     the signatures that a pass may have, and how its arguments are found
handles   what passes are handed: parameters of a graph, and the runtime (`nz3`)
profile   the figures of a captured graph under DeepCompile's names
site      which graph a pass runs on, and what is known of all graphs of the session
"""

from __future__ import annotations
