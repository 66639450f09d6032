// The disk tier's index by itself, without files: what each call promises, with two attachments to
// one pool where that matters. What needs deaths is in tests/crash.
#include <atomic>
#include <bit>
#include <map>
#include <random>
#include <thread>

#include "disk/catalog.h"
#include "shm/geometry.h"
#include "tests/check.h"
#include "tests/pool_rig.h"

namespace hpkv::test {

using disk::Catalog;
using disk::DiskRef;
using disk::RegionState;

constexpr std::uint64_t kBlock = 64 * 1024;
constexpr std::uint64_t kRegionBytes = 16 * kMiB;

disk::StoreId store_id(int n) {
  disk::StoreId id{};
  id[0] = static_cast<std::byte>(n);
  return id;
}

// One attachment with its catalog.
struct Side {
  explicit Side(const PoolOptions& options, std::uint64_t block_bytes = kBlock)
      : pool(Pool::open(options)), catalog(pool) {
    catalog.attach(store_id(1), 32, kRegionBytes);
    index = pool->add_namespace(identity(1), {}, block_bytes);
  }
  // Makes a region ours and open.
  void open_region(std::uint32_t region, std::uint32_t capacity = 100) {
    const RegionState before = catalog.region(region).state;
    CHECK(catalog.claim(region, before, RegionState::dropping));
    CHECK(
        catalog.begin_region(region, catalog.region(region).file_generation + 1, kBlock, capacity));
    CHECK(catalog.claim(region, RegionState::dropping, RegionState::open));
  }
  DiskRef store(std::uint32_t region, std::uint32_t number, const Key& key) {
    DiskRef ref;
    CHECK(catalog.reserve(region, number, index, key, ref) == ReserveStatus::ok);
    catalog.publish(ref, 7);
    return ref;
  }
  bool on_disk(const Key& key) const {
    DiskRef ref;
    return catalog.find(key, ref);
  }

