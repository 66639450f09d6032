"""What SGLang can be asked for that the tiers do not support, one table, refused by name at start.

Owns: `REFUSALS` (settings of the server), `MODEL_REFUSALS` (kinds of model), `PAGE_ONE_BACKENDS`
and `page_size_default`. Pool classes are refused where layouts are detected.

Invariants: every refusal names our switch, SGLang's setting with the value seen, and a remedy;
all that is known to be wrong is said in one error. A field SGLang does not have (an older fork)
is a feature it does not have, and refuses nothing.

Threading: pure functions over the launcher's arguments, before anything is spawned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.environ import envs

from hpkv_sglang._core import CUDA_RUNTIME
from hpkv_sglang.errors import RefusedError

__all__ = [
    "LINKER_MODULE",
    "MODEL_REFUSALS",
    "REFUSALS",
    "Refusal",
    "check_model",
    "check_server_args",
    "page_size_default",
]

LINKER_MODULE = "hpkv_sglang.radix.linker"
PAGE_SIZE = 64
# Backends whose kernels assert single-token pages.
PAGE_ONE_BACKENDS = frozenset({"minicpm_flashattn", "minicpm_flashinfer"})


class Refusal(NamedTuple):
    """One row. `refused` gets the field's value, or the model config; True refuses the start."""

    field: str
    flag: str
    feature: str
    refused: Callable[[Any], bool]


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


def _given(value: Any) -> bool:
    return value is not None and value is not False and value != ""


def _foreign_linker(value: Any) -> bool:
    return bool(value) and value.get("linker_module_path") != LINKER_MODULE


DEVICES = ("cpu", "npu", "cuda") if CUDA_RUNTIME else ("cpu", "npu")

_NONE: tuple[object, ...] = (None, False, "", "null", "none")

REFUSALS = (
    Refusal(
        "device",
        "--device",
        f"device memory that this build does not reach (it reaches {', '.join(DEVICES)}; cuda "
        "where nvcc was found when it was built)",
        lambda device: device not in (None, *DEVICES),
    ),
    Refusal("pp_size", "--pp-size", "pipeline parallelism", _more_than_one),
    Refusal("dcp_size", "--dcp-size", "decode context parallelism", _more_than_one),
    Refusal("attn_cp_size", "--attn-cp-size", "attention context parallelism", _more_than_one),
    Refusal("enable_prefill_cp", "--enable-prefill-cp", "prefill context parallelism", _given),
    Refusal(
        "speculative_algorithm",
        "--speculative-algorithm",
        "speculative decoding (draft KV)",
        _given,
    ),
    Refusal(
        "speculative_draft_model_path",
        "--speculative-draft-model-path",
        "a draft model (draft KV)",
        _given,
    ),
    Refusal("enable_multi_layer_eagle", "--enable-multi-layer-eagle", "draft KV", _given),
    Refusal("decoupled_spec_role", "--decoupled-spec-role", "draft KV", lambda v: v not in _NONE),
    Refusal("is_embedding", "--is-embedding", "embedding and reward models", _given),
    Refusal("enable_pdmux", "--enable-pdmux", "prefill-decode multiplexing", _given),
    Refusal(
        "disaggregation_mode",
        "--disaggregation-mode",
        "prefill-decode disaggregation, which schedules on a path of its own",
        lambda value: value not in _NONE,
    ),
    Refusal("enable_pd_role_switch", "--enable-pd-role-switch", "a role that can change", _given),
    Refusal("encoder_only", "--encoder-only", "an encoder without a KV cache", _given),
    Refusal("dllm_algorithm", "--dllm-algorithm", "diffusion language models", _given),
    Refusal(
        "enable_return_routed_experts",
        "--enable-return-routed-experts",
        "routed experts of cached tokens, which SGLang keeps by device slot",
        _given,
    ),
    Refusal(
        "enable_return_indexer_topk",
        "--enable-return-indexer-topk",
        "index choices of cached tokens, which SGLang keeps by device slot",
        _given,
    ),
    Refusal(
        "kv_canary",
        "--kv-canary",
        "a canary for every device slot, which loads do not write",
        lambda value: value not in _NONE,
    ),
    Refusal("enable_hisparse", "--enable-hisparse", "HiSparse", _given),
    Refusal(
        "enable_kv_cache_sharding", "--enable-kv-cache-sharding", "sharded KV of one page", _given
    ),
    Refusal(
        "enable_dsa_cache_layer_split", "--enable-dsa-cache-layer-split", "split KV layers", _given
    ),
    Refusal("radix_cache_backend", "--radix-cache-backend", "another radix cache", _given),
    Refusal("disable_radix_cache", "--disable-radix-cache", "no radix cache at all", _given),
    Refusal("enable_hierarchical_cache", "--enable-hierarchical-cache", "HiCache", _given),
    Refusal("hicache_storage_backend", "--hicache-storage-backend", "HiCache storage", _given),
    Refusal(
        "disaggregation_decode_enable_offload_kvcache",
        "--disaggregation-decode-enable-offload-kvcache",
        "HiCache offload",
        _given,
    ),
    Refusal("enable_lmcache", "--enable-lmcache", "LMCache", _given),
    Refusal("enable_flexkv", "--enable-flexkv", "FlexKV", _given),
    Refusal("enable_unified_memory", "--enable-unified-memory", "the unified memory pool", _given),
    Refusal(
        "enable_page_major_kv_layout",
        "--enable-page-major-kv-layout",
        "page-major KV buffers",
        _given,
    ),
    Refusal(
        "prefill_only_disable_kv_cache",
        "--prefill-only-disable-kv-cache",
        "a server without a KV cache",
        _given,
    ),
    Refusal(
        "unified_cache_external_linker_config",
        "--unified-cache-external-linker-config",
        "another external linker",
        _foreign_linker,
    ),
    Refusal("enable_linker_mla_dedup", "--enable-linker-mla-dedup", "another linker", _given),
    Refusal("enable_streaming_session", "--enable-streaming-session", "streaming sessions", _given),
    Refusal(
        "enable_session_radix_cache",
        "--enable-session-radix-cache",
        "radix-native sessions",
        _given,
    ),
)

