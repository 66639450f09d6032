// The stream engine and its caller's streams: page indices that only the device has, what waits for
// which of the two streams, and a forward pass that overwrites what a spill still reads.
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
using stream::DevicePages;
using stream::StreamHandle;
using stream::Streams;
using test::few_slots;
using test::random_keys;
using test::StreamRig;

namespace {

constexpr CopyPath kPaths[] = {CopyPath::kernel, CopyPath::batch};

// A rig with a schedule stream, and page indices in "device" memory.
class CallersRig : public StreamRig {
 public:
  explicit CallersRig(CopyPath path = CopyPath::kernel) : StreamRig(few_pieces(path)) {
    CHECK(device->make_stream(false, schedule).ok());
  }
  ~CallersRig() {
    device->release_all();  // a test that failed may have left one held
    static_cast<void>(device->synchronize_stream(schedule));
  }

  static stream::StreamOptions few_pieces(CopyPath path) {
    stream::StreamOptions options = few_slots(path);
    options.index_rows = 4;
    return options;
  }

  // The schedule stream writes these indices; until it does, they say pages that are wrong.
  DevicePages choose(const std::vector<std::int64_t>& pages) {
    first_slots.assign(pages.size(), 0);
    device->launch(schedule, [this, pages] {
      for (std::size_t i = 0; i < pages.size(); ++i) {
        first_slots[i] = pages[i] * static_cast<std::int64_t>(kTokens);
      }
    });
    return {first_slots.data(), pages.size(), kTokens};
  }
  void fill_on_forward(const std::vector<std::int64_t>& pages, const std::vector<Key>& keys) {
    device->launch(forward, [this, pages, keys] {
      for (std::size_t i = 0; i < pages.size(); ++i) fill_page(pages[i], keys[i]);
    });
  }
  void wipe_on_forward(const std::vector<std::int64_t>& pages) {
    device->launch(forward, [this, pages] {
      for (const std::int64_t page : pages) wipe_page(page);
    });
  }
  [[nodiscard]] Streams streams() const { return {schedule, forward}; }
  [[nodiscard]] bool blocks_are(const std::vector<Key>& keys) const {
    bool right = true;
    for (const Key& key : keys) right = right && block_is(key);
    return right;
  }
  void await_writing(std::size_t blocks) const {
    const auto deadline = std::chrono::steady_clock::now() + seconds(20);
    while (pool->stats().writing != blocks) {
      CHECK(std::chrono::steady_clock::now() < deadline);
      std::this_thread::yield();
    }
  }
  StreamHandle schedule = nullptr;
  std::vector<std::int64_t> first_slots;
};

std::vector<std::int64_t> every_second_page(std::size_t count) {
  std::vector<std::int64_t> pages;
  for (std::size_t i = 0; i < count; ++i) pages.push_back(23 - 2 * static_cast<std::int64_t>(i));
  return pages;
}

}  // namespace

// ---- spills by indices of the device ----

TEST(a_spill_by_batches_fetches_indices_behind_the_chooser_and_pages_behind_the_user) {
  CallersRig rig(CopyPath::batch);
  const auto keys = random_keys(2);
  rig.device->hold(rig.schedule);
  rig.device->hold(rig.forward);
  const DevicePages pages = rig.choose({3, 7});
  rig.fill_on_forward({3, 7}, keys);
  const auto spill = rig.engine->spill_resident(keys, pages, rig.streams());
  std::this_thread::sleep_for(milliseconds(5));
  CHECK(rig.pool->stats().writing == 0);  // nobody knows the pages yet
  rig.device->release(rig.schedule);
  rig.await_writing(2);  // known while the forward has not run
  CHECK(!spill->ticket.wait_device(milliseconds(5)));
  rig.device->release(rig.forward);
  spill->ticket.wait();
  CHECK(spill->ticket.stored() == 2 && rig.blocks_are(keys));
  CHECK(!rig.device->has_waited(std::this_thread::get_id()));
}

