// The disk tier of one process: what the bindings see of it. Below the host pool, one store per
// pool.
//
//   lookup, promote   for the scheduler: never a system call on a file, never a wait
//   threads           two read for promotions, one demotes, one keeps the store in order
//   the rest          for operators and tests; blocks as long as the disk does
//
// When the disk fails or hangs the tier answers "nothing" at once and says so in one line
// (notices); it comes back by itself. Owns: those threads. Threads: safe; close() runs once, alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "disk/breaker.h"
#include "disk/promote_ticket.h"
#include "disk/region_store.h"

namespace hpkv::disk {

struct StoreOptions {
  std::string directory;
  std::optional<std::uint64_t> storage_bytes;  // unset: the store's, or half of what is free
  std::uint64_t block_bytes = 0;               // of the largest namespace that will use a new store
  bool create = true;                          // false: Error{missing} when there is none
  bool background = true;                 // false: no demoter and no keeper; for tools and tests
  std::optional<std::uint32_t> min_uses;  // a fixed admission rule; unset: earned (admission.h)
  std::uint32_t read_threads = 2;
  std::shared_ptr<Files> files;  // null: the operating system's
  Breaker::Clock clock = &now_ns;
  std::int64_t takeover_wait_ns = 5 * kSecond;
  std::int64_t recover_wait_ns =
      10 * kSecond;  // for others that recover regions and get no further
};

struct StoreStats {
  StoreCounters files;  // of this process
  DiskStats disk;       // of the store
  std::uint64_t promote_tickets = 0;
  std::uint64_t promotions_refused = 0;  // answered at once with nothing
  std::uint64_t promotions_cut = 0;      // ended before their last key
  std::uint64_t promotions_queued = 0;
  std::uint64_t promoted_blocks = 0;
  std::uint64_t promoted_bytes = 0;
  std::uint64_t promote_pinned_bytes = 0;
  std::uint64_t demoted_blocks = 0;
  std::uint64_t demoted_bytes = 0;
  std::uint64_t demotions_refused = 0;  // blocks
  bool reading_rests = false;
  bool reading_hangs = false;
  bool writing_rests = false;
  bool writing_hangs = false;
  std::string notice;  // the last one
};

class Store {
 public:
  // Throws Error as RegionStore::open does. May block some seconds.
  [[nodiscard]] static std::unique_ptr<Store> open(std::shared_ptr<Pool> pool,
                                                   const StoreOptions& options);
  // Throws what open() would throw as far as it can be seen without a pool: the directory, its
  // owner, that it can be written, the version and size of what is there. Makes the directory and
  // its lock's file. May block on the disk.
  static void check_place(const StoreOptions& options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  [[nodiscard]] const StoreInfo& info() const noexcept;

  // Leading run of keys that are ready in the host pool or on disk. Scheduler-safe; promises
  // nothing.
  [[nodiscard]] std::size_t lookup(std::span<const Key> keys) const noexcept;
  // Brings the leading run into the host pool. Scheduler-safe; returns at once.
  [[nodiscard]] std::shared_ptr<PromoteTicket> promote(std::uint32_t namespace_index,
                                                       std::vector<Key> keys);

  // Writes the leading run of blocks that the pool has; returns how many of the leading keys are on
  // disk afterwards.
  std::size_t demote(std::uint32_t namespace_index, std::span<const Key> keys);
  // What the demoter's thread does on its own: one look at the pool. True: there is more to do.
  bool demote_round();
  // Until what was written would survive a power loss; 0 or an errno.
  int sync();
  // Enters every block that the files hold into the index, unless that is done. Regions that cannot
  // be read now, or that others hold and get no further with, are left out: verify() tells.
  void recover();
  // The identities of which there are blocks on disk.
  [[nodiscard]] std::vector<NamespaceId> namespaces() const;
  VerifyReport verify(const std::function<bool(const VerifyReport&)>& progress, bool fix);
  std::uint64_t drop_namespace(const NamespaceId& id);
  std::uint64_t clear();
  [[nodiscard]] StoreStats stats() const;

  // The next line for the log; empty after the timeout, nullopt once closed.
  [[nodiscard]] std::optional<std::string> wait_notice(std::chrono::nanoseconds timeout);
  // Fault injection: every read or write of blocks is late by so much.
  void set_read_delay(std::chrono::nanoseconds delay) noexcept;
  void set_write_delay(std::chrono::nanoseconds delay) noexcept;

  // Ends the threads and syncs what was written. False: something is stuck in the disk; it is left
  // alone, and the pool must stay open. Idempotent. Tickets may outlive it.
  [[nodiscard]] bool close(std::chrono::nanoseconds timeout);

 private:
  class Impl;
  explicit Store(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hpkv::disk
