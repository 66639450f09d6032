"""On the GPU: somebody else's thread captures a CUDA graph, in torch's default mode, meanwhile.

In that mode a call of any thread that is not safe beside a capture fails and spoils it, unless the
thread says that it is no part of it. SGLang captures some of its graphs when they are first needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from gpu_rig import FORMS, PATIENCE_S, Rig, block_of, keys_of, noise_for, read, same, write

COUNT, ROUNDS = 4, 8
FROM, TO = [1, 2, 3, 4], [11, 12, 13, 14]


class Capture:
    """A thread that captures `values += 1` twice, with all that happens before `end` in between."""

    def __init__(self) -> None:
        self.values = torch.zeros(1024, device="cuda")
        self.values.add_(0)  # its kernel is loaded
        self.graph = torch.cuda.CUDAGraph()
        self._begun, self._over = threading.Event(), threading.Event()
        torch.cuda.synchronize()
        self._thread = ThreadPoolExecutor(1)
        self._done: Future[None] = self._thread.submit(self._run)
        assert self._begun.wait(PATIENCE_S)

    def _run(self) -> None:
        try:
            with torch.cuda.graph(self.graph, stream=torch.cuda.Stream()):
                self.values.add_(1)
                self._begun.set()
                assert self._over.wait(PATIENCE_S)
                self.values.add_(1)
        finally:
            self._begun.set()

    def end(self) -> None:
        """Raises what the capture has raised."""
        self._over.set()
        self._thread.shutdown()
        self._done.result()


@pytest.fixture
def rig(directory: str) -> Iterator[Rig]:
    """The schedule stream is the current one, as in SGLang."""
    rig = Rig(directory, FORMS["gqa-bf16"](16))
    with torch.cuda.stream(rig.schedule):
        yield rig
        torch.cuda.synchronize()
        rig.close()


def test_a_graph_is_captured_while_pages_are_spilled_loaded_and_registered(rig: Rig) -> None:
    rig.warm_up(rig.engine(register_pool=False))
    copies = rig.engine()
    values = noise_for(rig.layout, COUNT)
    write(rig.layout, FROM, values)
    spilled, loaded = rig.pages(FROM), rig.pages(TO)
    keys = [keys_of(COUNT * i, COUNT) for i in range(ROUNDS)]
    torch.cuda.synchronize()
    # From here to the end of the capture this thread makes no call that would spoil it either.
    capture = Capture()
    try:
        for some in keys:
            spill = copies.spill(some, spilled)
            spill.wait()
            assert spill.stored == COUNT
            assert copies.load(rig.pool.pin(some), loaded).wait()
            copies.quiesce()
        deadline = time.monotonic() + PATIENCE_S / 2
        while copies.stats()["loaded_in_place"] == 0 and time.monotonic() < deadline:
            assert copies.load(rig.pool.pin(keys[0]), loaded).wait()
            copies.quiesce()
    finally:
        capture.end()
    stats = copies.stats()
    assert stats["device_errors"] == 0
    assert stats["loaded_in_place"] > 0, "the pool was registered during the capture"
    torch.cuda.synchronize()
    assert same(read(rig.layout, TO), values)
    expected = [block_of(values, row) for row in range(COUNT)]
    for some in keys:
        assert [rig.block(some, row) for row in range(COUNT)] == expected
    capture.graph.replay()
    torch.cuda.synchronize()
    assert torch.all(capture.values == 2)
