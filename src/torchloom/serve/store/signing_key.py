"""The user's key, and the signature of an entry.

A digest proves that bytes are whole, not who wrote them. The signature covers the name of an entry and all that it
says, the digests of its objects among it. Whoever lacks the key cannot make this user's processes run anything,
wherever the folder came from.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchloom import envs
from torchloom.errors import ArtifactError
from torchloom.files import make_own, read_own, why_replaceable

_NUM_BYTES = 32
_PURPOSE = b"torchloom: an entry of a store of programs\0"
_PRIVATE, _GIVEN_BY_ROOT = 0o077, 0o037
"""What others may not do with a key; root may give one to a group, as mounted secrets are."""


class SigningKey:
    """The user's key.

    Args:
        make: whether to make one where there is none.

    Raises:
        ArtifactError: there is none, or others can read or change it.
    """

    def __init__(self, *, make: bool = False) -> None:
        self.path = envs.key_file()
        try:
            if make and not self.path.exists():
                _make(self.path)
            path = self.path.resolve()  # mounted secrets are links
            others = _GIVEN_BY_ROOT if path.stat().st_uid != os.geteuid() else _PRIVATE
            self._secret = read_own(path, others)
            reason = why_replaceable(path)
        except FileNotFoundError as error:
            raise ArtifactError(
                f"there is no key at {self.path} to check signatures with, so nothing here was built or "
                "trusted by this user: build again, or name the key that signed it in TORCHLOOM_KEY_FILE"
            ) from error
        except (
            OSError,
            RuntimeError,
        ) as error:  # RuntimeError: a loop of links, before Python 3.13
            reason = f"{self.path}: {getattr(error, 'strerror', None) or error}"
        if not reason and len(self._secret) < _NUM_BYTES:
            reason = f"{self.path} holds {len(self._secret)} bytes, a key has {_NUM_BYTES}"
        if reason:
            raise ArtifactError(
                f"the key that stored programs are signed with cannot be used: {reason}; make it yours with "
                f"`chmod 600 {self.path}`, or name another in TORCHLOOM_KEY_FILE"
            )

    @property
    def name(self) -> str:
        """What tells it from other keys, without giving it away."""
        return hashlib.sha256(b"name\0" + self._secret).hexdigest()[:8]

    def sign(self, name: str, entry: Mapping[str, Any]) -> str:
        """Return the signature of an entry."""
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
        content = _PURPOSE + name.encode() + b"\0" + text.encode()
        return f"{self.name}:{hmac.new(self._secret, content, hashlib.sha256).hexdigest()}"

    def why_not(self, name: str, entry: Mapping[str, Any], signature: object) -> str:
        """Return why a signature is not that of an entry, or nothing.

        Args:
            name: of the entry.
            entry: what it says, without its signature.
            signature: what it is signed with, as it was read.
        """
        if not isinstance(signature, str) or not signature.isascii():
            return "it has no signature"
        if hmac.compare_digest(self.sign(name, entry), signature):
            return ""
        if signature.partition(":")[0] == self.name:
            return "it was changed since it was signed"
        return f"it was not signed with your key ({self.path})"


def _make(path: Path) -> None:
    """Make a key, once, however many processes want one."""
    make_own(path.parent)
    handle, partial = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}."
    )  # private from the start
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_NUM_BYTES))
        os.link(partial, path)
    except FileExistsError:
        return
    finally:
        Path(partial).unlink()