  std::shared_ptr<Pool> pool;
  Catalog catalog;
  std::uint32_t index = 0;
};

TEST(a_block_on_disk_is_found_once_it_is_published_and_says_where_it_is) {
  const Folder folder;
  Side side(folder.options());
  side.open_region(3);
  const auto keys = random_keys(2);
  DiskRef ref;
  CHECK(side.catalog.reserve(3, 5, side.index, keys[0], ref) == ReserveStatus::ok);
  CHECK(!side.on_disk(keys[0]));
  require_sound(*side.pool);
  side.catalog.publish(ref, 1234);
  DiskRef found;
  CHECK(side.catalog.find(keys[0], found));
  CHECK(found.key == keys[0] && found.region == 3 && found.number == 5);
  CHECK(found.checksum == 1234 && found.namespace_index == side.index);
  CHECK(found.file_generation == 1 && found.payload_bytes == kBlock);
  CHECK(!side.on_disk(keys[1]));
  CHECK(side.catalog.region(3).used == 6 && side.catalog.region(3).live == 1);
  const disk::DiskStats stats = side.catalog.stats();
  CHECK(stats.entries == 1 && stats.bytes == kBlock && stats.regions_in_use == 1);
  CHECK(stats.bytes_by_namespace[side.index] == kBlock && stats.regions_unknown == 31);
  require_sound(*side.pool);
}

TEST(a_key_is_on_disk_at_most_once_whoever_writes_it) {
  const Folder folder;
  Side one(folder.options());
  Side two(folder.options());
  one.open_region(0);
  two.open_region(1);
  const Key key = random_keys(1)[0];
  DiskRef first;
  DiskRef second;
  CHECK(one.catalog.reserve(0, 0, one.index, key, first) == ReserveStatus::ok);
  CHECK(two.catalog.reserve(1, 0, two.index, key, second) == ReserveStatus::busy);
  one.catalog.publish(first, 1);
  CHECK(two.catalog.reserve(1, 0, two.index, key, second) == ReserveStatus::present);
  one.catalog.forget(first);
  CHECK(two.catalog.reserve(1, 0, two.index, key, second) == ReserveStatus::ok);
  two.catalog.abandon(second);
  CHECK(!two.on_disk(key));
  require_sound(*one.pool);
}

TEST(a_region_has_one_owner_and_only_he_moves_it) {
  const Folder folder;
  Side one(folder.options());
  Side two(folder.options());
  CHECK(one.catalog.claim(0, RegionState::unknown, RegionState::recovering));
  CHECK(!two.catalog.claim(0, RegionState::unknown, RegionState::recovering));
  CHECK(!two.catalog.claim(0, RegionState::recovering, RegionState::open));
  CHECK(!two.catalog.settle(0, RegionState::recovering, RegionState::free));
  CHECK(one.catalog.region(0).ours && !two.catalog.region(0).ours && two.catalog.region(0).owned);
  CHECK(one.catalog.settle(0, RegionState::recovering, RegionState::free));
  CHECK(two.catalog.claim(0, RegionState::free, RegionState::dropping));
  // A state that needs an owner is not left without one.
  CHECK(!two.catalog.claim(0, RegionState::dropping, RegionState::free));
  CHECK(two.catalog.settle(0, RegionState::dropping, RegionState::free));
  CHECK(!one.catalog.claim(99, RegionState::unknown, RegionState::recovering));
  require_sound(*one.pool);
}

TEST(a_client_that_leaves_gives_its_regions_back_and_frees_what_it_was_writing) {
  const Folder folder;
  Side stays(folder.options());
  const auto keys = random_keys(3);
  {
    Side leaves(folder.options());
    leaves.open_region(0);
    leaves.store(0, 0, keys[0]);
    DiskRef ref;
    CHECK(leaves.catalog.reserve(0, 1, leaves.index, keys[1], ref) == ReserveStatus::ok);
    leaves.open_region(1);
    CHECK(leaves.catalog.claim(1, RegionState::open, RegionState::sealing));
    CHECK(leaves.catalog.claim(2, RegionState::unknown, RegionState::recovering));
    leaves.open_region(3);
    leaves.store(3, 0, keys[2]);
    CHECK(leaves.catalog.claim(3, RegionState::open, RegionState::dropping));
    leaves.pool->close();
  }
  CHECK(stays.on_disk(keys[0]) && !stays.on_disk(keys[1]) && stays.on_disk(keys[2]));
  CHECK(stays.catalog.region(0).state == RegionState::open && !stays.catalog.region(0).owned);
  CHECK(stays.catalog.region(1).state == RegionState::open && !stays.catalog.region(1).owned);
  CHECK(stays.catalog.region(2).state == RegionState::unknown && !stays.catalog.region(2).owned);
  CHECK(stays.catalog.region(3).state == RegionState::sealed && !stays.catalog.region(3).owned);
  // Continued by another, after the number that was lost.
  CHECK(stays.catalog.claim(0, RegionState::open, RegionState::open));
  CHECK(stays.catalog.region(0).used == 2);
  stays.store(0, 2, keys[1]);
  require_sound(*stays.pool);
}

TEST(a_region_that_begins_anew_has_no_entries_and_its_old_references_mean_nothing) {
  const Folder folder;
  Side side(folder.options());
  side.open_region(0, 50);
  const auto keys = random_keys(60);
  std::vector<DiskRef> old;
  for (std::uint32_t i = 0; i < 50; ++i) old.push_back(side.store(0, i, keys[i]));
  DiskRef ref;
  CHECK(side.catalog.reserve(0, 50, side.index, keys[50], ref) == ReserveStatus::full);
  CHECK(side.catalog.claim(0, RegionState::open, RegionState::sealing));
  CHECK(side.catalog.settle(0, RegionState::sealing, RegionState::sealed));
  side.open_region(0, 20);  // fits the array
  for (std::uint32_t i = 0; i < 50; ++i) CHECK(!side.on_disk(keys[i]));
  CHECK(side.catalog.region(0).used == 0 && side.catalog.region(0).live == 0);
  const DiskRef fresh = side.store(0, 0, keys[55]);
  CHECK(fresh.entry_offset == old[0].entry_offset && fresh.file_generation == 2);
  side.catalog.forget(old[0]);
  side.catalog.abandon(old[0]);
  CHECK(side.on_disk(keys[55]));
  CHECK(side.catalog.claim(0, RegionState::open, RegionState::sealing));
  CHECK(side.catalog.settle(0, RegionState::sealing, RegionState::sealed));
  side.open_region(0, 200);  // needs a larger one
  for (std::uint32_t i = 0; i < 60; ++i) side.store(0, i + 100, keys[i]);
  CHECK(side.catalog.region(0).used == 160);
  std::vector<DiskRef> all;
  side.catalog.entries(0, all);
  CHECK(all.size() == 60 && all[0].number == 100 && all[59].key == keys[59]);
  CHECK(all[0].file_generation == 3);
  require_sound(*side.pool);
}

TEST(another_store_is_refused_naming_both_and_the_same_one_is_found) {
  const Folder folder;
  Side side(folder.options());
  Catalog other(side.pool);
  other.attach(store_id(1), 32, kRegionBytes);
  CHECK(other.region_count() == 32);
  try {
    other.attach(store_id(2), 32, kRegionBytes);
    CHECK(false);
  } catch (const Error& error) {
    const std::string text = error.what();
    CHECK(error.kind() == ErrorKind::store);
    CHECK(text.find("01000000") != std::string::npos && text.find("02000000") != std::string::npos);
  }
  CHECK_THROWS(other.attach(store_id(1), 64, kRegionBytes));
}

TEST(a_lookup_follows_a_prefix_through_pool_and_disk_to_the_first_gap) {
  const Folder folder;
  Side side(folder.options(), 4096);
  side.open_region(0, 1000);
  const auto keys = random_keys(500);
  std::uint32_t number = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i == 437) continue;
    // By turns of different lengths: in the pool, on disk, in both.
    const bool in_both = i % 7 == 0;
    const bool in_pool = i / 50 % 2 == 0 || (i > 200 && i % 2 == 0);
    if (in_pool || in_both) CHECK(put_one(*side.pool, side.index, keys[i]) == PutStatus::stored);
    if (!in_pool || in_both) side.store(0, number++, keys[i]);
  }
  CHECK(side.catalog.lookup(keys) == 437);
  CHECK(side.catalog.lookup(std::span(keys).subspan(438)) == 62);
  CHECK(side.catalog.lookup(std::span(keys).subspan(437)) == 0);
  CHECK(side.pool->lookup(keys) == 50);
}

