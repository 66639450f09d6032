"""Which namespaces fit, by their words, and how the bytes of their blocks are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpkv_sglang.layout.heads import HeadRange, heads_of
from hpkv_sglang.mla.formats import FORMATS
from hpkv_sglang.namespace import ModelIdentity
from hpkv_sglang.portable import KERNEL_SETTINGS, ForeignBlocks, source_of

GQA = ModelIdentity(
    model="llama",
    weight_label="default",
    config="c",
    weights="content:1",
    dtype="torch.bfloat16",
    kv_dtype="torch.bfloat16 in torch.bfloat16",
    quantization="None",
    overrides="{}",
    numerics={"device": "cpu", "attention_backend": "torch_native", "context_length": "4096"},
    layout="gqa",
    geometry={
        "layers": 2,
        "kv_heads": 4,
        "head_dim": 8,
        "v_head_dim": 8,
        "element_bytes": 2,
        "kv_heads_total": 8,
    },
    page_size=4,
    parallel={"tp_size": 2, "attn_tp_size": 2, "attn_dp_size": 1, "pp_size": 1},
    engine="sglang 0",
)
MLA = replace(
    GQA,
    layout="mla-fused",
    geometry={
        "layers": 2,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "element_bytes": 2,
        "rope_order": "pairs",
    },
)


def with_tp(identity: ModelIdentity, size: int) -> ModelIdentity:
    parallel = {**identity.parallel, "tp_size": size, "attn_tp_size": size}
    geometry = dict(identity.geometry)
    if identity.layout == "gqa":
        geometry["kv_heads"] = max(1, 8 // size)
    return replace(identity, parallel=parallel, geometry=geometry)


def seen_by(
    mine: ModelIdentity, theirs: ModelIdentity, heads: HeadRange | None = None
) -> ForeignBlocks | None:
    return source_of(mine.namespace().words(), heads, theirs.namespace().words())


@pytest.mark.parametrize(
    ("reader", "rank", "writer", "names"),
    [
        (1, 0, 2, ["heads 0:4/8", "heads 4:8/8"]),
        (2, 1, 1, ["heads 0:8/8"]),
        (2, 1, 4, ["heads 4:6/8", "heads 6:8/8"]),
        (4, 3, 2, ["heads 4:8/8"]),
        (16, 5, 8, ["heads 2:3/8"]),
        (8, 2, 16, ["heads 2:3/8"]),
    ],
)
def test_heads_are_found_in_the_blocks_of_another_size(
    reader: int, rank: int, writer: int, names: list[str]
) -> None:
    heads = heads_of(rank, reader, 8)
    found = seen_by(with_tp(GQA, reader), with_tp(GQA, writer), heads)
    assert found is not None and [shard.name for shard in found.shards] == names
    # Columns are numbered from the reader's first head.
    assert heads is not None
    first = min(c.begin for s in found.shards for c in s.columns) // (8 * 2) + heads.begin
    assert first == int(names[0].split()[1].split(":")[0])


@pytest.mark.parametrize("mine", FORMATS)
@pytest.mark.parametrize("theirs", FORMATS)
def test_latent_rows_are_found_in_every_arrangement(mine: str, theirs: str) -> None:
    found = seen_by(replace(MLA, layout=mine), replace(with_tp(MLA, 4), layout=theirs))
    assert found is not None and found.block_format == theirs
    assert [shard.name for shard in found.shards] == ["whole"]


DIFFERENT: dict[str, Any] = {
    "config": "d",
    "weights": "content:2",
    "dtype": "torch.float16",
    "kv_dtype": "torch.float8_e5m2 in torch.uint8",
    "quantization": "fp8",
    "overrides": '{"a":1}',
    "page_size": 8,
    "engine": "sglang 1",
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_blocks_that_mean_something_else_are_never_used(field: str) -> None:
    for identity in (GQA, MLA):
        other = replace(with_tp(identity, 1), **{field: DIFFERENT[field]})
        assert seen_by(identity, other, HeadRange(0, 4, 8)) is None


def test_the_words_of_an_identity_are_all_compared_or_named_here() -> None:
    compared = set(DIFFERENT) | {"layout", "geometry", "numerics", "parallel", "format"}
    assert set(GQA.namespace().words()) - {"model", "weight_label"} == compared


@pytest.mark.parametrize("change", [{"layers": 3}, {"head_dim": 16}, {"element_bytes": 1}])
def test_another_geometry_than_the_heads_is_never_used(change: dict[str, int]) -> None:
    other = with_tp(GQA, 1)
    assert seen_by(GQA, other, HeadRange(0, 4, 8)) is not None
    other = replace(other, geometry={**other.geometry, **change})
    assert seen_by(GQA, other, HeadRange(0, 4, 8)) is None


def test_pipeline_stages_are_never_mixed() -> None:
    other = with_tp(GQA, 1)
    other = replace(other, parallel={**other.parallel, "pp_size": 2})
    assert seen_by(GQA, other, HeadRange(0, 4, 8)) is None


def test_kernels_may_differ_between_kinds_of_devices_and_nowhere_else() -> None:
    def on(device: str, **numerics: str) -> ModelIdentity:
        return replace(MLA, numerics={**MLA.numerics, "device": device, **numerics})

    assert seen_by(on("cuda", attention_backend="fa3"), on("npu", attention_backend="ascend"))
    assert not seen_by(on("cuda", attention_backend="fa3"), on("cuda", attention_backend="x"))
    assert not seen_by(on("cuda"), on("npu", context_length="8192"))
    assert "context_length" not in KERNEL_SETTINGS


def test_rows_whose_order_is_not_known_do_not_cross_between_arrangements() -> None:
    unknown = replace(MLA, geometry={**MLA.geometry, "rope_order": "unknown"})
    split = replace(unknown, layout="mla-split")
    assert seen_by(MLA, split) is None and seen_by(split, MLA) is None
    assert seen_by(split, with_tp(split, 2)) is not None


def test_words_of_another_version_are_never_used() -> None:
    words = with_tp(MLA, 2).namespace().words()
    assert source_of(MLA.namespace().words(), None, words) is not None
    assert source_of(MLA.namespace().words(), None, {**words, "format": "later"}) is None


def test_a_server_that_reads_no_others_blocks_is_read_by_others() -> None:
    careful = replace(MLA, numerics={**MLA.numerics, "cross_tp": "off"})
    assert careful.namespace().id != MLA.namespace().id
    assert seen_by(MLA, careful) is not None


def test_layouts_that_nobody_converts_are_never_used() -> None:
    for theirs in ("mla-packed-index", "mla-split-index", "gqa"):
        assert seen_by(MLA, replace(MLA, layout=theirs)) is None
    indexed = replace(MLA, layout="mla-split-index")
    same = seen_by(indexed, with_tp(indexed, 4))
    assert same is not None and same.shards[0].columns is None, "as the reader's own"
    assert seen_by(GQA, with_tp(GQA, 1), None) is None, "heads unknown"
    words = {k: v for k, v in MLA.namespace().words().items() if k != "engine"}
    assert source_of(MLA.namespace().words(), None, words) is None
    assert source_of(MLA.namespace().words(), None, {}) is None
