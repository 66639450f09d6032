"""Finding, creating and refusing a pool: the directory decides, and errors say what to do."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpkv_sglang._core import CorePoolError, KeyBatch, Pool

MIB = 1 << 20
SIZE = 16 * MIB
VERSION_AT, POISONED_AT, POISON_REASON_AT = 8, 196, 200  # docs/formats/pool.md
NAMESPACE = b"n" * 32
KEY = bytes(range(32))


@pytest.fixture
def directory() -> Iterator[Path]:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="attach-test-", dir=base))
    try:
        yield path / "pool"
    finally:
        shutil.rmtree(path)


def refused(directory: Path, **options: object) -> tuple[str, str]:
    with pytest.raises(CorePoolError) as caught:
        Pool.open(str(directory), **options)  # type: ignore[arg-type]
    kind, message = caught.value.args
    assert str(directory) in message, "an error names the object"
    assert ";" in message, "an error ends in the remedy"
    if options.keys() <= {"pool_bytes"} and kind != "slots":
        with pytest.raises(CorePoolError) as looked:
            Pool.check_place(str(directory), **options)  # type: ignore[arg-type]
        assert looked.value.args == (kind, message), "a look says the same"
    return kind, message


def patch(path: Path, offset: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(raw)


def store_one(pool: Pool) -> None:
    index = pool.add_namespace(NAMESPACE, b"text", 4096)
    assert pool.put(index, KEY, b"x" * 4096) == "stored"


def is_warm(pool: Pool) -> bool:
    return pool.lookup(KeyBatch.from_bytes(KEY)) == 1


def test_a_new_pool_is_private_to_its_user(directory: Path) -> None:
    pool = Pool.open(str(directory), pool_bytes=SIZE)
    file = Path(pool.path)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.stat().st_size == pool.pool_bytes == SIZE
    assert list(directory.iterdir()) == [file], "nothing else is left behind"


def test_a_second_client_adopts_the_size_and_sees_the_blocks(directory: Path) -> None:
    first = Pool.open(str(directory), pool_bytes=SIZE)
    store_one(first)
    second = Pool.open(str(directory))
    assert (first.adopted, second.adopted) == (False, True)
    assert second.pool_bytes == SIZE and second.uuid == first.uuid and second.slot != first.slot
    assert is_warm(second)


def test_a_namespace_that_was_left_makes_room_once_its_blocks_are_gone(directory: Path) -> None:
    pool = Pool.open(str(directory), pool_bytes=SIZE)
    first = pool.add_namespace(NAMESPACE, b"", 4096)
    assert pool.put(first, KEY, b"x" * 4096) == "stored"
    pool.leave_namespace(first)
    for number in range(300):
        name = number.to_bytes(32, "big")
        index = pool.add_namespace(name, b"", 4096)
        assert index != first, "its block is still there"
        assert pool.put(index, name[::-1], b"y" * 4096) == "stored"
        assert pool.drop_namespace(name) == 1
        pool.leave_namespace(index)
    assert is_warm(pool) and pool.check() == []
    with pytest.raises(CorePoolError, match="are in use"):
        for number in range(300):
            pool.add_namespace(number.to_bytes(32, "little"), b"", 4096)


def test_a_start_that_was_killed_half_way_stands_against_no_other(directory: Path) -> None:
    """The new file has two names for a moment."""
    pool = Pool.open(str(directory), pool_bytes=SIZE)
    store_one(pool)
    pool.close()
    os.link(directory / "pool.hpkv", directory / "pool.hpkv.new")
    again = Pool.open(str(directory))
    assert is_warm(again)
    assert [path.name for path in directory.iterdir()] == ["pool.hpkv"]


def test_blocks_outlive_the_last_client(directory: Path) -> None:
    pool = Pool.open(str(directory), pool_bytes=SIZE)
    store_one(pool)
    pool.close()
    assert is_warm(Pool.open(str(directory), pool_bytes=SIZE))


def test_another_explicit_size_is_refused(directory: Path) -> None:
    pool = Pool.open(str(directory), pool_bytes=SIZE)
    kind, message = refused(directory, pool_bytes=2 * SIZE)
    assert kind == "size" and str(SIZE) in message and str(2 * SIZE) in message
    store_one(pool)


@pytest.mark.parametrize("size", [0, 1, 16 * MIB - 4096])
def test_a_pool_that_is_too_small_is_refused(directory: Path, size: int) -> None:
    with pytest.raises(CorePoolError) as caught:
        Pool.open(str(directory), pool_bytes=size)
    assert caught.value.args[0] == "size"
    assert not (directory / "pool.hpkv").exists()


def test_without_create_a_missing_pool_is_an_error_and_nothing_is_made(directory: Path) -> None:
    assert refused(directory, create=False)[0] == "missing"
    assert not directory.exists()
    directory.mkdir(mode=0o700)
    assert refused(directory, create=False)[0] == "missing"
    assert not list(directory.iterdir())


def test_a_look_at_a_place_makes_the_directory_and_nothing_else(directory: Path) -> None:
    Pool.check_place(str(directory), pool_bytes=SIZE)
    assert list(directory.iterdir()) == []
    pool = Pool.open(str(directory), pool_bytes=SIZE)
    assert not pool.adopted
    store_one(pool)
    clients = pool.stats()["clients"]
    Pool.check_place(str(directory))
    Pool.check_place(str(directory), pool_bytes=SIZE)
    assert pool.stats()["clients"] == clients and is_warm(pool)


def test_a_mistyped_parent_is_not_made(directory: Path) -> None:
    kind, message = refused(directory / "below", pool_bytes=SIZE)
    assert kind == "missing" and "make that one" in message
    assert not directory.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user who may not write")
def test_who_may_not_write_is_told_what_to_do(directory: Path) -> None:
    def as_nobody() -> None:
        os.setuid(65534)
        kind, message = refused(directory, pool_bytes=SIZE)
        assert kind == "system" and "user 65534 may not" in message

    child = multiprocessing.get_context("fork").Process(target=as_nobody)
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 8192, os.urandom(SIZE)])
def test_garbage_is_refused_and_left_as_it_is(directory: Path, content: bytes) -> None:
    directory.mkdir(mode=0o700)
    file = directory / "pool.hpkv"
    file.write_bytes(content)
    file.chmod(0o600)
    assert refused(directory)[0] == "garbage"
    assert file.read_bytes() == content


@pytest.mark.parametrize("offset", [24, 40, 96, 112])
def test_a_flipped_bit_in_the_fixed_part_is_garbage(directory: Path, offset: int) -> None:
    Pool.open(str(directory), pool_bytes=SIZE).close()
    file = directory / "pool.hpkv"
    byte = file.read_bytes()[offset]
    patch(file, offset, bytes([byte ^ 1]))
    assert refused(directory)[0] == "garbage"


def test_a_truncated_pool_is_garbage(directory: Path) -> None:
    Pool.open(str(directory), pool_bytes=SIZE).close()
    os.truncate(directory / "pool.hpkv", SIZE // 2)
    assert refused(directory)[0] == "garbage"


def test_symbolic_links_are_not_followed(directory: Path) -> None:
    elsewhere = directory.with_name("elsewhere")
    Pool.open(str(elsewhere), pool_bytes=SIZE).close()
    directory.symlink_to(elsewhere)
    assert refused(directory)[0] == "owner"
    directory.unlink()
    directory.mkdir(mode=0o700)
    (directory / "pool.hpkv").symlink_to(elsewhere / "pool.hpkv")
    assert refused(directory)[0] == "garbage"


def test_files_and_directories_that_others_may_write_are_refused(directory: Path) -> None:
    Pool.open(str(directory), pool_bytes=SIZE).close()
    (directory / "pool.hpkv").chmod(0o644)
    kind, message = refused(directory)
    assert kind == "owner" and "chmod 600" in message
    (directory / "pool.hpkv").chmod(0o600)
    directory.chmod(0o777)
    kind, message = refused(directory)
    assert kind == "owner" and "chmod 700" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_somebody_else_is_refused(directory: Path) -> None:
    Pool.open(str(directory), pool_bytes=SIZE).close()
    os.chown(directory / "pool.hpkv", 12345, 12345)
    kind, message = refused(directory)
    assert kind == "owner" and "12345" in message
    os.chown(directory, 12345, 12345)
    assert refused(directory)[0] == "owner"


@pytest.mark.parametrize("offset", [VERSION_AT, VERSION_AT + 8], ids=["version", "layout"])
def test_another_version_is_replaced_only_when_nobody_is_attached(
    directory: Path, offset: int
) -> None:
    old = Pool.open(str(directory), pool_bytes=SIZE)
    store_one(old)
    uuid = old.uuid
    patch(Path(old.path), offset, struct.pack("<I", 99))
    kind, _ = refused(directory)
    assert kind == "version"
    old.close()
    new = Pool.open(str(directory), pool_bytes=SIZE)
    assert new.uuid != uuid and not new.adopted and "version" in new.notice
    assert not is_warm(new)
    assert new.check() == []


def test_a_poisoned_pool_misses_and_is_replaced_only_when_nobody_is_attached(
    directory: Path,
) -> None:
    old = Pool.open(str(directory), pool_bytes=SIZE)
    store_one(old)
    patch(Path(old.path), POISON_REASON_AT, b"a test broke it\0")
    patch(Path(old.path), POISONED_AT, struct.pack("<I", 1))
    assert old.poisoned and not is_warm(old)
    assert old.put(0, KEY, b"x" * 4096) == "off"
    kind, message = refused(directory)
    assert kind == "poisoned" and "a test broke it" in message
    old.close()
    new = Pool.open(str(directory), pool_bytes=SIZE)
    assert not new.poisoned and "a test broke it" in new.notice


def test_a_live_pool_whose_file_was_removed_serves_its_clients_and_newcomers_make_a_new_one(
    directory: Path,
) -> None:
    old = Pool.open(str(directory), pool_bytes=SIZE)
    store_one(old)
    Path(old.path).unlink()
    new = Pool.open(str(directory), pool_bytes=SIZE)
    assert new.uuid != old.uuid and not is_warm(new)
    assert is_warm(old)


def test_the_litter_of_a_creation_that_died_is_replaced(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / "pool.hpkv.new").write_bytes(b"half a pool")
    Pool.open(str(directory), pool_bytes=SIZE)
    assert [path.name for path in directory.iterdir()] == ["pool.hpkv"]


def _open_and_tell(directory: str, pipe: object) -> None:
    pool = Pool.open(directory, pool_bytes=SIZE)
    pipe.send(pool.uuid)  # type: ignore[attr-defined]
    pipe.recv()  # type: ignore[attr-defined]


def test_processes_that_start_together_share_one_pool(directory: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(4):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_open_and_tell, args=(str(directory), theirs)))
        pipes.append(ours)
    for process in processes:
        process.start()
    uuids = {pipe.recv() for pipe in pipes}
    for pipe in pipes:
        pipe.send("go")
    for process in processes:
        process.join()
    assert len(uuids) == 1


def test_every_slot_can_be_taken_and_one_more_client_is_refused(directory: Path) -> None:
    pools = [Pool.open(str(directory), pool_bytes=SIZE) for _ in range(128)]
    assert sorted(pool.slot for pool in pools) == list(range(128))
    assert refused(directory)[0] == "slots"
    pools[70].close()
    assert Pool.open(str(directory)).slot == 70


def test_a_read_only_client_reads_and_pins_and_changes_nothing(directory: Path) -> None:
    writer = Pool.open(str(directory), pool_bytes=SIZE)
    store_one(writer)
    reader = Pool.open(str(directory), read_only=True)
    keys = KeyBatch.from_bytes(KEY)
    index = reader.add_namespace(NAMESPACE, b"text", 4096)
    assert reader.put(index, b"k" * 32, b"x" * 4096) == "off"
    assert reader.touch(keys) == 0
    lease = reader.pin(keys)
    assert (lease.count, writer.clear()) == (1, 0), "its pins count"
    lease.release()
    assert writer.clear() == 1


def test_read_only_never_creates(directory: Path) -> None:
    assert refused(directory, read_only=True)[0] == "missing"
    assert not directory.exists()


FORK = """
import os, sys
from hpkv_sglang._core import KeyBatch, Pool
pool = Pool.open(sys.argv[1])
keys = KeyBatch.from_bytes(bytes(range(32)))
lease = pool.pin(keys)
child = os.fork()
if child == 0:
    assert pool.lookup(keys) == 0 and pool.touch(keys) == 0 and pool.pin(keys).count == 0
    lease.release()
    pool.close()
    del pool
    os.write(1, b"child\\n")
    sys.stdin.read()  # outlives its parent
else:
    os.write(1, b"parent %d %d\\n" % (lease.count, pool.stats()["pinned"]))
    os._exit(0)
"""


def test_a_forked_child_owns_nothing_and_does_not_keep_its_parent_alive(directory: Path) -> None:
    pool = Pool.open(str(directory), pool_bytes=SIZE)
    store_one(pool)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORK, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = sorted(process.stdout.readline().strip() for _ in range(2))
    process.wait()
    assert lines == ["child", "parent 1 1"]
    pool.maintain()
    assert pool.stats()["clients"] == 1, "the parent counts as dead while its child lives"
    process.communicate("")


def test_an_executed_program_does_not_keep_its_parent_alive(directory: Path) -> None:
    pool = Pool.open(str(directory), pool_bytes=SIZE)
    code = (
        "import os, subprocess, sys; from hpkv_sglang._core import Pool; "
        "pool = Pool.open(sys.argv[1]); "
        "subprocess.Popen(['cat'], close_fds=False); print('up', flush=True); os._exit(0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.wait()
    pool.maintain()
    assert pool.stats()["clients"] == 1
    process.communicate("")
