"""Programs of fixed sizes that serve smaller calls, padded.

`bucket_programs` builds one for each bucket, and proves that the model is one graph for all sizes that it serves;
`padding` compares the padded program with the model, hostile values in the
padding. These are trials: see "A bucket" in docs/serving.md for what they do not see.
"""

from __future__ import annotations
