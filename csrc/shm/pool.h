// The host pool: one file per node, mapped by every process that shares it. This header is all that
// the copy engine and the bindings see; the bytes are described in docs/formats/pool.md and
// shm/format.h.
//
// Owns: this process's attachment (a client slot, the mapping, a maintenance thread).
// Invariants: check() states them; it may be called at any time.
// Threads: every method may be called from any thread. Nothing here waits without a bound.
// "Scheduler-safe" methods
//   wait at most 1 ms in all, whatever other processes do (dead, stopped, slow).
// After fork the child owns nothing: every method of the parent's Pool answers "off", miss or zero
// there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/key.h"

namespace hpkv {

namespace disk {
class Catalog;
}

// A block that the caller owns (reserved) or has pinned. Valid until publish/abandon, respectively
// unpin.
struct BlockRef {
  std::uint64_t offset = 0;             // of the payload in the pool file, a multiple of 4 KiB
  std::uint64_t payload_bytes = 0;      // exact bytes of the block (its namespace's block_bytes)
  std::uint64_t descriptor_offset = 0;  // of the descriptor in the pool file
  std::uint32_t generation = 0;         // rises whenever the place is given to another block
};

enum class ReserveStatus {
  ok,       // the block is ours to fill
  present,  // somebody stored it already; its recency was refreshed
  full,     // no place, and nothing that may be evicted
  busy,     // somebody is writing it right now, a lock was not free in time, or our quota of
            // unpublished blocks is used up
  off,      // pool poisoned, closed, read-only or forked
};

using NamespaceId = std::array<std::byte, 32>;

struct NamespaceInfo {
  NamespaceId id{};
  std::string descriptor;         // msgpack, as given to add_namespace
  std::uint64_t block_bytes = 0;  // exact bytes of every block of this namespace
  std::uint64_t blocks = 0;       // ready blocks
};

struct PoolOptions {
  std::string directory;  // holds the pool file; created 0700 if absent
  std::optional<std::uint64_t>
      pool_bytes;          // unset: adopt the pool's size, or the default when there is none
  bool create = true;      // false: Error{missing} when there is no pool
  bool read_only = false;  // no put, no eviction, no recency; still takes a client slot (for pins)
  bool verify_always = false;  // verified() never says yes
  bool maintenance =
      true;  // run the background thread (reaping, population); tests may switch it off
  std::int64_t quarantine_ns =
      1'000'000'000;                // pause between a client's death and its blocks' return
  std::string proc_root = "/proc";  // where limits are read; tests put a fake tree here
  std::string cgroup_root = "/sys/fs/cgroup";
};

struct PoolInfo {
  std::string path;    // of the pool file
  std::string notice;  // why an older pool was replaced, or empty: to be logged once
  std::uint64_t pool_bytes = 0;
  std::array<std::byte, 16> uuid{};
  std::uint32_t slot = 0;
  bool adopted = false;    // the pool existed before we came
  bool in_memory = false;  // the directory lies on tmpfs or hugetlbfs
};

// Totals are of all clients that ever attached to this pool; the rest describes this moment.
struct PoolStats {
  std::uint64_t pool_bytes = 0;      // size of the pool file
  std::uint64_t reserved_bytes = 0;  // of it, backed by memory by now
  std::uint64_t used_bytes = 0;      // payload bytes of ready blocks
  std::uint64_t blocks = 0;          // ready blocks
  std::uint64_t writing = 0;         // blocks reserved and not yet published
  std::uint64_t pinned = 0;          // blocks pinned by at least one client
  std::uint64_t quarantined = 0;     // blocks held back because their client died
  std::uint64_t clients = 0;         // live clients, this one included
  std::uint64_t epoch = 0;
  std::uint64_t hits = 0;    // blocks pinned
  std::uint64_t misses = 0;  // keys asked to be pinned and not there
  std::uint64_t stored = 0;  // blocks published
  std::uint64_t evictions = 0;
  std::uint64_t full = 0;  // reserve answered full
  std::uint64_t busy = 0;  // reserve answered busy
  std::uint64_t lock_timeouts =
      0;  // a lock was not free in time: the answer was miss, or the write was dropped
  std::uint64_t takeovers = 0;       // locks taken from dead clients
  std::uint64_t rebuilds = 0;        // shards rebuilt from their descriptors
  std::uint64_t reaped = 0;          // clients that died without a goodbye
  std::uint64_t bad_checksums = 0;   // blocks condemned
  std::uint64_t spilled_bytes = 0;   // payload bytes published
  std::uint64_t loaded_bytes = 0;    // payload bytes copied out (count_loaded)
  std::uint64_t demoted_bytes = 0;   // payload bytes written to disk (count_disk)
  std::uint64_t promoted_bytes = 0;  // payload bytes read from disk
  std::uint64_t disk_errors = 0;     // failed operations on the store, bad records included
  bool poisoned = false;
};

class Pool {
 public:
  // Attaches, creating the pool if there is none and options.create is set. Throws Error; touches a
  // bounded number of bytes whatever the pool's size. May block up to 10 s while another process
  // creates the pool.
  [[nodiscard]] static std::unique_ptr<Pool> open(const PoolOptions& options);
  // Throws what open() would throw at this moment, but for want of a slot, without attaching: the
  // directory, its owner, the pool that is there, the room for a new one. Makes the directory and
  // nothing else. May block as open() does.
  static void check_place(const PoolOptions& options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  [[nodiscard]] const PoolInfo& info() const noexcept;
  [[nodiscard]] std::uint32_t epoch() const noexcept;
  [[nodiscard]] bool poisoned() const noexcept;
  // Poisoned, closed or forked: every answer is a miss.
  [[nodiscard]] bool off() const noexcept;
  [[nodiscard]] bool verify_always() const noexcept;

  // Registers a namespace, or finds it; the answer indexes it in reserve(). Same id with another
  // size throws.
  std::uint32_t add_namespace(const NamespaceId& id, std::span<const std::byte> descriptor,
                              std::uint64_t block_bytes);
  // Takes add_namespace() back, for all of this process: nothing is put or loaded under the index
  // any more, and when its blocks are gone it may stand for another.
  void leave_namespace(std::uint32_t namespace_index) noexcept;
  [[nodiscard]] std::vector<NamespaceInfo> namespaces() const;
  // One namespace, without counting its blocks (`blocks` is 0); nullopt for an unknown index.
  [[nodiscard]] std::optional<NamespaceInfo> name_space(std::uint32_t namespace_index) const;
  // The same by identity, with its index. Scheduler-safe, as is the list of identities known now;
  // neither counts blocks. Nothing and empty when off.
  [[nodiscard]] std::optional<std::pair<std::uint32_t, NamespaceInfo>> describe(
      const NamespaceId& id) const;
  [[nodiscard]] std::vector<NamespaceId> known_namespaces() const;
  // Exact bytes of a block of a registered namespace; throws Error{argument} for an unknown index.
  [[nodiscard]] std::uint64_t block_bytes(std::uint32_t namespace_index) const;

  // ---- reading ----
  // Length of the leading run of ready blocks. Scheduler-safe, takes no lock, writes nothing,
  // promises nothing: a block may be gone before it is pinned.
  [[nodiscard]] std::size_t lookup(std::span<const Key> keys) const noexcept;
  // Refreshes the recency of those present, the last key as the oldest; returns how many.
  // Scheduler-safe.
  std::size_t touch(std::span<const Key> keys) noexcept;
  // Pins the leading run of ready blocks and writes their refs; returns its length. out.size() >=
  // keys.size(). A block may be pinned any number of times; each pin needs its unpin.
  // Scheduler-safe. Does not change recency.
  std::size_t pin(std::span<const Key> keys, std::span<BlockRef> out) noexcept;
  // The same without counting hits and misses: for the tiers' own work.
  std::size_t pin_quietly(std::span<const Key> keys, std::span<BlockRef> out) noexcept;
  void unpin(std::span<const BlockRef> refs) noexcept;

  // Bytes of a block that is reserved or pinned by us, aligned to 4 KiB. Never null.
  [[nodiscard]] std::byte* payload(const BlockRef& ref) const noexcept;

  // ---- verification of pinned blocks ----
  [[nodiscard]] std::uint32_t checksum(
      const BlockRef& ref) const noexcept;  // CRC32C stored at publish
  [[nodiscard]] bool verified(
      const BlockRef& ref) const noexcept;  // checked in this epoch, by anybody
  // `epoch` is what epoch() said before the bytes were read.
  void mark_verified(const BlockRef& ref, std::uint32_t epoch) noexcept;
  // The bytes do not match: the block is a miss from now on, and its place is free once the last
  // pin is gone.
  void condemn(const BlockRef& ref) noexcept;

  // Pinned blocks were copied out of the pool: statistics, and each block's own count of uses.
  void count_loaded(std::span<const BlockRef> refs) noexcept;

  void count_disk(std::uint64_t demoted_bytes, std::uint64_t promoted_bytes,
                  std::uint64_t errors) noexcept;

  // Memory of the pool that is reserved by now, by segment, for whoever registers it with a device.
  // A range grows at its end and never goes while the pool is open; empty when off.
  [[nodiscard]] std::vector<std::span<std::byte>> reserved() const;

  // ---- writing (engine threads; may evict, may reserve memory for a new segment: tens of ms) ----
  ReserveStatus reserve(std::uint32_t namespace_index, const Key& key, BlockRef& out) noexcept;
  // The bytes are in place: makes the block visible by one release store. The block may be evicted
  // from then on.
  // `stamp`: its recency, out of take_stamps, or 0 for "now".
  void publish(const BlockRef& ref, std::uint32_t crc32c, std::uint64_t stamp = 0) noexcept;
  // The same, and the block is pinned for the caller before anybody can see it. False: off, and
  // nothing is pinned.
  [[nodiscard]] bool publish_pinned(const BlockRef& ref, std::uint32_t crc32c,
                                    std::uint64_t stamp = 0) noexcept;
  // Hands out `count` stamps and returns the smallest. A prefix is stamped with its deepest page as
  // the oldest (page i of n: first + n - 1 - i), whatever the order in which its pages are stored.
  [[nodiscard]] std::uint64_t take_stamps(std::uint64_t count) noexcept;
  // Gives a reserved block back.
  void abandon(const BlockRef& ref) noexcept;

  // ---- operating ----
  // Drop unpinned ready blocks, of one namespace or all; return how many. May block: walks the
  // whole pool.
  std::uint64_t drop_namespace(const NamespaceId& id);
  std::uint64_t clear();
  // Drops those of these blocks that are ready and unpinned; returns how many. Copies on disk stay.
  // May block: waits for locks as engine threads do.
  std::uint64_t drop(std::span<const Key> keys) noexcept;
  [[nodiscard]] PoolStats stats() const;
  // Live clients, this one included. Cheap.
  [[nodiscard]] std::uint32_t clients() const noexcept;
  // Every violated invariant in words; empty means sound. Correct while others work; takes each
  // lock for a short time.
  [[nodiscard]] std::vector<std::string> check() const;
  // One round of what the maintenance thread does: notice dead clients, reap those dead for over a
  // second.
  void maintain();
  // Gives back pins, reserved blocks and the client slot. Idempotent. Other calls must have
  // returned.
  void close() noexcept;

 private:
  class Impl;
  friend class disk::Catalog;
  explicit Pool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hpkv
