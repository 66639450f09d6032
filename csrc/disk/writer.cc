// Appending and syncing; which region is appended to is in writer_regions.cc.
#include "disk/writer.h"

#include <cerrno>

#include "disk/aligned.h"

namespace hpkv::disk {
namespace {

constexpr std::int64_t kSyncAgeNs = 5 * kSecond;
constexpr std::uint64_t kSyncBytes = std::uint64_t{256} << 20U;

}  // namespace

AppendResult Writer::append(std::uint32_t namespace_index, std::span<const WriteItem> items) {
  AppendResult result;
  const auto count = static_cast<std::uint32_t>(items.size());
  const auto info = context_.pool->name_space(namespace_index);
  const std::uint64_t stride = info ? round_up_page(info->block_bytes) : 0;
  if (!info || region_capacity(context_.header().region_bytes, stride) < 2) {
    result.refused = count;
  } else {
    const std::lock_guard guard(mutex_);
    const int code = describe(*info);
    if (code < 0) {
      context_.tally.failed(context_.tally.write_errors, "describe a namespace", code);
      result.error = -code;
      result.refused = count;
    } else {
      append_batch({namespace_index, info->id, info->block_bytes, items}, result);
    }
  }
  context_.tally.refused_blocks.fetch_add(result.refused, std::memory_order_relaxed);
  return result;
}

// A namespace has its descriptor before its first block, so that recovery knows what the block is.
// A file that is there may be damaged: the first time, it is read, and what is not as it should be
// is written anew. Later it is only looked for, because somebody may clear the namespace.
int Writer::describe(const NamespaceInfo& info) {
  const NamespaceFiles& namespaces = context_.directory.namespaces();
  int code = namespaces.exists(info.id);
  if (code < 0 && code != -ENOENT) return code;
  if (code == -ENOENT) {
    prune_namespaces();
  } else {
    if (described_.contains(info.id)) return 0;
    const auto found = namespaces.load(info.id, code);
    const bool sound =
        found && found->block_bytes == info.block_bytes && found->descriptor == info.descriptor;
    if (sound) {
      described_.insert(info.id);
      return 0;
    }
  }
  code = namespaces.write(info);
  if (code == 0) described_.insert(info.id);
  return code;
}

// Those that the pool does not know have no block in the index. Regions that nobody has looked at,
// or that somebody is looking at, may still hold some.
void Writer::prune_namespaces() {
  if (!context_.recovered()) return;
  context_.directory.namespaces().prune([this] {
    std::vector<NamespaceId> kept;
    for (std::uint32_t i = 0; i < shm::kNamespaceCount; ++i) {
      if (const auto known = context_.pool->name_space(i)) kept.push_back(known->id);
    }
    return kept;
  });
}

void Writer::append_batch(Batch batch, AppendResult& result) {
  const std::uint64_t stride = round_up_page(batch.payload_bytes);
  while (!batch.items.empty()) {
    int code = 0;
    OpenRegion* open = open_for(stride, code);
    std::size_t done = 0;
    if (open != nullptr) done = write_some(*open, batch, result);
    if (done == 0) {  // no region, no index memory, or the disk failed
      result.refused += static_cast<std::uint32_t>(batch.items.size());
      if (code < 0) result.error = -code;
      if (open == nullptr && code == 0) {  // no failure of the disk: there is just no place
        result.no_room = true;
        context_.tally.failed(context_.tally.space_errors, "find room for a region", -ENOSPC);
      }
      return;
    }
    batch.items = batch.items.subspan(done);
    if (!open->made_room && open->next >= open->capacity / 2) {
      // What is carried over goes into the second half of this region.
      open->made_room = true;
      if (!room_is_left()) make_room_locked(stride);
    }
    if (open->next >= open->capacity) seal(stride);
  }
}

// Writes as many of the first items as one transfer takes; how many are dealt with. 0 when none
// could be, or the write failed.
std::size_t Writer::write_some(OpenRegion& open, const Batch& batch, AppendResult& result) {
  // Not past the middle, where room is made.
  const std::uint32_t half = open.capacity / 2;
  const std::uint32_t end = open.next < half ? half : open.capacity;
  const std::size_t most = std::min<std::size_t>(
      {kTransferRecords, std::max<std::size_t>(kTransferBytes / record_bytes(open.stride), 1),
       end - open.next});
  const AlignedBytes pages(std::min(most, batch.items.size()) * kPage);
  std::vector<DiskRef> refs;
  std::vector<WritePart> parts;
  std::size_t seen = 0;
  for (; seen < batch.items.size() && refs.size() < most; ++seen) {
    const WriteItem& item = batch.items[seen];
    const auto number = open.next + static_cast<std::uint32_t>(refs.size());
    DiskRef ref;
    const ReserveStatus status =
        context_.catalog->reserve(open.region, number, batch.namespace_index, item.key, ref);
    if (status == ReserveStatus::present || status == ReserveStatus::busy) {
      ++result.present;
      continue;
    }
    if (status != ReserveStatus::ok) break;
    auto& header = pages.page<RecordHeader>(refs.size());
    fill_header(header, {context_.header().id, open.region, open.generation, number,
                         batch.payload_bytes, item.checksum, item.key, batch.name_space});
    refs.push_back(ref);
    parts.push_back({&header, item.payload});
  }
  if (seen == 0) evictor_.evict_oldest();  // the index is full: the oldest region makes way
  if (refs.empty()) return seen;
  const std::int64_t written = write_records(context_.files.files(), *open.file, open.next, parts);
  for (std::size_t i = 0; i < refs.size(); ++i) {
    if (written < 0) {
      context_.catalog->abandon(refs[i]);
    } else {
      context_.catalog->publish(refs[i], parts[i].header->payload_checksum);
    }
  }
  if (open.synced == open.next) open.unsynced_since_ns = context_.clock();
  open.next += static_cast<std::uint32_t>(refs.size());  // burnt if the write failed
  if (written < 0) {
    context_.tally.failed(context_.tally.write_errors, "write", open.region,
                          static_cast<int>(written));
    result.error = static_cast<int>(-written);
    result.refused += static_cast<std::uint32_t>(refs.size());
    result.refused += static_cast<std::uint32_t>(batch.items.size() - seen);
    return batch.items.size();
  }
  const auto count = static_cast<std::uint32_t>(refs.size());
  result.written += count;
  context_.tally.written_blocks.fetch_add(count, std::memory_order_relaxed);
  context_.tally.written_bytes.fetch_add(count * batch.payload_bytes, std::memory_order_relaxed);
  return seen;
}

int Writer::sync_one(OpenRegion& open) {
  if (open.synced == open.next) return 0;
  const int code = context_.files.files().sync(open.file->get());
  if (code < 0) {
    context_.tally.failed(context_.tally.sync_errors, "sync", open.region, code);
  } else {
    open.synced = open.next;
  }
  return code;
}

int Writer::sync_aged(bool all) {
  std::vector<OpenRegion> due;  // copies: a sync may take long, and writing goes on meanwhile
  {
    const std::lock_guard guard(mutex_);
    std::uint64_t total = 0;
    for (const auto& [stride, open] : open_) total += open.unsynced_bytes();
    const std::int64_t old = context_.clock() - kSyncAgeNs;
    for (const auto& [stride, open] : open_) {
      const bool aged = open.unsynced_since_ns <= old || total >= kSyncBytes;
      if (open.synced != open.next && (all || aged)) due.push_back(open);
    }
  }
  int worst = 0;
  for (const OpenRegion& before : due) {
    const std::int64_t now = context_.clock();
    const int code = context_.files.files().sync(before.file->get());
    if (code < 0) {
      context_.tally.failed(context_.tally.sync_errors, "sync", before.region, code);
      worst = code;
      continue;
    }
    const std::lock_guard guard(mutex_);
    const auto found = open_.find(before.stride);
    if (found == open_.end() || found->second.region != before.region ||
        found->second.generation != before.generation) {
      continue;  // sealed meanwhile
    }
    found->second.synced = std::max(found->second.synced, before.next);
    found->second.unsynced_since_ns = now;
  }
  return worst;
}

void Writer::leave() noexcept {
  const std::lock_guard guard(mutex_);
  for (auto& [stride, open] : open_) {
    static_cast<void>(context_.catalog->settle(open.region, RegionState::open, RegionState::open));
  }
  open_.clear();
  for (const Carried& carried : carried_) {
    static_cast<void>(
        context_.catalog->settle(carried.from, RegionState::dropping, RegionState::sealed));
  }
  carried_.clear();
}

}  // namespace hpkv::disk
