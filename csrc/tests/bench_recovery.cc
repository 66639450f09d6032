// How long a store takes to come back: prints blocks, seconds with summaries, and seconds after
// every summary was wiped. Asserts nothing about time.
//   bench_recovery DIRECTORY [blocks [block bytes [threads]]]
// The payloads are holes: recovery does not read them.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "tests/store_rig.h"

namespace hpkv::test {
namespace {

// Keeps headers and summaries, drops payloads: the file stays as long as it is.
class SparseFiles final : public disk::Files {
 public:
  explicit SparseFiles(std::shared_ptr<disk::Files> below) : below_(std::move(below)) {}

  std::int64_t write(int handle, std::span<const iovec> parts,
                     std::uint64_t offset) noexcept override {
    std::int64_t moved = 0;
    bool payload = false;  // records are written as header, payload, header, payload
    for (const iovec& part : parts) {
      const bool keep = parts.size() == 1 || !payload;
      if (keep && below_->write(handle, std::span(&part, 1), offset) < 0) return -EIO;
      payload = !payload;
      offset += part.iov_len;
      moved += static_cast<std::int64_t>(part.iov_len);
    }
    return moved;
  }
  int reserve(int handle, std::uint64_t bytes) noexcept override {
    return below_->truncate(handle, bytes);
  }
  int space(const std::string&, disk::FileSystemSpace& out) noexcept override {
    out = {std::uint64_t{1} << 40U, std::uint64_t{1} << 40U};
    return 0;
  }
  int sync(int) noexcept override { return 0; }

  int open(const std::string& path, disk::OpenMode mode) noexcept override {
    return below_->open(path, mode);
  }
  void close(int handle) noexcept override { below_->close(handle); }
  std::int64_t read(int handle, std::span<const iovec> parts,
                    std::uint64_t offset) noexcept override {
    return below_->read(handle, parts, offset);
  }
  void expect(int handle, std::uint64_t offset, std::uint64_t bytes) noexcept override {
    below_->expect(handle, offset, bytes);
  }
  void forget(int handle) noexcept override { below_->forget(handle); }
  int truncate(int handle, std::uint64_t bytes) noexcept override {
    return below_->truncate(handle, bytes);
  }
  int status(int handle, disk::FileStatus& out) noexcept override {
    return below_->status(handle, out);
  }
  int lock(int handle, disk::FileLock kind, std::uint64_t byte) noexcept override {
    return below_->lock(handle, kind, byte);
  }
  int status_of(const std::string& path, disk::FileStatus& out) noexcept override {
    return below_->status_of(path, out);
  }
  int rename(const std::string& from, const std::string& to) noexcept override {
    return below_->rename(from, to);
  }
  int unlink(const std::string& path) noexcept override { return below_->unlink(path); }
  int make_directory(const std::string& path) noexcept override {
    return below_->make_directory(path);
  }
  int sync_directory(const std::string&) noexcept override { return 0; }
  int list(const std::string& path, std::vector<std::string>& names) noexcept override {
    return below_->list(path, names);
  }

 private:
  std::shared_ptr<disk::Files> below_;
};

double seconds_to_recover(const Folder& folder, StorePlace place, const char* pool, int threads,
                          std::size_t& found) {
  PoolOptions options = other_pool(folder, pool);
  options.pool_bytes = 256 * kMiB;
  place.bytes.reset();
  const auto begin = std::chrono::steady_clock::now();
  StoreSide side(options, place);
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) workers.emplace_back([&] { side.recover_all(); });
  for (std::thread& worker : workers) worker.join();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  found = side.catalog->stats().entries;
  return taken.count();
}

void wipe_summaries(const std::string& directory, std::uint64_t region_bytes,
                    std::uint32_t capacity) {
  const std::vector<char> zeroes(4096);
  for (const auto& entry : std::filesystem::directory_iterator(directory + "/regions")) {
    overwrite(entry.path(), disk::summary_offset(region_bytes, capacity), zeroes);
  }
}

void measure(const std::string& directory, std::uint64_t blocks, std::uint64_t block_bytes,
             int threads) {
  const Folder folder;
  StorePlace place{.directory = directory + "/store",
                   .files = std::make_shared<SparseFiles>(disk::system_files()),
                   .bytes = blocks * (block_bytes + 4096) * 5 / 4 + 64 * kMiB,
                   .block_bytes = block_bytes};
  std::uint64_t region_bytes = 0;
  std::uint32_t capacity = 0;
  {
    PoolOptions options = folder.options(256 * kMiB);
    StoreSide side(options, place);
    region_bytes = side.store->info().region_bytes;
    capacity = side.records_per_region();
    for (std::uint64_t at = 0; at < blocks; at += 500) {
      const auto keys = random_keys(std::min<std::uint64_t>(500, blocks - at), at + 1);
      std::vector<BlockRef> refs(keys.size());
      for (std::size_t i = 0; i < keys.size(); ++i) {
        CHECK(side.pool->reserve(side.index, keys[i], refs[i]) == ReserveStatus::ok);
        side.pool->publish(refs[i], 0);
      }
      CHECK(side.pool->pin(keys, refs) == keys.size());
      CHECK(side.store->append(side.index, refs, keys).written == keys.size());
      side.pool->unpin(refs);
    }
  }
  std::size_t found = 0;
  const double with = seconds_to_recover(folder, place, "second", threads, found);
  CHECK(found == blocks);
  wipe_summaries(place.directory, region_bytes, capacity);
  const double without = seconds_to_recover(folder, place, "third", threads, found);
  CHECK(found == blocks);
  std::printf("%.4f %.4f\n", with, without);
}

}  // namespace
}  // namespace hpkv::test

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "bench_recovery DIRECTORY [blocks [block bytes [threads]]]\n");
    return 2;
  }
  const auto number = [&](int i, std::uint64_t otherwise) {
    return argc > i ? std::strtoull(argv[i], nullptr, 10) : otherwise;
  };
  try {
    hpkv::test::measure(argv[1], number(2, 100'000), number(3, 65'536),
                        static_cast<int>(number(4, 2)));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_recovery: %s\n", error.what());
    return 1;
  }
  return 0;
}
