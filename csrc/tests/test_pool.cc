// The host pool by itself, in one process: what each call promises, with several threads where that
// matters. What needs death or other processes is in tests/crash.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "base/crc32c.h"
#include "shm/limits.h"
#include "shm/segments.h"
#include "shm/transfer.h"
#include "tests/check.h"
#include "tests/pool_rig.h"

namespace hpkv::test {

TEST(a_stored_block_is_read_back_and_another_key_is_a_miss) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 100'000);
  const auto keys = random_keys(2);
  CHECK(put_one(*pool, index, keys[0]) == PutStatus::stored);
  CHECK(put_one(*pool, index, keys[0]) == PutStatus::present);
  CHECK(holds(*pool, keys[0], 100'000));
  CHECK(!holds(*pool, keys[1], 100'000));
  require_sound(*pool);
}

TEST(keys_that_share_all_but_one_bit_are_different_blocks) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 4096);
  Key base = random_keys(1)[0];
  CHECK(put_one(*pool, index, base) == PutStatus::stored);
  for (std::size_t word = 0; word < 4; ++word) {
    Key other = base;
    other.words[word] ^= std::uint64_t{1} << 63U;
    CHECK(pool->lookup(std::span(&other, 1)) == 0);
    CHECK(put_one(*pool, index, other) == PutStatus::stored);
  }
  CHECK(holds(*pool, base, 4096));
  require_sound(*pool);
}

TEST(keys_that_crowd_one_bucket_make_the_table_grow_until_they_fit) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 4096);
  auto keys = random_keys(24);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    // One shard, and both buckets the same until a table has sixteen of them.
    keys[i].words[0] = keys[i].words[0] / 128 * 128;
    keys[i].words[1] = i / 8 << 3U;
    keys[i].words[2] = keys[i].words[1];
  }
  for (const Key& key : keys) CHECK(put_one(*pool, index, key) == PutStatus::stored);
  for (const Key& key : keys) CHECK(holds(*pool, key, 4096));
  require_sound(*pool);
}

TEST(lookup_and_pin_stop_at_the_first_gap) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 4096);
  const auto keys = random_keys(100);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i != 70) CHECK(put_one(*pool, index, keys[i]) == PutStatus::stored);
  }
  CHECK(pool->lookup(keys) == 70);
  std::vector<BlockRef> refs(keys.size());
  CHECK(pool->pin(keys, refs) == 70);
  CHECK(pool->stats().pinned == 70);
  pool->unpin(std::span<const BlockRef>(refs).first(70));
  CHECK(pool->stats().pinned == 0);
  CHECK(pool->lookup({}) == 0);
}

TEST(a_reserved_block_is_invisible_until_it_is_published) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 4096);
  const Key key = random_keys(1)[0];
  BlockRef ref;
  CHECK(pool->reserve(index, key, ref) == ReserveStatus::ok);
  BlockRef second;
  CHECK(pool->reserve(index, key, second) == ReserveStatus::busy);
  CHECK(pool->lookup(std::span(&key, 1)) == 0);
  CHECK(pool->pin(std::span(&key, 1), std::span(&second, 1)) == 0);
  require_sound(*pool);
  pool->abandon(ref);
  CHECK(pool->stats().writing == 0);
  CHECK(pool->reserve(index, key, ref) == ReserveStatus::ok);
  const auto bytes = payload_of(key, 4096);
  pool->publish(ref, copy_nt_crc32c(pool->payload(ref), bytes.data(), bytes.size()));
  CHECK(holds(*pool, key, 4096));
  require_sound(*pool);
}

TEST(eviction_takes_the_coldest_first_and_the_tail_of_a_prefix_before_its_head) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 128 * 1024);
  std::size_t capacity = 0;
  const auto keys = random_keys(400);
  while (pool->stats().evictions == 0)
    CHECK(put_one(*pool, index, keys[capacity++]) == PutStatus::stored);
  --capacity;  // the last one evicted keys[0]
  CHECK(pool->lookup(std::span(&keys[0], 1)) == 0);
  const auto prefix = std::span(keys).subspan(1, 20);
  CHECK(pool->touch(prefix) == 20);
  // Everything but the prefix is colder: it goes first, oldest first.
  for (std::size_t i = 0; i + 21 < capacity; ++i) {
    CHECK(put_one(*pool, index, keys[capacity + 1 + i]) == PutStatus::stored);
    CHECK(pool->lookup(std::span(&keys[21 + i], 1)) == 0);
    CHECK(pool->lookup(prefix) == 20);
  }
  // Then the prefix, from its end.
  CHECK(put_one(*pool, index, keys[399]) == PutStatus::stored);
  for (std::size_t left = 19; left > 10; --left) {
    CHECK(pool->lookup(prefix) <= left + 1);
    CHECK(put_one(*pool, index, random_keys(1, 1000 + left)[0]) == PutStatus::stored);
    const std::size_t run = pool->lookup(prefix);
    for (std::size_t i = run; i < prefix.size(); ++i)
      CHECK(pool->lookup(prefix.subspan(i, 1)) == 0);
  }
  require_sound(*pool);
}

