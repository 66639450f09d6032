"""The plugin inside SGLang's own start-up, in fresh processes.

The entry point is put on the path as a distribution of its own, so that SGLang's loader finds the
plugin with or without an installed hpkv-sglang.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh_process import FreshProcesses

from hpkv_sglang._core import Pool, Store

pytest.importorskip("sglang")

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}

RESOLVE = """
import json, os, sys
before = set(sys.modules)
from sglang.srt.plugins import load_plugins
load_plugins()
loaded = set(sys.modules) - before
from sglang.srt.server_args import prepare_server_args
server_args = prepare_server_args(json.loads(sys.argv[1]))
server_args.resolve_once()
server_args.check_server_args()
resolved = server_args.resolved_dict()
resolved.pop("random_seed")
linker = resolved["unified_cache_external_linker_config"]
print("RESULT", json.dumps({
    "resolved": {name: repr(value) for name, value in resolved.items()},
    "linker": linker, "page_size": resolved["page_size"],
    "switch": os.environ.get("SGLANG_ENABLE_HPKV"),
    "ours": sorted(name for name in sys.modules if name.startswith("hpkv_sglang")),
    "loaded": sorted(loaded),
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the plugin's entry point and a tiny model's configuration."""
    site = tmp_path_factory.mktemp("site")
    info = site / "hpkv_entry_point-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hpkv-entry-point\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nhpkv = hpkv_sglang.plugin:register\n"
    )
    (site / "config.json").write_text(json.dumps(CONFIG))
    return site


@pytest.fixture(scope="module")
def warm(site: Path) -> Iterator[FreshProcesses]:
    """Where a pool is to be is looked at before anything starts: here there is room for one."""
    with FreshProcesses(
        f"{site}{os.pathsep}{ROOT}",
        SGLANG_PLATFORM="hpkv_cpu",
        HPKV_SHARE_MEM_FILE_PATH=str(site / "pool"),
        HPKV_KV_MEM_POOL_SIZE="16m",
    ) as processes:
        yield processes


def resolve(warm: FreshProcesses, site: Path, *flags: str, **environment: str) -> dict[str, Any]:
    argv = ["--model-path", str(site), "--device", "cpu", *flags]
    done = warm.run(RESOLVE, json.dumps(argv), **environment)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    return {**json.loads(results[0].removeprefix("RESULT ")), "log": done.stderr + done.stdout}


def error_of(warm: FreshProcesses, site: Path, *flags: str, **environment: str) -> str:
    argv = ["--model-path", str(site), "--device", "cpu", *flags]
    done = warm.run(RESOLVE, json.dumps(argv), **environment)
    assert done.returncode != 0
    return done.stderr


@pytest.fixture(scope="module")
def without(warm: FreshProcesses, site: Path) -> dict[str, Any]:
    """SGLang's arguments where the loader is told to load no plugin."""
    return resolve(warm, site, SGLANG_PLUGINS="none")


def test_without_the_switch_nothing_of_sglang_changes(
    warm: FreshProcesses, site: Path, without: dict[str, Any]
) -> None:
    off = resolve(warm, site)
    assert "hpkv_sglang.plugin" in off["ours"], "the plugin was not loaded at all"
    assert off["resolved"] == without["resolved"]
    assert off["switch"] is None


def test_without_the_switch_nothing_heavy_is_imported(
    warm: FreshProcesses, site: Path, without: dict[str, Any]
) -> None:
    off = resolve(warm, site, SGLANG_PLUGINS="hpkv")
    light = ("config", "errors", "flags", "hooks", "plugin", "radix", "radix.hooked")
    assert set(off["ours"]) == {"hpkv_sglang", *(f"hpkv_sglang.{name}" for name in light)}
    foreign = set(off["loaded"]) - set(without["loaded"]) - set(off["ours"])
    assert not {name for name in foreign if name.partition(".")[0] not in sys.stdlib_module_names}


@pytest.mark.parametrize("flag", [True, False], ids=["flag", "environment"])
def test_the_switch_declares_the_linker_and_the_page_size(
    warm: FreshProcesses, site: Path, flag: bool
) -> None:
    if flag:
        on = resolve(warm, site, "--enable-hpkv", "--hpkv-mem-pool-size", "64m")
    else:
        on = resolve(warm, site, SGLANG_ENABLE_HPKV="1", HPKV_KV_MEM_POOL_SIZE="64m")
    assert on["linker"]["linker"] == "HpkvLinker"
    assert on["linker"]["linker_module_path"] == "hpkv_sglang.radix.linker"
    settings = on["linker"]["linker_extra_config"]
    assert settings["pool_bytes"] == 64 << 20
    assert len(settings["launch_id"]) == 32
    assert on["page_size"] == 64
    assert on["switch"] == "1"
    assert "page size 64, because --page-size was not given" in on["log"]


def test_a_page_size_the_user_gave_is_kept(warm: FreshProcesses, site: Path) -> None:
    assert resolve(warm, site, "--enable-hpkv", "--page-size", "16")["page_size"] == 16


def test_a_config_file_turns_it_on(warm: FreshProcesses, site: Path) -> None:
    path = site / "server.yaml"
    path.write_text("enable-hpkv: true\nhpkv-mem-pool-size: 32m\n")
    on = resolve(warm, site, "--config", str(path))
    assert on["linker"]["linker_extra_config"]["pool_bytes"] == 32 << 20


@pytest.mark.parametrize("platform", ["", "hpkv_cpu", "cpu", "nobody"])
def test_the_plugin_loads_whatever_the_platform_says(
    warm: FreshProcesses, site: Path, platform: str
) -> None:
    """SGLang skips plugins of distributions whose platform was not selected; ours has none."""
    program = """
from sglang.srt.plugins import _get_excluded_dists, load_plugins_by_group
excluded = _get_excluded_dists()
found = load_plugins_by_group("sglang.srt.plugins", excluded_dists=excluded)
print("RESULT", found["hpkv"][0].__module__)
"""
    done = warm.run(program, SGLANG_PLATFORM=platform)
    assert "RESULT hpkv_sglang.plugin" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--pp-size", "2"), "--pp-size (found 2): pipeline parallelism"),
        (("--enable-lmcache",), "--enable-lmcache (found True): LMCache"),
        (("--enable-hierarchical-cache",), "--enable-hierarchical-cache (found True): HiCache"),
        (("--hpkv-verify", "never"), "Use one of epoch, always"),
        (("--hpkv-storage-size", "1g"), "Name the directory"),
        (("--hpkv-cross-tp", "maybe"), "Use one of on, off"),
        (("--hpkv-mem-pool-size", "900t"), "ask for a smaller pool (--hpkv-mem-pool-size)"),
        (("--hpkv-share-mem-path", "/no/such/pool"), "make that one, or choose another"),
        (("--hpkv-storage-path", "/no/such/store"), "make that one, or choose another"),
    ],
)
def test_a_refusal_ends_the_start_before_a_model_is_loaded(
    warm: FreshProcesses, site: Path, flags: tuple[str, ...], said: str
) -> None:
    assert said in error_of(warm, site, "--enable-hpkv", *flags)


def test_a_pool_or_store_of_another_size_ends_the_start_and_stays(
    warm: FreshProcesses, site: Path, tmp_path: Path
) -> None:
    pool, store = tmp_path / "pool", tmp_path / "store"
    attached = Pool.open(str(pool), pool_bytes=16 << 20)
    Store.open(attached, str(store), storage_bytes=64 << 20, background=False).close(1.0)
    attached.close()
    places = ("--hpkv-share-mem-path", str(pool), "--hpkv-storage-path", str(store))
    on = (*places, "--enable-hpkv", "--hpkv-mem-pool-size")
    assert "16777216 bytes and 33554432 were" in error_of(warm, site, *on, "32m")
    wrong = error_of(warm, site, *on, "16m", "--hpkv-storage-size", "1g")
    assert "67108864 bytes and 1073741824 were" in wrong
    assert resolve(warm, site, *on, "16m", "--hpkv-storage-size", "64m")["linker"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"HPKV_VERIFY": "never"}, "HPKV_VERIFY"),
        ({"HPKV_CROSS_TP": "maybe"}, "HPKV_CROSS_TP"),
        ({"SGLANG_ENABLE_HPKV": "perhaps"}, "SGLANG_ENABLE_HPKV"),
    ],
)
def test_a_malformed_environment_ends_the_start(
    warm: FreshProcesses, site: Path, environment: dict[str, str], said: str
) -> None:
    assert said in error_of(warm, site, **{"SGLANG_ENABLE_HPKV": "1", **environment})


