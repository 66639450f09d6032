"""A small parent for one server, so that no process of it can outlive its owner.

Run as a script with nothing but the standard library: `python -I -S guard.py COMMAND...`. The
command runs in a session of its own, with its output on the guard's standard error. The guard
writes the command's pid to its standard output, a line, and then obeys single bytes on standard
input:

    T          ask the command to end (SIGTERM)
    K, or EOF  kill the command's process group at once (SIGKILL)

EOF comes when the owner ends, however it ends, SIGKILL included. When the command has ended, by
itself or not, every process that is left of it is killed and reaped; then the guard writes the
command's exit code, another line, and exits with it. So "there is an exit code" means "all of them
are gone": as a subreaper it inherits the orphans, also those that left the process group. If the
guard itself is killed, the kernel kills the command (PR_SET_PDEATHSIG), and SGLang's own children
do the same one level below.

One thread only: PR_SET_PDEATHSIG is bound to the thread that forked.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def fork_guarded() -> int | None:
    """Fork, like `os.fork`: None in the child, which is to become the server.

    The parent is its guard from here on and returns the child's exit code when all have ended.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guard_pid = os.getpid()
    # Signals of a terminal are for the owner, which then tells the guard.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, handler)
        os.setsid()
        die_with_parent(guard_pid)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        return None
    os.write(1, f"{pid}\n".encode())
    _obey(pid)
    # The leader is not reaped yet, so its number can not have been given to another group.
    _signal_group(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    _end_orphans()
    code = _exit_code(status)
    with contextlib.suppress(BrokenPipeError):  # the owner, who would read it, may be gone
        os.write(1, f"{code}\n".encode())
    return code


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that forked it, of `parent`, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above took effect
        os._exit(1)


def _obey(pid: int) -> None:
    """Carry out the owner's bytes until the command has ended or is to be killed."""
    ended = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(0, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if ended in ready:
            return
        order = os.read(0, 1)
        if order in (b"", b"K"):
            return
        if order == b"T":
            os.kill(pid, signal.SIGTERM)


def _end_orphans() -> None:
    """Kill and reap what the command left behind, until nothing is left."""
    while True:
        for pid in _children():
            _signal_process(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    pid = os.getpid()
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # all of them ended by themselves


def _signal_process(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself


def _exit_code(status: int) -> int:
    """The convention of shells: 128 + n for "ended by signal n"."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    exit_code = fork_guarded()
    if exit_code is None:
        try:
            os.execvp(sys.argv[1], sys.argv[1:])
        except OSError as error:
            sys.exit(f"{sys.argv[1]}: {error}")
    sys.exit(exit_code)
