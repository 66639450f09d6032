"""The core's CRC32C against google-crc32c: any length, alignment, continuation and combination."""

from __future__ import annotations

from itertools import pairwise

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpkv_sglang._core import copy_nt, copy_nt_crc32c, crc32c, crc32c_combine

untimed = settings(deadline=None)  # machines differ

SPACE = np.random.default_rng(0).integers(0, 256, 1 << 17, dtype=np.uint8)

# Around the boundaries of words, lines and chunks as well as anywhere.
LENGTHS = st.one_of(
    st.integers(0, 2000),
    st.builds(lambda n, d: max(0, 384 * n + d), st.integers(0, 200), st.integers(-70, 70)),
)
OFFSETS = st.integers(0, 130)


def reference(data: np.ndarray, crc: int = 0) -> int:
    return int(google_crc32c.extend(crc, data.tobytes()))


@untimed
@given(length=LENGTHS, offset=OFFSETS)
def test_equals_google_crc32c_at_any_length_and_alignment(length: int, offset: int) -> None:
    data = SPACE[offset : offset + length]
    assert crc32c(data) == reference(data)


@untimed
@given(length=LENGTHS, cut=st.floats(0, 1))
def test_continuing_equals_the_whole(length: int, cut: float) -> None:
    data = SPACE[3 : 3 + length]
    middle = int(length * cut)
    assert crc32c(data[middle:], crc32c(data[:middle])) == reference(data)


@untimed
@given(cuts=st.lists(st.integers(0, 60_000), max_size=6), offset=OFFSETS)
def test_parts_combine_to_the_whole_in_order(cuts: list[int], offset: int) -> None:
    edges = [0, *sorted(cuts), 60_001]
    data = SPACE[offset : offset + edges[-1]]
    total = 0
    for begin, end in pairwise(edges):
        total = crc32c_combine(total, crc32c(data[begin:end]), end - begin)
    assert total == reference(data)


@untimed
@given(length=LENGTHS, source_offset=OFFSETS, target_offset=OFFSETS, seed=st.integers(0, 2**32 - 1))
def test_fused_copy_writes_its_range_only_and_returns_the_checksum(
    length: int, source_offset: int, target_offset: int, seed: int
) -> None:
    source = SPACE[source_offset : source_offset + length]
    target = np.full(length + 300, 0xA5, dtype=np.uint8)
    inside = target[target_offset : target_offset + length]
    assert copy_nt_crc32c(inside, source, seed) == reference(source, seed)
    assert np.array_equal(inside, source)
    assert (target[:target_offset] == 0xA5).all()
    assert (target[target_offset + length :] == 0xA5).all()


@untimed
@given(length=LENGTHS, target_offset=OFFSETS)
def test_plain_copy_writes_its_range_only(length: int, target_offset: int) -> None:
    target = np.full(length + 300, 0xA5, dtype=np.uint8)
    copy_nt(target[target_offset : target_offset + length], SPACE[:length])
    assert np.array_equal(target[target_offset : target_offset + length], SPACE[:length])
    assert (target[:target_offset] == 0xA5).all()
    assert (target[target_offset + length :] == 0xA5).all()


def test_copy_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        copy_nt(np.zeros(3, np.uint8), np.zeros(4, np.uint8))


def test_copy_into_read_only_memory_is_refused() -> None:
    target = np.zeros(4, np.uint8)
    target.flags.writeable = False
    with pytest.raises(TypeError):
        copy_nt(target, np.zeros(4, np.uint8))


def test_bytes_are_taken_as_they_are() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytearray(b"123456789")) == 0xE3069283
    assert crc32c(b"") == 0
