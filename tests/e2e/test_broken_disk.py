"""Disks that fail, hang, fill up or lose files under a running server.

Each time: every answer is right and none waits for the disk, the log says it once, a counter moves,
and the tier comes back by itself when the cause is gone.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hpkv_sglang.cli.attachment import attached
from hpkv_testing.broken_disk import HANG, BrokenDisk, compiler
from hpkv_testing.client import Answer
from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.server import Server, ServerConfig
from hpkv_testing.tiers import empty_host_pool, wait_until_on_disk
from tests.e2e.support import (
    ask,
    assert_same_answer,
    cacheable,
    device_hit,
    pool_directory,
    prompts,
    storage_flags,
    tiered,
)

pytestmark = pytest.mark.server

LENGTH = 300
# Its regions are so large that none is full, and another begun, at a moment that a test is about.
LARGE = "2g"
PATIENCE_S = 90.0  # turns a tier that does not come back into a failure
# What is broken here of what a file system refuses that was remounted read-only.
WRITING = ("open_to_write", "write", "sync", "reserve", "remove")


def eventually(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until, "not so within a long time"
        time.sleep(0.5)


@dataclass
class Place:
    """A server, its store, and prompts whose answers are known."""

    server: Server
    pool: Path
    store: Path
    seeds: Iterator[int] = field(default_factory=lambda: count(500))
    lines: int = 0  # of the log, before the last trouble
    again: str = ""  # what the log says when it is over

    def stats(self) -> dict[str, Any]:
        with attached(str(self.pool), read_only=True) as core:
            return dict(core.stats())

    def notices(self) -> list[str]:
        """The lines about the disk so far."""
        lines = self.server.log_text().splitlines()
        return [line.partition("hpkv: disk tier: ")[2] for line in lines if "disk tier: " in line]

    def fresh(self, how_many: int = 2) -> list[tuple[list[int], Answer]]:
        work = prompts(how_many, LENGTH, seed=next(self.seeds))
        return [(tokens, device_hit(self.server, tokens)) for tokens in work]

    def on_disk_only(self) -> None:
        self.server.flush_cache()
        wait_until_on_disk(self.pool, PATIENCE_S)
        self.forget()

    def forget(self) -> None:
        self.server.flush_cache()
        empty_host_pool(self.pool)

    def from_storage(self, known: list[tuple[list[int], Answer]]) -> int:
        """Ask again; every answer must be right. Returns how many tokens came from the disk."""
        tokens_from_disk = 0
        for tokens, reference in known:
            answer = self.server.generate(ask(tokens))
            if answer.cached_tokens:
                assert_same_answer(answer, reference)  # a device hit has the same shapes
            assert answer.output_ids == reference.output_ids
            tokens_from_disk += answer.cached_on("storage")
        return tokens_from_disk

    def serves(self, known: list[tuple[list[int], Answer]]) -> None:
        """All of what is known comes from the disk; a busy machine may miss a deadline or two."""

        def whole() -> bool:
            self.forget()
            return self.from_storage(known) == len(known) * cacheable(LENGTH)

        eventually(whole)

    def comes_back(self, known: list[tuple[list[int], Answer]]) -> None:
        """By itself, what is known is written again where it must be, and served."""
        wait_until_on_disk(self.pool, PATIENCE_S)
        self.serves(known)

    @contextmanager
    def trouble(self, said: str, again: str) -> Iterator[None]:
        """In the block there is trouble: a line that starts with `said`, none twice, and a counter
        that moves. When it `is_over`, a line that starts with `again`."""
        lines, errors = len(self.notices()), self.stats()["disk_errors"]
        yield
        eventually(lambda: any(line.startswith(said) for line in self.notices()[lines:]))
        assert self.stats()["disk_errors"] > errors
        self.lines, self.again = lines, again

    def is_over(self) -> None:
        """The trouble is over and was said to be; each line of it was said once."""
        eventually(
            lambda: any(line.startswith(self.again) for line in self.notices()[self.lines :])
        )
        beginnings = [line.partition(" (")[0] for line in self.notices()[self.lines :]]
        assert len(beginnings) == len(set(beginnings)), beginnings


def server_config(
    model: Path, pool: Path, store: Path, size: str = "128m", **fields: Any
) -> ServerConfig:
    """A server that waits for the disk no longer than users' do."""
    return tiered(model, pool, *storage_flags(store, size), faults=[], **fields)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> BrokenDisk:
    if compiler() is None:
        pytest.skip("no C compiler for the library that breaks the disk")
    folder = tmp_path_factory.mktemp("broken")
    return BrokenDisk(folder / "store", folder)


