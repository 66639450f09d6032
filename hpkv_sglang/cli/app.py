"""The commands of `hpkv`, one function each.

Owns: argument parsing, exit codes (0 fine, 1 something stored is broken, 2 the user's business)
and the rule that an error is one line on stderr. Threading: main thread only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hpkv_sglang.cli.attachment import attached, default_directory
from hpkv_sglang.cli.report import bytes_words, pool_report, pool_tables, verify_words
from hpkv_sglang.cli.storage import attached_store, default_storage, verify_store
from hpkv_sglang.config import flag_rows, flags_markdown
from hpkv_sglang.errors import ConfigError, HpkvError

__all__ = ["app", "run"]

EXIT_BROKEN = 1
EXIT_USER = 2

app = typer.Typer(
    name="hpkv",
    help="Look at and manage the host pool that SGLang servers share (hpkv-sglang).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PathOption = Annotated[
    str | None,
    typer.Option(
        "--path",
        metavar="DIR",
        help="Directory of the pool. Default: HPKV_SHARE_MEM_FILE_PATH, else /dev/shm/hpkv-<uid>.",
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage-path",
        metavar="DIR",
        help="Directory of the disk tier. Default: HPKV_KV_STORAGE_PATH.",
    ),
]


def run() -> None:
    """Parse `sys.argv`, run one command, exit."""
    try:
        app()
    except HpkvError as error:
        print(f"hpkv: {error}", file=sys.stderr)
        sys.exit(EXIT_USER)


def _directory(path: str | None) -> str:
    return default_directory() if path is None else path


@app.command()
def flags(
    markdown: Annotated[bool, typer.Option(help="Print the table as Markdown.")] = False,
) -> None:
    """List the flags that the plugin adds to the SGLang server."""
    if markdown:
        print(flags_markdown())
        return
    table = Table("flag", "environment", "default", "meaning")
    for row in flag_rows():
        table.add_row(*row)
    Console().print(table)


@app.command()
def stat(
    path: PathOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print stable keys as JSON.")] = False,
) -> None:
    """Show what a pool holds: size, use, blocks, clients, hits, namespaces."""
    with attached(_directory(path), read_only=True) as pool:
        report = pool_report(pool)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        Console().print(pool_tables(report))


@app.command()
def clear(
    path: PathOption = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only this namespace: its id, or how it begins."),
    ] = None,
    storage: Annotated[
        bool, typer.Option("--storage", help="Drop the blocks on disk too, not only in memory.")
    ] = False,
    storage_path: StorageOption = None,
) -> None:
    """Drop the blocks of a pool, or of one namespace. Blocks in use stay; servers go on."""
    if storage:
        with attached_store(_directory(path), storage_path or default_storage()) as store:
            ids = store.namespaces()
            on_disk = (
                store.clear()
                if namespace is None
                else store.drop_namespace(bytes.fromhex(_complete_id(namespace, ids)))
            )
        print(f"dropped {on_disk} blocks on disk")
        if not Path(_directory(path), "pool.hpkv").exists():
            return
    with attached(_directory(path), read_only=False) as pool:
        names = {id_.hex(): id_ for id_, _, _, _ in pool.namespaces()}
        chosen = None if namespace is None else names[_complete_id(namespace, list(names))]
        before = pool.stats()["used_bytes"]
        dropped = pool.clear() if chosen is None else pool.drop_namespace(chosen)
        stats = pool.stats()
    freed = max(0, before - stats["used_bytes"])
    print(f"dropped {dropped} blocks ({bytes_words(freed)}), {stats['blocks']} left")


def _complete_id(prefix: str, ids: list[str]) -> str:
    """The one id that begins with `prefix`. Raises ConfigError when none or several do."""
    found = [id_ for id_ in ids if id_.startswith(prefix.lower())]
    if len(found) == 1 and prefix:
        return found[0]
    known = ", ".join(id_[:12] for id_ in ids) or "none"
    raise ConfigError.build(
        "choosing a namespace",
        "id that begins so" if not found else f"id that fits {len(found)} namespaces",
        prefix,
        f"In this pool: {known}.",
    )


@app.command()
def verify(
    path: PathOption = None,
    storage_path: StorageOption = None,
    fix: Annotated[bool, typer.Option("--fix", help="Drop the blocks that are bad.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print stable keys as JSON.")] = False,
) -> None:
    """Read every block on disk and compare its checksum. Exit code 1 when one is bad."""
    with attached_store(_directory(path), storage_path or default_storage()) as store:
        report = verify_store(store, fix=fix, show_progress=sys.stderr.isatty())
    print(json.dumps(report, indent=2) if as_json else verify_words(report, fixed=fix))
    if report["bad"] or report["io_errors"]:
        raise typer.Exit(EXIT_BROKEN)


@app.command()
def doctor(path: PathOption = None) -> None:
    """Check every invariant of a pool. Exit code 1 when one is violated."""
    with attached(_directory(path), read_only=True) as pool:
        violations = pool.check()
        poisoned = pool.poisoned
        summary = f"{pool.path}: {pool.stats()['blocks']} blocks, epoch {pool.epoch}"
    for violation in violations:
        print(violation)
    print(f"{summary}: {'poisoned' if poisoned else f'{len(violations)} violations'}")
    if violations or poisoned:
        raise typer.Exit(EXIT_BROKEN)
