// A disk that fails for a moment, or is full, costs nothing that it will give again: what nobody
// could look at stays unknown until somebody can, and what is not synced keeps its old place. Nor
// does an index without memory cost more than it must.
#include <algorithm>

#include "shm/segments.h"
#include "tests/store_rig.h"

namespace hpkv::test {

using disk::RegionState;

constexpr std::uint64_t kStride = 20'480;
constexpr std::int64_t kRest = 31 * kSecond;  // after it, recovery tries again

// A store behind a hook, with a clock of its own.
struct FaultyPlace {
  explicit FaultyPlace(const Folder& folder) : place(place_in(folder)) {
    files = std::make_shared<FaultyFiles>(place.files);
    place.files = files;
    place.clock = [now = now] { return *now; };
  }
  void pass(std::int64_t ns) { *now += ns; }

  StorePlace place;
  std::shared_ptr<FaultyFiles> files;
  std::shared_ptr<std::int64_t> now = std::make_shared<std::int64_t>(kSecond);
};

// ---- what could not be looked at ----

TEST(a_descriptor_that_cannot_be_read_now_costs_no_block) {
  const Folder folder;
  const auto keys = left_behind(folder, 4);
  FaultyPlace faulty(folder);
  StoreSide side(other_pool(folder, "second"), faulty.place, 2);
  faulty.files->fail(FileCall::read, EIO, "/namespaces/");
  side.recover_all();
  CHECK(side.regions_in(RegionState::unknown) == 1 && side.count_served(keys) == 0);
  CHECK(side.store->counters().read_errors == 1);
  faulty.files->set_hook({});
  // Others write as much as they like meanwhile.
  const auto others = random_keys(2 * side.records_per_region(), 9);
  CHECK(side.append(others).written == others.size());
  faulty.pass(kRest);
  side.recover_all();
  CHECK(side.regions_in(RegionState::unknown) == 0 && side.count_served(keys) == 4);
  require_sound(*side.pool);
}

TEST(a_table_of_namespaces_that_is_full_for_now_costs_no_block) {
  const Folder folder;
  const auto keys = left_behind(folder, 4);
  FaultyPlace faulty(folder);
  StoreSide side(other_pool(folder, "second"), faulty.place, 2);
  auto crowd = Pool::open(other_pool(folder, "second"));
  for (std::uint32_t i = 1; i < shm::kNamespaceCount; ++i) {
    static_cast<void>(crowd->add_namespace(identity(static_cast<int>(100 + i)), {}, 4096));
  }
  side.recover_all();
  CHECK(side.regions_in(RegionState::unknown) == 1 && side.count_served(keys) == 0);
  crowd.reset();
  faulty.pass(kRest);
  side.recover_all();
  CHECK(side.count_served(keys) == 4);
  require_sound(*side.pool);
}

TEST(a_region_is_not_gone_on_with_before_all_of_it_was_looked_at) {
  const Folder folder;
  const auto keys = left_behind(folder, 3);
  FaultyPlace faulty(folder);
  StoreSide side(other_pool(folder, "second"), faulty.place);
  int reads = 0;  // its header, the place of a summary, the records one by one
  faulty.files->set_hook([&](FileCall call, const std::string& path) {
    const bool ours = call == FileCall::read && path.ends_with("/regions/00000.hpkv");
    return ours && ++reads == 4 ? -EIO : 0;
  });
  side.recover_all();
  CHECK(reads > 4 && side.regions_in(RegionState::unknown) == 1);
  CHECK(side.serves(keys[0]) && !side.on_disk(keys[1]) && side.serves(keys[2]));
  const Key more = random_keys(1, 9)[0];
  disk::DiskRef ref;
  CHECK(side.append_one(more).written == 1 && side.catalog->find(more, ref) && ref.region != 0);
  require_sound(*side.pool);
  faulty.pass(kRest);
  side.recover_all();
  CHECK(side.count_served(keys) == 3 && side.catalog->region(0).state == RegionState::open);
  require_sound(*side.pool);
}

TEST(a_directory_that_is_away_for_a_while_costs_no_block) {
  const Folder folder;
  const auto keys = left_behind(folder, 8);
  FaultyPlace faulty(folder);
  StoreSide side(other_pool(folder, "second"), faulty.place);
  std::filesystem::rename(faulty.place.directory, folder.path() + "/away");
  side.recover_all();
  CHECK(side.regions_in(RegionState::unknown) == side.catalog->region_count());
  std::filesystem::rename(folder.path() + "/away", faulty.place.directory);
  faulty.pass(kRest);
  side.recover_all();
  CHECK(side.count_served(keys) == 8 && side.regions_in(RegionState::unknown) == 0);
}

std::string descriptor_file(const Folder& folder) {
  const std::filesystem::directory_iterator files(place_in(folder).directory + "/namespaces");
  return files->path();
}

TEST(a_damaged_descriptor_is_written_anew_before_the_next_block_of_its_namespace) {
  const Folder folder;
  static_cast<void>(left_behind(folder, 1));
  flip(descriptor_file(folder), 40);
  const auto keys = random_keys(2, 9);
  {
    FaultyPlace faulty(folder);
    StoreSide side(other_pool(folder, "second"), faulty.place);
    CHECK(side.append_one(keys[0]).written == 1);
    int reads = 0;
    faulty.files->set_hook([&](FileCall call, const std::string& path) {
      reads += call == FileCall::read && path.find("/namespaces/") != std::string::npos ? 1 : 0;
      return 0;
    });
    CHECK(side.append_one(keys[1]).written == 1);
    CHECK(reads == 0);  // once is enough
  }
  StoreSide side(other_pool(folder, "third"), place_in(folder));
  side.recover_all();
  CHECK(side.count_served(keys) == 2);
}

TEST(a_descriptor_that_cannot_be_read_is_written_anew_too) {
  const Folder folder;
  static_cast<void>(left_behind(folder, 1));
  const auto keys = random_keys(1, 9);
  {
    FaultyPlace faulty(folder);
    StoreSide side(other_pool(folder, "second"), faulty.place);
    const auto before =
        std::filesystem::last_write_time(descriptor_file(folder)) - std::chrono::hours(1);
    std::filesystem::last_write_time(descriptor_file(folder), before);
    faulty.files->fail(FileCall::read, EIO, "/namespaces/");
    CHECK(side.append(keys).written == 1);
    CHECK(std::filesystem::last_write_time(descriptor_file(folder)) != before);
  }
  StoreSide side(other_pool(folder, "third"), place_in(folder));
  side.recover_all();
  CHECK(side.count_served(keys) == 1);
}

TEST(a_file_system_that_does_not_say_what_is_free_makes_nothing_go_and_nothing_grow) {
  const Folder folder;
  FaultyPlace faulty(folder);
  StoreSide side(folder.options(), faulty.place);
  const std::uint32_t each = side.records_per_region();
  const auto keys = random_keys(7 * each);
  CHECK(side.append(std::span(keys).first(3 * each)).written == 3 * each);
  const std::string regions = faulty.place.directory + "/regions";
  const std::uint64_t before = bytes_in(regions);
  faulty.files->fail(FileCall::space, EIO);
  CHECK(side.store->tend() == EIO);
  CHECK(side.store->counters().regions_removed == 0 && side.store->counters().read_errors == 1);
  CHECK(side.count_served(std::span(keys).first(3 * each)) == 3 * each);
  // It goes on in the regions that it has.
  CHECK(side.append(std::span(keys).subspan(3 * each, each)).written == each);
  CHECK(bytes_in(regions) == before);
  faulty.files->set_hook({});
  CHECK(side.store->tend() == 0);
  CHECK(side.append(std::span(keys).last(3 * each)).written == 3 * each);
  CHECK(bytes_in(regions) > before);
}

// ---- what is not synced ----

TEST(a_region_goes_only_after_what_was_carried_out_of_it_is_synced) {
  const Folder folder;
  FaultyPlace faulty(folder);
  std::optional<StoreSide> side(std::in_place, folder.options(), faulty.place);
  const std::uint32_t each = side->records_per_region();
  const auto keys = random_keys(3 * each + 1);
  CHECK(side->append(keys).written == keys.size());
  CHECK(side->pool->clear() > 0);  // a block that is in the pool is not worth carrying
  const auto touch = [&](const Key& key) {
    disk::DiskRef ref;
    CHECK(side->catalog->find(key, ref));
    side->catalog->touch(std::span(&ref, 1));
  };
  touch(keys[0]);
  faulty.files->fail(FileCall::sync, EIO, "/regions/");
  CHECK(!side->store->make_room(kStride) && !side->store->make_room(kStride));
  CHECK(side->store->tend() == EIO);
  CHECK(side->store->counters().carried_blocks == 1 && side->serves(keys[0]));
  CHECK(side->catalog->region(0).state == RegionState::dropping);
  CHECK(side->regions_in(RegionState::sealed) == 2);
  faulty.files->set_hook({});
  CHECK(side->store->tend() == 0);
  CHECK(side->catalog->region(0).state == RegionState::free);
  CHECK(side->serves(keys[0]) && !side->on_disk(keys[1]));
  // Who leaves meanwhile leaves the old place to the next.
  touch(keys[each]);
  faulty.files->fail(FileCall::sync, EIO, "/regions/");
  CHECK(!side->store->make_room(kStride));
  side.emplace(folder.options(), faulty.place);
  CHECK(side->catalog->region(1).state == RegionState::sealed);
  CHECK(side->serves(keys[each]) && side->serves(keys[each + 1]));
  require_sound(*side->pool);
}

TEST(a_region_that_cannot_be_read_keeps_no_block_from_being_carried_over) {
  const Folder folder;
  static_cast<void>(left_behind(folder, 4));
  std::filesystem::remove(region_file(folder, 0));
  std::filesystem::create_symlink("/dev/zero", region_file(folder, 0));
  StoreSide side(other_pool(folder, "second"), place_in(folder));
  side.recover_all();
  CHECK(side.regions_in(RegionState::unknown) == 1);
  const std::uint64_t places =
      std::uint64_t{side.store->info().region_count} * side.records_per_region();
  const auto keys = random_keys(2 * places, 9);
  for (const Key& key : keys) {
    CHECK(side.append_one(key).written == 1);
    CHECK(side.pool->clear() > 0);
    disk::DiskRef ref;
    if (side.catalog->find(keys[0], ref)) side.catalog->touch(std::span(&ref, 1));
  }
  CHECK(side.serves(keys[0]) && !side.on_disk(keys[1]));
}

TEST(what_is_added_to_a_region_that_was_nearly_sealed_is_found_again) {
  const Folder folder;
  constexpr std::size_t kOrphans = 5;  // more than a store this small keeps
  const auto keys = random_keys(kOrphans + 1);
  FaultyPlace faulty(folder);
  {
    std::vector<std::unique_ptr<StoreSide>> sides;
    for (std::size_t i = 0; i < kOrphans; ++i) {
      sides.push_back(std::make_unique<StoreSide>(folder.options(), place_in(folder)));
      CHECK(sides.back()->append_one(keys[i]).written == 1);
    }
    StoreSide side(folder.options(), faulty.place);
    sides.clear();
    faulty.files->set_hook(no_sync_after_a_write());
    CHECK(side.store->tend() == EIO);
    CHECK(side.regions_in(RegionState::open) == kOrphans);
    faulty.files->set_hook({});
    CHECK(side.append_one(keys.back()).written == 1);
    disk::DiskRef ref;
    CHECK(side.catalog->find(keys.back(), ref) && ref.region == 0 && ref.number == 1);
    CHECK(side.store->sync_aged(true) == 0);
  }
  StoreSide side(other_pool(folder, "second"), place_in(folder));
  side.recover_all();
  CHECK(side.count_served(keys) == keys.size());
}

// ---- what the index has no memory for ----

namespace {

// Takes what the index of this pool may still take for entries: a quarter of the segments.
void use_up_memory_for_entries(const PoolOptions& options) {
  shm::Core core(shm::attach(options), options);
  shm::Segments segments(core);
  const shm::Superblock& super = core.super();
  const auto index_segments = [&] {
    std::uint64_t count = 0;
    for (std::uint64_t i = 0; i < super.segment_count; ++i) {
      const std::uint64_t word = core.view.segment(i).word.load();
      count += shm::SegmentWord::kind(word) == shm::SegmentKind::index ? 1 : 0;
    }
    return count;
  };
  while (index_segments() < super.segment_count / 4 ||
         super.index_cursor.load() + 512 <= super.segment_bytes) {
    CHECK(segments.take_index_memory(512).has_value());
  }
}

}  // namespace

TEST(a_size_of_block_that_the_index_has_no_memory_for_costs_one_region_of_another_and_not_all) {
  const Folder folder;
  StoreSide large(folder.options(), place_in(folder));
  const std::uint64_t each = large.records_per_region();
  const auto keys = random_keys(large.store->info().region_count * each);
  const auto half = std::span(keys).first(keys.size() - each / 2 - 1);
  for (const Key& key : half) CHECK(large.append_one(key).written == 1);
  CHECK(large.count_served(half) == half.size());
  use_up_memory_for_entries(folder.options());
  StorePlace place = place_in(folder);
  place.block_bytes = 3000;
  StoreSide small(folder.options(), place, 2);
  for (const Key& key : random_keys(8, 2)) {
    const auto result = small.append_one(key);
    CHECK(result.written == 0 && result.no_room);
  }
  CHECK(small.store->counters().regions_evicted == 1);
  CHECK(large.count_served(half) >= half.size() - each);
  // The size that has places goes on with what it has.
  const auto more = std::span(keys).subspan(half.size());
  for (const Key& key : more) CHECK(large.append_one(key).written == 1);
  CHECK(large.count_served(more) == more.size());
  require_sound(*large.pool);
}

TEST(an_open_region_that_has_too_few_places_is_not_sealed_for_a_smaller_size) {
  for (const bool own : {false, true}) {
    const Folder folder;
    const auto pool = Pool::open(folder.options());
    auto large = std::make_unique<StoreSide>(folder.options(), place_in(folder));
    CHECK(large->append_one(random_keys(1)[0]).written == 1);
    constexpr std::uint32_t region = 0;
    CHECK(large->catalog->region(region).state == RegionState::open);
    use_up_memory_for_entries(folder.options());
    const std::uint32_t small = large->pool->add_namespace(identity(2), {}, 3000);
    if (!own) {
      large.reset();  // it is nobody's then
      large = std::make_unique<StoreSide>(folder.options(), place_in(folder));
    }
    const Key key = random_keys(1, 2)[0];
    CHECK(put_one(*large->pool, small, key) == PutStatus::stored);
    std::vector<BlockRef> refs(1);
    CHECK(large->pool->pin({&key, 1}, refs) == 1);
    const auto result = large->store->append(small, refs, {&key, 1});
    large->pool->unpin(refs);
    CHECK(result.written == 0 && result.no_room);
    CHECK(large->catalog->region(region).state == RegionState::open);
  }
}

}  // namespace hpkv::test

TEST_MAIN
