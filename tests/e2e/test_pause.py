"""Generation that is paused while the tiers are at work: SGLang's endpoints for trainers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from hpkv_testing.faults import Fault
from hpkv_testing.fixtures import ServerFactory
from tests.e2e.support import (
    ask,
    assert_same_up_to_rounding,
    cacheable,
    device_hit,
    prompts,
    tiered,
)

pytestmark = pytest.mark.server


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_that_a_pause_retracts_stand_against_no_flush(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path, ranks: int
) -> None:
    """With several ranks every queued request is registered with the tiers."""
    config = tiered(llama_checkpoint, pool, dtype="float32", tp_size=ranks)
    (server,) = server_factory.fresh(config)
    (tokens,) = prompts(1, 300, seed=61)
    long = ask(tokens, sampling={"max_new_tokens": 200}, stream=True)
    reference = server.generate(long)
    paused = 0
    for _ in range(10):  # on a busy machine it may be over before the pause
        server.flush_cache()
        began = Event()
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.client.generate, long, began.set)
            assert began.wait(60.0)
            server.client.pause("retract")
            try:
                paused += not running.done()
                server.flush_cache(timeout_s=0)
            finally:
                server.client.go_on()
            assert_same_up_to_rounding(running.result(), reference)
        if paused:
            break
    assert paused, "it was to be paused in the middle"
    server.flush_cache()
    assert server.generate(ask(tokens)).cached_on("host") == cacheable(300)
    server.kill()


@pytest.mark.parametrize("flags", [(), ("--disable-overlap-schedule",)])
def test_pauses_while_loads_fail_end_in_right_answers(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path, flags: tuple[str, ...]
) -> None:
    """A request whose load failed has no KV, and a pause retracts the batch it was in."""
    faults: list[Fault] = [{"fail_every": ["load", 1]}, {"delay": ["load", -1, 20_000]}]
    config = tiered(llama_checkpoint, pool, *flags, faults=faults, dtype="float32")
    (server,) = server_factory.fresh(config)
    work = prompts(6, 400, seed=62, spread=150)
    references = [device_hit(server, tokens) for tokens in work]
    for round_ in range(8):
        server.flush_cache()
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.generate_many, [ask(tokens) for tokens in work])
            while not running.done():
                server.client.pause("retract" if round_ % 2 else "in_place")
                server.client.go_on()
                time.sleep(0.03)
            for answer, reference in zip(running.result(), references, strict=True):
                assert_same_up_to_rounding(answer, reference)
    assert "recomputing" in server.log_text()
    server.kill()
