"""Faults that people met in caches like this one, asked of the real server.

Each test names its row (F04, F08, ...) of the table in tests/regress/README.md. The server checks
every block at every load, so that a flipped byte shows without a crash to raise the epoch.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpkv_sglang.cli.attachment import attached
from hpkv_testing.faults import Fault
from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.models import TinyLlama, checkpoint
from hpkv_testing.server import Server
from tests.e2e.support import (
    UNHURRIED,
    ask,
    assert_same_answer,
    cacheable,
    device_hit,
    pool_directory,
    prompts,
    tiered,
)

pytestmark = pytest.mark.server

LENGTH = 300


@pytest.fixture(scope="module")
def pool() -> Iterator[Path]:
    with pool_directory() as folder:
        yield folder


@pytest.fixture(scope="module")
def server(server_factory: ServerFactory, llama_checkpoint: Path, pool: Path) -> Iterator[Server]:
    faults: list[Fault] = [UNHURRIED, {"delay": ["spill", -1, 2000]}]
    config = tiered(llama_checkpoint, pool, "--hpkv-verify", "always", faults=faults)
    (server,) = server_factory.fresh(config)
    yield server
    server.kill()


def test_f03_f04_keys_and_salts_are_kept_apart(server: Server) -> None:
    """Another salt, no salt, and the salt given as an extra key miss; the same one hits."""
    (tokens,) = prompts(1, LENGTH, seed=71)
    owner = {"cache_salt": "tenant-a"}
    reference = device_hit(server, tokens, **owner)
    server.flush_cache()
    strangers: list[dict[str, str]] = [
        {},
        {"cache_salt": "tenant-b"},
        {"extra_key": "tenant-a"},
        {"extra_key": "tenant", "cache_salt": "-a"},
        {"extra_key": "a", "cache_salt": "bc"},
        {"extra_key": "ab", "cache_salt": "c"},
    ]
    for stranger in strangers:
        assert server.generate(ask(tokens, **stranger)).cached_tokens == 0, stranger
    server.flush_cache()
    for known in (owner, *strangers):
        answer = server.generate(ask(tokens, **known))
        assert answer.cached_on("host") == cacheable(LENGTH), known
        assert_same_answer(answer, reference)


def test_f08_a_weight_update_never_serves_the_old_weights(server: Server) -> None:
    (tokens,) = prompts(1, LENGTH, seed=72)
    old = device_hit(server, tokens)
    update(server, checkpoint(TinyLlama(seed=1)))
    new = server.generate(ask(tokens))
    assert new.cached_tokens == 0
    assert new.output_ids != old.output_ids
    server.flush_cache()
    assert server.generate(ask(tokens)).cached_on("host") == cacheable(LENGTH)

    update(server, checkpoint(TinyLlama()))
    back = server.generate(ask(tokens))
    assert back.cached_on("host") == cacheable(LENGTH), "the same weights are the same namespace"
    assert_same_answer(back, old)


def update(server: Server, model: Path) -> None:
    server.client.call("POST", "/update_weights_from_disk", {"model_path": str(model)})


def test_f09_fifty_flushes_with_copies_in_flight_leave_a_sound_pool(
    server: Server, pool: Path
) -> None:
    work = prompts(5, 100, seed=73)
    references = [device_hit(server, tokens) for tokens in work]
    for round_ in range(50):
        server.generate(ask(work[round_ % len(work)]))
        server.flush_cache()
    for tokens, reference in zip(work, references, strict=True):
        answer = server.generate(ask(tokens))
        assert answer.cached_on("host") == cacheable(100)
        assert_same_answer(answer, reference)
    with attached(str(pool), read_only=True) as attachment:
        assert attachment.check() == []


def test_f28_a_flipped_byte_is_a_miss_and_counted(server: Server, pool: Path) -> None:
    (tokens,) = prompts(1, LENGTH, seed=74)
    server.flush_cache()
    (file,) = (path for path in pool.iterdir() if path.stat().st_size > 1 << 20)
    before = file.read_bytes()
    reference = device_hit(server, tokens)
    server.flush_cache()
    flip_a_stored_bit(file, before)
    with attached(str(pool), read_only=True) as attachment:
        bad = attachment.stats()["bad_checksums"]
        answer = server.generate(ask(tokens))
        assert_same_answer(answer, reference)
        assert answer.cached_tokens < cacheable(LENGTH)
        assert attachment.stats()["bad_checksums"] == bad + 1
    server.flush_cache()
    healed = server.generate(ask(tokens))
    assert healed.cached_on("host") == cacheable(LENGTH), "the block was stored anew"
    assert_same_answer(healed, reference)


def flip_a_stored_bit(file: Path, before: bytes) -> None:
    """One bit of the payload of the prompt's last whole page.

    Payload lies behind everything else that changed. The very last block holds the page that the
    prompt shares with the answer, which no hit of this prompt can reach; so it is the one before.
    """
    block_pages = 4  # 4 layers, K and V, 16 tokens, 2 heads of 32 bfloat16: 16 KiB
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as now:
        changed = [
            offset
            for offset in range(0, len(before), 4096)
            if now[offset : offset + 4096] != before[offset : offset + 4096]
        ]
        assert len(changed) > 2 * block_pages, "nothing was stored"
        now[changed[-block_pages - 1] + 100] ^= 1
