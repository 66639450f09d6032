"""The disk tier on the real server: what left the host pool comes back from files, unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpkv_sglang.cli.attachment import attached
from hpkv_testing.client import Answer, Ask
from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.models import TinyLlama, checkpoint
from hpkv_testing.server import Server, ServerStartError
from hpkv_testing.tiers import empty_host_pool, wait_until_on_disk
from tests.e2e.support import (
    PAGE,
    UNHURRIED,
    ask,
    assert_same_answer,
    assert_same_up_to_rounding,
    cacheable,
    device_hit,
    pool_directory,
    prompts,
    storage_flags,
    tiered,
)

pytestmark = pytest.mark.server

LENGTH = 500
KILL_ROUNDS = int(os.environ.get("HPKV_KILL_ROUNDS", "3"))  # 20 for a thorough run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def stat(pool: Path, name: str) -> int:
    with attached(str(pool), read_only=True) as core:
        return int(core.stats()[name])


def forget_memory(server: Server, pool: Path) -> None:
    """Empty the device tree and the host pool; only the disk has the blocks then."""
    server.flush_cache()
    wait_until_on_disk(pool)
    empty_host_pool(pool)


def test_disk_hits_give_the_answers_of_device_hits_at_every_length(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path, store: Path
) -> None:
    """Around page and chunk boundaries; then after a reboot, which takes the pool with it.

    Meanwhile the store is refused to a server with another pool.
    """
    config = tiered(llama_checkpoint, pool, *storage_flags(store), "--chunked-prefill-size", "128")
    (server,) = server_factory.fresh(config)
    lengths = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1, 127, 128, 129, 257, LENGTH)
    work = [prompts(1, length, seed=100 + length)[0] for length in lengths]
    references = [device_hit(server, tokens) for tokens in work]
    forget_memory(server, pool)
    for tokens, reference in zip(work, references, strict=True):
        answer = server.generate(ask(tokens))
        assert answer.cached_on("storage") == answer.cached_tokens == cacheable(len(tokens))
        assert_same_answer(answer, reference)
    # Promoted blocks are host blocks now.
    server.flush_cache()
    again = server.generate(ask(work[-1]))
    assert (again.cached_on("host"), again.cached_on("storage")) == (cacheable(LENGTH), 0)

    with pool_directory() as other:
        stranger = tiered(llama_checkpoint, other, *storage_flags(store))
        with pytest.raises(ServerStartError, match=str(store)):
            server_factory.fresh(stranger)
    assert_same_answer(server.generate(ask(work[-1])), references[-1])

    server.kill()
    shutil.rmtree(pool)
    (server,) = server_factory.fresh(config)
    for tokens, reference in zip(work, references, strict=True):
        answer = server.generate(ask(tokens))
        assert answer.cached_on("storage") == cacheable(len(tokens))
        assert_same_answer(answer, reference)
    server.kill()


def test_a_host_pool_a_quarter_of_the_device_pool_spills_through_to_disk(
    server_factory: ServerFactory, pool: Path, store: Path
) -> None:
    """8 KiB a token: 64 MiB on the device, 16 MiB in the pool, 120 MiB of prompts."""
    model = checkpoint(TinyLlama(layers=8, kv_heads=4))
    flags = (*storage_flags(store, "512m"), "--hpkv-promote-policy", "wait_complete")
    config = tiered(model, pool, *flags, size="16m", max_total_tokens=8192, dtype="float32")
    (server,) = server_factory.fresh(config)
    work = prompts(30, LENGTH, seed=7)
    references = []
    for number, tokens in enumerate(work, start=1):
        references.append(server.generate(ask(tokens)))
        # What comes faster than the disk writes is dropped, and a busy machine writes slowly.
        wait_until_on_disk(pool, at_least=number * (LENGTH // PAGE))
    coldest = [server.generate(ask(tokens)) for tokens in work[:6]]
    found = [answer.cached_tokens_details for answer in coldest]
    assert [answer.cached_tokens for answer in coldest] == [cacheable(LENGTH)] * 6, found
    assert all(answer.cached_on("storage") > 0 for answer in coldest), found
    # All at once want more of the host pool than it has: who gets no place computes.
    answers = coldest + server.generate_many([ask(tokens) for tokens in work[6:]])
    for answer, reference in zip(answers, references, strict=True):
        assert_same_up_to_rounding(answer, reference)
        tiers = [answer.cached_on(tier) for tier in ("device", "host", "storage")]
        assert sum(tiers) == answer.cached_tokens
    server.kill()


def test_a_slow_disk_holds_nobody_else(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path, store: Path
) -> None:
    """A read takes 15 s. Who needs it waits; others are served meanwhile."""
    slow = tiered(
        llama_checkpoint,
        pool,
        *storage_flags(store),
        *("--hpkv-promote-policy", "wait_complete"),
        faults=[UNHURRIED, {"disk_delay": ["read", 15.0]}],
    )
    (server,) = server_factory.fresh(slow)
    (wanted,) = prompts(1, LENGTH, seed=8)
    others = prompts(6, 60, seed=9)
    reference = device_hit(server, wanted)
    forget_memory(server, pool)
    with ThreadPoolExecutor(1) as thread:
        begin = time.monotonic()
        waiting = thread.submit(server.generate, ask(wanted))
        while stat(pool, "writing") == 0:
            assert not waiting.done(), "it waits for the read"
            time.sleep(0.05)
        served = 0
        for tokens in others:
            assert server.generate(Ask(input_ids=tokens, max_new_tokens=4)).output_ids
            served += not waiting.done()
        assert served > 0, "the others did not wait for the read"
        answer = waiting.result()
        assert time.monotonic() - begin >= 15.0
    assert answer.cached_on("storage") == cacheable(LENGTH)
    assert_same_answer(answer, reference)
    server.kill()


@pytest.mark.parametrize("policy", [None, "best_effort", "wait_complete"])
def test_when_the_deadline_passes_the_rest_is_computed(
    server_factory: ServerFactory,
    llama_checkpoint: Path,
    pool: Path,
    store: Path,
    policy: str | None,
) -> None:
    """The default, none at all, and the cap of `wait_complete`, which is a minute otherwise.

    A read that was begun ends after the answer, and its block is in the pool then. A request may be
    admitted before a reading thread has woken up: then it is asked once more.
    """
    config = tiered(
        llama_checkpoint,
        pool,
        *storage_flags(store),
        *(() if policy is None else ("--hpkv-promote-policy", policy)),
        faults=[{"disk_delay": ["read", 20.0]}, {"wait_complete_cap_s": 1.0}],
    )
    (server,) = server_factory.fresh(config)
    (wanted,) = prompts(1, LENGTH, seed=11)
    reference = device_hit(server, wanted)
    forget_memory(server, pool)
    answer = server.generate(ask(wanted))
    assert stat(pool, "disk_promoted_bytes") == 0, "the answer did not wait for the read"
    assert answer.cached_on("storage") == 0
    until = time.monotonic() + 90
    while stat(pool, "disk_promoted_bytes") == 0:
        assert time.monotonic() < until, "the disk was asked"
        if stat(pool, "writing") == 0:
            forget_memory(server, pool)
            server.generate(ask(wanted))
        time.sleep(0.2)
    assert answer.output_ids == reference.output_ids
    server.kill()


def test_ranks_with_disks_of_different_speed_agree(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path, store: Path
) -> None:
    """TP 2; the second rank's reads take longer, and the first one waits for them."""
    config = tiered(
        llama_checkpoint,
        pool,
        *storage_flags(store),
        *("--hpkv-promote-policy", "wait_complete"),
        tp_size=2,
        dtype="float32",
        faults=[UNHURRIED, {"disk_delay": ["read", 0.7], "rank": 1}],
    )
    (server,) = server_factory.fresh(config)
    work = prompts(3, LENGTH, seed=12)
    references = [device_hit(server, tokens) for tokens in work]
    forget_memory(server, pool)
    answers = server.generate_many([ask(tokens) for tokens in work])
    for answer, reference in zip(answers, references, strict=True):
        assert_same_up_to_rounding(answer, reference)
    assert any(answer.cached_on("storage") == cacheable(LENGTH) for answer in answers)
    server.kill()


