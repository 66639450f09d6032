// Memory of the pool that is registered with the device: blocks are read where they lie, what is
// not registered goes through staging, and a refusal ends nothing but registering.
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "copy/stream/engine.h"
#include "copy/stream/registered_pool.h"
#include "tests/check.h"
#include "tests/stream_rig.h"

namespace hpkv {

using std::chrono::milliseconds;
using stream::CopyPath;
using stream::Cover;
using stream::RegisteredPool;
using stream::StreamOptions;
using test::few_slots;
using test::random_keys;
using test::StreamRig;

namespace {

StreamOptions registering(CopyPath path = CopyPath::kernel,
                          std::uint64_t piece_bytes = std::uint64_t{1} << 30) {
  StreamOptions options = few_slots(path);
  options.registered_piece_bytes = piece_bytes;
  return options;
}

// Loads them until as many were read in place, checking each time.
void load_in_place(StreamRig& rig, const std::vector<Key>& keys,
                   const std::vector<std::int64_t>& pages) {
  const std::uint64_t before = rig.engine->stats().loaded_in_place;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (std::uint64_t found = before; found - before < keys.size();) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    for (const std::int64_t page : pages) rig.wipe_page(page);
    CHECK(rig.engine->load(rig.lease(keys), pages, {})->wait());
    for (std::size_t i = 0; i < keys.size(); ++i) CHECK(rig.page_is(pages[i], keys[i]));
    found = rig.engine->stats().loaded_in_place;
  }
}

}  // namespace

TEST(blocks_in_registered_memory_are_read_where_they_lie) {
  for (const CopyPath path : {CopyPath::kernel, CopyPath::batch}) {
    StreamRig rig(registering(path));
    const auto keys = random_keys(5);
    rig.store(keys);
    load_in_place(rig, keys, {1, 3, 5, 7, 9});
    CHECK(rig.engine->notice().empty());
  }
}

TEST(a_block_read_in_place_is_pinned_until_it_has_landed) {
  StreamRig rig(registering());
  const auto keys = random_keys(2);
  rig.store(keys);
  load_in_place(rig, keys, {1, 2});
  rig.device->hold(rig.to_device());
  const auto load = rig.engine->load_on_streams(rig.lease(keys), {3, 4}, {});
  CHECK(load->wait_layer_on(rig.forward, StreamRig::kLayers - 1));
  CHECK(rig.pool->stats().pinned == 2);
  rig.device->release(rig.to_device());
  CHECK(load->ticket.wait() && rig.pool->stats().pinned == 0);
}

TEST(memory_that_becomes_live_later_is_registered_when_a_load_misses_it) {
  StreamRig rig(registering());
  CHECK(rig.engine->stats().loaded_in_place == 0);
  const auto keys = random_keys(1);
  rig.store(keys);
  load_in_place(rig, keys, {1});
}

TEST(no_call_registers_more_than_its_share) {
  constexpr std::uint64_t kShare = 64 << 10;
  StreamRig rig(registering(CopyPath::kernel, kShare));
  rig.store(random_keys(1));
  CHECK(rig.engine->load(rig.lease(random_keys(1)), {0}, {})->wait());
  while (rig.device->registrations().size() < 2) std::this_thread::yield();
  for (const std::uint64_t bytes : rig.device->registrations()) CHECK(bytes <= kShare);
}

TEST(a_refused_registration_is_said_once_and_everything_else_is_staged) {
  for (const std::uint64_t granted : {0, 2}) {
    StreamRig rig(few_slots());
    rig.engine.reset();
    rig.device->refuse_registrations_after(granted);
    const auto keys = random_keys(3);
    rig.store(keys);
    rig.engine = std::make_unique<stream::StreamEngine>(
        rig.device, rig.pool, rig.index, rig.layout(), registering(CopyPath::kernel, 16 << 10));
    while (rig.engine->notice().empty()) std::this_thread::yield();
    CHECK(rig.engine->notice().find("register_host: no more pinned memory") != std::string::npos);
    CHECK(rig.device->registrations().size() == granted);
    for (int round = 0; round < 2; ++round) {
      for (const std::int64_t page : {4, 5, 6}) rig.wipe_page(page);
      CHECK(rig.engine->load(rig.lease(keys), {4, 5, 6}, {})->wait());
      for (std::size_t i = 0; i < 3; ++i) CHECK(rig.page_is(4 + static_cast<int>(i), keys[i]));
    }
    CHECK(!rig.engine->poisoned() && rig.device->refused_registrations() == 1);
    CHECK(rig.device->registrations().size() == granted);
  }
}

TEST(the_thread_that_registers_has_entered_the_device) {
  StreamRig rig(registering());
  const auto keys = random_keys(1);
  rig.store(keys);
  load_in_place(rig, keys, {1});
  CHECK(rig.device->calls_from_outside() == 0);
}

