"""What is refused beside --enable-hpkv: one test per row, on SGLang's real arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")
pytest.importorskip("sglang")

from hpkv_sglang.errors import RefusedError  # noqa: E402
from hpkv_sglang.radix import refusals  # noqa: E402
from hpkv_sglang.radix.refusals import MODEL_REFUSALS, REFUSALS  # noqa: E402

# The value that makes a row refuse, where it is not simply True.
VALUES: dict[str, Any] = {
    "device": "xpu",
    "pp_size": 2,
    "dcp_size": 2,
    "attn_cp_size": 2,
    "speculative_algorithm": "EAGLE",
    "speculative_draft_model_path": "draft",
    "decoupled_spec_role": "verifier",
    "disaggregation_mode": "prefill",
    "kv_canary": "raise",
    "dllm_algorithm": "LowConfidence",
    "radix_cache_backend": "mine",
    "hicache_storage_backend": "file",
    "unified_cache_external_linker_config": {"linker": "L", "linker_module_path": "theirs"},
}


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    return {
        field.name: None if field.default is msgspec.NODEFAULT else field.default
        for field in msgspec.structs.fields(ServerArgs)
    }


def test_plain_arguments_are_not_refused(defaults: dict[str, Any]) -> None:
    refusals.check_server_args(SimpleNamespace(**defaults))


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.field)
def test_each_row_names_both_sides(defaults: dict[str, Any], row: refusals.Refusal) -> None:
    assert row.field in defaults, "SGLang has no such argument"
    value = VALUES.get(row.field, True)
    with pytest.raises(RefusedError) as error:
        refusals.check_server_args(SimpleNamespace(**(defaults | {row.field: value})))
    message = str(error.value)
    assert "--enable-hpkv" in message
    assert f"{row.flag} (found {value!r}): {row.feature}" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "cpu"),
        ("pp_size", 1),
        ("disaggregation_mode", "null"),
        ("kv_canary", "none"),
        ("decoupled_spec_role", "null"),
        (
            "unified_cache_external_linker_config",
            {"linker": "HpkvLinker", "linker_module_path": refusals.LINKER_MODULE},
        ),
    ],
)
def test_neighbouring_values_are_served(defaults: dict[str, Any], field: str, value: Any) -> None:
    refusals.check_server_args(SimpleNamespace(**(defaults | {field: value})))


def test_a_pool_that_is_sized_late_is_refused(
    defaults: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "true")
    with pytest.raises(RefusedError, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        refusals.check_server_args(SimpleNamespace(**defaults))


def test_another_linker_backend_is_refused(defaults: dict[str, Any]) -> None:
    mine = {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "mooncake",
    }
    with pytest.raises(RefusedError, match="mooncake"):
        refusals.check_server_args(SimpleNamespace(**(defaults | mine)))


def test_all_that_is_wrong_is_said_at_once(defaults: dict[str, Any]) -> None:
    wrong = {"pp_size": 2, "enable_lmcache": True}
    with pytest.raises(RefusedError, match=r"--pp-size.*--enable-lmcache"):
        refusals.check_server_args(SimpleNamespace(**(defaults | wrong)))


def test_a_fork_without_a_feature_is_not_refused_for_it(defaults: dict[str, Any]) -> None:
    del defaults["enable_flexkv"]
    refusals.check_server_args(SimpleNamespace(**defaults))


def model(**changes: Any) -> Any:
    hf = SimpleNamespace(architectures=["LlamaForCausalLM"], index_topk=None)
    plain = {
        "is_generation": True,
        "is_encoder_decoder": False,
        "is_hybrid_swa": False,
        "hf_config": hf,
        "hf_text_config": hf,
    }
    return SimpleNamespace(**(plain | changes))


DSA = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=2048)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"is_generation": False}, "embedding and reward"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_hybrid_swa": True}, "SWA"),
        ({"hf_config": DSA, "hf_text_config": DSA}, "DSA"),
        ("mamba", "Mamba"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_models_with_more_than_plain_kv_are_refused_by_name(
    changes: Any, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        refusals, "mambaish_config", lambda _: object() if changes == "mamba" else None
    )
    config = model(**({} if changes == "mamba" else changes))
    with pytest.raises(RefusedError) as error:
        refusals.check_model(config)
    assert feature in str(error.value)
    assert repr(config.hf_config.architectures[0]) in str(error.value)


def test_sparse_attention_is_carried_on_an_npu_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "mambaish_config", lambda _: None)
    sparse = model(hf_config=DSA, hf_text_config=DSA)
    refusals.check_model(sparse, "npu")
    for device in ("cpu", "cuda", None):
        with pytest.raises(RefusedError, match="DSA"):
            refusals.check_model(sparse, device)


def test_a_gpu_is_served_by_builds_that_have_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = [row for row in REFUSALS if row.field == "device"]
    monkeypatch.setattr(refusals, "DEVICES", ("cpu", "npu"))
    assert row.refused("cuda")
    monkeypatch.setattr(refusals, "DEVICES", ("cpu", "npu", "cuda"))
    assert not row.refused("cuda")
    assert not row.refused(None)


def test_a_plain_model_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "mambaish_config", lambda _: None)
    refusals.check_model(model())
    assert len(MODEL_REFUSALS) == 5, "a new row needs a case above"


@pytest.mark.parametrize(
    ("page_size", "chunk", "backends", "expected"),
    [
        (None, 8192, ("triton", "triton"), 64),
        (None, None, ("fa3", "fa3"), 64),
        (None, -1, ("torch_native", "torch_native"), 64),
        (16, 8192, ("triton", "triton"), None),
        (1, 8192, ("triton", "triton"), None),
        (None, 100, ("triton", "triton"), None),
        (None, 8192, ("minicpm_flashattn", "triton"), None),
    ],
)
def test_the_page_size_is_64_when_nobody_and_nothing_else_sets_it(
    page_size: int | None, chunk: int | None, backends: tuple[str, str], expected: int | None
) -> None:
    view = SimpleNamespace(page_size=page_size, chunked_prefill_size=chunk)
    assert refusals.page_size_default(view, backends) == expected
