// The one index of the disk tier: regions of the store and the blocks in them, in the pool's shared
// memory, so that every process attached to the pool sees the same. A store's files can rebuild it;
// nothing here touches a file.
//
// Owns: nothing but a share of the pool. Invariants: at most one entry a key; an entry is `ready`
// only after its bytes are in the file; the number of a freed entry is not given out again under
// the same file generation; only the owner of a region changes it, and a dead owner's regions
// become unowned again (Pool's maintenance) after its quarantine. Pool::check() verifies all of it.
// Threads: every method may be called from any thread; engine threads only, unless it says
// "scheduler-safe". Nothing here waits without a bound.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "shm/format.h"
#include "shm/pool.h"

namespace hpkv::disk {

using shm::RegionState;

using StoreId = std::array<std::byte, 16>;

// A block on disk as it was at one moment. Nothing keeps it there: whoever reads the file compares
// generation, key, namespace and checksum with what it read.
struct DiskRef {
  Key key;
  std::uint32_t region = 0;
  std::uint32_t number = 0;  // of the record in the region's file
  std::uint32_t file_generation = 0;
  std::uint32_t checksum = 0;  // CRC32C of the payload; 0 while writing
  std::uint32_t namespace_index = 0;
  std::uint32_t entry_generation = 0;
  std::uint64_t payload_bytes = 0;  // exact
  std::uint64_t entry_offset = 0;   // in the pool file
};

struct RegionInfo {
  std::uint32_t region = 0;
  RegionState state = RegionState::unknown;
  bool owned = false;  // by anybody
  bool ours = false;   // by this process
  std::uint32_t owner_slot = 0;
  std::uint32_t file_generation = 0;
  std::uint64_t stride = 0;
  std::uint64_t sequence = 0;  // order of sealing
  std::uint32_t capacity = 0;  // records
  std::uint32_t used = 0;      // number of the next record
  std::uint32_t live = 0;      // entries; a guess that may be too high after a death
  std::uint32_t places = 0;    // for entries that the index has memory for: the most `capacity`
                               // that begin_region() needs no memory for
};

// Which blocks a survey offers.
struct SurveyLimits {
  std::size_t blocks = 0;                        // the coldest so many
  std::uint32_t min_uses = 0;                    // not those used less often since they were stored
  std::uint64_t stride_max = ~std::uint64_t{0};  // nor larger ones
};

// What the demoter goes by. All in bytes of places (strides).
struct Survey {
  struct Block {
    Key key;
    std::uint32_t namespace_index = 0;
    std::uint64_t stamp = 0;
    bool used = false;  // loaded since it was stored
  };
  std::uint64_t pool_bytes = 0;   // what blocks may use in all
  std::uint64_t free_bytes = 0;   // holds no block
  std::uint64_t clean_bytes = 0;  // unpinned ready blocks that are on disk too
  std::uint64_t busy_blocks = 0;  // being written or pinned: not judged, look again later
  std::vector<Block> coldest;     // unpinned ready blocks that are not on disk, coldest first
};

struct DiskStats {
  std::uint64_t entries = 0;  // ready
  std::uint64_t bytes = 0;    // their payload
  std::uint64_t writing = 0;
  std::uint32_t regions_in_use = 0;  // neither free nor unknown
  std::uint32_t regions_unknown = 0;
  std::array<std::uint64_t, shm::kNamespaceCount> bytes_by_namespace{};
  std::array<std::uint64_t, shm::kNamespaceCount> entries_by_namespace{};
};

class Catalog {
 public:
  explicit Catalog(std::shared_ptr<Pool> pool) noexcept;

  // Makes the region records of this store, or finds them. Throws Error: the pool belongs to
  // another store (`store`; names both), or has no memory for them (`space`).
  void attach(const StoreId& id, std::uint32_t region_count, std::uint64_t region_bytes);
  // Every region unknown and unowned, every entry gone, whoever had them. The caller holds the
  // store exclusively. False: a lock was not free in time; try again.
  [[nodiscard]] bool forget_all();

