#include "disk/store.h"

#include <unistd.h>

#include <algorithm>

#include "disk/demoter.h"
#include "disk/directory.h"
#include "disk/keeper.h"
#include "disk/promoter.h"
#include "disk/tier.h"

namespace hpkv::disk {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLook{200};  // how often somebody looks whether a call hangs
constexpr std::chrono::seconds kRecoverMost{600};

std::uint32_t regions_in(const Catalog& catalog, RegionState state) {
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < catalog.region_count(); ++i) {
    count += catalog.region(i).state == state ? 1 : 0;
  }
  return count;
}

RegionStoreOptions region_options(const StoreOptions& options) {
  RegionStoreOptions out;
  out.directory = options.directory;
  out.storage_bytes = options.storage_bytes;
  out.block_bytes_hint = options.block_bytes;
  out.create = options.create;
  out.takeover_wait_ns = options.takeover_wait_ns;
  out.clock = options.clock;
  return out;
}

std::shared_ptr<Files> files_of(const StoreOptions& options) {
  return options.files ? options.files : system_files();
}

}  // namespace

class Store::Impl {
 public:
  Impl(std::shared_ptr<Tier> shared, const StoreOptions& options)
      : tier(std::move(shared)),
        demoter(tier),
        keeper(tier),
        promoter(tier, options.read_threads),
        recover_wait(options.recover_wait_ns) {
    if (!options.background) return;
    demoter.start();
    keeper.start();
  }

  // What is not synced is synced now, and that may hang like any other call of the disk: a thread
  // does it that can be left behind.
  [[nodiscard]] bool leave_within(nanoseconds timeout) {
    leaver.start(1, [tier = tier] { tier->store->close(); });
    return leaver.join_within(timeout);
  }

  const std::shared_ptr<Tier> tier;
  Demoter demoter;
  Keeper keeper;
  Promoter promoter;
  Crew leaver;
  const nanoseconds recover_wait;
  const int process = ::getpid();
  bool closed = false;
  bool closed_well = true;
};

