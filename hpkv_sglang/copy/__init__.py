"""Copies between device pages and the pool: the Python face of the C++ copy engine.

An engine belongs to one pool, one namespace and one layout. `spill`, `load` and `verify` copy their
arguments, queue and return a ticket; the work is done by C++ threads that never take the GIL.
Tickets may be polled and waited for from any thread, and outlive their engine. Close the engine
before the pool, and before the device memory of its layout goes away.
"""

from hpkv_sglang._core import (
    BlockLayout,
    CopyEngine,
    LoadTicket,
    Region,
    SpillTicket,
    VerifyTicket,
)

__all__ = [
    "BlockLayout",
    "CopyEngine",
    "LoadTicket",
    "Region",
    "SpillTicket",
    "VerifyTicket",
]
