"""The C++ core. Names here are the names on both sides of the binding.

Every object may be used from any thread. Methods marked *blocks* release the GIL while they wait.
"""

from collections.abc import Callable
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from hpkv_sglang._core_stream import *  # noqa: F403  (in a stub, this exports them)

# ---- keys (csrc/bind/keys.cc) ----

@final
class KeyBatch:
    """An immutable array of 256-bit block keys. Slicing shares nothing and copies 32 B a key."""

    @staticmethod
    def from_bytes(raw: bytes) -> KeyBatch:
        """ValueError unless ``len(raw)`` is a multiple of 32."""
    def __len__(self) -> int: ...
    def __getitem__(self, index: slice) -> KeyBatch:
        """Half-open slice with step 1."""
    def __bytes__(self) -> bytes: ...

@final
class KeyScope:
    """What is equal for all blocks of one namespace, shard and format: a 32-byte mask."""

    def __init__(self, mask: bytes) -> None: ...
    def keys(self, page_hashes: list[str]) -> KeyBatch:
        """Block keys of SGLang's page hashes (64 hex digits each): hash XOR mask. ValueError names
        the first malformed one."""

# ---- pool (csrc/bind/pool.cc) ----

class CorePoolError(Exception):
    """args: (kind, message); kind is a word such as 'size', 'owner', 'garbage', 'space', 'busy'."""

@final
class Lease:
    """Pins on the leading run of ready blocks that `Pool.pin` found. Released by `release`, by
    `keep(0)`, or when the object dies."""

    @property
    def count(self) -> int: ...
    @property
    def verified_count(self) -> int:
        """Leading blocks whose checksum was confirmed in this epoch (all, when the pool was
        opened with ``verify_always``: then each load checks again)."""
    def keep(self, count: int) -> None:
        """Unpin all but the first ``count`` blocks."""
    def take(self, count: int) -> Lease:
        """A lease of the first ``count`` blocks (all when there are fewer); this one keeps the
        rest."""
    def release(self) -> None: ...

