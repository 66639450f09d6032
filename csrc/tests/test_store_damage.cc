// A store whose files, disk or neighbours do what they should not: misses, counters, refusals that
// say why, and recovery without a restart once the cause is gone.
#include <algorithm>
#include <condition_variable>
#include <thread>

#include "tests/store_rig.h"

namespace hpkv::test {

using disk::ReadOutcome;
using disk::RegionState;

constexpr std::uint64_t kStride = 20'480;
constexpr std::uint64_t kPageOfGeneration1 = 4096;  // of its header in a region file

// Opens it with another pool and recovers what can be: how many blocks are served, and no wrong
// byte.
std::size_t served_after(const Folder& folder, std::span<const Key> keys) {
  StoreSide side(other_pool(folder, "second"), place_in(folder));
  side.recover_all();
  const std::size_t served = side.count_served(keys);
  for (const Key& key : keys) CHECK(side.append_one(key).refused == 0);  // it goes on working
  CHECK(side.count_served(keys) == keys.size());
  CHECK(bytes_in(place_in(folder).directory) <= kStoreBytes);
  require_sound(*side.pool);
  return served;
}

TEST(a_flipped_byte_in_a_payload_or_header_is_a_miss_for_that_block_alone) {
  for (const std::uint64_t at : {std::uint64_t{5000}, std::uint64_t{50}, std::uint64_t{4095}}) {
    const Folder folder;
    const auto keys = left_behind(folder, 4);
    flip(region_file(folder, 0), disk::record_offset(kStride, 2) + at);
    StoreSide side(other_pool(folder, "second"), place_in(folder));
    side.recover_all();
    CHECK(side.count_served(keys) == 3 && !side.serves(keys[2]));
    CHECK(side.store->counters().bad_blocks == 1 && !side.on_disk(keys[2]));
    CHECK(side.append_one(keys[2]).written == 1 && side.serves(keys[2]));
  }
}

TEST(every_flipped_byte_of_a_region_header_or_summary_costs_blocks_at_most) {
  for (const std::uint64_t at : {0, 9, 13, 20, 33, 38, 41, 100, 4093}) {
    const Folder folder;
    const auto keys = left_behind(folder, 4);
    flip(region_file(folder, 0), at);
    flip(region_file(folder, 0), kPageOfGeneration1 + at);
    static_cast<void>(served_after(folder, keys));
  }

  const std::uint64_t summary = disk::summary_offset(128 * 1024, 4);
  for (const std::uint64_t at : {0, 9, 33, 37, 45, 50, 4095, 4096 + 3, 8192 + 5, 8192 + 33}) {
    const Folder folder;
    const auto same = left_behind(folder, 4);
    flip(region_file(folder, 0), summary + at);
    CHECK(served_after(folder, same) == 4);  // by the headers of the records
  }
}

TEST(a_truncated_region_file_serves_what_is_left_of_it) {
  const Folder folder;
  const auto keys = left_behind(folder, 8);
  std::filesystem::resize_file(region_file(folder, 0), disk::record_offset(kStride, 2) + 9000);
  std::filesystem::resize_file(region_file(folder, 1), 100);
  CHECK(served_after(folder, keys) == 2);
}

TEST(a_region_file_truncated_under_a_running_store_gives_misses) {
  const Folder folder;
  StoreSide side(folder.options(), place_in(folder));
  const auto keys = random_keys(6);
  CHECK(side.append(keys).written == 6);
  std::filesystem::resize_file(region_file(folder, 0), disk::record_offset(kStride, 1));
  CHECK(side.count_served(keys) == 3);
  CHECK(side.store->counters().bad_blocks == 3);
  CHECK(side.append(keys).written == 3 && side.count_served(keys) == 6);
}

TEST(region_files_that_changed_places_are_not_mistaken_for_each_other) {
  const Folder folder;
  const auto keys = left_behind(folder, 8);
  std::filesystem::rename(region_file(folder, 0), region_file(folder, 9));
  std::filesystem::rename(region_file(folder, 1), region_file(folder, 0));
  std::filesystem::rename(region_file(folder, 9), region_file(folder, 1));
  CHECK(served_after(folder, keys) == 0);
}

TEST(a_region_file_of_another_store_is_not_taken) {
  const Folder folder;
  const Folder other;
  const auto keys = left_behind(folder, 4);
  static_cast<void>(left_behind(other, 4));
  std::filesystem::copy_file(region_file(other, 0), region_file(folder, 0),
                             std::filesystem::copy_options::overwrite_existing);
  CHECK(served_after(folder, keys) == 0);
}

TEST(deleted_files_are_misses_while_running_and_after_a_restart) {
  const Folder folder;
  std::vector<Key> keys;
  {
    StoreSide side(folder.options(), place_in(folder));
    keys = random_keys(6);
    CHECK(side.append(keys).written == 6);
    std::filesystem::remove(region_file(folder, 0));
    std::filesystem::remove(region_file(folder, 1));                 // open for appending
    CHECK(side.store->tend() == ENOENT && side.store->tend() == 0);  // said once
    CHECK(side.store->counters().write_errors == 1);
    CHECK(!side.on_disk(keys[4]) && !side.on_disk(keys[5]));  // better written elsewhere
    CHECK(side.append(std::span(keys).last(2)).written == 2);
    CHECK(std::filesystem::exists(region_file(folder, 1)));
  }
  StoreSide side(other_pool(folder, "second"), place_in(folder));
  side.recover_all();
  CHECK(side.count_served(std::span(keys).first(4)) == 0);
  CHECK(side.count_served(std::span(keys).last(2)) == 2);
}

TEST(a_directory_that_is_gone_refuses_blocks_until_it_is_back) {
  const Folder folder;
  StoreSide side(folder.options(), place_in(folder));
  const auto keys = random_keys(4);
  CHECK(side.append(std::span(keys).first(2)).written == 2);
  const std::string directory = place_in(folder).directory;
  std::filesystem::rename(directory, folder.path() + "/away");
  CHECK(side.store->tend() == ENOENT);
  const auto refused = side.append_one(keys[2]);
  CHECK(refused.refused == 1 && refused.error == ENOENT);
  CHECK(side.store->counters().last_error.find("No such file") != std::string::npos);
  // Another pool may start here; it is a store of its own.
  {
    const StoreSide other(other_pool(folder, "second"), place_in(folder));
    CHECK(other.store->info().created);
    CHECK(side.append_one(keys[2]).refused == 1);
  }
  std::filesystem::remove_all(directory);
  std::filesystem::rename(folder.path() + "/away", directory);
  CHECK(side.store->tend() == 0);
  CHECK(side.append(std::span(keys).subspan(2)).written == 2);
  CHECK(side.count_served(keys) == 4);
}

TEST(a_file_system_without_room_refuses_blocks_and_says_so) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  StoreSide side(folder.options(), place);
  files->set_available(1 * kMiB);
  const auto keys = random_keys(2);
  const auto refused = side.append(keys);
  CHECK(refused.refused == 2 && refused.error == 0);  // the disk works: no reason to rest
  CHECK(side.store->counters().space_errors == 1);
  CHECK(std::filesystem::is_empty(place.directory + "/regions"));
  files->set_available(1024 * kMiB);
  CHECK(side.append(keys).written == 2 && side.count_served(keys) == 2);
}

