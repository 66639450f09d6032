"""Tiers that are slow, lose their blocks or fail: requests are served as if they were not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpkv_testing.faults import Fault
from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.server import Server
from hpkv_testing.tiers import wait_until_stored
from tests.e2e.support import (
    PAGE,
    UNHURRIED,
    ask,
    assert_same_up_to_rounding,
    cacheable,
    device_hit,
    prompts,
    tiered,
)

pytestmark = pytest.mark.server

STRICT = (("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1"),)


def under_load(server: Server, seed: int, count: int = 8, rounds: int = 3) -> int:
    """Ask prompts that evict each other, many at once; every answer must be right.

    Returns how many of the answers came, in part, from the host tier.
    """
    work = prompts(count, 400, seed=seed, spread=150)
    references = [device_hit(server, tokens) for tokens in work]
    answers = server.generate_many([ask(tokens) for _ in range(rounds) for tokens in work])
    for answer, reference in zip(answers, references * rounds, strict=True):
        assert_same_up_to_rounding(answer, reference)
        assert answer.cached_on("device") + answer.cached_on("host") == answer.cached_tokens
    assert server.alive
    return sum(answer.cached_on("host") > 0 for answer in answers)


def start(
    factory: ServerFactory, model: Path, pool: Path, *flags: str, faults: list[Fault], **fields: int
) -> Server:
    config = tiered(model, pool, *flags, faults=faults, env=STRICT, dtype="float32", **fields)
    return factory.fresh(config)[0]


def test_many_clients_at_once_all_get_the_answer_of_a_device_hit(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path
) -> None:
    """No fault yet: small device pool, chunked prefill (field report F21)."""
    chunked = ("--chunked-prefill-size", "256")
    server = start(server_factory, llama_checkpoint, pool, *chunked, faults=[])
    assert under_load(server, seed=5, count=10) > 0
    server.kill()


@pytest.mark.parametrize(
    "flags", [("--chunked-prefill-size", "128"), ("--disable-overlap-schedule",)]
)
def test_a_failed_load_is_recomputed_and_never_an_error(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path, flags: tuple[str, ...]
) -> None:
    """Field report F13 with it: requests of one prefix during a failing load are all right."""
    faults: list[Fault] = [{"fail_every": ["load", 2]}, {"delay": ["load", -1, 5000]}]
    server = start(server_factory, llama_checkpoint, pool, *flags, faults=faults)
    assert under_load(server, seed=51) > 0
    assert "recomputing" in server.log_text()
    (shared,) = prompts(1, 450, seed=52)
    reference = device_hit(server, shared)
    server.flush_cache()
    answers = server.generate_many([ask([*shared, tail]) for tail in range(6)])
    server.flush_cache()
    again = server.generate(ask(shared))
    assert again.output_ids == reference.output_ids
    assert len({a.output_ids for a in answers}) > 1
    server.kill()


@pytest.mark.parametrize("flags", [(), ("--disable-overlap-schedule",)])
def test_others_in_the_batch_of_a_failed_load_keep_their_input_logprobs(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path, flags: tuple[str, ...]
) -> None:
    """SGLang deals out the rows of a batch, and does not count those of a retracted request."""
    faults: list[Fault] = [{"fail_every": ["load", 2]}, {"delay": ["load", -1, 5000]}]
    server = start(server_factory, llama_checkpoint, pool, *flags, faults=faults)
    asks = [
        ask(tokens, fields={"logprob_start_len": 128})
        for tokens in prompts(8, 300, seed=60, spread=100)
    ]
    references = [server.generate(one) for one in asks]
    for _ in range(3):
        server.flush_cache()
        answers = server.generate_many(asks)
        for answer, reference in zip(answers, references, strict=True):
            assert_same_up_to_rounding(answer, reference)
            assert answer.input_logprobs == pytest.approx(reference.input_logprobs, abs=1e-3)
            assert len(answer.input_logprobs) == answer.prompt_tokens - 129
    assert "recomputing" in server.log_text()
    server.kill()


def test_slow_spills_neither_starve_nor_abort(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path
) -> None:
    """Spills that take a minute each, with SGLang reserving little for running requests."""
    faults: list[Fault] = [{"delay": ["spill", -1, 15_000_000]}]
    server = start(
        server_factory,
        llama_checkpoint,
        pool,
        *("--schedule-conservativeness", "0.1"),
        faults=faults,
    )
    under_load(server, seed=53)
    server.kill()


def test_a_layer_is_never_read_before_it_has_landed(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path
) -> None:
    """Field report F10: every layer late, in the order in which the forward wants them."""
    server = start(server_factory, llama_checkpoint, pool, faults=[{"delay": ["load", -1, 30_000]}])
    assert under_load(server, seed=54, count=6, rounds=2) > 0
    server.kill()


MODELS_AND_RANKS = [("llama_checkpoint", 1), ("deepseek_checkpoint", 2)]
LOAD = {1: {"count": 8, "rounds": 3}, 2: {"count": 5, "rounds": 2}}  # two ranks share the cores


@pytest.mark.parametrize(("model", "ranks"), MODELS_AND_RANKS)
def test_the_engine_of_a_gpu_serves_everything_on_a_device_of_threads(
    server_factory: ServerFactory,
    pool: Path,
    model: str,
    ranks: int,
    request: pytest.FixtureRequest,
) -> None:
    """Each piece of its work is late, and every layer of a load again."""
    faults: list[Fault] = [{"streams": 300}, {"delay": ["load", -1, 3000]}]
    checkpoint = request.getfixturevalue(model)
    server = start(server_factory, checkpoint, pool, faults=faults, tp_size=ranks)
    assert under_load(server, seed=59, **LOAD[ranks]) > 0
    server.kill()


@pytest.mark.parametrize(("model", "ranks"), MODELS_AND_RANKS)
def test_of_a_prefix_that_has_no_room_the_rest_is_computed(
    server_factory: ServerFactory,
    pool: Path,
    model: str,
    ranks: int,
    request: pytest.FixtureRequest,
) -> None:
    """Nobody waits for a load that the device has no room for; with two ranks, one of them."""
    room = {"staged_pages": 4, "rank": ranks - 1}
    checkpoint = request.getfixturevalue(model)
    server = start(
        server_factory,
        checkpoint,
        pool,
        faults=[UNHURRIED, {"streams": 100}, room],
        tp_size=ranks,
    )
    (tokens,) = prompts(1, 400, seed=62)
    reference = device_hit(server, tokens)
    for _ in range(2):
        server.flush_cache()
        wait_until_stored(pool, at_least=cacheable(len(tokens)) // PAGE)
        answer = server.generate(ask(tokens))
        assert answer.cached_on("host") == answer.cached_tokens == 4 * PAGE
        assert_same_up_to_rounding(answer, reference)
    assert under_load(server, seed=63, **LOAD[ranks]) > 0
    server.kill()


@pytest.mark.parametrize(("model", "ranks"), MODELS_AND_RANKS)
def test_a_device_that_is_lost_to_copies_turns_the_tiers_off_and_fails_no_request(
    server_factory: ServerFactory,
    pool: Path,
    model: str,
    ranks: int,
    request: pytest.FixtureRequest,
) -> None:
    """In the middle of spills and loads; with two ranks, on one of them."""
    faults: list[Fault] = [{"streams": 100}, {"device_lost_after": 500 // ranks, "rank": ranks - 1}]
    checkpoint = request.getfixturevalue(model)
    server = start(server_factory, checkpoint, pool, faults=faults, tp_size=ranks)
    before_and_while = under_load(server, seed=60, **LOAD[ranks])
    assert before_and_while > 0
    assert server.log_text().count("the tiers are off, copies failed on the device: ") == 1
    assert under_load(server, seed=61, count=3, rounds=2) == 0
    server.kill()


@pytest.mark.parametrize(("model", "ranks"), MODELS_AND_RANKS)
def test_retraction_under_slow_spills_keeps_every_answer(
    server_factory: ServerFactory,
    pool: Path,
    model: str,
    ranks: int,
    request: pytest.FixtureRequest,
) -> None:
    """Field report F25."""
    config = tiered(
        request.getfixturevalue(model),
        pool,
        tp_size=ranks,
        dtype="float32",
        env=(
            *STRICT,
            ("SGLANG_TEST_RETRACT", "1"),
            ("SGLANG_TEST_RETRACT_INTERVAL", "3"),
        ),
        faults=[{"delay": ["spill", -1, 500_000]}],
    )
    (server,) = server_factory.fresh(config)
    under_load(server, seed=55, count=6 // ranks, rounds=2)  # each step is repeated
    server.kill()


def test_a_host_pool_smaller_than_the_device_pool_serves_everything(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path
) -> None:
    """Field reports F14 and F22: 16 MiB of pool behind 64 MiB of device memory."""
    config = tiered(llama_checkpoint, pool, size="16m", max_total_tokens=65_536, env=STRICT)
    (server,) = server_factory.fresh(config)
    answers = server.generate_many([ask(tokens) for tokens in prompts(60, 300, seed=56)])
    assert all(answer.output_ids for answer in answers)
    server.kill()


RANK_ONE: dict[str, list[Fault]] = {
    "loads fail": [{"fail_every": ["load", 2], "rank": 1}],
    "blocks are lost": [{"losing_every": 2, "rank": 1}],
    "allocations fail": [{"alloc_fails_every": 2, "rank": 1}],
    "copies are late": [
        {"delay": ["load", -1, 20_000], "rank": 1},
        {"delay": ["spill", -1, 100_000], "rank": 1},
    ],
}


# Heads of their own on each rank, or the same bytes written in turns.
MODELS = ["llama_checkpoint", "deepseek_checkpoint"]


@pytest.mark.parametrize(
    ("what", "model"), [(what, MODELS[i % 2]) for i, what in enumerate(RANK_ONE)]
)
def test_trouble_on_one_rank_is_answered_alike_on_both(
    server_factory: ServerFactory,
    pool: Path,
    what: str,
    model: str,
    request: pytest.FixtureRequest,
) -> None:
    """Field reports F16 and F17: same decisions, same number of collectives, nothing hangs."""
    checkpoint = request.getfixturevalue(model)
    server = start(server_factory, checkpoint, pool, faults=RANK_ONE[what], tp_size=2)
    under_load(server, seed=57, count=6, rounds=2)
    server.kill()


def test_a_layout_that_fails_its_self_test_on_one_rank_switches_the_tiers_off_on_both(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path
) -> None:
    wrong: list[Fault] = [{"self_test": "other bytes came back", "rank": 1}]
    server = start(server_factory, llama_checkpoint, pool, faults=wrong, tp_size=2)
    (tokens,) = prompts(1, 300, seed=58)
    reference = device_hit(server, tokens)
    server.flush_cache()
    answer = server.generate(ask(tokens))
    assert answer.cached_tokens == 0
    assert answer.output_ids == reference.output_ids
    assert server.log_text().count("the tiers are off: the page self-test failed") == 2
    server.kill()
