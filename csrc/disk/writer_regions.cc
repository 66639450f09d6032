// Which region is appended to, and what happens to regions when there is no more room or no owner.
#include <cerrno>

#include "disk/aligned.h"
#include "disk/writer.h"

namespace hpkv::disk {
namespace {

constexpr int kBeginTries = 5;
constexpr std::uint32_t kOrphansKept = 8;  // without an owner and not full; above, they are sealed

}  // namespace

// The region open for this size of block, with room for one more; nullptr: there is none to be had,
// and `code` says why if the disk failed.
Writer::OpenRegion* Writer::open_for(std::uint64_t stride, int& code) {
  const auto found = open_.find(stride);
  if (found != open_.end()) return &found->second;
  // Each round either succeeds or uses something up: an unknown region, a sealed one, an orphan.
  const std::uint32_t rounds = 2 * context_.region_count() + 8;
  int failures = 0;
  for (std::uint32_t i = 0; i < rounds && failures < 3; ++i) {
    if (adopt(stride) || start_free(stride, code)) {
      code = 0;
      return &open_[stride];
    }
    if (code < 0) ++failures;
    if (!recovery_.recover_one() && !give_way(stride)) break;
  }
  return nullptr;
}

// Goes on with a region that somebody left open.
bool Writer::adopt(std::uint64_t stride) {
  for (std::uint32_t i = 0; i < context_.region_count(); ++i) {
    RegionInfo info = context_.catalog->region(i);
    if (info.state != RegionState::open || info.owned || info.stride != stride) continue;
    if (info.used >= info.capacity) continue;
    if (!context_.catalog->claim(i, RegionState::open, RegionState::open)) continue;
    info = context_.catalog->region(i);
    context_.files.drop(i);  // its last owner may have made the file anew
    int code = 0;
    const auto header = context_.files.header(i, code);
    const RegionFiles::Handle file = header ? context_.files.open(i, code) : nullptr;
    const bool same = header && header->generation == info.file_generation &&
                      header->stride == stride && header->capacity == info.capacity &&
                      info.used < info.capacity;
    // It was sealed, perhaps, but for the last sync: recovery would believe that summary, and not
    // look for what is added now.
    if (!file || !same || void_summary(context_, *file, *header) < 0) {
      // Not the file that the index speaks of, or one that cannot be read or written now: left
      // to tend_regions.
      static_cast<void>(context_.catalog->settle(i, RegionState::open, RegionState::open));
      continue;
    }
    // synced = 0: what its last owner did not sync is ours to sync.
    open_[stride] = {.region = i,
                     .generation = info.file_generation,
                     .capacity = info.capacity,
                     .next = info.used,
                     .stride = stride,
                     .file = file,
                     .unsynced_since_ns = context_.clock()};
    return true;
  }
  return false;
}

// Begins a free region: one with a file before one that needs a new one.
bool Writer::start_free(std::uint64_t stride, int& code) {
  code = 0;
  for (const bool existing : {true, false}) {
    if (!existing && !context_.may_grow()) return false;
    int failures = 0;
    for (std::uint32_t i = 0; i < context_.region_count() && failures < 2; ++i) {
      const RegionInfo info = context_.catalog->region(i);
      if (info.state != RegionState::free || info.owned) continue;
      if (context_.files.exists(i) != existing) continue;
      int failed = 0;
      if (start(i, stride, !existing, failed)) return true;
      if (failed == 0) continue;  // somebody else has it, or the index has no memory for it
      context_.tally.failed(context_.tally.write_errors, "start", i, failed);
      if (failed == -ENOSPC || failed == -EDQUOT) break;  // the old ones have to do
      code = failed;
      ++failures;
    }
  }
  return false;
}

bool Writer::start(std::uint32_t region, std::uint64_t stride, bool may_grow, int& code) {
  Catalog& catalog = *context_.catalog;
  if (!catalog.claim(region, RegionState::free, RegionState::dropping)) return false;
  RegionHeader header;
  header.region = region;
  header.stride = stride;
  header.capacity = region_capacity(context_.header().region_bytes, stride);
  header.generation = catalog.region(region).file_generation + 1;
  bool begun = catalog.begin_region(region, header.generation, stride, header.capacity);
  RegionFiles::Handle file;
  if (begun) {
    code = context_.files.start(header, may_grow);
    if (code == 0) file = context_.files.open(region, code);
    begun = file != nullptr;
  }
  bool again = begun;
  for (int i = 0; again && i < kBeginTries; ++i) {
    begun = catalog.begin_region(region, header.generation, stride, header.capacity);
    again = !begun;
  }
  if (!begun || !catalog.claim(region, RegionState::dropping, RegionState::open)) {
    static_cast<void>(catalog.settle(region, RegionState::dropping, RegionState::free));
    return false;
  }
  open_[stride] = {.region = region,
                   .generation = header.generation,
                   .capacity = header.capacity,
                   .stride = stride,
                   .file = file};
  return true;
}

// There is no free region: something makes way. Or there is one, and the index has no memory for
// its records: then it is one that has places for as many, because any other would not help.
bool Writer::give_way(std::uint64_t stride) {
  const std::uint32_t places =
      room_is_left() ? region_capacity(context_.header().region_bytes, stride) : 0;
  if (evictor_.evict_oldest(places)) return true;
  for (std::uint32_t i = 0; i < context_.region_count(); ++i) {
    const RegionInfo info = context_.catalog->region(i);
    if (info.state != RegionState::open || info.owned || info.places < places) continue;
    if (!context_.catalog->claim(i, RegionState::open, RegionState::sealing)) continue;
    context_.files.drop(i);
    return seal_region(context_, i) == 0;
  }
  for (const auto& [other, open] : open_) {
    if (other == stride || context_.catalog->region(open.region).places < places) continue;
    seal(other);
    return true;
  }
  return false;
}

// The region of this stride is full, or must give way. If it cannot be sealed now, it is left open
// without an owner and tend_regions tries again.
void Writer::seal(std::uint64_t stride) {
  const std::uint32_t region = open_[stride].region;
  open_.erase(stride);
  if (context_.catalog->claim(region, RegionState::open, RegionState::sealing)) {
    static_cast<void>(seal_region(context_, region));
  }
}

bool Writer::room_is_left() {
  const bool may_grow = context_.may_grow();
  for (std::uint32_t i = 0; i < context_.region_count(); ++i) {
    const RegionInfo info = context_.catalog->region(i);
    // It may turn out free; but what cannot be read may stay so for good.
    if (info.state == RegionState::unknown && !recovery_.resting(i)) return true;
    if (info.state != RegionState::free || info.owned) continue;
    if (may_grow || context_.files.exists(i)) return true;
  }
  return false;
}

bool Writer::make_room(std::uint64_t stride) {
  const std::lock_guard guard(mutex_);
  return make_room_locked(stride);
}

bool Writer::make_room_locked(std::uint64_t stride) {
  if (finish_carried() < 0) return false;
  const auto region = evictor_.take_oldest();
  if (!region) return false;
  const auto open = open_.find(stride);
  if (open != open_.end() && context_.catalog->region(*region).stride == stride) {
    std::vector<DiskRef> refs = evictor_.worth_carrying(*region);
    const std::size_t room = open->second.capacity - open->second.next;
    if (refs.size() > room) refs.resize(room);
    carry(refs);
    // What was synced in the old place stays so: the old place is written over only after this.
    if (!refs.empty() && sync_one(open->second) < 0) {
      carried_.push_back({*region, open->second.region, open->second.file});
      return false;
    }
  }
  return evictor_.finish(*region);
}

// Regions that wait for a sync of what was carried out of them. 0 or -errno.
int Writer::finish_carried() {
  while (!carried_.empty()) {
    const Carried& carried = carried_.back();
    const int code = context_.files.files().sync(carried.file->get());
    if (code < 0) {
      context_.tally.failed(context_.tally.sync_errors, "sync", carried.to, code);
      return code;
    }
    static_cast<void>(evictor_.finish(carried.from));
    carried_.pop_back();
  }
  return 0;
}

// Reads blocks of a region that is being dropped and writes them again, a buffer at a time.
void Writer::carry(std::span<const DiskRef> refs) {
  while (!refs.empty()) {
    const std::uint64_t stride = round_up_page(refs[0].payload_bytes);
    const std::size_t count =
        std::min<std::size_t>({refs.size(), kTransferRecords,
                               std::max<std::size_t>(kTransferBytes / record_bytes(stride), 1)});
    const AlignedBytes buffer(count * stride);
    std::vector<std::byte*> targets(count);
    for (std::size_t i = 0; i < count; ++i) targets[i] = buffer.data() + i * stride;
    std::vector<ReadOutcome> outcomes(count);
    reader_.read(refs.first(count), targets, outcomes);
    std::map<std::uint32_t, std::vector<WriteItem>> by_namespace;
    for (std::size_t i = 0; i < count; ++i) {
      if (outcomes[i] != ReadOutcome::ok) continue;
      context_.catalog->forget(refs[i]);  // a key has one place
      by_namespace[refs[i].namespace_index].push_back({refs[i].key, targets[i], refs[i].checksum});
    }
    for (const auto& [index, items] : by_namespace) {
      const auto info = context_.pool->name_space(index);
      const auto open = open_.find(stride);
      if (!info || open == open_.end()) continue;
      Batch batch{index, info->id, info->block_bytes, items};
      AppendResult result;
      while (!batch.items.empty() && open->second.next < open->second.capacity) {
        const std::size_t done = write_some(open->second, batch, result);
        if (done == 0) break;
        batch.items = batch.items.subspan(done);
      }
      context_.tally.carried_blocks.fetch_add(result.written, std::memory_order_relaxed);
    }
    refs = refs.subspan(count);
  }
}

int Writer::tend_regions() {
  const std::lock_guard guard(mutex_);
  int worst = give_up_lost();
  std::vector<RegionInfo> orphans;
  for (std::uint32_t i = 0; i < context_.region_count(); ++i) {
    const RegionInfo info = context_.catalog->region(i);
    if (info.state == RegionState::open && !info.owned) orphans.push_back(info);
  }
  if (const int code = finish_carried(); code < 0) worst = code;
  const std::uint32_t kept = std::min(kOrphansKept, context_.region_count() / 8);
  for (std::size_t i = 0; i < orphans.size(); ++i) {
    const int code = tend_orphan(orphans[i], orphans.size() - i > kept);
    if (code < 0) worst = code;
  }
  return worst;
}

int Writer::tend_orphan(const RegionInfo& info, bool crowded) {
  Catalog& catalog = *context_.catalog;
  const std::pair state(info.file_generation, info.used);
  const auto seen = synced_orphans_.find(info.region);
  if (info.used < info.capacity && !crowded && seen != synced_orphans_.end() &&
      seen->second == state) {
    return 0;
  }
  context_.files.drop(info.region);  // its last owner may have made the file anew
  int code = 0;
  const auto header = context_.files.header(info.region, code);
  const bool gone = code == -ENOENT || (code == 0 && !header) ||
                    (header && header->generation != info.file_generation);
  if (code < 0 && !gone) return code;
  if (gone) {
    if (catalog.claim(info.region, RegionState::open, RegionState::dropping)) {
      static_cast<void>(evictor_.finish(info.region));
    }
    return 0;
  }
  if (info.used >= info.capacity || crowded) {
    if (!catalog.claim(info.region, RegionState::open, RegionState::sealing)) return 0;
    return seal_region(context_, info.region);
  }
  if (!catalog.claim(info.region, RegionState::open, RegionState::open)) return 0;
  const RegionFiles::Handle file = context_.files.open(info.region, code);
  if (file) code = context_.files.files().sync(file->get());
  static_cast<void>(catalog.settle(info.region, RegionState::open, RegionState::open));
  if (code == 0) {
    synced_orphans_[info.region] = state;
  } else {
    context_.tally.failed(context_.tally.sync_errors, "sync", info.region, code);
  }
  return code;
}

void Writer::retire_empty() {
  const std::lock_guard guard(mutex_);
  std::vector<DiskRef> refs;
  for (std::uint32_t i = 0; i < context_.region_count(); ++i) {
    const RegionInfo info = context_.catalog->region(i);
    if (info.state != RegionState::open || (info.owned && !info.ours)) continue;
    context_.catalog->entries(i, refs);
    if (!refs.empty()) continue;
    if (!context_.catalog->claim(i, RegionState::open, RegionState::dropping)) continue;
    std::erase_if(open_, [&](const auto& open) { return open.second.region == i; });
    static_cast<void>(evictor_.finish(i));
  }
}

// Somebody removed the file of a region that we write to: what goes there now is lost at the next
// start, so it is better written elsewhere.
int Writer::give_up_lost() {
  int code = 0;
  for (auto at = open_.begin(); at != open_.end();) {
    FileStatus status;
    const OpenRegion& open = at->second;
    const bool lost =
        context_.files.files().status(open.file->get(), status) == 0 && status.links == 0;
    if (lost && context_.catalog->claim(open.region, RegionState::open, RegionState::dropping)) {
      code = -ENOENT;
      context_.tally.failed(context_.tally.write_errors, "find", open.region, code);
      context_.files.drop(open.region);
      static_cast<void>(evictor_.finish(open.region));
      at = open_.erase(at);
    } else {
      ++at;
    }
  }
  return code;
}

}  // namespace hpkv::disk