TEST(a_thread_that_may_not_enter_the_device_registers_nothing) {
  StreamRig rig;
  rig.engine.reset();  // its threads enter too
  rig.device->fail_calls("enter_thread", 1);
  RegisteredPool registered(rig.device, rig.pool, 8192);
  while (registered.notice().empty()) std::this_thread::yield();
  CHECK(registered.notice().find("enter_thread: injected") != std::string::npos);
  CHECK(rig.device->registrations().empty());
}

TEST(closing_unregisters_everything_behind_the_last_copy) {
  StreamRig rig(registering());
  const auto keys = random_keys(2);
  rig.store(keys);
  load_in_place(rig, keys, {1, 2});
  rig.device->hold(rig.to_device());
  const auto load = rig.engine->load_on_streams(rig.lease(keys), {3, 4}, {});
  CHECK(load->wait_layer_on(rig.forward, StreamRig::kLayers - 1));
  std::thread closer([&] { rig.engine->close(); });
  std::this_thread::sleep_for(milliseconds(10));
  const bool kept = !rig.device->registrations().empty();
  rig.device->release(rig.to_device());
  closer.join();
  CHECK(kept && rig.device->registrations().empty());
}

TEST(bytes_of_a_copy_are_held_by_one_registration_and_those_of_a_kernel_by_what_lies_end_to_end) {
  const StreamRig rig;
  rig.store(random_keys(1));
  const std::span<std::byte> first = rig.pool->reserved().front();
  RegisteredPool registered(rig.device, rig.pool, 8192);
  while (!registered.holds(first, Cover::adjacent)) std::this_thread::yield();
  for (const Cover cover : {Cover::one, Cover::adjacent}) {
    const bool across = cover == Cover::adjacent;
    CHECK(registered.holds(first.subspan(4096, 4096), cover));
    CHECK(registered.holds(first.subspan(4096, 4097), cover) == across);
    CHECK(registered.holds(first.subspan(8191, 8193), cover) == across);
    CHECK(!registered.holds(std::span(first.data() - 1, 2), cover));
  }
  registered.stop();
  registered.release();
  CHECK(!registered.holds(first.first(1), Cover::adjacent));
}

TEST(a_block_across_registrations_is_read_in_place_by_kernels_and_staged_for_copies) {
  for (const CopyPath path : {CopyPath::kernel, CopyPath::batch}) {
    StreamRig rig(registering(path, 4096));  // every block of this size is in two at least
    const auto keys = random_keys(5);
    rig.store(keys);
    if (path == CopyPath::kernel) {
      load_in_place(rig, keys, {1, 3, 5, 7, 9});
      continue;
    }
    for (int round = 0; round < 20; ++round) {
      CHECK(rig.engine->load(rig.lease(keys), {1, 3, 5, 7, 9}, {})->wait());
    }
    CHECK(rig.engine->stats().loaded_in_place == 0);
    for (std::size_t i = 0; i < 5; ++i) CHECK(rig.page_is(1 + 2 * static_cast<int>(i), keys[i]));
  }
}

TEST(segments_that_lie_end_to_end_are_registered_in_one_call) {
  StreamRig rig;
  rig.engine.reset();
  rig.store(random_keys(600));
  const auto segments = rig.pool->reserved();
  std::size_t stretches = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    stretches += i == 0 || segments[i - 1].data() + segments[i - 1].size() != segments[i].data();
  }
  CHECK(stretches + 2 <= segments.size());
  RegisteredPool registered(rig.device, rig.pool, std::uint64_t{1} << 30);
  while (!registered.holds(segments.back(), Cover::one)) std::this_thread::yield();
  for (const auto& segment : segments) CHECK(registered.holds(segment, Cover::one));
  CHECK(rig.device->registrations().size() == stretches);
}

// What is registered stays as it is; only what is new is one range.
TEST(segments_that_become_live_later_are_registered_together_behind_those_that_are) {
  StreamRig rig;
  rig.engine.reset();
  rig.store(random_keys(1));
  const std::size_t before = rig.pool->reserved().size();
  RegisteredPool registered(rig.device, rig.pool, std::uint64_t{1} << 30);
  while (!registered.holds(rig.pool->reserved().back(), Cover::one)) std::this_thread::yield();
  const std::size_t calls = rig.device->registrations().size();
  rig.store(random_keys(600, 2));
  const auto segments = rig.pool->reserved();
  CHECK(segments.size() > before + 1);
  while (!registered.holds(segments.back(), Cover::one)) std::this_thread::yield();
  CHECK(rig.device->registrations().size() == calls + 1);
  for (const auto& segment : segments) CHECK(registered.holds(segment, Cover::adjacent));
}

}  // namespace hpkv

TEST_MAIN
