"""Namespaces and framed keys: whatever differs must differ, whatever is equal must be equal."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkv_sglang.namespace import (
    DESCRIPTOR_BYTES_MAX,
    LORA_ID_LENGTH,
    ModelIdentity,
    Namespace,
    digest_of,
    framed_extra_key,
    private_weights,
    scope_mask,
)

IDENTITY = ModelIdentity(
    model="llama",
    weight_label="default",
    config="c0",
    weights="content:00",
    dtype="torch.bfloat16",
    kv_dtype="torch.bfloat16 in torch.bfloat16",
    quantization="None",
    overrides="{}",
    numerics={"attention_backend": "triton", "device": "cuda"},
    layout="gqa",
    geometry={"layers": 4, "kv_heads": 2},
    page_size=64,
    parallel={"tp_size": 1, "pp_size": 1},
    engine="sglang 0.5.23",
)
OTHER: dict[str, Any] = {
    "config": "c1",
    "weights": "content:01",
    "dtype": "torch.float16",
    "kv_dtype": "torch.float16 in torch.float16",
    "quantization": "fp8",
    "overrides": '{"rope_theta":1}',
    "numerics": {"attention_backend": "fa3", "device": "cuda"},
    "layout": "mla",
    "geometry": {"layers": 4, "kv_heads": 1},
    "page_size": 32,
    "parallel": {"tp_size": 2, "pp_size": 1},
    "engine": "sglang 0.5.24",
}


def test_every_field_that_changes_numbers_changes_the_namespace() -> None:
    fields = {field.name for field in dataclasses.fields(ModelIdentity)}
    assert fields == OTHER.keys() | {"model", "weight_label"}
    ids = {IDENTITY.namespace().id}
    for name, value in OTHER.items():
        ids.add(dataclasses.replace(IDENTITY, **{name: value}).namespace().id)
    assert len(ids) == len(OTHER) + 1


def test_names_for_people_and_the_order_of_maps_do_not_change_it() -> None:
    renamed = dataclasses.replace(
        IDENTITY,
        model="/elsewhere/llama",
        weight_label="v2",
        geometry=dict(reversed(IDENTITY.geometry.items())),
    )
    assert renamed.namespace().id == IDENTITY.namespace().id


def test_equal_bytes_under_another_page_size_and_tp_are_another_namespace() -> None:
    """Page 16 on one rank and page 32 on two hold the same number of bytes with two KV heads."""
    one = dataclasses.replace(IDENTITY, page_size=16, parallel={"tp_size": 1})
    two = dataclasses.replace(IDENTITY, page_size=32, parallel={"tp_size": 2})
    masks = {scope_mask(one.namespace().id, "tp0/1", "gqa")}
    masks |= {scope_mask(two.namespace().id, f"tp{rank}/2", "gqa") for rank in range(2)}
    assert len(masks) == 3


def test_the_descriptor_says_in_words_what_the_namespace_is() -> None:
    namespace = IDENTITY.namespace()
    words = Namespace.unpack(namespace.id, namespace.descriptor).words()
    assert words["model"] == "llama"
    assert words["page_size"] == 64
    assert words["geometry"] == {"layers": 4, "kv_heads": 2}
    assert words["weights"] == "content:00"


@given(st.binary(max_size=40))
def test_a_foreign_descriptor_has_no_words_and_no_error(raw: bytes) -> None:
    assert isinstance(Namespace.unpack(bytes(32), raw).words(), dict)


PARTS = st.lists(st.one_of(st.text(max_size=4), st.binary(max_size=4)), max_size=4)


@given(PARTS, PARTS)
def test_digests_are_equal_only_for_equal_lists_of_parts(
    one: list[str | bytes], two: list[str | bytes]
) -> None:
    assert (digest_of(*one) == digest_of(*two)) == (one == two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("a", "bc"), ("ab", "c")),
        (("a", "b"), ("atb",)),  # the mark of text, met inside a text
        (("", "a"), ("a", "")),
        (("a",), (b"a",)),
        (("a",), ("a", "")),
    ],
)
def test_lists_that_joining_confuses_have_different_digests(
    one: tuple[str | bytes, ...], two: tuple[str | bytes, ...]
) -> None:
    assert digest_of(*one) != digest_of(*two)


def test_mask_depends_on_namespace_shard_and_format() -> None:
    masks = {
        scope_mask(namespace, shard, block_format)
        for namespace, shard, block_format in itertools.product(
            (bytes(32), bytes([1] * 32)), ("tp0/2", "tp1/2"), ("gqa", "mla")
        )
    }
    assert len(masks) == 8
    assert {len(mask) for mask in masks} == {32}


PROGRAM = """
from test_namespace import IDENTITY, framed_extra_key, private_weights, scope_mask
print(IDENTITY.namespace().id.hex(), IDENTITY.namespace().descriptor.hex(),
      scope_mask(bytes(32), "tp0/1", "gqa").hex(), framed_extra_key("a", "d", "f" * 32),
      private_weights("launch", 1, "x"))
