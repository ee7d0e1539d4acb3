"""What is known of a served model beside its inputs.

`target` is the model and how it is called. What a program relies on of it is its `fingerprint`:

    spelling             a value as text that is equal in each process
    expressions          Python by which a trace names values, evaluated in other processes
    facts                constants and attributes: what was there, asked again later
    code                 digests of the functions and classes among them

What a call may change is put back while a program is built (`snapshot`). What changes while the model lives is noticed by
`call.live_model`.
"""

from __future__ import annotations
