"""SGLang 0.5.23 on PyTorch's own CPU operators.

SGLang's built-in CPU engine wants compiled kernels that no package index carries. As an
out-of-tree platform every layer falls back to its `forward_native`, while scheduler, radix tree,
memory pools and HTTP server stay the real ones. Imported by SGLang only, in server processes.
"""

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

ATTENTION_BACKEND = "torch_native"


class PlainTorchPlatform(CpuDeviceMixin, SRTPlatform):
    """No Triton, no graphs, no pinned memory: what any machine with PyTorch can do."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        return False

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        # The default adds the rank as a device index, which a CPU device does not have.
        return torch.device("cpu")

    def post_load_model(self, model: torch.nn.Module) -> None:
        # Multi-head latent attention: the native backend knows the absorbed form only, and the
        # registry would otherwise send it down the path for Triton.
        from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

        handlers.AttentionBackendRegistry.register(
            ATTENTION_BACKEND, handlers._dispatch_mla_subtype
        )
        self._allow_data_parallel_attention()

    @staticmethod
    def _allow_data_parallel_attention() -> None:
        # A batch is padded to that of the other replicas and gathered from them. For that SGLang
        # asks the backend how long a padded sequence is, pins memory, copies by a Triton kernel and
        # gathers by an operator for devices, unless the platform is its own CPU engine.
        from sglang.srt.distributed.parallel_state import GroupCoordinator
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.model_executor import forward_batch_info

        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _backend: 1
        forward_batch_info._is_cpu = True
        dp_attention.memcpy_func = dp_attention.memcpy_cpu
        GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
        GroupCoordinator.reduce_scatter_tensor = GroupCoordinator._reduce_scatter_tensor
