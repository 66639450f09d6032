"""The `hpkv` program on real pools: what it prints and refuses, and that it changes no more."""

from __future__ import annotations

import json
import stat as stat_module
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpkv_sglang import config
from hpkv_sglang._core import KeyBatch, Pool
from hpkv_sglang.cli.app import app
from hpkv_sglang.cli.report import bytes_words, pool_report
from tests.unit.cli_rig import (
    BLOCK_BYTES,
    FIRST,
    POOL_BYTES,
    SECOND,
    failure,
    hpkv,
    key,
    live_pool,
    stat_json,
)

STABLE_KEYS = {
    "path": str,
    "uuid": str,
    "pool_bytes": int,
    "used_bytes": int,
    "reserved_bytes": int,
    "blocks": int,
    "pinned": int,
    "writing": int,
    "quarantined": int,
    "clients": int,
    "epoch": int,
    "poisoned": bool,
    "hits": int,
    "misses": int,
    "stored": int,
    "evictions": int,
    "full": int,
    "busy": int,
    "lock_timeouts": int,
    "bad_checksums": int,
    "takeovers": int,
    "rebuilds": int,
    "reaped": int,
    "spilled_bytes": int,
    "loaded_bytes": int,
    "storage": type(None),
    "namespaces": list,
}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "pool")


@pytest.fixture
def pool(directory: str) -> Iterator[Pool]:
    with live_pool(directory) as pool:
        yield pool


def test_stat_json_has_the_stable_keys_with_their_types(pool: Pool, directory: str) -> None:
    report = stat_json(directory)
    assert {name: type(report[name]) for name in STABLE_KEYS} == STABLE_KEYS
    assert report["path"] == pool.path and str(report["path"]).startswith(directory)
    assert report["pool_bytes"] == POOL_BYTES
    assert report["blocks"] == 8
    assert report["used_bytes"] == 8 * BLOCK_BYTES
    assert report["spilled_bytes"] == 8 * BLOCK_BYTES


def test_stat_lists_namespaces_with_names_fullest_first(pool: Pool, directory: str) -> None:
    namespaces = stat_json(directory)["namespaces"]
    assert isinstance(namespaces, list)
    first, second = namespaces
    assert first["id"] == FIRST.hex() and second["id"] == SECOND.hex()
    assert first["name"] == "tiny-llama, gqa, bfloat16, page 16, tp2"
    assert (first["blocks"], first["bytes"]) == (5, 5 * BLOCK_BYTES)
    assert (second["name"], second["blocks"]) == ("tiny-deepseek", 3)


def test_stat_does_not_count_itself_among_the_clients(pool: Pool, directory: str) -> None:
    assert stat_json(directory)["clients"] == 1


def test_stat_works_on_a_cold_pool(pool: Pool, directory: str) -> None:
    pool.close()
    report = stat_json(directory)
    assert (report["blocks"], report["clients"]) == (8, 0)


def test_stat_changes_no_block_and_no_count(pool: Pool, directory: str) -> None:
    before = pool.stats()
    stat_json(directory)
    after = pool.stats()
    for name in ("blocks", "used_bytes", "hits", "misses", "stored", "evictions"):
        assert after[name] == before[name], name


def test_stat_shows_pins_and_hits(pool: Pool, directory: str) -> None:
    lease = pool.pin(KeyBatch.from_bytes(key(0) + key(1) + key(77)))
    report = stat_json(directory)
    assert (report["pinned"], report["hits"]) == (2, 2)
    lease.release()
    assert stat_json(directory)["pinned"] == 0


def test_stat_prints_a_table_for_people(pool: Pool, directory: str) -> None:
    result = hpkv("stat", "--path", directory)
    assert result.exit_code == 0
    for words in ("16 MiB", "tiny-llama", "tiny-deepseek", FIRST.hex()[:12]):
        assert words in result.stdout


def test_clear_drops_every_block(pool: Pool, directory: str) -> None:
    result = hpkv("clear", "--path", directory)
    assert result.exit_code == 0
    assert result.stdout == "dropped 8 blocks (32 KiB), 0 left\n"
    assert pool.stats()["blocks"] == 0
    assert pool.check() == []


def test_clear_leaves_pinned_blocks(pool: Pool, directory: str) -> None:
    lease = pool.pin(KeyBatch.from_bytes(key(0)))
    assert "dropped 7 blocks" in hpkv("clear", "--path", directory).stdout
    assert pool.lookup(KeyBatch.from_bytes(key(0))) == 1
    lease.release()


@pytest.mark.parametrize("spelling", [SECOND.hex(), SECOND.hex()[:12], "2"])
def test_clear_namespace_drops_only_its_blocks(pool: Pool, directory: str, spelling: str) -> None:
    result = hpkv("clear", "--path", directory, "--namespace", spelling)
    assert result.exit_code == 0
    assert pool.lookup(KeyBatch.from_bytes(b"".join(map(key, range(5))))) == 5
    assert pool.lookup(KeyBatch.from_bytes(key(100))) == 0


