"""Who this rank is: the identity of model, layout and shard, read from SGLang.

Owns: `RankIdentity`, and the rules for which weights are the content of files and which are not.

Invariants: a setting that changes the numbers in a block is in the identity; what cannot be
fingerprinted becomes private to this launch, and is never guessed. Ranks of one server that hold
the same bytes have the same scope.

Threading: the scheduler's thread, at start and inside a weight update. Reads the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from hpkv_sglang.config import variables_set
from hpkv_sglang.errors import IdentityError
from hpkv_sglang.fingerprint import Weights, config_fingerprint, weights_fingerprint
from hpkv_sglang.layout.heads import ONLY_WRITER, HeadRange, Turn, heads_of, turn_of
from hpkv_sglang.mla import formats
from hpkv_sglang.namespace import (
    ModelIdentity,
    Namespace,
    canonical_json,
    private_weights,
    scope_mask,
)

__all__ = [
    "RankIdentity",
    "launch_id_of",
    "local_directory",
    "read_weights",
    "replica_name",
    "view_of",
    "weights_of_files",
]

logger = logging.getLogger(__name__)

# Load formats whose weights are the files in the model path, in any arrangement.
_FILE_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "instanttensor",
        "layered",
        "mistral",
        "npcache",
        "pt",
        "safetensors",
        "sharded_state",
    }
)
# Settings that bring weights from elsewhere, or change them after loading.
_FOREIGN_WEIGHTS = (
    "checkpoint_engine_wait_weights_before_ready",
    "custom_weight_loader",
    "decrypted_config_file",
    "forward_hooks",
    "kt_weight_path",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
)
# Settings that change the numbers, beside those with a field of their own in ModelIdentity.
_NUMERIC_SETTINGS = (
    "attention_backend",
    "bf16_gemm_backend",
    "context_length",
    "decode_attention_backend",
    "deepep_dispatcher_output_dtype",
    "device",
    "enable_deterministic_inference",
    "enable_fused_qk_norm_rope",
    "enable_multimodal",
    "enable_precise_embedding_interpolation",
    "enable_quant_communications",
    "enable_tf32_matmul",
    "enable_w4a4_mxfp4_megamoe",
    "flashinfer_a2a_dispatch_type",
    "flashinfer_mxfp4_moe_precision",
    "fp4_gemm_runner_backend",
    "fp8_gemm_runner_backend",
    "image_processor_backend",
    "kt_method",
    "mm_attention_backend",
    "mm_process_config",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "moe_a2a_backend",
    "moe_runner_backend",
    "prefill_attention_backend",
    "prefill_kv_cache_dequant_dtype",
    "rl_on_policy_target",
    "rl_quant_profile",
    "triton_attention_reduce_in_fp32",
)
# Environment variables that change the numbers go by their names: SGLang has dozens, and one too
# many only costs sharing. Code that comes by one of them makes the weights private.
_ENVIRONMENT_PREFIXES = ("DEEP_", "ROCM_QUICK_REDUCE_", "SGLANG_")
_NUMERIC_WORDS = (
    "BF16",
    "DISPATCH",
    "FP32",
    "FP4",
    "FP8",
    "GEMM",
    "INT4",
    "INT8",
    "MLAPO",
    "PRECISION",
    "QUANT",
    "ROPE",
    "SIMULATE",
    "SKIP_SOFTMAX",
)
_FOREIGN_CODE = ("EXTERNAL_MODEL_PACKAGE", "EXTERNAL_MM_PROCESSOR_PACKAGE")
# Values that say "SGLang's choice"; not worth a word.
_UNSET: tuple[object, ...] = (None, False, "", "auto", "default", "none", {}, "{}")


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """The model's identity and this rank's part of a page.

    group_rank, group_size   this rank among those that share a page (attention tensor parallel)
    heads                    its KV heads; None where ranks do not hold a range of heads
    turn                     which pages it writes first, where others on its node hold them too
    block_format             how the bytes of a block are arranged
    replicated               every rank of the group holds the same bytes
    names                    digest of the checkpoint's tensor names; empty if there are no files
    """

    model: ModelIdentity
    group_rank: int
    group_size: int
    block_format: str
    replicated: bool
    names: str
    heads: HeadRange | None = None
    turn: Turn = ONLY_WRITER

    @classmethod
    def of_server(
        cls, server_args: Any, params: Any, layout: Any, *, own_only: bool = False
    ) -> Self:
        """The identity at start. `params`: SGLang's cache parameters; `layout`: as detected.

        `own_only`: of a server that uses no other's blocks. Those that do store what they computed
        from others' numbers, so the two must not share a namespace.
        """
        from sglang.srt.arg_groups.model_override_base import model_config_of
        from sglang.srt.runtime_context import get_parallel

        view = view_of(server_args)
        model_config = model_config_of(server_args)
        weights, names = _start_weights(view, model_config)
        directory = local_directory(view, str(model_config.model_path))
        device_pool = params.token_to_kv_pool_allocator.get_kvcache()
        parallel = get_parallel()
        heads = _heads(view, layout, model_config, parallel)
        identity = ModelIdentity(
            model=str(view.served_model_name or view.model_path),
            weight_label=str(view.weight_version),
            config=_config_digest(directory, model_config),
            weights=weights,
            dtype=str(model_config.dtype),
            kv_dtype=f"{device_pool.dtype} in {device_pool.store_dtype}",
            quantization=str(model_config.quantization),
            overrides=_overrides(view.json_model_override_args),
            numerics=_numerics(view) | ({"cross_tp": "off"} if own_only else {}),
            layout=layout.name,
            geometry=_geometry(view, layout, model_config, heads),
            page_size=params.page_size,
            parallel={
                name: int(getattr(parallel, name))
                for name in ("tp_size", "attn_tp_size", "attn_dp_size", "pp_size")
            },
            engine=_engine(),
        )
        return cls(
            model=identity,
            group_rank=parallel.attn_tp_rank,
            group_size=parallel.attn_tp_size,
            block_format=layout.name,
            replicated=layout.replicated,
            names=names,
            heads=heads,
            turn=_turn(view, parallel, layout.replicated, heads),
        )

    @cached_property
    def namespace(self) -> Namespace:
        """Under which blocks of this model may be shared."""
        return self.model.namespace()

    @property
    def shard(self) -> str:
        """Which part of a page this rank's blocks hold."""
        if self.replicated:
            return "whole"
        return str(self.heads) if self.heads else f"tp{self.group_rank}/{self.group_size}"

    @property
    def scope_mask(self) -> bytes:
        """32 bytes to mix into this rank's page hashes."""
        return scope_mask(self.namespace.id, self.shard, self.block_format)

    @property
    def weight_version(self) -> str:
        """The identity of the weights, as `with_weights` takes it."""
        return self.model.weights

    @property
    def weights_are_private(self) -> bool:
        """No other server, and no later update, has these weights."""
        return self.model.weights.startswith("private:")

    def with_weights(self, weight_version: str) -> Self:
        """The same rank with other weights; equal versions give equal namespaces."""
        return replace(self, model=replace(self.model, weights=weight_version))


