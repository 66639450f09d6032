// Python's view of the disk tier. lookup and promote keep the GIL, because they are short and never
// touch a file; everything else releases it.
#include "disk/store.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "bind/bind.h"
#include "bind/handles.h"
#include "disk/hex.h"

namespace nb = nanobind;

namespace hpkv::bind {
namespace {

using disk::PromoteTicket;
using disk::Store;
using disk::VerifyReport;

std::chrono::nanoseconds nanoseconds_of(double seconds) {
  // Negative and NaN do not wait; a limit of some years keeps the sum with "now" in range.
  constexpr double kSecondsMax = 1e8;
  if (!(seconds > 0)) return std::chrono::nanoseconds(0);
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, kSecondsMax) * 1e9));
}

std::unique_ptr<Store> open_store(const PoolHandle& pool, const std::string& directory,
                                  std::optional<std::uint64_t> storage_bytes,
                                  std::uint64_t block_bytes, bool background) {
  disk::StoreOptions options;
  options.directory = directory;
  options.storage_bytes = storage_bytes;
  options.block_bytes = block_bytes;
  options.background = background;
  const nb::gil_scoped_release release;
  return Store::open(pool.pool, options);
}

void check_place(const std::string& directory, std::optional<std::uint64_t> storage_bytes) {
  disk::StoreOptions options;
  options.directory = directory;
  options.storage_bytes = storage_bytes;
  const nb::gil_scoped_release release;
  Store::check_place(options);
}

nb::dict report_of(const VerifyReport& report) {
  nb::dict out;
  out["blocks"] = report.blocks;
  out["total_blocks"] = report.total_blocks;
  out["bytes"] = report.bytes;
  out["bad"] = report.bad;
  out["stale"] = report.stale;
  out["io_errors"] = report.io_errors;
  out["complete"] = report.complete;
  return out;
}

nb::dict verify(Store& self, const nb::callable& progress, bool fix) {
  const auto ask = [&progress](const VerifyReport& report) {
    const nb::gil_scoped_acquire acquire;
    return nb::cast<bool>(progress(report.blocks, report.total_blocks, report.bytes));
  };
  VerifyReport report;
  {
    const nb::gil_scoped_release release;
    report = self.verify(ask, fix);
  }
  return report_of(report);
}

nb::dict stats(const Store& self) {
  disk::StoreStats stats;
  {
    const nb::gil_scoped_release release;
    stats = self.stats();
  }
  nb::dict out;
  out["blocks"] = stats.disk.entries;
  out["used_bytes"] = stats.disk.bytes;
  out["regions_in_use"] = stats.disk.regions_in_use;
  out["regions_unknown"] = stats.disk.regions_unknown;
  out["read_bytes"] = stats.files.read_bytes;
  out["written_bytes"] = stats.files.written_bytes;
  out["written_blocks"] = stats.files.written_blocks;
  out["carried_blocks"] = stats.files.carried_blocks;
  out["recovered_blocks"] = stats.files.recovered_blocks;
  out["regions_evicted"] = stats.files.regions_evicted;
  out["regions_removed"] = stats.files.regions_removed;
  out["bad_blocks"] = stats.files.bad_blocks;
  out["stale_reads"] = stats.files.stale_reads;
  out["read_errors"] = stats.files.read_errors;
  out["write_errors"] = stats.files.write_errors;
  out["sync_errors"] = stats.files.sync_errors;
  out["space_errors"] = stats.files.space_errors;
  out["last_error"] = stats.files.last_error;
  out["promoted_blocks"] = stats.promoted_blocks;
  out["promotions_refused"] = stats.promotions_refused;
  out["promotions_cut"] = stats.promotions_cut;
  out["promote_pinned_bytes"] = stats.promote_pinned_bytes;
  out["demoted_blocks"] = stats.demoted_blocks;
  out["demotions_refused"] = stats.demotions_refused;
  out["resting"] = stats.reading_rests || stats.writing_rests;
  out["hanging"] = stats.reading_hangs || stats.writing_hangs;
  return out;
}

void set_delay(Store& self, const std::string& kind, std::int64_t microseconds) {
  if (microseconds < 0 || (kind != "read" && kind != "write")) {
    throw nb::value_error("kind is 'read' or 'write', microseconds at least 0");
  }
  const std::chrono::microseconds delay(microseconds);
  if (kind == "read") {
    self.set_read_delay(delay);
  } else {
    self.set_write_delay(delay);
  }
}

