"""Whether others can put code where Inductor finds it.

Inductor runs the sources and shared objects that lie in its cache, by names that anybody can work out. Left
alone, the cache is a folder of /tmp, which whoever comes first may make.
"""

from __future__ import annotations

from pathlib import Path

from torchloom._torch.inductor import inductor_cache_dir
from torchloom.files import why_replaceable


def why_cache_is_open() -> str:
    """Return why others can write to Inductor's cache and what to do, or nothing."""
    folder = Path(inductor_cache_dir())
    reason = why_replaceable(folder / "any")
    return reason and (
        f"the compiler's cache {folder} is not this user's alone ({reason}), and what lies in it is run as "
        "code: set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
    )