@final
class Pool:
    """One process's attachment to the node's host pool."""

    @staticmethod
    def open(
        directory: str,
        *,
        pool_bytes: int | None = None,
        create: bool = True,
        read_only: bool = False,
        verify_always: bool = False,
    ) -> Pool:
        """Attach, or create when there is none. Blocks. `CorePoolError` says what to do."""
    @staticmethod
    def check_place(directory: str, *, pool_bytes: int | None = None) -> None:
        """Raise what `open` would now, but for want of a slot; makes the directory. Blocks."""
    @property
    def path(self) -> str: ...
    @property
    def pool_bytes(self) -> int: ...
    @property
    def uuid(self) -> bytes: ...
    @property
    def slot(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def adopted(self) -> bool:
        """True when the pool existed already."""
    @property
    def notice(self) -> str:
        """Why an older pool was replaced, to be logged once; usually empty."""
    @property
    def in_memory(self) -> bool:
        """True when the pool's directory lies on tmpfs or hugetlbfs."""
    @property
    def poisoned(self) -> bool: ...
    def add_namespace(self, namespace: bytes, descriptor: bytes, block_bytes: int) -> int:
        """Register a 32-byte identity; idempotent. Returns the index that put and spill take."""
    def leave_namespace(self, namespace: int) -> None:
        """Take `add_namespace` back: once its blocks are gone, its place is another's."""
    def namespaces(self) -> list[tuple[bytes, bytes, int, int]]:
        """(identity, descriptor, block_bytes, live block count)."""
    def known_namespaces(self) -> list[bytes]:
        """Identities (32 bytes each) known now. Counts no blocks, takes no lock; empty when off."""
    def describe(self, namespace_id: bytes) -> tuple[int, bytes, int] | None:
        """(index, descriptor, block_bytes) of a known identity. Takes no lock."""
    def lookup(self, keys: KeyBatch) -> int:
        """Length of the leading run of ready blocks. Changes nothing."""
    def touch(self, keys: KeyBatch) -> int:
        """Refresh the recency of the blocks that are present, deepest first."""
    def pin(self, keys: KeyBatch) -> Lease:
        """Pin the leading run of ready blocks. Waits 1 ms at most; what is not pinned is a miss."""
    def put(
        self, namespace: int, key: bytes, payload: Buffer
    ) -> Literal["stored", "present", "full", "busy", "off"]: ...
    def get(self, key: bytes, out: Buffer) -> bool:
        """Copy one verified block; False is a miss. Blocks."""
    def drop_namespace(self, namespace: bytes) -> int:
        """Drop its unpinned blocks; returns how many. Blocks."""
    def drop(self, keys: KeyBatch) -> int:
        """Drop those of these blocks that are ready and unpinned; returns how many. Copies on disk
        stay. Blocks."""
    def clear(self) -> int: ...
    def stats(self) -> dict[str, Any]:
        """Counts and bytes of the whole pool, all clients together. Walks the pool. Blocks."""
    def maintain(self) -> None:
        """One round of the background work: notice and bury dead clients. Blocks."""
    def check(self) -> list[str]:
        """Every violated invariant in words; empty when sound. Blocks."""
    def close(self) -> None:
        """Give back pins, unpublished blocks and the slot; idempotent. Blocks."""

# ---- disk tier (csrc/bind/store.cc) ----

@final
class PromoteTicket:
    """Blocks of one request on their way into the host pool, head to tail, pinned as they come."""

    @property
    def done(self) -> bool: ...
    @property
    def count(self) -> int:
        """Leading blocks that are in the host pool now, verified and pinned by this ticket."""
    @property
    def from_disk(self) -> int:
        """How many of them were read from disk for this ticket."""
    def wait(self, timeout_s: float) -> bool:
        """`done`, waiting for it at most that long. Blocks."""
    def cancel(self) -> None:
        """Nothing more is read; what came stays pinned. Never waits."""
    def release(self) -> None:
        """Cancel, and let the pins go."""

@final
class Store:
    """One process's attachment to the disk tier below a pool."""

    @staticmethod
    def open(
        pool: Pool,
        directory: str,
        *,
        storage_bytes: int | None = None,
        block_bytes: int = 0,
        background: bool = True,
    ) -> Store:
        """Attach, or create when there is none. Blocks. `CorePoolError` says what to do."""
    @staticmethod
    def check_place(directory: str, *, storage_bytes: int | None = None) -> None:
        """Raise what `open` would for any pool; makes the directory and its LOCK. Blocks."""
    @property
    def path(self) -> str: ...
    @property
    def storage_bytes(self) -> int: ...
    @property
    def region_count(self) -> int: ...
    @property
    def direct_io(self) -> bool: ...
    def lookup(self, keys: KeyBatch) -> int:
        """Length of the leading run of keys that the host pool or the disk has."""
    def promote(self, namespace: int, keys: KeyBatch) -> PromoteTicket:
        """Bring the leading run into the host pool. Returns at once; a tier that is overloaded or
        resting after errors answers with a ticket that is done with nothing."""
    def demote(self, namespace: int, keys: KeyBatch) -> int:
        """Write the leading run of host blocks to disk now; returns how many are there. Blocks."""
    def sync(self) -> int:
        """Until what was written would survive a power loss; 0 or an errno. Blocks."""
    def wait_notice(self, timeout_s: float) -> str | None:
        """The next thing to log; '' after the timeout, None once closed. Blocks."""
    def namespaces(self) -> list[str]:
        """Identities (64 hexadecimal digits) of which there are blocks on disk. Blocks."""
    def recover(self) -> None:
        """Enter every block that the files hold into the index, unless that is done. Blocks."""
    def verify(self, progress: Callable[[int, int, int], bool], *, fix: bool) -> dict[str, Any]:
        """Read every block: `progress(blocks, total_blocks, bytes)` is called now and then and
        stops it by answering False; `fix` drops the bad ones. Blocks."""
    def drop_namespace(self, namespace: bytes) -> int:
        """Drop its blocks on disk; returns how many. Blocks."""
    def clear(self) -> int:
        """Drop every block on disk; returns how many. Files in use by nobody go. Blocks."""
    def stats(self) -> dict[str, Any]:
        """Counters of this process, and what the store holds. Blocks."""
    def set_delay(self, kind: Literal["read", "write"], microseconds: int) -> None:
        """Fault injection: every read or write of blocks is late by so much."""
    def close(self, timeout_s: float) -> bool:
        """End the threads; False when one is stuck in the disk: then the pool must stay open.
        Blocks at most that long. Idempotent."""

# ---- copy engine (csrc/bind/copy.cc) ----

def crc32c(data: npt.NDArray[np.uint8] | Buffer, crc: int = 0) -> int:
    """CRC32C of one-dimensional bytes, continuing from `crc`. Releases the GIL."""

def crc32c_combine(first: int, second: int, second_bytes: int) -> int:
    """Checksum of two parts from theirs and the length of the second."""

def crc32c_implementation() -> str: ...
def copy_nt_crc32c(
    target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], crc: int = 0
) -> int:
    """Copy past the cache and return the checksum, in one pass. ValueError unless the lengths are
    equal. Releases the GIL."""

