"""What does a hit cost a request, and what does the idle plugin cost a server?

SmolLM2-135M on the real server on this CPU, one request at a time.

    time to first token   the same prompt as a device hit, a host hit and a disk hit, in turns (a
                          flush empties the device tree before the second, the host pool is emptied
                          before the third), and now and then computing a prompt of that length
    decode                tokens per second of a server with the plugin and of one without, in pairs
                          that take turns; the tiers have nothing to do meanwhile

    python benchmarks/server_ttft.py [--json] [--pairs N] [--tokens N]
"""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path
from tempfile import mkdtemp

from report import Report, Spread
from rich.console import Console
from rich.progress import track

from hpkv_testing.client import Answer, Ask
from hpkv_testing.server import Server, ServerConfig, start_all
from hpkv_testing.smollm2 import fast_dtype, smollm2_checkpoint
from hpkv_testing.tiers import empty_host_pool, wait_until_on_disk

DECODE_TOKENS = 64
COLD_EVERY = 5  # rounds; computing thousands of tokens on a CPU takes a minute


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(tokens)]


def first_token(server: Server, tokens: list[int]) -> Answer:
    return server.generate(Ask(input_ids=tokens, max_new_tokens=2, stream=True))


def seconds(answer: Answer) -> float:
    assert answer.ttft_s is not None
    return answer.ttft_s


def measure_hits(report: Report, server: Server, pool: Path, length: int, pairs: int) -> None:
    tokens = prompt(length, seed=1)
    first_token(server, tokens)
    wait_until_on_disk(pool)
    device, host, disk, cold, ratios = [], [], [], [], []
    for index in track(range(pairs), f"{length} tokens", console=Console(stderr=True)):
        hit = first_token(server, tokens)
        assert hit.cached_on("host") == 0 and hit.cached_on("device") > 0, "not a device hit"
        server.flush_cache()
        loaded = first_token(server, tokens)
        assert loaded.cached_on("host") > 0, "not a host hit"
        server.flush_cache()
        empty_host_pool(pool)
        promoted = first_token(server, tokens)
        assert promoted.cached_on("storage") == loaded.cached_on("host"), "not a disk hit"
        assert loaded.output_ids == hit.output_ids == promoted.output_ids
        if index % COLD_EVERY == 0:
            cold.append(seconds(first_token(server, prompt(length, seed=100 + index))))
            first_token(server, tokens)
        device.append(seconds(hit))
        host.append(seconds(loaded))
        disk.append(seconds(promoted))
        ratios.append(host[-1] / device[-1])
    name = f"{length} tokens"
    report.add(f"{name}: device hit", Spread.of(1000 * s for s in device), "ms")
    report.add(f"{name}: host hit", Spread.of(1000 * s for s in host), "ms")
    report.add(f"{name}: disk hit", Spread.of(1000 * s for s in disk), "ms")
    report.add(f"{name}: computed", Spread.of(1000 * s for s in cold), "ms")
    report.add(f"{name}: host hit / device hit", Spread.of(ratios), "ratio", aim="<= 1.15")


def decode_rate(server: Server) -> float:
    answer = server.generate(
        Ask(input_ids=prompt(40, seed=2), max_new_tokens=DECODE_TOKENS, stream=True)
    )
    return (DECODE_TOKENS - 1) / (answer.elapsed_s - seconds(answer))


def measure_decode(report: Report, tiered: Server, plain: Server, pairs: int) -> None:
    for server in (tiered, plain):
        decode_rate(server)
    with_tiers, without, ratios = [], [], []
    for _ in track(range(pairs), "decode", console=Console(stderr=True)):
        with_tiers.append(decode_rate(tiered))
        without.append(decode_rate(plain))
        ratios.append(with_tiers[-1] / without[-1])
    report.add("decode, plugin idle", Spread.of(with_tiers), "tokens/s")
    report.add("decode, no plugin", Spread.of(without), "tokens/s")
    report.add("decode, idle / none", Spread.of(ratios), "ratio", aim="1 within noise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--directory", type=Path, default=None, help="where the disk tier goes")
    arguments = parser.parse_args()

    folder = Path(mkdtemp(prefix="hpkv-bench-", dir="/dev/shm"))
    common = {
        "model": smollm2_checkpoint(),
        "dtype": fast_dtype(),
        "max_total_tokens": 8192,
        "page_size": 64,
    }
    pool, store = folder / "pool", Path(mkdtemp(prefix="hpkv-bench-", dir=arguments.directory))
    flags = (
        "--enable-hpkv",
        *("--hpkv-share-mem-path", str(pool)),
        *("--hpkv-storage-path", str(store / "store"), "--hpkv-storage-size", "4g"),
        *("--hpkv-promote-policy", "wait_complete"),
    )
    tiered = Server(ServerConfig(flags=(*flags, "--hpkv-mem-pool-size", "1g"), **common))
    plain = Server(ServerConfig(**common))
    report = Report("What does a hit cost a request, and the idle plugin a server?")
    try:
        start_all([tiered, plain])
        for length in arguments.tokens:
            measure_hits(report, tiered, pool, length, arguments.pairs)
        measure_decode(report, tiered, plain, arguments.pairs)
    finally:
        for server in (tiered, plain):
            server.kill()
        shutil.rmtree(folder)
        shutil.rmtree(store)
    report.print(as_json=arguments.json)


if __name__ == "__main__":
    main()