TEST(what_is_not_a_file_under_a_regions_name_costs_that_region_only) {
  const Folder folder;
  const auto keys = left_behind(folder, 8);
  std::filesystem::remove(region_file(folder, 0));
  std::filesystem::create_symlink("/dev/zero", region_file(folder, 0));
  CHECK(served_after(folder, keys) == 4);
  CHECK(std::filesystem::is_symlink(region_file(folder, 0)));
}

TEST(a_lost_namespace_descriptor_costs_its_blocks_and_nothing_else) {
  const Folder folder;
  const auto keys = left_behind(folder, 4);
  for (const auto& entry :
       std::filesystem::directory_iterator(place_in(folder).directory + "/namespaces")) {
    flip(entry.path(), 40);
  }
  StoreSide side(other_pool(folder, "second"), place_in(folder));
  side.recover_all();
  CHECK(side.count_served(keys) == 0);
}

// ---- the disk fails ----

TEST(a_disk_that_refuses_writes_refuses_blocks_and_recovers_by_itself) {
  for (const int code : {EIO, EROFS}) {
    const Folder folder;
    StorePlace place = place_in(folder);
    const auto files = std::make_shared<FaultyFiles>(place.files);
    place.files = files;
    StoreSide side(folder.options(), place);
    const auto keys = random_keys(6);
    CHECK(side.append(std::span(keys).first(2)).written == 2);
    files->fail(FileCall::write, code);
    const auto refused = side.append_one(keys[2]);
    CHECK(refused.refused == 1 && refused.written == 0 && refused.error == code);
    CHECK(side.store->counters().write_errors == 1);
    CHECK(side.store->counters().last_error.find("write region 0") == 0);
    CHECK(!side.on_disk(keys[2]));
    CHECK(side.count_served(std::span(keys).first(2)) == 2);
    require_sound(*side.pool);
    files->set_hook({});
    CHECK(side.append(std::span(keys).subspan(2, 3)).written == 3);
    CHECK(side.count_served(std::span(keys).first(5)) == 5);
  }
}

