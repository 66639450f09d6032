"""Every flag and environment variable of the plugin, in one table, and how their values read.

Owns: `FLAGS`, the only list of flags: argparse, `hpkv flags` and the README's table derive from it.

Invariant: a value nobody can use is a `ConfigError` that lists the usable ones; nothing is ever
guessed. Import-time constants and pure functions.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hpkv_sglang.errors import ConfigError

SWITCH = "SGLANG_ENABLE_HPKV"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


class WritePolicy(enum.Enum):
    """When a prefix is written to the host pool."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class VerifyPolicy(enum.Enum):
    """When the checksum of a host block is checked before the block is served."""

    EPOCH = "epoch"
    ALWAYS = "always"


class CrossTp(enum.Enum):
    """Whether blocks are reused that a server of another kind wrote."""

    ON = "on"
    OFF = "off"


class PromotePolicy(enum.Enum):
    """How long a request waits for its blocks to be read from disk."""

    TIMEOUT = "timeout"
    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"


def parse_size(text: str) -> int:
    """Bytes of a size such as `8g`, `512m`, `1.5t` or `1048576` (binary units, rounded down)."""
    match = _SIZE.fullmatch(text.strip())
    bytes_count = int(Fraction(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if match is None or bytes_count <= 0 or ("." in match[1] and not match[2]):
        raise ConfigError.build(
            "reading a size",
            "number of bytes",
            text,
            "Use a positive number with k, m, g or t (8g, 512m, 1.5t), or plain bytes.",
        )
    return bytes_count


def format_size(bytes_count: int) -> str:
    """The shortest spelling that `parse_size` reads back to the same number."""
    for unit, factor in reversed(_UNITS.items()):
        if bytes_count and bytes_count % factor == 0:
            return f"{bytes_count // factor}{unit}"
    return str(bytes_count)


def _parse_switch(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ConfigError.build(
        "reading a switch", "yes or no", text, f"Use one of {', '.join((*_TRUE, *_FALSE[:-1]))}."
    )


def _directory(what: str, remedy: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not text.startswith("/") or "\0" in text:
            raise ConfigError.build("reading a path", f"directory of the {what}", text, remedy)
        return text.rstrip("/") or "/"

    return parse


def _choice(choices: type[enum.Enum]) -> Callable[[str], enum.Enum]:
    def parse(text: str) -> enum.Enum:
        valid = [member.value for member in choices]
        if text not in valid:
            raise ConfigError.build(
                "reading a choice", choices.__name__, text, f"Use one of {', '.join(valid)}."
            )
        return choices(text)

    return parse


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One row of the table. `default` is shown; `Settings` holds the value behind it."""

    name: str
    environment: str
    field: str
    default: str
    parse: Callable[[str], Any]
    help: str
    metavar: str = ""

    @property
    def dest(self) -> str:
        """The attribute argparse stores this flag under."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """True for a flag that takes no value."""
        return not self.metavar


FLAGS = (
    Flag(
        name="--enable-hpkv",
        environment=SWITCH,
        field="enabled",
        default="off",
        parse=_parse_switch,
        help="Turn the tiers on: evicted prefixes spill into a pool shared by the node.",
    ),
    Flag(
        name="--hpkv-mem-pool-size",
        environment="HPKV_KV_MEM_POOL_SIZE",
        field="pool_bytes",
        default="8g, or the size of the pool that is already there",
        parse=parse_size,
        help="Bytes of the shared host pool (8g, 512m, 1.5t, or plain bytes).",
        metavar="SIZE",
    ),
    Flag(
        name="--hpkv-share-mem-path",
        environment="HPKV_SHARE_MEM_FILE_PATH",
        field="pool_directory",
        default="/dev/shm/hpkv-<uid>",
        parse=_directory(
            "pool", "Use an absolute path on tmpfs or hugetlbfs, for example /dev/shm/hpkv."
        ),
        help="Directory on tmpfs or hugetlbfs that holds the pool file.",
        metavar="DIR",
    ),
    Flag(
        name="--hpkv-storage-path",
        environment="HPKV_KV_STORAGE_PATH",
        field="storage_directory",
        default="none: no disk tier",
        parse=_directory("disk tier", "Use an absolute path on a local disk."),
        help="Directory of the disk tier: cold host blocks are kept there, and survive a reboot.",
        metavar="DIR",
    ),
    Flag(
        name="--hpkv-storage-size",
        environment="HPKV_KV_STORAGE_SIZE",
        field="storage_bytes",
        default="half of the free space when the directory is first used",
        parse=parse_size,
        help="Bytes the disk tier may use.",
        metavar="SIZE",
    ),
    Flag(
        name="--hpkv-promote-policy",
        environment="HPKV_PROMOTE_POLICY",
        field="promote_policy",
        default=PromotePolicy.TIMEOUT.value,
        parse=_choice(PromotePolicy),
        help="How long a request waits for the disk: timeout (about as long as computing would "
        "take; 2 s where that is not known), best_effort (not at all), wait_complete (60 s at "
        "most).",
        metavar="POLICY",
    ),
    Flag(
        name="--hpkv-write-policy",
        environment="HPKV_WRITE_POLICY",
        field="write_policy",
        default=WritePolicy.WRITE_THROUGH.value,
        parse=_choice(WritePolicy),
        help="When a prefix is spilled: write_through (on insert), write_through_selective "
        "(on the second hit), write_back (on eviction).",
        metavar="POLICY",
    ),
    Flag(
        name="--hpkv-verify",
        environment="HPKV_VERIFY",
        field="verify",
        default=VerifyPolicy.EPOCH.value,
        parse=_choice(VerifyPolicy),
        help="When host blocks are re-checked before use: epoch (once after a crash or a restart) "
        "or always.",
        metavar="WHEN",
    ),
    Flag(
        name="--hpkv-cross-tp",
        environment="HPKV_CROSS_TP",
        field="cross_tp",
        default=CrossTp.ON.value,
        parse=_choice(CrossTp),
        help="Reuse blocks written under another tensor-parallel size, or on another kind of "
        "device: on (numbers may differ from computing by rounding) or off.",
        metavar="WHEN",
    ),
)


def flag_rows() -> list[tuple[str, str, str, str]]:
    """(flag, environment, default, meaning) of every flag, for tables."""
    return [(flag.name, flag.environment, flag.default, flag.help) for flag in FLAGS]


def flags_markdown() -> str:
    """The flag table of the README."""
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for flag in FLAGS:
        variable = f"{flag.environment}=1" if flag.is_switch else flag.environment
        lines.append(f"| `{flag.name}` | `{variable}` | {flag.default} | {flag.help} |")
    return "\n".join(lines)