def test_flags_without_the_switch_are_ignored_aloud(
    warm: FreshProcesses, site: Path, without: dict[str, Any]
) -> None:
    off = resolve(warm, site, "--hpkv-mem-pool-size", "64m")
    assert off["resolved"] == without["resolved"]
    assert "--hpkv-mem-pool-size given without --enable-hpkv: ignored" in off["log"]


SABOTAGE = """
import json, sys
from sglang.srt.plugins.hook_registry import HookRegistry
original = HookRegistry._apply_target.__func__
def broken(cls, target, hooks):
    if target.endswith({name!r}):
        raise RuntimeError("sabotage")
    return original(cls, target, hooks)
HookRegistry._apply_target = classmethod(broken)
"""


@pytest.mark.parametrize("name", ["from_cli_args", "check_server_args"])
def test_a_hook_that_did_not_take_is_a_start_up_error(
    warm: FreshProcesses, site: Path, name: str
) -> None:
    """SGLang logs the failure and goes on; so would the server, without its tier."""
    argv = ["--model-path", str(site), "--device", "cpu", "--enable-hpkv"]
    done = warm.run(SABOTAGE.replace("{name!r}", repr(name)) + RESOLVE, json.dumps(argv))
    assert done.returncode != 0
    assert "did not take" in done.stderr
    assert name in done.stderr