MODEL_REFUSALS = (
    Refusal(
        "is_generation", "the model", "embedding and reward models", lambda m: not m.is_generation
    ),
    Refusal(
        "is_encoder_decoder", "the model", "encoder-decoder models", lambda m: m.is_encoder_decoder
    ),
    Refusal(
        "is_hybrid_swa",
        "the model",
        "sliding-window attention with its own pool (SWA); --disable-hybrid-swa-memory avoids it",
        lambda m: m.is_hybrid_swa,
    ),
    Refusal(
        "mamba",
        "the model",
        "recurrent state beside the KV (Mamba, linear attention)",
        lambda m: mambaish_config(m) is not None,
    ),
    Refusal(
        "dsa",
        "the model",
        "sparse attention with an index pool (DSA)",
        lambda m: is_deepseek_dsa(m.hf_config),
    ),
)


def check_server_args(view: Any) -> None:
    """Raise RefusedError if `view` (SGLang's arguments, resolved so far) has what we refuse."""
    found = []
    for row in REFUSALS:
        value = getattr(view, row.field, None)
        if row.refused(value):
            found.append(f"{row.flag} (found {value!r}): {row.feature}")
    if (
        view.enable_unified_cache_external_linker
        and view.unified_cache_external_linker_backend != "dynamic"
    ):
        backend = view.unified_cache_external_linker_backend
        found.append(
            f"--unified-cache-external-linker-backend (found {backend!r}): another external linker"
        )
    late = getattr(envs, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", None)
    if late is not None and late.get():
        found.append(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING (found True): a pool with less memory than shape"
        )
    _raise_if_any(found)


def check_model(model_config: Any, device: str | None = None) -> None:
    """Raise RefusedError if the model keeps state that our layouts do not carry.

    On an NPU the index of sparse attention lies in the KV pool and is carried with it.
    """
    carried = {"dsa"} if device == "npu" else set()
    name = ", ".join(model_config.hf_config.architectures or ["unknown"])
    _raise_if_any(
        [
            f"{r.flag} (found {name!r}): {r.feature}"
            for r in MODEL_REFUSALS
            if r.field not in carried and r.refused(model_config)
        ]
    )


def _raise_if_any(found: list[str]) -> None:
    if found:
        raise RefusedError(
            "--enable-hpkv (SGLANG_ENABLE_HPKV) cannot serve together with "
            + "; ".join(found)
            + ". Leave out one or the other."
        )


def page_size_default(view: Any, backends: tuple[Any, ...]) -> int | None:
    """The page size to set when the user set none; None leaves SGLang's default.

    `backends`: the resolved attention backends. A backend that needs a certain page has set it by
    now; what is left are those that insist on one token, and a chunk that is no multiple of ours.
    """
    if view.page_size is not None or PAGE_ONE_BACKENDS.intersection(backends):
        return None
    chunk = view.chunked_prefill_size
    if chunk is not None and chunk > 0 and chunk % PAGE_SIZE:
        return None
    return PAGE_SIZE
