"""What `hpkv stat` says: a pool's state as plain values with stable names, and as tables.

Invariant: the keys of `pool_report` are an interface. New ones may appear, none changes its name,
meaning or unit; sizes are bytes. Values may be of slightly different moments: other processes go on
while they are read. Threading: pure functions, except that `pool_report` asks the pool.
"""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from hpkv_sglang._core import Pool
from hpkv_sglang.namespace import Namespace

__all__ = [
    "bytes_words",
    "namespace_reports",
    "namespace_table",
    "pool_report",
    "pool_tables",
    "verify_words",
    "words_table",
]

# As the pool counts them; the report adds identity and namespaces.
_STATE = ("used_bytes", "reserved_bytes", "blocks", "pinned", "writing", "quarantined", "clients")
_TOTALS = (
    "hits",
    "misses",
    "stored",
    "evictions",
    "full",
    "busy",
    "lock_timeouts",
    "bad_checksums",
    "takeovers",
    "rebuilds",
    "reaped",
    "spilled_bytes",
    "loaded_bytes",
)
# Of the disk tier; the keys of `storage` are those without the prefix.
_STORAGE = (
    "disk_bytes",
    "disk_used_bytes",
    "disk_blocks",
    "disk_pending_blocks",
    "disk_regions",
    "disk_regions_in_use",
    "disk_regions_unknown",
    "disk_demoted_bytes",
    "disk_promoted_bytes",
    "disk_errors",
)
RATE_INTERVAL_S = 0.5


def pool_report(pool: Pool) -> dict[str, Any]:
    """JSON-ready values of one pool and its namespaces, the fullest namespace first."""
    stats = pool.stats()
    report: dict[str, Any] = {
        "path": pool.path,
        "uuid": pool.uuid.hex(),
        "pool_bytes": pool.pool_bytes,
        "epoch": pool.epoch,
        "poisoned": pool.poisoned,
    }
    report |= {key: stats[key] for key in (*_STATE, *_TOTALS)}
    # This command is a client too, and not one the user asked about.
    report["clients"] = max(0, stats["clients"] - 1)
    report["storage"] = _storage_report(pool, stats) if stats["disk_regions"] else None
    report["namespaces"] = namespace_reports(pool)
    return report


def namespace_reports(pool: Pool) -> list[dict[str, Any]]:
    """JSON-ready values of a pool's namespaces, the fullest first."""
    reports = (_namespace_report(*row) for row in pool.namespaces())
    return sorted(reports, key=lambda report: -report["bytes"])


def _storage_report(pool: Pool, before: dict[str, Any]) -> dict[str, Any]:
    """The disk tier; the rates are those of the last half second, which this call waits for."""
    begin = time.monotonic()
    time.sleep(RATE_INTERVAL_S)
    stats = pool.stats()
    elapsed_s = time.monotonic() - begin
    report = {key.removeprefix("disk_"): stats[key] for key in _STORAGE}
    for name in ("demoted", "promoted"):
        grown = stats[f"disk_{name}_bytes"] - before[f"disk_{name}_bytes"]
        report[f"{name}_bytes_per_s"] = round(grown / elapsed_s)
    return report


def verify_words(report: dict[str, Any], *, fixed: bool) -> str:
    """What `hpkv verify` found, in one line."""
    bad = f"{report['bad']} bad{' (dropped)' if fixed and report['bad'] else ''}"
    part = "" if report["complete"] else f" of {report['total_blocks']}: not all of them"
    return (
        f"read {report['blocks']} blocks ({bytes_words(report['bytes'])}){part}: {bad}, "
        f"{report['io_errors']} unreadable, {report['stale']} replaced meanwhile"
    )


def _namespace_report(
    id_: bytes, descriptor: bytes, block_bytes: int, blocks: int
) -> dict[str, Any]:
    words = Namespace.unpack(id_, descriptor).words()
    return {
        "id": id_.hex(),
        "name": _namespace_name(words),
        "block_bytes": block_bytes,
        "blocks": blocks,
        "bytes": block_bytes * blocks,
        "descriptor": words,
    }


