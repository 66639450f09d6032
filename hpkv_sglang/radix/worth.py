"""Load or recompute: a hit that is slower than computing it again is not taken.

Both rates are measured on this server, on its own work: bytes per second of finished loads, and
tokens per second of prefills that loaded nothing. Until both are known every hit is taken. A rate
is the median of the last samples, so that one slow copy decides nothing. When hits are refused, one
in `PROBE_EVERY` is taken all the same: otherwise a tier that was slow once would stay refused for
ever. Scheduler thread only; one instance per rank, and the ranks agree on the minimum.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SAMPLES = 15
SAMPLES_MIN = 5
PROBE_EVERY = 16
# Shorter prefills measure the launch, not the computing.
PREFILL_TOKENS_MIN = 128


class LoadEconomy:
    """Decides whether loading `pages` pages beats computing them."""

    def __init__(self, page_size: int, block_bytes: int) -> None:
        self._page_size = page_size
        self._block_bytes = block_bytes
        self._load_bytes_per_s: deque[float] = deque(maxlen=SAMPLES)
        self._prefill_tokens_per_s: deque[float] = deque(maxlen=SAMPLES)
        self.refused_count = 0

    def note_load(self, pages: int, seconds: float) -> None:
        if pages > 0 and seconds > 0:
            self._load_bytes_per_s.append(pages * self._block_bytes / seconds)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        if tokens >= PREFILL_TOKENS_MIN and seconds > 0:
            self._prefill_tokens_per_s.append(tokens / seconds)

    def pages_worth_loading(self, pages: int) -> int:
        """`pages`, or 0 when computing them is the quicker way."""
        if pages == 0 or self._is_quicker(pages):
            return pages
        self.refused_count += 1
        return pages if self.refused_count % PROBE_EVERY == 0 else 0

    def compute_s(self, pages: int) -> float | None:
        """How long computing `pages` pages takes; None while too little was computed to know."""
        if len(self._prefill_tokens_per_s) < SAMPLES_MIN:
            return None
        return pages * self._page_size / median(self._prefill_tokens_per_s)

    def _is_quicker(self, pages: int) -> bool:
        compute_s = self.compute_s(pages)
        if compute_s is None or len(self._load_bytes_per_s) < SAMPLES_MIN:
            return True
        return pages * self._block_bytes / median(self._load_bytes_per_s) <= compute_s