  [[nodiscard]] std::uint32_t region_count() const noexcept;  // 0 before attach
  [[nodiscard]] std::uint64_t region_bytes() const noexcept;  // of a region's file; 0 before attach
  [[nodiscard]] RegionInfo region(std::uint32_t region) const noexcept;

  // Moves an unowned region from `from` into a state that has an owner (recovering, open, sealing,
  // dropping), or one of ours between such states. False: it is not in `from`, or another's.
  [[nodiscard]] bool claim(std::uint32_t region, RegionState from, RegionState to) noexcept;
  // Moves a region of ours into a state without an owner (free, sealed, unknown, open). False as
  // above.
  [[nodiscard]] bool settle(std::uint32_t region, RegionState from, RegionState to) noexcept;
  // Starts the contents of a region of ours anew, best while it is `dropping`, so that a death
  // before its header is written leaves a sealed region without entries, and not one to be
  // continued: no entries, next number 0, room for `capacity` entries. False: no index memory for
  // them (up to `places` need none: drop such an old region and use that one), or a lock was not
  // free in time; the region is then empty or as it was, and still ours.
  [[nodiscard]] bool begin_region(std::uint32_t region, std::uint32_t file_generation,
                                  std::uint64_t stride, std::uint32_t capacity);
  // The order of sealing, of a region of ours.
  void set_sequence(std::uint32_t region, std::uint64_t sequence) noexcept;

  // Enters a key as record `number` of a region of ours (open, sealing or recovering), as
  // `writing`. ok: fill the file, then publish or abandon. present: it is on disk already. busy:
  // somebody else is writing it, or a lock was not free in time. full: no index memory, or past the
  // region's capacity.
  [[nodiscard]] ReserveStatus reserve(std::uint32_t region, std::uint32_t number,
                                      std::uint32_t namespace_index, const Key& key, DiskRef& out);
  // The bytes are in the file. `stamp`: the block's recency in the host pool, or 0 for "now".
  void publish(const DiskRef& ref, std::uint32_t checksum, std::uint64_t stamp = 0) noexcept;
  void abandon(const DiskRef& ref) noexcept;
  // Takes a ready entry out if it is still this one, whoever owns its region.
  void forget(const DiskRef& ref) noexcept;
  // Takes every entry out of a region of ours. False: a lock was not free in time and some are
  // left; the file must not be reused yet.
  [[nodiscard]] bool forget_region(std::uint32_t region) noexcept;
  // The ready entries of a region, by number.
  void entries(std::uint32_t region, std::vector<DiskRef>& out) const;

  // Leading run of keys that are ready in the host pool or on disk. Scheduler-safe, takes no lock.
  [[nodiscard]] std::size_t lookup(std::span<const Key> keys) const noexcept;
  // A ready entry of this key. Scheduler-safe, takes no lock.
  [[nodiscard]] bool find(const Key& key, DiskRef& out) const noexcept;
  // Refreshes recency, the last as the oldest. Scheduler-safe.
  void touch(std::span<const DiskRef> refs) noexcept;
  // Whether it was touched since it was written.
  [[nodiscard]] bool touched(const DiskRef& ref) const noexcept;

  // Changes whenever a block is stored or touched anywhere in the pool.
  [[nodiscard]] std::uint64_t activity() const noexcept;
  // One walk over the host pool.
  [[nodiscard]] Survey survey(const SurveyLimits& limits) const;
  // Ready blocks of the host pool that are not on disk: what a reboot now would lose. One walk.
  [[nodiscard]] std::uint64_t pending_blocks() const;
  // Takes the ready entries of a namespace out; returns how many.
  std::uint64_t drop_namespace(std::uint32_t namespace_index) noexcept;
  [[nodiscard]] DiskStats stats() const;

 private:
  std::shared_ptr<Pool> pool_;
};

}  // namespace hpkv::disk
