"""Weight updates and memory release close the tiers until the tree has been reset.

Owns: `WeightWatch`, the hooks on SGLang's weight updater.

    hook                              before                    opens again
    update_weights_from_disk P        suspend, arm content(P)   in the reset of its flush
    update_weights_from_* (pushed)    suspend, arm private      in the reset of its flush
    begin_weight_update               suspend, arm private      at the next reset
    end_weight_update                 as begin, if a flush      in a flush of ours
                                      opened them since
    release_memory_occupation         suspend                   in the flush after resume

Memory released without a backup loses the weights, and makes their version private.
"Arm" is `tree_cache.reopen(version)`: the next `tree_cache.reset()` opens the tiers under that
version. So an update without a flush, or whose flush was refused, leaves the tiers closed while
the old KV lives, and an update that failed half-way comes back under a version nobody shares.

Invariants: the tiers are closed before the first weight changes. The version is the content of the
files when the update replaced every tensor from files, so returning to earlier weights finds their
blocks again; else it is private, and equal on all ranks of a replica, which see the same updates
and count each, whatever one of them can read of it.

Threading: the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hpkv_sglang.hooks import Hook, HookType
from hpkv_sglang.namespace import private_weights
from hpkv_sglang.radix.identity import (
    RankIdentity,
    launch_id_of,
    read_weights,
    replica_name,
    view_of,
    weights_of_files,
)

__all__ = ["WeightWatch", "hooks"]

logger = logging.getLogger(__name__)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_KV_MEMORY = "kv_cache"
_WEIGHT_MEMORY = "weights"
# What SGLang reports when only the flush failed, and before it has touched a weight. Anything else
# may have left a mixture: its roll-back reads the new path again.
_UPDATED = "Weights were updated"
_UNTOUCHED = ("Failed to get model loader", "Failed to get weights iterator")

Original = Callable[..., Any]


class WeightWatch:
    """Follows the weights of one scheduler. `_latest` is the version last armed, None at start."""

    def __init__(self) -> None:
        self._latest: str | None = None
        self._updates = 0

    def hooks(self) -> tuple[Hook, ...]:
        """What to register in a scheduler process, before it builds its weight updater."""
        around = {
            "update_weights_from_disk": self.from_disk,
            "update_weights_from_distributed": self.pushed_in_session,
            "update_weights_from_tensor": self.pushed_in_session,
            "update_weights_from_ipc": self.pushed,
            "begin_weight_update": self.begin,
            "end_weight_update": self.end,
            "release_memory_occupation": self.release,
            "resume_memory_occupation": self.resume,
        }
        return tuple(Hook(_UPDATER + n, f, HookType.AROUND) for n, f in around.items())

    # ---- hooks ----

    def from_disk(self, original: Original, updater: Any, request: Any) -> Any:
        """AROUND update_weights_from_disk."""
        tree = updater.scheduler.tree_cache
        before = self._version(tree)
        self._close(tree, "update_weights_from_disk", self._content(updater, request))
        result = original(updater, request)
        message = str(result.message)
        if not result.success and not message.startswith(_UPDATED):
            untouched = message.startswith(_UNTOUCHED)
            logger.warning("hpkv: closed until the next flush, after %r", message[:80])
            self._close(tree, "failed update", before if untouched else self._private(updater))
        return result

    def pushed_in_session(self, original: Original, updater: Any, request: Any) -> Any:
        """AROUND the updates that SGLang rejects outside a session, before it does anything."""
        if updater._session is None:
            return original(updater, request)
        return self.pushed(original, updater, request)

    def pushed(self, original: Original, updater: Any, request: Any) -> Any:
        """AROUND an update whose weights are in no file."""
        self._close(updater.scheduler.tree_cache, "weights pushed", self._private(updater))
        return original(updater, request)

    def begin(self, original: Original, updater: Any, request: Any) -> Any:
        """AROUND begin_weight_update: from here on weights may change without a further call."""
        if updater._session is not None:
            return original(updater, request)
        self._close(updater.scheduler.tree_cache, "begin_weight_update", self._private(updater))
        return original(updater, request)

    def end(self, original: Original, updater: Any, request: Any) -> Any:
        """AROUND end_weight_update, which may finish the weights: what was computed since a flush
        inside the session is not what they compute.
        """
        tree = updater.scheduler.tree_cache
        opened = updater._session is not None and tree.tiers.suspended is None
        if opened:
            self._close(tree, "end_weight_update", self._private(updater))
        result = original(updater, request)
        if opened:
            _flush(updater)
        return result

    def release(self, original: Original, updater: Any, request: Any) -> Any:
        """AROUND release_memory_occupation, which unmaps KV memory before it flushes.

        Nothing is armed before that flush: it must not open tiers over unmapped memory.
        """
        tree = updater.scheduler.tree_cache
        weights_lost = _covers(request, _WEIGHT_MEMORY) and _weights_are_lost(updater)
        self._latest = self._private(updater) if weights_lost else self._version(tree)
        if weights_lost or _covers(request, _KV_MEMORY):
            tree.suspend("memory released")
        result = original(updater, request)
        if weights_lost:
            tree.reopen(self._latest)
        return result

    def resume(self, original: Original, updater: Any, request: Any) -> Any:
        """AROUND resume_memory_occupation: the tree was emptied at release; a flush opens again."""
        result = original(updater, request)
        if _covers(request, _KV_MEMORY):
            tree = updater.scheduler.tree_cache
            tree.reopen(self._version(tree))
            _flush(updater)
        return result

    # ---- versions ----

    def _close(self, tree: Any, reason: str, version: str) -> None:
        tree.suspend(reason)
        self._latest = version
        tree.reopen(version)

    def _version(self, tree: Any) -> str:
        identity: RankIdentity = tree.tiers.identity
        return identity.weight_version if self._latest is None else self._latest

    def _private(self, updater: Any) -> str:
        self._updates += 1
        view = view_of(updater.scheduler.server_args)
        return private_weights(launch_id_of(view), "update", replica_name(), self._updates)

    def _content(self, updater: Any, request: Any) -> str:
        """The version after loading `request.model_path`: private if it may leave old tensors."""
        identity: RankIdentity = updater.scheduler.tree_cache.tiers.identity
        view = view_of(updater.scheduler.server_args)
        private = self._private(updater)
        if identity.names and weights_of_files(view, request.load_format or "auto"):
            read = read_weights(view, request.model_path)
            if read is not None and read.names == identity.names:
                return f"content:{read.content}"
        return private


def hooks() -> tuple[Hook, ...]:
    """The hooks of a process that has one scheduler."""
    return WeightWatch().hooks()


def _flush(updater: Any) -> None:
    if not updater.flush_cache(empty_cache=False):
        logger.warning("hpkv: requests are running: the tiers stay closed until the next flush")


def _covers(request: Any, tag: str) -> bool:
    return not request.tags or tag in request.tags


def _weights_are_lost(updater: Any) -> bool:
    """Whether released weights come back as garbage, to be pushed anew."""
    view = view_of(updater.scheduler.server_args)
    return bool(updater.memory_saver_adapter.enabled) and not view.enable_weights_cpu_backup
