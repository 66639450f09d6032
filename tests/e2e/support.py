"""What the server tests share: pools, configurations with the tiers on, prompts, and the question
whether an answer from a tier equals that of a device hit of the same length."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from hpkv_testing.client import Answer, Ask
from hpkv_testing.faults import Fault, faults_env
from hpkv_testing.server import Server, ServerConfig

PAGE = 16


@contextmanager
def pool_directory() -> Iterator[Path]:
    """An empty directory on tmpfs, removed with everything in it."""
    folder = Path(mkdtemp(prefix="hpkv-test-", dir="/dev/shm"))
    try:
        yield folder / "pool"
    finally:
        shutil.rmtree(folder)


UNHURRIED: Fault = {"unhurried": True}


def tiered(
    model: Path,
    pool: Path,
    *flags: str,
    size: str | None = "64m",
    faults: Sequence[Fault] | None = None,
    **fields: Any,
) -> ServerConfig:
    """A server with the host tier on.

    It waits for its copies however busy the machine is; with `faults`, even none, only if
    `UNHURRIED` is one of them: the time that it has may be what is tested.
    """
    sized = () if size is None else ("--hpkv-mem-pool-size", size)
    env = (*fields.pop("env", ()), *faults_env(*([UNHURRIED] if faults is None else faults)))
    return ServerConfig(
        model=model,
        flags=("--enable-hpkv", "--hpkv-share-mem-path", str(pool), *sized, *flags),
        env=env,
        **fields,
    )


def storage_flags(store: Path, size: str = "256m") -> tuple[str, ...]:
    """The flags of a disk tier in this directory."""
    return ("--hpkv-storage-path", str(store), "--hpkv-storage-size", size)


def prompts(count: int, length: int, seed: int = 0, spread: int = 0) -> list[list[int]]:
    """Random byte tokens, no two prompts with a common first page."""
    rng = random.Random(seed)
    return [
        [rng.randrange(256) for _ in range(length + (rng.randrange(spread) if spread else 0))]
        for _ in range(count)
    ]


def ask(tokens: Sequence[int], **fields: object) -> Ask:
    return Ask(input_ids=tokens, max_new_tokens=12, return_logprob=True, **fields)  # type: ignore[arg-type]


def device_hit(server: Server, tokens: Sequence[int], **fields: object) -> Answer:
    """The fair reference: the same request answered from device memory."""
    server.generate(ask(tokens, **fields))
    answer = server.generate(ask(tokens, **fields))
    assert answer.cached_on("host") == 0
    return answer


def assert_same_answer(answer: Answer, reference: Answer) -> None:
    assert answer.output_ids == reference.output_ids
    assert answer.logprobs == reference.logprobs


def assert_same_up_to_rounding(answer: Answer, reference: Answer) -> None:
    """For answers computed in other batches than the reference, by servers of dtype float32.

    Another batch, or a retraction, means other matrix shapes and another order of additions. In
    float32 that moves a log-probability by 2e-4 at most; in bfloat16 it now and then picks another
    token.
    """
    assert answer.output_ids == reference.output_ids
    assert answer.logprobs == pytest.approx(reference.logprobs, abs=1e-3)


def cacheable(length: int, page: int = PAGE) -> int:
    """Tokens of a prompt that can be cached: whole pages, and never the last token."""
    return max(0, (length - 1) // page * page)
