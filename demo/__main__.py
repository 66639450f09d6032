"""`python -m demo`: spill, load back, survive kill -9 and a reboot, share, compare every answer.

Exit status: 0 when every answer was equal and every tier was hit, 1 when not, 2 when a server did
not start or failed, 130 when interrupted. Owns the folders of both tiers, the servers and their
logs; removes the tiers, keeps the logs after a failure.
"""

import argparse
import logging
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from demo import phases, texts
from demo.dialogue import load_tokenizer
from demo.report import Report, tiers
from hpkv_testing.client import ServerError
from hpkv_testing.server import Server, ServerConfig, ServerStartError, start_all
from hpkv_testing.smollm2 import fast_dtype, smollm2_checkpoint
from hpkv_testing.tiers import empty_host_pool, wait_until_on_disk

DEVICE_TOKENS = 1536  # less than the conversations need together
TEXT_CHARACTERS = 2400  # about six hundred tokens

console = Console(highlight=False)


def main() -> int:
    arguments = _arguments()
    logging.basicConfig(level=logging.WARNING, format="  %(message)s")
    logging.getLogger("hpkv_testing").setLevel(logging.INFO)
    # SIGTERM, as from a time limit, must not leave the pool behind either.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs = Path(tempfile.mkdtemp(prefix="hpkv-demo-logs-"))
    memory = Path(tempfile.mkdtemp(prefix="hpkv-demo-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="hpkv-demo-"))
    places = Tiers(memory / "pool", arguments.pool_size, disk / "store")
    demo = Demo(arguments.conversations, places, logs)
    try:
        failures = demo.run()
    except ServerStartError as error:
        console.print(f"[red]a server did not start[/red]: {escape(str(error))}", soft_wrap=True)
        return 2
    except (ServerError, OSError) as error:
        console.print(f"[red]a server failed[/red]: {escape(str(error))}; logs: {logs}")
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; the servers are gone, their logs are in", str(logs))
        return 130
    finally:
        demo.close()
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    if failures:
        for failure in failures:
            console.print(f"[red]failed[/red]: {escape(failure)}")
        console.print(f"server logs: {logs}")
        return 1
    shutil.rmtree(logs)
    console.print("[green]every answer is equal, every tier was hit[/green]")
    return 0


@dataclass(frozen=True)
class Tiers:
    """Where a server keeps its blocks."""

    pool: Path
    pool_size: str
    store: Path

    def flags(self) -> tuple[str, ...]:
        """The plugin's flags for these places."""
        return (
            "--enable-hpkv",
            *("--hpkv-mem-pool-size", self.pool_size, "--hpkv-share-mem-path", str(self.pool)),
            *("--hpkv-storage-path", str(self.store), "--hpkv-storage-size", "1g"),
        )

    def after_reboot(self) -> "Tiers":
        """What a reboot leaves: the files. A copy, so that both can be used side by side."""
        pool = self.pool.with_name("rebooted")
        store = shutil.copytree(self.store, self.store.with_name("rebooted"))
        return Tiers(pool, self.pool_size, store)


class Demo:
    """The servers of one run, and what they are asked; not thread-safe."""

    def __init__(self, conversation_count: int, tiers: Tiers, logs: Path) -> None:
        self._topics = texts.choose(conversation_count, TEXT_CHARACTERS)
        self._tiers, self._logs = tiers, logs
        self._servers: list[Server] = []
        self._start = time.monotonic()

    def run(self) -> list[str]:
        """All steps; prints the table and returns what went wrong."""
        self._say("SmolLM2-135M: the checkpoint (about half a minute the first time)")
        checkpoint = smollm2_checkpoint()
        self._say(f"starting two servers side by side on one host pool and disk, {fast_dtype()}")
        first, second = self._started(checkpoint, ("first", self._tiers), ("second", self._tiers))
        dialogues, given = phases.talk(first, self._topics, load_tokenizer(checkpoint), self._say)
        console.print(f"  {tiers(given)}")
        self._say("the last turn again: cold, as a device hit, as a host hit")
        cold = phases.cold(first, dialogues)
        device = phases.device_hits(first, dialogues)
        host = phases.hits("host", "host", first, dialogues)
        self._say("the same on the second server, which never saw these conversations")
        elsewhere = phases.hits("host, second server", "host", second, dialogues)
        self._say("the host pool is emptied: only the disk has them now")
        first.flush_cache()
        wait_until_on_disk(self._tiers.pool)
        empty_host_pool(self._tiers.pool)
        disk = phases.hits("disk", "storage", first, dialogues)
        self._say("kill -9 of both; one new server on the pool, one as after a reboot: files only")
        first.kill()
        second.kill()
        restarted, rebooted = self._started(
            checkpoint, ("restarted", self._tiers), ("rebooted", self._tiers.after_reboot())
        )
        host_again = phases.hits("host, after kill -9", "host", restarted, dialogues)
        disk_again = phases.hits("disk, after a reboot", "storage", rebooted, dialogues)
        report = Report(cold, device, (host, elsewhere, host_again, disk, disk_again))
        console.print()
        console.print(report.table())
        console.print(_FOOTNOTE)
        question, answer = dialogues[0].transcript[-1]
        console.print(f"[dim]{self._topics[0].name}: {question}[/dim] {escape(answer.strip())}\n")
        return report.failures()

    def close(self) -> None:
        """Kill what still runs."""
        for server in self._servers:
            server.kill()

    def _started(self, checkpoint: Path, *named: tuple[str, "Tiers"]) -> list[Server]:
        """Servers with these names on these tiers, started side by side."""
        servers = [
            Server(
                ServerConfig(
                    model=checkpoint,
                    flags=on.flags(),
                    max_total_tokens=DEVICE_TOKENS,
                    page_size=None,
                    dtype=fast_dtype(),
                ),
                self._logs / f"{name}.log",
            )
            for name, on in named
        ]
        self._servers += servers
        start_all(servers)
        return servers

    def _say(self, what: str) -> None:
        console.print(f"[dim]{time.monotonic() - self._start:4.0f} s[/dim]  {what}")


_FOOTNOTE = (
    "[dim]TTFT: time to first token, median. device, host, disk, computed: where the prompts' "
    "tokens came from, in sum. equal: same tokens and, to the bit, same logprobs as the device "
    "hit, which has the same cached length.\n"
    "* A cold prompt is computed in one piece, so its numbers may round otherwise: only the tokens "
    "are compared, and a difference is no failure.[/dim]"
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--conversations", type=int, default=3, help="how many (default 3)")
    parser.add_argument("--pool-size", default="1g", help="host pool (default 1g)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