TEST(evict_never_frees_a_pinned_block_and_a_pool_of_pinned_blocks_is_full) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 512 * 1024);
  const auto keys = random_keys(200);
  std::vector<BlockRef> refs;
  std::size_t stored = 0;
  while (put_one(*pool, index, keys[stored]) == PutStatus::stored) {
    BlockRef ref;
    CHECK(pool->pin(std::span(&keys[stored], 1), std::span(&ref, 1)) == 1);
    refs.push_back(ref);
    ++stored;
  }
  CHECK(stored >= 20);
  CHECK(pool->stats().evictions == 0);
  for (std::size_t i = 0; i < stored; ++i) CHECK(holds(*pool, keys[i], 512 * 1024));
  pool->unpin(std::span<const BlockRef>(refs).subspan(3, 1));
  CHECK(put_one(*pool, index, keys[stored]) == PutStatus::stored);
  CHECK(pool->lookup(std::span(&keys[3], 1)) == 0);
  CHECK(pool->lookup(std::span(&keys[0], 3)) == 3);
  require_sound(*pool);
  refs.erase(refs.begin() + 3);
  pool->unpin(refs);
}

TEST(a_block_pinned_twice_stays_until_the_second_unpin) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 4096);
  const Key key = random_keys(1)[0];
  CHECK(put_one(*pool, index, key) == PutStatus::stored);
  std::array<BlockRef, 2> refs;
  CHECK(pool->pin(std::span(&key, 1), std::span(&refs[0], 1)) == 1);
  CHECK(pool->pin(std::span(&key, 1), std::span(&refs[1], 1)) == 1);
  pool->unpin(std::span<const BlockRef>(&refs[0], 1));
  CHECK(pool->clear() == 0);
  CHECK(pool->lookup(std::span(&key, 1)) == 1);
  pool->unpin(std::span<const BlockRef>(&refs[1], 1));
  CHECK(pool->clear() == 1);
  CHECK(pool->lookup(std::span(&key, 1)) == 0);
}

TEST(a_flipped_byte_is_a_miss_and_the_place_returns) {
  const Folder folder;
  auto options = folder.options();
  options.verify_always = true;
  const auto pool = Pool::open(options);
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 8192);
  const Key key = random_keys(1)[0];
  CHECK(put_one(*pool, index, key) == PutStatus::stored);
  BlockRef ref;
  CHECK(pool->pin(std::span(&key, 1), std::span(&ref, 1)) == 1);
  pool->payload(ref)[5000] ^= std::byte{1};
  CHECK(!holds(*pool, key, 8192));
  CHECK(pool->stats().bad_checksums == 1);
  CHECK(pool->lookup(std::span(&key, 1)) == 0);
  require_sound(*pool);
  pool->unpin(std::span<const BlockRef>(&ref, 1));
  CHECK(put_one(*pool, index, key) == PutStatus::stored);
  CHECK(holds(*pool, key, 8192));
  require_sound(*pool);
}

TEST(a_block_counts_as_verified_until_the_epoch_rises) {
  const Folder folder;
  auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 8192);
  const Key key = random_keys(1)[0];
  CHECK(put_one(*pool, index, key) == PutStatus::stored);
  const std::uint32_t epoch = pool->epoch();
  pool.reset();
  pool = Pool::open(folder.options());  // the first client of an existing pool
  CHECK(pool->info().adopted);
  CHECK(pool->epoch() == epoch + 1);
  BlockRef ref;
  CHECK(pool->pin(std::span(&key, 1), std::span(&ref, 1)) == 1);
  CHECK(!pool->verified(ref));
  CHECK(verify(*pool, ref));
  CHECK(pool->verified(ref));
  const auto second = Pool::open(folder.options());
  CHECK(pool->epoch() == epoch + 1);
  pool->unpin(std::span<const BlockRef>(&ref, 1));
}

