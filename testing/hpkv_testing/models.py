"""Tiny random checkpoints that the real server loads in a second.

A model is a frozen dataclass of its parameters; `build` writes it to a directory of the caller's
choice, `checkpoint` keeps it in a cache folder. Weights follow from the seed alone. They are drawn
wide enough that greedy output wanders over the vocabulary, so a wrong KV byte shows in the answer.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpkv_testing.checkpoints import made_once, name_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 320
BOS, EOS = 256, 257  # after the 256 byte tokens
_FORMAT = 1  # raise it when a change here changes the files


@dataclass(frozen=True, kw_only=True)
class TinyLlama:
    """Grouped-query attention: `heads` query heads over `kv_heads` key-value heads."""

    seed: int = 0
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32


@dataclass(frozen=True, kw_only=True)
class TinyDeepseek:
    """DeepSeek-V2: latent attention (`kv_lora_rank` + `rope_dim` per token) and experts."""

    seed: int = 0
    layers: int = 3
    heads: int = 8
    kv_lora_rank: int = 512
    rope_dim: int = 64


TinyModel = TinyLlama | TinyDeepseek


def checkpoint(model: TinyModel, folder: Path | None = None) -> Path:
    """The directory of this model's checkpoint, built on first use (seconds, imports torch)."""
    torch_version = importlib.metadata.version("torch")  # its random stream may change
    name = name_of(type(model).__name__.lower(), _FORMAT, torch_version, dataclasses.astuple(model))
    return made_once(name, lambda directory: build(model, directory), folder)


def build(model: TinyModel, directory: Path) -> None:
    """Write the checkpoint's files into an existing directory, replacing files of that name."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        weights = _llama(model) if isinstance(model, TinyLlama) else _deepseek(model)
    weights.to(torch.bfloat16).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    if isinstance(model, TinyDeepseek):
        _complete_deepseek_config(directory / "config.json")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, so that a token count can be read off a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {symbol: token for token, symbol in enumerate(bytes_to_unicode().values())}
    vocabulary.update({"<s>": BOS, "</s>": EOS})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _llama(model: TinyLlama) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=model.heads * model.head_dim,
        intermediate_size=512,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=8192,
        initializer_range=0.25,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def _deepseek(model: TinyDeepseek) -> PreTrainedModel:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        kv_lora_rank=model.kv_lora_rank,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=model.rope_dim,
        v_head_dim=128,
        first_k_dense_replace=1,
        moe_intermediate_size=128,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        max_position_embeddings=8192,
        initializer_range=0.08,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return DeepseekV2ForCausalLM(config)


def _complete_deepseek_config(path: Path) -> None:
    """Add the fields that real DeepSeek checkpoints carry and transformers does not write."""
    config = json.loads(path.read_text())
    config["moe_layer_freq"] = 1
    config["scoring_func"] = "softmax"
    config["rope_theta"] = 10000
    config["rope_scaling"] = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    path.write_text(json.dumps(config, indent=2) + "\n")
