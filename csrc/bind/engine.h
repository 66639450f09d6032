// What the bindings of the two copy engines share: errors, times, tickets, faults and counters.
//
// Submitting copies its arguments and returns with the GIL held; waiting releases it. Engine
// threads own no Python object and never take the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>

#include "base/error.h"
#include "copy/engine.h"

namespace hpkv::bind {

namespace nb = nanobind;

// Python's BlockSource. The count is the core's own, as in handles.h: an engine thread may be the
// last owner.
struct SourceHandle {
  std::shared_ptr<const BlockSource> source;
};

// A broken contract of the caller is a ValueError in Python. What the world fails at stays what it
// is: CorePoolError.
template <typename Call>
auto checked(Call&& call) {
  try {
    return call();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::argument) throw;
    throw nb::value_error(error.what());
  }
}

inline std::chrono::nanoseconds nanoseconds_of(double seconds) {
  // Negative and NaN do not wait; a limit of some years keeps the sum with "now" in range.
  constexpr double kSecondsMax = 1e8;
  if (!(seconds > 0)) return std::chrono::nanoseconds(0);
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, kSecondsMax) * 1e9));
}

inline void check_layer(const LoadTicket& ticket, std::uint32_t layer) {
  if (layer < ticket.layer_count()) return;
  const std::string message = "layer " + std::to_string(layer) + " is not in [0, " +
                              std::to_string(ticket.layer_count()) + ")";
  throw nb::index_error(message.c_str());
}

inline CopyKind kind_named(const std::string& name) {
  if (name == "spill") return CopyKind::spill;
  if (name == "load") return CopyKind::load;
  if (name == "verify") return CopyKind::verify;
  throw nb::value_error(("kind is '" + name + "'; valid: spill, load, verify").c_str());
}

// What callers see of a spill but cancel(); `ticket` says where a Handle has its SpillTicket.
template <typename Handle, typename TicketOf>
void bind_spill_progress(nb::class_<Handle>& spill, TicketOf ticket) {
  const auto waiting = nb::call_guard<nb::gil_scoped_release>();
  spill.def_prop_ro("device_done", [ticket](Handle& self) { return ticket(self).device_done(); })
      .def_prop_ro("done", [ticket](Handle& self) { return ticket(self).done(); })
      .def_prop_ro("stored", [ticket](Handle& self) { return ticket(self).stored(); })
      .def_prop_ro("present", [ticket](Handle& self) { return ticket(self).present(); })
      .def_prop_ro("dropped", [ticket](Handle& self) { return ticket(self).dropped(); })
      .def(
          "wait_device",
          [ticket](Handle& self, double timeout_s) {
            return ticket(self).wait_device(nanoseconds_of(timeout_s));
          },
          nb::arg("timeout_s"), waiting)
      .def("wait", [ticket](Handle& self) { ticket(self).wait(); }, waiting);
}

// What callers see of a load but how they wait for a layer.
template <typename Handle, typename TicketOf>
void bind_load_progress(nb::class_<Handle>& load, TicketOf ticket) {
  const auto waiting = nb::call_guard<nb::gil_scoped_release>();
  load.def_prop_ro("done", [ticket](Handle& self) { return ticket(self).done(); })
      .def_prop_ro("ok", [ticket](Handle& self) { return ticket(self).ok(); })
      .def_prop_ro("elapsed_s", [ticket](Handle& self) { return ticket(self).elapsed_s(); })
      .def(
          "layer_done",
          [ticket](Handle& self, std::uint32_t layer) {
            check_layer(ticket(self), layer);
            return ticket(self).layer_done(layer);
          },
          nb::arg("layer"))
      .def("wait", [ticket](Handle& self) { return ticket(self).wait(); }, waiting);
}

[[nodiscard]] nb::dict as_dict(const EngineStats& stats);

// Faults, counters and the end. A Handle has an `engine` and its layout's `layer_count`.
template <typename Handle>
void bind_running(nb::class_<Handle>& engine) {
  const auto waiting = nb::call_guard<nb::gil_scoped_release>();
  engine
      .def(
          "set_delay",
          [](Handle& self, const std::string& kind, int layer, std::int64_t microseconds) {
            if (layer < Faults::kEveryLayer || layer >= self.layer_count || microseconds < 0) {
              throw nb::value_error("layer is -1 or one of the layout, microseconds at least 0");
            }
            self.engine->faults().set_delay(kind_named(kind), layer,
                                            std::chrono::microseconds(microseconds));
          },
          nb::arg("kind"), nb::arg("layer"), nb::arg("microseconds"))
      .def(
          "fail_next",
          [](Handle& self, const std::string& kind, std::uint32_t count) {
            self.engine->faults().fail_next(kind_named(kind), count);
          },
          nb::arg("kind"), nb::arg("count"))
      .def("stats", [](const Handle& self) { return as_dict(self.engine->stats()); })
      .def(
          "quiesce", [](Handle& self) { self.engine->quiesce(); }, waiting)
      .def("close", [](Handle& self) { self.engine->close(); }, waiting);
}

}  // namespace hpkv::bind
