"""A disk that fails or hangs while a test wants it to, under real servers on real files.

A small C library (broken_disk.c) is preloaded into the servers and stands between them and libc.
Unlike the faults of faults.py it knows nothing of the program it is under.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("broken_disk.c")
VARIABLE = "HPKV_TEST_BROKEN_DISK"
KINDS = ("open_to_read", "open_to_write", "read", "write", "sync", "reserve", "remove", "space")
HANG = -1
_FOLDER_AT = 8 * len(KINDS)
_BYTES = 4096 + _FOLDER_AT


class BrokenDisk:
    """The files below `folder`. Any number of processes started with `env` are under it.

    `workspace` is a folder for the library and the file through which it is told. Needs a C
    compiler: see `compiler`.
    """

    def __init__(self, folder: Path, workspace: Path) -> None:
        library, control = workspace / "broken_disk.so", workspace / "broken_disk.control"
        subprocess.run(
            [compiler() or "cc", "-O1", "-fPIC", "-shared", "-o", library, SOURCE, "-ldl"],
            check=True,
        )
        control.write_bytes(bytes(_BYTES))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), _BYTES)
        self.folder = folder
        self.env = (("LD_PRELOAD", str(library)), (VARIABLE, str(control)))

    @contextmanager
    def broken(self, *kinds: str, action: int = HANG, below: str = "") -> Iterator[None]:
        """While the block runs, calls of these kinds fail with the errno `action`, or hang.

        `below`: only on files in this part of the folder. One block at a time.
        """
        name = os.fsencode(self.folder.resolve() / below)
        self._control[_FOLDER_AT:] = name.ljust(_BYTES - _FOLDER_AT, b"\0")
        for kind in kinds:
            struct.pack_into("=i", self._control, 4 * KINDS.index(kind), action)
        try:
            yield
        finally:
            for kind in kinds:
                struct.pack_into("=i", self._control, 4 * KINDS.index(kind), 0)

    def met(self, *kinds: str) -> int:
        """How many calls of these kinds have failed or hung since the beginning."""
        at = 4 * len(KINDS)
        return sum(
            struct.unpack_from("=i", self._control, at + 4 * KINDS.index(kind))[0] for kind in kinds
        )


def compiler() -> str | None:
    """The C compiler, or None where there is none."""
    return shutil.which("cc") or shutil.which("gcc")