"""


def test_everything_is_identical_across_processes_and_hash_seeds() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(outputs) == 1


# ---- the extra key ----

ADAPTER = "0123456789abcdef" * 2
ADAPTERS = st.sampled_from([None, ADAPTER, "f" * LORA_ID_LENGTH, "bc", "c"])
CALLERS = st.one_of(st.none(), st.sampled_from([ADAPTER, "a", "ab", "bc"]), st.text(min_size=1))


def test_the_four_keys_that_concatenation_confuses_differ() -> None:
    keys = {
        framed_extra_key(None, "d", "X"),
        framed_extra_key("X", None, None),
        framed_extra_key("a", "d", "bc"),
        framed_extra_key("ab", "d", "c"),
    }
    assert len(keys) == 4


@given(st.lists(st.tuples(CALLERS, st.sampled_from(["d0", "d1"]), ADAPTERS), max_size=8))
def test_different_parts_never_share_a_key(parts: list[tuple[str | None, str, str | None]]) -> None:
    distinct = {(caller, digest if lora else "", lora) for caller, digest, lora in parts}
    assert len({framed_extra_key(*part) for part in parts}) == len(distinct)


def test_a_framed_key_given_as_a_key_is_yet_another_key() -> None:
    once = framed_extra_key("tenant", None, None)
    assert framed_extra_key(once, None, None) != once


def test_an_adapter_replaced_under_its_id_is_another_adapter() -> None:
    assert framed_extra_key(None, "old", ADAPTER) != framed_extra_key(None, "new", ADAPTER)


@given(CALLERS)
def test_the_adapter_id_is_at_the_end_where_events_look_for_it(caller: str | None) -> None:
    with_adapter = framed_extra_key(caller, "d", ADAPTER)
    assert with_adapter is not None
    assert with_adapter[-LORA_ID_LENGTH:] == ADAPTER
    without = framed_extra_key(caller, None, None)
    assert without is None or without.endswith(":")


def test_plain_requests_keep_plain_keys() -> None:
    assert framed_extra_key(None, None, None) is None
    assert framed_extra_key("", None, None) is None


def test_a_key_with_a_lone_surrogate_is_framed_into_plain_text() -> None:
    key = framed_extra_key("\ud800", None, None)
    assert key is not None
    key.encode("utf-8")


# ---- private weights ----


@pytest.mark.parametrize(
    "scope", [("update", "dp0", 1), ("update", "dp1", 1), ("update", "dp0", 2)]
)
def test_private_weights_are_shared_by_a_launch_and_by_nobody_else(
    scope: tuple[object, ...],
) -> None:
    here = private_weights("launch", *scope)
    assert here == private_weights("launch", *scope)
    assert here != private_weights("another", *scope)
    assert here != private_weights("launch", "update", "dp9", 9)


@given(
    model=st.text(max_size=2000),
    overrides=st.text(max_size=2000),
    numerics=st.dictionaries(st.text(min_size=1, max_size=40), st.text(max_size=200), max_size=60),
)
def test_a_description_has_room_in_a_pool_whatever_the_server_was_given(
    model: str, overrides: str, numerics: dict[str, str]
) -> None:
    identity = dataclasses.replace(IDENTITY, model=model, overrides=overrides, numerics=numerics)
    namespace = identity.namespace()
    assert len(namespace.descriptor) <= DESCRIPTOR_BYTES_MAX
    assert namespace.words()["page_size"] == 64


def test_shortened_descriptions_differ_where_the_texts_did() -> None:
    long = "x" * 2000
    names = [
        dataclasses.replace(IDENTITY, overrides=long + end, model=long + "/llama").namespace()
        for end in ("a", "b")
    ]
    assert names[0].words()["overrides"] != names[1].words()["overrides"]
    assert names[0].words()["model"].endswith("/llama")
    plain = IDENTITY.namespace().words()
    assert plain["numerics"] == IDENTITY.numerics and plain["model"] == "llama"


def test_texts_for_people_give_way_first() -> None:
    identity = dataclasses.replace(IDENTITY, model="/models" * 200, overrides="x" * 60)
    words = identity.namespace().words()
    assert words["overrides"] == identity.overrides
    assert words["model"].startswith("...") and identity.model.endswith(words["model"][3:])
