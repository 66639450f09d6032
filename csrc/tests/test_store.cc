// The disk tier of one process: promotion, demotion, and what both do when the disk fails or hangs.
#include <algorithm>
#include <fstream>
#include <latch>
#include <thread>

#include "base/crc32c.h"
#include "tests/tier_rig.h"

namespace hpkv::test {

TEST(demoted_blocks_come_back_with_their_bytes_pinned_until_the_ticket_lets_go) {
  Rig rig;
  const auto keys = rig.on_disk_only(40);
  CHECK(rig.own.pool->lookup(keys) == 0 && rig.own.store->lookup(keys) == 40);
  const auto ticket = rig.own.promoted(keys);
  CHECK(ticket->count() == 40 && ticket->from_disk_count() == 40);
  for (const Key& key : keys) CHECK(holds(*rig.own.pool, key, kBlock));
  CHECK(rig.own.pool->clear() == 0);
  CHECK(rig.own.store->stats().promote_pinned_bytes == 40 * kStride);
  ticket->release();
  CHECK(rig.own.store->stats().promote_pinned_bytes == 0);
  CHECK(rig.own.pool->clear() == 40);
  require_sound(*rig.own.pool);
}

TEST(a_promotion_pins_what_the_pool_has_and_reads_only_the_rest_up_to_the_first_gap) {
  Rig rig;
  auto keys = rig.on_disk_only(30);
  // 5 to 9 in both tiers, 12 in the pool only, 20 nowhere.
  const auto some = std::span(keys).subspan(5, 5);
  CHECK(rig.own.promoted(some)->count() == 5);
  keys[12] = random_keys(1, 7)[0];
  CHECK(put_one(*rig.own.pool, rig.own.index, keys[12]) == PutStatus::stored);
  keys[20] = random_keys(1, 8)[0];
  const auto ticket = rig.own.promoted(keys);
  CHECK(ticket->count() == 20 && ticket->from_disk_count() == 14);
  CHECK(rig.own.pool->lookup(keys) == 20);
  CHECK(rig.own.store->lookup(keys) == 20);
}

TEST(the_tail_of_what_was_promoted_is_evicted_before_its_head) {
  Rig rig;
  const auto keys = rig.on_disk_only(100);
  rig.own.promoted(keys)->release();
  std::uint64_t seed = 100;
  while (rig.own.pool->lookup(keys) == 100) {
    CHECK(put_one(*rig.own.pool, rig.own.index, random_keys(1, seed++)[0]) == PutStatus::stored);
  }
  CHECK(rig.own.pool->lookup(keys) >= 98);
}

TEST(asking_and_promoting_call_no_file_on_the_threads_that_ask) {
  Rig rig;
  const auto keys = rig.on_disk_only(40);
  const std::thread::id asking = std::this_thread::get_id();
  std::atomic<int> elsewhere{0};
  std::atomic<int> here{0};
  rig.files->set_hook([&, asking](FileCall, const std::string&) {
    ++(std::this_thread::get_id() == asking ? here : elsewhere);
    return 0;
  });
  for (int round = 0; round < 20; ++round) {
    CHECK(rig.own.store->lookup(keys) == 40);
    const auto ticket = rig.own.promoted(keys);
    CHECK(ticket->count() == 40);
    ticket->cancel();
    ticket->release();
    CHECK(rig.own.pool->clear() == 40);
  }
  rig.files->set_hook({});
  CHECK(here == 0);
  CHECK(elsewhere >= 20);  // the hook sees what the threads do
}

TEST(a_disk_that_hangs_holds_nobody_who_asks_and_is_asked_nothing_new) {
  Rig rig;
  const auto keys = rig.on_disk_only(10);
  rig.hang(FileCall::read);
  const auto stuck = rig.own.store->promote(rig.own.index, keys);
  rig.door->await_somebody();
  CHECK(!stuck->done());
  rig.pass(30 * kSecond);
  CHECK(rig.own.store->stats().reading_hangs);
  const auto refused = rig.own.store->promote(rig.own.index, keys);
  CHECK(refused->done() && refused->count() == 0);
  CHECK(rig.own.store->lookup(keys) == 10);
  // The request's deadline: nothing more comes for it, whatever the disk does.
  stuck->cancel();
  CHECK(stuck->done() && stuck->count() == 0);
  CHECK(notices(*rig.own.store).size() == 1);
  // What others do with the pool goes on.
  CHECK(put_one(*rig.own.pool, rig.own.index, random_keys(1, 5)[0]) == PutStatus::stored);
  rig.door->open();
  const auto give_up = std::chrono::steady_clock::now() + kLong;
  while (rig.own.promote_and_let_go(keys) < 10) {  // until the stuck call has returned
    CHECK(std::chrono::steady_clock::now() < give_up);
  }
  const auto lines = notices(*rig.own.store);
  CHECK(lines.size() == 1 && lines[0].find("no longer hangs") != std::string::npos);
  require_sound(*rig.own.pool);
}

TEST(a_full_queue_answers_at_once_with_nothing_and_is_used_again) {
  Rig rig;
  const auto keys = rig.on_disk_only(1);
  rig.hang(FileCall::read);
  std::vector<std::shared_ptr<PromoteTicket>> tickets;
  while (rig.own.store->stats().promotions_refused == 0)
    tickets.push_back(rig.own.store->promote(rig.own.index, keys));
  CHECK(tickets.back()->done() && tickets.back()->count() == 0);
  const auto open = static_cast<std::size_t>(
      std::ranges::count_if(tickets, [](const auto& ticket) { return !ticket->done(); }));
  CHECK(open >= 1024 && open <= 1024 + 2);  // two are with the threads
  rig.door->open();
  for (const auto& ticket : tickets) {
    CHECK(ticket->wait(kLong));
    ticket->release();
  }
  CHECK(rig.own.promoted(keys)->count() == 1);
  require_sound(*rig.own.pool);
}

TEST(a_disk_that_fails_is_left_alone_longer_each_time_and_comes_back_by_itself) {
  Rig rig;
  const auto keys = rig.on_disk_only(10);
  rig.files->fail(FileCall::read, EIO, "/regions/");
  CHECK(rig.own.promoted(keys)->count() == 0);
  // Resting: refused at once, without asking the disk.
  const auto refused = [&] {
    const auto before = rig.own.store->stats();
    CHECK(rig.own.promoted(keys)->count() == 0);
    return rig.own.store->stats().promotions_refused == before.promotions_refused + 1;
  };
  CHECK(refused());
  rig.pass(kSecond);
  CHECK(!refused());  // the test, which fails
  rig.pass(kSecond);
  CHECK(refused());
  rig.pass(kSecond);
  CHECK(!refused());
  auto lines = notices(*rig.own.store);
  CHECK(lines.size() == 1 && lines[0].find("reading failed") != std::string::npos);
  rig.files->set_hook({});
  rig.pass(3 * kSecond);
  CHECK(refused());
  rig.pass(kSecond);
  CHECK(rig.own.promote_and_let_go(keys) == 10);
  lines = notices(*rig.own.store);
  CHECK(lines.size() == 1 && lines[0].find("reading works again") != std::string::npos);
  CHECK(rig.own.pool->stats().disk_errors >= 3);
  // And rests shortly again at the next failure.
  CHECK(rig.own.pool->clear() == 10);
  rig.files->fail(FileCall::read, EIO, "/regions/");
  CHECK(rig.own.promoted(keys)->count() == 0);
  rig.pass(kSecond);
  rig.files->set_hook({});
  CHECK(rig.own.promoted(keys)->count() == 10);
  require_sound(*rig.own.pool);
}

TEST(a_disk_that_does_not_take_writes_still_gives_what_it_has) {
  Rig rig;
  const auto keys = rig.on_disk_only(10);
  const auto more = random_keys(10, 2);
  rig.store_in_pool(more);
  rig.files->fail(FileCall::write, EROFS, "/regions/");
  CHECK(rig.own.store->demote(rig.own.index, more) == 0);
  CHECK(rig.own.store->stats().writing_rests && !rig.own.store->stats().reading_rests);
  CHECK(rig.own.promoted(keys)->count() == 10);
  rig.files->set_hook({});
  CHECK(rig.own.store->demote(rig.own.index, more) == 0);
  rig.pass(kSecond);
  CHECK(rig.own.store->demote(rig.own.index, more) == 10);
  require_sound(*rig.own.pool);
}

TEST(waiting_requests_together_pin_no_more_than_their_share) {
  Rig rig;
  const auto keys = rig.on_disk_only(200);
  const std::uint64_t share = 16 * kMiB / 2;
  std::vector<std::shared_ptr<PromoteTicket>> tickets;
  for (std::size_t i = 0; i < 200; i += 40)
    tickets.push_back(rig.own.promoted(std::span(keys).subspan(i, 40)));
  std::size_t pinned = 0;
  for (const auto& ticket : tickets) pinned += ticket->count();
  CHECK(pinned == share / kStride);
  CHECK(tickets[0]->count() == 40 && tickets[4]->count() == 0);
  CHECK(rig.own.store->stats().promote_pinned_bytes <= share);
  // Pins of blocks that were in the pool count like the others.
  tickets.push_back(rig.own.promoted(std::span(keys).first(40)));
  CHECK(tickets.back()->count() == 0);
  tickets[0]->release();
  tickets.push_back(rig.own.promoted(std::span(keys).subspan(160, 40)));
  CHECK(tickets.back()->count() == 40);
  // A second process halves it.
  for (const auto& ticket : tickets) ticket->release();
  auto other = rig.side();
  CHECK(rig.own.promoted(keys)->count() == share / 2 / kStride);
  require_sound(*rig.own.pool);
}

TEST(one_block_fits_any_share) {
  Rig rig;
  const auto keys = rig.on_disk_only(2);
  std::vector<std::unique_ptr<Pool>> clients;
  while (16 * kMiB / 2 / (clients.size() + 1) >= kBlock / 2 && clients.size() < 120)
    clients.push_back(Pool::open(rig.pool_options));
  const auto ticket = rig.own.promoted(keys);
  CHECK(ticket->count() >= 1);
}

TEST(a_full_pool_driven_from_both_ends_ends_every_ticket) {
  Rig rig;
  std::vector<std::vector<Key>> prefixes;
  for (std::uint64_t seed = 10; seed < 20; ++seed) prefixes.push_back(rig.on_disk_only(30, seed));
  std::size_t came = 0;
  {
    const std::jthread spiller([&](const std::stop_token& stop) {
      for (std::uint64_t seed = 1000; !stop.stop_requested(); ++seed)
        static_cast<void>(put_one(*rig.own.pool, rig.own.index, random_keys(1, seed)[0]));
    });
    const std::jthread demoter([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) static_cast<void>(rig.own.store->demote_round());
    });
    const auto give_up = std::chrono::steady_clock::now() + kLong;
    for (int round = 0; round < 5 || came == 0; ++round) {
      CHECK(std::chrono::steady_clock::now() < give_up);
      if (round >= 5) {  // they had left the disk before anybody asked
        for (const Key& key : prefixes[0])
          static_cast<void>(put_one(*rig.own.pool, rig.own.index, key));
        static_cast<void>(rig.own.store->demote(rig.own.index, prefixes[0]));
      }
      std::vector<std::shared_ptr<PromoteTicket>> tickets;
      for (const auto& keys : prefixes)
        tickets.push_back(rig.own.store->promote(rig.own.index, keys));
      for (const auto& ticket : tickets) {
        CHECK(ticket->wait(kLong));
        came += ticket->count();
        for (std::size_t i = 0; i < ticket->count(); ++i)
          CHECK(holds(*rig.own.pool, ticket->keys()[i], kBlock));
        ticket->release();
      }
    }
  }
  CHECK(came > 0);
  require_sound(*rig.own.pool);
}

