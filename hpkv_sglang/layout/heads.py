"""Which KV heads a rank holds, and which ranks hold the same bytes.

Tensor parallelism gives every rank an equal run of heads. With more ranks than heads each head is
held by several neighbouring ranks. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads `[begin, end)` of `total`."""

    begin: int
    end: int
    total: int

    def __str__(self) -> str:
        return f"heads {self.begin}:{self.end}/{self.total}"


def heads_of(rank: int, size: int, total: int) -> HeadRange | None:
    """The heads of `rank` among `size` ranks; None where they cannot be shared out evenly."""
    if size <= total:
        if total % size:
            return None
        width = total // size
        return HeadRange(rank * width, (rank + 1) * width, total)
    if size % total:
        return None
    head = rank // (size // total)
    return HeadRange(head, head + 1, total)


def shards_of(size: int, total: int) -> list[HeadRange]:
    """The ranges that `size` ranks hold, each once, in order; empty if there is no even share."""
    ranges = [heads_of(rank, size, total) for rank in range(size)]
    return list(dict.fromkeys(r for r in ranges if r is not None))


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is to write a page that several ranks hold alike: page `i` is `index`'s when
    `i % count == index`."""

    index: int = 0
    count: int = 1


ONLY_WRITER = Turn()


def turn_of(rank: int, alike: list[int], first_global: int, ranks_per_node: int) -> Turn:
    """The turn of `rank` among the ranks in `alike` (itself included) that share its node.

    Ranks are numbered in their group, whose first is `first_global` among all; a node has
    `ranks_per_node` of them. Each node has a pool of its own, so each node writes its own copy.
    """

    def node(of: int) -> int:
        return (first_global + of) // ranks_per_node

    here = [other for other in alike if node(other) == node(rank)]
    return Turn(here.index(rank), len(here))
