"""The weight watch on SGLang's real weight updater, with runners, scheduler and tree stood in for.

Every test asks two things: are the tiers closed while weights and old KV may disagree, and under
which version do they open.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.scheduler_components import weight_updater as module

from hpkv_sglang.fingerprint import weights_fingerprint
from hpkv_sglang.hooks import HookType, Patcher, register_all
from hpkv_sglang.radix import identity, weights
from hpkv_sglang.radix.weights import WeightWatch
from tests.unit.weights_rig import Rig, Tree, checkpoint, request


@pytest.fixture
def updater_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's updater under a copy of its class, hooked as in a scheduler process."""
    original = module.SchedulerWeightUpdaterManager
    copied = type(
        original.__name__, (original,), {k: v for k, v in vars(original).items() if callable(v)}
    )
    monkeypatch.setattr(module, original.__name__, copied)
    monkeypatch.setattr(module.torch.distributed, "barrier", lambda *_, **__: None)
    device = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(module.torch, "get_device_module", lambda *_: device)
    monkeypatch.setattr(module, "_export_static_state", lambda _: {"buffers": []})
    monkeypatch.setattr(module, "_import_static_state", lambda *_: None)
    monkeypatch.setattr(copied, "_assert_weight_cache_inactive", lambda *_: None)
    monkeypatch.setattr(identity, "view_of", lambda server_args: server_args)
    monkeypatch.setattr(weights, "view_of", lambda server_args: server_args)
    monkeypatch.setattr(weights, "replica_name", lambda: "dp0")
    patcher = Patcher()
    register_all(patcher, HookType, WeightWatch().hooks())
    patcher.apply_hooks()
    yield copied


@pytest.fixture
def rig(updater_class: Any, tmp_path: Path) -> Rig:
    start = weights_fingerprint(checkpoint(tmp_path / "start", b"start"))
    return Rig(updater_class, Tree(f"content:{start.content}", start.names))


def test_the_tiers_are_closed_while_weights_change_and_open_after_the_flush(
    rig: Rig, tmp_path: Path
) -> None:
    """Field report F08."""
    before = rig.tree.version
    assert rig.from_disk(checkpoint(tmp_path / "new", b"other")).success
    assert rig.seen == [False]
    assert rig.tree.is_open
    assert rig.tree.version not in (before, "")


def test_going_back_to_the_old_weights_finds_their_blocks_again(rig: Rig, tmp_path: Path) -> None:
    before = rig.tree.version
    rig.from_disk(checkpoint(tmp_path / "new", b"other"))
    between = rig.tree.version
    rig.from_disk(tmp_path / "start")
    assert (rig.tree.version == before, between == before) == (True, False)


def test_without_a_flush_the_tiers_stay_closed_until_one_succeeds(rig: Rig, tmp_path: Path) -> None:
    expected = weights_fingerprint(checkpoint(tmp_path / "new", b"other")).content
    rig.from_disk(tmp_path / "new", flush=False)
    assert not rig.tree.is_open
    rig.idle = False
    rig.flush()
    assert not rig.tree.is_open
    rig.idle = True
    rig.flush()
    assert rig.tree.is_open
    assert rig.tree.version == f"content:{expected}"


def test_a_refused_flush_leaves_the_tiers_closed(rig: Rig, tmp_path: Path) -> None:
    rig.idle = False
    assert not rig.from_disk(checkpoint(tmp_path / "new", b"other")).success
    assert not rig.tree.is_open


def test_an_update_that_may_leave_old_tensors_is_private(rig: Rig, tmp_path: Path) -> None:
    start = rig.tree.version
    rig.from_disk(checkpoint(tmp_path / "new", b"other", "b"))
    assert rig.tree.version.startswith("private:")
    assert rig.tree.version != start


@pytest.mark.parametrize("load_format", ["dummy", "remote", "flash_rl", "unheard_of"])
def test_weights_that_are_not_the_files_in_the_path_are_private(
    rig: Rig, tmp_path: Path, load_format: str
) -> None:
    rig.from_disk(tmp_path / "start", load_format=load_format)
    assert rig.tree.version.startswith("private:")


def test_an_update_that_failed_half_way_never_comes_back_under_the_old_version(
    rig: Rig, tmp_path: Path
) -> None:
    before = rig.tree.version
    rig.outcome = (False, "Failed to update weights: x.\nRolling back to original weights.")
    rig.from_disk(checkpoint(tmp_path / "new", b"other"))
    assert not rig.tree.is_open
    rig.flush()
    assert rig.tree.version != before
    assert rig.tree.version.startswith("private:")


def test_an_update_that_touched_nothing_comes_back_under_the_old_version(rig: Rig) -> None:
    before = rig.tree.version
    rig.outcome = (False, "Failed to get weights iterator: no such path.")
    rig.from_disk("/nowhere")
    rig.flush()
    assert rig.tree.is_open
    assert rig.tree.version == before


@pytest.mark.parametrize("how", ["tensor", "distributed", "ipc"])
def test_pushed_weights_are_private_and_each_push_is_another_version(rig: Rig, how: str) -> None:
    rig.updater.begin_weight_update(request())
    assert not rig.tree.is_open
    versions = {rig.tree.version}
    for _ in range(3):
        assert rig.push(how).success
        versions.add(rig.tree.version)
    assert not any(rig.seen)
    rig.updater.end_weight_update(request())
    assert rig.tree.is_open
    assert len(versions) == 4
    assert sum(version.startswith("private:") for version in versions) == 3


