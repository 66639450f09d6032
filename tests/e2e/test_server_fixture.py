"""The real server, without the plugin, through the fixtures all server tests stand on."""

import os
import select
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from hpkv_testing.client import Ask, ServerError
from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.server import Server, ServerConfig, ServerStartError

pytestmark = pytest.mark.server

PAGE = 16
PROMPT = [7 * i % 256 for i in range(200)]
FULL_PAGES = 192  # of 200 tokens, in pages of 16


@pytest.fixture(scope="module")
def servers(
    server_factory: ServerFactory, llama_checkpoint: Path, deepseek_checkpoint: Path
) -> dict[str, Server]:
    """Both tiny models, started side by side and shared by the tests of this module."""
    configs = [
        ServerConfig(model=model, page_size=PAGE)
        for model in (llama_checkpoint, deepseek_checkpoint)
    ]
    return dict(zip(("llama", "deepseek"), server_factory.many(configs), strict=True))


@pytest.fixture(params=["llama", "deepseek"])
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    chosen = servers[request.param]
    chosen.flush_cache()
    return chosen


def test_a_repeated_prompt_is_a_device_hit_with_the_same_answer(server: Server) -> None:
    ask = Ask(input_ids=PROMPT, max_new_tokens=24)
    cold, hit = server.generate(ask), server.generate(ask)
    assert (cold.cached_tokens, cold.cached_tokens_details) == (0, {})
    assert hit.cached_tokens == hit.cached_on("device") == FULL_PAGES
    assert hit.output_ids == cold.output_ids
    assert len(hit.output_ids) == 24


def test_a_flush_empties_the_device_tree(server: Server) -> None:
    ask = Ask(input_ids=PROMPT)
    server.generate(ask)
    server.flush_cache()
    assert server.generate(ask).cached_tokens == 0


def test_greedy_output_wanders_and_depends_on_the_whole_prompt(server: Server) -> None:
    """Otherwise equal answers would prove nothing about the KV bytes behind them."""
    answers = [
        server.generate(input_ids=[first, *PROMPT[1:]], max_new_tokens=32).output_ids
        for first in range(3)
    ]
    assert len(set(answers)) == 3
    assert all(len(set(output)) > 12 for output in answers)


def test_equal_device_hits_have_equal_logprobs(server: Server) -> None:
    ask = Ask(input_ids=PROMPT, return_logprob=True)
    server.generate(ask)
    first, second = server.generate(ask), server.generate(ask)
    assert first.logprobs == second.logprobs
    assert len(first.logprobs) == 16


def test_a_streamed_answer_equals_the_plain_one_and_is_timed(server: Server) -> None:
    plain = server.generate(input_ids=PROMPT)
    streamed = server.generate(input_ids=PROMPT, stream=True)
    assert streamed.output_ids == plain.output_ids
    assert streamed.cached_tokens == FULL_PAGES
    assert streamed.ttft_s is not None
    assert 0 < streamed.ttft_s <= streamed.elapsed_s


def test_answers_of_concurrent_requests_come_in_their_order(server: Server) -> None:
    asks = [Ask(input_ids=[i] * 40, max_new_tokens=4, rid=f"order-{i}") for i in range(6)]
    assert [answer.rid for answer in server.generate_many(asks)] == [ask.rid for ask in asks]


def test_another_extra_key_or_salt_shares_nothing(server: Server) -> None:
    server.generate(input_ids=PROMPT)
    for isolated in ({"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "c"}):
        assert server.generate(input_ids=PROMPT, **isolated).cached_tokens == 0
        assert server.generate(input_ids=PROMPT, **isolated).cached_tokens == FULL_PAGES


def test_a_refused_request_is_an_error_with_the_servers_words(server: Server) -> None:
    with pytest.raises(ServerError, match="answered 400"):
        server.generate(input_ids=[1] * 40, sampling={"temperature": -1.0})


def test_an_equal_configuration_gets_the_same_server_with_an_empty_tree(
    servers: dict[str, Server], server_factory: ServerFactory
) -> None:
    server = servers["llama"]
    server.generate(input_ids=PROMPT)
    assert server_factory(server.config) is server
    assert server.generate(input_ids=PROMPT).cached_tokens == 0


def test_a_server_by_its_command_line_gives_the_answers_of_a_forked_one(
    servers: dict[str, Server], server_factory: ServerFactory
) -> None:
    forked = servers["llama"]
    other = server_factory(replace(forked.config, new_python=True))
    assert "hpkv_testing.nursery" in forked.processes()[forked.pid]
    assert "sglang.launch_server" in other.processes()[other.pid]
    answers = [
        server.generate(input_ids=PROMPT, max_new_tokens=8, return_logprob=True)
        for server in (forked, other)
    ]
    assert answers[0].output_ids == answers[1].output_ids
    assert answers[0].logprobs == answers[1].logprobs
    assert len(forked.processes()) == len(other.processes()) + 1  # the spawner


def test_a_server_that_can_not_start_says_why(tmp_path: Path) -> None:
    server = Server(ServerConfig(model=tmp_path / "nothing"), tmp_path / "log")
    with pytest.raises(ServerStartError) as failure, server:
        pass
    assert str(tmp_path / "nothing") in str(failure.value)
    assert not server.alive
    assert max(map(len, str(failure.value).splitlines())) < 400


OWNER = """
    import sys
    from pathlib import Path
    from hpkv_testing.server import Server, ServerConfig
    server = Server(ServerConfig(model=Path(sys.argv[1])), Path(sys.argv[2]))
    server.start()
    server.wait_ready()
    print(*server.processes(), flush=True)
    sys.stdin.read()
"""


def test_no_process_outlives_its_killed_owner(llama_checkpoint: Path, tmp_path: Path) -> None:
    """The guard's own tests cover the other ways to end; this one has SGLang's real children."""
    command = [sys.executable, "-c", textwrap.dedent(OWNER), llama_checkpoint, tmp_path / "log"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) >= 3  # server, scheduler, detokenizer
        handles = [os.pidfd_open(pid) for pid in pids]
        owner.kill()
        ends = [_ended_within(handle, 60.0) for handle in handles]
    assert all(ends), f"still running: {[p for p, end in zip(pids, ends, strict=True) if not end]}"


def _ended_within(handle: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    ended = bool(poller.poll(timeout_s * 1000))
    os.close(handle)
    return ended