def _heads(view: Any, layout: Any, model_config: Any, parallel: Any) -> HeadRange | None:
    """The KV heads of this rank, when the pool has as many as an even share says.

    None on a CPU whose ranks are not a divisor: SGLang then pads the heads to a multiple instead of
    giving one to several ranks.
    """
    if layout.replicated:
        return None
    total = int(model_config.get_total_num_kv_heads())
    if str(view.device) == "cpu" and total % parallel.tp_size:
        return None
    heads = heads_of(parallel.attn_tp_rank, parallel.attn_tp_size, total)
    held = layout.geometry["kv_heads"]
    return heads if heads is not None and heads.end - heads.begin == held else None


def _geometry(view: Any, layout: Any, model_config: Any, heads: HeadRange | None) -> dict[str, Any]:
    geometry = dict(layout.geometry)
    if heads is not None:
        geometry["kv_heads_total"] = heads.total
    if layout.name in formats.FORMATS:
        geometry["rope_order"] = _rope_order(view, model_config)
    return geometry


def _rope_order(view: Any, model_config: Any) -> str:
    """In which order the rotated elements of latent attention lie on this kind of device.

    Ascend's operators leave halves behind for the scaled rotation of DeepSeek's checkpoints; for
    others the order there is not known. An unscaled one may be written as the type "default".
    """
    config = model_config.hf_text_config
    interleaved = getattr(config, "rope_interleave", True)
    if str(view.device) != "npu":
        return formats.PAIRS if interleaved else formats.HALVES
    scaling = getattr(config, "rope_scaling", None) or {}
    scaled = scaling.get("rope_type", scaling.get("type")) in ("yarn", "deepseek_yarn")
    return formats.HALVES if scaled and interleaved else formats.UNKNOWN_ORDER


