// LOCK: which pool is using the store, and that somebody is. Every process attached to the store
// holds a shared lock on byte 0 of the file; the text changes only under an exclusive one, so it
// names the pool of everybody who is attached. Byte 1 is held while a process enters, so that two
// servers starting in the same second do not see each other half-way.
//
// Owns: one handle of the file, and with it the locks. Threads: not safe; used while opening.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "disk/files.h"
#include "shm/pool.h"

namespace hpkv::disk {

// The file LOCK of a store's directory, for writing, made if absent; without any lock. Throws
// Error: owner, system.
[[nodiscard]] FileHandle open_lock_file(const std::shared_ptr<Files>& files,
                                        const std::string& directory);

class StoreLock {
 public:
  // Waits until nobody else is entering, then tries to have the store alone, for `takeover_wait_ns`
  // while another pool's processes hold it. Throws Error: store (they go on holding it), owner,
  // system.
  StoreLock(std::shared_ptr<Files> files, const std::string& directory, const PoolInfo& pool,
            std::int64_t takeover_wait_ns);

  // Nobody else is attached.
  [[nodiscard]] bool alone() const noexcept { return alone_; }
  // The pool that used the store last is not ours: its index says nothing about these files.
  [[nodiscard]] bool stranger() const noexcept { return stranger_; }
  // Puts our pool's name into the file, if alone, and lets others in. Throws Error{system}.
  void settle();
  // Whether the file that we hold is still the one under its name: the directory was not removed,
  // moved or mounted over.
  [[nodiscard]] bool in_place() const noexcept;
  // Entirely. The file stays.
  void release() noexcept { file_.reset(); }

 private:
  void wait_for_entry();
  void take_attachment(std::int64_t takeover_wait_ns);
  [[nodiscard]] std::string read_text();
  [[nodiscard]] std::string own_text() const;

  std::shared_ptr<Files> files_;
  std::string path_;
  std::array<std::byte, 16> uuid_;
  std::string pool_path_;
  FileHandle file_;
  bool alone_ = false;
  bool stranger_ = true;
};

}  // namespace hpkv::disk
