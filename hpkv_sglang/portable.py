"""Which blocks of another namespace a server may use, and how their bytes lie.

Namespaces are strict: whatever changes a number in a block, the tensor-parallel size and the
attention kernel included, makes another one. Some of those differences are rounding, not meaning:
the same tokens through the same weights in the same type, computed in another split or on another
kind of device. `source_of` recognises such a namespace by the words that describe it.

    equal in any case      model configuration, weights, types, page size, sizes of a layer, engine
    may differ             tensor-parallel and data-parallel sizes; between kinds of devices also
                           the kernels, and the arrangement of latent attention's rows

Pure functions of the descriptions in a pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpkv_sglang.layout import gqa
from hpkv_sglang.layout.columns import Columns
from hpkv_sglang.layout.heads import HeadRange, shards_of
from hpkv_sglang.mla import formats

# Settings that choose a kernel: what they change, they change by rounding. Compared only between
# servers on one kind of device, where a different choice can be made equal.
KERNEL_SETTINGS = frozenset(
    {
        "attention_backend",
        "bf16_gemm_backend",
        "decode_attention_backend",
        "device",
        "enable_fused_qk_norm_rope",
        "fp4_gemm_runner_backend",
        "fp8_gemm_runner_backend",
        "mm_attention_backend",
        "moe_runner_backend",
        "prefill_attention_backend",
        "triton_attention_reduce_in_fp32",
    }
)
_SPLITS = ("tp_size", "attn_tp_size", "attn_dp_size")
_COMPARED_APART = ("model", "weight_label", "layout", "geometry", "numerics", "parallel", "format")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One of the blocks that together hold a page: its name in the key, and where its bytes lie.

    Columns are numbered from the reader's first head.
    """

    name: str
    columns: list[Columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignBlocks:
    """How another namespace stores a page that the reader wants."""

    block_format: str
    shards: list[Shard]


def source_of(
    mine: Mapping[str, Any], heads: HeadRange | None, theirs: Mapping[str, Any]
) -> ForeignBlocks | None:
    """What a reader described by `mine`, with `heads`, can use of the namespace `theirs`.

    None where it can use nothing: another model, other types, or an arrangement nobody converts.
    """
    if not _same_numbers(mine, theirs):
        return None
    layout = str(theirs["layout"])
    geometry = theirs["geometry"]
    if mine["layout"] == layout == gqa.NAME:
        if heads is None or not _equal_but(mine["geometry"], geometry, ("kv_heads",)):
            return None
        return _heads_source(heads, theirs)
    if {mine["layout"], layout} <= set(formats.FORMATS) and mine["geometry"] == geometry:
        columns = formats.block_columns(layout, geometry, theirs["page_size"])
        return ForeignBlocks(block_format=layout, shards=[Shard(name="whole", columns=columns)])
    return None


def _heads_source(heads: HeadRange, theirs: Mapping[str, Any]) -> ForeignBlocks | None:
    """The blocks, one or several, whose heads overlap the reader's."""
    shards = [
        Shard(
            name=str(held),
            columns=gqa.block_columns(
                theirs["geometry"], held.begin - heads.begin, theirs["page_size"]
            ),
        )
        for held in shards_of(theirs["parallel"]["attn_tp_size"], heads.total)
        if held.end - held.begin == theirs["geometry"]["kv_heads"]
        and max(held.begin, heads.begin) < min(held.end, heads.end)
    ]
    return ForeignBlocks(block_format=gqa.NAME, shards=shards) if shards else None


def _same_numbers(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    if mine.keys() != theirs.keys() or not _equal_but(mine, theirs, _COMPARED_APART):
        return False
    if not _equal_but(mine["parallel"], theirs["parallel"], _SPLITS):
        return False
    settings = mine["numerics"], theirs["numerics"]
    if not all(isinstance(each, Mapping) for each in settings):
        return bool(settings[0] == settings[1])  # digests: too many settings to be kept in words
    free = frozenset[str]()
    if settings[0].get("device") != settings[1].get("device"):
        free = KERNEL_SETTINGS
    return _equal_but(*settings, free)


def _equal_but(first: Mapping[str, Any], second: Mapping[str, Any], but: Any) -> bool:
    return {k: v for k, v in first.items() if k not in but} == {
        k: v for k, v in second.items() if k not in but
    }