// As after a prefill: the schedule stream has not chosen yet, and the next forward is launched.
TEST(a_spill_by_the_kernel_is_enqueued_before_anybody_knows_its_indices) {
  for (const bool chooser_first : {true, false}) {
    CallersRig rig;
    const auto keys = random_keys(3);
    const std::vector<std::int64_t> chosen = {3, 7, 0};
    rig.device->hold(rig.schedule);
    rig.device->hold(rig.forward);
    const DevicePages pages = rig.choose(chosen);
    rig.fill_on_forward(chosen, keys);
    const auto spill = rig.engine->spill_resident(keys, pages, rig.streams());
    CHECK(spill->wait_reads_on(rig.forward, seconds(60)));
    rig.wipe_on_forward(chosen);
    CHECK(!rig.device->has_waited(std::this_thread::get_id()));
    rig.device->release(chooser_first ? rig.schedule : rig.forward);
    CHECK(!spill->ticket.wait_device(milliseconds(5)));  // for want of the other one
    rig.device->release(chooser_first ? rig.forward : rig.schedule);
    spill->ticket.wait();
    CHECK(spill->ticket.stored() == 3 && rig.blocks_are(keys));
  }
}

TEST(a_spill_without_a_user_waits_for_the_chooser_alone) {
  for (const bool equal : {false, true}) {
    CallersRig rig;
    const auto keys = random_keys(1);
    rig.fill_page(5, keys[0]);
    rig.device->hold(rig.forward);
    rig.device->launch(rig.forward, [] {});
    const DevicePages pages = rig.choose({5});
    const StreamHandle user = equal ? rig.schedule : nullptr;
    const auto spill = rig.engine->spill_resident(keys, pages, Streams{rig.schedule, user});
    spill->ticket.wait();
    CHECK(spill->ticket.stored() == 1 && rig.block_is(keys[0]));
  }
}

TEST(more_indices_than_are_fetched_at_once_come_in_pieces) {
  for (const CopyPath path : kPaths) {
    CallersRig rig(path);
    const auto keys = random_keys(11);
    const auto pages = every_second_page(11);
    rig.fill_on_forward(pages, keys);
    const auto spill = rig.engine->spill_resident(keys, rig.choose(pages), rig.streams());
    spill->ticket.wait();
    CHECK(spill->ticket.stored() == 11 && rig.blocks_are(keys));
  }
}

TEST(a_page_that_is_none_is_dropped_and_the_others_are_stored) {
  for (const CopyPath path : kPaths) {
    CallersRig rig(path);
    const auto keys = random_keys(4);
    const auto page_count = static_cast<std::int64_t>(StreamRig::kPages);
    rig.fill_page(page_count - 1, keys[1]);
    rig.fill_page(0, keys[3]);
    const DevicePages pages = rig.choose({-1, page_count - 1, page_count, 0});
    const auto spill = rig.engine->spill_resident(keys, pages, rig.streams());
    spill->ticket.wait();
    CHECK(spill->ticket.stored() == 2 && spill->ticket.dropped() == 2);
    CHECK(rig.block_is(keys[1]) && rig.block_is(keys[3]));
    CHECK(rig.pool->lookup({&keys[0], 1}) == 0 && rig.pool->lookup({&keys[2], 1}) == 0);
    CHECK(rig.engine->stats().spill_dropped_outside == 2);
    CHECK(spill->wait_reads_on(rig.forward, seconds(0)));
  }
}

TEST(a_spill_by_indices_takes_turns) {
  for (const CopyPath path : kPaths) {
    CallersRig rig(path);
    const auto keys = random_keys(5);
    const auto pages = every_second_page(5);
    rig.fill_on_forward(pages, keys);
    const auto spill = rig.engine->spill_resident(keys, rig.choose(pages), rig.streams(), {2, 3});
    spill->ticket.wait();
    CHECK(spill->ticket.stored() == 5 && rig.blocks_are(keys));
  }
}

TEST(only_pages_that_are_missing_are_gathered_by_their_rows) {
  CallersRig rig;
  const auto keys = random_keys(6);
  const auto pages = every_second_page(6);
  rig.store({keys[0], keys[2], keys[3]});
  rig.fill_on_forward(pages, keys);
  const auto spill = rig.engine->spill_resident(keys, rig.choose(pages), rig.streams());
  spill->ticket.wait();
  CHECK(spill->ticket.stored() == 3 && spill->ticket.present() == 3 && rig.blocks_are(keys));
}

