"""When a prefix is stored: on insert, on the second hit, or when it leaves the device."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpkv_sglang.cli.attachment import attached
from hpkv_testing.fixtures import ServerFactory
from tests.e2e.support import ask, cacheable, pool_directory, prompts, tiered

pytestmark = pytest.mark.server

LENGTH = 400
PAGES = cacheable(LENGTH) // 16


def blocks(pool: Path, at_least: int) -> int:
    """How many blocks the pool holds, once it holds as many as that or after two seconds."""
    for _ in range(20):
        with attached(str(pool), read_only=True) as core:
            stats = core.stats()
        if stats["blocks"] >= at_least and stats["writing"] == 0:
            break
        time.sleep(0.1)
    return int(stats["blocks"])


def test_each_policy_stores_at_its_own_moment(
    server_factory: ServerFactory, llama_checkpoint: Path
) -> None:
    wanted, *fillers = prompts(8, LENGTH, seed=61)
    moments = ("asked once", "asked twice", "evicted")
    # The default, write_through, is what every other test runs with.
    expected = {
        "write_through_selective": dict(zip(moments, (False, True, True), strict=True)),
        "write_back": dict(zip(moments, (False, False, True), strict=True)),
    }
    with ExitStack() as folders:
        pools = [folders.enter_context(pool_directory()) for _ in expected]
        servers = server_factory.fresh(
            *(
                tiered(llama_checkpoint, pool, "--hpkv-write-policy", policy)
                for pool, policy in zip(pools, expected, strict=True)
            )
        )
        for server, pool, (policy, stored_at) in zip(servers, pools, expected.items(), strict=True):
            seen = {}
            for moment in moments:
                for tokens in fillers if moment == "evicted" else [wanted]:
                    server.generate(ask(tokens))
                seen[moment] = blocks(pool, PAGES) >= PAGES
            assert seen == stored_at, policy
            # Whatever the moment, an evicted prefix comes back.
            assert server.generate(ask(wanted)).cached_on("host") == cacheable(LENGTH), policy
            server.kill()
