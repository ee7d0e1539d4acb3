"""`python -m torchloom` is the command `torchloom`."""

from __future__ import annotations

from torchloom.cli import main

if __name__ == "__main__":
    main()
