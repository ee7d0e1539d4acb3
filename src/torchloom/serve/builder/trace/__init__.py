"""A model as a graph, and all that the trace relied on.

`trace` captures the graph. Guards of Dynamo become facts (`guard_facts`), or questions to each call
(`argument_guards`); the traced code is kept by the places where it is reached (`traced_code`). What Dynamo puts no
guard on is found in the code by `unguarded`:

    absent_names         attributes and keys that were looked for and not there
    class_checks         `isinstance` and `issubclass` of classes that decide by more than inheritance
    environment_reads    variables of the environment
    set_order            the order of sets, and hashes of texts
"""

from __future__ import annotations
