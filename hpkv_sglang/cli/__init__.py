"""`hpkv`, the command line: what is in a pool, emptying it, and the plugin's flags.

Owns: the commands (`app`), how they attach to a pool (`attachment`), what they print (`report`).

Invariants: no command creates a pool or touches what is not one. Everything that is the user's
business to mend ends in one line on stderr and exit code 2; exit code 1 is a broken pool.
Importing this package imports neither torch nor SGLang.

Threading: one command, one thread, one process.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `hpkv` program. Exits the process."""
    from hpkv_sglang.cli.app import run

    run()