def test_a_flag_whose_parser_hook_failed_is_an_unknown_flag(
    warm: FreshProcesses, site: Path
) -> None:
    argv = ["--model-path", str(site), "--device", "cpu", "--enable-hpkv"]
    program = SABOTAGE.replace("{name!r}", repr("add_cli_args")) + RESOLVE
    done = warm.run(program, json.dumps(argv))
    assert "unrecognized arguments: --enable-hpkv" in done.stderr


def test_a_step_that_another_plugin_replaced_is_a_start_up_error(
    warm: FreshProcesses, site: Path
) -> None:
    program = """
from sglang.srt.arg_groups import resolution_hooks
import hpkv_sglang
hpkv_sglang.register()
@resolution_hooks.register_resolution_hook("handle_hicache")
def greedy(server_args, previous):
    pass
"""
    argv = ["--model-path", str(site), "--device", "cpu", "--enable-hpkv"]
    done = warm.run(program + RESOLVE, json.dumps(argv))
    assert done.returncode != 0
    assert "--enable-hpkv did not arrive" in done.stderr


def test_registering_twice_adds_each_flag_once(warm: FreshProcesses, site: Path) -> None:
    program = "import hpkv_sglang\nhpkv_sglang.register()\nhpkv_sglang.register()\n"
    argv = ["--model-path", str(site), "--device", "cpu", "--enable-hpkv"]
    done = warm.run(program + RESOLVE, json.dumps(argv))
    assert "RESULT" in done.stdout, done.stderr[-2000:]


def test_a_fork_without_the_plugin_loader_registers_by_hand(
    warm: FreshProcesses, site: Path
) -> None:
    """The loader and its registry are made to be absent; our patcher stands in."""
    block = """
import sys, types
sys.modules["sglang.srt.plugins"] = bare = types.ModuleType("sglang.srt.plugins")
sys.modules["sglang.srt.plugins.hook_registry"] = None
bare.GENERAL_PLUGINS_GROUP = "read by a part of SGLang that a fork would not have"
import hpkv_sglang
hpkv_sglang.register()
"""
    by_hand = RESOLVE.replace("from sglang.srt.plugins import load_plugins\nload_plugins()\n", "")
    argv = ["--model-path", str(site), "--device", "cpu", "--enable-hpkv"]
    done = warm.run(block + by_hand, json.dumps(argv))
    assert '"linker": "HpkvLinker"' in done.stdout, done.stderr[-3000:]


