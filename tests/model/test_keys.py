"""Block keys against a reference function, over random trees of SGLang's own cores.

    key of page i = chain(extra key, salt, tokens[0 : (i + 1) * page])
                    XOR mask(namespace, shard, format)

The reference below is written from this sentence with hashlib alone. The trees are SGLang's
`UnifiedRadixCache` over its Python and its Rust core; what is compared is the hash of every page
that a node of the tree holds, after inserts, splits and evictions, and what a request's own
lookup computes for the same tokens.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpkv_sglang.namespace import framed_extra_key, scope_mask

pytest.importorskip("sglang")

TREES = int(os.environ.get("HPKV_TEST_TREES", "10000"))
NAMESPACE = hashlib.sha256(b"a namespace").digest()
SHARD, FORMAT = "tp0/1", "gqa"
ADAPTER = "0123456789abcdef" * 2


# ---- the reference ----


def framed(*parts: str | bytes) -> bytes:
    state = hashlib.sha256()
    for part in parts:
        kind, raw = (b"t", part.encode()) if isinstance(part, str) else (b"b", part)
        state.update(kind + len(raw).to_bytes(8, "little") + raw)
    return state.digest()


def seed_of(extra_key: str | None, salt: str | None) -> bytes:
    if extra_key is None and salt is None:
        return b""
    state = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, salt):
        raw = None if part is None else part.encode()
        state.update(b"\0" if raw is None else b"\1" + len(raw).to_bytes(8, "little") + raw)
    return state.digest()


def reference_keys(
    extra_key: str | None, salt: str | None, tokens: list[int], page: int
) -> list[bytes]:
    mask = int.from_bytes(framed("hpkv-scope-1", NAMESPACE, SHARD, FORMAT), "big")
    digest, keys = seed_of(extra_key, salt), []
    for start in range(0, len(tokens) - page + 1, page):
        part = tokens[start : start + page]
        wide = max(part) >= 1 << 32
        width = 8 if wide else 4
        words = b"".join(token.to_bytes(width, "little") for token in part)
        digest = hashlib.sha256(digest + (b"\xff" if wide else b"") + words).digest()
        keys.append((int.from_bytes(digest, "big") ^ mask).to_bytes(32, "big"))
    return keys


# ---- random trees ----


class Slots:
    """As much of SGLang's allocator as the tree asks for."""

    device = "cpu"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def free(self, *_args: Any, **_kwargs: Any) -> None:
        """Slots are numbers here; nothing is kept of them."""

    free_segment = free


def make_tree(backend: str, page_size: int) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,  # type: ignore[arg-type]
        token_to_kv_pool_allocator=Slots(page_size),  # type: ignore[arg-type]
        page_size=page_size,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=backend,
    )
    tree = UnifiedRadixCache(params)
    tree.tree_core.enable_external_cache_linker = True  # as with a linker: nodes carry hashes
    return tree


def names(rng: random.Random) -> tuple[str | None, str | None]:
    """(extra key as a request has it, salt)."""
    caller = rng.choice([None, None, "a", "ab", ADAPTER])
    adapter = rng.choice([None, None, None, ADAPTER])
    return framed_extra_key(caller, "digest", adapter), rng.choice([None, None, "a", "salt"])


def tokens_like(rng: random.Random, earlier: list[list[int]]) -> list[int]:
    """Tokens that often share a prefix with earlier ones, to the page or to the middle of one."""
    alphabet = [0, 1, 2, 7, 2**31, 2**32 - 1, *([2**32, 2**40] if rng.random() < 0.1 else [])]
    stem = rng.choice(earlier)[: rng.randrange(24)] if earlier and rng.random() < 0.8 else []
    return stem + [rng.choice(alphabet) for _ in range(rng.randrange(1, 20))]


def radix_key(tokens: list[int], extra_key: str | None, salt: str | None) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", tokens), extra_key, cache_salt=salt)


