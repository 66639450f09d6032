"""SGLang's weight updater on stand-ins for runners, scheduler and tree, for test_radix_weights."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpkv_sglang.namespace import ModelIdentity
from hpkv_sglang.radix.identity import RankIdentity


class Tree:
    """The tree's side of the protocol: `reset` opens if a version is armed."""

    def __init__(self, weight_version: str, names: str) -> None:
        model = ModelIdentity(
            **{field.name: "" for field in dataclasses.fields(ModelIdentity)}  # type: ignore[arg-type]
            | {"weights": weight_version, "numerics": {}, "geometry": {}, "parallel": {}}
        )
        rank = RankIdentity(
            model=model, group_rank=0, group_size=1, block_format="", replicated=False, names=names
        )
        self.tiers = SimpleNamespace(identity=rank, suspended=None)
        self.armed: str | None = None

    @property
    def is_open(self) -> bool:
        return self.tiers.suspended is None

    def suspend(self, reason: str) -> None:
        assert reason
        self.tiers.suspended, self.armed = reason, None

    def reopen(self, weight_version: str) -> None:
        self.armed = weight_version

    def reset(self) -> None:
        if self.armed is not None:
            self.tiers.identity = self.tiers.identity.with_weights(self.armed)
            self.tiers.suspended, self.armed = None, None

    @property
    def version(self) -> str:
        return str(self.tiers.identity.weight_version)


class Rig:
    """A real updater whose class is hooked; `seen` are the tree's states while weights change."""

    def __init__(self, updater_class: Any, tree: Tree, **settings: Any) -> None:
        self.tree = tree
        self.idle = True
        self.outcome: tuple[bool, str] = (True, "ok")
        self.seen: list[bool] = []
        self.unmapped = False
        runner = SimpleNamespace(weight_updater=self)
        scheduler = SimpleNamespace(
            tree_cache=tree,
            server_args=SimpleNamespace(
                **{
                    "unified_cache_external_linker_config": {
                        "linker_extra_config": {"launch_id": "launch"}
                    },
                    "enable_weights_cpu_backup": False,
                    "weight_cache_mode": "off",
                    "revision": None,
                    "download_dir": None,
                }
                | settings
            ),
            record_weight_version_change=lambda new_version: None,
            _engine_paused=False,
            disaggregation_mode=None,
        )
        self.updater = updater_class.__new__(updater_class)
        for name, value in {
            "scheduler": scheduler,
            "tp_worker": SimpleNamespace(
                weight_update_runners=lambda: [("target", runner)],
                deserialize_own_rank=lambda _: [],
                model_runner=SimpleNamespace(weight_updater=self, model=None),
            ),
            "draft_worker": None,
            "memory_saver_adapter": SimpleNamespace(
                enabled=True, pause=self._unmap, resume=self._map
            ),
            "flush_cache": self.flush,
            "is_fully_idle": lambda **_: self.idle,
            "metrics_collector": None,
            "offload_tags": set(),
            "stashed_model_static_state": None,
            "_session": None,
            "tp_cpu_group": None,
        }.items():
            setattr(self.updater, name, value)

    # What SGLang calls while it changes weights.

    def _change(self, *_args: Any, **_kwargs: Any) -> tuple[bool, str]:
        self.seen.append(self.tree.is_open)
        return self.outcome

    update_weights_from_disk = update_weights_from_tensor = update_weights_from_ipc = _change
    load_weights_from_distributed = _change

    def receive_weights_from_distributed(self, **_: Any) -> list[Any]:
        return []

    def begin_weight_update(self, **_: Any) -> None:
        self.seen.append(self.tree.is_open)

    end_weight_update = begin_weight_update

    def _unmap(self, tag: str) -> None:
        self.seen.append(self.tree.is_open)
        self.unmapped |= tag == "kv_cache"

    def _map(self, tag: str) -> None:
        self.unmapped &= tag != "kv_cache"

    def flush(self, empty_cache: bool = True) -> bool:
        if self.idle:
            self.tree.reset()
            assert not (self.tree.is_open and self.unmapped), "open over unmapped memory"
        return self.idle

    # What a user calls.

    def from_disk(
        self, path: Path | str, flush: bool = True, load_format: str | None = None
    ) -> Any:
        return self.updater.update_weights_from_disk(
            request(model_path=str(path), load_format=load_format, flush_cache=flush)
        )

    def push(self, how: str, flush: bool = True) -> Any:
        return getattr(self.updater, f"update_weights_from_{how}")(request(flush_cache=flush))

    def memory(self, what: str, *tags: str) -> None:
        getattr(self.updater, f"{what}_memory_occupation")(SimpleNamespace(tags=list(tags)))


def request(**fields: Any) -> Any:
    plain = dict.fromkeys(
        ("names", "dtypes", "shapes", "group_name", "load_format", "serialized_named_tensors")
    )
    more = {"selector": "all", "torch_empty_cache": False, "recapture_cuda_graph": False}
    return SimpleNamespace(**({**plain, **more, "weight_version": None} | fields))


def checkpoint(folder: Path, content: bytes, *more: str) -> Path:
    folder.mkdir(exist_ok=True)
    header = {
        name: {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
        for name in ("a", *more)
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)
    return folder