def copy_nt(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """The same copy without a checksum."""

@final
class Region:
    """One buffer's share of a block: piece i of page p is copied between
    ``base + p * page_stride + i * piece_stride`` and ``block_offset + i * block_stride``, where a
    ``block_stride`` of 0 means ``piece_bytes``. All but ``layer`` and ``piece_count`` in bytes."""

    def __init__(
        self,
        *,
        layer: int,
        base: int,
        page_stride: int,
        piece_count: int,
        piece_stride: int,
        piece_bytes: int,
        block_offset: int,
        block_stride: int = 0,
    ) -> None: ...
    @property
    def layer(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def page_stride(self) -> int: ...
    @property
    def piece_count(self) -> int: ...
    @property
    def piece_stride(self) -> int: ...
    @property
    def piece_bytes(self) -> int: ...
    @property
    def block_offset(self) -> int: ...
    @property
    def block_stride(self) -> int: ...

@final
class BlockLayout:
    """Regions whose pieces cover ``[0, block_bytes)`` exactly once, those of a layer in one
    contiguous range, ranges ascending, and share no byte of device memory over pages
    ``[0, page_count)``. ValueError says which one breaks which rule."""

    def __init__(
        self, *, block_bytes: int, layer_count: int, page_count: int, regions: list[Region]
    ) -> None: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def layer_count(self) -> int: ...
    @property
    def page_count(self) -> int: ...
    @property
    def regions(self) -> list[Region]:
        """In order of ``block_offset``."""

@final
class BlockSource:
    """How blocks of another format, or of another tensor-parallel size, become pages of a layout:
    block i of a lease is part ``i % blocks_per_page`` of page ``i // blocks_per_page``. Immutable.

    Regions of a part may leave bytes of their block out, in any order, and stay inside it. All
    parts together write exactly the device bytes of each of the layout's layers, each once.
    ValueError says which region breaks which rule."""

    def __init__(
        self, layout: BlockLayout, *, block_bytes: int, parts: list[list[Region]]
    ) -> None: ...
    @property
    def block_bytes(self) -> int:
        """Of each block that is read."""
    @property
    def blocks_per_page(self) -> int:
        """``len(parts)``."""

@final
class SpillTicket:
    @property
    def device_done(self) -> bool:
        """True once no copy of this ticket reads device memory any more."""
    @property
    def done(self) -> bool:
        """Every page is stored, present or dropped."""
    @property
    def stored(self) -> int: ...
    @property
    def present(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    def wait_device(self, timeout_s: float) -> bool:
        """`device_done`, waiting for it at most that long. Blocks."""
    def wait(self) -> None:
        """Until done. Blocks."""
    def cancel(self) -> None:
        """From its return on nothing read from device memory is published: pages not started are
        not read, pages being read are dropped after their last read. Never waits for a copy."""

@final
class LoadTicket:
    @property
    def done(self) -> bool: ...
    @property
    def ok(self) -> bool:
        """Everything landed; False while not done."""
    @property
    def elapsed_s(self) -> float:
        """From submission to done; zero while not done."""
    def layer_done(self, layer: int) -> bool:
        """The layer has landed for every page, or the ticket has failed and nobody writes it."""
    def wait_layer(self, layer: int) -> None:
        """Until that layer has landed, or the ticket has failed. Blocks. IndexError."""
    def wait(self) -> bool:
        """Until nothing of this ticket writes device memory and its pins are given back; True when
        all landed. Blocks."""

@final
class VerifyTicket:
    @property
    def done(self) -> bool: ...
    @property
    def good(self) -> int:
        """Once done: length of the leading run of blocks whose checksum holds."""
    def wait(self) -> None:
        """Until done. Blocks."""

@final
class CopyEngine:
    """Copies blocks between device pages and the pool on its own threads.

    Loads go before verifications, verifications before spills; with more than one thread, one never
    spills. Close it before the pool, and before the device memory of its layout goes away.
    """

    def __init__(
        self, pool: Pool, namespace: int, layout: BlockLayout, *, threads: int = 2
    ) -> None:
        """ValueError unless blocks of the namespace have the layout's size."""
    def spill(
        self, keys: KeyBatch, pages: npt.NDArray[np.int64], turn: int = 0, turns: int = 1
    ) -> SpillTicket:
        """Store the pages that are not there yet. Returns at once; drops and counts when full.

        For bytes that ``turns`` ranks hold alike: each submits all pages, begins with those whose
        index modulo ``turns`` is ``turn``, and goes on with the turns after it. A page that another
        rank is writing then is ``dropped`` here and counted as ``spill_left_to_others``: nothing
        promises that its writer ends well, so ask the pool what is there.
        ValueError for a page outside the layout, another number of pages than keys, or unless
        ``0 <= turn < turns``."""
    def load(
        self, lease: Lease, pages: npt.NDArray[np.int64], source: BlockSource | None = None
    ) -> LoadTicket:
        """Block i to page ``pages[i]``, or as ``source`` says, layer by layer; the ticket takes the
        lease over. Returns at once. A bad block is condemned and fails the ticket; so does, without
        being condemned, a block of another size, and a lease that was released.
        ValueError for a page outside the layout, another number of blocks than the pages need, or a
        source of another layout."""
    def verify(self, lease: Lease) -> VerifyTicket:
        """Check blocks not yet verified in this epoch, of any size; the ticket takes the lease
        over."""
    def set_delay(self, kind: str, layer: int, microseconds: int) -> None:
        """Fault injection: the engine sleeps before it copies. 0 switches a delay off.

        'spill', -1: before a page is started (ends at once when the ticket is cancelled);
        'spill', layer: while the page is being read, to its end;
        'load', -1 or layer: before every layer or that one, once a ticket;
        'verify', -1: once a ticket.
        """
    def fail_next(self, kind: str, count: int) -> None:
        """Fault injection: the next ``count`` tickets of that kind drop all, or fail."""
    def stats(self) -> dict[str, int]: ...
    def quiesce(self) -> None:
        """Until no copy is queued or running. Blocks."""
    def close(self) -> None:
        """Drop and fail what is not over, wait for copies in progress. Blocks. Idempotent."""