TEST(eviction_takes_the_blocks_that_are_on_disk_before_colder_ones_that_are_not) {
  const Folder folder;
  Side side(folder.options(), 512 * 1024);
  const auto keys = random_keys(60);
  std::size_t stored = 0;
  while (side.pool->stats().evictions == 0) {
    CHECK(put_one(*side.pool, side.index, keys[stored++]) == PutStatus::stored);
  }
  // keys[0] went. On disk: the warmest five of what is there.
  side.open_region(0);
  for (std::uint32_t i = 0; i < 5; ++i) side.store(0, i, keys[stored - 1 - i]);
  // The old walk's candidates are used up first: they were chosen before.
  static_cast<void>(side.pool->add_namespace(identity(9), {}, 4096));
  CHECK(side.pool->drop_namespace(identity(9)) == 0);
  for (std::size_t i = 0; i < 5; ++i) {
    CHECK(put_one(*side.pool, side.index, keys[stored + i]) == PutStatus::stored);
    // The coldest of those on disk goes, and nothing else.
    CHECK(side.pool->lookup(std::span(&keys[stored - 5 + i], 1)) == 0);
    CHECK(side.on_disk(keys[stored - 5 + i]));
  }
  for (std::size_t i = 1; i + 5 < stored; ++i)
    CHECK(side.pool->lookup(std::span(&keys[i], 1)) == 1);
  CHECK(put_one(*side.pool, side.index, keys[stored + 5]) == PutStatus::stored);
  CHECK(side.pool->lookup(std::span(&keys[1], 1)) == 0);
  require_sound(*side.pool);
}