TEST(two_processes_that_want_the_same_prefix_both_get_it) {
  Rig rig;
  const auto keys = rig.on_disk_only(60);
  auto other = rig.side();
  const auto both_get_it = [&] {
    rig.own.pool->clear();
    const auto one = rig.own.store->promote(rig.own.index, keys);
    const auto two = other.store->promote(other.index, keys);
    CHECK(one->wait(kLong) && two->wait(kLong));
    const bool whole = one->count() == 60 && two->count() == 60;
    one->release();
    two->release();
    return whole;
  };
  for (int round = 0; round < 5; ++round) {
    CHECK(despite_timeouts(*rig.own.pool, both_get_it));
    CHECK(rig.own.pool->clear() == 60);
  }
  require_sound(*rig.own.pool);
}

TEST(demotion_makes_half_of_the_pool_free_or_droppable_coldest_first_and_writes_nothing_twice) {
  Rig rig;
  std::vector<Key> stored;
  while (rig.own.pool->stats().evictions == 0) {
    stored.push_back(random_keys(1, 50 + stored.size())[0]);
    rig.store_in_pool(std::span(&stored.back(), 1));
  }
  while (rig.own.store->demote_round()) {
  }
  const disk::Catalog catalog(rig.own.pool);
  const disk::Survey survey = catalog.survey({});
  CHECK(survey.free_bytes + survey.clean_bytes >= survey.pool_bytes / 2);
  const std::uint64_t written = rig.own.store->stats().demoted_blocks;
  CHECK(written <= survey.pool_bytes / 2 / kStride + 1);
  // stored[0] was evicted; then the coldest in order.
  disk::DiskRef ref;
  for (std::size_t i = 1; i <= written; ++i) CHECK(catalog.find(stored[i], ref));
  CHECK(!catalog.find(stored[written + 1], ref));
  // Read back, evicted again by new blocks: on disk already.
  rig.own.promoted(std::span(stored).subspan(1, 20))->release();
  for (std::uint64_t seed = 5000; seed < 5000 + written; ++seed)
    rig.store_in_pool(random_keys(1, seed));
  CHECK(rig.own.pool->lookup(std::span(stored).subspan(1, 20)) == 0);
  while (rig.own.store->demote_round()) {
  }
  // Each write that ever was is still there, under a key of its own: none was a second one.
  const disk::StoreStats stats = rig.own.store->stats();
  CHECK(stats.demoted_blocks > written && stats.demoted_blocks == stats.disk.entries);
  CHECK(stats.files.written_blocks == stats.disk.entries && stats.files.carried_blocks == 0);
  require_sound(*rig.own.pool);
}

