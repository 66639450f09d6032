// The stream engine and the order of things: what waits for what on the device, and what is held
// until when. Streams are held and released by the tests, so the orders are forced, not hoped for.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/error.h"
#include "copy/stream/engine.h"
#include "tests/check.h"
#include "tests/stream_rig.h"

namespace hpkv {

using std::chrono::milliseconds;
using std::chrono::seconds;
using stream::CopyPath;
using test::few_slots;
using test::random_keys;
using test::RecordedEvent;
using test::StreamRig;

namespace {

constexpr CopyPath kPaths[] = {CopyPath::kernel, CopyPath::batch};

void await_writing(const StreamRig& rig) {
  while (rig.pool->stats().writing == 0) std::this_thread::yield();
}

}  // namespace

TEST(a_spill_reads_what_the_forward_writes_before_the_event) {
  for (const CopyPath path : kPaths) {
    StreamRig rig(few_slots(path));
    const auto keys = random_keys(2);
    rig.device->hold(rig.forward);
    rig.device->launch(rig.forward, [&] {
      rig.fill_page(3, keys[0]);
      rig.fill_page(7, keys[1]);
    });
    const RecordedEvent event(*rig.device, rig.forward);
    const auto spill = rig.engine->spill(keys, {3, 7}, event.get());
    await_writing(rig);
    CHECK(!spill->wait_device(milliseconds(5)));
    rig.device->release(rig.forward);
    spill->wait();
    CHECK(spill->stored() == 2);
    CHECK(rig.block_is(keys[0]) && rig.block_is(keys[1]));
  }
}

TEST(a_load_leaves_its_pages_to_their_previous_owner_until_the_event) {
  for (const CopyPath path : kPaths) {
    StreamRig rig(few_slots(path));
    const auto keys = random_keys(3);
    rig.store({keys[1], keys[2]});
    rig.fill_page(4, keys[0]);
    rig.device->hold(rig.forward);
    bool intact = false;
    rig.device->launch(rig.forward, [&] { intact = rig.page_is(4, keys[0]); });
    const RecordedEvent event(*rig.device, rig.forward);
    const auto load =
        rig.engine->load_on_streams(rig.lease({keys[1], keys[2]}), {4, 5}, event.get());
    // All of it is enqueued, and nothing of it runs.
    for (std::uint32_t layer = 0; layer < StreamRig::kLayers; ++layer) {
      CHECK(load->wait_layer_on(rig.forward, layer));
    }
    std::this_thread::sleep_for(milliseconds(5));
    CHECK(!load->ticket.layer_done(0));
    rig.device->release(rig.forward);
    CHECK(load->ticket.wait());
    CHECK(intact);
    CHECK(rig.page_is(4, keys[1]) && rig.page_is(5, keys[2]));
  }
}

TEST(the_forward_waits_for_each_layer_on_the_device_and_the_host_for_none) {
  for (const CopyPath path : kPaths) {
    StreamRig rig(few_slots(path));
    const auto keys = random_keys(3);
    rig.store(keys);
    for (const std::int64_t page : {1, 2, 3}) rig.wipe_page(page);
    rig.device->hold(rig.to_device());
    const auto load = rig.engine->load_on_streams(rig.lease(keys), {1, 2, 3}, {});
    std::atomic<int> right{0};
    for (std::uint32_t layer = 0; layer < StreamRig::kLayers; ++layer) {
      CHECK(load->wait_layer_on(rig.forward, layer));
      rig.device->launch(rig.forward, [&, layer] {
        for (std::size_t i = 0; i < keys.size(); ++i) {
          right += rig.layer_is(static_cast<std::int64_t>(i) + 1, layer, keys[i]) ? 1 : 0;
        }
      });
    }
    CHECK(right == 0 && !load->ticket.layer_done(0));
    CHECK(!rig.device->has_waited(std::this_thread::get_id()));
    rig.device->release(rig.to_device());
    CHECK(rig.device->synchronize_stream(rig.forward).ok());
    CHECK(right == 9);
    CHECK(load->ticket.wait());
    // Long over: nothing to wait for, and no failure.
    CHECK(load->wait_layer_on(rig.forward, 2));
  }
}

TEST(the_callers_event_may_be_recorded_again_or_destroyed_after_the_submission) {
  StreamRig rig;
  const auto keys = random_keys(3);
  rig.store({keys[0]});
  rig.fill_page(9, keys[2]);
  stream::StreamHandle stuck = nullptr;
  CHECK(rig.device->make_stream(false, stuck).ok());
  rig.device->hold(stuck);
  rig.device->launch(stuck, [] {});
  // Slow to get to the wait, so that a late look at the event would see the second record.
  rig.engine->faults().set_delay(CopyKind::load, 0, milliseconds(20));
  rig.engine->faults().set_delay(CopyKind::spill, Faults::kEveryLayer, milliseconds(20));
  std::shared_ptr<LoadTicket> load;
  std::shared_ptr<SpillTicket> spill;
  {
    RecordedEvent event(*rig.device, rig.forward);
    load = rig.engine->load(rig.lease({keys[0]}), {8}, event.get());
    spill = rig.engine->spill({keys[2]}, {9}, event.get());
    CHECK(rig.device->record(stuck, event.handle()).ok());
  }
  CHECK(load->wait());
  spill->wait();
  CHECK(rig.page_is(8, keys[0]) && rig.block_is(keys[2]));
  rig.device->release(stuck);
  CHECK(rig.device->synchronize_stream(stuck).ok());
}

TEST(a_load_that_waits_holds_up_no_layer_of_an_earlier_one) {
  StreamRig rig;
  const auto keys = random_keys(2);
  rig.store(keys);
  rig.engine->faults().set_delay(CopyKind::load, 1, milliseconds(50));
  const auto first = rig.engine->load_on_streams(rig.lease({keys[0]}), {1}, {});
  CHECK(first->wait_layer_on(rig.forward, 0));
  stream::StreamHandle other = nullptr;
  CHECK(rig.device->make_stream(false, other).ok());
  rig.device->hold(other);
  rig.device->launch(other, [] {});
  const RecordedEvent event(*rig.device, other);
  const auto second = rig.engine->load(rig.lease({keys[1]}), {2}, event.get());
  CHECK(first->ticket.wait());
  CHECK(!second->done());
  rig.device->release(other);
  CHECK(second->wait());
}

TEST(page_indices_that_only_the_device_has_are_read_behind_the_event) {
  StreamRig rig;
  const auto keys = random_keys(3);
  rig.store(keys);
  for (std::int64_t page = 0; page < 24; ++page) rig.wipe_page(page);
  std::vector<std::int64_t> first_slots(3, 0);  // not yet what they will be
  rig.device->hold(rig.forward);
  rig.device->launch(rig.forward, [&] {
    const std::int64_t tokens = StreamRig::kTokens;
    first_slots = {20 * tokens, 3 * tokens, 11 * tokens};
  });
  const RecordedEvent event(*rig.device, rig.forward);
  const auto load = rig.engine->load_resident(
      rig.lease(keys), {first_slots.data(), 3, StreamRig::kTokens}, event.get());
  CHECK(load->wait_layer_on(rig.forward, 2));
  std::this_thread::sleep_for(milliseconds(5));
  CHECK(!load->ticket.layer_done(0));
  rig.device->release(rig.forward);
  CHECK(load->ticket.wait());
  CHECK(rig.page_is(20, keys[0]) && rig.page_is(3, keys[1]) && rig.page_is(11, keys[2]));
  const auto expected = rig.memory;
  rig.wipe_page(0);
  CHECK(rig.memory == expected);  // page 0 was not written in between
}

TEST(many_resident_pages_go_in_batches) {
  StreamRig rig;
  const auto keys = random_keys(10);
  rig.store(keys);
  std::vector<std::int64_t> first_slots;
  for (std::int64_t i = 0; i < 10; ++i) first_slots.push_back((23 - 2 * i) * 16);
  const auto load = rig.engine->load_resident(rig.lease(keys), {first_slots.data(), 10, 16}, {});
  CHECK(load->ticket.wait());
  for (std::size_t i = 0; i < 10; ++i) {
    CHECK(rig.page_is(23 - 2 * static_cast<std::int64_t>(i), keys[i]));
  }
}

TEST(a_resident_load_with_wrong_numbers_is_refused_and_pins_are_given_back) {
  StreamRig rig;
  const auto keys = random_keys(2);
  rig.store(keys);
  const std::vector<std::int64_t> slots = {0, 16};
  CHECK_THROWS(rig.engine->load_resident(rig.lease(keys), {slots.data(), 1, 16}, {}));
  CHECK_THROWS(rig.engine->load_resident(rig.lease(keys), {slots.data(), 2, 0}, {}));
  CHECK_THROWS(rig.engine->load_resident(rig.lease(keys), {nullptr, 2, 16}, {}));
  CHECK(!rig.engine->load_resident(Lease(), {slots.data(), 2, 16}, {})->ticket.wait());
  CHECK(rig.engine->load_resident(Lease(), {nullptr, 0, 16}, {})->ticket.wait());
  CHECK(rig.pool->stats().pinned == 0);
}

TEST(pages_may_be_reused_when_the_device_has_read_them_and_not_before) {
  for (const CopyPath path : kPaths) {
    StreamRig rig(few_slots(path));
    const auto keys = random_keys(2);
    rig.fill_page(0, keys[0]);
    rig.fill_page(1, keys[1]);
    rig.device->hold(rig.to_host());
    const auto spill = rig.engine->spill(keys, {0, 1}, {});
    await_writing(rig);
    CHECK(!spill->wait_device(milliseconds(5)));
    rig.device->release(rig.to_host());
    CHECK(spill->wait_device(seconds(60)));
    rig.wipe_page(0);
    rig.wipe_page(1);
    spill->wait();
    CHECK(spill->stored() == 2 && rig.block_is(keys[0]) && rig.block_is(keys[1]));
  }
}

TEST(a_spill_that_is_cancelled_while_the_device_reads_is_not_published) {
  StreamRig rig;
  const auto keys = random_keys(2);
  rig.device->hold(rig.to_host());
  const auto spill = rig.engine->spill(keys, {0, 1}, {});
  while (rig.pool->stats().writing != 2) std::this_thread::yield();
  CHECK(!spill->wait_device(milliseconds(5)));  // by now the device has the copies
  spill->cancel();
  CHECK(!spill->device_done());
  rig.device->release(rig.to_host());
  CHECK(spill->wait_device(seconds(60)));
  spill->wait();
  CHECK(spill->dropped() == 2 && rig.pool->lookup(keys) == 0);
  rig.engine->quiesce();
  CHECK(rig.pool->stats().writing == 0 && rig.engine->check().empty());
}

TEST(pins_and_slots_are_held_until_the_device_has_the_bytes) {
  StreamRig rig;
  const auto keys = random_keys(3);
  rig.store(keys);
  rig.device->hold(rig.to_device());
  const auto load = rig.engine->load_on_streams(rig.lease(keys), {0, 1, 2}, {});
  CHECK(load->wait_layer_on(rig.forward, StreamRig::kLayers - 1));
  load->ticket.fail();  // as a caller in a hurry would have it
  CHECK(rig.pool->stats().pinned == 3 && !load->ticket.done());
  CHECK(!rig.engine->check().empty());
  rig.device->release(rig.to_device());
  CHECK(!load->ticket.wait());
  CHECK(rig.pool->stats().pinned == 0 && rig.engine->check().empty());
}

TEST(a_layer_of_a_failed_load_is_not_waited_for) {
  StreamRig rig;
  const auto keys = random_keys(2);
  rig.store(keys);
  rig.engine->faults().fail_next(CopyKind::load, 1);
  const auto load = rig.engine->load_on_streams(rig.lease(keys), {0, 1}, {});
  CHECK(!load->wait_layer_on(rig.forward, 0));
  CHECK(!load->ticket.wait());
  CHECK(!load->wait_layer_on(rig.forward, 0));
  const auto lost = rig.engine->load_on_streams(Lease(), {0, 1}, {});
  CHECK(!lost->wait_layer_on(rig.forward, 1));
  CHECK(rig.engine->load_on_streams(Lease(), {}, {})->wait_layer_on(rig.forward, 1));
}

TEST(closing_ends_the_wait_for_a_layer_that_is_not_enqueued) {
  StreamRig rig;
  const auto keys = random_keys(1);
  rig.store(keys);
  rig.engine->faults().set_delay(CopyKind::load, 1, std::chrono::hours(1));
  const auto load = rig.engine->load_on_streams(rig.lease(keys), {0}, {});
  std::atomic<bool> landed{true};
  std::thread waiter([&] { landed = load->wait_layer_on(rig.forward, 1); });
  CHECK(load->wait_layer_on(rig.forward, 0));
  rig.engine->close();
  waiter.join();
  CHECK(!landed && load->ticket.done() && rig.pool->stats().pinned == 0);
  rig.engine.reset();
  CHECK(!load->wait_layer_on(rig.forward, 1));  // a ticket outlives its engine
}

TEST(closing_waits_for_copies_that_the_device_has) {
  StreamRig rig;
  const auto keys = random_keys(4);
  rig.store({keys[0], keys[1]});
  rig.device->hold(rig.to_device());
  rig.device->hold(rig.to_host());
  const auto load = rig.engine->load_on_streams(rig.lease({keys[0], keys[1]}), {0, 1}, {});
  const auto spill = rig.engine->spill({keys[2], keys[3]}, {2, 3}, {});
  CHECK(load->wait_layer_on(rig.forward, 2));
  while (rig.pool->stats().writing != 2) std::this_thread::yield();
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    rig.engine->close();
    closed = true;
  });
  std::this_thread::sleep_for(milliseconds(10));
  const bool waited = !closed && !load->ticket.done() && !spill->device_done();
  rig.device->release_all();
  closer.join();
  CHECK(waited);
  CHECK(load->ticket.done() && spill->done());
  CHECK(rig.pool->stats().pinned == 0 && rig.pool->stats().writing == 0);
}