TEST(a_survey_counts_free_and_clean_bytes_and_offers_the_coldest_of_the_rest) {
  const Folder folder;
  Side side(folder.options());
  const auto keys = random_keys(40);
  disk::Survey survey = side.catalog.survey({.blocks = 10});
  CHECK(survey.free_bytes == survey.pool_bytes && survey.clean_bytes == 0);
  CHECK(survey.coldest.empty() && survey.pool_bytes > 12 * kMiB);
  for (const Key& key : keys) CHECK(put_one(*side.pool, side.index, key) == PutStatus::stored);
  side.open_region(0);
  for (std::uint32_t i = 0; i < 6; ++i) side.store(0, i, keys[i]);
  BlockRef pinned;
  CHECK(side.pool->pin(std::span(&keys[6], 1), std::span(&pinned, 1)) == 1);
  survey = side.catalog.survey({.blocks = 10});
  CHECK(survey.clean_bytes == 6 * kBlock);
  CHECK(side.catalog.pending_blocks() == 34);  // pinned or not
  CHECK(survey.coldest.size() == 10);
  for (std::size_t i = 0; i < 10; ++i) CHECK(survey.coldest[i].key == keys[7 + i]);
  CHECK(survey.coldest[0].namespace_index == side.index && survey.coldest[0].stamp != 0);
  // A place claimed ahead counts as neither.
  CHECK(survey.free_bytes <= survey.pool_bytes - 40 * kBlock);
  CHECK(survey.free_bytes + 64 * kBlock >= survey.pool_bytes);
  side.pool->unpin(std::span<const BlockRef>(&pinned, 1));
  // Loaded: used. Stored a second time, as when it leaves the device: not used.
  std::vector<std::byte> copy(kBlock);
  CHECK(get(*side.pool, keys[20], copy));
  CHECK(put_one(*side.pool, side.index, keys[21]) == PutStatus::present);
  survey = side.catalog.survey({.blocks = 10, .min_uses = 1});
  CHECK(survey.coldest.size() == 1);
  CHECK(survey.coldest[0].key == keys[20]);
}

TEST(a_namespace_record_is_not_reused_while_a_block_on_disk_carries_it) {
  const Folder folder;
  Side keeper(folder.options());
  std::uint32_t kept = 0;
  {
    Side leaver(folder.options());
    for (int i = 2; i <= 128; ++i)
      static_cast<void>(leaver.pool->add_namespace(identity(i), {}, 4096));
    kept = leaver.pool->add_namespace(identity(77), {}, 4096);
    leaver.open_region(0);
    DiskRef ref;
    CHECK(leaver.catalog.reserve(0, 0, kept, random_keys(1)[0], ref) == ReserveStatus::ok);
    leaver.catalog.publish(ref, 1);
    leaver.pool->close();
  }
  for (int i = 129; i < 129 + 126; ++i)
    CHECK(keeper.pool->add_namespace(identity(i), {}, 4096) != kept);
  CHECK_THROWS(keeper.pool->add_namespace(identity(255), {}, 4096));
  CHECK(keeper.catalog.drop_namespace(kept) == 1);
  CHECK(keeper.pool->add_namespace(identity(255), {}, 4096) == kept);
}

TEST(a_touched_entry_says_so_until_its_place_is_taken_by_another) {
  const Folder folder;
  Side side(folder.options());
  side.open_region(0);
  const auto keys = random_keys(2);
  const DiskRef a = side.store(0, 0, keys[0]);
  const DiskRef b = side.store(0, 1, keys[1]);
  CHECK(!side.catalog.touched(a) && !side.catalog.touched(b));
  side.catalog.touch(std::span(&a, 1));
  CHECK(side.catalog.touched(a) && !side.catalog.touched(b));
  CHECK(side.catalog.claim(0, RegionState::open, RegionState::dropping));
  CHECK(side.catalog.forget_region(0));
  CHECK(side.catalog.begin_region(0, 2, kBlock, 100));
  CHECK(side.catalog.claim(0, RegionState::dropping, RegionState::open));
  CHECK(!side.catalog.touched(side.store(0, 0, keys[0])));
}

TEST(forget_all_leaves_unknown_regions_and_no_entry_whoever_had_them) {
  const Folder folder;
  Side one(folder.options());
  Side two(folder.options());
  two.open_region(0);
  const auto keys = random_keys(2);
  two.store(0, 0, keys[0]);
  DiskRef writing;
  CHECK(two.catalog.reserve(0, 1, two.index, keys[1], writing) == ReserveStatus::ok);
  CHECK(one.catalog.forget_all());
  CHECK(!one.on_disk(keys[0]) && one.catalog.stats().regions_unknown == 32);
  two.catalog.publish(writing, 1);  // too late: nothing happens
  CHECK(!one.on_disk(keys[1]));
  require_sound(*one.pool);
}

