"""What users call: one module for each public function. Each joins the parts below it.

`watch` opens the hooks of `listen` and has `record` make the record; `explain` and `expect` are watches.
`entries`, `explain_call`, `overhead` and `jit` read what torch holds now, and compile nothing by themselves.
"""

from __future__ import annotations
