"""A pool client in a process of its own, driven through a pipe: one operation, one answer."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from hpkv_sglang._core import KeyBatch, Lease, Pool


class Worker:
    """The operations of the model test, as one client sees them. Leases are named by number."""

    def __init__(self, directory: str, pool_bytes: int, block_bytes: dict[bytes, int]) -> None:
        self.pool = Pool.open(directory, pool_bytes=pool_bytes)
        self.block_bytes = block_bytes
        self.index = {n: self.pool.add_namespace(n, b"", size) for n, size in block_bytes.items()}
        self.leases: dict[int, Lease] = {}

    def put(self, namespace: bytes, key: bytes) -> str:
        return self.pool.put(self.index[namespace], key, payload_of(key, self.size(namespace)))

    def get(self, namespace: bytes, key: bytes) -> str:
        out = bytearray(self.size(namespace))
        if not self.pool.get(key, out):
            return "miss"
        return "hit" if bytes(out) == payload_of(key, len(out)) else "wrong"

    def present(self, keys: list[bytes]) -> list[bool]:
        return [self.pool.lookup(KeyBatch.from_bytes(key)) == 1 for key in keys]

    def lookup(self, keys: list[bytes]) -> int:
        return self.pool.lookup(KeyBatch.from_bytes(b"".join(keys)))

    def touch(self, keys: list[bytes]) -> int:
        return self.pool.touch(KeyBatch.from_bytes(b"".join(keys)))

    def pin(self, number: int, keys: list[bytes]) -> int:
        self.leases[number] = self.pool.pin(KeyBatch.from_bytes(b"".join(keys)))
        return self.leases[number].count

    def keep(self, number: int, count: int) -> None:
        self.leases[number].keep(count)

    def release(self, number: int) -> None:
        self.leases.pop(number).release()

    def clear(self) -> int:
        return self.pool.clear()

    def drop(self, namespace: bytes) -> int:
        return self.pool.drop_namespace(namespace)

    def check(self) -> list[str]:
        return self.pool.check()

    def stats(self) -> dict[str, Any]:
        return self.pool.stats()

    def maintain(self) -> None:
        self.pool.maintain()

    def close(self) -> None:
        self.pool.close()

    def size(self, namespace: bytes) -> int:
        return self.block_bytes[namespace]


def payload_of(key: bytes, size: int) -> bytes:
    return (key * (size // len(key) + 1))[:size]


def serve(pipe: Connection, directory: str, pool_bytes: int, block_bytes: dict[bytes, int]) -> None:
    """Answers until the pipe closes. An exception is an answer, too."""
    worker = Worker(directory, pool_bytes, block_bytes)
    pipe.send("ready")
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(worker, name)(*arguments))
        except Exception as error:  # noqa: BLE001 - the driver raises it again
            pipe.send(error)
