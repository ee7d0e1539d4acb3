"""Makes the record of a watch from what its hooks collected, after the watched block has ended.

`session` reads the rows of the trace, in order, into one `Compile` for each attempt of Dynamo, completes their
entries from the live ones, and hangs them under functions. The other modules each fill one part of an entry or
of a function. Nothing here touches the watched program: it reads text, code objects and live entries.
"""

from __future__ import annotations