def test_registering_by_hand_after_the_loader_ran_applies_at_once(
    warm: FreshProcesses, site: Path
) -> None:
    program = """
from sglang.srt.plugins import load_plugins
load_plugins()
import hpkv_sglang
hpkv_sglang.register()
"""
    argv = ["--model-path", str(site), "--device", "cpu", "--enable-hpkv"]
    done = warm.run(program + RESOLVE, json.dumps(argv), SGLANG_PLUGINS="none")
    assert '"linker": "HpkvLinker"' in done.stdout, done.stderr[-3000:]


def test_hooking_that_fails_while_switched_on_stops_the_process(
    warm: FreshProcesses, site: Path
) -> None:
    """An ordinary exception would be logged by SGLang's loader, and the server would go on."""
    program = """
import sys
sys.modules["sglang.srt.arg_groups.resolution_hooks"] = None
from sglang.srt.plugins import load_plugins
load_plugins()
print("RESULT went on")
"""
    done = warm.run(program, SGLANG_ENABLE_HPKV="1")
    assert done.returncode != 0
    assert "RESULT" not in done.stdout
    assert "cannot hook into SGLang" in done.stderr


def test_settings_reach_a_pickled_copy_of_the_arguments(warm: FreshProcesses, site: Path) -> None:
    """SGLang pickles its arguments into every process that it spawns."""
    program = (
        RESOLVE
        + """
import pickle
from sglang.srt.arg_groups.overrides import resolving_view
copy = resolving_view(pickle.loads(pickle.dumps(server_args)))
assert copy.unified_cache_external_linker_config == linker
print("COPIED")
"""
    )
    argv = ["--model-path", str(site), "--device", "cpu", "--enable-hpkv"]
    assert "COPIED" in warm.run(program, json.dumps(argv)).stdout


SCHEDULER = """
import sys
import sglang.srt.managers.scheduler  # as in a spawned scheduler, before it loads plugins
from sglang.srt.plugins import load_plugins
load_plugins()
from hpkv_sglang import plugin
from hpkv_sglang.radix import hooked
hooked.verify_hooks()
print("RESULT", "hpkv_sglang.radix.install" in sys.modules, len(hooked.registered.targets))
"""


@pytest.mark.slow
def test_every_hook_takes_in_a_scheduler_process(warm: FreshProcesses) -> None:
    """What the linker's constructor checks, on the real functions of this SGLang."""
    on = warm.run(SCHEDULER, SGLANG_ENABLE_HPKV="1", SGLANG_PLUGINS="hpkv")
    assert "RESULT True" in on.stdout, on.stderr[-3000:]
    assert int(on.stdout.split()[-1]) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Req.__init__", "create_unified_radix_cache"])
def test_a_scheduler_hook_that_did_not_take_is_a_start_up_error(
    warm: FreshProcesses, name: str
) -> None:
    program = SABOTAGE.replace("{name!r}", repr(name)) + SCHEDULER
    done = warm.run(program, SGLANG_ENABLE_HPKV="1", SGLANG_PLUGINS="hpkv")
    assert done.returncode != 0
    assert name in done.stderr
    assert "did not take" in done.stderr


@pytest.mark.slow
def test_a_scheduler_process_without_the_switch_hooks_nothing_of_the_tree(
    warm: FreshProcesses,
) -> None:
    program = SCHEDULER.replace("hooked.verify_hooks()", "")
    assert "RESULT False 3" in warm.run(program, SGLANG_PLUGINS="hpkv").stdout


@pytest.mark.slow
def test_a_plugin_that_came_before_the_switch_is_a_start_up_error(warm: FreshProcesses) -> None:
    """Every hook it has is in place, and the ones on the tree are not among them."""
    done = warm.run(SCHEDULER, SGLANG_PLUGINS="hpkv")
    assert done.returncode != 0
    assert "registered before it was switched on" in done.stderr
