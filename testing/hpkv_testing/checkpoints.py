"""A folder of checkpoints, each made once.

Invariant: a folder that exists under its final name is complete. It is built under a temporary
name beside it and renamed, so a killed build leaves nothing that looks finished, and two processes
that build the same checkpoint end with one of the two equal results.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def default_folder() -> Path:
    """Where checkpoints are kept when the caller names no folder."""
    chosen = os.environ.get("HPKV_TESTING_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hpkv-testing"


def name_of(stem: str, *parts: object) -> str:
    """A folder name that differs whenever one of `parts` does."""
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    return f"{stem}-{digest}"


def made_once(name: str, build: Callable[[Path], None], folder: Path | None = None) -> Path:
    """Return `folder/name`, calling `build(empty directory)` first if it is not there yet."""
    parent = default_folder() if folder is None else folder
    final = parent / name
    if final.is_dir():
        return final
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    try:
        build(work)
        work.chmod(0o755)
        try:
            work.rename(final)
        except OSError:
            if not final.is_dir():  # else: another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final
