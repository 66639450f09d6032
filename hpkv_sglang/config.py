"""Settings: every flag and environment variable of the plugin, in one table.

Owns: `FLAGS` (the only list of flags: argparse, `hpkv flags` and the README table derive from it),
`Settings` (what the flags mean, frozen), and all access to the process environment.

Invariants: a flag wins over the environment, the environment over the default. A value nobody
can use is a `ConfigError` that lists the usable ones; nothing is ever guessed. `pool_bytes` None
means "the user gave no size", which differs from giving the default: a second server without a
size adopts the pool's.

Threading: import-time constants and frozen objects. `export_switch` writes the environment and
belongs to the launcher's main thread, before it spawns.
"""

from __future__ import annotations

import argparse
import enum
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, Self

from hpkv_sglang.errors import ConfigError

__all__ = [
    "FLAGS",
    "POOL_BYTES_DEFAULT",
    "SWITCH",
    "Flag",
    "PromotePolicy",
    "Settings",
    "VerifyPolicy",
    "WritePolicy",
    "add_flags",
    "export_switch",
    "flag_rows",
    "flags_given",
    "flags_markdown",
    "format_size",
    "parse_size",
    "switched_on",
]

SWITCH = "SGLANG_ENABLE_HPKV"
POOL_BYTES_DEFAULT = 8 << 30

# Tiers and policies that CT-HPKV users know and this version does not have: silently ignoring one
# of them would promise a tier that is not there.
_NOT_BUILT = {"HPKV_CROSS_TP": "reuse across tensor-parallel sizes"}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


class WritePolicy(enum.Enum):
    """When a prefix is written to the host pool."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"

    @property
    def hit_threshold(self) -> int:
        """How many hits a prefix needs to be written before it is evicted."""
        return {"write_through": 1, "write_through_selective": 2}.get(self.value, 1 << 30)


class VerifyPolicy(enum.Enum):
    """When the checksum of a host block is checked before the block is served."""

    EPOCH = "epoch"
    ALWAYS = "always"


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
        help="Directory of the disk tier: cold host blocks are kept there, also over a reboot.",
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
        "take), best_effort (not at all), wait_complete (60 s at most).",
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
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for. Made once by the launcher and carried to every scheduler.

    `launch_id` is a random word the launcher adds: all processes of one server share it and no
    two servers do, so it names what only this server may reuse.
    """

    enabled: bool
    pool_bytes: int | None
    pool_directory: str
    write_policy: WritePolicy
    verify: VerifyPolicy
    storage_directory: str | None
    storage_bytes: int | None
    promote_policy: PromotePolicy
    launch_id: str = ""

    @classmethod
    def resolve(
        cls, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> Self:
        """Merge parsed flags (by field; absent or None means not given), environment, defaults.

        Raises ConfigError. When the plugin is off, the environment is asked for the switch only.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        names = os.environ if environment is None else environment
        enabled = given.get("enabled", _from_environment(FLAGS[0], names) or False)
        values: dict[str, Any] = {
            "pool_bytes": None,
            "pool_directory": f"/dev/shm/hpkv-{os.getuid()}",
            "write_policy": WritePolicy.WRITE_THROUGH,
            "verify": VerifyPolicy.EPOCH,
            "storage_directory": None,
            "storage_bytes": None,
            "promote_policy": PromotePolicy.TIMEOUT,
        }
        if enabled:
            _refuse_not_built(names)
            for flag in FLAGS[1:]:
                value = _from_environment(flag, names)
                if value is not None:
                    values[flag.field] = value
        values |= given
        if enabled and values["storage_bytes"] is not None and values["storage_directory"] is None:
            raise ConfigError.build(
                "reading the settings of the disk tier",
                "--hpkv-storage-path, although a size was given",
                format_size(values["storage_bytes"]),
                "Name the directory, or leave the size out.",
            )
        return cls(**(values | {"enabled": enabled}))

    @property
    def pool_bytes_to_create(self) -> int:
        """The size of a pool that does not exist yet."""
        return POOL_BYTES_DEFAULT if self.pool_bytes is None else self.pool_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the trip from the launcher to its schedulers."""
        plain = asdict(self)
        return {k: v.value if isinstance(v, enum.Enum) else v for k, v in plain.items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Raises ConfigError on a missing or unknown key."""
        expected = {field.name for field in fields(cls)}
        if plain.keys() != expected:
            raise ConfigError.build(
                "reading the launcher's settings",
                "linker_extra_config",
                sorted(plain),
                f"Expected exactly {sorted(expected)}: run one version of hpkv-sglang everywhere.",
            )
        enums = {
            "write_policy": WritePolicy(plain["write_policy"]),
            "verify": VerifyPolicy(plain["verify"]),
            "promote_policy": PromotePolicy(plain["promote_policy"]),
        }
        return cls(**{**plain, **enums})


def _from_environment(flag: Flag, environment: Mapping[str, str]) -> Any:
    text = environment.get(flag.environment)
    if text is None:
        return None
    try:
        return flag.parse(text)
    except ConfigError as error:
        raise ConfigError(f"environment variable {flag.environment}: {error}") from error


def _refuse_not_built(environment: Mapping[str, str]) -> None:
    for name, feature in _NOT_BUILT.items():
        if name in environment:
            raise ConfigError.build(
                "reading the environment",
                name,
                environment[name],
                f"Unset it: {feature} is not built yet in this version of hpkv-sglang.",
            )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to `parser`, each with the default None ("not given")."""

    def value_of(flag: Flag) -> Callable[[str], Any]:
        def parse(text: str) -> Any:
            try:
                return flag.parse(text)
            except ConfigError as error:  # argparse prints this one in full, other errors not
                raise argparse.ArgumentTypeError(str(error)) from error

        return parse

    group = parser.add_argument_group("hpkv", "Host and disk tiers for the KV cache (hpkv-sglang).")
    for flag in FLAGS:
        text = f"{flag.help} Default: {flag.default}.".replace("%", "%%")
        if flag.is_switch:
            group.add_argument(flag.name, action="store_true", default=None, help=text)
        else:
            group.add_argument(
                flag.name, type=value_of(flag), default=None, metavar=flag.metavar, help=text
            )


def flags_given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The flags the user gave, by field of `Settings`."""
    values = vars(namespace)
    return {f.field: values[f.dest] for f in FLAGS if values.get(f.dest) is not None}


def switched_on(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the environment turns the plugin on. Raises ConfigError on a malformed switch."""
    names = os.environ if environment is None else environment
    return bool(_from_environment(FLAGS[0], names))


def export_switch(environment: MutableMapping[str, str] | None = None) -> None:
    """Turn the switch on for the processes this one will spawn."""
    (os.environ if environment is None else environment)[SWITCH] = "1"


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
