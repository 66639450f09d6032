"""What `_core` has of the stream engine (csrc/bind/stream.cc, csrc/bind/rig.cc).

Part of `_core.pyi`, which exports it: there is no module of this name at run time, so import from
`hpkv_sglang._core`.
"""

from typing import Literal, final

from hpkv_sglang._core import BlockLayout, BlockSource, KeyBatch, Lease, Pool, VerifyTicket

class StreamDevice:
    """An accelerator that a `StreamEngine` copies to and from. Engines share it."""

CUDA_RUNTIME: int
"""CUDART_VERSION of the CUDA engine in this build (13000 for 13.0); 0 when it has none."""

def cuda_device(ordinal: int) -> StreamDevice:
    """The GPU that this process numbers ``ordinal``. `CorePoolError` when the build has no CUDA,
    there is no driver, no such device, or one that does not share the host's addresses. May block
    for seconds: it is the process's first use of the device."""

@final
class StreamSpill:
    """A spill: what `SpillTicket` promises, and reads that a stream can wait for.

    Here `device_done` comes when the last read has landed, before the pages are stored."""

    @property
    def device_done(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    @property
    def stored(self) -> int: ...
    @property
    def present(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    def wait_reads_on(self, stream: int, timeout_s: float) -> bool:
        """Let everything enqueued on ``stream`` from here on run behind the reads of this spill, so
        that it may overwrite the pages. Blocks at most that long, until the reads are enqueued;
        never for a copy.

        False: time is up. After `cancel` the pages may be overwritten all the same, because what is
        still being read is not published. When the device has failed there is nothing to let the
        stream wait for: True then comes as soon as nothing reads any more."""
    def wait_device(self, timeout_s: float) -> bool:
        """`device_done`, waiting for it at most that long. Blocks."""
    def wait(self) -> None:
        """Until done. Blocks."""
    def cancel(self) -> None:
        """As `SpillTicket.cancel`."""

@final
class StreamLoad:
    """A load: what `LoadTicket` promises, but layers are waited for by streams."""

    @property
    def done(self) -> bool: ...
    @property
    def ok(self) -> bool: ...
    @property
    def elapsed_s(self) -> float: ...
    def layer_done(self, layer: int) -> bool:
        """As `LoadTicket.layer_done`; a host thread has seen it. IndexError."""
    def wait_layer_on(self, stream: int, layer: int) -> bool:
        """Let everything enqueued on ``stream`` from here on run behind the arrival of this layer.
        Blocks until the layer's copies are enqueued: for a copy only when this load, or one before
        it, did not fit into the engine's `LoadRoom`. IndexError.

        False: the load has failed, and the pages are not to be used. True: its bytes were good and
        are on their way. Only a failing device can still spoil them, and it is lost for everybody:
        `ok` says so in the end."""
    def wait(self) -> bool:
        """As `LoadTicket.wait`. Blocks."""

@final
class LoadRoom:
    """What loads could take of the staging area, as it was when the engine was asked.

    Loads that fit into it together, and are started before anything else is, are enqueued at once:
    nobody who waits for one of their layers waits for a copy."""

    def take(self, lease: Lease, source: BlockSource | None = None) -> int:
        """How many leading pages of ``lease`` fit; takes off what those need. ValueError for blocks
        that are no whole pages, or another layout's source. Returns at once."""
    def copy(self) -> LoadRoom: ...

@final
class StreamEngine:
    """Copies blocks between pages of an accelerator and the pool, on streams of its own.

    Streams are the device library's handles as numbers (torch's ``cuda_stream``); the chooser may
    be 0, the device's default stream. Submitting never waits for the device. The first call of the
    device that fails is the end: spills drop, loads fail, verifications go on.

    Close it before the pool, and before the device memory of its layout goes away.
    """

    def __init__(
        self,
        device: StreamDevice,
        pool: Pool,
        namespace: int,
        layout: BlockLayout,
        *,
        page_size: int,
        threads: int = 2,
        staging_bytes: int = 268435456,
        spill_path: Literal["batch", "kernel"] = "kernel",
        register_pool: bool = True,
    ) -> None:
        """``page_size`` slots a page. ``threads`` checksum and publish; ``staging_bytes`` of host
        memory are pinned, and with ``register_pool``, in the background, what the pool has reserved
        so far.

        By the kernel nobody waits for page indices; for spills by batches an engine thread fetches
        them, behind the chooser. ValueError unless blocks of the namespace have the layout's size,
        for a page size of 0 and for another path; `CorePoolError` when the device refuses.
        Blocks."""
    def spill(
        self,
        keys: KeyBatch,
        first_slots: int,
        chooser: int,
        user: int,
        turn: int = 0,
        turns: int = 1,
    ) -> StreamSpill:
        """Store the pages that are not there yet, as `CopyEngine.spill`. Returns at once.

        ``first_slots`` is the address of a contiguous int64 array in device memory: of each page
        the slot of its first token. What stream ``chooser`` does so far makes it valid, and it
        stays valid and unchanged until the ticket is done. ``user`` is the stream that wrote the
        pages: they are read behind what it does so far, and what the chooser does (0: there is no
        such stream).

        A page outside the layout is dropped and counted. ValueError for an address that is none,
        or turns as in `CopyEngine.spill`."""
    def load(
        self,
        lease: Lease,
        first_slots: int,
        page_count: int,
        chooser: int,
        user: int,
        source: BlockSource | None = None,
    ) -> StreamLoad:
        """Block i to the page of ``first_slots[i]``, or as ``source`` says, layer by layer, as
        `CopyEngine.load`; streams and indices as in `spill`: pages are written behind what ``user``
        does so far, because it may still use what was in them. Returns at once.

        A page outside the layout is left out. ValueError besides for an address that is none."""
    def load_room(self) -> LoadRoom:
        """What loads could take now without waiting for any before them. Returns at once."""
    def hold_loads(self) -> None:
        """Loads from here on, of any thread, are for one forward pass: they begin side by side, the
        first layer of each before the second of any, with the last `release_loads`. Do not wait for
        one before that; `close` does not. Returns at once."""
    def release_loads(self) -> None:
        """The end of one `hold_loads`; ValueError without it. Returns at once."""
    def verify(self, lease: Lease) -> VerifyTicket:
        """As `CopyEngine.verify`."""
    def set_delay(self, kind: str, layer: int, microseconds: int) -> None:
        """As `CopyEngine.set_delay`: before copies are enqueued."""
    def fail_next(self, kind: str, count: int) -> None:
        """As `CopyEngine.fail_next`."""
    def stats(self) -> dict[str, int]: ...
    @property
    def poisoned(self) -> bool:
        """A call of the device has failed, and nothing is copied any more."""
    @property
    def error_count(self) -> int:
        """Calls that failed."""
    @property
    def first_error(self) -> str:
        """Of the first one: file, line, call and reason; empty without one."""
    @property
    def notice(self) -> str:
        """Something to be logged once: why not all of the pool is registered. Usually empty."""
    def check(self) -> list[str]:
        """Every violated invariant in words; call it while nothing is copied."""
    def quiesce(self) -> None:
        """Until no copy is queued or running. Blocks."""
    def close(self) -> None:
        """Drop and fail what is not over, wait for what the device has. Blocks. Idempotent."""

@final
class AsyncHostDevice(StreamDevice):
    """A device of host threads for tests; its memory is the process's own. Only in modules built
    with ``HPKV_RIG=ON``: ask with ``hasattr``.

    Every stream is a thread that dawdles up to ``delay_us`` before each piece of work; what a copy
    will overwrite is poisoned first."""

    def __init__(self, seed: int = 1, delay_us: int = 50) -> None: ...
    def make_stream(self) -> int: ...
    def synchronize_stream(self, stream: int) -> None:
        """Until it has nothing to do. Blocks. `CorePoolError` on a device that failed."""
    def hold(self, stream: int) -> None:
        """Nothing more of this stream starts until `release`. Release before closing an engine."""
    def release(self, stream: int) -> None: ...
    def fail_call(self, nth: int, lost: bool = False) -> None:
        """The nth call from now on fails (0: none), and all later ones when the device is lost."""
    def made_stream(self, index: int) -> int:
        """The stream that was made as number ``index``, engines' own included. IndexError."""
