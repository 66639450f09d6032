"""The test distribution without a server: what it imports, registers, builds and cuts short."""

import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpkv_testing import logs, platform
from hpkv_testing.checkpoints import made_once
from hpkv_testing.client import Ask
from hpkv_testing.fixtures import NEW_PYTHON, may_be_forked
from hpkv_testing.models import TinyDeepseek, TinyLlama, build
from hpkv_testing.server import ServerConfig

MODEL = Path("/nowhere/model")


def test_the_server_module_and_the_fixtures_import_neither_sglang_nor_torch() -> None:
    code = (
        "import sys, hpkv_testing.server, hpkv_testing.fixtures, hpkv_testing.smollm2\n"
        "print([name for name in ('sglang', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("selected", [None, "", "cuda"])
def test_the_cpu_platform_stays_away_unless_chosen_by_name(
    monkeypatch: pytest.MonkeyPatch, selected: str | None
) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if selected is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", selected)
    assert platform.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "hpkv_cpu")
    assert platform.activate() == "hpkv_testing.cpu_platform:PlainTorchPlatform"


def test_the_platform_and_the_plugin_come_from_different_distributions() -> None:
    """SGLang skips the plugins of a distribution whose platform was not selected."""
    owners = {
        (group, point.name): point.dist.name
        for group in ("sglang.srt.platforms", "sglang.srt.plugins")
        for point in importlib.metadata.entry_points(group=group)
        if point.dist is not None
    }
    assert owners["sglang.srt.platforms", "hpkv_cpu"] == "hpkv-sglang-testing"
    assert owners["sglang.srt.plugins", "hpkv"] == "hpkv-sglang"


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def half(directory: Path) -> None:
        (directory / "part").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        made_once("model", half, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_made_once(tmp_path: Path) -> None:
    calls = []
    for _ in range(2):
        folder = made_once("model", lambda directory: calls.append(directory), tmp_path)
    assert len(calls) == 1
    assert list(tmp_path.iterdir()) == [folder]


def test_losing_the_race_to_build_is_no_error(tmp_path: Path) -> None:
    def overtaken(directory: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").write_text("x")

    folder = made_once("model", overtaken, tmp_path)
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("kind", [TinyLlama, TinyDeepseek])
def test_weights_follow_from_the_seed_alone(
    tmp_path: Path, kind: type[TinyLlama] | type[TinyDeepseek]
) -> None:
    digests = []
    for index, seed in enumerate((3, 3, 4)):
        folder = tmp_path / str(index)
        folder.mkdir()
        build(kind(seed=seed, layers=2), folder)
        digests.append(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_inherited_settings_do_not_reach_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_HPKV", "1")
    monkeypatch.setenv("HPKV_KV_MEM_POOL_SIZE", "1g")
    environment = ServerConfig(model=MODEL, env=(("HPKV_VERIFY", "always"),)).environment()
    assert environment["SGLANG_PLATFORM"] == "hpkv_cpu"
    assert environment["HPKV_VERIFY"] == "always"
    assert not {"SGLANG_ENABLE_HPKV", "HPKV_KV_MEM_POOL_SIZE"} & set(environment)


@pytest.mark.parametrize(
    ("fields", "forked"),
    [
        ({}, True),
        ({"env": (("HPKV_VERIFY", "always"),)}, True),
        ({"env": (("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1"),)}, True),
        ({"env": (("SGLANG_TEST_RETRACT", "1"),)}, False),  # read while SGLang is imported
        ({"launcher": "serve"}, False),
        ({"new_python": True}, False),
    ],
)
def test_a_server_is_forked_where_that_makes_no_difference(
    fields: dict[str, Any], forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(model=MODEL, **fields)
    monkeypatch.delenv(NEW_PYTHON, raising=False)
    assert may_be_forked(config) is forked
    monkeypatch.setenv(NEW_PYTHON, "1")
    assert not may_be_forked(config)


def test_each_rank_is_given_a_core() -> None:
    binding = ServerConfig(model=MODEL, tp_size=3).environment()["SGLANG_CPU_OMP_THREADS_BIND"]
    assert len(binding.split("|")) == 3
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in ServerConfig(model=MODEL).environment()


def test_flags_of_the_caller_come_last_and_no_page_size_means_none() -> None:
    command = ServerConfig(model=MODEL, page_size=None, flags=("--page-size", "8")).command(1)
    assert command[-2:] == ["--page-size", "8"]
    assert command.count("--page-size") == 1


@pytest.mark.parametrize("fields", [{}, {"text": "a", "input_ids": [1]}])
def test_a_request_has_exactly_one_prompt(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="either input_ids or text"):
        Ask(**fields).body()


def test_an_excerpt_keeps_the_error_far_above_and_cuts_endless_lines() -> None:
    log = "\n".join(["ValueError: the reason", "server_args=" + "x" * 20_000, *["noise"] * 100])
    excerpt = logs.excerpt(log)
    assert "ValueError: the reason" in excerpt
    assert max(map(len, logs.excerpt("y" * 20_000).splitlines())) < 400
    assert len(excerpt.splitlines()) < 45
