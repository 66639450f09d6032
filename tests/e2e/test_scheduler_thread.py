"""The scheduler thread is sacred: no collective while nothing is pending, nothing compiled, no
file-system call, on the real server with two ranks."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpkv_testing.faults import Fault
from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.server import Server
from hpkv_testing.tiers import empty_host_pool, wait_until_on_disk
from tests.e2e.support import (
    UNHURRIED,
    ask,
    assert_same_answer,
    cacheable,
    device_hit,
    pool_directory,
    prompts,
    storage_flags,
    tiered,
)

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def pool() -> Iterator[Path]:
    with pool_directory() as folder:
        yield folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "store"


@pytest.fixture(scope="module")
def server(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path, store: Path
) -> Iterator[Server]:
    watched: list[Fault] = [UNHURRIED, {"count": True, "rank": 0}, {"audit": True, "rank": 0}]
    config = tiered(llama_checkpoint, pool, *storage_flags(store), tp_size=2, faults=watched)
    (server,) = server_factory.fresh(config)
    yield server
    server.kill()


def counts(server: Server) -> list[tuple[int, int]]:
    """(steps, collectives) between one flush and the next."""
    found = re.findall(r"hpkv-test: steps=(\d+) collectives=(\d+)", server.log_text())
    return [(int(steps), int(collectives)) for steps, collectives in found]


def test_two_ranks_load_what_two_ranks_spilled(server: Server) -> None:
    work = prompts(6, 700, seed=61)
    references = [device_hit(server, tokens) for tokens in work]
    for tokens, reference in zip(work, references, strict=True):
        answer = server.generate(ask(tokens))
        assert answer.cached_on("host") > 0
        assert answer.cached_tokens == cacheable(700)
        assert_same_answer(answer, reference)


def test_decoding_makes_no_collective(server: Server) -> None:
    """Field report F41. A request costs a handful when it enters; its 150 steps cost none."""
    (tokens,) = prompts(1, 100, seed=62)
    server.flush_cache()
    server.generate(input_ids=tokens, max_new_tokens=150)
    server.flush_cache()
    steps, collectives = counts(server)[-1]
    assert steps >= 150
    assert collectives <= 6


def test_nothing_is_opened_imported_or_compiled_inside_the_tiers(
    server: Server, pool: Path
) -> None:
    """Device, host and disk hits; the disk is read by the core's threads."""
    work = prompts(4, 700, seed=63)
    for tokens in work + work:
        server.generate(ask(tokens))
    server.flush_cache()
    wait_until_on_disk(pool)
    empty_host_pool(pool)
    assert sum(server.generate(ask(tokens)).cached_on("storage") for tokens in work) > 0
    server.flush_cache()
    reports = re.findall(r"hpkv-test: inside the tiers: (\[.*\])", server.log_text())
    assert reports[-1] == "[]"


@contextmanager
def traced(pids: list[int], into: Path) -> Iterator[None]:
    """Every call of these processes that names a file or a descriptor, with its thread and path."""
    program = shutil.which("strace")
    if program is None:
        pytest.skip("strace is not installed")
    attach = [word for pid in pids for word in ("-p", str(pid))]
    command = [program, "-f", "-y", "-qq", "-e", "trace=%file,%desc", "-o", str(into), *attach]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)
            _, said = tracer.communicate()
    if "Operation not permitted" in said:
        pytest.skip(f"processes cannot be traced here: {said.strip()}")


def test_the_kernel_sees_no_call_on_the_tiers_files_from_the_scheduler_thread(
    server: Server, pool: Path, store: Path, tmp_path: Path
) -> None:
    """Spills, host hits, demotions and disk hits; all of it is done by other threads."""
    trace, ranks = tmp_path / "trace", server.scheduler_pids()
    work = prompts(2, 700, seed=64)
    with traced(ranks, trace):
        for _ in range(2):
            for tokens in work:
                server.generate(ask(tokens))
            server.flush_cache()
        wait_until_on_disk(pool)
        empty_host_pool(pool)
        assert sum(server.generate(ask(tokens)).cached_on("storage") for tokens in work) > 0
    by_scheduler, by_others = [], []
    for line in trace.read_text(errors="replace").splitlines():
        if str(store) in line or str(pool) in line:
            (by_scheduler if int(line.split()[0]) in ranks else by_others).append(line)
    assert by_scheduler == []
    assert any("preadv" in line for line in by_others), "the trace sees the disk"
    assert any("pwritev" in line for line in by_others), "the trace sees the disk"
