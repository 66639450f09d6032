// Blocks into region files: the regions that this process has open, one for each size of block.
//
// Owns: those regions, in the catalog and here. Invariants: the number of a record rises and is
// never used twice under one generation, whether its write worked or not; an entry is ready only
// after its write returned; at most one region is open for each stride. Threads: safe; one mutex,
// held while writing (never by readers). Syncing does not hold it.
#pragma once

#include <map>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "disk/evictor.h"
#include "disk/reader.h"
#include "disk/recovery.h"

namespace hpkv::disk {

// A block to be written, wherever its bytes are.
struct WriteItem {
  Key key;
  const std::byte* payload = nullptr;  // 4 KiB-aligned
  std::uint32_t checksum = 0;          // CRC32C of the payload, as it was when it was stored
};

class Writer {
 public:
  Writer(Context& context, Reader& reader, Recovery& recovery, Evictor& evictor) noexcept
      : context_(context), reader_(reader), recovery_(recovery), evictor_(evictor) {}

  // Blocks of one namespace, in order.
  AppendResult append(std::uint32_t namespace_index, std::span<const WriteItem> items);
  // 0 or -errno.
  int sync_aged(bool all);
  bool make_room(std::uint64_t stride);
  // Regions without an owner: synced once, sealed when full or when there are many. Own regions
  // whose file is gone are given up. 0 or -errno.
  int tend_regions();
  // Own open regions and orphans that hold no block any more become free.
  void retire_empty();
  // Leaves the open regions to others.
  void leave() noexcept;

 private:
  struct OpenRegion {
    std::uint32_t region = 0;
    std::uint32_t generation = 0;
    std::uint32_t capacity = 0;
    std::uint32_t next = 0;  // number of the next record
    std::uint64_t stride = 0;
    RegionFiles::Handle file;
    std::uint32_t synced = 0;  // records before this one are synced
    std::int64_t unsynced_since_ns = 0;
    bool made_room = false;

    [[nodiscard]] std::uint64_t unsynced_bytes() const noexcept {
      return (next - synced) * record_bytes(stride);
    }
  };
  // A region whose blocks were carried over to a file that could not be synced yet: it is ours, and
  // keeps its file as it is.
  struct Carried {
    std::uint32_t from = 0;
    std::uint32_t to = 0;
    RegionFiles::Handle file;
  };
  struct Batch {
    std::uint32_t namespace_index = 0;
    NamespaceId name_space{};
    std::uint64_t payload_bytes = 0;
    std::span<const WriteItem> items;
  };

  // All of these: mutex_ held.
  [[nodiscard]] int describe(const NamespaceInfo& info);
  void prune_namespaces();
  void append_batch(Batch batch, AppendResult& result);
  [[nodiscard]] std::size_t write_some(OpenRegion& open, const Batch& batch, AppendResult& result);
  [[nodiscard]] OpenRegion* open_for(std::uint64_t stride, int& code);
  [[nodiscard]] bool adopt(std::uint64_t stride);
  [[nodiscard]] bool start_free(std::uint64_t stride, int& code);
  [[nodiscard]] bool start(std::uint32_t region, std::uint64_t stride, bool may_grow, int& code);
  [[nodiscard]] bool give_way(std::uint64_t stride);
  void seal(std::uint64_t stride);
  [[nodiscard]] bool room_is_left();
  bool make_room_locked(std::uint64_t stride);
  void carry(std::span<const DiskRef> refs);
  int finish_carried();
  int sync_one(OpenRegion& open);
  int give_up_lost();  // 0, or -ENOENT: a file that was written to is gone
  int tend_orphan(const RegionInfo& info, bool crowded);

  Context& context_;
  Reader& reader_;
  Recovery& recovery_;
  Evictor& evictor_;
  std::mutex mutex_;
  std::map<std::uint64_t, OpenRegion> open_;  // by stride
  std::vector<Carried> carried_;
  std::set<NamespaceId> described_;  // whose descriptors this process has seen sound
  // Orphans that were synced: file generation and number of the next record then.
  std::map<std::uint32_t, std::pair<std::uint32_t, std::uint32_t>> synced_orphans_;
};

}  // namespace hpkv::disk
