"""When a prefix is stored: on insert, on the second hit, or when it leaves the device."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.tiers import wait_until_stored
from tests.e2e.support import ask, cacheable, pool_directory, prompts, tiered

pytestmark = pytest.mark.server

LENGTH = 400
PAGES = cacheable(LENGTH) // 16


def stores(pool: Path, expected: bool) -> bool:
    """Whether the pool gets the prompt's blocks: within a minute, or, unexpected, two seconds."""
    try:
        wait_until_stored(pool, PAGES, timeout_s=60.0 if expected else 2.0)
    except TimeoutError:
        return False
    return True


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
                seen[moment] = stores(pool, stored_at[moment])
            assert seen == stored_at, policy
            # Whatever the moment, an evicted prefix comes back.
            assert server.generate(ask(wanted)).cached_on("host") == cacheable(LENGTH), policy
            server.kill()