Store::Store(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

Store::~Store() {
  if (::getpid() == impl_->process) {
    static_cast<void>(close(std::chrono::seconds(1)));
  } else {
    // A forked child: threads, locks and the region being written are the parent's.
    static_cast<void>(impl_.release());
  }
}

void Store::check_place(const StoreOptions& options) {
  disk::check_place(region_options(options), files_of(options));
}

std::unique_ptr<Store> Store::open(std::shared_ptr<Pool> pool, const StoreOptions& options) {
  auto catalog = std::make_shared<Catalog>(pool);
  auto store = RegionStore::open(pool, catalog, region_options(options), files_of(options));
  auto tier = std::make_shared<Tier>(std::move(pool), std::move(catalog), std::move(store),
                                     options.clock, options.min_uses);
  if (!tier->store->info().notice.empty()) tier->notices->say(tier->store->info().notice);
  return std::unique_ptr<Store>(new Store(std::make_unique<Impl>(std::move(tier), options)));
}

const StoreInfo& Store::info() const noexcept { return impl_->tier->store->info(); }

std::size_t Store::lookup(std::span<const Key> keys) const noexcept {
  return impl_->tier->catalog->lookup(keys);
}

std::shared_ptr<PromoteTicket> Store::promote(std::uint32_t namespace_index,
                                              std::vector<Key> keys) {
  return impl_->promoter.promote(namespace_index, std::move(keys));
}

std::size_t Store::demote(std::uint32_t namespace_index, std::span<const Key> keys) {
  Tier& tier = *impl_->tier;
  static_cast<void>(disk::demote(tier, namespace_index, keys.first(tier.pool->lookup(keys))));
  std::size_t count = 0;
  DiskRef ref;
  while (count < keys.size() && tier.catalog->find(keys[count], ref)) ++count;
  return count;
}

bool Store::demote_round() { return impl_->demoter.round(); }

int Store::sync() { return impl_->tier->store->sync_aged(true); }

void Store::recover() {
  const Tier& tier = *impl_->tier;
  const auto deadline = steady_clock::now() + kRecoverMost;
  auto moved = steady_clock::now();
  std::uint32_t held = 0;
  while (!tier.pool->off() && steady_clock::now() < deadline) {
    while (tier.store->recover_one()) {
    }
    // Those that are unknown now were tried and failed. Others may be at work, or stopped, with
    // those that they hold.
    const std::uint32_t before = held;
    held = regions_in(*tier.catalog, RegionState::recovering);
    if (held == 0 && before == 0) return;
    if (held != before) moved = steady_clock::now();
    if (steady_clock::now() - moved >= impl_->recover_wait) return;
    sleep_ns(kMillisecond);
  }
}

std::vector<NamespaceId> Store::namespaces() const {
  const Tier& tier = *impl_->tier;
  const DiskStats disk = tier.catalog->stats();
  std::vector<NamespaceId> ids;
  for (std::uint32_t i = 0; i < shm::kNamespaceCount; ++i) {
    if (disk.entries_by_namespace[i] == 0) continue;
    if (const auto info = tier.pool->name_space(i)) ids.push_back(info->id);
  }
  return ids;
}

VerifyReport Store::verify(const std::function<bool(const VerifyReport&)>& progress, bool fix) {
  return impl_->tier->store->verify(progress, fix);
}

std::uint64_t Store::drop_namespace(const NamespaceId& id) {
  const Tier& tier = *impl_->tier;
  for (std::uint32_t i = 0; i < shm::kNamespaceCount; ++i) {
    const auto info = tier.pool->name_space(i);
    if (info && info->id == id) return tier.store->clear(i);
  }
  return 0;
}

std::uint64_t Store::clear() { return impl_->tier->store->clear(std::nullopt); }

StoreStats Store::stats() const {
  const Tier& tier = *impl_->tier;
  StoreStats out;
  out.files = tier.store->counters();
  out.disk = tier.catalog->stats();
  out.promote_tickets = tier.promote_tickets.load(std::memory_order_relaxed);
  out.promotions_refused = tier.promotions_refused.load(std::memory_order_relaxed);
  out.promotions_cut = tier.promotions_cut.load(std::memory_order_relaxed);
  out.promotions_queued = impl_->promoter.queued_count();
  out.promoted_blocks = tier.promoted_blocks.load(std::memory_order_relaxed);
  out.promoted_bytes = tier.promoted_bytes.load(std::memory_order_relaxed);
  out.promote_pinned_bytes = impl_->promoter.pinned_bytes();
  out.demoted_blocks = tier.demoted_blocks.load(std::memory_order_relaxed);
  out.demoted_bytes = tier.demoted_bytes.load(std::memory_order_relaxed);
  out.demotions_refused = tier.demotions_refused.load(std::memory_order_relaxed);
  out.reading_rests = tier.reading.resting();
  out.reading_hangs = tier.reading.hanging();
  out.writing_rests = tier.writing.resting();
  out.writing_hangs = tier.writing.hanging();
  out.notice = tier.notices->last();
  return out;
}

std::optional<std::string> Store::wait_notice(nanoseconds timeout) {
  Tier& tier = *impl_->tier;
  const auto deadline = steady_clock::now() + timeout;
  for (;;) {
    for (Breaker* breaker : {&tier.reading, &tier.writing, &tier.keeping, &tier.recovering}) {
      if (breaker->look()) tier.pool->count_disk(0, 0, 1);
    }
    const nanoseconds left = deadline - steady_clock::now();
    auto line = tier.notices->wait(std::clamp<nanoseconds>(left, nanoseconds(0), kLook));
    if (!line || !line->empty() || left <= kLook) return line;
  }
}

void Store::set_read_delay(nanoseconds delay) noexcept {
  impl_->tier->read_delay_ns.store(delay.count(), std::memory_order_relaxed);
}

void Store::set_write_delay(nanoseconds delay) noexcept {
  impl_->tier->write_delay_ns.store(delay.count(), std::memory_order_relaxed);
}

bool Store::close(nanoseconds timeout) {
  Impl& impl = *impl_;
  if (impl.closed || ::getpid() != impl.process) return impl.closed_well;
  impl.closed = true;
  impl.promoter.stop();
  impl.demoter.stop();
  impl.keeper.stop();
  const auto deadline = steady_clock::now() + timeout;
  const auto left = [deadline] {
    return std::max<nanoseconds>(deadline - steady_clock::now(), nanoseconds(0));
  };
  // Each in turn, so that all that can be joined are.
  const bool promoter = impl.promoter.join_within(left());
  const bool demoter = impl.demoter.join_within(left());
  const bool keeper = impl.keeper.join_within(left());
  impl.closed_well = promoter && demoter && keeper;
  // Only when nobody is left who may write.
  impl.closed_well = impl.closed_well && impl.leave_within(left());
  impl.tier->notices->close();
  return impl.closed_well;
}

}  // namespace hpkv::disk
