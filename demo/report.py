"""From measured rows to one table and a verdict."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from demo.phases import Row
from hpkv_testing.client import Answer


@dataclass(frozen=True)
class Report:
    """All rows of a run. Each of `tiers` must have been served from the tier it names."""

    cold: Row
    device: Row
    tiers: tuple[Row, ...]

    def failures(self) -> list[str]:
        """What contradicts the promise, in words; empty when the demo shows what it claims."""
        found = []
        if any(answer.cached_tokens for answer in self.cold.answers):
            found.append("a cold request was not cold")
        for answer in self.device.answers:
            if not answer.cached_tokens or answer.cached_on("device") != answer.cached_tokens:
                found.append(f"device hit: {answer.cached_tokens_details}, expected device only")
        for row in self.tiers:
            found += self._tier_failures(row)
        return found

    def _tier_failures(self, row: Row) -> list[str]:
        found = []
        for index, (answer, reference) in enumerate(
            zip(row.answers, self.device.answers, strict=True)
        ):
            where = f"{row.name}, conversation {index + 1}"
            if not answer.cached_on(row.tier):
                found.append(f"{where}: no token came from {row.tier}")
            if answer.cached_tokens != reference.cached_tokens:
                counts = f"{answer.cached_tokens} instead of {reference.cached_tokens}"
                found.append(f"{where}: {counts} tokens were cached")
            elif not same(answer, reference):
                found.append(f"{where}: the answer differs from the device hit's")
        return found

    def table(self) -> Table:
        """One line per way to be served."""
        table = Table(
            title=f"SmolLM2-135M, the last turn of {len(self.device.answers)} conversations",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=0,
            collapse_padding=True,
        )
        table.add_column("served from", no_wrap=True)
        for head in ("TTFT", "vs cold", "device", "host", "disk", "computed", "equal"):
            table.add_column(head, justify="right", no_wrap=True)
        for row in (self.cold, self.device, *self.tiers):
            table.add_row(*self._cells(row))
        return table

    def _cells(self, row: Row) -> list[str]:
        ttft_s, cold_s = _ttft_s(row.answers), _ttft_s(self.cold.answers)
        return [
            row.name,
            f"{ttft_s * 1e3:.0f} ms",
            "" if row is self.cold else f"{cold_s / ttft_s:.1f} x",
            f"{sum(a.cached_on('device') for a in row.answers)}",
            f"{sum(a.cached_on('host') for a in row.answers)}",
            f"{sum(a.cached_on('storage') for a in row.answers)}",
            f"{sum(a.prompt_tokens - a.cached_tokens for a in row.answers)}",
            self._equal(row),
        ]

    def _equal(self, row: Row) -> str:
        if row is self.device:
            return "ref."
        pairs = zip(row.answers, self.device.answers, strict=True)
        if row is self.cold:  # other matrix shapes: only the words can be compared
            return f"{sum(a.output_ids == b.output_ids for a, b in pairs)}/{len(row.answers)} *"
        return f"{sum(same(a, b) for a, b in pairs)}/{len(row.answers)}"


def same(answer: Answer, reference: Answer) -> bool:
    """Equal tokens, and logprobs equal to the last bit."""
    return answer.output_ids == reference.output_ids and answer.logprobs == reference.logprobs


def tiers(answers: Sequence[Answer]) -> str:
    """Where the prompt tokens of these requests came from, in words."""
    total = sum(answer.prompt_tokens for answer in answers)
    device = sum(answer.cached_on("device") for answer in answers)
    host = sum(answer.cached_on("host") for answer in answers)
    return (
        f"{len(answers)} turns, {total:,} prompt tokens: {device:,} from the device, "
        f"{host:,} from the host pool, {total - device - host:,} computed"
    )


def _ttft_s(answers: Sequence[Answer]) -> float:
    times_s = [answer.ttft_s or answer.elapsed_s for answer in answers]
    return statistics.median(times_s)
