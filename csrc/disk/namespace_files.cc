#include "disk/namespace_files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/crc32c.h"
#include "disk/hex.h"
#include "disk/small_file.h"

namespace hpkv::disk {
namespace {

// A msgpack map of four, always in this order:
//   "format": 1, "block_bytes": uint64, "descriptor": bin (msgpack itself), "crc32c": uint32
// The checksum covers everything before its value.
constexpr std::string_view kBegin(
    "\x84\xa6"
    "format\x01\xab"
    "block_bytes\xcf",
    22);
constexpr std::string_view kDescriptor(
    "\xaa"
    "descriptor\xc5",
    12);
constexpr std::string_view kChecksum(
    "\xa6"
    "crc32c\xce",
    8);
constexpr std::uint64_t kFileBytesMax = 8192;

constexpr const char* kExtension = ".msgpack";

std::string file_name(const NamespaceId& id) { return hex(id) + kExtension; }

void append_number(std::string& out, std::uint64_t value, unsigned bytes) {
  for (unsigned i = bytes; i-- > 0;) out.push_back(static_cast<char>(value >> (8 * i)));
}

std::string encode(const NamespaceInfo& info) {
  std::string out(kBegin);
  append_number(out, info.block_bytes, 8);
  out += kDescriptor;
  append_number(out, info.descriptor.size(), 2);
  out += info.descriptor;
  out += kChecksum;
  append_number(out, crc32c(std::as_bytes(std::span(out))), 4);
  return out;
}

// Reads what encode() writes, and nothing else.
class Reader {
 public:
  explicit Reader(std::string_view rest) : rest_(rest) {}
  [[nodiscard]] std::string_view take(std::size_t bytes) {
    if (bytes > rest_.size()) failed_ = true;
    const std::string_view part = rest_.substr(0, bytes);
    rest_.remove_prefix(part.size());
    return part;
  }
  void expect(std::string_view text) { failed_ = failed_ || take(text.size()) != text; }
  [[nodiscard]] std::uint64_t number(unsigned bytes) {
    std::uint64_t value = 0;
    for (const char c : take(bytes)) value = value << 8U | static_cast<unsigned char>(c);
    return value;
  }
  [[nodiscard]] bool sound() const { return !failed_ && rest_.empty(); }
  [[nodiscard]] std::size_t left() const { return rest_.size(); }

 private:
  std::string_view rest_;
  bool failed_ = false;
};

}  // namespace

int NamespaceFiles::exists(const NamespaceId& id) const {
  FileStatus status;
  return files_->status_of(directory_ + "/" + file_name(id), status);
}

int NamespaceFiles::write(const NamespaceInfo& info) const {
  const std::string text = encode(info);
  return replace_file(files_, directory_, file_name(info.id), std::as_bytes(std::span(text)));
}

void NamespaceFiles::prune(const std::function<std::vector<NamespaceId>()>& kept) const {
  std::vector<std::string> names;
  if (files_->list(directory_, names) < 0) return;
  const std::vector<NamespaceId> ids = kept();
  for (const std::string& name : names) {
    const bool keep = std::any_of(ids.begin(), ids.end(),
                                  [&](const NamespaceId& id) { return name == file_name(id); });
    // What is being written has another name until it is complete.
    if (!keep && name.ends_with(kExtension)) {
      static_cast<void>(files_->unlink(directory_ + "/" + name));
    }
  }
}

std::optional<NamespaceInfo> NamespaceFiles::load(const NamespaceId& id, int& code) const {
  std::vector<std::byte> bytes;
  code = read_file(files_, directory_ + "/" + file_name(id), kFileBytesMax, bytes);
  if (code == -ENOENT || code == -ELOOP) code = 0;  // a link is no descriptor of ours
  if (code < 0) return std::nullopt;
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  Reader reader(text);
  NamespaceInfo info;
  info.id = id;
  reader.expect(kBegin);
  info.block_bytes = reader.number(8);
  reader.expect(kDescriptor);
  info.descriptor = reader.take(reader.number(2));
  reader.expect(kChecksum);
  const std::size_t covered = text.size() - reader.left();
  const std::uint64_t checksum = reader.number(4);
  if (!reader.sound() || checksum != crc32c(std::span(bytes).first(covered))) return std::nullopt;
  return info;
}

int NamespaceFiles::remove(const NamespaceId& id) const {
  const int code = files_->unlink(directory_ + "/" + file_name(id));
  if (code < 0) return code == -ENOENT ? 0 : code;
  return files_->sync_directory(directory_);
}

}  // namespace hpkv::disk
