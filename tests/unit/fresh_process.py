"""Processes that have imported SGLang and loaded no plugin, at the price of a fork.

Importing SGLang takes longer than most tests. One process does it once; each `run` forks it, so
that a program meets the state SGLang is in before its loader runs, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple, Self

WARM = (
    "sglang.srt.plugins",
    "sglang.srt.server_args",
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.arg_groups.resolution_hooks",
    "sglang.srt.arg_groups.speculative_hook",
    "sglang.srt.configs.model_config",
    "sglang.srt.kernel_plugins.nvidia.binding",
    "sglang.srt.layers.layernorm",
)


class Done(NamedTuple):
    """What one program left: exit status and output."""

    returncode: int
    stdout: str
    stderr: str


class FreshProcesses:
    """The warm process. Use as a context manager; `path` comes first on the programs' path, and
    `environment` is what all of them find.
    """

    def __init__(self, path: str, **environment: str) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HPKV_", "SGLANG_"))}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**inherited, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, program: str, *argv: str, **environment: str) -> Done:
        """Run `program` with `sys.argv[1:]` and more environment in a fork of the warm process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"program": program, "argv": argv, "environment": environment}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Done(**json.loads(self._process.stdout.readline()))


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")  # imports and programs print to the old one
    os.dup2(2, 1)
    for name in WARM:
        __import__(name)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            child = os.fork()
            if child == 0:
                _child(json.loads(line), out, err)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            answers.write(json.dumps(Done(code, _text(out), _text(err))._asdict()) + "\n")
            answers.flush()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _child(request: dict[str, Any], out: Path, err: Path) -> None:
    """Never returns: the fork must not go on serving."""
    code = 1
    with contextlib.suppress(BaseException):
        for descriptor, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
        os.environ |= request["environment"]
        sys.argv = ["program", *request["argv"]]
        code = _run(request["program"])
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(program: str) -> int:
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would: print it, then exit with 1
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
