#include "disk/summary.h"

#include <array>
#include <cstring>

#include "base/points.h"
#include "disk/aligned.h"

namespace hpkv::disk {
namespace {

// One above every sequence in the index. Two processes may take the same: the order between two
// regions sealed at the same moment does not matter.
std::uint64_t next_sequence(const Context& context) {
  std::uint64_t last = 0;
  for (std::uint32_t i = 0; i < context.region_count(); ++i) {
    last = std::max(last, context.catalog->region(i).sequence);
  }
  return last + 1;
}

class SummaryImage {
 public:
  SummaryImage(const Context& context, const RegionInfo& info)
      : context_(context), bytes_(summary_bytes(info.capacity)) {
    places_.fill(kNone);
  }

  void add(const DiskRef& ref) {
    const std::uint32_t place = place_of(ref.namespace_index);
    if (place == kNone) return;  // its identity is gone: nothing could be done with the block
    SummaryRow row;
    ref.key.to_bytes(row.key);
    row.number = ref.number;
    row.payload_checksum = ref.checksum;
    row.payload_bytes = ref.payload_bytes;
    row.name_space = place;
    std::byte* rows = bytes_.data() + kSummaryHeadBytes;
    std::memcpy(rows + rows_++ * sizeof(SummaryRow), &row, sizeof(row));
  }

  std::span<const std::byte> finish(const RegionInfo& info, std::uint64_t sequence) {
    SummaryHeader& header = bytes_.page<SummaryHeader>(0);
    header = SummaryHeader{};
    header.region = info.region;
    header.store = context_.header().id;
    header.generation = info.file_generation;
    header.rows = static_cast<std::uint32_t>(rows_);
    header.namespaces = namespaces_;
    header.sequence = sequence;
    header.body_checksum = crc32c(bytes_.span().subspan(sizeof(SummaryHeader)));
    seal_page(header);
    return bytes_.span();
  }

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFU;

  std::uint32_t place_of(std::uint32_t namespace_index) {
    if (namespace_index >= places_.size()) return kNone;
    std::uint32_t& place = places_[namespace_index];
    if (place != kNone) return place;
    const auto info = context_.pool->name_space(namespace_index);
    if (!info) return kNone;
    place = namespaces_++;
    std::memcpy(bytes_.data() + sizeof(SummaryHeader) + place * sizeof(NamespaceId),
                info->id.data(), sizeof(NamespaceId));
    return place;
  }

  const Context& context_;
  AlignedBytes bytes_;
  std::array<std::uint32_t, shm::kNamespaceCount> places_{};
  std::uint32_t namespaces_ = 0;
  std::uint64_t rows_ = 0;
};

int put_summary(Context& context, const FileHandle& file, std::uint32_t region,
                std::uint32_t capacity, std::span<const std::byte> bytes) {
  const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  const std::int64_t written = context.files.files().write(
      file.get(), std::span(&part, 1), summary_offset(context.header().region_bytes, capacity));
  if (written >= 0) return 0;
  context.tally.failed(context.tally.write_errors, "write the summary of", region,
                       static_cast<int>(written));
  return static_cast<int>(written);
}

int write_summary(Context& context, const FileHandle& file, const RegionInfo& info,
                  std::uint64_t sequence) {
  std::vector<DiskRef> refs;
  context.catalog->entries(info.region, refs);
  SummaryImage image(context, info);
  for (const DiskRef& ref : refs) image.add(ref);
  return put_summary(context, file, info.region, info.capacity, image.finish(info, sequence));
}

int sync_file(Context& context, const FileHandle& file, std::uint32_t region) {
  const int code = context.files.files().sync(file.get());
  if (code < 0) context.tally.failed(context.tally.sync_errors, "sync", region, code);
  return code;
}

}  // namespace

int seal_region(Context& context, std::uint32_t region) {
  Catalog& catalog = *context.catalog;
  const RegionInfo info = catalog.region(region);
  int code = 0;
  const RegionFiles::Handle file = context.files.open(region, code);
  if (!file) context.tally.failed(context.tally.write_errors, "seal", region, code);
  const std::uint64_t sequence = next_sequence(context);
  // The records are safe before anything says that they are there.
  if (code == 0 && !HPKV_BUG("summary_before_sync")) code = sync_file(context, *file, region);
  if (code == 0) code = write_summary(context, *file, info, sequence);
  if (code == 0) code = sync_file(context, *file, region);
  if (code < 0) {
    static_cast<void>(catalog.settle(region, RegionState::sealing, RegionState::open));
    return code;
  }
  catalog.set_sequence(region, sequence);
  static_cast<void>(catalog.settle(region, RegionState::sealing, RegionState::sealed));
  context.tally.regions_sealed.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

int void_summary(Context& context, const FileHandle& file, const RegionHeader& header) {
  return put_summary(context, file, header.region, header.capacity, AlignedBytes(kPage).span());
}

std::optional<Summary> read_summary(Context& context, const RegionHeader& header, int& code) {
  code = 0;
  const RegionFiles::Handle file = context.files.open(header.region, code);
  if (!file) return std::nullopt;
  const AlignedBytes first(kPage);
  iovec part{first.data(), first.size()};
  const std::uint64_t offset = summary_offset(context.header().region_bytes, header.capacity);
  std::int64_t bytes = context.files.files().read(file->get(), std::span(&part, 1), offset);
  const auto& head = first.page<SummaryHeader>(0);
  const bool ours = bytes == static_cast<std::int64_t>(kPage) && page_holds(head) &&
                    head.magic == kSummaryMagic && head.version == kStoreVersion &&
                    head.store == header.store && head.region == header.region &&
                    head.generation == header.generation && head.rows <= header.capacity &&
                    head.namespaces <= kSummaryNamespaces;
  if (!ours) {
    code = bytes < 0 ? static_cast<int>(bytes) : 0;
    return std::nullopt;
  }
  const AlignedBytes body(summary_bytes(header.capacity) - kPage);
  part = {body.data(), body.size()};
  bytes = context.files.files().read(file->get(), std::span(&part, 1), offset + kPage);
  if (bytes != static_cast<std::int64_t>(body.size()) ||
      crc32c(body.span()) != head.body_checksum) {
    code = bytes < 0 ? static_cast<int>(bytes) : 0;
    return std::nullopt;
  }
  Summary summary;
  summary.sequence = head.sequence;
  summary.namespaces.resize(head.namespaces);
  std::memcpy(summary.namespaces.data(), body.data(), head.namespaces * sizeof(NamespaceId));
  summary.rows.resize(head.rows);
  std::memcpy(summary.rows.data(), body.data() + kSummaryNamespaces * sizeof(NamespaceId),
              head.rows * sizeof(SummaryRow));
  std::erase_if(summary.rows, [&](const SummaryRow& row) {
    return row.number >= header.capacity || row.name_space >= head.namespaces;
  });
  return summary;
}

}  // namespace hpkv::disk
