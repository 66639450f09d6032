"""Which host blocks are worth writing to disk?

A simulation of the three tiers on a mixed trace: conversations whose turns extend one prefix and
come back after pauses, a few system prompts that many share, and one-shot prompts that nobody asks
again. Compared are admission rules of the demoter:

    all            every block that leaves the host pool is written
    second touch   only blocks that were loaded back from the host pool at least once
    earned         those; and others while there is credit for them: the disk's size to begin with
                   and at most, EARNED more for each block that was served from disk

reported as tokens served from disk, and as bytes written for each byte served.

    python benchmarks/disk_admission.py [--json] [--requests N] [--one-shots SHARE ...]
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from report import Report, Spread

Block = tuple[int, int]  # (conversation or prompt, page)

DEVICE_BLOCKS = 2_000
HOST_BLOCKS = 8_000
DISK_BLOCKS = 64_000
REGION_BLOCKS = 2_000
EARNED = 4
SYSTEM_PAGES = 16
SEEDS = 5


def trace(requests: int, one_shots: float, seed: int) -> Iterator[list[Block]]:
    """Prompts as lists of blocks, head to tail."""
    rng = random.Random(seed)
    lengths: dict[int, int] = {}
    newest = 0
    for number in range(requests):
        if rng.random() < one_shots:
            yield [(-number - 1, page) for page in range(rng.randrange(8, 64))]
            continue
        # A new conversation, or one of the last few hundred, the recent ones more often.
        if rng.random() < 0.15 or not lengths:
            newest += 1
            chosen = newest
            lengths[chosen] = 0
        else:
            chosen = max(1, newest - int(rng.expovariate(1 / 150)))
        lengths[chosen] = min(lengths.get(chosen, 0) + rng.randrange(4, 24), 400)
        system = [(1_000_000 + chosen % 8, page) for page in range(SYSTEM_PAGES)]
        yield system + [(chosen, page) for page in range(lengths[chosen])]


@dataclass
class Tiers:
    """Blocks by tier, least recently used first; the disk drops its oldest region."""

    rule: str
    device: OrderedDict[Block, None] = field(default_factory=OrderedDict)
    host: OrderedDict[Block, int] = field(default_factory=OrderedDict)  # -> times loaded back
    disk: OrderedDict[Block, None] = field(default_factory=OrderedDict)
    served: int = 0
    written: int = 0
    asked: int = 0
    credit: int = DISK_BLOCKS

    def request(self, prompt: list[Block]) -> None:
        self.asked += len(prompt)
        computing = False
        for block in prompt:
            computing = computing or not self._load(block)
            self.device[block] = None
            self.device.move_to_end(block)
            if computing and block not in self.host:
                self._keep(block, 0)  # written through on insert
        while len(self.device) > DEVICE_BLOCKS:
            evicted, _ = self.device.popitem(last=False)
            if evicted in self.host:
                self.host.move_to_end(evicted)
            else:
                self._keep(evicted, 0)

    def _load(self, block: Block) -> bool:
        if block in self.device:
            return True
        if block in self.host:
            self.host[block] += 1
            self.host.move_to_end(block)
            return True
        if block not in self.disk:
            return False
        self.served += 1
        self.credit = min(self.credit + EARNED, DISK_BLOCKS)
        self._keep(block, 1)
        return True

    def _keep(self, block: Block, uses: int) -> None:
        self.host[block] = uses
        while len(self.host) > HOST_BLOCKS:
            demoted, count = self.host.popitem(last=False)
            if demoted not in self.disk and self._admits(count):
                self.disk[demoted] = None
                self.written += 1
        while len(self.disk) > DISK_BLOCKS:
            for _ in range(REGION_BLOCKS):
                self.disk.popitem(last=False)

    def _admits(self, uses: int) -> bool:
        if uses > 0 or self.rule == "all":
            return True
        if self.rule == "second touch" or self.credit == 0:
            return False
        self.credit -= 1
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--one-shots", type=float, nargs="+", default=[0.0, 0.3, 0.7])
    arguments = parser.parse_args()
    report = Report("Which host blocks are worth writing to disk?")
    for share in arguments.one_shots:
        for name in ("all", "second touch", "earned"):
            runs = []
            for seed in range(SEEDS):
                tiers = Tiers(name)
                for prompt in trace(arguments.requests, share, seed):
                    tiers.request(prompt)
                runs.append(tiers)
            label = f"{share:.0%} one-shot prompts, {name}"
            report.add(
                f"{label}: blocks served from disk",
                Spread.of(100 * t.served / t.asked for t in runs),
                "% of blocks asked",
            )
            report.add(
                f"{label}: blocks written",
                Spread.of(100 * t.written / t.asked for t in runs),
                "% of blocks asked",
            )
    report.print(as_json=arguments.json)


if __name__ == "__main__":
    main()
