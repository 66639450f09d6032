"""Servers of several kinds on one host pool and one store: what one wrote, another reads.

A `Rank` is what a scheduler has (layout, identity, engine, sources), over one of SGLang's pool
classes built on CPU tensors. Rows are read and written through torch, not through a layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang_pools import PAGE, mha, mla, npu_mla

from hpkv_sglang._core import CopyEngine, KeyScope, Pool, Store
from hpkv_sglang.config import PromotePolicy
from hpkv_sglang.layout.detect import detect_layout
from hpkv_sglang.layout.heads import heads_of
from hpkv_sglang.namespace import ModelIdentity
from hpkv_sglang.radix.identity import RankIdentity
from hpkv_sglang.radix.lookup import RequestPages, Tail
from hpkv_sglang.radix.promotions import Promotions
from hpkv_sglang.radix.runs import Run, find_run
from hpkv_sglang.radix.sources import Source, Sources
from hpkv_sglang.radix.worth import LoadEconomy
from hpkv_sglang.radix.wrapper import HpkvLinkerWrapper, _Promise

MODEL = ModelIdentity(
    model="m",
    weight_label="default",
    config="c",
    weights="content:1",
    dtype="torch.bfloat16",
    kv_dtype="torch.bfloat16 in torch.bfloat16",
    quantization="None",
    overrides="{}",
    numerics={},
    layout="",
    geometry={},
    page_size=PAGE,
    parallel={"tp_size": 1, "attn_tp_size": 1, "attn_dp_size": 1, "pp_size": 1},
    engine="sglang 0",
)
RANK, ROPE, LAYERS, PAGES = 64, 16, 2, 8


@dataclass
class Rank:
    """One rank of one server."""

    device_pool: Any
    engine: CopyEngine
    sources: Sources
    host: Pool

    @classmethod
    def of(
        cls,
        host: Pool,
        device_pool: Any,
        place: tuple[int, int, int] | None = None,
        *,
        device: str = "cpu",
        rope_order: str = "pairs",
        foreign: bool = True,
    ) -> Rank:
        """`place`: (rank, ranks, heads of the model) under tensor parallelism."""
        rank, size, total_heads = place or (0, 1, None)
        layout = detect_layout(device_pool, PAGE)
        heads = None if total_heads is None else heads_of(rank, size, total_heads)
        geometry = dict(layout.geometry)
        if heads is not None:
            geometry["kv_heads_total"] = heads.total
        else:
            geometry["rope_order"] = rope_order
        identity = RankIdentity(
            model=replace(
                MODEL,
                layout=layout.name,
                geometry=geometry,
                numerics={"device": device, "attention_backend": f"of {device}"},
                parallel={**MODEL.parallel, "tp_size": size, "attn_tp_size": size},
            ),
            group_rank=rank,
            group_size=size,
            block_format=layout.name,
            replicated=layout.replicated,
            names="",
            heads=heads,
        )
        namespace = identity.namespace
        index = host.add_namespace(namespace.id, namespace.descriptor, layout.block.block_bytes)
        own = Source(namespace_id=namespace.id, scopes=(KeyScope(identity.scope_mask),))
        return cls(
            device_pool=device_pool,
            engine=CopyEngine(host, index, layout.block),
            sources=Sources(host, own, identity, layout, foreign=foreign),
            host=host,
        )

    def spill(self, hashes: list[str], pages: list[int]) -> None:
        ticket = self.engine.spill(self.sources.own.keys(hashes), np.array(pages, np.int64))
        ticket.wait()
        assert ticket.stored == len(pages)

    def find(self, hashes: list[str]) -> Run:
        return find_run(self.host, self.sources, self.tail(hashes))

    def tail(self, hashes: list[str]) -> Tail:
        pages = RequestPages(self.sources.own.scopes[0])
        pages.hashes, pages.keys = hashes, self.sources.own.keys(hashes)
        return Tail(pages, 0, len(hashes))

    def load(self, run: Run, pages: list[int]) -> bool:
        """As `QueuedLoad` does: each part of the run into its pages."""
        landed, begin = [], 0
        for part in run.parts:
            into = np.array(pages[begin : begin + part.pages], np.int64)
            landed.append(self.engine.load(part.lease, into, part.source.block).wait())
            begin += part.pages
        return all(landed)


def index_of(rank: Rank, source: Source) -> int:
    index = rank.sources.index_of(source)
    assert index is not None
    return index


def to_disk_only(host: Pool, store: Store, writer: Rank, hashes: list[str]) -> None:
    """The writer's blocks leave the host pool; only the disk has them."""
    keys = writer.sources.own.keys(hashes)
    assert store.demote(index_of(writer, writer.sources.own), keys) == len(keys)
    assert host.drop(keys) == len(keys)


