// The CPU engine against a real pool: what a ticket promises, in every order of events.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "copy/engine.h"
#include "tests/check.h"
#include "tests/copy_rig.h"

namespace hpkv {

using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using test::CopyRig;

TEST(a_block_comes_back_byte_for_byte_to_any_page) {
  CopyRig rig;
  const auto keys = rig.keys(1, 8);
  rig.fill_device(11);
  const auto before = rig.device_copy();
  const auto spill = rig.engine->spill(keys, {0, 1, 2, 3, 28, 29, 30, 31}, {});
  spill->wait();
  CHECK(spill->stored() == 8 && spill->present() == 0 && spill->dropped() == 0);
  CHECK(rig.pool->lookup(keys) == 8);
  rig.fill_device(12);
  const auto load = rig.engine->load(rig.lease(keys), {9, 8, 7, 6, 5, 4, 3, 2}, {});
  CHECK(load->wait());
  const std::vector<std::int64_t> from = {0, 1, 2, 3, 28, 29, 30, 31};
  for (std::size_t i = 0; i < from.size(); ++i) {
    CHECK(rig.page_of(before, from[i]) == rig.page_bytes(static_cast<std::int64_t>(9 - i)));
  }
  CHECK(rig.pool->stats().pinned == 0);
}

TEST(a_load_writes_its_pages_and_nothing_else) {
  CopyRig rig;
  const auto keys = rig.keys(1, 2);
  rig.fill_device(21);
  rig.engine->spill(keys, {4, 5}, {})->wait();
  rig.fill_device(22);
  auto expected = rig.device_copy();
  CHECK(rig.engine->load(rig.lease(keys), {10, 20}, {})->wait());
  const auto after = rig.device_copy();
  std::vector<bool> loaded(after.size(), false);
  for (const std::int64_t page : {10, 20}) {
    rig.each_byte(page, [&](std::size_t at) { loaded[at] = true; });
  }
  for (std::size_t at = 0; at < after.size(); ++at) {
    CHECK(loaded[at] || after[at] == expected[at]);
  }
}

TEST(a_page_that_is_there_is_not_stored_again) {
  CopyRig rig;
  const auto keys = rig.keys(1, 4);
  rig.fill_device(31);
  rig.engine->spill({keys[1]}, {1}, {})->wait();
  const auto spill = rig.engine->spill(keys, {0, 1, 2, 3}, {});
  spill->wait();
  CHECK(spill->stored() == 3 && spill->present() == 1);
  CHECK(rig.engine->stats().spilled_bytes == 4 * rig.block_bytes());
}

TEST(pages_that_do_not_fit_are_dropped_and_counted) {
  CopyRig rig;
  // Everything pinned: the pool cannot make room.
  std::vector<Lease> leases;
  for (std::uint64_t round = 1; rig.engine->stats().spill_dropped_full == 0; ++round) {
    CHECK(round < 5000);
    const auto keys = rig.keys(round * 100, 1);
    rig.engine->spill(keys, {0}, {})->wait();
    leases.push_back(rig.lease(keys));
  }
  const EngineStats stats = rig.engine->stats();
  CHECK(stats.spill_dropped_busy == 0 && stats.spill_dropped_queue == 0);
  leases.clear();
  const auto keys = rig.keys(7'000'000, 4);
  const auto spill = rig.engine->spill(keys, {0, 1, 2, 3}, {});
  spill->wait();
  CHECK(spill->stored() == 4);
}

TEST(a_full_queue_drops_the_whole_ticket_at_once) {
  EngineOptions options;
  options.spill_pages_max = 4;
  CopyRig rig({}, options);
  rig.engine->faults().set_delay(CopyKind::spill, Faults::kEveryLayer, hours(1));
  const auto first = rig.engine->spill(rig.keys(1, 4), {0, 1, 2, 3}, {});
  const auto second = rig.engine->spill(rig.keys(10, 4), {0, 1, 2, 3}, {});
  CHECK(second->done() && second->device_done() && second->dropped() == 4);
  CHECK(rig.engine->stats().spill_dropped_queue == 4);
  first->cancel();
}

TEST(cancelling_drops_what_has_not_started_without_waiting) {
  CopyRig rig;
  rig.engine->faults().set_delay(CopyKind::spill, Faults::kEveryLayer, hours(1));
  const auto keys = rig.keys(1, 8);
  const auto spill = rig.engine->spill(keys, rig.pages(0, 8), {});
  CHECK(!spill->wait_device(milliseconds(1)));
  spill->cancel();
  CHECK(spill->device_done());
  spill->wait();
  CHECK(spill->dropped() == 8 && spill->stored() == 0);
  CHECK(rig.pool->lookup(keys) == 0);
  CHECK(rig.engine->stats().spill_dropped_cancelled == 8);
}

TEST(cancelling_drops_a_page_that_is_being_read) {
  CopyRig rig;
  rig.engine->faults().set_delay(CopyKind::spill, 1, seconds(5));
  const auto keys = rig.keys(1, 3);
  const auto spill = rig.engine->spill(keys, rig.pages(0, 3), {});
  while (rig.pool->stats().writing == 0) std::this_thread::yield();
  spill->cancel();
  // Whether or not the read is over by now, the flag says so correctly; in the end it must be.
  CHECK(spill->wait_device(seconds(30)));
  spill->wait();
  CHECK(spill->stored() == 0 && spill->dropped() == 3);
  CHECK(rig.pool->lookup(keys) == 0);
  CHECK(rig.pool->stats().writing == 0);
}

TEST(device_done_waits_for_a_read_in_progress) {
  SpillTicket ticket(2);
  CHECK(ticket.begin_read());
  ticket.cancel();
  CHECK(!ticket.device_done());
  CHECK(!ticket.wait_device(milliseconds(1)));
  CHECK(!ticket.end_read());
  CHECK(ticket.device_done());
  CHECK(!ticket.begin_read());
  ticket.settle(SpillOutcome::dropped, 2);
  CHECK(ticket.done());
}

TEST(a_page_read_before_the_cancellation_may_be_published) {
  SpillTicket ticket(1);
  CHECK(ticket.begin_read());
  CHECK(ticket.end_read());
  ticket.cancel();
  CHECK(ticket.device_done());
  CHECK(!ticket.done());
  ticket.settle(SpillOutcome::stored);
  CHECK(ticket.done() && ticket.stored() == 1);
}

TEST(the_first_layer_of_every_page_lands_before_the_second) {
  CopyRig rig;
  const auto keys = rig.keys(1, 16);
  rig.fill_device(41);
  const auto before = rig.device_copy();
  rig.engine->spill(keys, rig.pages(0, 16), {})->wait();
  rig.fill_device(42);
  rig.engine->faults().set_delay(CopyKind::load, 1, hours(1));
  const auto load = rig.engine->load(rig.lease(keys), rig.pages(16, 16), {});
  load->wait_layer(0);
  CHECK(load->layer_done(0) && !load->layer_done(1) && !load->done());
  for (std::int64_t page = 0; page < 16; ++page) {
    CHECK(rig.page_of(before, page, 0) == rig.page_bytes(page + 16, 0));
  }
  rig.engine->close();
  CHECK(load->done() && !load->ok());
  CHECK(rig.pool->stats().pinned == 0);
}

TEST(every_layer_completes_on_its_own) {
  CopyRig rig;
  const auto keys = rig.keys(1, 4);
  rig.engine->spill(keys, rig.pages(0, 4), {})->wait();
  const auto load = rig.engine->load(rig.lease(keys), rig.pages(8, 4), {});
  for (std::uint32_t layer = 0; layer < rig.layer_count(); ++layer) load->wait_layer(layer);
  CHECK(load->wait());
  for (std::uint32_t layer = 0; layer < rig.layer_count(); ++layer) CHECK(load->layer_done(layer));
  CHECK(rig.engine->stats().loaded_bytes == 4 * rig.block_bytes());
  CHECK(rig.engine->stats().loaded_blocks == 4);
}

TEST(a_bad_block_fails_its_load_is_condemned_and_never_reaches_the_device) {
  PoolOptions pool_options;
  pool_options.verify_always = true;
  CopyRig rig(pool_options);
  const auto keys = rig.keys(1, 6);
  rig.fill_device(51);
  rig.engine->spill(keys, rig.pages(0, 6), {})->wait();
  test::flip_byte_of(rig.pool, keys[3], rig.block_bytes() - 1);
  rig.fill_device(52);
  const auto before = rig.device_copy();
  const auto load = rig.engine->load(rig.lease(keys), rig.pages(10, 6), {});
  CHECK(!load->wait());
  load->wait_layer(2);  // nobody waits for a failed load
  CHECK(rig.page_of(before, 13) == rig.page_bytes(13));
  CHECK(rig.pool->lookup(keys) == 3);
  CHECK(rig.pool->stats().pinned == 0);
  CHECK(rig.engine->stats().bad_blocks == 1);
  CHECK(rig.engine->stats().load_failed == 1);
}

TEST(no_layer_of_a_block_is_copied_before_the_block_is_checked) {
  PoolOptions pool_options;
  pool_options.verify_always = true;
  CopyRig rig(pool_options);
  const auto keys = rig.keys(1, 6);
  rig.fill_device(53);
  rig.engine->spill(keys, rig.pages(0, 6), {})->wait();
  test::flip_byte_of(rig.pool, keys[1], 5);
  rig.fill_device(54);
  const auto before = rig.device_copy();
  // One thread sleeps before it checks the first pages; the other one must not run ahead with their
  // later layers.
  rig.engine->faults().set_delay(CopyKind::load, 0, milliseconds(200));
  CHECK(!rig.engine->load(rig.lease(keys), rig.pages(10, 6), {})->wait());
  CHECK(rig.page_of(before, 11) == rig.page_bytes(11));
}

TEST(the_tail_of_a_spilled_prefix_is_evicted_before_its_head) {
  CopyRig rig;
  const auto prefix = rig.keys(1, 16);
  rig.engine->spill(prefix, rig.pages(0, 16), {})->wait();
  std::size_t present = prefix.size();
  for (std::uint64_t other = 100; present != 0; ++other) {
    CHECK(other < 5000);
    rig.engine->spill(rig.keys(other, 1), {0}, {})->wait();
    present = 0;
    for (const Key& key : prefix) present += rig.pool->lookup({&key, 1});
    // As many as are there at all are there in front.
    CHECK(rig.pool->lookup(prefix) == present);
  }
}

TEST(a_load_makes_its_blocks_recent_tail_first) {
  CopyRig rig;
  const auto older = rig.keys(1, 8);
  const auto newer = rig.keys(50, 8);
  rig.engine->spill(older, rig.pages(0, 8), {})->wait();
  rig.engine->spill(newer, rig.pages(0, 8), {})->wait();
  CHECK(rig.engine->load(rig.lease(older), rig.pages(8, 8), {})->wait());
  std::size_t present = older.size();
  for (std::uint64_t other = 100; present == older.size(); ++other) {
    CHECK(other < 5000);
    rig.engine->spill(rig.keys(other, 1), {0}, {})->wait();
    present = 0;
    for (const Key& key : older) present += rig.pool->lookup({&key, 1});
  }
  for (const Key& key : newer) CHECK(rig.pool->lookup({&key, 1}) == 0);
  CHECK(rig.pool->lookup(older) == present);
}

TEST(verification_reports_the_leading_good_run_and_condemns_the_bad_one) {
  PoolOptions pool_options;
  pool_options.verify_always = true;
  CopyRig rig(pool_options);
  const auto keys = rig.keys(1, 6);
  rig.engine->spill(keys, rig.pages(0, 6), {})->wait();
  const auto good = rig.engine->verify(rig.lease(keys));
  good->wait();
  CHECK(good->good() == 6);
  test::flip_byte_of(rig.pool, keys[4], 0);
  const auto bad = rig.engine->verify(rig.lease(keys));
  bad->wait();
  CHECK(bad->good() == 4);
  CHECK(rig.pool->lookup(keys) == 4);
  CHECK(rig.pool->stats().pinned == 0);
}

TEST(injected_failures_complete_as_failed_and_run_out) {
  CopyRig rig;
  const auto keys = rig.keys(1, 2);
  rig.engine->faults().fail_next(CopyKind::spill, 1);
  const auto failed_spill = rig.engine->spill(keys, {0, 1}, {});
  failed_spill->wait();
  CHECK(failed_spill->dropped() == 2 && rig.pool->lookup(keys) == 0);
  rig.engine->spill(keys, {0, 1}, {})->wait();
  rig.engine->faults().fail_next(CopyKind::load, 1);
  CHECK(!rig.engine->load(rig.lease(keys), {2, 3}, {})->wait());
  CHECK(rig.engine->load(rig.lease(keys), {2, 3}, {})->wait());
  rig.engine->faults().fail_next(CopyKind::verify, 1);
  const auto failed_verify = rig.engine->verify(rig.lease(keys));
  failed_verify->wait();
  CHECK(failed_verify->good() == 0);
  CHECK(rig.pool->lookup(keys) == 2);  // an injected failure condemns nothing
  CHECK(rig.pool->stats().pinned == 0);
}

TEST(a_load_overtakes_queued_spills_on_one_thread) {
  EngineOptions options;
  options.threads = 1;
  CopyRig rig({}, options);
  const auto keys = rig.keys(1, 2);
  rig.engine->spill(keys, {0, 1}, {})->wait();
  rig.engine->faults().set_delay(CopyKind::spill, 0, milliseconds(200));
  const auto spill = rig.engine->spill(rig.keys(100, 16), rig.pages(0, 16), {});
  while (rig.pool->stats().writing == 0) std::this_thread::yield();
  CHECK(rig.engine->load(rig.lease(keys), {20, 21}, {})->wait());
  CHECK(spill->stored() < 4);
  spill->cancel();
}

TEST(a_stuck_spill_holds_up_no_load) {
  CopyRig rig;
  const auto keys = rig.keys(1, 2);
  rig.engine->spill(keys, {0, 1}, {})->wait();
  rig.engine->faults().set_delay(CopyKind::spill, Faults::kEveryLayer, hours(1));
  const auto spill = rig.engine->spill(rig.keys(100, 16), rig.pages(0, 16), {});
  // Many, because between two of them a thread has time to take another page of the spill.
  for (int round = 0; round < 50; ++round) {
    CHECK(rig.engine->load(rig.lease(keys), {20, 21}, {})->wait());
  }
  CHECK(!spill->done());
}

TEST(a_load_has_given_its_pins_back_when_it_is_done) {
  CopyRig rig;
  const auto keys = rig.keys(1, 2);
  rig.engine->spill(keys, {0, 1}, {})->wait();
  for (int round = 0; round < 300; ++round) {
    rig.engine->load(rig.lease(keys), {20, 21}, {})->wait();
    CHECK(rig.pool->stats().pinned == 0);
    rig.engine->verify(rig.lease(keys))->wait();
    CHECK(rig.pool->stats().pinned == 0);
  }
}

TEST(pages_outside_the_pool_are_refused_and_pins_given_back) {
  CopyRig rig;
  const auto keys = rig.keys(1, 2);
  rig.engine->spill(keys, {0, 1}, {})->wait();
  CHECK_THROWS(rig.engine->spill(keys, {0, 32}, {}));
  CHECK_THROWS(rig.engine->spill(keys, {-1, 0}, {}));
  CHECK_THROWS(rig.engine->spill(keys, {0}, {}));
  CHECK_THROWS(rig.engine->load(rig.lease(keys), {0, 32}, {}));
  CHECK_THROWS(rig.engine->load(rig.lease(keys), {0}, {}));
  int event = 0;
  CHECK_THROWS(rig.engine->load(rig.lease(keys), {0, 1}, DeviceEvent{&event}));
  CHECK(rig.pool->stats().pinned == 0);
}

TEST(empty_work_is_done_at_once_and_a_lost_lease_is_a_failed_load) {
  CopyRig rig;
  CHECK(rig.engine->spill({}, {}, {})->done());
  CHECK(rig.engine->spill({}, {}, {})->device_done());
  CHECK(rig.engine->load(Lease(), {}, {})->wait());
  CHECK(rig.engine->verify(Lease())->done());
  const auto lost = rig.engine->load(Lease(), {1, 2}, {});
  CHECK(!lost->wait());
  lost->wait_layer(0);
}

TEST(closing_ends_everything_and_later_work_is_refused_softly) {
  CopyRig rig;
  const auto keys = rig.keys(1, 4);
  rig.engine->spill(keys, rig.pages(0, 4), {})->wait();
  rig.engine->faults().set_delay(CopyKind::spill, Faults::kEveryLayer, hours(1));
  rig.engine->faults().set_delay(CopyKind::load, Faults::kEveryLayer, hours(1));
  rig.engine->faults().set_delay(CopyKind::verify, Faults::kEveryLayer, hours(1));
  const auto spill = rig.engine->spill(rig.keys(100, 8), rig.pages(0, 8), {});
  const auto load = rig.engine->load(rig.lease(keys), rig.pages(8, 4), {});
  const auto other_load = rig.engine->load(rig.lease(keys), rig.pages(12, 4), {});
  const auto verify = rig.engine->verify(rig.lease(keys));
  rig.engine->close();
  CHECK(spill->done() && load->done() && other_load->done() && verify->done());
  CHECK(spill->dropped() == 8 && !load->ok() && !other_load->ok() && verify->good() == 0);
  rig.engine->close();
  rig.engine->quiesce();
  CHECK(rig.engine->spill(keys, rig.pages(0, 4), {})->dropped() == 4);
  CHECK(!rig.engine->load(rig.lease(keys), rig.pages(0, 4), {})->wait());
  const auto late = rig.engine->verify(rig.lease(keys));
  CHECK(late->done() && late->good() == 0);
  CHECK(rig.pool->stats().pinned == 0);
}

TEST(quiesce_waits_for_a_copy_that_has_left_the_queue) {
  CopyRig rig;
  rig.engine->faults().set_delay(CopyKind::spill, 0, milliseconds(200));
  std::shared_ptr<SpillTicket> spill;
  for (std::uint64_t seed = 1; spill == nullptr || spill->done();
       ++seed) {  // not seen while it was
    spill = rig.engine->spill(rig.keys(seed, 1), {0}, {});
    while (rig.pool->stats().writing == 0 && !spill->done()) std::this_thread::yield();
  }
  CHECK(rig.engine->stats().queued_pages == 0);
  rig.engine->quiesce();
  CHECK(spill->done() && spill->stored() == 1);
}

TEST(quiesce_waits_for_all_that_was_submitted) {
  CopyRig rig;
  rig.engine->faults().set_delay(CopyKind::spill, 0, milliseconds(5));
  std::vector<std::shared_ptr<SpillTicket>> tickets;
  for (std::uint64_t i = 0; i < 4; ++i) {
    tickets.push_back(rig.engine->spill(rig.keys(i * 100, 2), {0, 1}, {}));
  }
  rig.engine->quiesce();
  for (const auto& ticket : tickets) CHECK(ticket->done());
}

TEST(a_block_of_another_size_is_never_loaded) {
  CopyRig rig;
  const auto keys = rig.keys(1, 1);
  NamespaceId other{};
  other[0] = std::byte{9};
  const std::uint32_t index = rig.pool->add_namespace(other, {}, rig.block_bytes() / 2);
  BlockRef ref;
  CHECK(rig.pool->reserve(index, keys[0], ref) == ReserveStatus::ok);
  rig.pool->publish(ref, 0);
  CHECK(!rig.engine->load(rig.lease(keys), {0}, {})->wait());
  CHECK_THROWS(make_cpu_engine(rig.pool, index, rig.layout(), {}));
}

// Everything at once, from several threads; afterwards every block that is there is right.
TEST(blocks_stay_whole_under_concurrent_spills_loads_and_cancellations) {
  EngineOptions options;
  options.threads = 4;
  CopyRig rig({}, options);
  rig.fill_device(61);
  const auto source = rig.device_copy();
  // Pages 0 to 15 are only read; each submitter loads into four pages of its own.
  const auto keys = rig.keys(1, 16);
  std::atomic<bool> all_right{true};
  std::vector<std::thread> submitters;
  for (std::int64_t who = 0; who < 4; ++who) {
    submitters.emplace_back([&, who] {
      std::mt19937_64 random(static_cast<std::uint64_t>(who));
      for (int round = 0; round < 60; ++round) {
        const std::size_t first = random() % 12;
        const std::vector<Key> some(keys.begin() + static_cast<std::ptrdiff_t>(first),
                                    keys.begin() + static_cast<std::ptrdiff_t>(first + 4));
        const auto spill =
            rig.engine->spill(some, rig.pages(static_cast<std::int64_t>(first), 4), {});
        if (random() % 3 == 0) spill->cancel();
        rig.engine->verify(rig.lease(some));
        Lease lease = rig.lease(some);
        const std::size_t count = lease.count();
        const std::int64_t target = 16 + 4 * who;
        if (!rig.engine->load(std::move(lease), rig.pages(target, count), {})->wait()) {
          all_right = false;
        }
        for (std::size_t i = 0; i < count; ++i) {
          const auto at = static_cast<std::int64_t>(i);
          if (rig.page_of(source, static_cast<std::int64_t>(first) + at) !=
              rig.page_bytes(target + at)) {
            all_right = false;
          }
        }
        spill->wait();
      }
    });
  }
  for (std::thread& submitter : submitters) submitter.join();
  CHECK(all_right);
  rig.engine->quiesce();
  // Where the lock is not free in time, a page that is given up stays its writer's.
  const auto stats = rig.pool->stats();
  CHECK(stats.pinned == 0 && stats.writing <= stats.lock_timeouts);
  CHECK(rig.engine->stats().bad_blocks == 0);
}

}  // namespace hpkv

TEST_MAIN