def keys_in_tree(tree: Any, key: Any) -> list[str]:
    """Hashes of the pages of `key` that the tree holds, root first."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    found = tree.match_prefix(MatchPrefixParams(key=key))
    node, core = found.last_device_node, tree.tree_core
    hashes = [*core.get_prefix_hash_values(node), *core.get_hash_values(node)]
    assert len(hashes) * tree.page_size == found.device_prefix_len
    return hashes


def grow(tree: Any, rng: random.Random, page: int) -> list[tuple[list[int], Any]]:
    """Random inserts and evictions; returns every key that was ever inserted."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams

    known: list[tuple[list[int], Any]] = []
    spaces = [names(rng), names(rng)]
    for _ in range(rng.randrange(3, 10)):
        if known and rng.random() < 0.25:
            tree.evict(EvictParams(num_tokens=rng.randrange(1, 16)))
            continue
        tokens = tokens_like(rng, [tokens for tokens, _ in known])
        key = radix_key(tokens, *rng.choice(spaces))
        whole = len(tokens) // page * page
        if whole:
            value = torch.arange(whole)
            short = radix_key(tokens[:whole], key.extra_key, key.cache_salt)
            tree.insert(InsertParams(key=short, value=value))
        known.append((tokens, key))
    return known


def check_tree(backend: str, seed: int) -> hashlib._Hash:
    """Compare every page of one random tree; returns a digest of all its keys."""
    from hpkv_sglang._core import KeyScope
    from hpkv_sglang.radix.lookup import PageLookup, fastest_hasher

    rng = random.Random(seed)
    page = rng.choice([1, 2, 4, 16])
    scope = KeyScope(scope_mask(NAMESPACE, SHARD, FORMAT))
    lookup = PageLookup(page, fastest_hasher())
    tree, all_keys = make_tree(backend, page), hashlib.sha256()
    for tokens, key in grow(tree, rng, page):
        expected = b"".join(reference_keys(key.extra_key, key.cache_salt, tokens, page))
        in_tree = bytes(scope.keys(keys_in_tree(tree, key)))
        assert in_tree == expected[: len(in_tree)], f"tree, seed {seed}"
        asked = lookup.pages(SimpleNamespace(), key, scope)
        assert bytes(asked.keys) == expected, f"lookup, seed {seed}"
        all_keys.update(expected + len(in_tree).to_bytes(8, "little"))
    return all_keys


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["python", "rust"])
def test_every_key_in_random_trees_is_the_reference_of_its_prefix(backend: str) -> None:
    """`HPKV_TEST_TREES` trees; the message of a failure holds the seed of its tree."""
    for seed in range(TREES):
        check_tree(backend, seed)


def test_the_trees_are_split_and_evicted_and_named() -> None:
    """The property above is worth something only if the trees are not all trivial."""
    split = evicted = 0
    for seed in range(60):
        rng = random.Random(seed)
        page = rng.choice([1, 2, 4, 16])
        tree = make_tree("python", page)
        for tokens, key in grow(tree, rng, page):
            found = len(keys_in_tree(tree, key))
            evicted += found < len(tokens) // page
        nodes = list(tree.tree_core.root_node.children.values())
        while nodes:
            children = list(nodes.pop().children.values())
            split += len(children) > 1
            nodes += children
    assert split > 10
    assert evicted > 10


PROGRAM = """
import hashlib
from test_keys import check_tree
print("KEYS", hashlib.sha256(b"".join(
    check_tree(backend, seed).digest() for backend in ("python", "rust") for seed in range(50)
)).hexdigest())
"""


@pytest.mark.slow
def test_keys_are_identical_across_processes_and_hash_seeds() -> None:
    """Field report F06."""
    lines = set()
    for hash_seed in ("0", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        lines.add(next(line for line in done.stdout.splitlines() if line.startswith("KEYS")))
    assert len(lines) == 1
