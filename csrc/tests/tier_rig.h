// The disk tier of one process beside its pool. The disk is the real one behind a hook; the
// breaker's clock is the test's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <optional>

#include "disk/store.h"
#include "tests/check.h"
#include "tests/faulty_files.h"
#include "tests/pool_rig.h"

namespace hpkv::test {

using disk::PromoteTicket;
using disk::Store;
using std::chrono::seconds;

inline constexpr std::uint64_t kBlock = 60'000;
inline constexpr std::uint64_t kStride = 60 * 1024;
inline constexpr seconds kLong{60};  // turns a hang into a failure

// A door that calls of the disk can be made to wait at.
class Door {
 public:
  void shut() { set(false); }
  void open() { set(true); }
  void pass() {
    std::unique_lock guard(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(guard, [this] { return open_; });
    --waiting_;
  }
  void await_somebody() {
    std::unique_lock guard(mutex_);
    CHECK(changed_.wait_for(guard, kLong, [this] { return waiting_ > 0; }));
  }

 private:
  void set(bool open) {
    const std::lock_guard guard(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int waiting_ = 0;
};

inline bool is_region(const std::string& path) {
  return path.find("/regions/") != std::string::npos;
}

struct Rig {
  explicit Rig(std::uint64_t pool_bytes = 16 * kMiB, std::uint64_t storage_bytes = 64 * kMiB)
      : pool_options(folder.options(pool_bytes)), storage(storage_bytes) {
    attach();
  }
  ~Rig() { door->open(); }

  // A process: opens the pool and the store.
  struct Side {
    std::shared_ptr<Pool> pool;
    std::unique_ptr<Store> store;
    std::uint32_t index = 0;

    std::shared_ptr<PromoteTicket> promoted(std::span<const Key> keys) {
      auto ticket = store->promote(index, {keys.begin(), keys.end()});
      CHECK(ticket->wait(kLong));
      return ticket;
    }
    // How many came; none is pinned any more. (A reading thread may hold a ticket a little longer
    // than whoever waited for it.)
    std::size_t promote_and_let_go(std::span<const Key> keys) {
      const auto ticket = promoted(keys);
      ticket->release();
      return ticket->count();
    }
  };
  // With threads in the background.
  disk::StoreOptions store_options() {
    disk::StoreOptions options;
    options.directory = folder.path() + "/store";
    options.storage_bytes = storage;
    options.block_bytes = kBlock;
    options.files = files;
    options.clock = [now = now] { return now->load(); };
    options.takeover_wait_ns = 0;
    options.recover_wait_ns = 50 * kMillisecond;
    return options;
  }
  Side side(std::optional<std::uint32_t> min_uses = 0) {
    Side out;
    out.pool = Pool::open(pool_options);
    disk::StoreOptions options = store_options();
    options.background = false;
    options.min_uses = min_uses;
    out.store = Store::open(out.pool, options);
    out.store->recover();
    out.index = out.pool->add_namespace(identity(1), {}, kBlock);
    return out;
  }
  void attach(std::optional<std::uint32_t> min_uses = 0) {
    leave();
    own = side(min_uses);
  }
  // Not before its threads are gone: one that is late would keep the store's lock.
  void leave() {
    if (own.store) static_cast<void>(own.store->close(kLong));
    own.store.reset();
    own.pool.reset();
  }

  // Nobody is left, and host memory is empty.
  void reboot() {
    leave();
    std::filesystem::remove(folder.path() + "/pool/pool.hpkv");
  }

  void store_in_pool(std::span<const Key> keys) {
    for (const Key& key : keys) {
      CHECK(despite_timeouts(
          *own.pool, [&] { return put_one(*own.pool, own.index, key) == PutStatus::stored; }));
    }
  }
  // Blocks that are on disk and nowhere else.
  std::vector<Key> on_disk_only(std::size_t count, std::uint64_t seed = 1) {
    auto keys = random_keys(count, seed);
    store_in_pool(keys);
    CHECK(own.store->demote(own.index, keys) == count);
    CHECK(own.pool->clear() == count);
    return keys;
  }
  void pass(std::int64_t ns) { now->fetch_add(ns); }
  // Calls of this kind on region files wait at the door.
  void hang(FileCall hanging) {
    door->shut();
    files->set_hook([hanging, door = door](FileCall call, const std::string& path) {
      if (call == hanging && is_region(path)) door->pass();
      return 0;
    });
  }

  Folder folder;
  PoolOptions pool_options;
  std::uint64_t storage;
  std::shared_ptr<FaultyFiles> files = std::make_shared<FaultyFiles>(disk::system_files());
  std::shared_ptr<std::atomic<std::int64_t>> now =
      std::make_shared<std::atomic<std::int64_t>>(1000 * kSecond);
  std::shared_ptr<Door> door = std::make_shared<Door>();
  Side own;
};

inline std::vector<std::string> notices(Store& store) {
  std::vector<std::string> lines;
  for (;;) {
    const auto line = store.wait_notice(std::chrono::nanoseconds(0));
    if (!line || line->empty()) return lines;
    if (line->find("direct I/O") == std::string::npos) lines.push_back(*line);
  }
}

}  // namespace hpkv::test
