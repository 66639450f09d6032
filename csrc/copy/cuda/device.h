// The stream engine's device on an NVIDIA GPU, by the CUDA runtime. No CUDA header is needed to use
// it: streams and events are handles (torch's `cuda_stream` and `cuda_event` among them), and the
// runtime is linked in, so one build serves every torch version. A build without a CUDA compiler
// has this interface too, with no devices.
#pragma once

#include <memory>

#include "copy/stream/device.h"

namespace hpkv::cuda {

// What it was built with, as CUDART_VERSION says it (13000 for 13.0); 0 without CUDA.
[[nodiscard]] int runtime_version() noexcept;

// `ordinal` as the process counts its devices. Throws Error{system} when the build has no CUDA,
// or there is no driver, no such device, or one whose kernels cannot read pinned host memory at the
// host's addresses.
[[nodiscard]] std::unique_ptr<stream::Device> make_device(int ordinal);

}  // namespace hpkv::cuda