def _turn(view: Any, parallel: Any, replicated: bool, heads: HeadRange | None) -> Turn:
    """This rank's turn among those on its node that hold the same bytes."""
    rank, size = parallel.attn_tp_rank, parallel.attn_tp_size
    if replicated:
        alike = list(range(size))
    elif heads is not None:
        alike = [r for r in range(size) if heads_of(r, size, heads.total) == heads]
    else:
        return ONLY_WRITER
    ranks_per_node = max(1, parallel.tp_size // max(1, view.nnodes))
    return turn_of(rank, alike, parallel.tp_rank - rank, ranks_per_node)


def read_weights(view: Any, model_path: str) -> Weights | None:
    """Fingerprint of the checkpoint at `model_path`; None, logged, if there is none to be read."""
    directory = local_directory(view, model_path)
    try:
        return weights_fingerprint(directory) if directory is not None else None
    except (IdentityError, OSError) as error:
        logger.warning("hpkv: weights of %s are private to this server: %s", model_path, error)
        return None


def weights_of_files(view: Any, load_format: Any) -> bool:
    """Whether a model loaded now would have the weights in its model path."""
    text = str(getattr(load_format, "value", load_format)).lower()
    foreign = [name for name in _FOREIGN_WEIGHTS if getattr(view, name, None)]
    cached = getattr(view, "weight_cache_mode", "off") != "off"
    code = variables_set(_ENVIRONMENT_PREFIXES, _FOREIGN_CODE)
    return text in _FILE_FORMATS and not foreign and not cached and not code


def local_directory(view: Any, model_path: str) -> Path | None:
    """Where the model's files are on this machine; None if they are not."""
    path = Path(model_path)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model_path,
            revision=view.revision,
            cache_dir=view.download_dir,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:  # not a repository name, or not in the cache
        logger.warning("hpkv: no local files of %s: %s", model_path, error)
        return None
    return Path(found)


def launch_id_of(view: Any) -> str:
    """The random word of this launch."""
    linker = view.unified_cache_external_linker_config
    return str(linker["linker_extra_config"]["launch_id"])


def view_of(server_args: Any) -> Any:
    """SGLang's arguments as resolved; the record itself keeps what the user typed."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def _start_weights(view: Any, model_config: Any) -> tuple[str, str]:
    """(weights identity, digest of tensor names) of the model as it was loaded."""
    if weights_of_files(view, view.load_format):
        read = read_weights(view, str(model_config.model_path))
        if read is not None:
            return f"content:{read.content}", read.names
    # Data-parallel replicas load for themselves: what is random differs between them.
    return private_weights(launch_id_of(view), "start", replica_name()), ""


def replica_name() -> str:
    """Which data-parallel replica this scheduler belongs to."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return f"dp{parallel.dp_rank}/{parallel.attn_dp_rank}"


def _config_digest(directory: Path | None, model_config: Any) -> str:
    if directory is not None and directory.is_dir():
        return config_fingerprint(directory)
    return hashlib.sha256(canonical_json(model_config.hf_config.to_dict()).encode()).hexdigest()


def _overrides(text: str | None) -> str:
    return canonical_json(json.loads(text or "{}"))


def _numerics(view: Any) -> dict[str, str]:
    """Settings and variables that are set; a file counts by its content."""
    given = {name: getattr(view, name, None) for name in _NUMERIC_SETTINGS}
    found = {name: str(value) for name, value in given.items() if value not in _UNSET}
    found |= variables_set(_ENVIRONMENT_PREFIXES, _NUMERIC_WORDS)
    scales = getattr(view, "quantization_param_path", None)
    if scales:
        found["quantization_param"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    return found


def _engine() -> str:
    from sglang.version import __version__

    return f"sglang {__version__}"