TEST(segments_change_class_when_another_size_needs_the_room) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t small = pool->add_namespace(identity(1), {}, 16 * 1024);
  const std::uint32_t large = pool->add_namespace(identity(2), {}, 1024 * 1024);
  const auto keys = random_keys(3000);
  for (std::size_t i = 0; i < 1500; ++i) CHECK(put_one(*pool, small, keys[i]) == PutStatus::stored);
  for (std::size_t i = 1500; i < 1530; ++i)
    CHECK(put_one(*pool, large, keys[i]) == PutStatus::stored);
  CHECK(holds(*pool, keys[1529], 1024 * 1024));
  CHECK(holds(*pool, keys[1528], 1024 * 1024));
  require_sound(*pool);
  for (std::size_t i = 1530; i < 3000; ++i)
    CHECK(put_one(*pool, small, keys[i]) == PutStatus::stored);
  std::size_t held = 0;
  for (std::size_t i = 1530; i < 3000; ++i) held += holds(*pool, keys[i], 16 * 1024) ? 1U : 0U;
  CHECK(held > 500);  // it won back more than a segment or two
  require_sound(*pool);
}

TEST(a_run_of_the_other_class_with_a_pinned_block_stays) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t small = pool->add_namespace(identity(1), {}, 16 * 1024);
  const std::uint32_t large = pool->add_namespace(identity(2), {}, 1024 * 1024);
  const auto keys = random_keys(1600);
  std::vector<BlockRef> refs(1500);
  std::size_t pinned = 0;
  for (std::size_t i = 0; i < 1500; ++i) {
    if (put_one(*pool, small, keys[i]) != PutStatus::stored) break;
    pinned += pool->pin(std::span(&keys[i], 1), std::span(&refs[i], 1));
  }
  CHECK(put_one(*pool, large, keys[1500]) == PutStatus::full);
  for (std::size_t i = 0; i < pinned; ++i) CHECK(holds(*pool, keys[i], 16 * 1024));
  require_sound(*pool);
  pool->unpin(std::span<const BlockRef>(refs).first(pinned));
}

TEST(unpublished_blocks_of_one_client_are_limited) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 256 * 1024);
  const auto keys = random_keys(100);
  std::vector<BlockRef> refs;
  ReserveStatus status = ReserveStatus::ok;
  for (const Key& key : keys) {
    BlockRef ref;
    status = pool->reserve(index, key, ref);
    if (status != ReserveStatus::ok) break;
    refs.push_back(ref);
  }
  CHECK(status == ReserveStatus::busy);
  CHECK(refs.size() == 16 * kMiB / 8 / (256 * 1024));
  pool->abandon(refs.back());
  BlockRef ref;
  CHECK(pool->reserve(index, keys[50], ref) == ReserveStatus::ok);
  require_sound(*pool);
}

TEST(drop_namespace_leaves_other_namespaces_alone) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t a = pool->add_namespace(identity(1), {}, 4096);
  const std::uint32_t b = pool->add_namespace(identity(2), {}, 4096);
  const auto keys = random_keys(40);
  for (std::size_t i = 0; i < 40; ++i)
    CHECK(put_one(*pool, i % 2 == 0 ? a : b, keys[i]) == PutStatus::stored);
  CHECK(pool->drop_namespace(identity(1)) == 20);
  for (std::size_t i = 0; i < 40; ++i) CHECK(holds(*pool, keys[i], 4096) == (i % 2 == 1));
  const auto infos = pool->namespaces();
  CHECK(infos.size() == 2 && infos[0].blocks == 0 && infos[1].blocks == 20);
  require_sound(*pool);
}

TEST(a_namespace_table_full_of_unused_names_takes_a_new_one) {
  const Folder folder;
  {
    const auto pool = Pool::open(folder.options());
    for (int i = 0; i < 128; ++i) static_cast<void>(pool->add_namespace(identity(i), {}, 4096));
    CHECK_THROWS(pool->add_namespace(identity(200), {}, 4096));
  }
  const auto pool = Pool::open(folder.options());
  CHECK(pool->block_bytes(pool->add_namespace(identity(200), {}, 8192)) == 8192);
  CHECK_THROWS(pool->add_namespace(identity(200), {}, 4096));
}

