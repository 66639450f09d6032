// A device of host threads for tests in Python: what they call device memory is the process's own.
// Part of the module only when it is built with HPKV_RIG.
#include <nanobind/nanobind.h>

#include <memory>
#include <stdexcept>

#include "base/error.h"
#include "bind/bind.h"
#include "bind/stream.h"
#include "tests/async_device.h"

namespace nb = nanobind;

namespace hpkv::bind {
namespace {

// Python's AsyncHostDevice.
struct RigHandle : DeviceHandle {
  std::shared_ptr<test::AsyncDevice> rig;

  RigHandle(std::uint64_t seed, std::uint32_t delay_us)
      : rig(std::make_shared<test::AsyncDevice>(seed, delay_us)) {
    device = rig;
  }
};

void require(const stream::Status& status) {
  if (!status.ok()) throw Error(ErrorKind::system, "device of threads: " + status.text());
}

std::uintptr_t number_of(stream::StreamHandle stream) {
  return reinterpret_cast<std::uintptr_t>(stream);
}

}  // namespace

void bind_rig(nb::module_& module) {
  nb::class_<RigHandle, DeviceHandle>(module, "AsyncHostDevice")
      .def(nb::init<std::uint64_t, std::uint32_t>(), nb::arg("seed") = 1, nb::arg("delay_us") = 50)
      .def("make_stream",
           [](RigHandle& self) {
             stream::StreamHandle made = nullptr;
             require(self.rig->make_stream(false, made));
             return number_of(made);
           })
      .def(
          "synchronize_stream",
          [](RigHandle& self, std::uintptr_t stream) {
            require(self.rig->synchronize_stream(stream_of(stream)));
          },
          nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "hold", [](RigHandle& self, std::uintptr_t stream) { self.rig->hold(stream_of(stream)); },
          nb::arg("stream"))
      .def(
          "release",
          [](RigHandle& self, std::uintptr_t stream) { self.rig->release(stream_of(stream)); },
          nb::arg("stream"))
      .def(
          "fail_call",
          [](RigHandle& self, std::uint64_t nth, bool lost) { self.rig->fail_call(nth, lost); },
          nb::arg("nth"), nb::arg("lost") = false)
      .def(
          "made_stream",
          [](RigHandle& self, std::size_t index) {
            return number_of(self.rig->made_stream(index));
          },
          nb::arg("index"));
}

}  // namespace hpkv::bind
