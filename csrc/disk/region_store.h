// The disk tier's files: one directory of region files, shared by every process attached to one
// pool, indexed by the Catalog in that pool's shared memory. docs/formats/store.md describes the
// files and what a power loss may take.
//
// Owns: a shared lock on the store's LOCK file for as long as it lives, the handles of region
// files, and the regions this process has open for appending. Invariants: an entry is ready only
// after its bytes were written; a region is sealed only after its bytes, then its summary, were
// synced; the index forgets a region before its file is reused or removed; files never hold more
// than storage_bytes together. Threads: none of its own. Any thread may call anything but open and
// close; every call may block for as long as the disk does, and reads never wait for writes. Never
// the scheduler thread. Errors of the disk are return values and counters; only open() throws.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "disk/catalog.h"
#include "disk/files.h"

namespace hpkv::disk {

struct RegionStoreOptions {
  std::string directory;  // created 0700 if absent; its parent must be there
  // Bytes that everything in the directory may take. Unset: what the store was made with, or, for a
  // new one, half of the space that is free now.
  std::optional<std::uint64_t> storage_bytes;
  // Largest block that a new store must be able to hold; a region has room for two of them.
  std::uint64_t block_bytes_hint = 0;
  bool create = true;  // false: Error{missing} when there is no store
  // How long to wait for the processes of another pool to let go (they may just be dying) before
  // they count as live.
  std::int64_t takeover_wait_ns = 5 * kSecond;
  std::function<std::int64_t()> clock = &now_ns;  // monotonic, for the age of what is not synced
};

struct AppendResult {
  std::uint32_t written = 0;  // on disk and in the index now
  std::uint32_t present = 0;  // on disk already, or another process is writing it
  std::uint32_t refused = 0;  // no room, too large for a region, or the disk failed
  int error = 0;              // errno of the last failure of the disk, 0 when there was none
  bool no_room = false;       // some were refused because no region was to be had for them
};

enum class ReadOutcome {
  ok,        // the bytes are those that were stored
  stale,     // the region has another use by now: a miss
  bad,       // the bytes on disk are not those that were stored: a miss, and out of the index
  io_error,  // the disk failed; the entry stays
};

struct VerifyReport {
  std::uint64_t blocks = 0;  // read, of which:
  std::uint64_t bytes = 0;
  std::uint64_t bad = 0;
  std::uint64_t stale = 0;
  std::uint64_t io_errors = 0;
  std::uint64_t total_blocks = 0;  // in the index when it began
  bool complete = false;  // false: stopped by `progress`, or there are regions not recovered yet
};

struct StoreInfo {
  std::string directory;
  std::string notice;  // what happened at open that an operator wants to read once, or empty
  StoreId id{};
  std::uint64_t storage_bytes = 0;
  std::uint64_t region_bytes = 0;
  std::uint32_t region_count = 0;
  std::uint64_t block_bytes_max = 0;  // larger blocks are refused
  bool direct = false;                // O_DIRECT; decided by a probe at open
  bool created = false;               // there was no store here before
  bool took_over = false;  // the index was started anew: another pool used it last, or none
};

// Totals of this process.
struct StoreCounters {
  std::uint64_t read_blocks = 0;
  std::uint64_t read_bytes = 0;  // payload
  std::uint64_t written_blocks = 0;
  std::uint64_t written_bytes = 0;   // payload
  std::uint64_t carried_blocks = 0;  // written again because their region went
  std::uint64_t recovered_blocks = 0;
  std::uint64_t regions_sealed = 0;
  std::uint64_t regions_evicted = 0;
  std::uint64_t regions_removed = 0;  // files given back because the file system was short of space
  std::uint64_t refused_blocks = 0;
  std::uint64_t bad_blocks = 0;
  std::uint64_t stale_reads = 0;
  std::uint64_t read_errors = 0;
  std::uint64_t write_errors = 0;
  std::uint64_t sync_errors = 0;
  std::uint64_t space_errors = 0;
  std::string last_error;  // operation, file and reason; empty when there was none
};

class RegionStore {
 public:
  // Opens the store, creating it if there is none and options.create is set, and attaches the
  // catalog to it. Throws Error: missing, owner, garbage, version (a newer one made it), size
  // (another explicit size), space, store (another pool is using it), system. May block up to 10 s
  // while another process opens it. Recovers nothing: every region is unknown until recover_one().
  [[nodiscard]] static std::shared_ptr<RegionStore> open(std::shared_ptr<Pool> pool,
                                                         std::shared_ptr<Catalog> catalog,
                                                         const RegionStoreOptions& options,
                                                         std::shared_ptr<Files> files);
  ~RegionStore();
  RegionStore(const RegionStore&) = delete;
  RegionStore& operator=(const RegionStore&) = delete;

  [[nodiscard]] const StoreInfo& info() const noexcept;
  [[nodiscard]] StoreCounters counters() const;
  // Whether files were taken away for the sake of others, and none may be made yet.
  [[nodiscard]] bool gives_back() const noexcept;

  // Writes blocks of one namespace that the caller has pinned, in order, in few large writes;
  // pinned.size() == keys.size(). Each is in the index once its bytes are written (not synced).
  AppendResult append(std::uint32_t namespace_index, std::span<const BlockRef> pinned,
                      std::span<const Key> keys);
  // Reads blocks; targets[i] has room for the payload rounded up to 4 KiB, is 4 KiB-aligned, and
  // holds anything when the outcome is not ok. Neighbours in the file, ascending or descending,
  // that are neighbours in `refs` too are read together, up to 8 MiB.
  void read(std::span<const DiskRef> refs, std::span<std::byte* const> targets,
            std::span<ReadOutcome> outcomes);
  // Syncs what was written 5 s or 256 MiB ago; all: whatever is not synced. 0 or an errno.
  int sync_aged(bool all);
  // Looks at one region that nobody has looked at yet and enters its blocks into the index: 0, or
  // -errno when the disk failed, which leaves it for later. Nullopt: there is none left, or others
  // are at the last ones. Several threads and processes may call it.
  std::optional<int> recover_one();
  // Whether the index has what every region holds. Once it has, that stays so.
  [[nodiscard]] bool recovered() const noexcept;
  // What has to be done now and then (once a second): adopt or seal regions without an owner; give
  // files back while the file system is short of space for others. Returns 0 or an errno.
  int tend();
  // Frees the oldest sealed region, carrying over what was used since it was written (half a region
  // at most, into the region open for `stride`). False: there is no sealed region.
  bool make_room(std::uint64_t stride);

  // Reads every block in the index. `fix`: bad ones leave the index. `progress` is called now and
  // then, and stops it by answering false.
  VerifyReport verify(const std::function<bool(const VerifyReport&)>& progress, bool fix);
  // Takes the blocks of one namespace, or all, out of the index; files that hold nothing any more
  // are removed. Returns how many blocks. A namespace's blocks are not found again by recovery.
  std::uint64_t clear(std::optional<std::uint32_t> namespace_index);
  // Syncs, leaves open regions to others and unlocks the store. Idempotent. Other calls must have
  // returned.
  void close() noexcept;

 private:
  class Impl;
  explicit RegionStore(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hpkv::disk