TEST(a_spill_by_indices_with_wrong_numbers_is_refused) {
  CallersRig rig;
  const auto keys = random_keys(2);
  const DevicePages pages = rig.choose({0, 1});
  const std::int64_t* const slots = pages.first_slots;
  CHECK_THROWS(rig.engine->spill_resident(keys, {slots, 1, 16}, rig.streams()));
  CHECK_THROWS(rig.engine->spill_resident(keys, {slots, 2, 0}, rig.streams()));
  CHECK_THROWS(rig.engine->spill_resident(keys, {nullptr, 2, 16}, rig.streams()));
  const auto* const odd = reinterpret_cast<const std::int64_t*>(
      reinterpret_cast<const std::byte*>(slots) + 4);  // no int64 lies there
  CHECK_THROWS(rig.engine->spill_resident(keys, {odd, 2, 16}, rig.streams()));
  CHECK_THROWS(rig.engine->spill_resident(keys, pages, rig.streams(), {3, 3}));
  CHECK(rig.engine->spill_resident({}, {nullptr, 0, 16}, rig.streams())->ticket.done());
}

TEST(a_cancelled_spill_does_not_ask_for_its_indices) {
  CallersRig rig(CopyPath::batch);
  const auto keys = random_keys(2);
  rig.engine->faults().fail_next(CopyKind::spill, 1);
  const auto spill = rig.engine->spill_resident(keys, {rig.first_slots.data() + 1, 2, 16},
                                                Streams{rig.schedule, rig.forward});
  spill->ticket.wait();
  CHECK(spill->ticket.dropped() == 2);
  CHECK(rig.engine->stats().spill_dropped_cancelled == 2);
}

// ---- loads behind the caller's streams ----

TEST(a_load_waits_for_the_chooser_and_for_the_user) {
  for (const bool with_source : {false, true}) {
    CallersRig rig;
    const auto keys = random_keys(3);
    rig.store({keys[1], keys[2]});
    rig.fill_page(4, keys[0]);
    rig.device->hold(rig.schedule);
    rig.device->hold(rig.forward);
    bool intact = false;
    rig.device->launch(rig.forward, [&] { intact = rig.page_is(4, keys[0]); });
    const DevicePages pages = rig.choose({4, 5});
    const auto load = rig.engine->load_resident(rig.lease({keys[1], keys[2]}), pages, rig.streams(),
                                                with_source ? rig.source() : nullptr);
    // The host needs neither: what waits for them is on the device.
    for (std::uint32_t layer = 0; layer < StreamRig::kLayers; ++layer) {
      CHECK(load->wait_layer_on(rig.forward, layer));
    }
    for (const StreamHandle held : {rig.schedule, rig.forward}) {
      std::this_thread::sleep_for(milliseconds(5));
      CHECK(!load->ticket.layer_done(0));
      rig.device->release(held);
    }
    CHECK(load->ticket.wait());
    CHECK(intact && rig.page_is(4, keys[1]) && rig.page_is(5, keys[2]));
    CHECK(!rig.device->has_waited(std::this_thread::get_id()));
  }
}

TEST(a_load_of_known_pages_waits_for_both_streams_too) {
  for (const bool for_user : {false, true}) {
    CallersRig rig;
    const auto keys = random_keys(1);
    rig.store(keys);
    const StreamHandle held = for_user ? rig.forward : rig.schedule;
    rig.device->hold(held);
    rig.device->launch(held, [] {});
    const auto load = rig.engine->load_on_streams(rig.lease(keys), {4}, rig.streams());
    CHECK(load->wait_layer_on(rig.forward, 2));
    std::this_thread::sleep_for(milliseconds(5));
    CHECK(!load->ticket.layer_done(0));
    rig.device->release(held);
    CHECK(load->ticket.wait() && rig.page_is(4, keys[0]));
  }
}

TEST(a_load_leaves_a_page_out_that_is_none) {
  for (const bool with_source : {false, true}) {
    CallersRig rig;
    const auto keys = random_keys(3);
    rig.store(keys);
    rig.fill_page(3, keys[1]);
    const auto expected = rig.memory;
    rig.wipe_page(3);
    const DevicePages pages = rig.choose({-1, 3, static_cast<std::int64_t>(StreamRig::kPages)});
    const auto load = rig.engine->load_resident(rig.lease(keys), pages, rig.streams(),
                                                with_source ? rig.source() : nullptr);
    CHECK(load->ticket.wait());
    CHECK(rig.memory == expected && rig.pool->stats().pinned == 0);
  }
}

