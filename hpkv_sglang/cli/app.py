"""The commands of `hpkv`, one function each.

Owns: argument parsing, exit codes (0 fine, 1 something stored is broken or not looked at, 2 the
user's business) and the rule that an error is one line on stderr. Threading: main thread only.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hpkv_sglang.cli.attachment import attached, default_directory
from hpkv_sglang.cli.bench import bench_table, measure_disk, measure_pool
from hpkv_sglang.cli.report import (
    bytes_words,
    namespace_reports,
    namespace_table,
    pool_report,
    pool_tables,
    verify_words,
    words_table,
)
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
    context_settings={"help_option_names": ["-h", "--help"]},
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

JsonOption = Annotated[bool, typer.Option("--json", help="Print stable keys as JSON.")]


def run() -> None:
    """Parse `sys.argv`, run one command, exit."""
    try:
        app()
    except (HpkvError, OSError) as error:  # a directory that may not be looked into
        print(f"hpkv: {error}", file=sys.stderr)
        sys.exit(EXIT_USER)


def _directory(path: str | None) -> str:
    return default_directory() if path is None else path


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _print_version(asked: bool) -> None:
    if asked:
        print(f"hpkv-sglang {version('hpkv-sglang')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it, exit."),
    ] = False,
) -> None:
    """Look at and manage the host pool that SGLang servers share (hpkv-sglang)."""


@app.command()
def flags(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the flags that the plugin adds to the SGLang server."""
    if markdown:
        print(flags_markdown())
        return
    rows = flag_rows()
    if as_json:
        names = ("flag", "environment", "default", "meaning")
        _print_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    table = Table(show_header=False, show_lines=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for flag, environment, default, meaning in rows:
        table.add_row(f"{flag}\n{environment}", f"{meaning} Default: {default}.")
    Console().print(table)


@app.command()
def stat(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Show what a pool holds: size, use, blocks, clients, hits, namespaces."""
    with attached(_directory(path), read_only=True) as pool:
        report = pool_report(pool)
    if as_json:
        _print_json(report)
    else:
        Console().print(pool_tables(report))


@app.command("ls")
def list_namespaces(
    namespace: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="All about this namespace: its id, or how it begins."),
    ] = None,
    path: PathOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what a pool's blocks belong to: model, number formats, page size, shards."""
    with attached(_directory(path), read_only=True) as pool:
        reports = namespace_reports(pool)
    if namespace is None:
        _print_json(reports) if as_json else Console().print(namespace_table(reports))
        return
    by_id = {report["id"]: report for report in reports}
    report = by_id[_complete_id(namespace, list(by_id))]
    _print_json(report) if as_json else Console().print(words_table(report))


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
    as_json: JsonOption = False,
) -> None:
    """Drop the blocks of a pool, or of one namespace. Blocks in use stay; servers go on."""
    if storage_path is not None and not storage:
        raise ConfigError.build(
            "clearing", "--storage-path", storage_path, "Add --storage, or leave the path out."
        )
    directory = _directory(path)
    report: dict[str, int] = {}
    in_memory = not storage or Path(directory, "pool.hpkv").exists()
    known = _ids_in_pool(directory) if in_memory and namespace is not None else set()
    chosen = None if storage else _chosen(namespace, known)
    if storage:
        with attached_store(directory, storage_path or default_storage()) as store:
            chosen = _chosen(namespace, known | set(store.namespaces()))
            # Memory first, or a server would write what is in it to the disk again.
            if in_memory:
                report |= _clear_pool(directory, chosen)
            on_disk = store.clear() if chosen is None else store.drop_namespace(chosen)
        report["dropped_on_disk"] = on_disk
    if in_memory:
        # Behind the disk too: what was read from it meanwhile.
        again = _clear_pool(directory, chosen)
        for name in ("dropped", "freed_bytes"):
            again[name] += report.get(name, 0)
        report |= again
    if as_json:
        _print_json(report)
        return
    if storage:
        print(f"dropped {report['dropped_on_disk']} blocks on disk")
    if "dropped" in report:
        freed = bytes_words(report["freed_bytes"])
        print(f"dropped {report['dropped']} blocks ({freed}), {report['left']} left")


def _ids_in_pool(directory: str) -> set[str]:
    with attached(directory, read_only=True) as pool:
        return {id_.hex() for id_, _, _, _ in pool.namespaces()}


def _chosen(prefix: str | None, ids: set[str]) -> bytes | None:
    """The namespace that is meant; None: all."""
    return None if prefix is None else bytes.fromhex(_complete_id(prefix, sorted(ids)))


def _clear_pool(directory: str, chosen: bytes | None) -> dict[str, int]:
    with attached(directory, read_only=False) as pool:
        before = pool.stats()["used_bytes"]
        dropped = pool.clear() if chosen is None else pool.drop_namespace(chosen)
        stats = pool.stats()
    freed = max(0, before - stats["used_bytes"])
    return {"dropped": dropped, "freed_bytes": freed, "left": stats["blocks"]}


def _complete_id(prefix: str, ids: list[str]) -> str:
    """The one id that begins with `prefix`. Raises ConfigError when none or several do."""
    found = [id_ for id_ in ids if id_.startswith(prefix.lower())]
    if len(found) == 1 and prefix:
        return found[0]
    known = ", ".join(id_[:12] for id_ in ids) or "none"
    many = f"the beginning of one id (it fits {len(found)})"
    raise ConfigError.build(
        "choosing a namespace",
        many if found and prefix else "the beginning of an id",
        prefix,
        f"There are: {known}.",
    )


@app.command()
def verify(
    path: PathOption = None,
    storage_path: StorageOption = None,
    fix: Annotated[bool, typer.Option("--fix", help="Drop the blocks that are bad.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every block on disk and compare its checksum.

    Exit code 1 when one is bad (also when --fix dropped it), unreadable, or not looked at.
    """
    with attached_store(_directory(path), storage_path or default_storage()) as store:
        report = verify_store(store, fix=fix, show_progress=sys.stderr.isatty())
    _print_json(report) if as_json else print(verify_words(report, fixed=fix))
    if report["bad"] or report["io_errors"] or not report["complete"]:
        raise typer.Exit(EXIT_BROKEN)


@app.command()
def bench(
    path: PathOption = None,
    storage_path: StorageOption = None,
    mib: Annotated[int, typer.Option(min=16, metavar="MIB", help="Moved at a time.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Measure what host memory and, given a directory, the disk of this machine can do.

    In folders of its own inside those named, removed afterwards.
    """
    rows = measure_pool(_directory(path), mib << 20)
    if storage_path is not None:
        rows += measure_disk(_directory(path), storage_path, mib << 20)
    _print_json(rows) if as_json else Console().print(bench_table(rows))


@app.command()
def doctor(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Check every invariant of a pool. Exit code 1 when one is violated."""
    with attached(_directory(path), read_only=True) as pool:
        violations = pool.check()
        poisoned = pool.poisoned
        blocks, epoch = pool.stats()["blocks"], pool.epoch
        where = pool.path
    if as_json:
        found = {"path": where, "blocks": blocks, "epoch": epoch}
        _print_json(found | {"poisoned": poisoned, "violations": violations})
    else:
        for violation in violations:
            print(violation)
        state = "poisoned" if poisoned else f"{len(violations)} violations"
        print(f"{where}: {blocks} blocks, epoch {epoch}: {state}")
    if violations or poisoned:
        raise typer.Exit(EXIT_BROKEN)
