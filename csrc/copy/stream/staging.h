// Pinned host memory that copies go through: slots of one page each, and a table behind each slot.
//
//   slot i:  [ page, in the order of a block | indices and addresses for kernels, kTableRows each ]
//
// Loads and spills have slots of their own, so neither waits for the other. The table of one of a
// chunk's slots serves the chunk: it lives exactly as long as the copies that read it. Pages that
// are read where they lie need no slot: the table of a chunk that has none is one of a TableArena,
// so that staging does not bound what is read in place. Tables of the arena that lie side by side
// are one larger table.
//
// Invariant: a slot, or table, has one owner, from take() until give(), which comes after the
// device is done.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "copy/stream/device.h"

namespace hpkv::stream {

using Slot = std::uint32_t;

// Then a table is 4 KiB.
inline constexpr std::size_t kTableRows = 256;

// A row for each page of a chunk, where kernels find them.
struct KernelTable {
  std::int64_t* pages = nullptr;
  std::uint64_t* blocks = nullptr;
};

// The slots [first, first + count) of one direction, or the tables of an arena, whose takers get
// ascending ones, side by side as far as those that are free are. Threads: any.
class SlotLane {
 public:
  SlotLane(Slot first, std::size_t count, bool ascending = false);

  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  // Exactly `wanted` slots, at most count(), waiting for them; nothing once closed. One taker.
  [[nodiscard]] std::optional<std::vector<Slot>> take(std::size_t wanted);
  // take() of so many would not wait.
  [[nodiscard]] std::size_t free_count();
  void give(std::span<const Slot> slots);
  void close();
  // All slots are free.
  [[nodiscard]] bool whole();

 private:
  const std::size_t count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const bool ascending_;
  std::vector<Slot> free_;  // mutex_
  bool closed_ = false;     // mutex_
};

// Throws Error{system} when the device pins no more.
[[nodiscard]] std::byte* pinned(Device& device, std::uint64_t bytes);

class Staging {
 public:
  // Throws Error{system} when the device pins no more.
  Staging(std::shared_ptr<Device> device, std::uint64_t page_bytes, std::size_t slot_count);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  [[nodiscard]] static std::uint64_t slot_bytes(std::uint64_t page_bytes) noexcept;
  [[nodiscard]] std::byte* page(Slot slot) const noexcept { return memory_ + slot * stride_; }
  [[nodiscard]] KernelTable table(Slot slot) const noexcept;

 private:
  const std::shared_ptr<Device> device_;
  const std::uint64_t table_offset_;
  const std::uint64_t stride_;
  std::byte* memory_ = nullptr;
};

// Pinned tables that belong to no slot.
class TableArena {
 public:
  // Throws Error{system} when the device pins no more.
  TableArena(std::shared_ptr<Device> device, std::size_t count);
  ~TableArena();
  TableArena(const TableArena&) = delete;
  TableArena& operator=(const TableArena&) = delete;

  [[nodiscard]] KernelTable table(Slot index) const noexcept;

  SlotLane lane;  // who has which

 private:
  const std::shared_ptr<Device> device_;
  const std::size_t count_;
  std::byte* memory_ = nullptr;  // pages of all tables, then blocks of all
};

}  // namespace hpkv::stream
