#include "disk/region_store.h"

#include <atomic>
#include <cerrno>

#include "disk/writer.h"

namespace hpkv::disk {
namespace {

constexpr int kForgetAllTries = 50;

std::uint64_t block_bytes_max(std::uint64_t region_bytes) {
  std::uint64_t stride = region_bytes / 2 / kPage * kPage;
  while (stride != 0 && region_capacity(region_bytes, stride) < 2) stride -= kPage;
  return stride;
}

}  // namespace

class RegionStore::Impl {
 public:
  Impl(std::shared_ptr<Pool> pool, std::shared_ptr<Catalog> catalog,
       const RegionStoreOptions& options, std::shared_ptr<Files> files)
      : context(std::move(pool), std::move(catalog), options, std::move(files)),
        reader(context),
        recovery(context),
        evictor(context),
        writer(context, reader, recovery, evictor) {
    const StoreHeader& header = context.header();
    info = {.directory = context.directory.path(),
            .notice = {},
            .id = header.id,
            .storage_bytes = header.storage_bytes,
            .region_bytes = header.region_bytes,
            .region_count = header.region_count,
            .block_bytes_max = block_bytes_max(header.region_bytes),
            .direct = context.directory.direct(),
            .created = context.directory.created(),
            .took_over = context.directory.index_is_stale()};
    if (!info.direct) {
      info.notice = "the file system of " + info.directory +
                    " takes no direct I/O: the disk tier goes through the page cache";
    }
  }

  // The index and the files must speak of the same store before anybody else comes in.
  void attach() {
    const StoreHeader& header = context.header();
    context.catalog->attach(header.id, header.region_count, header.region_bytes);
    if (context.directory.index_is_stale()) {
      bool forgotten = false;
      for (int i = 0; i < kForgetAllTries && !forgotten; ++i) {
        forgotten = context.catalog->forget_all();
      }
      if (!forgotten) {
        throw Error(ErrorKind::system, "open store " + info.directory +
                                           ": the pool's locks were not free in time; look for a "
                                           "stopped client (hpkv stat)");
      }
    }
    context.directory.settle();
  }

  Context context;
  Reader reader;
  Recovery recovery;
  Evictor evictor;
  Writer writer;
  StoreInfo info;
  std::atomic<bool> in_place{true};  // as tend() saw it last; advice, so relaxed
  bool closed = false;
};

std::shared_ptr<RegionStore> RegionStore::open(std::shared_ptr<Pool> pool,
                                               std::shared_ptr<Catalog> catalog,
                                               const RegionStoreOptions& options,
                                               std::shared_ptr<Files> files) {
  auto impl =
      std::make_unique<Impl>(std::move(pool), std::move(catalog), options, std::move(files));
  impl->attach();
  return std::shared_ptr<RegionStore>(new RegionStore(std::move(impl)));
}

RegionStore::RegionStore(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

RegionStore::~RegionStore() { close(); }

const StoreInfo& RegionStore::info() const noexcept { return impl_->info; }

StoreCounters RegionStore::counters() const { return impl_->context.tally.snapshot(); }

bool RegionStore::gives_back() const noexcept { return impl_->context.gives_back; }

AppendResult RegionStore::append(std::uint32_t namespace_index, std::span<const BlockRef> pinned,
                                 std::span<const Key> keys) {
  if (pinned.size() != keys.size()) {
    throw Error(ErrorKind::argument, "append: " + std::to_string(pinned.size()) + " blocks and " +
                                         std::to_string(keys.size()) + " keys were given");
  }
  std::vector<WriteItem> items(keys.size());
  const Pool& pool = *impl_->context.pool;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    items[i] = {keys[i], pool.payload(pinned[i]), pool.checksum(pinned[i])};
  }
  if (!impl_->in_place.load(std::memory_order_relaxed)) {
    impl_->context.tally.refused_blocks.fetch_add(items.size(), std::memory_order_relaxed);
    return {.refused = static_cast<std::uint32_t>(items.size()), .error = ENOENT};
  }
  return impl_->writer.append(namespace_index, items);
}

void RegionStore::read(std::span<const DiskRef> refs, std::span<std::byte* const> targets,
                       std::span<ReadOutcome> outcomes) {
  if (refs.size() != targets.size() || refs.size() != outcomes.size()) {
    throw Error(ErrorKind::argument, "read: blocks, targets and outcomes differ in number");
  }
  impl_->reader.read(refs, targets, outcomes);
}

int RegionStore::sync_aged(bool all) { return -impl_->writer.sync_aged(all); }

std::optional<int> RegionStore::recover_one() { return impl_->recovery.recover_one(); }

bool RegionStore::recovered() const noexcept { return impl_->context.recovered(); }

int RegionStore::tend() {
  // Removed, moved or mounted over: what lies under the name is not ours to write to. If it comes
  // back, so do we.
  const bool in_place = impl_->context.directory.in_place();
  if (impl_->in_place.exchange(in_place, std::memory_order_relaxed) && !in_place) {
    impl_->context.tally.failed(impl_->context.tally.write_errors, "find the store's directory",
                                -ENOENT);
  }
  if (!in_place) return ENOENT;
  const int regions = impl_->writer.tend_regions();
  const int space = impl_->evictor.shrink();
  return -(regions < 0 ? regions : space);
}

bool RegionStore::make_room(std::uint64_t stride) { return impl_->writer.make_room(stride); }

VerifyReport RegionStore::verify(const std::function<bool(const VerifyReport&)>& progress,
                                 bool fix) {
  return impl_->reader.verify(progress, fix);
}

std::uint64_t RegionStore::clear(std::optional<std::uint32_t> namespace_index) {
  Context& context = impl_->context;
  std::uint64_t dropped = 0;
  for (std::uint32_t i = 0; i < shm::kNamespaceCount; ++i) {
    if (namespace_index && *namespace_index != i) continue;
    const auto info = context.pool->name_space(i);
    if (!info) continue;
    // The descriptor first: without it, recovery leaves the blocks out.
    const int code = context.directory.namespaces().remove(info->id);
    if (code < 0) context.tally.failed(context.tally.write_errors, "clear a namespace", code);
    dropped += context.catalog->drop_namespace(i);
  }
  impl_->recovery.forget_namespaces();
  impl_->writer.retire_empty();
  std::vector<DiskRef> left;
  for (std::uint32_t i = 0; i < context.region_count(); ++i) {
    const RegionInfo info = context.catalog->region(i);
    context.catalog->entries(i, left);
    const bool may_go = info.state == RegionState::free || info.state == RegionState::sealed;
    if (info.owned || !may_go || !left.empty()) continue;
    int code = 0;
    if (context.files.exists(i)) static_cast<void>(impl_->evictor.remove_file(i, info.state, code));
  }
  return dropped;
}

void RegionStore::close() noexcept {
  if (impl_->closed) return;
  impl_->closed = true;
  static_cast<void>(impl_->writer.sync_aged(true));
  impl_->writer.leave();
  impl_->context.directory.release();
}

}  // namespace hpkv::disk
