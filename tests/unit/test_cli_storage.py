"""The commands of `hpkv` that look at the disk tier, on real stores."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from hpkv_sglang._core import Pool, Store
from hpkv_sglang.cli import app as app_module
from tests.unit.cli_rig import (
    BLOCK_BYTES,
    FIRST,
    POOL_BYTES,
    failure,
    hpkv,
    live_pool,
    put,
    stat_json,
    store_of,
)

STORAGE_KEYS = {
    "bytes",
    "used_bytes",
    "blocks",
    "pending_blocks",
    "regions",
    "regions_in_use",
    "regions_unknown",
    "demoted_bytes",
    "promoted_bytes",
    "demoted_bytes_per_s",
    "promoted_bytes_per_s",
    "errors",
}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "pool")


@pytest.fixture
def pool(directory: str) -> Iterator[Pool]:
    with live_pool(directory) as pool:
        yield pool


@pytest.fixture
def store(pool: Pool, tmp_path: Path) -> Path:
    return store_of(pool, tmp_path / "store")


def test_stat_shows_the_disk_tier(store: Path, directory: str) -> None:
    storage = json.loads(hpkv("stat", "--path", directory, "--json").stdout)["storage"]
    assert storage.keys() == STORAGE_KEYS
    assert storage["blocks"] == 5 and storage["pending_blocks"] == 3
    assert storage["demoted_bytes"] == 5 * BLOCK_BYTES
    assert storage["bytes"] <= 8 << 20
    assert "disk regions" in hpkv("stat", "--path", directory).stdout


def test_verify_finds_a_flipped_byte_and_fix_drops_its_block(store: Path, directory: str) -> None:
    places = ("--path", directory, "--storage-path", str(store))
    sound = hpkv("verify", *places, "--json")
    assert sound.exit_code == 0 and json.loads(sound.stdout)["blocks"] == 5
    (region,) = (path for path in store.glob("regions/*") if path.stat().st_size)
    with region.open("r+b") as file:
        file.seek(4096 + 4096)  # payload of record 0: all zero
        file.write(b"\x01")
    bad = hpkv("verify", *places, "--fix", "--json")
    assert bad.exit_code == 1 and json.loads(bad.stdout)["bad"] == 1
    again = hpkv("verify", *places)
    assert again.exit_code == 0 and "read 4 blocks" in again.stdout


def test_a_verification_shows_on_a_terminal_how_far_it_is(store: Path, directory: str) -> None:
    program = str(Path(sys.executable).with_name("hpkv"))
    places = ("--path", directory, "--storage-path", str(store))
    terminal, its_end = os.openpty()
    done = subprocess.run(
        [program, "verify", *places, "--json"], stdout=subprocess.PIPE, stderr=its_end, check=True
    )
    os.close(its_end)
    assert b"reading" in os.read(terminal, 1 << 16)
    os.close(terminal)
    assert json.loads(done.stdout)["blocks"] == 5


def test_the_descriptor_in_the_store_says_in_words_what_its_blocks_are(store: Path) -> None:
    (path,) = (store / "namespaces").iterdir()
    content = msgpack.unpackb(path.read_bytes())
    assert content["format"] == 1 and content["block_bytes"] == BLOCK_BYTES
    assert msgpack.unpackb(content["descriptor"])["model"] == "tiny-llama"


def test_a_verification_that_saw_not_all_is_no_success(
    store: Path, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = {"blocks": 2, "bytes": 8192, "bad": 0, "stale": 0, "io_errors": 0, "total_blocks": 5}
    part |= {"complete": False}
    monkeypatch.setattr(app_module, "verify_store", lambda *_, **__: part)
    result = hpkv("verify", "--path", directory, "--storage-path", str(store))
    assert result.exit_code == 1 and "not all of them" in result.stdout


def test_a_namespace_is_cleared_wherever_it_is_and_no_other_in_its_stead(
    store: Path, directory: str
) -> None:
    """The disk has the first model only; the pool both."""
    places = ("--path", directory, "--storage", "--storage-path", str(store), "--json")
    _, said = failure("clear", *places, "--namespace", "")
    assert "the beginning of an id" in said
    second = json.loads(hpkv("clear", *places, "--namespace", "22").stdout)
    assert (second["dropped_on_disk"], second["dropped"], second["left"]) == (0, 3, 5)
    first = json.loads(hpkv("clear", *places, "--namespace", "11").stdout)
    assert (first["dropped_on_disk"], first["dropped"], first["left"]) == (5, 5, 0)


def test_an_id_that_fits_another_namespace_in_the_other_tier_is_ambiguous(
    pool: Pool, store: Path, tmp_path: Path
) -> None:
    pool.close()
    directory = str(tmp_path / "next")
    with contextlib.closing(Pool.open(directory, pool_bytes=POOL_BYTES)) as following:
        put(following, b"\x11\x22" + bytes(30), {"model": "another"}, range(7))
    places = ("--path", directory, "--storage", "--storage-path", str(store), "--json")
    _, said = failure("clear", *places, "--namespace", "11")
    assert "it fits 2" in said
    on_disk = json.loads(hpkv("clear", *places, "--namespace", "1111").stdout)
    assert (on_disk["dropped_on_disk"], on_disk["dropped"], on_disk["left"]) == (5, 0, 7)


def test_verify_works_after_a_reboot_and_leaves_nothing_behind(
    pool: Pool, store: Path, tmp_path: Path
) -> None:
    pool.close()
    before = sorted(Path("/dev/shm").glob("hpkv-cli-*"))
    result = hpkv(
        "verify", "--path", str(tmp_path / "gone"), "--storage-path", str(store), "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["blocks"] == 5
    assert sorted(Path("/dev/shm").glob("hpkv-cli-*")) == before
    assert not (tmp_path / "gone").exists()


def test_a_pool_without_a_disk_tier_is_not_bound_to_the_store_that_is_looked_at(
    pool: Pool, store: Path, tmp_path: Path
) -> None:
    pool.close()
    other = Pool.open(str(tmp_path / "other"), pool_bytes=POOL_BYTES)
    result = hpkv("verify", "--path", str(tmp_path / "other"), "--storage-path", str(store))
    assert result.exit_code == 0 and "read 5 blocks" in result.stdout
    assert other.stats()["disk_regions"] == 0
    other.close()


def test_verify_refuses_a_store_that_a_live_pool_uses(
    pool: Pool, store: Path, tmp_path: Path
) -> None:
    live = Store.open(pool, str(store), background=False)
    code, line = failure("verify", "--path", str(tmp_path / "gone"), "--storage-path", str(store))
    assert code == 2 and str(store) in line
    assert live.close(5.0)


def test_verify_refuses_what_is_no_store(pool: Pool, directory: str, tmp_path: Path) -> None:
    code, line = failure("verify", "--path", directory, "--storage-path", str(tmp_path))
    assert code == 2 and "none here" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pool"]


def test_clear_leaves_the_disk_alone_unless_told(store: Path, directory: str) -> None:
    places = ("--path", directory, "--storage-path", str(store))
    hpkv("clear", "--path", directory)
    assert json.loads(hpkv("verify", *places, "--json").stdout)["blocks"] == 5
    result = hpkv("clear", "--storage", *places)
    assert "dropped 5 blocks on disk" in result.stdout
    assert json.loads(hpkv("verify", *places, "--json").stdout)["blocks"] == 0


def test_clear_empties_memory_before_the_disk_and_behind_it(
    store: Path, directory: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server writes to the disk what memory has, and reads into memory what the disk has."""
    clear = Store.clear
    seen: list[int] = []

    def watched(opened: Store) -> int:
        seen.append(pool.stats()["blocks"])
        dropped = clear(opened)
        put(pool, FIRST, {}, range(200, 203))  # read meanwhile
        return dropped

    monkeypatch.setattr(Store, "clear", watched)
    places = ("--path", directory, "--storage-path", str(store))
    report = json.loads(hpkv("clear", "--storage", "--json", *places).stdout)
    assert seen == [0]
    assert report == {
        "dropped_on_disk": 5,
        "dropped": 11,
        "freed_bytes": 11 * BLOCK_BYTES,
        "left": 0,
    }


