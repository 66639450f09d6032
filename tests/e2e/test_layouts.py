"""What a page is stored as: once for latent attention, by heads for grouped ones; and who reads it.

A server with two ranks and one with a single rank work on one pool, with the disk below it.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hpkv_sglang._core import KeyBatch, KeyScope, Pool
from hpkv_sglang.cli.attachment import attached
from hpkv_sglang.namespace import Namespace, scope_mask
from hpkv_sglang.radix.lookup import hash_pages
from hpkv_testing.client import Answer
from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.server import Server
from hpkv_testing.tiers import empty_host_pool, wait_until_on_disk, wait_until_stored
from tests.e2e.support import (
    PAGE,
    ask,
    assert_same_answer,
    cacheable,
    device_hit,
    prompts,
    storage_flags,
    tiered,
)

pytestmark = pytest.mark.server

LENGTH = 400
PAGES = LENGTH // PAGE


class Stored(NamedTuple):
    """The namespace of a server with `size` ranks, as the pool lists it."""

    id: bytes
    words: dict[str, Any]
    block_bytes: int
    blocks: int

    def block(self, pool: Pool, shard: str, page_hash: str) -> bytes:
        """One block's bytes, read like any client reads them."""
        keys: KeyBatch = KeyScope(scope_mask(self.id, shard, self.words["layout"])).keys(
            [page_hash]
        )
        out = np.zeros(self.block_bytes, np.uint8)
        assert pool.get(bytes(keys), out), f"no block of {shard}"
        return out.tobytes()


def stored_by(pool: Pool, size: int) -> Stored:
    (found,) = [
        Stored(id_, words, block_bytes, blocks)
        for id_, descriptor, block_bytes, blocks in pool.namespaces()
        if (words := Namespace.unpack(id_, descriptor).words())["parallel"]["tp_size"] == size
    ]
    return found


def served(server: Server, work: list[list[int]], tier: str) -> list[Answer]:
    answers = [server.generate(ask(tokens)) for tokens in work]
    assert [a.cached_on(tier) for a in answers] == [cacheable(LENGTH)] * len(work)
    return answers


def by_heads(block: bytes, layers: int, heads: int) -> np.ndarray[Any, Any]:
    """A block of grouped heads as `[layers and K or V, slots, heads, bytes of a head]`."""
    return np.frombuffer(block, np.uint8).reshape(2 * layers, PAGE, heads, -1)


def same_bytes(pool: Pool, layout: str, hashes: list[str]) -> None:
    """What the single rank stored is, bit for bit, what it had loaded from the pair's blocks."""
    pair, single = stored_by(pool, 2), stored_by(pool, 1)
    for page_hash in hashes:
        if layout.startswith("mla"):
            assert single.block(pool, "whole", page_hash) == pair.block(pool, "whole", page_hash)
            continue
        layers, total = (single.words["geometry"][n] for n in ("layers", "kv_heads_total"))
        half = total // 2
        parts = [
            by_heads(pair.block(pool, shard, page_hash), layers, half)
            for shard in (f"heads 0:{half}/{total}", f"heads {half}:{total}/{total}")
        ]
        whole = by_heads(single.block(pool, f"heads 0:{total}/{total}", page_hash), layers, total)
        assert np.array_equal(whole, np.concatenate(parts, axis=2))


@pytest.mark.parametrize("model", ["llama_checkpoint", "deepseek_checkpoint"])
def test_ranks_store_each_byte_once_and_servers_of_another_size_read_it(
    model: str,
    server_factory: ServerFactory,
    pool: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    path = request.getfixturevalue(model)
    disk = (*storage_flags(tmp_path / "store"), "--hpkv-promote-policy", "wait_complete")
    pair_config = tiered(path, pool, *disk, tp_size=2)
    pair, single = server_factory.fresh(pair_config, tiered(path, pool, *disk))
    pair.flush_cache()
    with attached(str(pool), read_only=True) as core:
        before = stored_by(core, 2).blocks  # of the request that warms a server up
    work = prompts(3, LENGTH, seed=71)
    references = [device_hit(pair, tokens) for tokens in work]
    pair.flush_cache()
    for answer, reference in zip(served(pair, work, "host"), references, strict=True):
        assert_same_answer(answer, reference)

    with attached(str(pool), read_only=True) as core:
        stored = stored_by(core, 2)
    blocks_per_page = 1 if stored.words["layout"].startswith("mla") else 2
    assert stored.blocks - before == len(work) * PAGES * blocks_per_page

    # The other size reads them, and stores its own copy of what it read.
    served(single, work, "host")
    single.flush_cache()
    hashes = hash_pages(array("q", work[1][: PAGES * PAGE]), None, PAGE)
    with attached(str(pool), read_only=True) as core:
        same_bytes(core, stored.words["layout"], hashes[: cacheable(LENGTH) // PAGE])
        # All the bytes of a page, however many ranks there are.
        alone = stored_by(core, 1)
        assert alone.blocks * alone.block_bytes == stored.blocks * stored.block_bytes
    single.kill()

    pair.flush_cache()
    wait_until_on_disk(pool)
    empty_host_pool(pool)
    for answer, reference in zip(served(pair, work, "storage"), references, strict=True):
        assert_same_answer(answer, reference)
    pair.kill()

    (restarted,) = server_factory.fresh(pair_config)
    for answer, reference in zip(served(restarted, work, "host"), references, strict=True):
        assert_same_answer(answer, reference)
    with attached(str(pool), read_only=True) as core:
        assert core.check() == []
    restarted.kill()


def test_replicas_of_data_parallel_attention_read_each_others_blocks(
    server_factory: ServerFactory, deepseek_checkpoint: Path, pool: Path
) -> None:
    """Two replicas that take requests in turn: what one computed, the other one loads."""
    flags = ("--dp-size", "2", "--enable-dp-attention", "--load-balance-method", "round_robin")
    (server,) = server_factory.fresh(tiered(deepseek_checkpoint, pool, *flags, tp_size=2))
    (tokens,) = prompts(1, LENGTH, seed=72)
    server.flush_cache()
    with attached(str(pool), read_only=True) as core:
        before = core.stats()["blocks"]
    answers = [server.generate(ask(tokens))]
    wait_until_stored(pool, at_least=before + PAGES)
    answers += [server.generate(ask(tokens)) for _ in range(3)]
    tiers = [(a.cached_on("device"), a.cached_on("host")) for a in answers]
    hit = cacheable(LENGTH)
    assert tiers == [(0, 0), (0, hit), (hit, 0), (hit, 0)]
    for answer in answers[1:]:
        assert_same_answer(answer, answers[2])
    server.kill()
