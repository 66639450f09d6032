// Python's view of the stream engine: devices, tickets whose ends a stream waits for, the engine.
//
// Submitting and telling a stream to wait keep the GIL, because giving it away may cost more than
// they do; whatever has to wait for an engine thread releases it.
#include "bind/stream.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>

#include "bind/bind.h"
#include "bind/engine.h"
#include "bind/handles.h"
#include "copy/cuda/device.h"
#include "copy/stream/engine.h"

namespace hpkv::bind {
namespace {

using stream::CopyPath;
using stream::DevicePages;
using stream::StagingShare;
using stream::StreamEngine;
using stream::StreamLoad;
using stream::StreamOptions;
using stream::Streams;
using stream::StreamSpill;

// Python's StreamEngine.
struct StreamEngineHandle {
  std::unique_ptr<StreamEngine> engine;
  int layer_count;
  std::uint64_t page_size;

  [[nodiscard]] DevicePages pages(std::uintptr_t first_slots, std::size_t count) const {
    return {reinterpret_cast<const std::int64_t*>(first_slots), count, page_size};
  }
};

// Python's LoadRoom. Python keeps the engine.
struct LoadRoomHandle {
  StreamEngine* engine;
  StagingShare left;

  std::size_t take(const LeaseHandle& lease, const SourceHandle* source) {
    return checked([&] {
      return engine->fit(lease.lease, source != nullptr ? source->source : nullptr, left);
    });
  }
};

CopyPath path_named(const char* option, const std::string& name) {
  if (name == "batch") return CopyPath::batch;
  if (name == "kernel") return CopyPath::kernel;
  throw nb::value_error((std::string(option) + " is '" + name + "'; valid: batch, kernel").c_str());
}

void bind_devices(nb::module_& module) {
  nb::class_<DeviceHandle>(module, "StreamDevice");
  module.attr("CUDA_RUNTIME") = cuda::runtime_version();
  module.def(
      "cuda_device", [](int ordinal) { return DeviceHandle{cuda::make_device(ordinal)}; },
      nb::arg("ordinal"));
}

void bind_tickets(nb::module_& module) {
  auto spill = nb::class_<StreamSpill>(module, "StreamSpill");
  bind_spill_progress(spill, [](StreamSpill& self) -> SpillTicket& { return self.ticket; });
  spill
      .def(
          "wait_reads_on",
          [](StreamSpill& self, std::uintptr_t stream, double timeout_s) {
            const auto timeout = nanoseconds_of(timeout_s);
            const bool known = self.wait_reads_on(stream_of(stream), {});
            if (known || timeout.count() == 0) return known;
            const nb::gil_scoped_release released;
            return self.wait_reads_on(stream_of(stream), timeout);
          },
          nb::arg("stream"), nb::arg("timeout_s"))
      .def("cancel", &StreamSpill::cancel);
  auto load = nb::class_<StreamLoad>(module, "StreamLoad");
  bind_load_progress(load, [](StreamLoad& self) -> LoadTicket& { return self.ticket; });
  load.def(
      "wait_layer_on",
      [](StreamLoad& self, std::uintptr_t stream, std::uint32_t layer) {
        check_layer(self.ticket, layer);
        if (const auto known = self.try_wait_layer_on(stream_of(stream), layer)) return *known;
        const nb::gil_scoped_release released;
        return self.wait_layer_on(stream_of(stream), layer);
      },
      nb::arg("stream"), nb::arg("layer"));
}

void bind_submission(nb::class_<StreamEngineHandle>& engine) {
  engine
      .def(
          "spill",
          [](StreamEngineHandle& self, const KeyBatch& keys, std::uintptr_t first_slots,
             std::uintptr_t chooser, std::uintptr_t user, std::int64_t turn, std::int64_t turns) {
            return checked([&] {
              return self.engine->spill_resident(
                  keys.keys, self.pages(first_slots, keys.keys.size()),
                  Streams{stream_of(chooser), stream_of(user)}, {turn, turns});
            });
          },
          nb::arg("keys"), nb::arg("first_slots"), nb::arg("chooser"), nb::arg("user"),
          nb::arg("turn") = 0, nb::arg("turns") = 1)
      .def(
          "load",
          [](StreamEngineHandle& self, LeaseHandle& lease, std::uintptr_t first_slots,
             std::size_t page_count, std::uintptr_t chooser, std::uintptr_t user,
             const SourceHandle* source) {
            return checked([&] {
              return self.engine->load_resident(std::move(lease.lease),
                                                self.pages(first_slots, page_count),
                                                Streams{stream_of(chooser), stream_of(user)},
                                                source != nullptr ? source->source : nullptr);
            });
          },
          nb::arg("lease"), nb::arg("first_slots"), nb::arg("page_count"), nb::arg("chooser"),
          nb::arg("user"), nb::arg("source") = nb::none())
      .def(
          "load_room",
          [](StreamEngineHandle& self) {
            return LoadRoomHandle{self.engine.get(), self.engine->load_room()};
          },
          nb::keep_alive<0, 1>())
      .def("hold_loads", [](StreamEngineHandle& self) { self.engine->hold_loads(); })
      .def("release_loads",
           [](StreamEngineHandle& self) { checked([&] { self.engine->release_loads(); }); })
      .def(
          "verify",
          [](StreamEngineHandle& self, LeaseHandle& lease) {
            return self.engine->verify(std::move(lease.lease));
          },
          nb::arg("lease"));
}

void bind_room(nb::module_& module) {
  nb::class_<LoadRoomHandle>(module, "LoadRoom")
      .def(
          "copy", [](const LoadRoomHandle& self) { return self; }, nb::keep_alive<0, 1>())
      .def("take", &LoadRoomHandle::take, nb::arg("lease"), nb::arg("source") = nb::none());
}

void bind_engine(nb::module_& module) {
  auto engine = nb::class_<StreamEngineHandle>(module, "StreamEngine");
  engine.def(
      "__init__",
      [](StreamEngineHandle* self, const DeviceHandle& device, PoolHandle& pool,
         std::uint32_t namespace_index, const BlockLayout& layout, std::uint64_t page_size,
         std::uint32_t threads, std::uint64_t staging_bytes, const std::string& spill_path,
         bool register_pool) {
        if (page_size == 0) throw nb::value_error("copy engine: a page of 0 tokens");
        StreamOptions options;
        options.queues.threads = threads;
        options.staging_bytes = staging_bytes;
        options.spill_path = path_named("spill_path", spill_path);
        if (!register_pool) options.registered_piece_bytes = 0;
        auto made = checked([&] {
          return std::make_unique<StreamEngine>(device.device, pool.pool, namespace_index, layout,
                                                options);
        });
        new (self)
            StreamEngineHandle{std::move(made), static_cast<int>(layout.layer_count()), page_size};
      },
      nb::arg("device"), nb::arg("pool"), nb::arg("namespace"), nb::arg("layout"), nb::kw_only(),
      nb::arg("page_size"), nb::arg("threads") = 2,
      nb::arg("staging_bytes") = StreamOptions().staging_bytes, nb::arg("spill_path") = "kernel",
      nb::arg("register_pool") = true);
  bind_submission(engine);
  bind_running(engine);
  engine
      .def_prop_ro("poisoned",
                   [](const StreamEngineHandle& self) { return self.engine->poisoned(); })
      .def_prop_ro("error_count",
                   [](const StreamEngineHandle& self) { return self.engine->error_count(); })
      .def_prop_ro("first_error",
                   [](const StreamEngineHandle& self) { return self.engine->first_error(); })
      .def_prop_ro("notice", [](const StreamEngineHandle& self) { return self.engine->notice(); })
      .def("check", [](StreamEngineHandle& self) { return self.engine->check(); });
}

}  // namespace

void bind_stream(nb::module_& module) {
  bind_devices(module);
  bind_tickets(module);
  bind_room(module);
  bind_engine(module);
}

}  // namespace hpkv::bind
