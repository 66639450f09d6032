"""SGLang's own transfer kernels on the same pages: what those of the engine are compared with.

`sgl_kernel.kvcacheio` copies tokens between the layers on the GPU and pinned memory in page-first
order, as SGLang's hierarchical cache does: out with one launch for all layers, back with one launch
a layer. It knows no pool, no block and no checksum, so it shows the link and not a tier.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from hpkv_sglang.layout.base import PageTensor


def sgl_kernels() -> ModuleType | str:
    """The module, or why there is none."""
    try:
        return importlib.import_module("sgl_kernel.kvcacheio")
    except (ImportError, OSError, RuntimeError) as error:  # also a wheel for another torch or GPU
        return f"sgl_kernel.kvcacheio cannot be imported: {error}"


class SglCopies:
    """Pages that begin at the tokens `spilled` go out, and come back to those at `loaded`.

    A layer has one field (latent rows) or two of the same size (K and V).
    """

    def __init__(
        self,
        kernels: ModuleType,
        tensors: list[PageTensor],
        spilled: torch.Tensor,
        loaded: torch.Tensor,
    ) -> None:
        self._kernels = kernels
        names = dict.fromkeys(tensor.field for tensor in tensors)
        self._fields = [[t.pages for t in tensors if t.field == name] for name in names]
        layers = self._fields[0]
        _, page, self._row_bytes = layers[0].shape
        self._host_row_bytes = len(layers) * self._row_bytes
        within = torch.arange(page, dtype=torch.int64, device="cuda")
        self._spilled = (spilled[:, None] + within).flatten()
        self._loaded = (loaded[:, None] + within).flatten()
        tokens = len(self._spilled)
        self._on_host = torch.arange(tokens, dtype=torch.int64, device="cuda")
        self._hosts = [
            torch.empty(tokens, self._host_row_bytes, dtype=torch.uint8, pin_memory=True)
            for _ in self._fields
        ]
        self._addresses = [
            torch.tensor([t.data_ptr() for t in field], dtype=torch.uint64, device="cuda")
            for field in self._fields
        ]

    def out(self) -> None:
        """All layers to the host."""
        shape = {
            "src_indices": self._spilled,
            "dst_indices": self._on_host,
            "item_size": self._row_bytes,
            "dst_layout_dim": self._host_row_bytes,
            "num_layers": len(self._fields[0]),
        }
        if len(self._fields) == 1:
            self._kernels.transfer_kv_all_layer_mla_lf_pf(
                src_layers=self._addresses[0], dst=self._hosts[0], **shape
            )
            return
        (src_k, src_v), (dst_k, dst_v) = self._addresses, self._hosts
        self._kernels.transfer_kv_all_layer_lf_pf(
            src_k_layers=src_k, dst_k=dst_k, src_v_layers=src_v, dst_v=dst_v, **shape
        )

    def back(self) -> None:
        """Layer by layer to the GPU."""
        for layer in range(len(self._fields[0])):
            shape = {
                "src_indices": self._on_host,
                "dst_indices": self._loaded,
                "layer_id": layer,
                "item_size": self._row_bytes,
                "src_layout_dim": self._host_row_bytes,
            }
            targets = [field[layer] for field in self._fields]
            if len(targets) == 1:
                self._kernels.transfer_kv_per_layer_mla_pf_lf(
                    src=self._hosts[0], dst=targets[0], **shape
                )
                continue
            (src_k, src_v), (dst_k, dst_v) = self._hosts, targets
            self._kernels.transfer_kv_per_layer_pf_lf(
                src_k=src_k, dst_k=dst_k, src_v=src_v, dst_v=dst_v, **shape
            )

    def check(self) -> None:
        """RuntimeError when random bytes do not come back as they went. Overwrites all pages."""
        tensors = [tensor for field in self._fields for tensor in field]
        for tensor in tensors:
            tensor.random_(0, 256)
        self.out()
        self.back()
        for tensor in tensors:
            rows = tensor.flatten(0, 1)
            if not torch.equal(rows[self._loaded], rows[self._spilled]):
                raise RuntimeError("sgl_kernel's copies did not bring back what they took")