def test_kill_nine_while_spilling_leaves_a_sound_store(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path, store: Path
) -> None:
    """Field report F29. Every second round also loses the pool, as a reboot does."""
    config = tiered(llama_checkpoint, pool, *storage_flags(store, "128m"), size="16m")
    complete: list[tuple[list[int], Answer]] = []  # on disk when the last round was killed
    for round_number in range(KILL_ROUNDS):
        (server,) = server_factory.fresh(config)
        for tokens, reference in complete:
            answer = server.generate(ask(tokens))
            assert answer.cached_tokens == cacheable(LENGTH)
            assert_same_answer(answer, reference)
        work = prompts(6, LENGTH, seed=300 + round_number)
        complete = [(tokens, device_hit(server, tokens)) for tokens in work]
        server.flush_cache()
        wait_until_on_disk(pool)
        with ThreadPoolExecutor(1) as thread:
            burst = [ask(t) for t in prompts(40, LENGTH, seed=200 + round_number)]
            thread.submit(server.generate_many, burst)
            written = json.loads(hpkv("stat", pool))["storage"]["demoted_bytes"]
            until = time.monotonic() + 300
            while json.loads(hpkv("stat", pool))["storage"]["demoted_bytes"] == written:
                assert time.monotonic() < until, "the burst is not spilled through to disk"
            server.kill()
        sizes = [path.stat() for path in store.rglob("*") if path.is_file()]
        assert sum(each.st_size for each in sizes) <= 128 << 20
        # The index and the directory agree, but for a region that was between two contents.
        in_use = json.loads(hpkv("stat", pool))["storage"]["regions_in_use"]
        files = len(list((store / "regions").iterdir()))
        assert in_use <= files <= in_use + 1
        if round_number % 2 == 1:
            shutil.rmtree(pool)
        verified = json.loads(hpkv("verify", pool, store))
        assert verified["bad"] == verified["io_errors"] == 0
        assert verified["blocks"] == verified["total_blocks"] > 0


def hpkv(command: str, pool: Path, store: Path | None = None) -> str:
    """What the installed program prints."""
    program = Path(sys.executable).with_name("hpkv")
    places = ["--path", str(pool)]
    if store is not None:
        places += ["--storage-path", str(store)]
    done = subprocess.run(
        [program, command, *places, "--json"], capture_output=True, text=True, check=False
    )
    return done.stdout
