// Several processes write, read, evict and tend one store while they are killed at any moment, with
// nothing left to tidy up: the pool stays sound, every block in the index is served with the right
// bytes, the store stays within its size, and another pool finds the files as it should.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <ctime>
#include <memory>
#include <new>
#include <random>

#include "tests/store_rig.h"

namespace hpkv::test {

using disk::RegionState;

constexpr std::size_t kKeys = 400;
constexpr std::size_t kProcesses = 3;

PoolOptions pool_of(const Folder& folder) {
  PoolOptions options = folder.options();
  options.quarantine_ns = kMillisecond;
  return options;
}

// A lock of the pool whose holder is off the cores for longer than a start waits is no finding.
std::unique_ptr<StoreSide> opened(const Folder& folder) {
  for (;;) {
    try {
      return std::make_unique<StoreSide>(pool_of(folder), place_in(folder));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::system) throw;
    }
  }
}

// What a process does until it is killed. Exits only when something is wrong.
[[noreturn]] void work(const Folder& folder, std::uint64_t seed,
                       std::atomic<std::uint64_t>& written) {
  try {
    std::mt19937_64 random(seed);
    const auto keys = random_keys(kKeys);
    const std::unique_ptr<StoreSide> made = opened(folder);
    StoreSide& side = *made;
    for (;;) {
      const std::size_t at = random() % (kKeys - 4);
      const auto some = std::span(keys).subspan(at, 1 + random() % 4);
      switch (random() % 8) {
        case 0:
          side.pool->maintain();
          break;
        case 1:
          static_cast<void>(side.store->tend());
          break;
        case 2:
          static_cast<void>(side.store->recover_one());
          break;
        case 3:
          static_cast<void>(side.store->sync_aged(true));
          break;
        case 4:
          for (const Key& key : some) static_cast<void>(side.serves(key));
          if (side.store->counters().bad_blocks != 0) ::_exit(3);
          break;
        default: {
          std::vector<BlockRef> refs(some.size());
          for (const Key& key : some) static_cast<void>(put_one(*side.pool, side.index, key));
          const std::size_t pinned = side.pool->pin(some, refs);
          refs.resize(pinned);
          written += side.store->append(side.index, refs, some.first(pinned)).written;
          side.pool->unpin(refs);
        }
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "        in a process: %s\n", error.what());
    ::_exit(2);
  }
}

// One for this process and those that it forks.
std::atomic<std::uint64_t>& shared_counter() {
  void* const memory = ::mmap(nullptr, sizeof(std::atomic<std::uint64_t>), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  return *new (memory) std::atomic<std::uint64_t>{0};
}

pid_t start(const Folder& folder, std::uint64_t seed, std::atomic<std::uint64_t>& written) {
  const pid_t child = ::fork();
  if (child == 0) work(folder, seed, written);
  CHECK(child > 0);
  return child;
}

void require_killed(pid_t child) {
  int status = 0;
  CHECK(::kill(child, SIGKILL) == 0 && ::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST(processes_killed_at_any_moment_leave_a_sound_pool_and_a_store_that_serves) {
  const Folder folder;
  const auto seed = std::random_device{}();
  std::printf("        seed %u\n", seed);
  std::mt19937_64 random(seed);
  {
    const StoreSide made(pool_of(folder), place_in(folder));
  }  // there is something to look at
  auto& written = shared_counter();
  std::vector<pid_t> children;
  for (std::size_t i = 0; i < kProcesses; ++i) children.push_back(start(folder, random(), written));
  for (long kill = 0; kill < 60 || written < 500; ++kill) {
    CHECK(kill < 600);
    // The moment is meant to be any; on a busy machine, later ones too.
    const timespec pause{0, static_cast<long>(random() % 20'000'000) * (1 + kill / 60)};
    ::nanosleep(&pause, nullptr);
    pid_t& child = children[random() % kProcesses];
    require_killed(child);
    child = start(folder, random(), written);
    CHECK(bytes_in(place_in(folder).directory) <= kStoreBytes);
  }
  for (const pid_t child : children) require_killed(child);
  // Theirs, and some that nobody has: what is on disk already may go for those that are not.
  const auto keys = random_keys(kKeys + 8);
  const auto fresh = std::span(keys).last(8);
  std::size_t on_disk = 0;
  {
    StoreSide side(pool_of(folder), place_in(folder));
    CHECK(!side.store->info().took_over);  // the pool outlived them all
    for (int i = 0; i < 3; ++i) {
      side.pool->maintain();
      const timespec quarantine{0, 2 * kMillisecond};
      ::nanosleep(&quarantine, nullptr);
    }
    require_sound(*side.pool);
    side.recover_all();
    for (const Key& key : keys) {
      if (!side.on_disk(key)) continue;
      ++on_disk;
      CHECK(side.serves(key));
    }
    CHECK(side.regions_in(RegionState::recovering) == 0);
    CHECK(side.regions_in(RegionState::sealing) == 0);
    CHECK(side.store->tend() == 0);
    CHECK(side.append(fresh).written == 8);
    CHECK(side.count_served(fresh) == 8);
    on_disk = side.catalog->stats().entries;
  }
  CHECK(on_disk > 40);
  StoreSide other(other_pool(folder, "second"), place_in(folder));
  other.recover_all();
  std::size_t served = other.count_served(keys);
  std::printf("        %zu blocks, %zu after a reboot\n", on_disk, served);
  CHECK(served >= on_disk);
  CHECK(other.store->counters().bad_blocks == 0);
  require_sound(*other.pool);
}

}  // namespace hpkv::test

TEST_MAIN
