"""Texts of unknown origin on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text without what would steer a terminal.

    Example:
        >>> printable("a\\x1b[2Jb")
        'a\\\\x1b[2Jb'
    """
    return "".join(
        each if each.isprintable() or each in "\n\t" else f"\\x{ord(each):02x}" for each in text
    )
