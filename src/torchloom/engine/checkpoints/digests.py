"""Digests of files, a block at a time: made while a file is written, compared in threads.

A block is 16 MiB with a CRC-32. One flipped bit, or any error within 32 bits, always changes it;
other damage passes with a chance of 2**-32 per block. The digests guard against accidents; against
malice nothing in a checkpoint is ever executed. Measured on one core of a 2-core Xeon with a file in
the page cache, in GB/s: reading alone 8.5, with CRC-32 2.8, SHA-256 (with its instructions) 1.4,
blake2b 0.7; a disk there reads 1 to 2. `torchloom checkpoint verify` prints the figure of a machine.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

BLOCK = 16 << 20
"""Bytes per digest: enough that a digest costs nothing to keep, few enough to share the work."""
_MAX_THREADS = 8
_READ = 1 << 20


class Sums(NamedTuple):
    """What a manifest says of one file."""

    size: int
    blocks: list[int]


class SummedFile:
    """A file that is being written, and the digests of what was written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("xb")
        self._blocks: list[int] = []
        self._crc = self._in_block = self.size = 0
        self.error: OSError | None = None
        """Why writing failed: who writes through others' code would not hear of it."""

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes.

        Returns:
            The number of bytes, as Python's writable files do.

        Raises:
            OSError: the bytes cannot be written; the error names the file and stays in `error`.
        """
        view = memoryview(content).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, str(self.path))
            raise self.error from None
        at = 0
        while at < len(view):
            part = view[at : at + BLOCK - self._in_block]
            self._crc = zlib.crc32(part, self._crc)
            self._in_block += len(part)
            at += len(part)
            if self._in_block == BLOCK:
                self._blocks.append(self._crc)
                self._crc = self._in_block = 0
        self.size += len(view)
        return len(view)

    def finish(self) -> Sums:
        """Bring the file to the disk and return its digests.

        Raises:
            OSError: it cannot be written.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        last = [self._crc] if self._in_block else []
        return Sums(self.size, [*self._blocks, *last])

    def close(self) -> None:
        """Let go of the file; of one that is not finished, nothing more is written."""
        with contextlib.suppress(OSError):
            self._file.close()


def write_summed(path: Path, content: bytes) -> Sums:
    """Write a whole small file; see `SummedFile`."""
    file = SummedFile(path)
    try:
        file.write(content)
        return file.finish()
    finally:
        file.close()


class DigestBlock(NamedTuple):
    """One block of one file, to compare."""

    name: str
    index: int
    sums: Sums


def blocks_of(files: dict[str, Sums]) -> list[DigestBlock]:
    """Return all blocks of all files; a file without content counts as one."""
    return [
        DigestBlock(name, index, sums)
        for name, sums in sorted(files.items())
        for index in range(max(1, len(sums.blocks)))
    ]


def check_blocks(folder: Path, blocks: Sequence[DigestBlock]) -> list[str]:
    """Compare blocks with what is on the disk; return what is wrong, a sentence per file."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda block: _check(folder, block), blocks)
        wrong: dict[str, str] = {}
        for block, sentence in zip(blocks, found, strict=True):
            if sentence:
                wrong.setdefault(block.name, sentence)
    return list(wrong.values())


def _check(folder: Path, block: DigestBlock) -> str:
    path, start, size = folder / block.name, block.index * BLOCK, block.sums.size
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode):
            return f"{path} is not a regular file"
        if facts.st_size != size:
            return f"{path} has {facts.st_size} bytes, it was saved with {size}"
        end = min(start + BLOCK, size)
        if block.sums.blocks and _crc_of(path, start, end) != block.sums.blocks[block.index]:
            return f"{path} is damaged: bytes {start} to {end} are not those that were saved"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return ""


def _crc_of(path: Path, start: int, end: int) -> int:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        crc, left, buffer = 0, end - start, memoryview(bytearray(_READ))
        while left > 0:
            num = file.readinto(buffer[: min(left, _READ)])
            if not num:
                return -1  # cut while it was read
            crc, left = zlib.crc32(buffer[:num], crc), left - num
    return crc