TEST(a_wait_for_a_layer_that_is_not_enqueued_is_not_tried) {
  CallersRig rig;
  const auto keys = random_keys(1);
  rig.store(keys);
  rig.engine->hold_loads();
  const auto load = rig.engine->load_resident(rig.lease(keys), rig.choose({4}), rig.streams());
  CHECK(load->try_wait_layer_on(rig.forward, 0) == std::nullopt);
  rig.engine->release_loads();
  CHECK(load->wait_layer_on(rig.forward, 0));
  CHECK(load->try_wait_layer_on(rig.forward, 0) == true);
  CHECK(load->ticket.wait());
}

// ---- overwriting what a spill reads ----

TEST(a_forward_overwrites_pages_right_behind_the_reads_and_not_before) {
  for (const CopyPath path : kPaths) {
    CallersRig rig(path);
    const auto keys = random_keys(3);
    const std::vector<std::int64_t> pages = {0, 1, 2};
    rig.fill_on_forward(pages, keys);
    rig.device->hold(rig.to_host());
    const auto spill = rig.engine->spill_resident(keys, rig.choose(pages), rig.streams());
    CHECK(spill->wait_reads_on(rig.forward, seconds(60)));
    rig.wipe_on_forward(pages);
    CHECK(!rig.device->has_waited(std::this_thread::get_id()));
    std::this_thread::sleep_for(milliseconds(5));
    CHECK(!spill->ticket.device_done());
    rig.device->release(rig.to_host());
    spill->ticket.wait();
    CHECK(spill->ticket.stored() == 3 && rig.blocks_are(keys));
  }
}

TEST(reads_that_are_not_enqueued_in_time_are_said_to_be_and_cancelling_settles_it) {
  CallersRig rig(CopyPath::batch);
  const auto keys = random_keys(2);
  rig.device->hold(rig.schedule);
  const auto spill = rig.engine->spill_resident(keys, rig.choose({0, 1}), rig.streams());
  while (rig.device->wait_count() == 0) std::this_thread::yield();  // for the indices
  CHECK(!spill->wait_reads_on(rig.forward, milliseconds(5)));
  spill->cancel();
  CHECK(spill->wait_reads_on(rig.forward, seconds(0)));
  CHECK(!spill->ticket.done());
  rig.device->release(rig.schedule);
  spill->ticket.wait();
  CHECK(spill->ticket.dropped() == 2 && rig.pool->lookup(keys) == 0);
}

TEST(reads_of_more_pages_than_slots_are_waited_for_to_the_last) {
  CallersRig rig;
  const auto keys = random_keys(8);
  const auto pages = every_second_page(8);
  rig.fill_on_forward(pages, keys);
  rig.device->hold(rig.to_host());
  const auto spill = rig.engine->spill_resident(keys, rig.choose(pages), rig.streams());
  rig.await_writing(3);  // as many as there are slots
  CHECK(!spill->wait_reads_on(rig.forward, milliseconds(5)));
  rig.device->release(rig.to_host());
  CHECK(spill->wait_reads_on(rig.forward, seconds(60)));
  rig.wipe_on_forward(pages);
  spill->ticket.wait();
  CHECK(spill->ticket.stored() == 8 && rig.blocks_are(keys));
}

