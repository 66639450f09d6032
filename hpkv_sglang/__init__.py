"""hpkv_sglang: host and disk tiers for SGLang's KV cache.

`register()` is the whole public surface: SGLang's plugin loader calls it through the entry point,
a fork without the loader calls it by hand, and calling it twice is harmless. Importing the package
imports nothing else: every SGLang process loads it, also those that never use it.
"""

from __future__ import annotations

__all__ = ["__version__", "register"]

__version__ = "0.1.0"


def register() -> None:
    """Hook the plugin into SGLang in this process. See `hpkv_sglang.plugin.register`."""
    from hpkv_sglang.plugin import register as register_plugin

    register_plugin()
