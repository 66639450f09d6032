"""What the tests of the `hpkv` program share: a pool to look at, a store, ways to run it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
from typer.testing import CliRunner, Result

from hpkv_sglang._core import KeyBatch, Pool, Store
from hpkv_sglang.cli import app as app_module
from hpkv_sglang.cli.app import app, run

BLOCK_BYTES = 4096
POOL_BYTES = 16 << 20
FIRST, SECOND = b"\x11" * 32, b"\x22" * 32


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(pool: Pool, namespace: bytes, words: dict[str, object], numbers: range) -> None:
    index = pool.add_namespace(namespace, msgpack.packb(words), BLOCK_BYTES)
    for number in numbers:
        assert pool.put(index, key(number), bytes(BLOCK_BYTES)) == "stored"


@contextmanager
def live_pool(directory: str) -> Iterator[Pool]:
    """A live pool with 5 blocks of one model and 3 of another."""
    pool = Pool.open(directory, pool_bytes=POOL_BYTES)
    words = {"model": "tiny-llama", "layout": "gqa", "kv_dtype": "bfloat16", "page_size": 16}
    put(pool, FIRST, words | {"parallel": {"tp": 2, "pp": 1}}, range(5))
    put(pool, SECOND, {"model": "tiny-deepseek"}, range(100, 103))
    try:
        yield pool
    finally:
        pool.close()


def store_of(pool: Pool, folder: Path) -> Path:
    """A store with the five blocks of the first model, closed again; the pool lives on.

    Its folder.
    """
    opened = Store.open(
        pool, str(folder), storage_bytes=8 << 20, block_bytes=BLOCK_BYTES, background=False
    )
    keys = KeyBatch.from_bytes(b"".join(key(number) for number in range(5)))
    index = pool.add_namespace(FIRST, b"", BLOCK_BYTES)
    assert opened.demote(index, keys) == 5
    assert opened.close(5.0)
    return folder


def hpkv(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


def stat_json(directory: str) -> dict[str, object]:
    result = hpkv("stat", "--path", directory, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert isinstance(report, dict)
    return report


def failure(*arguments: str) -> tuple[int, str]:
    """(exit code, stderr) of a command that fails, run as the installed program runs it."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr("sys.argv", ["hpkv", *arguments])
        lines: list[str] = []
        patch.setattr(app_module, "print", lambda text, file: lines.append(text), raising=False)
        run()
    assert isinstance(caught.value.code, int)
    return caught.value.code, "\n".join(lines)