TEST(the_index_takes_room_from_blocks_but_not_more_than_its_share) {
  const Folder folder;
  Side side(folder.options(), 4096);
  std::uint64_t seed = 2;
  while (side.pool->stats().evictions == 0) {
    for (const Key& key : random_keys(100, seed++))
      static_cast<void>(put_one(*side.pool, side.index, key));
  }
  std::uint32_t begun = 0;
  for (std::uint32_t region = 0; region < 32; ++region) {
    CHECK(side.catalog.claim(region, RegionState::unknown, RegionState::dropping));
    if (side.catalog.begin_region(region, 1, 4096, 8000)) ++begun;  // 500 KiB of entries
  }
  // Three segments of 1 MiB of fifteen, the first of which holds other things too.
  CHECK(begun >= 4 && begun <= 6);
  CHECK(side.pool->stats().blocks > 2000);
  CHECK(side.catalog.claim(0, RegionState::dropping, RegionState::open));
  std::uint32_t number = 0;
  for (const Key& key : random_keys(8000, 99)) side.store(0, number++, key);
  require_sound(*side.pool);
}

namespace {

// Where a lock is not free in time, a region is not begun, and an entry stays its writer's until
// that one leaves.
bool begin_surely(Side& side, std::uint32_t region, std::uint32_t capacity) {
  const std::uint32_t generation = side.catalog.region(region).file_generation + 1;
  return despite_timeouts(
      *side.pool, [&] { return side.catalog.begin_region(region, generation, kBlock, capacity); });
}
void abandon_surely(Side& side, const DiskRef& ref) {
  std::uint64_t timeouts = 0;
  do {
    timeouts = side.pool->stats().lock_timeouts;
    side.catalog.abandon(ref);
  } while (side.pool->stats().lock_timeouts != timeouts);
}

}  // namespace

TEST(threads_that_write_drop_and_look_leave_a_sound_index) {
  const Folder folder;
  Side one(folder.options());
  Side two(folder.options());
  const auto keys = random_keys(200);
  constexpr std::uint32_t kCapacity = 40;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> wrong{0};
  const auto write = [&](Side& side, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int round = 0; round < 60; ++round) {
      const auto region = static_cast<std::uint32_t>(random() % 4);
      const RegionState state = side.catalog.region(region).state;
      if (state != RegionState::unknown && state != RegionState::sealed) continue;
      if (!side.catalog.claim(region, state, RegionState::dropping)) continue;
      if (!begin_surely(side, region, kCapacity)) std::abort();
      static_cast<void>(side.catalog.claim(region, RegionState::dropping, RegionState::open));
      for (std::uint32_t number = 0; number < kCapacity; ++number) {
        DiskRef ref;
        const Key& key = keys[random() % keys.size()];
        if (side.catalog.reserve(region, number, side.index, key, ref) != ReserveStatus::ok)
          continue;
        if (random() % 8 == 0) {
          abandon_surely(side, ref);
        } else {
          side.catalog.publish(ref, static_cast<std::uint32_t>(key.words[0]));
        }
      }
      static_cast<void>(side.catalog.claim(region, RegionState::open, RegionState::sealing));
      static_cast<void>(side.catalog.settle(region, RegionState::sealing, RegionState::sealed));
    }
  };
  const auto look = [&](Side& side, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    while (!stop.load()) {
      DiskRef ref;
      const Key& key = keys[random() % keys.size()];
      if (!side.catalog.find(key, ref)) continue;
      if (ref.key != key || ref.checksum != static_cast<std::uint32_t>(key.words[0])) ++wrong;
      if (random() % 16 == 0) side.catalog.forget(ref);
      if (random() % 4 == 0) side.catalog.touch(std::span(&ref, 1));
    }
  };
  std::vector<std::thread> writers;
  writers.emplace_back([&] { write(one, 1); });
  writers.emplace_back([&] { write(one, 2); });
  writers.emplace_back([&] { write(two, 3); });
  std::thread looker([&] { look(two, 4); });
  for (std::thread& thread : writers) thread.join();
  stop.store(true);
  looker.join();
  write(one, 5);  // what the looker has not taken away again
  CHECK(wrong.load() == 0);
  require_sound(*one.pool);
  std::uint64_t live = 0;
  for (std::uint32_t region = 0; region < 4; ++region) live += one.catalog.region(region).live;
  CHECK(live == one.catalog.stats().entries && live > 0);
}

}  // namespace hpkv::test

TEST_MAIN
