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
from typing import Any

from sglang.srt.mem_cache.utils import storage_namespace_seed

from hpkv_sglang._core import KeyBatch, KeyScope

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
    """The page hashes of one request and the block keys made of them."""

    __slots__ = ("hashes", "keys", "scope")

    def __init__(self, scope: KeyScope) -> None:
        self.scope = scope
        self.hashes: list[str] = []
        self.keys: KeyBatch = scope.keys([])


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
