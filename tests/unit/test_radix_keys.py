"""Keys of real requests: SGLang's `Req` with the hook applied."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.events import LoRANameTable
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams

from hpkv_sglang.hooks import HookType, Patcher, register_all
from hpkv_sglang.radix.keys import RequestKeys

ONE, TWO = "0123456789abcdef" * 2, "f" * 32
MakeReq = Callable[..., Req]


@pytest.fixture
def keys() -> RequestKeys:
    return RequestKeys()


@pytest.fixture
def make_req(keys: RequestKeys, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeReq]:
    """Makes requests of a class hooked as in a scheduler process."""
    hooked = type("Req", (Req,), {"__init__": Req.__init__})
    monkeypatch.setattr("sglang.srt.managers.schedule_batch.Req", hooked)
    patcher = Patcher()
    register_all(patcher, HookType, keys.hooks()[:1])
    patcher.apply_hooks()

    def make(extra_key: str | None = None, lora_id: str | None = None, **fields: Any) -> Req:
        ids = array("q", range(64))
        return hooked(
            "rid", "", ids, SamplingParams(), extra_key=extra_key, lora_id=lora_id, **fields
        )

    yield make


def page_hash(req: Req) -> str:
    """What the first page of the request is stored under."""
    key = RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt)
    return str(get_storage_hash_str(key, page_size=16)[0])


def test_the_four_confusable_keys_are_four_keys(make_req: MakeReq) -> None:
    """Field report F03; unhooked, each pair is equal."""
    pairs = [(None, TWO), (TWO, None), ("a", "bc"), ("ab", "c")]
    assert len({page_hash(make_req(*pair)) for pair in pairs}) == 4
    plain = [
        Req("r", "", array("q", range(64)), SamplingParams(), extra_key=e, lora_id=a)
        for e, a in pairs
    ]
    assert len({page_hash(req) for req in plain}) == 2


def test_callers_of_one_adapter_are_kept_apart(make_req: MakeReq) -> None:
    callers = [None, "a", "b", ONE]
    assert len({page_hash(make_req(caller, ONE)) for caller in callers}) == len(callers)


def test_a_plain_request_keeps_its_plain_key(make_req: MakeReq) -> None:
    assert make_req().extra_key is None
    assert not make_req(extra_key="").extra_key


def test_salt_and_extra_key_of_equal_text_are_different_keys(make_req: MakeReq) -> None:
    """Field report F04."""
    requests = [make_req(), make_req("s"), make_req(cache_salt="s"), make_req("s", cache_salt="s")]
    assert len({page_hash(req) for req in requests}) == 4


def test_events_find_the_adapter_and_no_adapter_where_there_is_none(make_req: MakeReq) -> None:
    table = LoRANameTable()
    table.register(lora_id=ONE, lora_name="one")
    assert table.get(make_req("tenant", ONE).extra_key) == "one"
    assert table.get(make_req(None, ONE).extra_key) == "one"
    assert table.get(make_req(ONE).extra_key) is None


# ---- adapters ----


def write_adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % ((len(content),) * 2)
    raw = len(header).to_bytes(8, "little") + header + content
    (folder / "adapter_model.safetensors").write_bytes(raw)
    return folder


def load(keys: RequestKeys, folder: Path, lora_id: str = ONE, success: bool = True) -> None:
    ref = SimpleNamespace(lora_id=lora_id, lora_path=str(folder))
    keys.adapter_loaded(SimpleNamespace(success=success), None, ref)


def test_an_adapter_replaced_under_its_name_is_another_key(
    keys: RequestKeys, make_req: MakeReq, tmp_path: Path
) -> None:
    """An adapter given at start keeps its id, which is made of name and path."""
    load(keys, write_adapter(tmp_path / "a", b"old"))
    old = make_req(None, ONE).extra_key
    load(keys, write_adapter(tmp_path / "a", b"new"))
    assert make_req(None, ONE).extra_key != old


def test_the_same_adapter_elsewhere_after_a_restart_is_the_same_key(
    keys: RequestKeys, make_req: MakeReq, tmp_path: Path
) -> None:
    load(keys, write_adapter(tmp_path / "a", b"same"))
    before = make_req("tenant", ONE).extra_key
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    restarted = RequestKeys()
    load(restarted, tmp_path / "b")
    keys._digests = restarted._digests
    assert make_req("tenant", ONE).extra_key == before


@pytest.mark.parametrize("how", ["unreadable", "pushed", "unannounced", "failed"])
def test_an_adapter_without_readable_content_is_private_to_its_process(
    keys: RequestKeys, make_req: MakeReq, tmp_path: Path, how: str
) -> None:
    def announce(to: RequestKeys) -> None:
        if how == "unreadable":
            load(to, tmp_path)
        if how == "failed":
            load(to, write_adapter(tmp_path / "a", b"x"), success=False)
        if how == "pushed":
            ref = SimpleNamespace(lora_id=ONE, lora_path="x")
            to.adapter_pushed(SimpleNamespace(success=True), None, ref, {})

    announce(keys)
    here = make_req(None, ONE).extra_key
    assert make_req(None, ONE).extra_key == here, "one process must agree with itself"
    other = RequestKeys()
    announce(other)
    keys._digests = other._digests
    assert make_req(None, ONE).extra_key != here


def test_the_loading_hooks_are_on_functions_that_every_way_of_loading_calls() -> None:
    """`load_lora_adapter` alone would miss the adapters that are given at start."""
    from sglang.srt.lora.lora_manager import LoRAManager

    for hook in RequestKeys().hooks()[1:]:
        assert hasattr(LoRAManager, hook.target.rpartition(".")[2])
    starts = LoRAManager.init_lora_adapters.__code__.co_names
    assert "_load_lora_adapter" in starts
    assert "_load_lora_adapter" in LoRAManager.load_lora_adapter.__code__.co_names
    names = LoRAManager.load_lora_adapter_from_tensors.__code__.co_names
    assert "_load_lora_adapter_from_tensors" in names