NamespaceId namespace_id(const nb::bytes& raw) {
  NamespaceId id;
  if (raw.size() != id.size()) throw nb::value_error("a namespace is 32 bytes");
  const auto* bytes = static_cast<const std::byte*>(raw.data());
  std::copy(bytes, bytes + id.size(), id.begin());
  return id;
}

std::vector<std::string> namespaces(const Store& self) {
  std::vector<std::string> names;
  for (const NamespaceId& id : self.namespaces()) names.push_back(disk::hex(id));
  return names;
}

void bind_ticket(nb::module_& module) {
  const auto waiting = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<PromoteTicket>(module, "PromoteTicket",
                            "Blocks of one request on their way into the host pool.")
      .def_prop_ro("done", &PromoteTicket::done)
      .def_prop_ro("count", &PromoteTicket::count)
      .def_prop_ro("from_disk", &PromoteTicket::from_disk_count)
      .def(
          "wait",
          [](PromoteTicket& self, double timeout_s) {
            return self.wait(nanoseconds_of(timeout_s));
          },
          nb::arg("timeout_s"), waiting)
      .def("cancel", &PromoteTicket::cancel)
      .def("release", &PromoteTicket::release);
}

void bind_operating(nb::class_<Store>& store) {
  const auto waiting = nb::call_guard<nb::gil_scoped_release>();
  store
      .def(
          "demote",
          [](Store& self, std::uint32_t namespace_index, const KeyBatch& keys) {
            return self.demote(namespace_index, keys.keys);
          },
          nb::arg("namespace"), nb::arg("keys"), waiting)
      .def(
          "sync", [](Store& self) { return self.sync(); }, waiting)
      .def(
          "wait_notice",
          [](Store& self, double timeout_s) { return self.wait_notice(nanoseconds_of(timeout_s)); },
          nb::arg("timeout_s"), waiting)
      .def("namespaces", &namespaces, waiting)
      .def("recover", &Store::recover, waiting)
      .def("verify", &verify, nb::arg("progress"), nb::kw_only(), nb::arg("fix"))
      .def(
          "drop_namespace",
          [](Store& self, const nb::bytes& id) {
            const NamespaceId wanted = namespace_id(id);
            const nb::gil_scoped_release release;
            return self.drop_namespace(wanted);
          },
          nb::arg("namespace"))
      .def("clear", &Store::clear, waiting)
      .def("stats", &stats)
      .def("set_delay", &set_delay, nb::arg("kind"), nb::arg("microseconds"))
      .def(
          "close",
          [](Store& self, double timeout_s) { return self.close(nanoseconds_of(timeout_s)); },
          nb::arg("timeout_s"), waiting);
}

}  // namespace

void bind_store(nb::module_& module) {
  bind_ticket(module);
  auto store =
      nb::class_<Store>(module, "Store", "One process's attachment to the disk tier below a pool.");
  store
      .def_static("open", &open_store, nb::arg("pool"), nb::arg("directory"), nb::kw_only(),
                  nb::arg("storage_bytes") = nb::none(), nb::arg("block_bytes") = 0,
                  nb::arg("background") = true)
      .def_static("check_place", &check_place, nb::arg("directory"), nb::kw_only(),
                  nb::arg("storage_bytes") = nb::none())
      .def_prop_ro("path", [](const Store& self) { return self.info().directory; })
      .def_prop_ro("storage_bytes", [](const Store& self) { return self.info().storage_bytes; })
      .def_prop_ro("region_count", [](const Store& self) { return self.info().region_count; })
      .def_prop_ro("direct_io", [](const Store& self) { return self.info().direct; })
      .def(
          "lookup", [](const Store& self, const KeyBatch& keys) { return self.lookup(keys.keys); },
          nb::arg("keys"))
      .def(
          "promote",
          [](Store& self, std::uint32_t namespace_index, const KeyBatch& keys) {
            return self.promote(namespace_index, keys.keys);
          },
          nb::arg("namespace"), nb::arg("keys"));
  bind_operating(store);
}

}  // namespace hpkv::bind