TEST(an_admission_rule_keeps_blocks_that_were_wanted_once_from_the_disk) {
  Rig rig;
  rig.attach(1);
  std::vector<Key> stored;
  while (rig.own.pool->stats().evictions == 0) {
    stored.push_back(random_keys(1, 50 + stored.size())[0]);
    rig.store_in_pool(std::span(&stored.back(), 1));
  }
  for (std::size_t i = 10; i < 15; ++i) CHECK(holds(*rig.own.pool, stored[i], kBlock));
  while (rig.own.store->demote_round()) {
  }
  CHECK(rig.own.store->stats().demoted_blocks == 5);
}

TEST(the_next_pool_finds_what_the_last_one_left_on_disk) {
  Rig rig;
  const auto keys = rig.on_disk_only(50);
  CHECK(rig.own.store->sync() == 0);
  rig.reboot();
  rig.attach();
  CHECK(rig.own.store->namespaces() == std::vector<NamespaceId>{identity(1)});
  const auto ticket = rig.own.promoted(keys);
  CHECK(ticket->count() == 50);
  for (const Key& key : keys) CHECK(holds(*rig.own.pool, key, kBlock));
  CHECK(rig.own.store->drop_namespace(identity(1)) == 50);
  CHECK(rig.own.store->namespaces().empty());
  require_sound(*rig.own.pool);
}