TEST(threads_that_put_get_pin_and_touch_the_same_keys_never_see_wrong_bytes) {
  const Folder folder;
  auto options = folder.options();
  options.maintenance = true;
  const auto pool = Pool::open(options);
  const std::array<std::uint32_t, 2> index = {pool->add_namespace(identity(1), {}, 4096),
                                              pool->add_namespace(identity(2), {}, 300 * 1024)};
  const auto keys = random_keys(4000);
  std::atomic<int> wrong{0};
  const auto work = [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int step = 0; step < 1500; ++step) {
      const std::size_t i = random() % keys.size();
      const std::size_t kind = i % 16 == 0 ? 1 : 0;
      const std::uint64_t bytes = pool->block_bytes(index[kind]);
      const auto run = std::span(keys).subspan(i, std::min<std::size_t>(8, keys.size() - i));
      std::vector<std::byte> out(bytes);
      std::vector<BlockRef> refs(run.size());
      switch (random() % 5) {
        case 0:
          if (get(*pool, keys[i], out) && out != payload_of(keys[i], bytes)) ++wrong;
          break;
        case 1:
          pool->unpin(std::span<const BlockRef>(refs).first(pool->pin(run, refs)));
          break;
        case 2:
          pool->touch(run);
          static_cast<void>(pool->lookup(run));
          break;
        default:
          static_cast<void>(put_one(*pool, index[kind], keys[i]));
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(!pool->poisoned());
  CHECK(pool->stats().pinned == 0);
  CHECK(pool->stats().writing == 0);
  require_sound(*pool);
}

TEST(a_pool_that_its_file_system_or_memory_limit_cannot_hold_is_refused_with_the_remedy) {
  const Folder folder;
  const std::string proc = folder.path() + "/proc";
  const std::string group = folder.path() + "/cgroup/outer/inner";
  std::filesystem::create_directories(proc + "/self");
  std::filesystem::create_directories(group);
  std::ofstream(proc + "/self/cgroup") << "0::/outer/inner\n";
  std::ofstream(group + "/memory.max") << "max\n";
  std::ofstream(folder.path() + "/cgroup/outer/memory.max") << 20 * kMiB << "\n";
  auto options = folder.options(32 * kMiB);
  options.proc_root = proc;
  options.cgroup_root = folder.path() + "/cgroup";
  try {
    static_cast<void>(Pool::open(options));
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::space);
    CHECK(std::strstr(error.what(), "outer/memory.max") != nullptr);
    CHECK(std::strstr(error.what(), "--shm-size") != nullptr);
  }
  options.pool_bytes = 16 * kMiB;
  CHECK(Pool::open(options)->info().pool_bytes == 16 * kMiB);
  CHECK_THROWS(Pool::open(folder.options(std::uint64_t{1} << 50U)));
}

TEST(over_the_memory_limit_a_pool_is_full_and_keeps_serving) {
  const Folder folder;
  const std::string proc = folder.path() + "/proc";
  std::filesystem::create_directories(proc + "/self");
  std::filesystem::create_directories(folder.path() + "/cgroup");
  std::ofstream(proc + "/self/cgroup") << "0::/\n";
  std::ofstream(folder.path() + "/cgroup/memory.max") << 64 * kMiB << "\n";
  std::ofstream(folder.path() + "/cgroup/memory.current") << 10 * kMiB << "\n";
  auto options = folder.options();
  options.proc_root = proc;
  options.cgroup_root = folder.path() + "/cgroup";
  const auto pool = Pool::open(options);
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 256 * 1024);
  const auto keys = random_keys(50);
  CHECK(put_one(*pool, index, keys[0]) == PutStatus::stored);
  const std::uint64_t reserved = pool->stats().reserved_bytes;
  std::ofstream(folder.path() + "/cgroup/memory.current") << 63 * kMiB << "\n";
  for (const Key& key : keys) CHECK(put_one(*pool, index, key) != PutStatus::busy);
  CHECK(pool->stats().reserved_bytes == reserved);
  CHECK(pool->stats().evictions > 0);  // it goes on with what it has
  CHECK(holds(*pool, keys[49], 256 * 1024));
  // A size of block that has no place yet takes the memory of another.
  const std::uint32_t other = pool->add_namespace(identity(2), {}, 64 * 1024);
  const auto small = random_keys(1, 3);
  CHECK(put_one(*pool, other, small[0]) == PutStatus::stored);
  CHECK(holds(*pool, small[0], 64 * 1024) && pool->stats().reserved_bytes == reserved);
  // File cache counts against a limit, and is given up before it is hit.
  std::ofstream(folder.path() + "/cgroup/memory.stat")
      << "anon 1000\nfile 40000000\nactive_file " << 20 * kMiB << "\ninactive_file " << 10 * kMiB
      << "\n";
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // a refusal holds for a second
  for (const Key& key : random_keys(50, 2)) CHECK(put_one(*pool, index, key) != PutStatus::busy);
  CHECK(pool->stats().reserved_bytes > reserved);
}

