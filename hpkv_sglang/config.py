"""Settings: what the flags and environment variables of a server mean together.

Owns: `Settings` (frozen), and all access to the process environment. The table of flags is
`hpkv_sglang.flags`.

Invariants: a flag wins over the environment, the environment over the default. `pool_bytes` None
means "the user gave no size", which differs from giving the default: a second server without a
size adopts the pool's.

Threading: import-time constants and frozen objects. `export_switch` writes the environment and
belongs to the launcher's main thread, before it spawns.
"""

from __future__ import annotations

import argparse
import enum
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from hpkv_sglang.errors import ConfigError
from hpkv_sglang.flags import (
    FLAGS,
    SWITCH,
    CrossTp,
    Flag,
    PromotePolicy,
    VerifyPolicy,
    WritePolicy,
    flag_rows,
    flags_markdown,
    format_size,
    parse_size,
)

__all__ = [
    "FLAGS",
    "POOL_BYTES_DEFAULT",
    "SWITCH",
    "CrossTp",
    "Flag",
    "PromotePolicy",
    "Settings",
    "VerifyPolicy",
    "WritePolicy",
    "add_flags",
    "default_pool_directory",
    "environment_value",
    "export_switch",
    "flag_rows",
    "flags_given",
    "flags_markdown",
    "format_size",
    "parse_size",
    "switched_on",
    "variables_set",
]

POOL_BYTES_DEFAULT = 8 << 30


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
    cross_tp: CrossTp
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
            "pool_directory": default_pool_directory(),
            "write_policy": WritePolicy.WRITE_THROUGH,
            "verify": VerifyPolicy.EPOCH,
            "storage_directory": None,
            "storage_bytes": None,
            "promote_policy": PromotePolicy.TIMEOUT,
            "cross_tp": CrossTp.ON,
        }
        if enabled:
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
            "cross_tp": CrossTp(plain["cross_tp"]),
        }
        return cls(**{**plain, **enums})


def environment_value(field: str, environment: Mapping[str, str] | None = None) -> Any:
    """What the environment says of one field of `Settings`; None when it says nothing.

    Raises ConfigError when it is malformed. Other variables are not looked at.
    """
    flag = next(flag for flag in FLAGS if flag.field == field)
    return _from_environment(flag, os.environ if environment is None else environment)


def variables_set(prefixes: tuple[str, ...], words: tuple[str, ...]) -> dict[str, str]:
    """What is set of the process's variables that begin with a prefix and have a word in them."""
    return {
        name: value
        for name, value in os.environ.items()
        if value and name.startswith(prefixes) and any(word in name for word in words)
    }


def default_pool_directory() -> str:
    """Where the pool is when nobody says."""
    return f"/dev/shm/hpkv-{os.getuid()}"


def _from_environment(flag: Flag, environment: Mapping[str, str]) -> Any:
    text = environment.get(flag.environment, "")
    if not text.strip():  # as compose files and charts write "not set"
        return None
    try:
        return flag.parse(text)
    except ConfigError as error:
        raise ConfigError(f"environment variable {flag.environment}: {error}") from error


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
