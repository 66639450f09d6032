// Memory of the pool that is registered with the device: blocks are read where they lie, what is
// not registered goes through staging, and a refusal ends nothing but registering.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <random>
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
using stream::Streams;
using test::few_slots;
using test::random_keys;
using test::StreamRig;

namespace {

constexpr std::chrono::hours kNever{1};

StreamOptions registering(CopyPath path = CopyPath::kernel,
                          std::uint64_t piece_bytes = std::uint64_t{1} << 30) {
  StreamOptions options = few_slots(path);
  options.registered_piece_bytes = piece_bytes;
  options.registered_look_every = kNever;
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

// A load of `count` pages, the same ones again and again where the rig has fewer.
struct Repeated {
  std::vector<Key> keys;
  std::vector<std::int64_t> pages;

  Repeated(const std::vector<Key>& some, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      keys.push_back(some[i % some.size()]);
      pages.push_back(static_cast<std::int64_t>(i % some.size()));
    }
  }
};

// Whether every layer's copies are enqueued within the limit, and a wait for it is, while the
// forward stream is held.
bool is_enqueued_whole(StreamRig& rig, const Repeated& what,
                       std::chrono::seconds limit = std::chrono::seconds(60)) {
  rig.device->hold(rig.forward);
  rig.device->launch(rig.forward, [&] {
    for (const std::int64_t page : what.pages) rig.wipe_page(page);
  });
  const auto load =
      rig.engine->load_on_streams(rig.lease(what.keys), what.pages, Streams{rig.forward});
  std::atomic<bool> enqueued{false};
  std::thread scheduler([&] {
    bool good = true;
    for (std::uint32_t layer = 0; layer < StreamRig::kLayers; ++layer) {
      good = load->wait_layer_on(rig.forward, layer) && good;
    }
    enqueued = good;
  });
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!enqueued && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  const bool in_time = enqueued && !load->ticket.layer_done(0);
  rig.device->release(rig.forward);
  scheduler.join();
  CHECK(load->ticket.wait());
  for (std::size_t i = 0; i < what.keys.size(); ++i)
    CHECK(rig.page_is(what.pages[i], what.keys[i]));
  return in_time;
}

constexpr std::uint64_t kSmallPiece = 32 << 10;

// Registrations of that size that come before the first of these blocks.
std::size_t pieces_before(const StreamRig& rig, const std::vector<Key>& keys) {
  const std::byte* first = nullptr;
  const Lease lease = rig.lease(keys);
  for (const BlockRef& ref : lease.refs()) {
    const std::byte* const at = rig.pool->payload(ref);
    first = first == nullptr ? at : std::min(first, at);
  }
  std::size_t count = 0;
  for (const std::span<std::byte> segment : rig.pool->reserved()) {
    if (segment.data() > first) break;
    const auto to_block = static_cast<std::uint64_t>(first - segment.data());
    count += std::min<std::uint64_t>(to_block, segment.size()) / kSmallPiece;
  }
  return count;
}

std::vector<std::int64_t> first_pages(std::size_t count) {
  std::vector<std::int64_t> pages(count);
  std::iota(pages.begin(), pages.end(), 0);
  return pages;
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

TEST(memory_that_becomes_live_later_is_registered_before_anybody_loads_from_it) {
  StreamOptions options = registering();
  options.registered_look_every = milliseconds(1);
  StreamRig rig(options);
  std::uint64_t before = 0;
  for (const std::size_t count : {1, 600}) {  // the second ones when it has looked
    rig.store(random_keys(count, count));
    std::uint64_t live = 0;
    for (const std::span<std::byte> segment : rig.pool->reserved()) live += segment.size();
    CHECK(live > before);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (before = 0; before != live;) {
      CHECK(std::chrono::steady_clock::now() < deadline);
      before = 0;
      for (const std::uint64_t bytes : rig.device->registrations()) before += bytes;
    }
  }
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
  RegisteredPool registered(rig.device, rig.pool, 8192, kNever);
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
  RegisteredPool registered(rig.device, rig.pool, 8192, kNever);
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

// How many there are of what lies end to end.
template <typename Segments>
std::size_t stretches_of(const Segments& segments) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    count += i == 0 || segments[i - 1].data() + segments[i - 1].size() != segments[i].data();
  }
  return count;
}

TEST(segments_that_lie_end_to_end_are_registered_in_one_call) {
  StreamRig rig;
  rig.engine.reset();
  rig.store(random_keys(600));
  const auto segments = rig.pool->reserved();
  const std::size_t stretches = stretches_of(segments);
  CHECK(stretches + 2 <= segments.size());
  RegisteredPool registered(rig.device, rig.pool, std::uint64_t{1} << 30, kNever);
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
  RegisteredPool registered(rig.device, rig.pool, std::uint64_t{1} << 30, kNever);
  // Nobody asks for a segment here, which would make the thread look again, at any moment.
  const std::size_t calls = stretches_of(rig.pool->reserved());
  while (rig.device->registrations().size() < calls) std::this_thread::yield();
  rig.store(random_keys(600, 2));
  const auto segments = rig.pool->reserved();
  CHECK(segments.size() > before + 1);
  while (!registered.holds(segments.back(), Cover::one)) std::this_thread::yield();
  CHECK(rig.device->registrations().size() == calls + 1);
  for (const auto& segment : segments) CHECK(registered.holds(segment, Cover::adjacent));
}

// ---- what is read in place takes no slots ----

TEST(a_load_in_place_of_many_more_pages_than_slots_is_enqueued_whole_before_anything_of_it_runs) {
  for (const CopyPath path : {CopyPath::kernel, CopyPath::batch}) {
    StreamRig rig(registering(path));  // 3 slots for loads
    const auto keys = random_keys(StreamRig::kPages);
    rig.store(keys);
    load_in_place(rig, keys, first_pages(keys.size()));
    for (const std::size_t count : {4, 24, 256, 257, 700}) {
      CHECK(is_enqueued_whole(rig, Repeated(keys, count)));
    }
    rig.engine->quiesce();
    CHECK(rig.engine->check().empty());
  }
}

TEST(loads_in_place_hold_tables_until_they_have_landed_and_wait_for_them) {
  StreamOptions options = registering();
  options.load_tables = 2;
  StreamRig rig(options);
  const auto keys = random_keys(StreamRig::kPages);
  rig.store(keys);
  load_in_place(rig, keys, first_pages(keys.size()));
  CHECK(is_enqueued_whole(rig, Repeated(keys, 512)));
  // A third chunk, which is not there before the forward pass is over.
  CHECK(!is_enqueued_whole(rig, Repeated(keys, 513), std::chrono::seconds(2)));
  rig.device->hold(rig.to_device());
  const auto first = rig.engine->load_on_streams(rig.lease({keys[0]}), {0}, {});
  const auto second = rig.engine->load_on_streams(rig.lease({keys[1]}), {1}, {});
  const auto third = rig.engine->load_on_streams(rig.lease({keys[2]}), {2}, {});
  CHECK(first->wait_layer_on(rig.forward, 2) && second->wait_layer_on(rig.forward, 2));
  std::this_thread::sleep_for(milliseconds(5));
  CHECK(third->try_wait_layer_on(rig.forward, 0) == std::nullopt);
  CHECK(!rig.engine->check().empty());
  rig.device->release(rig.to_device());
  CHECK(third->wait_layer_on(rig.forward, 2) && third->ticket.wait());
  rig.engine->quiesce();
  CHECK(rig.engine->check().empty());
}

TEST(closing_ends_the_wait_for_a_table) {
  StreamOptions options = registering();
  options.load_tables = 1;
  StreamRig rig(options);
  const auto keys = random_keys(2);
  rig.store(keys);
  load_in_place(rig, keys, {0, 1});
  rig.device->hold(rig.to_device());
  const auto first = rig.engine->load_on_streams(rig.lease({keys[0]}), {0}, {});
  const auto second = rig.engine->load_on_streams(rig.lease({keys[1]}), {1}, {});
  CHECK(first->wait_layer_on(rig.forward, 2));
  std::thread closer([&] { rig.engine->close(); });
  CHECK(!second->wait_layer_on(rig.forward, 0));
  rig.device->release(rig.to_device());
  closer.join();
  CHECK(!second->ticket.wait() && rig.engine->check().empty() && rig.pool->stats().pinned == 0);
}

// Only the first registrations are granted, so some blocks are in place and others are not; pages
// in random order, so that chunks and batches are of both.
TEST(loads_of_pages_in_place_and_staged_ones_bring_every_byte) {
  int mixtures = 0;
  for (std::uint64_t seed = 1; seed <= 16; ++seed) {
    std::mt19937_64 random(seed);
    const CopyPath path = seed % 3 == 0 ? CopyPath::batch : CopyPath::kernel;
    StreamOptions options = registering(path, kSmallPiece);
    options.load_tables = 1 + seed % 3;
    StreamRig rig(few_slots(), seed);
    rig.engine.reset();
    auto keys = random_keys(StreamRig::kPages, seed);
    rig.store(keys);
    rig.device->refuse_registrations_after(pieces_before(rig, keys) + random() % 5);
    rig.engine = std::make_unique<stream::StreamEngine>(rig.device, rig.pool, rig.index,
                                                        rig.layout(), options);
    while (rig.engine->notice().empty()) {
      CHECK(rig.engine->load(rig.lease({keys[0]}), {0}, {})->wait());
    }
    rig.device->set_delay_us(10);
    const auto before = rig.engine->stats();
    for (int round = 0; round < 6; ++round) {
      std::ranges::shuffle(keys, random);
      const Repeated what(keys, 1 + random() % (round == 0 ? 300 : 40));
      for (const std::int64_t page : what.pages) rig.wipe_page(page);
      CHECK(rig.engine->load(rig.lease(what.keys), what.pages, {})->wait());
      for (std::size_t i = 0; i < what.keys.size(); ++i) {
        CHECK(rig.page_is(what.pages[i], what.keys[i]));
      }
    }
    rig.engine->quiesce();
    CHECK(rig.engine->check().empty());
    const auto after = rig.engine->stats();
    const std::uint64_t in_place = after.loaded_in_place - before.loaded_in_place;
    mixtures += in_place != 0 && in_place < after.loaded_blocks - before.loaded_blocks ? 1 : 0;
  }
  CHECK(mixtures >= 5);
}

}  // namespace hpkv

TEST_MAIN
