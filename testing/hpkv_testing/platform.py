"""The entry point of the SGLang platform `hpkv_cpu`.

SGLang calls `activate` in every process. Without SGLANG_PLATFORM it asks all installed platforms
and takes the only one that answers, so this one answers only when it was chosen by name: a GPU
server in the same environment must never turn into a CPU server.
"""

import os

NAME = "hpkv_cpu"


def activate() -> str | None:
    """Return the platform class as `module:Class`, or None when the user did not select it."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    return "hpkv_testing.cpu_platform:PlainTorchPlatform"
