// Pinned host memory that copies go through: slots of one page each, and a table behind each slot.
//
//   slot i:  [ page, in the order of a block | indices and addresses for kernels, kTableRows each ]
//
// Loads and spills have slots of their own, so neither waits for the other. The table that belongs
// to the first slot of a chunk of pages serves the chunk: it lives exactly as long as the copies
// that read it.
//
// Invariant: a slot has one owner, from take() until give(), which comes after the device is done.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "copy/stream/device.h"

namespace hpkv::stream {

using Slot = std::uint32_t;

// Pages of one kernel launch at most: then a table is 4 KiB.
inline constexpr std::size_t kTableRows = 256;

// The slots [first, first + count) of one direction. Threads: any.
class SlotLane {
 public:
  SlotLane(Slot first, std::size_t count);

  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  // Exactly `wanted` slots, at most count(), waiting for them; none once closed. One taker.
  [[nodiscard]] std::vector<Slot> take(std::size_t wanted);
  // Whether take(1) would not wait.
  [[nodiscard]] bool has_free();
  void give(std::span<const Slot> slots);
  void close();
  // All slots are free.
  [[nodiscard]] bool whole();

 private:
  const std::size_t count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slot> free_;  // mutex_
  bool closed_ = false;     // mutex_
};

class Staging {
 public:
  // Throws Error{system} when the device pins no more.
  Staging(std::shared_ptr<Device> device, std::uint64_t page_bytes, std::size_t slot_count);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  [[nodiscard]] static std::uint64_t slot_bytes(std::uint64_t page_bytes) noexcept;
  [[nodiscard]] std::byte* page(Slot slot) const noexcept { return memory_ + slot * stride_; }
  [[nodiscard]] std::int64_t* table_pages(Slot slot) const noexcept {
    return reinterpret_cast<std::int64_t*>(page(slot) + table_offset_);
  }
  [[nodiscard]] std::uint64_t* table_blocks(Slot slot) const noexcept {
    return reinterpret_cast<std::uint64_t*>(table_pages(slot) + kTableRows);
  }

 private:
  const std::shared_ptr<Device> device_;
  const std::uint64_t table_offset_;
  const std::uint64_t stride_;
  std::byte* memory_ = nullptr;
};

}  // namespace hpkv::stream
