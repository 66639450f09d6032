// Python's view of the pool. Calls that may take milliseconds release the GIL; lookup, touch and
// pin keep it, because they are bounded and shorter than giving it away.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "bind/bind.h"
#include "bind/handles.h"
#include "disk/catalog.h"
#include "shm/transfer.h"

namespace nb = nanobind;

namespace hpkv::bind {
namespace {

// The exception class, owned by the module.
nb::handle& pool_error_class() {
  static nb::handle type;
  return type;
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    const nb::tuple args = nb::make_tuple(std::string(kind_name(error.kind())), error.what());
    PyErr_SetObject(pool_error_class().ptr(), args.ptr());
  }
}

// A buffer of Python's for the length of a call.
class BufferView {
 public:
  BufferView(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const {
    return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

template <std::size_t kBytes>
std::span<const std::byte, kBytes> exact(const nb::bytes& raw, const char* what) {
  if (raw.size() != kBytes) {
    throw nb::value_error((std::string(what) + ": " + std::to_string(raw.size()) + " bytes, not " +
                           std::to_string(kBytes))
                              .c_str());
  }
  return std::span<const std::byte, kBytes>(static_cast<const std::byte*>(raw.data()), kBytes);
}

NamespaceId namespace_id(const nb::bytes& raw) {
  NamespaceId id;
  std::memcpy(id.data(), exact<32>(raw, "namespace").data(), id.size());
  return id;
}

nb::bytes to_bytes(std::span<const std::byte> raw) {
  return nb::bytes(reinterpret_cast<const char*>(raw.data()), raw.size());
}

PoolHandle open_pool(const std::string& directory, std::optional<std::uint64_t> pool_bytes,
                     bool create, bool read_only, bool verify_always) {
  PoolOptions options;
  options.directory = directory;
  options.pool_bytes = pool_bytes;
  options.create = create;
  options.read_only = read_only;
  options.verify_always = verify_always;
  const nb::gil_scoped_release release;
  return {std::shared_ptr<Pool>(Pool::open(options))};
}

void check_place(const std::string& directory, std::optional<std::uint64_t> pool_bytes) {
  PoolOptions options;
  options.directory = directory;
  options.pool_bytes = pool_bytes;
  const nb::gil_scoped_release release;
  Pool::check_place(options);
}

std::uint32_t add_namespace(PoolHandle& self, const nb::bytes& id, const nb::bytes& descriptor,
                            std::uint64_t block_bytes) {
  return self.pool->add_namespace(
      namespace_id(id), {static_cast<const std::byte*>(descriptor.data()), descriptor.size()},
      block_bytes);
}

nb::list namespaces(const PoolHandle& self) {
  std::vector<NamespaceInfo> infos;
  {
    const nb::gil_scoped_release release;
    infos = self.pool->namespaces();
  }
  nb::list out;
  for (const NamespaceInfo& info : infos) {
    out.append(nb::make_tuple(to_bytes(info.id),
                              nb::bytes(info.descriptor.data(), info.descriptor.size()),
                              info.block_bytes, info.blocks));
  }
  return out;
}

nb::list known_namespaces(const PoolHandle& self) {
  nb::list out;
  for (const NamespaceId& id : self.pool->known_namespaces()) out.append(to_bytes(id));
  return out;
}

nb::object describe(const PoolHandle& self, const nb::bytes& id) {
  const auto found = self.pool->describe(namespace_id(id));
  if (!found) return nb::none();
  const auto& [index, info] = *found;
  return nb::make_tuple(index, nb::bytes(info.descriptor.data(), info.descriptor.size()),
                        info.block_bytes);
}

const char* put_block(PoolHandle& self, std::uint32_t namespace_index, const nb::bytes& raw_key,
                      nb::handle payload) {
  const Key key = Key::from_bytes(exact<32>(raw_key, "key"));
  const BufferView view(payload, PyBUF_SIMPLE);
  PutStatus status{};
  {
    const nb::gil_scoped_release release;
    status = put(*self.pool, namespace_index, key, view.bytes());
  }
  switch (status) {
    case PutStatus::stored:
      return "stored";
    case PutStatus::present:
      return "present";
    case PutStatus::full:
      return "full";
    case PutStatus::busy:
      return "busy";
    case PutStatus::off:
      return "off";
  }
  return "off";
}

bool get_block(PoolHandle& self, const nb::bytes& raw_key, nb::handle out) {
  const Key key = Key::from_bytes(exact<32>(raw_key, "key"));
  const BufferView view(out, PyBUF_WRITABLE);
  const nb::gil_scoped_release release;
  return get(*self.pool, key, view.bytes());
}

nb::dict stats(const PoolHandle& self) {
  PoolStats stats;
  disk::DiskStats on_disk;
  std::uint64_t pending = 0;
  const disk::Catalog catalog(self.pool);
  {
    const nb::gil_scoped_release release;
    stats = self.pool->stats();
    on_disk = catalog.stats();
    pending = catalog.pending_blocks();
  }
  nb::dict out;
  out["pool_bytes"] = stats.pool_bytes;
  out["reserved_bytes"] = stats.reserved_bytes;
  out["used_bytes"] = stats.used_bytes;
  out["blocks"] = stats.blocks;
  out["writing"] = stats.writing;
  out["pinned"] = stats.pinned;
  out["quarantined"] = stats.quarantined;
  out["clients"] = stats.clients;
  out["epoch"] = stats.epoch;
  out["hits"] = stats.hits;
  out["misses"] = stats.misses;
  out["stored"] = stats.stored;
  out["evictions"] = stats.evictions;
  out["full"] = stats.full;
  out["busy"] = stats.busy;
  out["lock_timeouts"] = stats.lock_timeouts;
  out["takeovers"] = stats.takeovers;
  out["rebuilds"] = stats.rebuilds;
  out["reaped"] = stats.reaped;
  out["bad_checksums"] = stats.bad_checksums;
  out["spilled_bytes"] = stats.spilled_bytes;
  out["loaded_bytes"] = stats.loaded_bytes;
  out["poisoned"] = stats.poisoned;
  out["disk_bytes"] = catalog.region_count() * catalog.region_bytes();
  out["disk_used_bytes"] = on_disk.bytes;
  out["disk_blocks"] = on_disk.entries;
  out["disk_pending_blocks"] = pending;
  out["disk_regions"] = catalog.region_count();
  out["disk_regions_in_use"] = on_disk.regions_in_use;
  out["disk_regions_unknown"] = on_disk.regions_unknown;
  out["disk_demoted_bytes"] = stats.demoted_bytes;
  out["disk_promoted_bytes"] = stats.promoted_bytes;
  out["disk_errors"] = stats.disk_errors;
  return out;
}

void bind_lease(nb::module_& module) {
  nb::class_<LeaseHandle>(module, "Lease", "Pins on the leading run of ready blocks.")
      .def_prop_ro("count", [](const LeaseHandle& self) { return self.lease.count(); })
      .def_prop_ro("verified_count",
                   [](const LeaseHandle& self) { return self.lease.verified_count(); })
      .def(
          "keep", [](LeaseHandle& self, std::size_t count) { self.lease.keep(count); },
          nb::arg("count"))
      .def(
          "take",
          [](LeaseHandle& self, std::size_t count) { return LeaseHandle{self.lease.take(count)}; },
          nb::arg("count"))
      .def("release", [](LeaseHandle& self) { self.lease.release(); });
}

void bind_operating(nb::class_<PoolHandle>& pool) {
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  pool.def(
          "drop_namespace",
          [](PoolHandle& self, const nb::bytes& id) {
            const NamespaceId wanted = namespace_id(id);
            const nb::gil_scoped_release release;
            return self.pool->drop_namespace(wanted);
          },
          nb::arg("namespace"))
      .def(
          "drop",
          [](PoolHandle& self, const KeyBatch& keys) {
            const nb::gil_scoped_release release;
            return self.pool->drop(keys.keys);
          },
          nb::arg("keys"))
      .def(
          "clear", [](PoolHandle& self) { return self.pool->clear(); }, released)
      .def("stats", &stats)
      .def(
          "check", [](const PoolHandle& self) { return self.pool->check(); }, released)
      .def(
          "maintain", [](PoolHandle& self) { self.pool->maintain(); }, released)
      .def("close", [](PoolHandle& self) { self.pool->close(); }, released);
}

void bind_pool_class(nb::module_& module) {
  auto pool =
      nb::class_<PoolHandle>(module, "Pool", "One process's attachment to the node's host pool.");
  pool.def_static("open", &open_pool, nb::arg("directory"), nb::kw_only(),
                  nb::arg("pool_bytes") = nb::none(), nb::arg("create") = true,
                  nb::arg("read_only") = false, nb::arg("verify_always") = false)
      .def_static("check_place", &check_place, nb::arg("directory"), nb::kw_only(),
                  nb::arg("pool_bytes") = nb::none())
      .def_prop_ro("path", [](const PoolHandle& self) { return self.pool->info().path; })
      .def_prop_ro("notice", [](const PoolHandle& self) { return self.pool->info().notice; })
      .def_prop_ro("pool_bytes",
                   [](const PoolHandle& self) { return self.pool->info().pool_bytes; })
      .def_prop_ro("uuid", [](const PoolHandle& self) { return to_bytes(self.pool->info().uuid); })
      .def_prop_ro("slot", [](const PoolHandle& self) { return self.pool->info().slot; })
      .def_prop_ro("adopted", [](const PoolHandle& self) { return self.pool->info().adopted; })
      .def_prop_ro("in_memory", [](const PoolHandle& self) { return self.pool->info().in_memory; })
      .def_prop_ro("epoch", [](const PoolHandle& self) { return self.pool->epoch(); })
      .def_prop_ro("poisoned", [](const PoolHandle& self) { return self.pool->poisoned(); })
      .def("add_namespace", &add_namespace, nb::arg("namespace"), nb::arg("descriptor"),
           nb::arg("block_bytes"))
      .def(
          "leave_namespace",
          [](PoolHandle& self, std::uint32_t index) { self.pool->leave_namespace(index); },
          nb::arg("namespace"))
      .def("namespaces", &namespaces)
      .def("known_namespaces", &known_namespaces)
      .def("describe", &describe, nb::arg("namespace_id"))
      .def(
          "lookup",
          [](const PoolHandle& self, const KeyBatch& keys) { return self.pool->lookup(keys.keys); },
          nb::arg("keys"))
      .def(
          "touch",
          [](PoolHandle& self, const KeyBatch& keys) { return self.pool->touch(keys.keys); },
          nb::arg("keys"))
      .def(
          "pin",
          [](PoolHandle& self, const KeyBatch& keys) {
            return LeaseHandle{Lease(self.pool, keys.keys)};
          },
          nb::arg("keys"))
      .def("put", &put_block, nb::arg("namespace"), nb::arg("key"), nb::arg("payload"))
      .def("get", &get_block, nb::arg("key"), nb::arg("out"));
  bind_operating(pool);
}

}  // namespace

void bind_pool(nb::module_& module) {
  nb::handle type = PyErr_NewException("hpkv_sglang._core.CorePoolError", PyExc_Exception, nullptr);
  module.attr("CorePoolError") = type;
  pool_error_class() = type;
  nb::register_exception_translator(&translate, nullptr);
  bind_lease(module);
  bind_pool_class(module);
}

}  // namespace hpkv::bind
