// Regions that give way: the oldest sealed one, for its place or for the disk's.
//
// Invariant: the index forgets a region's blocks before its file is reused or removed; if it cannot
// in time, the region stays sealed. Owns nothing. Threads: safe: the catalog gives a region to one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "disk/context.h"

namespace hpkv::disk {

class Evictor {
 public:
  explicit Evictor(Context& context) noexcept : context_(context) {}

  // Takes the oldest sealed region (one without blocks first) of those with so many places in the
  // index into `dropping`; nullopt: none.
  [[nodiscard]] std::optional<std::uint32_t> take_oldest(std::uint32_t places = 0);
  // Those of a region that were used since they were written and are not in the host pool: what is
  // worth writing again. Half the region's capacity at most, by number.
  [[nodiscard]] std::vector<DiskRef> worth_carrying(std::uint32_t region) const;
  // From dropping to free. False: a lock was not free in time, and it is sealed again.
  bool finish(std::uint32_t region);
  // Evicts the oldest without carrying anything over.
  bool evict_oldest(std::uint32_t places = 0);

  // Takes region files away while the file system is short of space for others, a few at a time.
  // 0 or -errno.
  int shrink();
  // Frees and unlinks a region that is in state `from` and unowned.
  bool remove_file(std::uint32_t region, RegionState from, int& code);

 private:
  [[nodiscard]] bool remove_one(int& code);

  Context& context_;
};

}  // namespace hpkv::disk