def test_a_place_that_may_not_be_looked_into_is_the_users_business(
    store: Path, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 says that something stored is broken."""

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    code, line = failure("verify", "--path", directory, "--storage-path", str(store))
    assert code == 2 and "Permission denied" in line and str(store) in line


def test_clear_of_a_disk_tier_must_be_asked_for(store: Path, directory: str) -> None:
    code, line = failure("clear", "--path", directory, "--storage-path", str(store))
    assert code == 2 and "--storage" in line
    assert stat_json(directory)["blocks"] == 8


def test_clear_tells_programs_what_it_dropped(store: Path, directory: str) -> None:
    places = ("--path", directory, "--storage-path", str(store))
    assert json.loads(hpkv("clear", "--storage", "--json", *places).stdout) == {
        "dropped_on_disk": 5,
        "dropped": 8,
        "freed_bytes": 8 * BLOCK_BYTES,
        "left": 0,
    }


def test_a_command_asks_the_environment_for_its_own_places_only(
    store: Path, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPKV_WRITE_POLICY", "sometimes")
    monkeypatch.setenv("HPKV_KV_STORAGE_SIZE", "1g")
    monkeypatch.setenv("HPKV_SHARE_MEM_FILE_PATH", directory)
    monkeypatch.setenv("HPKV_KV_STORAGE_PATH", "")
    assert json.loads(hpkv("stat", "--json").stdout)["blocks"] == 8
    assert hpkv("verify", "--storage-path", str(store)).exit_code == 0
    code, line = failure("verify")
    assert code == 2 and "HPKV_KV_STORAGE_PATH" in line


def test_bench_measures_and_leaves_nothing_behind(
    pool: Pool, directory: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    places = ("--path", directory, "--storage-path", str(tmp_path / "disk"))
    rows = json.loads(hpkv("bench", *places, "--mib", "16", "--json").stdout)
    assert [row["name"] for row in rows] == [
        *(f"memory: {name}" for name in ("plain copy", "put", "get")),
        *(f"disk: {name}" for name in ("write, synced", "read")),
    ]
    assert all(row["gib_per_s"] > 0 for row in rows)
    assert sorted(tmp_path.rglob("*")) == before
    assert stat_json(directory)["blocks"] == 8
