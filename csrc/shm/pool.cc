// Life of an attachment, and what operators ask.
#include "shm/pool.h"

#include <bit>

#include "shm/check.h"
#include "shm/pool_impl.h"

namespace hpkv {

using shm::BlockState;
using shm::BlockWord;
using shm::ClientState;
using shm::ClientWord;
using shm::Counter;
using shm::Descriptor;

Pool::Impl::Impl(shm::PoolFile file, const PoolOptions& options)
    : core(std::move(file), options),
      segments(core),
      allocator(core, segments),
      regions(core, segments, allocator),
      namespaces(core),
      pins(core.view, core.slot, core.super().pool_bytes),
      maintenance(core, segments, allocator) {}

Pool::Pool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

std::unique_ptr<Pool> Pool::open(const PoolOptions& options) {
  auto impl = std::make_unique<Impl>(shm::attach(options), options);
  if (options.maintenance) impl->maintenance.start();
  return std::unique_ptr<Pool>(new Pool(std::move(impl)));
}

void Pool::check_place(const PoolOptions& options) { shm::check_place(options); }

Pool::~Pool() {
  close();
  // In a forked child nothing of ours may be taken apart: its mutexes and its thread are the
  // parent's.
  if (impl_->core.file.liveness->forked()) static_cast<void>(impl_.release());
}

void Pool::close() noexcept {
  shm::Core& core = impl_->core;
  if (core.detached()) return;
  impl_->maintenance.stop();
  impl_->allocator.release_stock();
  core.set_closed();
  const bool nothing_held = impl_->writing_bytes.load() == 0 && impl_->pin_count.load() == 0;
  // When a lock is not free in time the slot stays: the others will treat us as dead, which is
  // slower and as safe.
  const bool returned = nothing_held || impl_->maintenance.recovery().return_blocks(core.slot);
  if (returned && shm::return_regions(core, core.slot)) {
    shm::leave_namespaces(core.view, core.slot);
    shm::fold_client_counters(core.view, core.slot);
    core.self().word.store(ClientWord::make(ClientState::free, core.generation),
                           std::memory_order_release);
    core.file.liveness->drop(core.slot);
  }
}

const PoolInfo& Pool::info() const noexcept { return impl_->core.file.info; }

std::uint32_t Pool::epoch() const noexcept {
  if (impl_->core.detached()) return 0;
  return impl_->core.super().epoch.load(std::memory_order_acquire);
}

bool Pool::poisoned() const noexcept {
  return !impl_->core.detached() &&
         impl_->core.super().poisoned.load(std::memory_order_relaxed) != 0;
}

bool Pool::off() const noexcept { return impl_->core.off(); }

bool Pool::verify_always() const noexcept { return impl_->core.options.verify_always; }

namespace {

void require_attached(const shm::Core& core, const char* operation) {
  if (!core.detached()) return;
  throw Error(
      ErrorKind::argument,
      std::string(operation) + ": the pool is closed, or this is a forked child; open it again");
}

}  // namespace

std::uint32_t Pool::add_namespace(const NamespaceId& id, std::span<const std::byte> descriptor,
                                  std::uint64_t block_bytes) {
  require_attached(impl_->core, "add namespace");
  return impl_->namespaces.add(id, descriptor, block_bytes);
}

void Pool::leave_namespace(std::uint32_t namespace_index) noexcept {
  if (!impl_->core.detached()) impl_->namespaces.leave(namespace_index);
}

std::vector<NamespaceInfo> Pool::namespaces() const {
  require_attached(impl_->core, "list namespaces");
  return impl_->namespaces.list();
}

std::optional<NamespaceInfo> Pool::name_space(std::uint32_t namespace_index) const {
  if (impl_->core.detached()) return std::nullopt;
  return impl_->namespaces.get(namespace_index);
}

std::optional<std::pair<std::uint32_t, NamespaceInfo>> Pool::describe(const NamespaceId& id) const {
  if (impl_->core.detached()) return std::nullopt;
  const auto index = impl_->namespaces.find(id);
  auto info = index ? impl_->namespaces.get(*index) : std::nullopt;
  // Its record may have been given to another identity in between.
  if (!info || info->id != id) return std::nullopt;
  return std::pair(*index, *std::move(info));
}

std::vector<NamespaceId> Pool::known_namespaces() const {
  std::vector<NamespaceId> ids;
  if (impl_->core.detached()) return ids;
  for (std::uint32_t i = 0; i < shm::kNamespaceCount; ++i) {
    if (const auto info = impl_->namespaces.get(i)) ids.push_back(info->id);
  }
  return ids;
}

std::uint64_t Pool::block_bytes(std::uint32_t namespace_index) const {
  require_attached(impl_->core, "ask a namespace's block size");
  const std::uint64_t bytes = impl_->namespaces.block_bytes(namespace_index);
  if (bytes == 0) {
    throw Error(ErrorKind::argument, "ask a namespace's block size: index " +
                                         std::to_string(namespace_index) +
                                         " is not registered; call add_namespace first");
  }
  return bytes;
}

std::uint64_t Pool::drop_namespace(const NamespaceId& id) {
  require_attached(impl_->core, "drop namespace");
  const auto index = impl_->namespaces.find(id);
  return index ? impl_->allocator.drop_namespace(*index) : 0;
}

std::uint64_t Pool::clear() {
  require_attached(impl_->core, "clear");
  return impl_->allocator.drop_all();
}

void Pool::maintain() { impl_->maintenance.round(); }

std::vector<std::string> Pool::check() const {
  require_attached(impl_->core, "check");
  return shm::check_pool(impl_->core);
}

namespace {

std::uint64_t total(const shm::View& view, Counter counter) noexcept {
  const auto i = static_cast<std::size_t>(counter);
  std::uint64_t sum = view.superblock().totals[i].load(std::memory_order_relaxed);
  for (std::size_t slot = 0; slot < shm::kClientCount; ++slot) {
    sum += view.client(slot).counters[i].load(std::memory_order_relaxed);
  }
  return sum;
}

bool slot_dead(const shm::View& view, std::uint32_t slot) noexcept {
  return slot < shm::kClientCount &&
         ClientWord::state(view.client(slot).word.load(std::memory_order_acquire)) ==
             ClientState::dead;
}

bool pinned_by_dead(const shm::View& view, const Descriptor& block) noexcept {
  for (std::uint32_t i = 0; i < block.pins.size(); ++i) {
    for (std::uint64_t bits = block.pins[i].load(std::memory_order_relaxed); bits != 0;
         bits &= bits - 1) {
      if (slot_dead(view, i * 64 + static_cast<std::uint32_t>(std::countr_zero(bits)))) return true;
    }
  }
  return false;
}

void count_block(const shm::View& view, const Descriptor& block, PoolStats& stats) noexcept {
  const std::uint64_t word = block.word.load(std::memory_order_acquire);
  switch (BlockWord::state(word)) {
    case BlockState::free:
      return;
    case BlockState::claimed:
    case BlockState::writing:
      if (slot_dead(view, BlockWord::slot(word))) ++stats.quarantined;
      if (BlockWord::state(word) == BlockState::writing) ++stats.writing;
      return;
    case BlockState::ready:
      ++stats.blocks;
      stats.used_bytes += block.payload_bytes.load(std::memory_order_relaxed);
      break;
    case BlockState::draining:
      break;
  }
  if (!shm::any_pin(block)) return;
  ++stats.pinned;
  if (pinned_by_dead(view, block)) ++stats.quarantined;
}

}  // namespace

std::uint32_t Pool::clients() const noexcept {
  if (impl_->core.detached()) return 0;
  std::uint32_t live = 0;
  for (std::size_t slot = 0; slot < shm::kClientCount; ++slot) {
    const std::uint64_t word = impl_->core.view.client(slot).word.load(std::memory_order_acquire);
    if (ClientWord::state(word) == ClientState::live) ++live;
  }
  return live;
}

PoolStats Pool::stats() const {
  require_attached(impl_->core, "ask for statistics");
  const shm::View& view = impl_->core.view;
  PoolStats stats;
  stats.pool_bytes = view.superblock().pool_bytes;
  stats.reserved_bytes = impl_->segments.reserved_bytes();
  stats.epoch = epoch();
  stats.poisoned = poisoned();
  stats.clients = clients();
  view.for_each_run([&](const shm::Run& run) {
    for (std::uint64_t i = 0; i < run.geometry.block_count; ++i) {
      count_block(view, view.descriptor(view.descriptor_offset(run, i)), stats);
    }
    return true;
  });
  stats.hits = total(view, Counter::hits);
  stats.misses = total(view, Counter::misses);
  stats.stored = total(view, Counter::stored);
  stats.evictions = total(view, Counter::evictions);
  stats.full = total(view, Counter::full);
  stats.busy = total(view, Counter::busy);
  stats.lock_timeouts = total(view, Counter::lock_timeouts);
  stats.takeovers = total(view, Counter::takeovers);
  stats.rebuilds = total(view, Counter::rebuilds);
  stats.reaped = total(view, Counter::reaped);
  stats.bad_checksums = total(view, Counter::bad_checksums);
  stats.spilled_bytes = total(view, Counter::spilled_bytes);
  stats.loaded_bytes = total(view, Counter::loaded_bytes);
  stats.demoted_bytes = total(view, Counter::demoted_bytes);
  stats.promoted_bytes = total(view, Counter::promoted_bytes);
  stats.disk_errors = total(view, Counter::disk_errors);
  return stats;
}

}  // namespace hpkv
