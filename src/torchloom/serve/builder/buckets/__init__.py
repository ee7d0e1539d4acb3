"""Programs of fixed sizes that serve smaller calls, padded: proven not to let padding reach a result.

`bucket_programs` makes one for each bucket. `one_graph` proves that the model is the same graph for all sizes that it
serves; `axes` finds what of a result is to be cut; `padding` tries the program with all kinds of padding; `rows` tries
each operator: `row_reductions` by sizes, `row_trials` by values, both on a `row_graph`.
"""

from __future__ import annotations
