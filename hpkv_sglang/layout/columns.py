"""Where the bytes of a token lie: columns, and the join of two arrangements.

The KV of a page is a table for every layer and field (`k`, `v`, `latent`, ...): one row per token
slot, as many bytes wide as the field. An arrangement says where each range of columns lies; row by
row, or tile after tile as some attention kernels want it. The pages on a device are one
arrangement, a block is another. `join` puts the two together: what it yields copies any block that
holds the same table into any pool that wants it, whole or by heads.

Pure arithmetic on addresses and offsets; all numbers are bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hpkv_sglang._core import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Bytes `[begin, end)` of the rows of one field: slot `s` has them at `at + s * slot_stride`.

    `at` is an offset in a block, or the device address for page 0.
    """

    layer: int
    field: str
    begin: int
    end: int
    at: int
    slot_stride: int


def rows_of(layer: int, field: str, row_bytes: int, at: int, slot_stride: int) -> Columns:
    """A field stored row by row."""
    return Columns(layer=layer, field=field, begin=0, end=row_bytes, at=at, slot_stride=slot_stride)


def tiles_of(
    layer: int, field: str, row_bytes: int, tile_bytes: int, at: int, page_size: int
) -> Iterator[Columns]:
    """A field stored in tiles: `tile_bytes` of every row, then the next bytes of every row."""
    for index, begin in enumerate(range(0, row_bytes, tile_bytes)):
        yield Columns(
            layer=layer,
            field=field,
            begin=begin,
            end=begin + tile_bytes,
            at=at + index * tile_bytes * page_size,
            slot_stride=tile_bytes,
        )


def shifted(columns: Iterable[Columns], first: int) -> list[Columns]:
    """The same bytes, numbered in a table in which they begin at column `first`."""
    return [replace(c, begin=c.begin + first, end=c.end + first) for c in columns]


@dataclass(frozen=True, slots=True)
class Device:
    """The pages of a device: columns by address, and the bytes from a page to the next."""

    columns: Columns
    page_stride: int


def join(devices: Iterable[Device], block: Iterable[Columns], page_size: int) -> list[Region]:
    """What both sides have, as regions in order of layer and block offset.

    Bytes of the block that the device has no columns for are left out, and the other way round:
    whether all is there is for the caller (and the core, which counts) to check.
    """
    stored = defaultdict(list)
    for columns in block:
        stored[columns.layer, columns.field].append(columns)
    parts = [
        _overlap(device, columns, page_size)
        for device in devices
        for columns in stored[device.columns.layer, device.columns.field]
        if max(device.columns.begin, columns.begin) < min(device.columns.end, columns.end)
    ]
    return _merged(sorted(parts, key=lambda r: (r.layer, r.block_offset, r.base)))


def _overlap(device: Device, block: Columns, page_size: int) -> Region:
    own = device.columns
    begin, end = max(own.begin, block.begin), min(own.end, block.end)
    dense = own.slot_stride == block.slot_stride == end - begin
    return Region(
        layer=own.layer,
        base=own.at + begin - own.begin,
        page_stride=device.page_stride,
        piece_count=1 if dense else page_size,
        piece_stride=own.slot_stride,
        piece_bytes=(end - begin) * (page_size if dense else 1),
        block_offset=block.at + begin - block.begin,
        block_stride=block.slot_stride,
    )


def _merged(regions: list[Region]) -> list[Region]:
    """Neighbours that lie side by side in memory and in the block become one."""
    merged: list[Region] = []
    for region in regions:
        last = merged[-1] if merged else None
        if last is not None and _adjoin(last, region):
            merged[-1] = Region(
                layer=last.layer,
                base=last.base,
                page_stride=last.page_stride,
                piece_count=1,
                piece_stride=0,
                piece_bytes=last.piece_bytes + region.piece_bytes,
                block_offset=last.block_offset,
                block_stride=0,
            )
        else:
            merged.append(region)
    return merged


def _adjoin(first: Region, second: Region) -> bool:
    return (
        first.piece_count == second.piece_count == 1
        and first.layer == second.layer
        and first.page_stride == second.page_stride
        and first.base + first.piece_bytes == second.base
        and first.block_offset + first.piece_bytes == second.block_offset
    )