TEST(a_spill_of_more_pages_than_slots_is_stored_whole) {
  for (const CopyPath path : kPaths) {
    StreamRig rig(few_slots(path));
    const auto keys = random_keys(24);
    std::vector<std::int64_t> pages;
    for (std::size_t i = 0; i < 24; ++i) {
      pages.push_back(static_cast<std::int64_t>(i));
      rig.fill_page(pages.back(), keys[i]);
    }
    const auto spill = rig.engine->spill(keys, pages, {});
    spill->wait();
    CHECK(spill->stored() == 24);
    for (const Key& key : keys) CHECK(rig.block_is(key));
    for (const std::int64_t page : pages) rig.wipe_page(page);
    CHECK(rig.engine->load(rig.lease(keys), pages, {})->wait());
    for (std::size_t i = 0; i < 24; ++i) CHECK(rig.page_is(pages[i], keys[i]));
    CHECK(rig.engine->check().empty());
  }
}

// What a ticket holds is given back before it says that it is done.
TEST(a_page_that_is_passed_over_holds_no_slot_when_its_ticket_is_done) {
  StreamRig rig;
  const auto keys = random_keys(1);
  rig.store(keys);
  for (int i = 0; i < 3000; ++i) {
    const auto spill = rig.engine->spill(keys, {0}, {});
    while (!spill->done()) {
    }
    CHECK(rig.engine->check().empty());
    CHECK(spill->present() == 1);
  }
}

TEST(a_forked_child_forgets_the_engine_and_the_parent_goes_on) {
  StreamRig rig;
  const auto keys = random_keys(2);
  rig.store(keys);
  const auto load = rig.engine->load_on_streams(rig.lease({keys[0]}), {0}, {});
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    rig.engine->close();
    rig.engine.reset();
    ::_exit(0);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(load->ticket.wait());
  CHECK(rig.engine->load(rig.lease({keys[1]}), {1}, {})->wait());
  CHECK(rig.page_is(0, keys[0]) && rig.page_is(1, keys[1]));
}

}  // namespace hpkv

TEST_MAIN
