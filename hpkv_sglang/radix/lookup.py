"""Page hashes of a request, computed once and kept with it.

A waiting request is matched at every scheduling step. Its tokens only ever grow at the end, so the
chain of page hashes is extended, never recomputed. The hashes are SGLang's own (the tree stores
the same ones in its nodes): SHA-256 over the previous digest and the page's tokens, seeded with
the request's extra key and cache salt. Scheduler thread only.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.mem_cache.utils import storage_namespace_seed

from hpkv_sglang._core import KeyBatch, KeyScope
from hpkv_sglang.radix.sources import Source

_UINT32_MAX = 2**32 - 1

PageHasher = Callable[["array[int]", str | None, int], list[str]]


def hash_pages(tokens: array[int], prior: str | None, page_size: int) -> list[str]:
    """Chained SHA-256 per full page of `tokens` (int64), in hexadecimal.

    The reference: slower than the compiled one (about 1 us a page), equal to it.
    """
    digest = bytes.fromhex(prior) if prior else b""
    hashes = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = tokens[start : start + page_size]
        wide = max(page) > _UINT32_MAX  # such a page is marked and hashed as 64-bit words
        words = b"\xff" + page.tobytes() if wide else array("I", page).tobytes()
        digest = hashlib.sha256(digest + words).digest()
        hashes.append(digest.hex())
    return hashes


def fastest_hasher() -> PageHasher:
    """The hash function that SGLang's compiled tree core exports, or the reference.

    SGLang's other native hash is compiled when it is first called, which would stop the scheduler
    for seconds; it is not used.
    """
    try:
        from sglang.srt.mem_cache.rust_tree_core.extension import bindings
    except (ImportError, RuntimeError, OSError):
        return hash_pages
    compiled: PageHasher = bindings.get_hash_str
    return compiled


class RequestPages:
    """The page hashes of one request and the block keys made of them, here and elsewhere."""

    __slots__ = ("_elsewhere", "hashes", "keys", "scope")

    def __init__(self, scope: KeyScope) -> None:
        self.scope = scope
        self.hashes: list[str] = []
        self.keys: KeyBatch = scope.keys([])
        self._elsewhere: dict[bytes, KeyBatch] = {}

    def keys_of(self, source: Source) -> KeyBatch:
        """The keys of every page's blocks in another namespace; made once."""
        keys = self._elsewhere.get(source.namespace_id)
        if keys is None or len(keys) != len(self.hashes) * source.blocks_per_page:
            keys = self._elsewhere[source.namespace_id] = source.keys(self.hashes)
        return keys


class Tail(NamedTuple):
    """Pages `[first, end)` of a request: what the device does not have."""

    pages: RequestPages
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def hashes(self, count: int) -> list[str]:
        """Of the first `count` pages."""
        return self.pages.hashes[self.first : self.first + count]

    def own_keys(self, begin: int = 0) -> KeyBatch:
        """In our namespace, from page `begin` of the tail on."""
        return self.pages.keys[self.first + begin : self.end]

    def first_keys(self, source: Source, begin: int) -> KeyBatch:
        """Of page `begin` of the tail alone, elsewhere."""
        at = self.first + begin
        return source.keys(self.pages.hashes[at : at + 1])

    def keys(self, source: Source, begin: int) -> KeyBatch:
        """Elsewhere, from page `begin` of the tail on, page by page."""
        per_page = source.blocks_per_page
        return self.pages.keys_of(source)[(self.first + begin) * per_page : self.end * per_page]


class PageLookup:
    """Gives the block keys of a request's prompt under the current namespace."""

    def __init__(self, page_size: int, hasher: PageHasher) -> None:
        self.page_size = page_size
        self._hasher = hasher

    def pages(self, req: Any, key: Any, scope: KeyScope) -> RequestPages:
        """Hashes and keys of (at least) every full page of `key`; kept on the request.

        `key` is the RadixKey of this request: the same tokens as before, or more of them.
        """
        pages: RequestPages | None = getattr(req, "hpkv_pages", None)
        if pages is None or pages.scope is not scope:
            pages = req.hpkv_pages = RequestPages(scope)
        page_count = len(key) // self.page_size
        known = len(pages.hashes)
        if page_count > known:
            tokens = key.token_ids[known * self.page_size : page_count * self.page_size]
            prior = (
                pages.hashes[-1] if known else storage_namespace_seed(key.extra_key, key.cache_salt)
            )
            pages.hashes = pages.hashes + self._hasher(tokens, prior, self.page_size)
            pages.keys = scope.keys(pages.hashes)
        return pages