TEST(the_place_of_a_failed_write_is_not_used_again) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  StoreSide side(folder.options(), place);
  const auto keys = random_keys(2);
  files->fail(FileCall::write, EIO, "regions");
  // Beginning the region fails first, then the write of the block.
  CHECK(side.append_one(keys[0]).error == EIO);
  files->set_hook({});
  CHECK(side.append_one(keys[0]).written == 1);
  files->fail(FileCall::write, EIO, "regions");
  CHECK(side.append_one(keys[1]).error == EIO);
  files->set_hook({});
  CHECK(side.append_one(keys[1]).written == 1);
  disk::DiskRef ref;
  CHECK(side.catalog->find(keys[1], ref) && ref.number == 2);
}

TEST(a_disk_that_refuses_reads_keeps_its_blocks) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  StoreSide side(folder.options(), place);
  const auto keys = random_keys(3);
  CHECK(side.append(keys).written == 3);
  files->fail(FileCall::read, EIO);
  CHECK(side.read(keys) == std::vector<ReadOutcome>(3, ReadOutcome::io_error));
  CHECK(side.store->counters().read_errors > 0);
  files->set_hook({});
  CHECK(side.count_served(keys) == 3);
}

TEST(one_unreadable_record_does_not_take_its_neighbours_along) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  StoreSide side(folder.options(), place);
  const auto keys = random_keys(4);
  CHECK(side.append(keys).written == 4);
  int reads = 0;
  files->set_hook([&](FileCall call, const std::string&) {
    if (call != FileCall::read) return 0;
    ++reads;
    return reads == 1 || reads == 3 ? -EIO : 0;  // the run, then its second record
  });
  const auto outcomes = side.read(keys);
  CHECK(outcomes[0] == ReadOutcome::ok && outcomes[1] == ReadOutcome::bad);
  CHECK(outcomes[2] == ReadOutcome::ok && outcomes[3] == ReadOutcome::ok);
  // It is forgotten, so that the next copy of it is written.
  CHECK(!side.on_disk(keys[1]) && side.store->counters().bad_blocks == 1);
  CHECK(side.append_one(keys[1]).written == 1 && side.count_served(keys) == 4);
  require_sound(*side.pool);
}

TEST(a_region_that_could_not_be_sealed_is_sealed_later) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  StoreSide side(folder.options(), place);
  const auto keys = random_keys(side.records_per_region() + 1);
  CHECK(side.append(std::span(keys).first(keys.size() - 2)).written == keys.size() - 2);
  files->fail(FileCall::sync, EIO);
  CHECK(side.append_one(keys[keys.size() - 2]).written == 1);  // fills the region
  CHECK(side.regions_in(RegionState::sealed) == 0);
  CHECK(side.store->tend() == EIO);
  files->set_hook({});
  CHECK(side.append_one(keys.back()).written == 1);
  CHECK(side.store->tend() == 0);
  CHECK(side.regions_in(RegionState::sealed) == 1);
  CHECK(side.count_served(keys) == keys.size());
  require_sound(*side.pool);
}

TEST(a_write_that_hangs_holds_up_no_reader) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  StoreSide side(folder.options(), place);
  const auto keys = random_keys(3);
  CHECK(side.append(std::span(keys).first(2)).written == 2);
  std::mutex mutex;
  std::condition_variable changed;
  bool hanging = false;
  bool released = false;
  files->set_hook([&](FileCall call, const std::string&) {
    if (call != FileCall::write) return 0;
    std::unique_lock lock(mutex);
    hanging = true;
    changed.notify_all();
    changed.wait(lock, [&] { return released; });
    return 0;
  });
  std::thread writer([&] { CHECK(side.append_one(keys[2]).written == 1); });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return hanging; });
  }
  CHECK(side.count_served(std::span(keys).first(2)) == 2);
  CHECK(!side.on_disk(keys[2]));
  {
    const std::lock_guard lock(mutex);
    released = true;
    changed.notify_all();
  }
  writer.join();
  CHECK(side.serves(keys[2]));
}

TEST(without_direct_io_the_store_works_and_says_so) {
  const Folder folder;
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(place.files);
  place.files = files;
  files->fail(FileCall::open, EINVAL, "probe");
  StoreSide side(folder.options(), place);
  CHECK(!side.store->info().direct);
  CHECK(side.store->info().notice.find("no direct I/O") != std::string::npos);
  const auto keys = random_keys(5);
  CHECK(side.append(keys).written == 5 && side.count_served(keys) == 5);
}

}  // namespace hpkv::test

TEST_MAIN
