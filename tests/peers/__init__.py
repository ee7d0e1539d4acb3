"""Unit tests of other libraries, run on torchloom by a map of names; see CONTRIBUTING.md."""
