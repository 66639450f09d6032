#include "disk/small_file.h"

#include <random>

namespace hpkv::disk {

int read_file(const std::shared_ptr<Files>& files, const std::string& path, std::uint64_t bytes_max,
              std::vector<std::byte>& out) {
  out.clear();
  const FileHandle file(files, files->open(path, {}));
  if (!file.valid()) return file.get();
  out.resize(bytes_max);
  const iovec part{out.data(), out.size()};
  const std::int64_t bytes = files->read(file.get(), std::span(&part, 1), 0);
  out.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  return bytes < 0 ? static_cast<int>(bytes) : 0;
}

int replace_file(const std::shared_ptr<Files>& files, const std::string& directory,
                 const std::string& name, std::span<const std::byte> bytes) {
  const std::string path = directory + "/" + name;
  const std::string temporary = path + kTemporarySuffix + std::to_string(std::random_device{}());
  {
    const FileHandle file(files,
                          files->open(temporary, {.write = true, .create = true, .fresh = true}));
    if (!file.valid()) return file.get();
    const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    const std::int64_t written = files->write(file.get(), std::span(&part, 1), 0);
    int code = written < 0 ? static_cast<int>(written) : files->sync(file.get());
    if (code < 0) {
      static_cast<void>(files->unlink(temporary));
      return code;
    }
  }
  const int code = files->rename(temporary, path);
  return code < 0 ? code : files->sync_directory(directory);
}

}  // namespace hpkv::disk
