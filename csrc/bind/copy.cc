// Python's view of the copy engine: regions, layouts, tickets and the engine.
// What it has in common with the stream engine is in engine.h, and the rules about the GIL too.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "bind/bind.h"
#include "bind/engine.h"
#include "bind/handles.h"
#include "copy/engine.h"

namespace hpkv::bind {
namespace {

using Pages = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Python's CopyEngine.
struct EngineHandle {
  std::unique_ptr<CopyEngine> engine;
  int layer_count;
};

std::vector<std::int64_t> copied(const Pages& pages) {
  return {pages.data(), pages.data() + pages.shape(0)};
}

const std::byte* data_of(const Bytes& bytes) {
  return reinterpret_cast<const std::byte*>(bytes.data());
}

// Where a copy goes; as long as its source.
std::byte* target_of(const WritableBytes& target, const Bytes& source) {
  if (target.shape(0) != source.shape(0)) {
    throw nb::value_error("target and source have different lengths");
  }
  return reinterpret_cast<std::byte*>(target.data());
}

void bind_checksums(nb::module_& module) {
  module.def(
      "crc32c",
      [](const Bytes& bytes, std::uint32_t crc) {
        const nb::gil_scoped_release released;
        return crc32c({data_of(bytes), bytes.shape(0)}, crc);
      },
      nb::arg("data"), nb::arg("crc") = 0);
  module.def("crc32c_combine", &crc32c_combine, nb::arg("first"), nb::arg("second"),
             nb::arg("second_bytes"));
  module.def("crc32c_implementation", &crc32c_implementation);
  module.def(
      "copy_nt_crc32c",
      [](const WritableBytes& target, const Bytes& source, std::uint32_t crc) {
        std::byte* const to = target_of(target, source);
        const nb::gil_scoped_release released;
        return copy_nt_crc32c(to, data_of(source), source.shape(0), crc);
      },
      nb::arg("target").noconvert(), nb::arg("source"), nb::arg("crc") = 0);
  module.def(
      "copy_nt",
      [](const WritableBytes& target, const Bytes& source) {
        std::byte* const to = target_of(target, source);
        const nb::gil_scoped_release released;
        copy_nt(to, data_of(source), source.shape(0));
      },
      nb::arg("target").noconvert(), nb::arg("source"));
}

void bind_layout(nb::module_& module) {
  nb::class_<Region>(module, "Region")
      .def(
          "__init__",
          [](Region* self, std::uint32_t layer, std::uint64_t base, std::uint64_t page_stride,
             std::uint64_t piece_count, std::uint64_t piece_stride, std::uint64_t piece_bytes,
             std::uint64_t block_offset, std::uint64_t block_stride) {
            new (self) Region{layer,        base,        page_stride,  piece_count,
                              piece_stride, piece_bytes, block_offset, block_stride};
          },
          nb::kw_only(), nb::arg("layer"), nb::arg("base"), nb::arg("page_stride"),
          nb::arg("piece_count"), nb::arg("piece_stride"), nb::arg("piece_bytes"),
          nb::arg("block_offset"), nb::arg("block_stride") = 0)
      .def_ro("layer", &Region::layer)
      .def_ro("base", &Region::base)
      .def_ro("page_stride", &Region::page_stride)
      .def_ro("piece_count", &Region::piece_count)
      .def_ro("piece_stride", &Region::piece_stride)
      .def_ro("piece_bytes", &Region::piece_bytes)
      .def_ro("block_offset", &Region::block_offset)
      .def_ro("block_stride", &Region::block_stride);
  nb::class_<BlockLayout>(module, "BlockLayout")
      .def(
          "__init__",
          [](BlockLayout* self, std::uint64_t block_bytes, std::uint32_t layer_count,
             std::uint64_t page_count, std::vector<Region> regions) {
            checked([&] {
              return new (self)
                  BlockLayout(block_bytes, layer_count, page_count, std::move(regions));
            });
          },
          nb::kw_only(), nb::arg("block_bytes"), nb::arg("layer_count"), nb::arg("page_count"),
          nb::arg("regions"))
      .def_prop_ro("block_bytes", &BlockLayout::block_bytes)
      .def_prop_ro("layer_count", &BlockLayout::layer_count)
      .def_prop_ro("page_count", &BlockLayout::page_count)
      .def_prop_ro("regions", [](const BlockLayout& self) {
        return std::vector<Region>(self.regions().begin(), self.regions().end());
      });
}

void bind_source(nb::module_& module) {
  nb::class_<SourceHandle>(module, "BlockSource")
      .def(
          "__init__",
          [](SourceHandle* self, const BlockLayout& layout, std::uint64_t block_bytes,
             std::vector<std::vector<Region>> parts) {
            checked([&] {
              return new (self) SourceHandle{
                  std::make_shared<BlockSource>(layout, block_bytes, std::move(parts))};
            });
          },
          nb::arg("layout"), nb::kw_only(), nb::arg("block_bytes"), nb::arg("parts"))
      .def_prop_ro("block_bytes",
                   [](const SourceHandle& self) { return self.source->block_bytes(); })
      .def_prop_ro("blocks_per_page",
                   [](const SourceHandle& self) { return self.source->blocks_per_page(); });
}

void bind_tickets(nb::module_& module) {
  auto spill = nb::class_<SpillTicket>(module, "SpillTicket");
  bind_spill_progress(spill, [](SpillTicket& self) -> SpillTicket& { return self; });
  spill.def("cancel", &SpillTicket::cancel);
  auto load = nb::class_<LoadTicket>(module, "LoadTicket");
  bind_load_progress(load, [](LoadTicket& self) -> LoadTicket& { return self; });
  load.def(
      "wait_layer",
      [](LoadTicket& self, std::uint32_t layer) {
        check_layer(self, layer);
        if (self.layer_done(layer)) return;
        const nb::gil_scoped_release released;
        self.wait_layer(layer);
      },
      nb::arg("layer"));
  nb::class_<VerifyTicket>(module, "VerifyTicket")
      .def_prop_ro("done", &VerifyTicket::done)
      .def_prop_ro("good", &VerifyTicket::good)
      .def("wait", &VerifyTicket::wait, nb::call_guard<nb::gil_scoped_release>());
}

void bind_submission(nb::class_<EngineHandle>& engine) {
  engine
      .def(
          "spill",
          [](EngineHandle& self, const KeyBatch& keys, const Pages& pages, std::int64_t turn,
             std::int64_t turns) {
            return checked(
                [&] { return self.engine->spill(keys.keys, copied(pages), {}, {turn, turns}); });
          },
          nb::arg("keys"), nb::arg("pages"), nb::arg("turn") = 0, nb::arg("turns") = 1)
      .def(
          "load",
          [](EngineHandle& self, LeaseHandle& lease, const Pages& pages,
             const SourceHandle* source) {
            return checked([&] {
              return self.engine->load(std::move(lease.lease), copied(pages), {},
                                       source != nullptr ? source->source : nullptr);
            });
          },
          nb::arg("lease"), nb::arg("pages"), nb::arg("source") = nb::none())
      .def(
          "verify",
          [](EngineHandle& self, LeaseHandle& lease) {
            return self.engine->verify(std::move(lease.lease));
          },
          nb::arg("lease"));
}

}  // namespace

nb::dict as_dict(const EngineStats& stats) {
  nb::dict out;
  out["spill_stored"] = stats.spill_stored;
  out["spill_present"] = stats.spill_present;
  out["spill_dropped_full"] = stats.spill_dropped_full;
  out["spill_dropped_busy"] = stats.spill_dropped_busy;
  out["spill_left_to_others"] = stats.spill_left_to_others;
  out["spill_dropped_off"] = stats.spill_dropped_off;
  out["spill_dropped_queue"] = stats.spill_dropped_queue;
  out["spill_dropped_cancelled"] = stats.spill_dropped_cancelled;
  out["spill_dropped_outside"] = stats.spill_dropped_outside;
  out["spilled_bytes"] = stats.spilled_bytes;
  out["load_tickets"] = stats.load_tickets;
  out["load_failed"] = stats.load_failed;
  out["loaded_blocks"] = stats.loaded_blocks;
  out["loaded_in_place"] = stats.loaded_in_place;
  out["loaded_bytes"] = stats.loaded_bytes;
  out["verified_blocks"] = stats.verified_blocks;
  out["bad_blocks"] = stats.bad_blocks;
  out["queued_pages"] = stats.queued_pages;
  return out;
}

void bind_copy(nb::module_& module) {
  bind_checksums(module);
  bind_layout(module);
  bind_source(module);
  bind_tickets(module);
  auto engine = nb::class_<EngineHandle>(module, "CopyEngine");
  engine.def(
      "__init__",
      [](EngineHandle* self, PoolHandle& pool, std::uint32_t namespace_index,
         const BlockLayout& layout, std::uint32_t threads) {
        EngineOptions options;
        options.threads = threads;
        auto made =
            checked([&] { return make_cpu_engine(pool.pool, namespace_index, layout, options); });
        new (self) EngineHandle{std::move(made), static_cast<int>(layout.layer_count())};
      },
      nb::arg("pool"), nb::arg("namespace"), nb::arg("layout"), nb::kw_only(),
      nb::arg("threads") = 2);
  bind_submission(engine);
  bind_running(engine);
}

}  // namespace hpkv::bind
