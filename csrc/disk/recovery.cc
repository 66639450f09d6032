#include "disk/recovery.h"

#include <cerrno>
#include <chrono>
#include <thread>

#include "base/points.h"
#include "disk/aligned.h"

namespace hpkv::disk {
namespace {

constexpr std::int64_t kRestNs = 30 * kSecond;  // after the disk failed, or the index had no memory
constexpr int kBeginTries = 5;
constexpr int kEnterTries = 20;            // each waits for a lock itself
constexpr std::uint32_t kScanAhead = 256;  // headers that the disk may be working on
constexpr int kScanFailures = 3;
constexpr std::uint64_t kScanBytes = std::uint64_t{1} << 20U;

// Whether this page says that it heads record `number` of the region's present contents.
bool heads(const RecordHeader& page, const RegionHeader& region, std::uint32_t number) noexcept {
  const bool generation = page.generation == region.generation || HPKV_BUG("no_record_generation");
  return page.magic == kRecordMagic && page.version == kStoreVersion &&
         page.store == region.store && page.region == region.region && generation &&
         page.number == number && round_up_page(page.payload_bytes) == region.stride &&
         page_holds(page);
}

// Whether the pool will never take this namespace: its blocks do not fit, or the pool knows it as
// something else. A lock that was not free in time, or a full table, is a matter of waiting.
bool never_taken(const Pool& pool, const NamespaceId& id, const Error& error) {
  if (pool.off()) return false;
  return error.kind() == ErrorKind::size || error.kind() == ErrorKind::argument ||
         (error.kind() == ErrorKind::namespaces && pool.describe(id).has_value());
}

}  // namespace

Recovery::Recovery(Context& context)
    : context_(context), try_again_ns_(context.region_count(), 0) {}

std::optional<int> Recovery::recover_one() {
  const std::uint32_t count = context_.region_count();
  const std::uint32_t begin = next_.load(std::memory_order_relaxed);
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t region = (begin + i) % count;
    const RegionInfo info = context_.catalog->region(region);
    if (info.state != RegionState::unknown || info.owned || resting(region)) continue;
    if (!context_.catalog->claim(region, RegionState::unknown, RegionState::recovering)) continue;
    next_.store((region + 1) % count, std::memory_order_relaxed);
    int code = 0;
    const RegionState state = recover(region, code);
    if (state == RegionState::unknown) {
      const std::lock_guard guard(mutex_);
      try_again_ns_[region] = context_.clock() + kRestNs;
    }
    static_cast<void>(context_.catalog->settle(region, RegionState::recovering, state));
    return code;
  }
  return std::nullopt;
}

void Recovery::forget_namespaces() {
  const std::lock_guard guard(mutex_);
  namespaces_.clear();
}

bool Recovery::resting(std::uint32_t region) {
  const std::lock_guard guard(mutex_);
  return try_again_ns_[region] != 0 && context_.clock() < try_again_ns_[region];
}

// A namespace that this process has left may be another's by now.
void Recovery::forget_reused_namespaces() {
  const std::lock_guard guard(mutex_);
  std::erase_if(namespaces_, [this](const auto& known) {
    if (!known.second) return false;
    const auto info = context_.pool->name_space(*known.second);
    return !info || info->id != known.first;
  });
}

RegionState Recovery::recover(std::uint32_t region, int& code) {
  forget_reused_namespaces();
  const auto header = context_.files.header(region, code);
  // No file, and so nothing to lose: unless the whole directory is away for a while.
  if (code == -ENOENT && context_.directory.in_place()) {
    code = 0;
    return RegionState::free;
  }
  if (code < 0) {
    context_.tally.failed(context_.tally.read_errors, "recover", region, code);
    // What is not a file of ours to open is no region either; its number stays unused.
    return RegionState::unknown;
  }
  if (!header) return RegionState::free;
  bool begun = false;
  for (int i = 0; i < kBeginTries && !begun; ++i) {
    begun = context_.catalog->begin_region(region, header->generation, header->stride,
                                           header->capacity);
  }
  if (!begun) return RegionState::unknown;
  std::uint64_t entered = 0;
  const auto summary = read_summary(context_, *header, code);
  if (summary) {
    code = enter_rows(*header, *summary, entered);
  } else if (code == 0) {
    code = scan(*header, entered);
  }
  if (code < 0) {
    // Begun anew, or continued, it would lose what lies where nobody could look.
    context_.tally.failed(context_.tally.read_errors, "recover", region, code);
    return RegionState::unknown;
  }
  context_.tally.recovered_blocks.fetch_add(entered, std::memory_order_relaxed);
  if (entered == 0) return RegionState::free;
  return summary ? RegionState::sealed : RegionState::open;
}

