"""Random operations by several processes on one pool, against a dictionary.

One operation at a time, by a client chosen at random, so the dictionary knows what must be there.
After every step the pool's own check must be silent. The seed is in the test's name.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pool_worker import serve

POOL_BYTES = 16 << 20
SMALL, LARGE = b"s" * 32, b"l" * 32
BLOCK_BYTES = {SMALL: 100 << 10, LARGE: 1 << 20}
STEPS = 300
CLIENTS = 3
TIMEOUT_S = 120


class Remote:
    """A worker process; calling it with an operation waits for the answer."""

    def __init__(self, directory: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, directory, POOL_BYTES, BLOCK_BYTES)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self._answer() == "ready"

    def __call__(self, operation: str, *arguments: Any) -> Any:
        self.pipe.send((operation, arguments))
        return self._answer()

    def _answer(self) -> Any:
        assert self.pipe.poll(TIMEOUT_S), "the worker hangs"
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Block:
    """What the model knows of a stored block."""

    namespace: bytes
    stamp: int
    pins: dict[int, int] = field(default_factory=dict)  # client -> count
    was_pinned: bool = False  # since its last stamp: it may have been left out of a walk


class Model:
    """The dictionary, and the clients it is compared with."""

    def __init__(self, directory: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.clients = {n: Remote(directory) for n in range(CLIENTS)}
        self.universe = [self.random.randbytes(32) for _ in range(400)]
        self.blocks: dict[bytes, Block] = {}
        self.leases: dict[int, tuple[int, list[bytes]]] = {}
        self.next_client = CLIENTS
        self.clock = 0

    def namespace_of(self, key: bytes) -> bytes:
        return LARGE if self.universe.index(key) % 8 == 0 else SMALL

    def any_client(self) -> tuple[int, Remote]:
        return self.random.choice(list(self.clients.items()))

    def run_of_keys(self) -> list[bytes]:
        """A prefix: neighbours in the universe, preferably around a block that is there."""
        anchor = self.random.choice(list(self.blocks) or self.universe)
        first = self.universe.index(anchor)
        return self.universe[first : first + self.random.randint(1, 6)]

    def leading(self, keys: list[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    # ---- operations: each does it for real, and in the dictionary ----

    def put(self) -> None:
        _, client = self.any_client()
        key = self.random.choice(self.universe)
        outcome = client("put", self.namespace_of(key), key)
        if key in self.blocks:
            assert outcome == "present"
            self.restamp(key)
            return
        assert outcome in ("stored", "full"), outcome
        self.notice_evictions(client, key)
        if outcome == "stored":
            self.blocks[key] = Block(self.namespace_of(key), self.tick())
        else:
            assert any(block.pins for block in self.blocks.values()), (
                "full though nothing is pinned"
            )

    def notice_evictions(self, client: Remote, stored: bytes) -> None:
        """What a put evicted: never a pinned block, and of its own class only the coldest."""
        keys = list(self.blocks)
        gone = [k for k, here in zip(keys, client("present", keys), strict=True) if not here]
        own = self.namespace_of(stored)
        for key in sorted(gone, key=lambda k: self.blocks[k].stamp):
            block = self.blocks.pop(key)
            assert not block.pins, "a pinned block was evicted"
            if block.namespace != own:
                continue  # a segment changed class: all its blocks go
            colder = [
                b
                for b in self.blocks.values()
                if b.namespace == own and not b.pins and not b.was_pinned and b.stamp < block.stamp
            ]
            assert not colder, "a block was evicted before a colder one"

    def get(self) -> None:
        _, client = self.any_client()
        key = self.random.choice(self.universe)
        wanted = "hit" if key in self.blocks else "miss"
        assert client("get", self.namespace_of(key), key) == wanted

    def lookup(self) -> None:
        _, client = self.any_client()
        keys = self.run_of_keys()
        assert client("lookup", keys) == self.leading(keys)

    def touch(self) -> None:
        _, client = self.any_client()
        keys = self.run_of_keys()
        assert client("touch", keys) == sum(key in self.blocks for key in keys)
        for key in reversed(keys):
            if key in self.blocks:
                self.restamp(key)

    def restamp(self, key: bytes) -> None:
        self.blocks[key].stamp = self.tick()
        self.blocks[key].was_pinned = bool(self.blocks[key].pins)

    def pin(self) -> None:
        number, client = self.any_client()
        keys = self.run_of_keys()
        lease = self.tick()
        count = client("pin", lease, keys)
        assert count == self.leading(keys)
        self.leases[lease] = (number, keys[:count])
        for key in keys[:count]:
            pins = self.blocks[key].pins
            pins[number] = pins.get(number, 0) + 1
            self.blocks[key].was_pinned = True

    def unpin(self, number: int, keys: list[bytes]) -> None:
        for key in keys:
            pins = self.blocks[key].pins
            pins[number] -= 1
            if pins[number] == 0:
                del pins[number]

    def keep(self) -> None:
        if not self.leases:
            return
        lease = self.random.choice(list(self.leases))
        number, keys = self.leases[lease]
        count = self.random.randint(0, len(keys))
        self.clients[number]("keep", lease, count)
        self.unpin(number, keys[count:])
        self.leases[lease] = (number, keys[:count])

    def release(self) -> None:
        if not self.leases:
            return
        lease = self.random.choice(list(self.leases))
        number, keys = self.leases.pop(lease)
        self.clients[number]("release", lease)
        self.unpin(number, keys)

    def clear(self) -> None:
        _, client = self.any_client()
        chosen = self.random.choice([None, SMALL, LARGE])
        gone = [
            key
            for key, block in self.blocks.items()
            if not block.pins and chosen in (None, block.namespace)
        ]
        dropped = client("clear") if chosen is None else client("drop", chosen)
        assert dropped == len(gone)
        for key in gone:
            del self.blocks[key]

    def replace_client(self) -> None:
        """One goes, with a goodbye or without, and another comes."""
        number, client = self.any_client()
        if self.random.random() < 0.5:
            client("close")
            client.kill()
        else:
            client.kill()
            self.wait_until_buried()
        del self.clients[number]
        for lease, (owner, keys) in list(self.leases.items()):
            if owner == number:
                self.unpin(number, keys)
                del self.leases[lease]
        self.clients[self.next_client] = Remote(self.directory)
        self.next_client += 1

    def wait_until_buried(self) -> None:
        """Its pins last until its quarantine is over; the background threads do the rest."""
        witness = next(c for c in self.clients.values() if c.process.is_alive())
        live = sum(c.process.is_alive() for c in self.clients.values())
        while (stats := witness("stats"))["quarantined"] or stats["clients"] > live:
            witness("maintain")
        slots = {k for k, (n, _) in self.leases.items() if not self.clients[n].process.is_alive()}
        pinned = {k for lease in self.leases.keys() - slots for k in self.leases[lease][1]}
        while witness("stats")["pinned"] > len(pinned):
            witness("maintain")

    def step(self) -> None:
        weighted: list[tuple[Callable[[], None], int]] = [
            (self.put, 50),
            (self.get, 12),
            (self.lookup, 8),
            (self.touch, 8),
            (self.pin, 8),
            (self.release, 9),
            (self.keep, 3),
            (self.clear, 1),
            (self.replace_client, 1),
        ]
        operations, weights = zip(*weighted, strict=True)
        self.random.choices(operations, weights)[0]()
        _, client = self.any_client()
        assert client("check") == []
        assert client("stats")["blocks"] == len(self.blocks)

    def finish(self) -> None:
        for client in self.clients.values():
            client.kill()


@pytest.fixture
def directory() -> Iterator[str]:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix="model-test-", dir=base)
    try:
        yield str(Path(path) / "pool")
    finally:
        shutil.rmtree(path)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_operations_of_several_processes_agree_with_a_dictionary(
    directory: str, seed: int
) -> None:
    model = Model(directory, seed)
    try:
        for _ in range(STEPS):
            model.step()
    finally:
        model.finish()
