// What the binding of the stream engine and that of its test device share.
#pragma once

#include <cstdint>
#include <memory>

#include "copy/stream/device.h"

namespace hpkv::bind {

// Python's StreamDevice; engines share the device itself.
struct DeviceHandle {
  std::shared_ptr<stream::Device> device;
};

// Streams are numbers in Python, as torch's are: the device library's own handles.
inline stream::StreamHandle stream_of(std::uintptr_t stream) {
  return reinterpret_cast<stream::StreamHandle>(stream);
}

}  // namespace hpkv::bind
