// The stream engine's device on an NVIDIA GPU, by the CUDA runtime. No CUDA header is needed to use
// it: streams and events are handles (torch's `cuda_stream` and `cuda_event` among them), so one
// build serves every torch of the same CUDA major version.
#pragma once

#include <memory>

#include "copy/stream/device.h"

namespace hpkv::cuda {

// `ordinal` as the process counts its devices. Throws Error{system} when there is no such device,
// or one whose kernels cannot read pinned host memory at the host's addresses.
[[nodiscard]] std::unique_ptr<stream::Device> make_device(int ordinal);

}  // namespace hpkv::cuda