@pytest.fixture(scope="module")
def place(
    disk: BrokenDisk, server_factory: ServerFactory, llama_checkpoint: Path
) -> Iterator[Place]:
    with pool_directory() as pool:
        config = server_config(
            llama_checkpoint, pool, disk.folder, LARGE, env=disk.env, new_python=True
        )
        (server,) = server_factory.fresh(config)
        yield Place(server, pool, disk.folder)
        server.kill()


@pytest.mark.parametrize(
    ("action", "said", "again"),
    [
        (errno.EIO, "reading failed (read region", "reading works again"),
        (HANG, "reading hangs", "reading no longer hangs"),
    ],
    ids=["EIO", "hang"],
)
def test_reads_that_fail_are_misses_until_they_work(
    place: Place, disk: BrokenDisk, action: int, said: str, again: str
) -> None:
    known = place.fresh()
    place.on_disk_only()
    with disk.broken("read", action=action):
        with place.trouble(said, again):
            assert place.from_storage(known) == 0
        place.forget()
        assert place.from_storage(known) == 0
    place.comes_back(known)
    place.is_over()


@pytest.mark.parametrize(
    ("kinds", "action", "said", "again"),
    [
        (("write",), errno.EIO, "writing failed (write region", "writing works again"),
        (("write",), HANG, "writing hangs", "writing no longer hangs"),
        (WRITING, errno.EROFS, "writing failed", "writing works again"),
    ],
    ids=["EIO", "hang", "read-only"],
)
def test_a_disk_that_takes_no_writes_still_gives_what_it_has(
    place: Place, disk: BrokenDisk, kinds: tuple[str, ...], action: int, said: str, again: str
) -> None:
    known = place.fresh()
    place.on_disk_only()
    with disk.broken(*kinds, action=action):
        with place.trouble(said, again):
            place.fresh()
        place.serves(known)
        place.fresh()
    place.comes_back(known)
    place.is_over()


@pytest.mark.parametrize(
    ("action", "said", "again"),
    [
        (errno.EIO, "keeping the store in order failed", "keeping the store in order works again"),
        (HANG, "keeping the store in order hangs", "keeping the store in order no longer hangs"),
    ],
    ids=["EIO", "hang"],
)
def test_syncs_that_fail_or_hang_hold_nobody(
    place: Place, disk: BrokenDisk, action: int, said: str, again: str
) -> None:
    with disk.broken("sync", action=action), place.trouble(said, again):
        known = place.fresh()
        place.on_disk_only()
        place.serves(known)
    place.is_over()


def test_a_directory_that_is_gone_for_a_while(place: Place) -> None:
    """What was on disk may be forgotten; what comes afterwards is kept and served."""
    known = place.fresh()
    place.on_disk_only()
    away = place.store.with_name("away")
    said = "keeping the store in order failed (find the store's directory"
    with place.trouble(said, "keeping the store in order works again"):
        place.store.rename(away)
        place.from_storage(known)
        place.fresh(how_many=4)
    away.rename(place.store)
    place.comes_back(place.fresh())
    place.is_over()


def damage(paths: list[Path], how: str) -> None:
    if how == "flipped":
        for path in paths:
            whole = bytearray(path.read_bytes())
            for at in range(4096, len(whole), 4096):
                whole[at] ^= 1
            path.write_bytes(whole)
    elif how == "truncated":
        for path in paths:
            os.truncate(path, 4096)
    elif how == "swapped":
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
            path.write_bytes(content)
    else:
        for path in paths:
            path.unlink()


