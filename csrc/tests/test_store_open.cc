// Who may open a store, and what is refused: other pools, other sizes, other versions, damaged
// headers, directories of others, and several that come at once.
#include <unistd.h>

#include <atomic>
#include <thread>

#include "disk/directory.h"
#include "tests/faulty_files.h"
#include "tests/store_rig.h"

namespace hpkv::test {

// What a look says, which knows of no pool; `argument` when it has nothing against the place.
Error looked_at(const StorePlace& place) {
  try {
    disk::check_place(region_options(place), place.files);
  } catch (const Error& error) {
    return error;
  }
  return {ErrorKind::argument, ""};
}

// How a store is refused: in the same words by a look at its place.
ErrorKind refusal(const PoolOptions& options, const StorePlace& place) {
  const Error looked = looked_at(place);
  try {
    const StoreSide side(options, place);
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("; ") != std::string::npos);  // has a remedy
    CHECK(looked.kind() == error.kind() && std::string(looked.what()) == error.what());
    return error.kind();
  }
  return ErrorKind::argument;  // opened
}

TEST(a_look_at_a_place_makes_no_store_and_disturbs_none) {
  const Folder folder;
  const StorePlace place = place_in(folder);
  CHECK(looked_at(place).kind() == ErrorKind::argument);
  CHECK(!std::filesystem::exists(place.directory + "/store.hpkv"));
  const auto keys = random_keys(2);
  StoreSide side(folder.options(), place);
  CHECK(side.store->info().created && side.append(keys).written == 2);
  CHECK(looked_at(place).kind() == ErrorKind::argument);
  const StoreSide second(folder.options(), place);  // no lock was left
  CHECK(!second.store->info().took_over && side.count_served(keys) == 2);
}

TEST(a_directory_that_cannot_be_written_is_refused_by_a_look) {
  const Folder folder;
  static_cast<void>(left_behind(folder, 1));
  StorePlace place = place_in(folder);
  const auto files = std::make_shared<FaultyFiles>(disk::system_files());
  files->fail(FileCall::open, EROFS, "LOCK");
  place.files = files;
  const Error looked = looked_at(place);
  CHECK(looked.kind() == ErrorKind::system);
  CHECK(std::string(looked.what()).find(place.directory) != std::string::npos);
  CHECK(std::string(looked.what()).find("; mount it writable") != std::string::npos);
}

TEST(a_second_pool_is_refused_while_the_first_lives_and_welcome_afterwards) {
  const Folder folder;
  const auto keys = random_keys(2);
  {
    StoreSide first(folder.options(), place_in(folder));
    CHECK(first.append(keys).written == 2);
    try {
      const StoreSide second(other_pool(folder, "second"), place_in(folder));
      CHECK(false);
    } catch (const Error& error) {
      const std::string text = error.what();
      CHECK(error.kind() == ErrorKind::store);
      CHECK(text.find(folder.path() + "/pool") != std::string::npos);
      CHECK(text.find(folder.path() + "/second") != std::string::npos);
    }
    CHECK(first.count_served(keys) == 2);
  }
  {
    StoreSide second(other_pool(folder, "second"), place_in(folder));
    CHECK(second.store->info().took_over);
    CHECK(second.store->clear(std::nullopt) == 0);
  }
  // The first pool still has the old index: it must not believe it.
  StoreSide back(folder.options(), place_in(folder));
  CHECK(back.store->info().took_over && !back.on_disk(keys[0]));
}

