// The summary at the end of a sealed region: which blocks it holds, so that a restart reads one
// piece instead of every record's header. Its first page is valid only with a body that matches,
// and only for the generation of the region's header; it is written after the records were synced.
//
// Owns nothing. Threads: safe; may block on the disk.
#pragma once

#include <cstdint>
#include <vector>

#include "disk/context.h"

namespace hpkv::disk {

// Syncs the records of a region of ours in state `sealing`, writes and syncs its summary, and makes
// it sealed. 0, or -errno, and then the region is left open without an owner, to be tried again.
[[nodiscard]] int seal_region(Context& context, std::uint32_t region);

// Makes the summary of a region void, before records are added to a region that may have one. It
// need not be synced by itself: whatever syncs the records syncs this too. 0 or -errno.
[[nodiscard]] int void_summary(Context& context, const FileHandle& file,
                               const RegionHeader& header);

struct Summary {
  std::uint64_t sequence = 0;
  std::vector<NamespaceId> namespaces;
  std::vector<SummaryRow> rows;  // name_space and number are in range
};

// The summary that goes with this header; nullopt: there is none, or it does not hold. `code`: 0,
// or -errno when the disk failed.
[[nodiscard]] std::optional<Summary> read_summary(Context& context, const RegionHeader& header,
                                                  int& code);

}  // namespace hpkv::disk
