// In the place of device.cu where there is no CUDA compiler.
#include "base/error.h"
#include "copy/cuda/device.h"

namespace hpkv::cuda {

int runtime_version() noexcept { return 0; }

std::unique_ptr<stream::Device> make_device(int /*ordinal*/) {
  throw Error(ErrorKind::system,
              "CUDA device: this build has no CUDA engine, because nvcc was not found or "
              "HPKV_CUDA=OFF was given when it was built");
}

}  // namespace hpkv::cuda
