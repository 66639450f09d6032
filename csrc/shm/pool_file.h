// The pool file on its file system: created, found, judged, mapped. Everything here happens under a
// lock on the directory, so two processes that start together agree on one file; what it answers is
// checked again after locking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/fd.h"
#include "shm/liveness.h"
#include "shm/pool.h"
#include "shm/view.h"

namespace hpkv::shm {

inline constexpr const char* kPoolFileName = "pool.hpkv";

// The mapping of the whole file. Not inherited by a forked child.
class Mapping {
 public:
  Mapping(int fd, std::uint64_t bytes, const std::string& path);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // In a forked child the mapping was not inherited: another one may lie there.
  void forget() noexcept { base_ = nullptr; }

  [[nodiscard]] View view() const noexcept { return View(base_); }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// An attached file: mapped, with a client slot of its own.
struct PoolFile {
  PoolFile() = default;
  PoolFile(PoolFile&&) = default;
  PoolFile& operator=(PoolFile&&) = default;
  PoolFile(const PoolFile&) = delete;
  PoolFile& operator=(const PoolFile&) = delete;
  ~PoolFile() {
    if (mapping && liveness && liveness->forked()) mapping->forget();
  }

  std::unique_ptr<Liveness> liveness;  // owns the descriptor
  std::unique_ptr<Mapping> mapping;
  PoolInfo info;
  std::uint32_t generation = 0;  // of our client slot
};

// As Pool::check_place says.
void check_place(const PoolOptions& options);

// Finds or creates the file, takes a slot. Throws Error.
[[nodiscard]] PoolFile attach(const PoolOptions& options);

// Reserves memory for bytes [offset, offset + bytes) of the file, in small pieces; false when there
// is none.
[[nodiscard]] bool reserve_memory(int fd, std::uint64_t offset, std::uint64_t bytes) noexcept;

}  // namespace hpkv::shm