def _namespace_name(words: dict[str, Any]) -> str:
    """One line for people: model, layout, number formats, page size, shards."""
    if not words:
        return "unknown"
    parallel = words.get("parallel") or {}
    shards = " ".join(f"{name}{size}" for name, size in parallel.items() if size != 1)
    parts = [
        str(words.get("model") or "unknown"),
        str(words.get("layout", "")),
        str(words.get("kv_dtype") or words.get("dtype", "")),
        f"page {words['page_size']}" if "page_size" in words else "",
        shards,
    ]
    return ", ".join(part for part in parts if part)


def bytes_words(count: int) -> str:
    """`1.5 GiB`: three digits are enough for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}" if unit != "B" else f"{count} B"
        amount /= 1024
    return f"{amount:.3g} TiB"


def pool_tables(report: dict[str, Any]) -> RenderableType:
    """The report for a terminal."""
    summary = Table(title=f"hpkv pool {report['path']}", show_header=False, title_justify="left")
    summary.add_column(style="bold")
    summary.add_column()
    share = 100 * report["used_bytes"] / report["pool_bytes"] if report["pool_bytes"] else 0.0
    asked = report["hits"] + report["misses"]
    hit_share = f" ({100 * report['hits'] / asked:.1f} % hits)" if asked else ""
    rows = {
        "size": bytes_words(report["pool_bytes"]),
        "used": f"{bytes_words(report['used_bytes'])} ({share:.1f} %)",
        "blocks": f"{report['blocks']} ({report['pinned']} pinned, {report['writing']} being "
        f"written, {report['quarantined']} in quarantine)",
        "clients": f"{report['clients']} (epoch {report['epoch']})",
        "lookups": f"{report['hits']} hits, {report['misses']} misses{hit_share}",
        "stored": f"{bytes_words(report['spilled_bytes'])} in {report['stored']} blocks, "
        "those from disk included",
        "loaded": bytes_words(report["loaded_bytes"]),
        "trouble": f"{report['evictions']} evicted, {report['full']} found it full, "
        f"{report['busy']} found it busy, {report['lock_timeouts']} lock timeouts, "
        f"{report['bad_checksums']} bad checksums",
        "deaths": f"{report['reaped']} clients, {report['takeovers']} locks recovered, "
        f"{report['rebuilds']} index shards rebuilt",
    }
    if report["storage"] is not None:
        rows |= _storage_rows(report["storage"])
    if report["poisoned"]:
        rows["state"] = "[red]poisoned: off until no server is attached, then recreated[/red]"
    for name, value in rows.items():
        summary.add_row(name, value)
    return Group(summary, namespace_table(report["namespaces"]))


def _storage_rows(storage: dict[str, Any]) -> dict[str, str]:
    share = 100 * storage["used_bytes"] / storage["bytes"] if storage["bytes"] else 0.0
    unknown = storage["regions_unknown"]
    return {
        "disk": f"{bytes_words(storage['bytes'])}, {bytes_words(storage['used_bytes'])} used "
        f"({share:.1f} %) by {storage['blocks']} blocks; {storage['pending_blocks']} blocks of "
        "the pool are not there (yet)",
        "disk regions": f"{storage['regions']}, {storage['regions_in_use']} in use"
        + (f", {unknown} not looked at yet" if unknown else ""),
        "demoted": f"{bytes_words(storage['demoted_bytes'])}, now "
        f"{bytes_words(storage['demoted_bytes_per_s'])}/s",
        "promoted": f"{bytes_words(storage['promoted_bytes'])}, now "
        f"{bytes_words(storage['promoted_bytes_per_s'])}/s",
        "disk errors": str(storage["errors"]),
    }


def words_table(namespace: dict[str, Any]) -> RenderableType:
    """All that is known about one namespace, for a terminal."""
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("id", namespace["id"])
    table.add_row("blocks", f"{namespace['blocks']} of {bytes_words(namespace['block_bytes'])}")
    for name, value in namespace["descriptor"].items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    return table


def namespace_table(namespaces: list[dict[str, Any]]) -> RenderableType:
    """One line for each, for a terminal."""
    table = Table(title="namespaces", title_justify="left")
    table.add_column("id", no_wrap=True)
    table.add_column("what", overflow="fold")
    for name in ("blocks", "used", "per block"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in namespaces:
        table.add_row(
            entry["id"][:12],
            entry["name"],
            str(entry["blocks"]),
            bytes_words(entry["bytes"]),
            bytes_words(entry["block_bytes"]),
        )
    return table