def test_damaged_files_are_misses_and_are_written_anew(
    server_factory: ServerFactory, llama_checkpoint: Path, tmp_path: Path
) -> None:
    """The log tells of the first; after that counters do."""
    with pool_directory() as pool:
        (server,) = server_factory.fresh(server_config(llama_checkpoint, pool, tmp_path / "store"))
        place = Place(server, pool, tmp_path / "store")
        known = place.fresh(how_many=12)  # more than a region holds
        for how in ("flipped", "truncated", "swapped", "deleted"):
            place.on_disk_only()
            errors = place.stats()["disk_errors"]
            damage(sorted((place.store / "regions").iterdir()), how)
            if how == "deleted":  # until the keeper finds it out, it can be read where it is open
                eventually(lambda before=errors: place.stats()["disk_errors"] > before)
            served = place.from_storage(known)
            # What is deleted can still be read where it is open.
            assert served < len(known) * cacheable(LENGTH) / (1 if how == "deleted" else 4), how
            eventually(lambda before=errors: place.stats()["disk_errors"] > before)
            place.comes_back(known)
        assert sum(line.startswith("damaged or missing blocks") for line in place.notices()) == 1
        server.kill()


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[None]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a file system of its own cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_another_program_fills_the_disk_and_leaves_again(
    server_factory: ServerFactory, llama_checkpoint: Path, tmp_path: Path
) -> None:
    """On a real file system of 320 MiB: the store gives back, and grows again."""
    folder = tmp_path / "small"
    folder.mkdir()
    with small_file_system(folder, "320m"), pool_directory() as pool:
        (server,) = server_factory.fresh(server_config(llama_checkpoint, pool, folder / "store"))
        place = Place(server, pool, folder / "store")
        place.fresh(how_many=40)
        wait_until_on_disk(pool, PATIENCE_S)

        def bytes_on_disk() -> int:
            blocks = 0
            for path in place.store.rglob("*"):
                with suppress(FileNotFoundError):  # it went meanwhile
                    blocks += path.stat().st_blocks
            return blocks * 512

        def said() -> list[str]:
            """Of the file system; that a write took long or found no space may be said besides."""
            return [line for line in place.notices() if line.startswith("the file system")]

        full = bytes_on_disk()
        other = folder / "another program's"
        left = os.statvfs(folder)
        with other.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize)
        eventually(lambda: bytes_on_disk() < full and len(said()) > 0)
        place.fresh(how_many=4)
        assert bytes_on_disk() < full
        other.unlink()
        eventually(lambda: len(said()) > 1)
        place.comes_back(place.fresh())
        place.fresh(how_many=40)
        eventually(lambda: bytes_on_disk() >= full)
        nearly_full, room_again = said()
        assert nearly_full.startswith("the file system is nearly full")
        assert room_again.startswith("the file system has room again")
        server.kill()


def test_a_server_whose_disk_hangs_can_be_stopped(place: Place, disk: BrokenDisk) -> None:
    """The last of this server: nothing in it waits for the disk without a bound."""
    with disk.broken("read", "write", "sync"):
        met = disk.met("write")
        place.fresh()
        eventually(lambda: disk.met("write") > met)
        assert place.server.stop(60.0) != 128 + 9


def test_a_server_serves_while_it_recovers(
    disk: BrokenDisk, server_factory: ServerFactory, llama_checkpoint: Path
) -> None:
    """After a reboot, on a disk that for a while does not say what its regions hold."""
    what = "finding out what the store holds"
    with pool_directory() as pool:
        (server,) = server_factory.fresh(server_config(llama_checkpoint, pool, disk.folder, LARGE))
        known = Place(server, pool, disk.folder).fresh()
        server.flush_cache()
        wait_until_on_disk(pool, PATIENCE_S)
        server.kill()
    with pool_directory() as pool:
        config = server_config(
            llama_checkpoint, pool, disk.folder, LARGE, env=disk.env, new_python=True
        )
        with disk.broken("read", below="regions"):
            (server,) = server_factory.fresh(config)
            place = Place(server, pool, disk.folder, count(900))
            assert place.from_storage(known) == 0
            place.fresh()
            eventually(lambda: any(line.startswith(f"{what} hangs") for line in place.notices()))
        place.serves(known)
        eventually(lambda: any(line.startswith(f"{what} no longer") for line in place.notices()))
        server.kill()