TEST(a_flipped_byte_on_disk_ends_the_run_before_it_and_is_not_served_again) {
  Rig rig;
  const auto keys = rig.on_disk_only(10);
  disk::DiskRef ref;
  CHECK(disk::Catalog(rig.own.pool).find(keys[6], ref));
  for (const auto& file :
       std::filesystem::directory_iterator(rig.folder.path() + "/store/regions")) {
    std::fstream bytes(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    const auto record = static_cast<std::streamoff>(4096 + ref.number * (4096 + kStride) + 8192);
    bytes.seekg(record);
    const int before = bytes.get();
    if (before == EOF || ref.region != 0) continue;
    bytes.seekp(record);
    bytes.put(static_cast<char>(before ^ 1));
  }
  CHECK(rig.own.promoted(keys)->count() == 6);
  CHECK(rig.own.store->lookup(keys) == 6);
  CHECK(!rig.own.store->stats().reading_rests);
  const auto lines = notices(*rig.own.store);
  CHECK(lines.size() == 1 &&
        lines[0].find("damaged or missing blocks in a read: 1;") != std::string::npos);
  require_sound(*rig.own.pool);
}

TEST(close_says_whether_a_thread_is_stuck_and_waits_for_it_no_longer_than_asked) {
  Rig rig;
  const auto keys = rig.on_disk_only(10);
  CHECK(rig.own.promoted(keys)->count() == 10);
  rig.attach();
  rig.own.pool->clear();
  rig.hang(FileCall::read);
  const auto stuck = rig.own.store->promote(rig.own.index, keys);
  rig.door->await_somebody();
  const auto waiting = rig.own.store->promote(rig.own.index, keys);
  CHECK(!rig.own.store->close(std::chrono::nanoseconds(0)));
  CHECK(waiting->wait(kLong));
  rig.door->open();
  // What it touches lives as long as it does; the ticket ends when it returns.
  CHECK(stuck->wait(kLong));
  static_cast<void>(notices(*rig.own.store));
  CHECK(!rig.own.store->wait_notice(std::chrono::nanoseconds(0)).has_value());
}

TEST(a_block_that_was_stamped_before_the_demoter_looked_and_stored_after_is_written_too) {
  Rig rig;
  Pool& pool = *rig.own.pool;
  const auto keys = random_keys(1, 70);
  const auto stamp = pool.take_stamps(1);
  CHECK(!rig.own.store->demote_round());  // sees the stamps taken, and no block
  BlockRef ref;
  CHECK(pool.reserve(rig.own.index, keys[0], ref) == ReserveStatus::ok);
  pool.publish(ref, crc32c({pool.payload(ref), kBlock}), stamp);
  while (rig.own.store->stats().demoted_blocks == 0)
    static_cast<void>(rig.own.store->demote_round());
  require_sound(pool);
}

TEST(threads_in_the_background_demote_and_recover_by_themselves) {
  Rig rig;
  rig.own.store.reset();
  disk::StoreOptions options;
  options.directory = rig.folder.path() + "/store";
  options.takeover_wait_ns = 0;
  auto store = Store::open(rig.own.pool, options);
  std::uint64_t seed = 50;
  while (rig.own.pool->stats().evictions == 0) rig.store_in_pool(random_keys(1, seed++));
  while (store->stats().demoted_blocks == 0) std::this_thread::yield();
  CHECK(store->close(kLong));
  CHECK(store->close(kLong));
  require_sound(*rig.own.pool);
}

}  // namespace hpkv::test

TEST_MAIN
