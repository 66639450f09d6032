// The store's files in one process: what is written is read back, found again by another pool, and
// given up in time. Damage and refusals are in test_store_damage.cc, power loss in
// test_store_power_loss.cc.
#include <algorithm>
#include <atomic>
#include <fstream>
#include <random>
#include <thread>

#include "tests/store_rig.h"

namespace hpkv::test {

using disk::ReadOutcome;
using disk::RegionState;

TEST(a_written_block_is_read_back_and_a_second_write_of_it_is_none) {
  const Folder folder;
  StoreSide side(folder.options(), place_in(folder));
  CHECK(side.store->info().created && side.store->info().took_over);
  const auto keys = random_keys(3);
  const auto first = side.append(std::span(keys).first(2));
  CHECK(first.written == 2 && first.present == 0 && first.refused == 0 && first.error == 0);
  CHECK(side.count_served(std::span(keys).first(2)) == 2);
  CHECK(!side.on_disk(keys[2]));
  const auto second = side.append(keys);
  CHECK(second.written == 1 && second.present == 2);
  CHECK(side.count_served(keys) == 3);
  CHECK(side.store->counters().written_bytes == 3 * kStoreBlock);
  require_sound(*side.pool);
}

TEST(neighbours_are_read_in_one_transfer_upwards_and_downwards) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  StoreSide side(folder.options(), place);
  auto keys = random_keys(4);
  CHECK(side.append(keys).written == 4);
  int reads = 0;
  files->set_hook([&](FileCall call, const std::string&) {
    reads += call == FileCall::read ? 1 : 0;
    return 0;
  });
  const std::vector<ReadOutcome> all_good(4, ReadOutcome::ok);
  CHECK(side.read(keys) == all_good);
  CHECK(reads == 1);
  std::reverse(keys.begin(), keys.end());
  CHECK(side.read(keys) == all_good);
  CHECK(reads == 2);
  std::swap(keys[1], keys[2]);  // 3, 1, 2, 0: a run, a run of two, a run
  CHECK(side.read(keys) == all_good);
  CHECK(reads == 5);
}

