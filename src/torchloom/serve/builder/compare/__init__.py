"""Is a program the model? Both are run on the same values.

`program_check` says at which sizes, `compare` runs both and looks at results and at what was written, `differences`
compares two values.
"""

from __future__ import annotations
