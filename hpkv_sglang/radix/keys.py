"""The extra key of a request, framed: caller's key, adapter content and adapter id apart.

Owns: `RequestKeys`, the digests of loaded adapters and the hooks that need them.

SGLang appends the adapter's id to the caller's extra key without a separator, in the device tree
too, and derives the id of an adapter given at start from its name and path. So a key could alias
an adapter, and an adapter replaced on disk would hit the old one's KV.

Invariants: an adapter has its digest before a request can name it (hooks on loading); an adapter
that cannot be read gets a random digest, which only its own process shares.

Threading: the scheduler's thread. Reads every byte of an adapter once, when it is loaded.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from hpkv_sglang.errors import IdentityError
from hpkv_sglang.fingerprint import adapter_fingerprint
from hpkv_sglang.hooks import Hook
from hpkv_sglang.namespace import framed_extra_key

__all__ = ["RequestKeys", "hooks"]

logger = logging.getLogger(__name__)

_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager."


class RequestKeys:
    """Digests of adapters by LoRA id, for as long as the process lives: ids are not reused."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def adapter_loaded(self, result: Any, _manager: Any, lora_ref: Any) -> None:
        """AFTER LoRAManager._load_lora_adapter: the adapter is what its files contain."""
        if result.success:
            self._digests[lora_ref.lora_id] = _content_of(lora_ref.lora_path)

    def adapter_pushed(
        self, result: Any, _manager: Any, lora_ref: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        """AFTER LoRAManager._load_lora_adapter_from_tensors: there are no files to read again."""
        if result.success:
            self._digests[lora_ref.lora_id] = _private()

    def frame(self, _result: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
        """AFTER Req.__init__: rewrite `req.extra_key`. SGLang takes "" and None for the same."""
        lora_id: str | None = req.lora_id
        if lora_id is None:
            if req.extra_key:
                req.extra_key = framed_extra_key(req.extra_key, None, None)
            return
        caller = req.extra_key.removesuffix(lora_id)
        req.extra_key = framed_extra_key(caller, self._digest(lora_id), lora_id)

    def _digest(self, lora_id: str) -> str:
        if lora_id not in self._digests:
            self._digests[lora_id] = _private()
        return self._digests[lora_id]

    def hooks(self) -> tuple[Hook, ...]:
        """What to register in a scheduler process, before it loads adapters."""
        return (
            Hook("sglang.srt.managers.schedule_batch.Req.__init__", self.frame),
            Hook(_MANAGER + "_load_lora_adapter", self.adapter_loaded),
            Hook(_MANAGER + "_load_lora_adapter_from_tensors", self.adapter_pushed),
        )


def hooks() -> tuple[Hook, ...]:
    """The hooks of a process that has one scheduler."""
    return RequestKeys().hooks()


def _content_of(path: str) -> str:
    try:
        directory = Path(path)
        if not directory.is_dir():
            directory = Path(snapshot_download(path, local_files_only=True))
        return adapter_fingerprint(directory)
    except (IdentityError, OSError, ValueError) as error:
        logger.warning("hpkv: KV of the adapter %s stays in this process: %s", path, error)
        return _private()


def _private() -> str:
    return f"private:{secrets.token_hex(16)}"