TEST(what_lies_behind_a_payload_in_the_pool_is_not_written) {
  const Folder folder;
  StoreSide side(folder.options(), place_in(folder));
  const auto keys = random_keys(1);
  CHECK(put_one(*side.pool, side.index, keys[0]) == PutStatus::stored);
  std::vector<BlockRef> refs(1);
  CHECK(side.pool->pin(keys, refs) == 1);
  std::memset(side.pool->payload(refs[0]) + kStoreBlock, 0x5A, 20'480 - kStoreBlock);
  CHECK(side.store->append(side.index, refs, keys).written == 1);
  side.pool->unpin(refs);
  std::ifstream file(place_in(folder).directory + "/regions/00000.hpkv", std::ios::binary);
  file.seekg(static_cast<std::streamoff>(disk::record_offset(20'480, 0) + 4096 + kStoreBlock));
  std::vector<char> tail(20'480 - kStoreBlock);
  file.read(tail.data(), static_cast<std::streamsize>(tail.size()));
  CHECK(file.good());
  CHECK(std::all_of(tail.begin(), tail.end(), [](char c) { return c == 0; }));
}

TEST(a_full_region_is_sealed_and_the_next_begun) {
  const Folder folder;
  StoreSide side(folder.options(), place_in(folder));
  const std::uint32_t each = side.records_per_region();
  const auto keys = random_keys(2 * each + 1);
  CHECK(side.append(keys).written == keys.size());
  CHECK(side.regions_in(RegionState::sealed) == 2);
  CHECK(side.regions_in(RegionState::open) == 1);
  CHECK(side.count_served(keys) == keys.size());
  require_sound(*side.pool);
}

// Moves a store to another pool and expects these keys there.
void expect_after_reboot(const Folder& folder, std::span<const Key> keys, const char* pool) {
  StorePlace place = place_in(folder);
  place.bytes.reset();
  StoreSide side(other_pool(folder, pool), place);
  CHECK(side.store->info().took_over && !side.store->info().created);
  CHECK(side.store->info().storage_bytes == kStoreBytes);
  side.recover_all();
  CHECK(side.count_served(keys) == keys.size());
  CHECK(side.catalog->stats().entries == keys.size());
  require_sound(*side.pool);
}

TEST(another_pool_finds_every_block_of_sealed_and_of_open_regions) {
  const Folder folder;
  std::vector<Key> keys;
  {
    StoreSide side(folder.options(), place_in(folder));
    keys = random_keys(3 * side.records_per_region() + 2);
    CHECK(side.append(keys).written == keys.size());
  }
  expect_after_reboot(folder, keys, "second");
}

TEST(without_its_summaries_a_store_is_found_by_the_headers_of_its_records) {
  const Folder folder;
  std::vector<Key> keys;
  {
    StoreSide side(folder.options(), place_in(folder));
    const std::uint32_t each = side.records_per_region();
    keys = random_keys(3 * each);
    CHECK(side.append(keys).written == keys.size());
    CHECK(side.regions_in(RegionState::sealed) == 3);
    const std::uint64_t region_bytes = side.store->info().region_bytes;
    for (const auto& entry :
         std::filesystem::directory_iterator(place_in(folder).directory + "/regions")) {
      const std::vector<char> zeroes(disk::summary_bytes(each));
      overwrite(entry.path(), disk::summary_offset(region_bytes, each), zeroes);
    }
  }
  expect_after_reboot(folder, keys, "second");
  // The first tending seals them anew, so the next start has summaries.
  {
    StoreSide side(other_pool(folder, "third"), place_in(folder));
    side.recover_all();
    CHECK(side.regions_in(RegionState::open) == 3);
    CHECK(side.store->tend() == 0);
    CHECK(side.regions_in(RegionState::sealed) == 3);
  }
  expect_after_reboot(folder, keys, "fourth");
}

TEST(the_same_pool_needs_no_recovery_and_goes_on_in_the_region_that_was_left_open) {
  const Folder folder;
  const auto keys = random_keys(3);
  std::optional<StoreSide> side(std::in_place, folder.options(), place_in(folder));
  CHECK(side->append(std::span(keys).first(2)).written == 2);
  side.emplace(folder.options(), place_in(folder));
  CHECK(!side->store->info().took_over);
  CHECK(side->count_served(std::span(keys).first(2)) == 2);
  CHECK(side->append_one(keys[2]).written == 1);
  disk::DiskRef first;
  disk::DiskRef last;
  CHECK(side->catalog->find(keys[0], first) && side->catalog->find(keys[2], last));
  CHECK(first.region == last.region && last.number == 2);
  CHECK(side->count_served(keys) == 3);
  require_sound(*side->pool);
}

TEST(two_processes_of_a_pool_see_each_others_blocks_and_write_to_regions_of_their_own) {
  const Folder folder;
  StoreSide one(folder.options(), place_in(folder));
  StoreSide two(folder.options(), place_in(folder));
  CHECK(!two.store->info().took_over);
  const auto keys = random_keys(4);
  CHECK(one.append(std::span(keys).first(2)).written == 2);
  CHECK(two.append(keys).written == 2);
  CHECK(one.count_served(keys) == 4 && two.count_served(keys) == 4);
  disk::DiskRef first;
  disk::DiskRef last;
  CHECK(one.catalog->find(keys[0], first) && one.catalog->find(keys[3], last));
  CHECK(first.region != last.region);
  require_sound(*one.pool);
}

TEST(a_store_never_takes_more_than_its_size_and_keeps_the_newest_blocks) {
  const Folder folder;
  StoreSide side(folder.options(), place_in(folder));
  const std::uint64_t places =
      std::uint64_t{side.store->info().region_count} * side.records_per_region();
  const auto keys = random_keys(3 * places);
  for (std::size_t at = 0; at < keys.size(); at += 6) {
    const auto result = side.append(std::span(keys).subspan(at, 6));
    CHECK(result.written == 6);
    CHECK(bytes_in(place_in(folder).directory) <= kStoreBytes);
    CHECK(side.store->tend() == 0);
  }
  const auto newest = std::span(keys).last(places / 2);
  CHECK(side.count_served(newest) == newest.size());
  CHECK(side.catalog->stats().entries >= places * 3 / 4);
  CHECK(side.count_served(std::span(keys).first(places)) == 0);
  require_sound(*side.pool);
}

TEST(blocks_that_were_used_since_they_were_written_outlive_their_region) {
  const Folder folder;
  StoreSide side(folder.options(), place_in(folder));
  const std::uint64_t places =
      std::uint64_t{side.store->info().region_count} * side.records_per_region();
  const auto keys = random_keys(3 * places);
  const Key hot = keys[1];
  for (std::size_t at = 0; at < keys.size(); at += 2) {
    CHECK(side.append(std::span(keys).subspan(at, 2)).written == 2);
    CHECK(side.pool->clear() > 0);  // a block that is in the pool is not worth carrying
    disk::DiskRef ref;
    CHECK(side.catalog->find(hot, ref));
    side.catalog->touch(std::span(&ref, 1));
  }
  CHECK(side.serves(hot));
  CHECK(!side.on_disk(keys[0]) && !side.on_disk(keys[2]));
  CHECK(side.store->counters().carried_blocks >= 2);
  require_sound(*side.pool);
}

TEST(synced_after_five_seconds_or_at_once_when_all_is_asked_for) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  std::int64_t now = kSecond;
  place.clock = [&] { return now; };
  StoreSide side(folder.options(), place);
  const auto keys = random_keys(3);
  CHECK(side.append_one(keys[0]).written == 1);
  int syncs = 0;
  files->set_hook([&](FileCall call, const std::string&) {
    syncs += call == FileCall::sync ? 1 : 0;
    return 0;
  });
  now += 5 * kSecond - 1;
  CHECK(side.store->sync_aged(false) == 0 && syncs == 0);
  now += 1;
  CHECK(side.store->sync_aged(false) == 0 && syncs == 1);
  now += 60 * kSecond;
  CHECK(side.store->sync_aged(false) == 0 && syncs == 1);  // nothing new
  CHECK(side.append_one(keys[1]).written == 1);
  CHECK(side.store->sync_aged(false) == 0 && syncs == 1);
  CHECK(side.store->sync_aged(true) == 0 && syncs == 2);
}

TEST(files_go_while_others_need_the_space_and_come_back_when_they_do_not) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  StoreSide side(folder.options(), place);
  const std::uint32_t each = side.records_per_region();
  const auto keys = random_keys(12 * each);
  CHECK(side.append(std::span(keys).first(8 * each)).written == 8 * each);
  const std::string regions = place.directory + "/regions";
  const std::uint64_t before = bytes_in(regions);
  files->set_available(1 * kMiB);
  CHECK(side.store->tend() == 0);
  CHECK(bytes_in(regions) < before);
  CHECK(side.store->counters().regions_removed == 4 && side.store->gives_back());
  CHECK(!side.on_disk(keys[0]) && side.serves(keys[8 * each - 1]));
  // Short of space it goes on in the regions that it has.
  const std::uint64_t shrunk = bytes_in(regions);
  CHECK(side.append(std::span(keys).subspan(8 * each, 2 * each)).written == 2 * each);
  CHECK(bytes_in(regions) <= shrunk + side.store->info().region_bytes);
  files->set_available(1024 * kMiB);
  CHECK(side.append(std::span(keys).last(2 * each)).written == 2 * each);
  CHECK(bytes_in(regions) > shrunk);
  CHECK(side.store->tend() == 0 && !side.store->gives_back());
  require_sound(*side.pool);
}

TEST(a_full_file_system_makes_the_store_reuse_what_it_has) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  StoreSide side(folder.options(), place);
  const std::uint32_t each = side.records_per_region();
  const auto keys = random_keys(8 * each);
  CHECK(side.append(std::span(keys).first(3 * each)).written == 3 * each);
  files->fail(FileCall::reserve, ENOSPC, "00003");
  const auto rest = std::span(keys).subspan(3 * each);
  for (const Key& key : rest) CHECK(side.append_one(key).written == 1);
  CHECK(side.serves(keys.back()));
  CHECK(side.store->counters().space_errors > 0);
  CHECK(!std::filesystem::exists(place.directory + "/regions/00003.hpkv"));
  require_sound(*side.pool);
}

TEST(a_cleared_store_gives_its_files_back_and_nothing_of_it_is_found_again) {
  const Folder folder;
  const auto keys = random_keys(10);
  {
    StoreSide side(folder.options(), place_in(folder));
    CHECK(side.append(keys).written == keys.size());
    CHECK(side.store->clear(std::nullopt) == keys.size());
    CHECK(side.count_served(keys) == 0);
    CHECK(std::filesystem::is_empty(place_in(folder).directory + "/regions"));
    CHECK(side.append_one(keys[0]).written == 1);
    CHECK(side.serves(keys[0]));
    require_sound(*side.pool);
  }
  expect_after_reboot(folder, std::span(keys).first(1), "second");
}

TEST(clearing_a_namespace_leaves_the_others) {
  const Folder folder;
  const auto keys = random_keys(6);
  {
    StoreSide one(folder.options(), place_in(folder), 1);
    StoreSide two(folder.options(), place_in(folder), 2);
    CHECK(one.append(std::span(keys).first(3)).written == 3);
    CHECK(two.append(std::span(keys).last(3)).written == 3);
    CHECK(one.store->clear(one.index) == 3);
    CHECK(one.count_served(std::span(keys).first(3)) == 0);
    CHECK(two.count_served(std::span(keys).last(3)) == 3);
  }
  expect_after_reboot(folder, std::span(keys).last(3), "second");
}

TEST(a_region_whose_file_was_made_anew_elsewhere_is_not_written_through_an_old_handle) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  const auto keys = random_keys(8);
  {
    StoreSide stays(folder.options(), place_in(folder));
    {
      StoreSide leaves(folder.options(), place);
      CHECK(leaves.append(std::span(keys).first(4)).written == 4);  // fills region 0
      CHECK(stays.serves(keys[0]));                                 // by a handle of its own
      files->set_available(1);
      CHECK(leaves.store->tend() == 0);  // removes the file
      CHECK(!leaves.on_disk(keys[0]));
      files->set_available(1024 * kMiB);
      CHECK(leaves.append(std::span(keys).subspan(4, 2)).written == 2);
    }
    CHECK(stays.append(std::span(keys).last(2)).written == 2);  // goes on in it, and seals it
    CHECK(stays.regions_in(RegionState::sealed) == 1);
    CHECK(stays.count_served(std::span(keys).last(4)) == 4);
  }
  expect_after_reboot(folder, std::span(keys).last(4), "second");
}

TEST(descriptors_of_namespaces_that_no_block_has_go_when_a_new_one_comes) {
  const Folder folder;
  const auto keys = random_keys(3);
  const std::string namespaces = place_in(folder).directory + "/namespaces";
  const auto count = [&] {
    const std::filesystem::directory_iterator files(namespaces);
    return std::distance(begin(files), end(files));
  };
  {
    StoreSide one(folder.options(), place_in(folder), 1);
    CHECK(one.append_one(keys[0]).written == 1);
    StoreSide two(folder.options(), place_in(folder), 2);
    CHECK(two.append_one(keys[1]).written == 1);
    CHECK(count() == 2);
  }
  std::filesystem::remove(place_in(folder).directory + "/regions/00000.hpkv");
  StoreSide side(other_pool(folder, "second"), place_in(folder), 3);
  CHECK(count() == 2);
  side.recover_all();
  CHECK(side.append_one(keys[2]).written == 1);
  CHECK(count() == 2);  // the first, whose only block is gone, made way
  CHECK(!side.serves(keys[0]) && side.serves(keys[1]) && side.serves(keys[2]));
}

TEST(verify_reads_every_block_and_drops_bad_ones_only_when_asked) {
  const Folder folder;
  StoreSide side(folder.options(), place_in(folder));
  const auto keys = random_keys(9);
  CHECK(side.append(keys).written == keys.size());
  side.recover_all();
  const std::string path = place_in(folder).directory + "/regions/00000.hpkv";
  flip(path, disk::record_offset(20'480, 1) + 4096 + 777);
  const auto looked = side.store->verify({}, false);
  CHECK(looked.complete && looked.blocks == 9 && looked.bad == 1 && looked.stale == 0);
  CHECK(looked.bytes == 9 * kStoreBlock && looked.total_blocks == 9);
  CHECK(side.on_disk(keys[1]));
  const auto fixed = side.store->verify({}, true);
  CHECK(fixed.bad == 1 && !side.on_disk(keys[1]));
  CHECK(side.store->verify({}, false).bad == 0);
  const auto stopped = side.store->verify([](const auto&) { return false; }, false);
  CHECK(!stopped.complete && stopped.blocks > 0 && stopped.blocks < 8);
}

TEST(threads_that_write_read_sync_and_evict_at_once_see_right_bytes_or_none) {
  const Folder folder;
  StoreSide side(folder.options(), place_in(folder));
  const auto keys = random_keys(400);
  std::atomic<bool> done{false};
  std::atomic<std::uint64_t> served{0};
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  const auto run = [&](auto&& body) {
    threads.emplace_back([&, body] {
      try {
        for (std::uint64_t turn = 0; !done.load(); ++turn) body(turn);
      } catch (const std::exception& error) {
        std::printf("        %s\n", error.what());
        failures.fetch_add(1);
      }
    });
  };
  for (int reader = 0; reader < 2; ++reader) {
    run([&](std::uint64_t turn) {
      disk::DiskRef ref;
      const Key& key = keys[turn * 7 % keys.size()];
      if (!side.catalog->find(key, ref)) return;
      const disk::AlignedBytes buffer(20'480);
      std::byte* target = buffer.data();
      ReadOutcome outcome{};
      side.store->read(std::span(&ref, 1), std::span(&target, 1), std::span(&outcome, 1));
      const auto expected = payload_of(key, kStoreBlock);
      if (outcome == ReadOutcome::ok) {
        CHECK(std::equal(expected.begin(), expected.end(), target));
        served.fetch_add(1);
      }
      CHECK(outcome == ReadOutcome::ok || outcome == ReadOutcome::stale);
    });
  }
  run([&](std::uint64_t) {
    CHECK(side.store->sync_aged(true) == 0);
    CHECK(side.store->tend() == 0);
  });
  run([&](std::uint64_t turn) {
    if (turn % 256 == 0) side.store->make_room(20'480);
  });
  for (std::size_t at = 0; at < 2 * keys.size(); at += 4) {
    CHECK(side.append(std::span(keys).subspan(at % keys.size(), 4)).error == 0);
  }
  while (served.load() == 0 && failures.load() == 0) std::this_thread::yield();
  done.store(true);
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0 && side.store->counters().bad_blocks == 0);
  require_sound(*side.pool);
}

// Random appends, evictions, restarts of the same pool and of another one, clearings, against a map
// of what was ever written: whatever is served is right, and the index is sound after each step.
TEST(random_steps_with_restarts_never_serve_a_wrong_byte) {
  const Folder folder;
  const auto seed = std::random_device{}();
  std::printf("        seed %u\n", seed);
  std::mt19937_64 random(seed);
  const auto keys = random_keys(300, seed);
  int pool = 0;
  std::optional<StoreSide> side(std::in_place, folder.options(), place_in(folder));
  std::size_t served = 0;
  std::size_t last = 0;  // what was written last is mostly still there
  for (int step = 0; step < 400; ++step) {
    const auto choice = random() % 100;
    if (choice < 60) {
      last = random() % (keys.size() - 8);
      CHECK(side->append(std::span(keys).subspan(last, 1 + random() % 8)).refused == 0);
    } else if (choice < 85) {
      const Key& key = keys[random() % 2 == 0 ? last : random() % keys.size()];
      served += side->serves(key) ? 1 : 0;
      CHECK(side->store->counters().bad_blocks == 0);
    } else if (choice < 90) {
      CHECK(side->store->tend() == 0);
    } else if (choice < 94) {
      side.reset();
      side.emplace(folder.options(), place_in(folder));
    } else if (choice < 98) {
      side.reset();
      PoolOptions options = other_pool(folder, "pool-" + std::to_string(++pool));
      std::filesystem::remove_all(folder.path() + "/pool");
      side.emplace(options, place_in(folder));
      side->recover_all();
      side.reset();
      std::filesystem::remove_all(options.directory);
      side.emplace(folder.options(), place_in(folder));
      side->recover_all();
    } else {
      side->store->clear(std::nullopt);
    }
    require_sound(*side->pool);
    CHECK(bytes_in(place_in(folder).directory) <= kStoreBytes);
  }
  CHECK(served > 10);
}

}  // namespace hpkv::test

TEST_MAIN
