// Stores in fresh folders: a pool, its catalog and a region store, and blocks that are moved from
// the one to the other and back.
#pragma once

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "base/crc32c.h"
#include "disk/aligned.h"
#include "disk/format.h"
#include "disk/region_store.h"
#include "tests/faulty_files.h"
#include "tests/pool_rig.h"

namespace hpkv::test {

inline constexpr std::uint64_t kStoreBlock = 20'000;  // five pages, the last one partly filled
inline constexpr std::uint64_t kStoreBytes = 4 * kMiB;

struct StorePlace {
  std::string directory;
  std::shared_ptr<disk::Files> files = disk::system_files();
  std::optional<std::uint64_t> bytes = kStoreBytes;
  std::uint64_t block_bytes = kStoreBlock;
  std::function<std::int64_t()> clock = &now_ns;
};

inline disk::RegionStoreOptions region_options(const StorePlace& place) {
  disk::RegionStoreOptions options;
  options.directory = place.directory;
  options.storage_bytes = place.bytes;
  options.block_bytes_hint = place.block_bytes;
  options.takeover_wait_ns = 0;
  options.clock = place.clock;
  return options;
}

// The store of a folder, beside its pool.
inline StorePlace place_in(const Folder& folder) { return {.directory = folder.path() + "/store"}; }

inline PoolOptions other_pool(const Folder& folder, const std::string& name) {
  PoolOptions options = folder.options();
  options.directory = folder.path() + "/" + name;
  return options;
}

// What a directory takes, holes counted as if they were filled.
inline std::uint64_t bytes_in(const std::string& directory) {
  std::uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    struct stat status{};
    if (::lstat(entry.path().c_str(), &status) == 0) {
      bytes += std::max<std::uint64_t>(static_cast<std::uint64_t>(status.st_blocks) * 512,
                                       static_cast<std::uint64_t>(status.st_size));
    }
  }
  return bytes;
}

// One process's side of a store.
struct StoreSide {
  StoreSide(const PoolOptions& pool_options, const StorePlace& place, int name = 1)
      : block_bytes(place.block_bytes),
        pool(Pool::open(pool_options)),
        catalog(std::make_shared<disk::Catalog>(pool)) {
    store = disk::RegionStore::open(pool, catalog, region_options(place), place.files);
    index = pool->add_namespace(identity(name), {}, place.block_bytes);
  }

  // Puts the blocks into the pool and from there into the store.
  disk::AppendResult append(std::span<const Key> keys) {
    std::vector<BlockRef> refs(keys.size());
    const auto put_and_pinned = [&] {
      for (const Key& key : keys) static_cast<void>(put_one(*pool, index, key));
      const std::size_t pinned = pool->pin(keys, refs);
      if (pinned < keys.size()) pool->unpin(std::span(refs).first(pinned));
      return pinned == keys.size();
    };
    CHECK(despite_timeouts(*pool, put_and_pinned));
    const disk::AppendResult result = store->append(index, refs, keys);
    pool->unpin(refs);
    return result;
  }
  disk::AppendResult append_one(const Key& key) { return append(std::span(&key, 1)); }

  [[nodiscard]] bool on_disk(const Key& key) const {
    disk::DiskRef ref;
    return catalog->find(key, ref);
  }
  // Reads what the index has of these keys, in this order, and compares every byte of the good
  // ones.
  std::vector<disk::ReadOutcome> read(std::span<const Key> keys) {
    std::vector<disk::DiskRef> refs(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) CHECK(catalog->find(keys[i], refs[i]));
    return read_found(keys, refs);
  }
  std::vector<disk::ReadOutcome> read_found(std::span<const Key> keys,
                                            std::span<const disk::DiskRef> refs) {
    const std::uint64_t stride = disk::round_up_page(block_bytes);
    const disk::AlignedBytes buffer(std::max<std::uint64_t>(keys.size() * stride, 4096));
    std::vector<std::byte*> targets(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) targets[i] = buffer.data() + i * stride;
    std::vector<disk::ReadOutcome> outcomes(keys.size());
    store->read(refs, targets, outcomes);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (outcomes[i] != disk::ReadOutcome::ok) continue;
      const auto expected = payload_of(keys[i], block_bytes);
      CHECK(std::equal(expected.begin(), expected.end(), targets[i]));
    }
    return outcomes;
  }
  // On disk with the right bytes. A block that is not in the index, or turns out bad, is a miss; so
  // is one that another process evicts between the look and the read.
  bool serves(const Key& key) {
    disk::DiskRef ref;
    return catalog->find(key, ref) &&
           read_found(std::span(&key, 1), std::span(&ref, 1))[0] == disk::ReadOutcome::ok;
  }
  std::size_t count_served(std::span<const Key> keys) {
    std::size_t count = 0;
    for (const Key& key : keys) count += serves(key) ? 1 : 0;
    return count;
  }
  void recover_all() {
    while (store->recover_one()) {
    }
  }
  [[nodiscard]] std::uint32_t regions_in(disk::RegionState state) const {
    std::uint32_t count = 0;
    for (std::uint32_t i = 0; i < catalog->region_count(); ++i) {
      count += catalog->region(i).state == state ? 1 : 0;
    }
    return count;
  }
  [[nodiscard]] std::uint32_t records_per_region() const {
    return disk::region_capacity(store->info().region_bytes, disk::round_up_page(block_bytes));
  }

  std::uint64_t block_bytes;
  std::shared_ptr<Pool> pool;
  std::shared_ptr<disk::Catalog> catalog;
  std::shared_ptr<disk::RegionStore> store;
  std::uint32_t index = 0;
};

inline std::string region_file(const Folder& folder, int region) {
  return place_in(folder).directory + "/regions/0000" + std::to_string(region) + ".hpkv";
}

// A store with `count` blocks, left by its pool; the keys in the order of their records.
inline std::vector<Key> left_behind(const Folder& folder, std::size_t count) {
  StoreSide side(folder.options(), place_in(folder));
  auto keys = random_keys(count);
  CHECK(side.append(keys).written == count);
  return keys;
}

// Writes over bytes of a file, behind the store's back.
inline void overwrite(const std::string& path, std::uint64_t offset, std::span<const char> bytes) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(offset));
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  CHECK(file.good());
}
// Turns one byte of a file into another.
inline void flip(const std::string& path, std::uint64_t offset) {
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const char byte = static_cast<char>(~file.get());
  CHECK(file.good());
  overwrite(path, offset, std::span(&byte, 1));
}

}  // namespace hpkv::test
