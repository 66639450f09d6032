#include "disk/record_io.h"

#include <cstring>
#include <vector>

#include "disk/aligned.h"

namespace hpkv::disk {

void fill_header(RecordHeader& header, const RecordIdentity& identity) noexcept {
  header = RecordHeader{};
  header.store = identity.store;
  header.region = identity.region;
  header.generation = identity.generation;
  header.number = identity.number;
  header.payload_bytes = identity.payload_bytes;
  identity.key.to_bytes(header.key);
  header.name_space = identity.name_space;
  header.payload_checksum = identity.payload_checksum;
  seal_page(header);
}

bool header_says(const RecordHeader& header, const RecordIdentity& identity) noexcept {
  return header.magic == kRecordMagic && header.version == kStoreVersion &&
         header.store == identity.store && header.region == identity.region &&
         header.generation == identity.generation && header.number == identity.number &&
         header.payload_bytes == identity.payload_bytes &&
         header.payload_checksum == identity.payload_checksum &&
         Key::from_bytes(header.key) == identity.key && header.name_space == identity.name_space &&
         page_holds(header);
}

std::size_t neighbours(std::span<const DiskRef> refs, bool& descending) noexcept {
  descending = false;
  const std::uint64_t each = record_bytes(round_up_page(refs[0].payload_bytes));
  const std::size_t most = std::min<std::size_t>(
      {refs.size(), kTransferRecords, std::max<std::size_t>(kTransferBytes / each, 1)});
  std::size_t count = 1;
  while (count < most) {
    const DiskRef& last = refs[count - 1];
    const DiskRef& next = refs[count];
    if (next.region != last.region || next.file_generation != last.file_generation ||
        next.payload_bytes != last.payload_bytes) {
      break;
    }
    const bool up = next.number == last.number + 1;
    const bool down = last.number == next.number + 1;
    if (count == 1) descending = down;
    if (descending ? !down : !up) break;
    ++count;
  }
  return count;
}

std::int64_t read_records(Files& files, const FileHandle& file, std::span<const DiskRef> refs,
                          std::span<std::byte* const> targets, std::span<RecordHeader> headers) {
  const std::uint64_t stride = round_up_page(refs[0].payload_bytes);
  const bool descending = refs.size() > 1 && refs[1].number < refs[0].number;
  std::vector<iovec> parts;
  parts.reserve(2 * refs.size());
  for (std::size_t i = 0; i < refs.size(); ++i) {
    const std::size_t at = descending ? refs.size() - 1 - i : i;
    headers[at].magic = {};  // so that a read that ends early leaves nothing that counts
    parts.push_back({&headers[at], sizeof(RecordHeader)});
    parts.push_back({targets[at], stride});
  }
  const std::uint32_t first = descending ? refs.back().number : refs.front().number;
  return files.read(file.get(), parts, record_offset(stride, first));
}

std::int64_t write_records(Files& files, const FileHandle& file, std::uint32_t first,
                           std::span<const WritePart> records) {
  const std::uint64_t payload_bytes = records[0].header->payload_bytes;
  const std::uint64_t stride = round_up_page(payload_bytes);
  const std::uint64_t whole = payload_bytes / kPage * kPage;
  const std::uint64_t rest = payload_bytes - whole;
  // The last, partial page of each payload goes through a copy: what lies behind a payload in the
  // pool is nobody's, and not to be written down.
  const AlignedBytes tails(rest == 0 ? kPage : records.size() * kPage);
  std::vector<iovec> parts;
  parts.reserve(3 * records.size());
  for (std::size_t i = 0; i < records.size(); ++i) {
    parts.push_back({const_cast<RecordHeader*>(records[i].header), sizeof(RecordHeader)});
    if (whole != 0) parts.push_back({const_cast<std::byte*>(records[i].payload), whole});
    if (rest == 0) continue;
    std::byte* tail = tails.data() + i * kPage;
    std::memcpy(tail, records[i].payload + whole, rest);
    parts.push_back({tail, kPage});
  }
  return files.write(file.get(), parts, record_offset(stride, first));
}

}  // namespace hpkv::disk