int Recovery::enter_rows(const RegionHeader& header, const Summary& summary,
                         std::uint64_t& entered) {
  for (const SummaryRow& row : summary.rows) {
    if (round_up_page(row.payload_bytes) != header.stride) continue;
    const Found found{Key::from_bytes(row.key),
                      summary.namespaces[row.name_space],
                      row.number,
                      row.payload_checksum,
                      row.payload_bytes,
                      true};
    if (const int code = enter(header.region, found, entered); code < 0) return code;
  }
  context_.catalog->set_sequence(header.region, summary.sequence);
  return 0;
}

// Every place is looked at: what was not synced may be missing in the middle. Small records are
// read whole, many at a time; of large ones only the headers, through the page cache and announced
// ahead, so that the disk works on many at once.
int Recovery::scan(const RegionHeader& header, std::uint64_t& entered) {
  Files& files = context_.files.files();
  const FileHandle file(context_.shared_files,
                        files.open(context_.directory.region_path(header.region), {}));
  if (!file.valid()) return file.get();
  const std::uint64_t each = record_bytes(header.stride);
  const bool small = each <= 4 * kPage;
  const auto batch = static_cast<std::uint32_t>(small ? kScanBytes / each : 1);
  const AlignedBytes buffer(small ? batch * each : kPage);
  std::uint32_t expected = 0;
  int code = 0;
  int failures = 0;
  for (std::uint32_t number = 0; number < header.capacity; number += batch) {
    for (; !small && expected < std::min(number + kScanAhead, header.capacity); ++expected) {
      files.expect(file.get(), record_offset(header.stride, expected), kPage);
    }
    const iovec part{buffer.data(), buffer.size()};
    const std::int64_t bytes =
        files.read(file.get(), std::span(&part, 1), record_offset(header.stride, number));
    if (bytes < 0) code = static_cast<int>(bytes);
    // The places behind it are looked at too, but a disk that fails again and again is left alone.
    if (bytes < 0 && ++failures == kScanFailures) break;
    for (std::uint32_t i = 0; i < batch && number + i < header.capacity; ++i) {
      if (static_cast<std::int64_t>(i * each + kPage) > bytes) break;  // the file ends here
      const auto& page = *reinterpret_cast<const RecordHeader*>(buffer.data() + i * each);
      if (!heads(page, header, number + i)) continue;
      const Found found{Key::from_bytes(page.key), page.name_space,    page.number,
                        page.payload_checksum,     page.payload_bytes, false};
      if (const int unclear = enter(header.region, found, entered); unclear < 0) return unclear;
    }
  }
  files.forget(file.get());
  return code;
}

int Recovery::enter(std::uint32_t region, const Found& found, std::uint64_t& entered) {
  int code = 0;
  const auto index = namespace_index(found.name_space, found.payload_bytes, code);
  if (!index) return code;
  Catalog& catalog = *context_.catalog;
  DiskRef ref;
  // On a busy machine a lock may not be free in time: a block is not lost for that.
  ReserveStatus status = catalog.reserve(region, found.number, *index, found.key, ref);
  for (int i = 0; i < kEnterTries && status == ReserveStatus::busy; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    status = catalog.reserve(region, found.number, *index, found.key, ref);
  }
  if (status == ReserveStatus::present && found.synced) {
    DiskRef other;
    if (catalog.find(found.key, other) &&
        catalog.region(other.region).state != RegionState::sealed) {
      catalog.forget(other);
      status = catalog.reserve(region, found.number, *index, found.key, ref);
    }
  }
  if (status != ReserveStatus::ok) return 0;
  catalog.publish(ref, found.checksum);
  ++entered;
  return 0;
}

std::optional<std::uint32_t> Recovery::namespace_index(const NamespaceId& id,
                                                       std::uint64_t block_bytes, int& code) {
  const std::lock_guard guard(mutex_);
  auto known = namespaces_.find(id);
  if (known == namespaces_.end()) {
    const auto index = learn(id, code);
    if (code < 0) return std::nullopt;
    known = namespaces_.emplace(id, index).first;
  }
  if (!known->second || context_.pool->block_bytes(*known->second) != block_bytes) {
    return std::nullopt;
  }
  return known->second;
}

std::optional<std::uint32_t> Recovery::learn(const NamespaceId& id, int& code) {
  const auto info = context_.directory.namespaces().load(id, code);
  if (!info && code == 0 && !context_.directory.in_place()) code = -EAGAIN;
  if (!info) return std::nullopt;
  try {
    return context_.pool->add_namespace(id, std::as_bytes(std::span(info->descriptor)),
                                        info->block_bytes);
  } catch (const Error& error) {
    if (!never_taken(*context_.pool, id, error)) code = -EAGAIN;
    return std::nullopt;
  }
}

}  // namespace hpkv::disk
