"""What makes a program: `build` asks the store, and lets `builder` make what is not there.

    trace                Dynamo captures the model; what the trace relied on is written down
    prove                what it assumed of sizes is evaluated for each size
    builder              pieces of the graph are compiled and put together (`pieces`)
    compare              the program is run beside the model
    buckets              programs of fixed sizes that serve smaller calls

`options` are the choices of the user. `builder` cuts ranges of sizes where a proof or a comparison fails.
"""

from __future__ import annotations
