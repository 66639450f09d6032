"""The error tree: what may be raised out of this package when the world or the user is at fault.

Owns: one root, `HpkvError`, and one subclass per kind of caller reaction. Expected outcomes (miss,
full, busy, bad checksum) are return values, never errors; a broken invariant of our own is neither
(it poisons the tier). Every message names the operation, the object, the value seen and the remedy;
`HpkvError.build` makes leaving one of them out impossible.

Threading: plain exceptions, safe to raise and to pickle anywhere.
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "ConfigError",
    "HookError",
    "HpkvError",
    "IdentityError",
    "LayoutError",
    "PoolError",
    "RefusedError",
]


class HpkvError(Exception):
    """The root. Catch this to catch everything the package raises on purpose."""

    @classmethod
    def build(cls, operation: str, subject: str, seen: object, remedy: str) -> Self:
        """An error whose message says what was done, to what, what was found, and what helps.

        `seen` is shown with `repr`, so that an empty string or a stray blank is visible.
        """
        return cls(f"{operation}: {subject}: found {seen!r}. {remedy}")


class ConfigError(HpkvError):
    """A flag or an environment variable has a value nobody can use."""


class RefusedError(HpkvError):
    """SGLang is configured for something that the tiers do not support; names both sides."""


class HookError(HpkvError):
    """A hook into SGLang did not take, so the plugin would be half on."""


class IdentityError(HpkvError):
    """The content of a checkpoint or of an adapter cannot be read for its fingerprint."""


class LayoutError(HpkvError):
    """A device pool's tensors are not laid out as its class promises."""


class PoolError(HpkvError):
    """The shared pool cannot be created or attached.

    `kind` is one stable word for programs (for example `size`, `owner`, `version`, `space`);
    the message is for people.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message
