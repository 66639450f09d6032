// The disk tier of one process over a long time: a disk that is full for a while, recovery that
// cannot end, a keeper with much to do, and leaving.
#include <thread>

#include "disk/namespace_files.h"
#include "tests/tier_rig.h"

namespace hpkv::test {

TEST(a_full_disk_is_said_and_counted_once_and_used_again_when_it_has_room) {
  Rig rig;
  const auto keys = random_keys(10);
  rig.store_in_pool(keys);
  rig.files->set_available(1 * kMiB);
  CHECK(rig.own.store->demote(rig.own.index, keys) == 0);
  CHECK(rig.own.store->demote(rig.own.index, keys) == 0);
  auto lines = notices(*rig.own.store);
  CHECK(lines.size() == 1 && lines[0].find("disk tier: writing finds no space") == 0);
  CHECK(rig.own.pool->stats().disk_errors == 1);
  CHECK(!rig.own.store->stats().writing_rests);
  rig.files->set_available(1024 * kMiB);
  CHECK(rig.own.store->demote(rig.own.index, keys) == 10);
  lines = notices(*rig.own.store);
  CHECK(lines.size() == 1 && lines[0].find("finds space again") != std::string::npos);
  CHECK(rig.own.pool->stats().disk_errors == 1);
  require_sound(*rig.own.pool);
}

// A pool that is full of blocks that nobody loaded back.
void fill_pool(Rig& rig, std::uint64_t seed) {
  const std::uint64_t before = rig.own.pool->stats().evictions;
  while (rig.own.pool->stats().evictions == before) rig.store_in_pool(random_keys(1, seed++));
}

TEST(what_could_not_be_written_costs_no_credit) {
  Rig rig;
  rig.attach(std::nullopt);
  fill_pool(rig, 100);
  rig.files->set_available(1 * kMiB);
  // Each would cost an eighth of the credit.
  for (int i = 0; i < 20; ++i) CHECK(rig.own.store->demote_round());
  CHECK(rig.own.store->stats().demoted_blocks == 0);
  rig.files->set_available(1024 * kMiB);
  while (rig.own.store->demote_round()) {
  }
  CHECK(rig.own.store->stats().demoted_blocks > 100);
}

TEST(what_was_written_is_paid_for_until_the_credit_is_used_up) {
  Rig rig(16 * kMiB, 16 * kMiB);
  rig.attach(std::nullopt);
  for (std::uint64_t i = 1; i <= 8; ++i) {
    fill_pool(rig, 10'000 * i);
    for (int more = 0; more < 100 && rig.own.store->demote_round(); ++more) {
    }
    CHECK(rig.own.pool->clear() > 0);
  }
  const std::uint64_t written = rig.own.store->stats().demoted_blocks * kStride;
  CHECK(written >= 16 * kMiB - kStride && written <= 24 * kMiB);
}

// ---- recovery ----

TEST(recovery_waits_for_nobody_who_gets_no_further_and_a_verification_says_what_is_missing) {
  Rig rig;
  const auto keys = rig.on_disk_only(3);
  const auto all_verified = [&] {
    const auto report = rig.own.store->verify({}, false);
    CHECK(report.blocks == 3 && report.bad == 0);
    return report.complete;
  };
  CHECK(all_verified());
  const std::shared_ptr<Pool> stopped = Pool::open(rig.pool_options);
  disk::Catalog theirs(stopped);
  const std::uint32_t last = theirs.region_count() - 1;
  CHECK(theirs.claim(last, disk::RegionState::free, disk::RegionState::recovering));
  rig.own.store->recover();
  CHECK(theirs.region(last).state == disk::RegionState::recovering && !all_verified());
  // What cannot be read now is not waited for either.
  rig.files->fail(FileCall::open, EIO, "/regions/");
  CHECK(theirs.settle(last, disk::RegionState::recovering, disk::RegionState::unknown));
  rig.own.store->recover();
  rig.files->set_hook({});
  CHECK(theirs.region(last).state == disk::RegionState::unknown && !all_verified());
}

TEST(the_keeper_keeps_the_store_while_it_recovers) {
  Rig rig;
  rig.own.store.reset();
  const std::shared_ptr<Pool> pool = std::move(rig.own.pool);
  disk::Catalog catalog(pool);
  CHECK(catalog.forget_all());
  const std::uint32_t count = catalog.region_count();
  std::atomic<bool> kept_meanwhile{false};
  rig.files->set_hook([&](FileCall call, const std::string& path) {
    const std::uint32_t unknown = catalog.stats().regions_unknown;
    if (call == FileCall::space && unknown > 0 && unknown < count) kept_meanwhile = true;
    // Each region takes its time, all of them a few rounds of the keeper.
    if (call == FileCall::open && is_region(path)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2500 / count));
    }
    return 0;
  });
  const auto store = Store::open(pool, rig.store_options());
  while (catalog.stats().regions_unknown > 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(kept_meanwhile);
  CHECK(store->close(kLong));
  rig.files->set_hook({});
}

TEST(regions_that_are_somebody_elses_for_a_while_are_said_and_found_afterwards) {
  Rig rig;
  const auto keys = rig.on_disk_only(10);
  CHECK(rig.own.store->sync() == 0);
  rig.reboot();
  rig.files->fail(FileCall::open, EACCES, "/regions/");
  rig.own.pool = Pool::open(rig.pool_options);
  rig.own.index = rig.own.pool->add_namespace(identity(1), {}, kBlock);
  rig.own.store = Store::open(rig.own.pool, rig.store_options());
  const auto said = rig.own.store->wait_notice(kLong);
  CHECK(said && said->find("what the store holds failed (recover region") != std::string::npos);
  CHECK(said && said->find("Permission denied") != std::string::npos);
  CHECK(rig.own.pool->stats().disk_errors > 0 && rig.own.promoted(keys)->count() == 0);
  rig.files->set_hook({});
  // Regions after the first one may fail after the clock was set, and rest anew from there. A call
  // that was under way meanwhile may be taken for one that hangs.
  std::string lines;
  const auto give_up = std::chrono::steady_clock::now() + kLong;
  while (lines.find("what the store holds works again") == std::string::npos) {
    CHECK(std::chrono::steady_clock::now() < give_up);
    rig.pass(31 * kSecond);
    const auto line = rig.own.store->wait_notice(std::chrono::milliseconds(100));
    CHECK(line.has_value());
    lines += *line;
  }
  CHECK(rig.own.promoted(keys)->count() == 10);
  CHECK(rig.own.store->close(kLong));
  require_sound(*rig.own.pool);
}

TEST(a_keeper_that_hangs_is_said_and_counted_once_and_holds_nobody) {
  Rig rig;
  const auto keys = rig.on_disk_only(10);
  rig.own.store.reset();
  rig.door->shut();
  rig.files->set_hook([door = rig.door](FileCall call, const std::string&) {
    if (call == FileCall::space) door->pass();
    return 0;
  });
  rig.own.store = Store::open(rig.own.pool, rig.store_options());
  rig.door->await_somebody();
  rig.pass(9 * kSecond);  // a long sync is no hang
  CHECK(notices(*rig.own.store).empty());
  rig.pass(2 * kSecond);
  const auto lines = notices(*rig.own.store);
  CHECK(lines.size() == 1 &&
        lines[0].find("keeping the store in order hangs") != std::string::npos);
  CHECK(rig.own.pool->stats().disk_errors == 1);
  CHECK(rig.own.promoted(keys)->count() == 10);
  rig.door->open();
  const auto line = rig.own.store->wait_notice(kLong);
  CHECK(line && line->find("no longer hangs") != std::string::npos);
  CHECK(rig.own.store->close(kLong));
}

TEST(a_thread_that_meets_an_exception_says_so_and_goes_on) {
  Rig rig;
  const auto keys = rig.on_disk_only(10);
  rig.own.store.reset();
  disk::StoreOptions options = rig.store_options();
  options.background = false;
  // Files never throw; the clock is asked right after a read that failed.
  const auto throws = std::make_shared<std::atomic<bool>>(false);
  options.clock = [throws, now = rig.now]() -> std::int64_t {
    if (throws->exchange(false)) throw std::bad_alloc();
    return now->load();
  };
  rig.own.store = Store::open(rig.own.pool, options);
  rig.files->set_hook([throws](FileCall call, const std::string& path) {
    const bool block = call == FileCall::read && is_region(path);
    if (block) throws->store(true);
    return block ? -EIO : 0;
  });
  for (int i = 0; i < 4; ++i) CHECK(rig.own.promoted(keys)->count() == 0);  // twice the threads
  rig.files->set_hook({});
  CHECK(rig.own.promoted(keys)->count() == 10);
  const auto lines = notices(*rig.own.store);
  CHECK(lines.size() == 4 && lines[3].find("a promotion failed: ") != std::string::npos);
  require_sound(*rig.own.pool);
}

// ---- leaving ----

TEST(a_last_sync_that_hangs_holds_nobody_who_closes_longer_than_asked) {
  Rig rig;
  const auto keys = rig.on_disk_only(10);
  rig.hang(FileCall::sync);
  CHECK(!rig.own.store->close(std::chrono::seconds(5)));  // its other threads leave sooner
  CHECK(!rig.own.store->close(kLong));                    // the answer stays
  rig.door->await_somebody();
  rig.door->open();
  rig.attach();
  CHECK(rig.own.store->lookup(keys) == 10);
  CHECK(rig.own.store->close(kLong));
}

TEST(a_namespace_that_is_described_while_others_are_pruned_stays) {
  const Folder folder;
  const disk::NamespaceFiles files(disk::system_files(), folder.path());
  const NamespaceInfo old{identity(1), "old", 4096, 0};
  const NamespaceInfo fresh{identity(2), "fresh", 4096, 0};
  CHECK(files.write(old) == 0);
  files.prune([&] {
    std::vector<NamespaceId> kept;  // as the pool was a moment ago
    CHECK(files.write(fresh) == 0);
    return kept;
  });
  CHECK(files.exists(old.id) == -ENOENT && files.exists(fresh.id) == 0);
}

}  // namespace hpkv::test

TEST_MAIN
