"""What is known of a served model beside its inputs.

`target` is the model and how it is called. What a program relies on of it are facts:

    spelling             a value as text that is equal in each process
    facts                constants and attributes: what was there, asked again later; on top of these
                         `environment`, `operators`, `shared_memory`
    code                 the code that was traced; `code_reader` digests it, by `functions` and `bytecode`

What a call may change is put back while a program is built (`snapshot`). While the model lives, `call.read_values`
notices what was set, and `hooks` what else changed.
"""

from __future__ import annotations
