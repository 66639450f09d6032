"""`python -m demo`: spill, load back, survive kill -9, share, and compare every answer.

Exit status: 0 when every answer was equal and every tier was hit, 1 when not, 2 when a server did
not start or failed, 130 when interrupted. Owns the pool's folder, the servers and their logs;
removes the pool, keeps the logs after a failure.
"""

import argparse
import logging
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from demo import phases, texts
from demo.dialogue import load_tokenizer
from demo.report import Report, tiers
from hpkv_testing.client import ServerError
from hpkv_testing.server import Server, ServerConfig, ServerStartError, start_all
from hpkv_testing.smollm2 import smollm2_checkpoint

DEVICE_TOKENS = 3072  # less than the conversations need together
TEXT_CHARACTERS = 4200  # about a thousand tokens

console = Console(highlight=False)


def main() -> int:
    arguments = _arguments()
    logging.basicConfig(level=logging.WARNING, format="  %(message)s")
    logging.getLogger("hpkv_testing").setLevel(logging.INFO)
    # SIGTERM, as from a time limit, must not leave the pool behind either.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs = Path(tempfile.mkdtemp(prefix="hpkv-demo-logs-"))
    pool = Path(tempfile.mkdtemp(prefix="hpkv-demo-", dir="/dev/shm"))
    demo = Demo(arguments.conversations, arguments.pool_size, pool, logs)
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
        shutil.rmtree(pool, ignore_errors=True)
    if failures:
        for failure in failures:
            console.print(f"[red]failed[/red]: {escape(failure)}")
        console.print(f"server logs: {logs}")
        return 1
    shutil.rmtree(logs)
    console.print("[green]every answer is equal, every tier was hit[/green]")
    return 0


class Demo:
    """The servers of one run, and what they are asked; not thread-safe."""

    def __init__(self, conversation_count: int, pool_size: str, pool: Path, logs: Path) -> None:
        self._topics = texts.choose(conversation_count, TEXT_CHARACTERS)
        self._pool, self._pool_size, self._logs = pool, pool_size, logs
        self._servers: list[Server] = []
        self._start = time.monotonic()

    def run(self) -> list[str]:
        """All steps; prints the table and returns what went wrong."""
        self._say("SmolLM2-135M: the checkpoint (about half a minute the first time)")
        checkpoint = smollm2_checkpoint()
        self._say(f"starting two servers side by side on one host pool, {fast_dtype()}")
        first, second = self._started(checkpoint, "first", "second")
        dialogues, given = phases.talk(first, self._topics, load_tokenizer(checkpoint), self._say)
        console.print(f"  {tiers(given)}")
        self._say("the last turn again: cold, as a device hit, as a host hit")
        cold = phases.cold(first, dialogues)
        device = phases.device_hits(first, dialogues)
        host = [phases.hits("host", first, dialogues)]
        self._say("the same on the second server, which never saw these conversations")
        elsewhere = phases.hits("host, second server", second, dialogues)
        self._say("kill -9 of both servers, then a new one on what is left of the pool")
        first.kill()
        second.kill()
        (third,) = self._started(checkpoint, "restarted")
        host.append(phases.hits("host, after kill -9", third, dialogues))
        host.append(elsewhere)
        report = Report(cold, device, tuple(host))
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

    def _started(self, checkpoint: Path, *names: str) -> list[Server]:
        flags = (
            "--enable-hpkv",
            *("--hpkv-mem-pool-size", self._pool_size),
            *("--hpkv-share-mem-path", str(self._pool)),
        )
        config = ServerConfig(
            model=checkpoint,
            flags=flags,
            max_total_tokens=DEVICE_TOKENS,
            page_size=None,
            dtype=fast_dtype(),
        )
        servers = [Server(config, self._logs / f"{name}.log") for name in names]
        self._servers += servers
        start_all(servers)
        return servers

    def _say(self, what: str) -> None:
        console.print(f"[dim]{time.monotonic() - self._start:4.0f} s[/dim]  {what}")


def fast_dtype() -> str:
    """bfloat16 where the CPU computes in it; elsewhere PyTorch emulates it six times slower."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return "bfloat16" if words & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


_FOOTNOTE = (
    "[dim]TTFT: time to first token, median. device, host, computed: where the prompts' tokens "
    "came from, in sum. equal: same tokens and, to the bit, same logprobs as the device hit, which "
    "has the same cached length.\n"
    "* A cold prompt is computed in one piece, so its numbers may round otherwise: only the tokens "
    "are compared, and a difference is no failure.[/dim]"
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--conversations", type=int, default=4, help="how many (default 4)")
    parser.add_argument("--pool-size", default="1g", help="host pool (default 1g)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
