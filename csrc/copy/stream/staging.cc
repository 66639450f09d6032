#include "copy/stream/staging.h"

#include <algorithm>

#include "base/error.h"

namespace hpkv::stream {
namespace {

// Starts of pages and tables: a cache line of the device.
constexpr std::uint64_t kAlign = 256;
constexpr std::uint64_t kTableBytes = kTableRows * (sizeof(std::int64_t) + sizeof(std::uint64_t));

KernelTable table_at(std::byte* at) {
  auto* const pages = reinterpret_cast<std::int64_t*>(at);
  return {pages, reinterpret_cast<std::uint64_t*>(pages + kTableRows)};
}

std::uint64_t rounded(std::uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

// ---- SlotLane ----

SlotLane::SlotLane(Slot first, std::size_t count, bool ascending)
    : count_(count), ascending_(ascending) {
  for (std::size_t i = 0; i < count; ++i) free_.push_back(first + static_cast<Slot>(i));
}

std::optional<std::vector<Slot>> SlotLane::take(std::size_t wanted) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return closed_ || free_.size() >= wanted; });
  if (closed_) return std::nullopt;
  const auto first = free_.end() - static_cast<std::ptrdiff_t>(wanted);
  std::vector<Slot> slots(first, free_.end());
  free_.erase(first, free_.end());
  return slots;
}

std::size_t SlotLane::free_count() {
  const std::lock_guard lock(mutex_);
  return free_.size();
}

void SlotLane::give(std::span<const Slot> slots) {
  const std::lock_guard lock(mutex_);
  const auto given = free_.insert(free_.end(), slots.begin(), slots.end());
  if (ascending_) {
    std::sort(given, free_.end());
    std::inplace_merge(free_.begin(), given, free_.end());
  }
  changed_.notify_all();
}

void SlotLane::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

bool SlotLane::whole() {
  const std::lock_guard lock(mutex_);
  return free_.size() == count_;
}

std::byte* pinned(Device& device, std::uint64_t bytes) {
  std::byte* made = nullptr;
  const Status status = device.allocate_pinned(bytes, made);
  if (!status.ok()) throw Error(ErrorKind::system, "copy engine: " + status.text());
  return made;
}

// ---- Staging ----

std::uint64_t Staging::slot_bytes(std::uint64_t page_bytes) noexcept {
  return rounded(page_bytes) + kTableBytes;
}

Staging::Staging(std::shared_ptr<Device> device, std::uint64_t page_bytes, std::size_t slot_count)
    : device_(std::move(device)),
      table_offset_(rounded(page_bytes)),
      stride_(slot_bytes(page_bytes)),
      memory_(pinned(*device_, slot_count * stride_)) {}

Staging::~Staging() { device_->free_pinned(memory_); }

KernelTable Staging::table(Slot slot) const noexcept {
  return table_at(page(slot) + table_offset_);
}

// ---- TableArena ----

TableArena::TableArena(std::shared_ptr<Device> device, std::size_t count)
    : lane(0, count, true),
      device_(std::move(device)),
      count_(count),
      memory_(pinned(*device_, count * kTableBytes)) {}

TableArena::~TableArena() { device_->free_pinned(memory_); }

KernelTable TableArena::table(Slot index) const noexcept {
  auto* const pages = reinterpret_cast<std::int64_t*>(memory_);
  auto* const blocks = reinterpret_cast<std::uint64_t*>(pages + count_ * kTableRows);
  return {pages + index * kTableRows, blocks + index * kTableRows};
}

}  // namespace hpkv::stream
