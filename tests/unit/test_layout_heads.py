"""Which heads a rank holds, and whose turn it is to write what several ranks hold alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkv_sglang.layout.heads import HeadRange, Turn, heads_of, shards_of, turn_of


@given(total=st.sampled_from([1, 2, 4, 8, 12]), size=st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_ranks_hold_even_shares_in_order_or_nothing_is_said(total: int, size: int) -> None:
    ranges = [heads_of(rank, size, total) for rank in range(size)]
    if max(total, size) % min(total, size):
        assert set(ranges) == {None} and shards_of(size, total) == []
        return
    shards = shards_of(size, total)
    assert [r for r in ranges if r is not None] == [
        shards[rank * len(shards) // size] for rank in range(size)
    ]
    assert [head for r in shards for head in range(r.begin, r.end)] == list(range(total))


@pytest.mark.parametrize(
    ("rank", "size", "total", "name"),
    [
        (0, 1, 8, "heads 0:8/8"),
        (1, 2, 8, "heads 4:8/8"),
        (3, 4, 2, "heads 1:2/2"),
        (0, 2, 1, "heads 0:1/1"),
    ],
)
def test_a_shard_is_named_by_its_heads(rank: int, size: int, total: int, name: str) -> None:
    assert str(heads_of(rank, size, total)) == name


def test_shards_of_other_totals_have_other_names() -> None:
    assert str(HeadRange(0, 1, 2)) != str(HeadRange(0, 1, 4))


@given(
    size=st.integers(1, 16),
    first=st.sampled_from([0, 16, 32]),
    per_node=st.sampled_from([2, 8, 64]),
)
def test_on_every_node_each_page_is_the_turn_of_exactly_one_rank(
    size: int, first: int, per_node: int
) -> None:
    turns = [turn_of(rank, list(range(size)), first, per_node) for rank in range(size)]
    for node in {(first + rank) // per_node for rank in range(size)}:
        here = [t for rank, t in enumerate(turns) if (first + rank) // per_node == node]
        assert [t.index for t in here] == list(range(len(here)))
        assert {t.count for t in here} == {len(here)}


def test_ranks_that_share_a_head_take_turns_and_others_do_not() -> None:
    assert turn_of(3, [2, 3], 0, 8) == Turn(1, 2)
    assert turn_of(0, [0], 0, 8) == Turn()
