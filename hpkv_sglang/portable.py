"""Which blocks of another namespace a server may use, and how their bytes lie.

Namespaces are strict: whatever changes a number in a block, the tensor-parallel size and the
attention kernel included, makes another one. Some of those differences are rounding, not meaning:
the same tokens through the same weights in the same type, computed in another split or on another
kind of device. `source_of` recognises such a namespace by the words that describe it.

    equal in any case      model configuration, weights, types, page size, sizes of a layer, engine
    may differ             tensor-parallel and data-parallel sizes; between kinds of devices also
                           the kernels, and the arrangement of latent attention's rows, with the
                           order in which its rotated elements lie when that is known

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
_COMPARED_APART = ("model", "weight_label", "layout", "geometry", "numerics", "parallel")
# Whether a server uses others' blocks says nothing about its own.
_ABOUT_READING = frozenset({"cross_tp"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One of the blocks that together hold a page: its name in the key, and where its bytes lie.

    Columns are numbered as the reader's are. None: they lie as in the reader's own blocks.
    """

    name: str
    columns: list[Columns] | None


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
    if mine["layout"] == layout and mine["geometry"] == geometry:
        return ForeignBlocks(block_format=layout, shards=[Shard(name="whole", columns=None)])
    if {mine["layout"], layout} <= set(formats.FORMATS):
        return _latent_source(mine["geometry"], theirs)
    return None


def _latent_source(geometry: Mapping[str, Any], theirs: Mapping[str, Any]) -> ForeignBlocks | None:
    """Latent rows in another arrangement."""
    if not _equal_but(geometry, theirs["geometry"], ("rope_order",)):
        return None
    orders = geometry["rope_order"], theirs["geometry"]["rope_order"]
    if formats.UNKNOWN_ORDER in orders:
        return None
    columns = formats.block_columns(theirs["layout"], theirs["geometry"], theirs["page_size"])
    if orders[0] != orders[1]:
        columns = formats.with_rope_order(columns, theirs["geometry"], orders[0])
    return ForeignBlocks(
        block_format=str(theirs["layout"]), shards=[Shard(name="whole", columns=columns)]
    )


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
    free = _ABOUT_READING
    if settings[0].get("device") != settings[1].get("device"):
        free |= KERNEL_SETTINGS
    return _equal_but(*settings, free)


def _equal_but(first: Mapping[str, Any], second: Mapping[str, Any], but: Any) -> bool:
    return {k: v for k, v in first.items() if k not in but} == {
        k: v for k, v in second.items() if k not in but
    }