TEST(cancelling_ends_a_wait_for_reads_that_will_not_come) {
  CallersRig rig(CopyPath::batch);
  const auto keys = random_keys(2);
  rig.device->hold(rig.schedule);
  const auto spill = rig.engine->spill_resident(keys, rig.choose({0, 1}), rig.streams());
  std::atomic<bool> over{false};
  std::thread waiter([&] { over = spill->wait_reads_on(rig.forward, std::chrono::hours(1)); });
  std::this_thread::sleep_for(milliseconds(2));
  spill->cancel();
  const auto deadline = std::chrono::steady_clock::now() + seconds(20);
  while (!over && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  const bool in_time = over;
  rig.device->release(rig.schedule);  // ends it in any case
  waiter.join();
  CHECK(in_time);
  spill->ticket.wait();
}

TEST(a_spill_without_reads_in_progress_is_waited_for_by_nobody) {
  CallersRig rig;
  const auto keys = random_keys(1);
  const auto spill = rig.engine->spill_resident(keys, rig.choose({0}), rig.streams());
  spill->ticket.wait();
  // The threads of loads have made the calls they begin with.
  CHECK(rig.engine->load_on_streams(rig.lease(keys), {1}, rig.streams())->ticket.wait());
  rig.engine->quiesce();
  // No call to the device, which would fail.
  rig.device->fail_call(1);
  CHECK(spill->wait_reads_on(rig.forward, seconds(0)));
  CHECK(!rig.device->has_failed());
  rig.device->fail_call(0);
  const auto again = rig.engine->spill_resident(keys, rig.choose({0}), rig.streams());
  again->ticket.wait();
  CHECK(again->ticket.present() == 1 && again->wait_reads_on(rig.forward, seconds(0)));
}

// The device may go on reading after a call that failed: only the engine's drain ends that.
TEST(after_a_wait_of_the_engine_fails_pages_are_free_when_the_stream_is_drained) {
  CallersRig rig(CopyPath::batch);
  const auto keys = random_keys(2);
  rig.device->hold(rig.schedule);
  rig.device->hold(rig.to_host());
  const auto spill = rig.engine->spill_resident(keys, rig.choose({5, 6}), rig.streams());
  while (rig.device->wait_count() == 0) std::this_thread::yield();  // for the indices
  rig.device->fail_calls("synchronize", 1);
  rig.device->release(rig.schedule);
  while (!rig.engine->poisoned()) std::this_thread::yield();
  CHECK(!spill->wait_reads_on(rig.forward, milliseconds(5)));
  rig.device->release(rig.to_host());
  CHECK(spill->wait_reads_on(rig.forward, seconds(60)));
  spill->ticket.wait();
  CHECK(spill->ticket.dropped() == 2);
}

TEST(after_the_wait_for_the_reads_fails_pages_are_free_when_they_have_landed) {
  CallersRig rig;
  const auto keys = random_keys(2);
  rig.device->hold(rig.to_host());
  const auto spill = rig.engine->spill_resident(keys, rig.choose({5, 6}), rig.streams());
  CHECK(spill->wait_reads_on(rig.schedule, seconds(60)));
  rig.device->fail_calls("wait", 1);
  CHECK(!spill->wait_reads_on(rig.forward, milliseconds(5)));
  CHECK(rig.engine->poisoned());
  rig.device->release(rig.to_host());
  CHECK(spill->wait_reads_on(rig.forward, seconds(60)));
  CHECK(spill->ticket.device_done());
}

TEST(on_a_lost_device_pages_are_free_at_once) {
  CallersRig rig;
  const auto keys = random_keys(2);
  rig.device->hold(rig.to_host());
  const auto spill = rig.engine->spill_resident(keys, rig.choose({5, 6}), rig.streams());
  CHECK(spill->wait_reads_on(rig.schedule, seconds(60)));
  rig.device->fail_call(1, true);
  CHECK(spill->wait_reads_on(rig.forward, seconds(60)));
  CHECK(rig.engine->poisoned() && spill->ticket.device_done());
  spill->ticket.wait();
  CHECK(spill->ticket.dropped() == 2);
}

TEST(a_spill_outlives_its_engine) {
  CallersRig rig;
  const auto keys = random_keys(1);
  const auto spill = rig.engine->spill_resident(keys, rig.choose({0}), rig.streams());
  rig.engine.reset();
  CHECK(spill->ticket.done() && spill->wait_reads_on(rig.forward, seconds(0)));
}

TEST(a_ticket_whose_reads_are_over_says_so_before_its_pages_are_stored) {
  SpillTicket ticket(3);
  CHECK(ticket.begin_read() && ticket.begin_read());
  CHECK(ticket.end_read());
  ticket.pass_over(1);
  ticket.settle(SpillOutcome::present);
  CHECK(!ticket.device_done());
  CHECK(ticket.end_read());
  CHECK(ticket.device_done() && !ticket.done());
  ticket.settle(SpillOutcome::stored, 2);
  CHECK(ticket.done());
}

}  // namespace hpkv

TEST_MAIN
