"""What a served model promises about its inputs.

`specs` describes single arguments by the sizes of `dims`; `contract` is the promise for all of them, and makes
examples of it. `conditions` compares a call with it, in words. `box` is a part of the sizes that a contract allows,
for which there is one program. `infer` makes a contract of annotations and a first call.
"""

from __future__ import annotations