TEST(of_pools_that_open_a_store_at_once_exactly_one_gets_it) {
  for (int round = 0; round < 20; ++round) {
    const Folder folder;
    std::atomic<int> opened{0};
    std::atomic<int> refused{0};
    std::atomic<int> ready{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        ready.fetch_add(1);
        while (ready.load() < 3) std::this_thread::yield();
        try {
          const StoreSide side(other_pool(folder, "pool-" + std::to_string(i)), place_in(folder));
          opened.fetch_add(1);
          while (opened.load() + refused.load() < 3) std::this_thread::yield();
        } catch (const Error& error) {
          if (error.kind() == ErrorKind::store) refused.fetch_add(1);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(opened == 1 && refused == 2);
  }
}

TEST(processes_of_one_pool_that_open_a_store_at_once_all_get_it) {
  for (int round = 0; round < 20; ++round) {
    const Folder folder;
    const auto keep = Pool::open(folder.options());
    std::vector<std::thread> threads;
    std::atomic<int> created{0};
    std::atomic<int> opened{0};
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        try {
          StoreSide side(folder.options(), place_in(folder));
          created.fetch_add(side.store->info().created ? 1 : 0);
          const auto keys = random_keys(3, static_cast<std::uint64_t>(i) + 1);
          const bool all_served = despite_timeouts(*side.pool, [&] {
            static_cast<void>(side.append(keys));
            return side.count_served(keys) == 3;
          });
          opened.fetch_add(all_served ? 1 : 0);
        } catch (const std::exception& error) {
          std::printf("        %s\n", error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(created == 1 && opened == 3);
    require_sound(*keep);
  }
}

TEST(another_size_is_refused_naming_both_and_no_size_takes_what_is_there) {
  const Folder folder;
  static_cast<void>(left_behind(folder, 1));
  StorePlace place = place_in(folder);
  place.bytes = 8 * kMiB;
  CHECK(refusal(folder.options(), place) == ErrorKind::size);
  place.bytes.reset();
  const StoreSide side(folder.options(), place);
  CHECK(side.store->info().storage_bytes == kStoreBytes);
}

TEST(a_store_too_small_for_its_blocks_is_refused) {
  const Folder folder;
  StorePlace place = place_in(folder);
  place.bytes = 2 * kMiB;
  place.block_bytes = 200'000;
  CHECK(refusal(folder.options(), place) == ErrorKind::size);
}

TEST(blocks_too_large_for_a_region_are_refused_and_counted) {
  const Folder folder;
  StoreSide side(folder.options(), place_in(folder));
  CHECK(side.store->info().block_bytes_max < 100'000);
  StoreSide large(folder.options(), place_in(folder));
  large.index = large.pool->add_namespace(identity(2), {}, 100'000);
  large.block_bytes = 100'000;
  const auto keys = random_keys(1);
  CHECK(large.append(keys).refused == 1);
  CHECK(large.store->counters().refused_blocks == 1);
}

TEST(a_store_of_a_newer_version_is_refused_and_left_as_it_is) {
  const Folder folder;
  static_cast<void>(left_behind(folder, 2));
  const std::string header = place_in(folder).directory + "/store.hpkv";
  const char version = 2;
  overwrite(header, 8, std::span(&version, 1));
  const std::uint64_t before = bytes_in(place_in(folder).directory);
  CHECK(refusal(other_pool(folder, "second"), place_in(folder)) == ErrorKind::version);
  CHECK(bytes_in(place_in(folder).directory) == before);
}

TEST(a_damaged_or_truncated_header_is_refused) {
  const Folder folder;
  static_cast<void>(left_behind(folder, 2));
  const std::string header = place_in(folder).directory + "/store.hpkv";
  flip(header, 40);
  CHECK(refusal(other_pool(folder, "second"), place_in(folder)) == ErrorKind::garbage);
  std::filesystem::resize_file(header, 100);
  CHECK(refusal(other_pool(folder, "second"), place_in(folder)) == ErrorKind::garbage);
}

TEST(a_store_whose_header_was_deleted_is_made_anew_within_its_size) {
  const Folder folder;
  const auto keys = left_behind(folder, 8);
  std::filesystem::remove(place_in(folder).directory + "/store.hpkv");
  StoreSide side(other_pool(folder, "second"), place_in(folder));
  CHECK(side.store->info().created);
  CHECK(std::filesystem::is_empty(place_in(folder).directory + "/regions"));
  side.recover_all();
  CHECK(side.count_served(keys) == 0);
}

TEST(a_directory_that_others_may_write_to_or_that_is_a_link_is_refused) {
  const Folder folder;
  static_cast<void>(left_behind(folder, 1));
  const std::string directory = place_in(folder).directory;
  StorePlace link = place_in(folder);
  link.directory = folder.path() + "/link";
  std::filesystem::create_directory_symlink(directory, link.directory);
  CHECK(refusal(folder.options(), link) == ErrorKind::owner);
  std::filesystem::permissions(directory, std::filesystem::perms::all);
  CHECK(refusal(folder.options(), place_in(folder)) == ErrorKind::owner);
  std::filesystem::permissions(directory, std::filesystem::perms::owner_all);
  if (::geteuid() == 0) {
    CHECK(::chown(directory.c_str(), 12'345, 12'345) == 0);
    CHECK(refusal(folder.options(), place_in(folder)) == ErrorKind::owner);
    CHECK(::chown(directory.c_str(), 0, 0) == 0);
  }
  StorePlace missing = place_in(folder);
  missing.directory = folder.path() + "/no/such";
  CHECK(refusal(folder.options(), missing) == ErrorKind::missing);
}

TEST(temporary_files_of_the_dead_are_removed_at_the_next_start) {
  const Folder folder;
  static_cast<void>(left_behind(folder, 1));
  const std::string directory = place_in(folder).directory;
  const std::vector<std::string> strays = {directory + "/store.hpkv.new-123",
                                           directory + "/namespaces/ab.msgpack.new-9",
                                           directory + "/regions/00099.hpkv"};
  for (const std::string& stray : strays) std::ofstream(stray) << "x";
  const StoreSide side(other_pool(folder, "second"), place_in(folder));
  for (const std::string& stray : strays) CHECK(!std::filesystem::exists(stray));
}

}  // namespace hpkv::test

TEST_MAIN
