"""One pool per node: what one server stored, another one, and the one after a crash, reads."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpkv_sglang.cli.attachment import attached as attach
from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.models import TinyLlama, checkpoint
from hpkv_testing.server import ServerConfig
from tests.e2e.support import (
    ask,
    assert_same_answer,
    cacheable,
    device_hit,
    prompts,
    tiered,
)

pytestmark = pytest.mark.server

LENGTH = 500


@pytest.mark.parametrize("model", ["llama_checkpoint", "deepseek_checkpoint"])
def test_a_killed_server_leaves_a_warm_pool_and_nothing_else(
    server_factory: ServerFactory, model: str, pool: Path, request: pytest.FixtureRequest
) -> None:
    """kill -9 of every process while spilling; then a restart, and a second server without a size.

    Field report F34: five kills do not grow the directory.
    """
    work = prompts(4, LENGTH, seed=21)
    path = request.getfixturevalue(model)
    config = tiered(path, pool)
    (first,) = server_factory.fresh(config)
    references = [device_hit(first, tokens) for tokens in work]
    first.flush_cache()  # everything is published
    first.generate_many([ask(tokens) for tokens in prompts(4, LENGTH, seed=22)])
    first.kill()
    files = sorted(path.name for path in pool.iterdir())

    adopter = tiered(path, pool, size=None)
    restarted, second = server_factory.fresh(config, adopter)
    for server in (restarted, second):
        for tokens, reference in zip(work, references, strict=True):
            answer = server.generate(ask(tokens))
            assert answer.cached_on("host") == cacheable(LENGTH)
            assert_same_answer(answer, reference)
    assert "blocks already warm" in restarted.log_text()
    assert sorted(path.name for path in pool.iterdir()) == files
    with attach(str(pool), read_only=True) as attached:
        assert attached.check() == []
        assert attached.stats()["reaped"] >= 1

    # What one server stores now, the other one reads; and a stopped server stops nobody.
    (fresh,) = prompts(1, LENGTH, seed=23)
    reference = device_hit(restarted, fresh)
    restarted.flush_cache()
    for pid in restarted.scheduler_pids():
        os.kill(pid, signal.SIGSTOP)
    answer = second.generate(ask(fresh))
    assert answer.cached_on("host") == cacheable(LENGTH)
    assert_same_answer(answer, reference)
    restarted.kill()
    second.kill()


def test_other_weights_and_other_dtypes_share_nothing(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path
) -> None:
    """Field reports F01 and F02: same sizes, same names, same pool, other numbers."""
    (tokens,) = prompts(1, LENGTH, seed=31)
    (first,) = server_factory.fresh(tiered(llama_checkpoint, pool))
    cold = first.generate(ask(tokens))
    first.flush_cache()
    assert first.generate(ask(tokens)).cached_on("host") == cacheable(LENGTH)
    first.kill()

    other_weights = checkpoint(TinyLlama(seed=1))
    strangers = server_factory.fresh(
        tiered(other_weights, pool), tiered(llama_checkpoint, pool, dtype="float16")
    )
    for stranger in strangers:
        answer = stranger.generate(ask(tokens))
        assert answer.cached_tokens == 0
        assert answer.output_ids != cold.output_ids or stranger is strangers[1]
        stranger.kill()


def test_a_pool_of_another_size_is_refused_by_name(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path
) -> None:
    from hpkv_testing.server import ServerStartError

    (first,) = server_factory.fresh(tiered(llama_checkpoint, pool))
    wrong: ServerConfig = tiered(llama_checkpoint, pool, size="32m")
    with pytest.raises(ServerStartError, match=r"(?s)67108864|64m|64 MiB"):
        server_factory.fresh(wrong)
    assert first.generate(ask(prompts(1, 100, seed=41)[0])).output_ids  # and nobody was harmed
    first.kill()