def test_weights_that_may_change_without_a_call_stay_closed_until_a_flush(rig: Rig) -> None:
    """Between begin and end a trainer may write weights by RDMA; SGLang then flushes nothing."""
    before = rig.tree.version
    rig.updater.begin_weight_update(request())
    rig.updater.end_weight_update(request())
    assert not rig.tree.is_open
    rig.flush()
    assert rig.tree.is_open
    assert rig.tree.version != before


@pytest.mark.parametrize("how", ["tensor", "distributed", None])
def test_what_was_computed_inside_a_session_is_not_found_after_it(
    rig: Rig, how: str | None
) -> None:
    """A flush inside opens the tiers, and the end of the session may still finish the weights."""
    rig.updater.begin_weight_update(request())
    if how is not None:
        rig.push(how, flush=False)
    rig.flush()
    inside = rig.tree.version
    assert rig.tree.is_open
    rig.updater.end_weight_update(request())
    assert rig.tree.is_open
    assert rig.tree.version != inside
    assert rig.seen[-1] is False, "open while the weights were finished"


def test_a_session_that_ends_while_requests_run_leaves_the_tiers_closed(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.updater.begin_weight_update(request())
    rig.flush()
    inside = rig.tree.version
    rig.idle = False
    rig.updater.end_weight_update(request())
    assert not rig.tree.is_open
    assert "closed until the next flush" in caplog.text
    rig.idle = True
    rig.flush()
    assert rig.tree.is_open and rig.tree.version != inside


def test_ranks_count_the_same_updates_whatever_one_of_them_could_read(
    updater_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = weights_fingerprint(checkpoint(tmp_path / "start", b"start"))
    new = checkpoint(tmp_path / "new", b"other")
    versions = []
    for readable in (True, False):
        rig = Rig(updater_class, Tree(f"content:{start.content}", start.names))
        watch = WeightWatch()
        if not readable:
            monkeypatch.setattr(weights, "read_weights", lambda *_: None)
        watch.from_disk(
            lambda _updater, _request: SimpleNamespace(success=True, message=""),
            rig.updater,
            request(model_path=str(new)),
        )
        watch.pushed(lambda _updater, _request: None, rig.updater, request())
        versions.append(rig.tree.armed)
    assert versions[0] == versions[1]


@pytest.mark.parametrize("how", ["tensor", "distributed"])
def test_a_push_that_sglang_rejects_at_once_closes_nothing(rig: Rig, how: str) -> None:
    assert not rig.push(how).success
    assert rig.tree.is_open


def test_a_second_begin_that_sglang_rejects_changes_nothing(rig: Rig) -> None:
    rig.updater.begin_weight_update(request())
    rig.push("tensor")
    version = rig.tree.version
    assert not rig.updater.begin_weight_update(request()).success
    assert (rig.tree.is_open, rig.tree.version) == (True, version)


def test_after_weights_from_files_the_version_does_not_depend_on_what_came_before(
    rig: Rig, tmp_path: Path
) -> None:
    before = rig.tree.version
    rig.updater.begin_weight_update(request())
    rig.push("tensor")
    rig.updater.end_weight_update(request())
    rig.from_disk(tmp_path / "start")
    assert rig.tree.version == before


def test_ranks_of_a_replica_agree_on_private_versions_and_launches_do_not(
    updater_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(launch: str, replica: str) -> str:
        monkeypatch.setattr(weights, "replica_name", lambda: replica)
        watch = WeightWatch()
        config = {"linker_extra_config": {"launch_id": launch}}
        args = SimpleNamespace(unified_cache_external_linker_config=config)
        return watch._private(SimpleNamespace(scheduler=SimpleNamespace(server_args=args)))

    assert version("one", "dp0") == version("one", "dp0")
    assert len({version(one, two) for one in ("a", "b") for two in ("dp0", "dp1")}) == 4


# ---- memory ----


def test_memory_is_released_after_the_copies_have_ended_and_returns_under_the_same_version(
    rig: Rig,
) -> None:
    before = rig.tree.version
    rig.memory("release", "kv_cache")
    assert rig.unmapped
    assert rig.seen == [False], "the tiers were open when the memory went"
    assert not rig.tree.is_open
    rig.memory("resume", "kv_cache")
    assert rig.tree.is_open
    assert rig.tree.version == before


def test_an_update_waiting_for_its_flush_does_not_open_over_released_memory(
    rig: Rig, tmp_path: Path
) -> None:
    expected = weights_fingerprint(checkpoint(tmp_path / "new", b"other")).content
    rig.from_disk(tmp_path / "new", flush=False)
    rig.memory("release", "kv_cache")
    assert not rig.tree.is_open
    rig.memory("resume", "kv_cache")
    assert rig.tree.version == f"content:{expected}"


@pytest.mark.parametrize("tags", [("weights",), (), ("weights", "kv_cache")])
def test_weights_released_without_a_backup_never_come_back_under_their_version(
    rig: Rig, tags: tuple[str, ...]
) -> None:
    before = rig.tree.version
    rig.memory("release", *tags)
    assert not rig.tree.is_open
    rig.memory("resume", *tags)
    rig.flush()
    assert rig.tree.is_open
    assert rig.tree.version.startswith("private:")
    assert rig.tree.version != before


def test_weights_released_with_a_backup_keep_their_version(updater_class: Any) -> None:
    rig = Rig(updater_class, Tree("content:1", "names"), enable_weights_cpu_backup=True)
    rig.memory("release", "weights")
    rig.memory("resume", "weights")
    assert (rig.tree.is_open, rig.tree.version) == (True, "content:1")