TEST(index_memory_goes_on_in_a_new_segment_when_one_is_used_up) {
  const Folder folder;
  const auto options = folder.options();
  constexpr std::uint64_t kTableBytes = 64 * 1024;
  {
    shm::Core core(shm::attach(options), options);
    shm::Segments segments(core);
    std::set<std::uint64_t> offsets;
    for (int i = 0; i < 40; ++i) {  // two and a half segments
      const auto offset = segments.take_index_memory(kTableBytes);
      CHECK(offset.has_value());
      CHECK(*offset + kTableBytes <= core.super().pool_bytes);
      const auto next = offsets.lower_bound(*offset);
      CHECK(next == offsets.end() || *offset + kTableBytes <= *next);
      CHECK(next == offsets.begin() || *std::prev(next) + kTableBytes <= *offset);
      offsets.insert(*offset);
    }
    require_sound(*Pool::open(folder.options()));
  }
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 4096);
  for (const Key& key : random_keys(2000)) CHECK(put_one(*pool, index, key) == PutStatus::stored);
  require_sound(*pool);
}

TEST(every_block_up_to_an_eighth_of_the_pool_fits_and_a_larger_one_is_refused) {
  for (const std::uint64_t mib : {std::uint64_t{16}, std::uint64_t{17}, std::uint64_t{40}}) {
    const Folder folder;
    const auto pool = Pool::open(folder.options(mib * kMiB));
    const std::uint64_t most = mib * kMiB / 8;
    const std::uint32_t index = pool->add_namespace(identity(1), {}, most);
    const auto keys = random_keys(3);
    for (const Key& key : keys) CHECK(put_one(*pool, index, key) == PutStatus::stored);
    CHECK(holds(*pool, keys[2], most));
    CHECK_THROWS(pool->add_namespace(identity(2), {}, most + 1));
    require_sound(*pool);
  }
}

TEST(dropping_keys_takes_those_that_are_unpinned_and_no_others) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  const std::uint32_t index = pool->add_namespace(identity(1), {}, 5000);
  const auto keys = random_keys(8);
  for (std::size_t i = 0; i < 6; ++i) CHECK(put_one(*pool, index, keys[i]) == PutStatus::stored);
  BlockRef pinned;
  CHECK(pool->pin({&keys[1], 1}, {&pinned, 1}) == 1);
  BlockRef writing;
  CHECK(pool->reserve(index, keys[6], writing) == ReserveStatus::ok);
  // 1 is pinned, 6 is being written, 7 is not there.
  const std::vector<Key> chosen = {keys[1], keys[2], keys[4], keys[6], keys[7]};
  CHECK(pool->drop(chosen) == 2);
  CHECK(pool->drop(chosen) == 0);
  for (const std::size_t kept : {0, 1, 3, 5}) CHECK(holds(*pool, keys[kept], 5000));
  for (const std::size_t gone : {2, 4}) CHECK(pool->lookup({&keys[gone], 1}) == 0);
  pool->abandon(writing);
  pool->unpin({&pinned, 1});
  CHECK(pool->drop({&keys[1], 1}) == 1);
  // Their places are free for others, and the keys may come back.
  for (const Key& key : keys) CHECK(put_one(*pool, index, key) != PutStatus::full);
  for (const Key& key : keys) CHECK(holds(*pool, key, 5000));
  require_sound(*pool);
}

TEST(a_known_namespace_is_described_and_an_unknown_one_is_not) {
  const Folder folder;
  const auto pool = Pool::open(folder.options());
  CHECK(pool->known_namespaces().empty());
  const std::string text = "what it is";
  const std::uint32_t first = pool->add_namespace(identity(1), {}, 5000);
  const std::uint32_t second =
      pool->add_namespace(identity(2), std::as_bytes(std::span(text)), 6000);
  CHECK(pool->known_namespaces() == std::vector({identity(1), identity(2)}));
  const auto found = pool->describe(identity(2));
  CHECK(found && found->first == second && first != second);
  CHECK(found->second.descriptor == text && found->second.block_bytes == 6000);
  CHECK(!pool->describe(identity(3)));
  pool->close();
  CHECK(!pool->describe(identity(2)) && pool->known_namespaces().empty());
}

}  // namespace hpkv::test

TEST_MAIN