@pytest.mark.parametrize("spelling", ["33", "", "zz"])
def test_clear_refuses_a_namespace_it_cannot_tell(
    pool: Pool, directory: str, spelling: str
) -> None:
    code, line = failure("clear", "--path", directory, "--namespace", spelling)
    assert code == 2 and FIRST.hex()[:12] in line
    assert pool.stats()["blocks"] == 8


@pytest.mark.parametrize("command", ["stat", "clear", "doctor"])
def test_no_command_creates_a_pool(command: str, tmp_path: Path) -> None:
    code, line = failure(command, "--path", str(tmp_path / "none"))
    assert code == 2
    assert line.startswith("hpkv: ") and str(tmp_path) in line and "\n" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["stat", "clear", "doctor"])
@pytest.mark.parametrize("content", [b"", b"hello", bytes(POOL_BYTES)], ids=["0", "5", "zeros"])
def test_commands_refuse_what_is_not_a_pool_and_leave_it_alone(
    pool: Pool, directory: str, command: str, content: bytes
) -> None:
    path = Path(pool.path)
    pool.close()
    path.write_bytes(content)
    code, line = failure(command, "--path", directory)
    assert code == 2
    assert line.startswith("hpkv: ") and "\n" not in line
    assert path.read_bytes() == content


def test_commands_refuse_a_pool_behind_a_symbolic_link(pool: Pool, directory: str) -> None:
    path = Path(pool.path)
    pool.close()
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    code, _ = failure("stat", "--path", directory)
    assert code == 2
    assert stat_module.S_ISLNK(path.lstat().st_mode)


def test_doctor_finds_a_sound_pool_sound(pool: Pool, directory: str) -> None:
    result = hpkv("doctor", "--path", directory)
    assert (result.exit_code, result.stdout.split(": ")[-1]) == (0, "0 violations\n")
    report = json.loads(hpkv("doctor", "--path", directory, "--json").stdout)
    assert (report["blocks"], report["poisoned"], report["violations"]) == (8, False, [])


def test_doctor_fails_on_a_violation(
    pool: Pool, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        path, poisoned, epoch = pool.path, False, 1

        def check(self) -> list[str]:
            return ["shard 3 counts 4 blocks and has 5"]

        def stats(self) -> dict[str, int]:
            return pool.stats()

        def close(self) -> None: ...

    class Opener:
        open = staticmethod(lambda directory, **options: Broken())

    monkeypatch.setattr("hpkv_sglang.cli.attachment.Pool", Opener)
    result = hpkv("doctor", "--path", directory)
    assert result.exit_code == 1
    assert "shard 3 counts 4 blocks" in result.stdout


def test_the_directory_comes_from_the_environment(
    pool: Pool, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPKV_SHARE_MEM_FILE_PATH", directory)
    assert json.loads(hpkv("stat", "--json").stdout)["path"] == pool.path


def test_a_malformed_environment_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPKV_SHARE_MEM_FILE_PATH", "relative/path")
    code, line = failure("stat")
    assert code == 2 and "HPKV_SHARE_MEM_FILE_PATH" in line


def test_flags_lists_every_flag_with_its_environment_name() -> None:
    narrow = CliRunner().invoke(app, ["flags"], env={"COLUMNS": "80"})
    rows = json.loads(hpkv("flags", "--json").stdout)
    for flag, row in zip(config.FLAGS, rows, strict=True):
        assert flag.name in narrow.stdout and flag.environment in narrow.stdout
        assert (row["flag"], row["environment"]) == (flag.name, flag.environment)
    assert hpkv("flags", "--markdown").stdout == config.flags_markdown() + "\n"


def test_the_version_is_that_of_the_distribution() -> None:
    assert hpkv("--version").stdout == f"hpkv-sglang {version('hpkv-sglang')}\n"


def test_ls_names_namespaces_and_tells_all_about_one(pool: Pool, directory: str) -> None:
    listed = json.loads(hpkv("ls", "--path", directory, "--json").stdout)
    assert listed == stat_json(directory)["namespaces"]
    table = hpkv("ls", "--path", directory).stdout
    assert FIRST.hex()[:12] in table and "tiny-llama" in table and "tiny-deepseek" in table
    one = hpkv("ls", "11", "--path", directory).stdout
    assert FIRST.hex() in one and '"tp": 2' in one and "tiny-deepseek" not in one
    assert json.loads(hpkv("ls", "11", "--path", directory, "--json").stdout) == listed[0]
    assert failure("ls", "33", "--path", directory)[0] == 2


def test_a_descriptor_of_another_tool_is_shown_as_unknown(pool: Pool) -> None:
    pool.add_namespace(b"\x33" * 32, b"\xc1garbage", BLOCK_BYTES)
    names = [n["name"] for n in pool_report(pool)["namespaces"]]
    assert names[-1] == "unknown"


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 << 19, "1.5 MiB"), (1 << 40, "1 TiB")],
)
def test_sizes_are_said_in_binary_units(count: int, words: str) -> None:
    assert bytes_words(count) == words