def promote(store: Store, reader: Rank, hashes: list[str]) -> None:
    """What only the disk has comes back for a reader of another kind, as the tree asks for it."""
    side = HpkvLinkerWrapper.__new__(HpkvLinkerWrapper)
    side.tiers = SimpleNamespace(  # type: ignore[assignment]
        namespace_index=index_of(reader, reader.sources.own), sources=reader.sources
    )
    economy = LoadEconomy(PAGE, 1)
    promotions = Promotions(store, reader.host, PromotePolicy.WAIT_COMPLETE, economy)
    promise = _Promise(reader.tail(hashes), reader.find(hashes), 0)
    ticket = promotions.start("r", side._wanted(promise, promotions))
    assert ticket is not None and ticket.wait(60.0)
    promotions.settle("r")
    assert promotions.take_from_disk("r") == len(hashes)
    promotions.release_settled("r")


# ---- latent attention: one table of rows, [layers, slots, RANK + ROPE] ----


def latent_pool(name: str) -> Any:
    """The pool class whose native format is `name`."""
    sizes = {
        "size": PAGES * PAGE,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "layer_num": LAYERS,
    }
    return mla(**sizes) if name == "mla-fused" else npu_mla(nz=name == "mla-split-nz", **sizes)


def nz_rows(page: torch.Tensor, width: int) -> torch.Tensor:
    """A page in NZ order, `[width / 16, slots, 16]` in memory, as rows `[slots, width]`."""
    return page.reshape(width // 16, PAGE, 16).permute(1, 0, 2).reshape(PAGE, width)


def latent_rows(pool: Any, page: int) -> torch.Tensor:
    """The rows of one page, `[layers, slots, RANK + ROPE]`, whatever the pool's order."""
    if hasattr(pool, "kv_buffer"):
        first = page * PAGE
        return torch.stack([layer[first : first + PAGE, 0] for layer in pool.kv_buffer])
    parts = []
    for layer in range(LAYERS):
        pages = [(pool.k_buffer[layer, page], RANK), (pool.v_buffer[layer, page], ROPE)]
        rows = [
            nz_rows(p, width) if pool.use_fia_nz else p.reshape(PAGE, width) for p, width in pages
        ]
        parts.append(torch.cat(rows, dim=1))
    return torch.stack(parts)


def in_order(rows: torch.Tensor, have: str, want: str) -> torch.Tensor:
    """Rows whose RoPE part lies in the order `have`, in the order `want`."""
    nope, rope = rows[..., :RANK], rows[..., RANK:]
    if (have, want) == ("pairs", "halves"):
        rope = rope.unflatten(-1, (ROPE // 2, 2)).transpose(-1, -2).flatten(-2)
    if (have, want) == ("halves", "pairs"):
        rope = rope.unflatten(-1, (2, ROPE // 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((nope, rope), dim=-1)


# ---- grouped heads: K and V [layers, slots, heads, dim] of the whole model ----


def head_pools(size: int, total: int, values: torch.Tensor | None = None) -> list[Any]:
    """The pool of every rank; `values` `[2, layers, slots, total, dim]` are shared out."""
    pools = []
    for rank in range(size):
        heads = heads_of(rank, size, total)
        assert heads is not None
        pool = mha(
            size=PAGES * PAGE,
            head_num=heads.end - heads.begin,
            head_dim=8,
            layer_num=LAYERS,
        )
        if values is not None:
            for layer in range(LAYERS):
                pool.k_buffer[layer].copy_(values[0, layer, :, heads.begin : heads.end])
                pool.v_buffer[layer].copy_(values[1, layer, :, heads.begin : heads.end])
        pools.append(pool)
    return pools
