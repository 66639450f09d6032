"""The main job on the real server: evicted prefixes come back from the host pool, answers equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpkv_sglang.cli.attachment import attached as attach
from hpkv_sglang.namespace import Namespace
from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.server import Server
from tests.e2e.support import (
    PAGE,
    ask,
    assert_same_answer,
    cacheable,
    device_hit,
    pool_directory,
    prompts,
    tiered,
)

pytestmark = pytest.mark.server

STRICT = (
    ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1"),
    ("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1"),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Path]:
    with pool_directory() as folder:
        yield folder


@pytest.fixture(
    scope="module",
    params=[("llama", 1), ("deepseek", 2)],
    ids=lambda of: f"{of[0]}, {of[1]} ranks",
)
def server(
    request: pytest.FixtureRequest,
    server_factory: ServerFactory,
    llama_checkpoint: Path,
    deepseek_checkpoint: Path,
    pool: Path,
) -> Server:
    name, ranks = request.param
    model = {"llama": llama_checkpoint, "deepseek": deepseek_checkpoint}[name]
    chunked = ("--chunked-prefill-size", "256", "--hpkv-cross-tp", "off")
    # Ranks that are really spawned, as in production; most other servers are forked.
    spawned = ranks > 1
    return server_factory(
        tiered(model, pool, *chunked, env=STRICT, tp_size=ranks, new_python=spawned)
    )


def test_an_evicted_prefix_is_loaded_back_with_the_same_answer(server: Server) -> None:
    """Six prompts of 700 tokens and a device pool of 2,048: each is evicted before its return."""
    work = prompts(6, 700, seed=1)
    references = [device_hit(server, tokens) for tokens in work]
    for _ in range(2):
        for tokens, reference in zip(work, references, strict=True):
            answer = server.generate(ask(tokens))
            assert answer.cached_on("host") > 0, "the prefix was still on the device"
            assert answer.cached_tokens == cacheable(700)
            assert_same_answer(answer, reference)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 300])
def test_every_prompt_length_is_cached_to_its_last_whole_page(server: Server, length: int) -> None:
    """Field report F39."""
    (tokens,) = prompts(1, length, seed=2 + length)
    reference = device_hit(server, tokens)
    server.flush_cache()
    answer = server.generate(ask(tokens))
    assert answer.cached_tokens == answer.cached_on("host") == cacheable(length)
    assert_same_answer(answer, reference)


def test_the_tiers_sum_to_the_cached_tokens(server: Server) -> None:
    """Field report F40: half the prefix on the device, the rest in the pool, chunked prefill."""
    (tokens,) = prompts(1, 900, seed=90)
    server.generate(ask(tokens))
    server.flush_cache()
    server.generate(ask(tokens[:400]))  # 384 tokens come back to the device
    answer = server.generate(ask(tokens))
    assert answer.cached_on("device") == cacheable(400) + PAGE  # its last page was computed
    assert answer.cached_on("device") + answer.cached_on("host") == answer.cached_tokens
    assert answer.cached_tokens == cacheable(900)


def test_a_flush_empties_the_tree_and_leaves_the_pool_alone(server: Server, pool: Path) -> None:
    server.generate(ask(prompts(1, 200, seed=7)[0]))
    server.flush_cache()  # quiesces: everything spilled is published by now
    with attach(str(pool), read_only=True) as attached:
        before = attached.stats()["blocks"]
        server.flush_cache()
        assert attached.stats()["blocks"] == before > 0


def test_pins_return_and_the_pool_is_sound_after_the_work(server: Server, pool: Path) -> None:
    """Field reports F23 and F24, with half of the requests aborted at some point of their life."""
    work = prompts(8, 500, seed=8)
    server.generate_many([ask(tokens) for tokens in work])
    server.flush_cache()
    aborted = [ask(t, rid=f"abort-{i}", fields={"stream": False}) for i, t in enumerate(work)]
    _abort_half_way(server, aborted)
    server.flush_cache()
    with attach(str(pool), read_only=True) as attached:
        assert attached.stats()["pinned"] == 0
        assert attached.check() == []
        described = [
            Namespace.unpack(id_, text).words() for id_, text, _, _ in attached.namespaces()
        ]
    assert {words["numerics"]["cross_tp"] for words in described} == {"off"}


def _abort_half_way(server: Server, asks: list) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(asks)) as threads:
        running = [threads.submit(server.generate, one) for one in asks]
        for one in asks[::2]:
            server.abort(one.rid)
        finished = [future.exception() is None for future in running]
    assert any(finished)
