// Loads that are held and released together: in which order they reach the device, what has no room
// beside the others, what one that fails leaves behind, and how a hold ends.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "copy/stream/engine.h"
#include "tests/check.h"
#include "tests/stream_rig.h"

namespace hpkv {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;
using stream::CopyPath;
using stream::StreamLoad;
using stream::Streams;
using test::few_slots;
using test::random_keys;
using test::RecordedEvent;
using test::StreamRig;

namespace {

constexpr CopyPath kPaths[] = {CopyPath::kernel, CopyPath::batch};
constexpr seconds kDeadline{20};

// The copy of a layer of a chunk, by its first page.
struct Write {
  std::uint32_t layer;
  std::int64_t page;

  bool operator==(const Write&) const = default;
};

// A rig that sees what reaches the device. Three slots for loads.
class GroupRig : public StreamRig {
 public:
  explicit GroupRig(stream::StreamOptions options = few_slots(), std::uint64_t seed = 1)
      : StreamRig(options, seed) {
    device->on_write([begin = at(0, 0), seen = seen_](const std::byte* to) {
      const auto page = (to - begin) / static_cast<std::int64_t>(kPageBytes);
      const auto pages = static_cast<std::int64_t>(kPages);
      const std::lock_guard lock(seen->mutex);
      seen->writes.push_back({static_cast<std::uint32_t>(page / pages / 2), page % pages});
    });
  }

  [[nodiscard]] std::vector<Write> writes() const {
    const std::lock_guard lock(seen_->mutex);
    return seen_->writes;
  }
  [[nodiscard]] std::shared_ptr<StreamLoad> load(const std::vector<Key>& keys,
                                                 const std::vector<std::int64_t>& pages,
                                                 const stream::After& after = {}) const {
    return engine->load_on_streams(lease(keys), pages, after);
  }
  // Until its copies are enqueued.
  void await_enqueued(StreamLoad& load, std::uint32_t layer) const {
    await([&] { return load.try_wait_layer_on(forward, layer).has_value(); });
    CHECK(load.wait_layer_on(forward, layer));
  }
  template <typename Condition>
  static void await(Condition&& condition) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    while (!condition()) {
      CHECK(std::chrono::steady_clock::now() < deadline);
      std::this_thread::yield();
    }
  }
  static void await_end(const StreamLoad& load) {
    await([&] { return load.ticket.done(); });
  }

 private:
  struct Seen {
    std::mutex mutex;
    std::vector<Write> writes;  // mutex
  };

  // The device's too, which may outlive the rig.
  const std::shared_ptr<Seen> seen_ = std::make_shared<Seen>();
};

}  // namespace

// ---- order ----

TEST(loads_of_a_group_reach_the_device_layer_by_layer) {
  for (const CopyPath path : kPaths) {
    GroupRig rig(few_slots(path));
    const auto keys = random_keys(3);
    rig.store(keys);
    const std::vector<std::int64_t> first_slots = {9 * 16};
    rig.engine->hold_loads();
    const auto first = rig.load({keys[0]}, {3});
    const auto sourced = rig.engine->load_resident(
        rig.lease({keys[1]}), {first_slots.data(), 1, 16}, Streams{rig.forward}, rig.source());
    const auto last = rig.load({keys[2]}, {5});
    rig.engine->release_loads();
    for (const auto& load : {first, sourced, last}) CHECK(load->ticket.wait());
    // What goes by the kernel is behind the copies of the same layer.
    const std::int64_t pages[] = {3, path == CopyPath::kernel ? 9 : 5,
                                  path == CopyPath::kernel ? 5 : 9};
    std::vector<Write> expected;
    for (std::uint32_t layer = 0; layer < StreamRig::kLayers; ++layer) {
      for (const std::int64_t page : pages) expected.push_back({layer, page});
    }
    CHECK(rig.writes() == expected);
    CHECK(rig.page_is(3, keys[0]) && rig.page_is(9, keys[1]) && rig.page_is(5, keys[2]));
  }
}

TEST(the_first_layer_of_the_last_load_is_there_before_later_ones_of_the_first) {
  for (const CopyPath path : kPaths) {
    GroupRig rig(few_slots(path));
    const auto keys = random_keys(2);
    rig.store(keys);
    rig.engine->faults().set_delay(CopyKind::load, 1, hours(1));
    rig.engine->hold_loads();
    const auto first = rig.load({keys[0]}, {3});
    const auto last = rig.load({keys[1]}, {5});
    rig.engine->release_loads();
    rig.await_enqueued(*last, 0);
    CHECK(rig.device->synchronize_stream(rig.forward).ok());
    CHECK(rig.layer_is(5, 0, keys[1]));
    CHECK(first->try_wait_layer_on(rig.forward, 1) == std::nullopt);
  }
}

TEST(loads_that_are_not_held_wait_for_no_other) {
  GroupRig rig;
  const auto keys = random_keys(2);
  rig.store(keys);
  rig.device->hold(rig.forward);
  rig.device->launch(rig.forward, [] {});
  const auto first = rig.load({keys[0]}, {3});
  const auto last = rig.load({keys[1]}, {5}, Streams{rig.forward});
  rig.await_end(*first);
  CHECK(!last->ticket.done());
  rig.device->release(rig.forward);
  CHECK(last->ticket.wait());
  CHECK(rig.writes() == std::vector<Write>({{0, 3}, {1, 3}, {2, 3}, {0, 5}, {1, 5}, {2, 5}}));
}

// By the kernel, which copies for all of them at once, none begins before the streams of all.
TEST(no_load_of_a_group_writes_before_its_own_streams) {
  for (const CopyPath path : kPaths) {
    GroupRig rig(few_slots(path));
    const auto keys = random_keys(3);
    rig.store({keys[0], keys[1]});
    rig.fill_page(5, keys[2]);
    rig.device->hold(rig.forward);
    bool intact = false;
    rig.device->launch(rig.forward, [&] { intact = rig.page_is(5, keys[2]); });
    rig.engine->hold_loads();
    const auto first = rig.load({keys[0]}, {3});
    const auto last = rig.load({keys[1]}, {5}, Streams{rig.forward});
    rig.engine->release_loads();
    if (path == CopyPath::batch) rig.await([&] { return !rig.writes().empty(); });
    std::this_thread::sleep_for(milliseconds(5));
    CHECK(rig.writes() ==
          (path == CopyPath::batch ? std::vector<Write>({{0, 3}}) : std::vector<Write>()));
    rig.device->release(rig.forward);
    CHECK(first->ticket.wait() && last->ticket.wait());
    CHECK(intact && rig.page_is(3, keys[0]) && rig.page_is(5, keys[1]));
  }
}

// ---- room ----

TEST(a_load_without_room_beside_the_others_comes_behind_them) {
  for (const CopyPath path : kPaths) {
    GroupRig rig(few_slots(path));
    const auto keys = random_keys(5);
    rig.store(keys);
    rig.engine->hold_loads();
    const auto first = rig.load({keys[0], keys[1]}, {0, 1});
    const auto last = rig.load({keys[2], keys[3], keys[4]}, {2, 3, 4});
    rig.engine->release_loads();
    rig.await_end(*first);
    rig.await_end(*last);
    CHECK(first->ticket.ok() && last->ticket.ok());
    CHECK(rig.writes() == std::vector<Write>({{0, 0}, {1, 0}, {2, 0}, {0, 2}, {1, 2}, {2, 2}}));
    for (std::size_t i = 0; i < 5; ++i) CHECK(rig.page_is(static_cast<std::int64_t>(i), keys[i]));
  }
}

// A batch of it is filled while the one before is on its way.
TEST(batches_of_one_load_go_one_by_one_and_others_beside_them) {
  for (const CopyPath path : kPaths) {
    GroupRig rig(few_slots(path));
    const auto keys = random_keys(5);
    rig.store(keys);
    rig.engine->hold_loads();
    const auto first = rig.load({keys[0]}, {9});
    const auto large = rig.load({keys[1], keys[2], keys[3], keys[4]}, {0, 1, 2, 3});
    rig.engine->release_loads();
    rig.await_end(*first);
    rig.await_end(*large);
    CHECK(first->ticket.ok() && large->ticket.ok());
    CHECK(rig.writes() == std::vector<Write>({{0, 9},
                                              {0, 0},
                                              {1, 9},
                                              {1, 0},
                                              {2, 9},
                                              {2, 0},
                                              {0, 1},
                                              {1, 1},
                                              {2, 1},
                                              {0, 2},
                                              {1, 2},
                                              {2, 2},
                                              {0, 3},
                                              {1, 3},
                                              {2, 3}}));
    CHECK(rig.page_is(9, keys[0]));
    for (std::size_t i = 1; i < 5; ++i) {
      CHECK(rig.page_is(static_cast<std::int64_t>(i) - 1, keys[i]));
    }
  }
}

namespace {

// All pages, in loads of up to eight that are one group. There is room for three pages in slots,
// and, by kernels, for one chunk that needs none.
void load_all_in_a_group(GroupRig& rig, const std::vector<Key>& keys, std::mt19937_64& random) {
  std::vector<std::shared_ptr<StreamLoad>> loads;
  std::vector<std::int64_t> first_slots;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    first_slots.push_back(static_cast<std::int64_t>(keys.size() - 1 - i) * 16);
    rig.wipe_page(static_cast<std::int64_t>(i));
  }
  rig.engine->hold_loads();
  for (std::size_t first = 0; first < keys.size();) {
    const std::size_t count = std::min(1 + random() % 8, keys.size() - first);
    const auto begin = keys.begin() + static_cast<std::ptrdiff_t>(first);
    Lease lease = rig.lease({begin, begin + static_cast<std::ptrdiff_t>(count)});
    loads.push_back(rig.engine->load_resident(
        std::move(lease), {first_slots.data() + first, count, 16}, Streams{rig.forward},
        random() % 3 == 0 ? rig.source() : nullptr));
    first += count;
  }
  rig.engine->release_loads();
  for (const auto& load : loads) {
    rig.await_end(*load);
    CHECK(load->ticket.ok());
  }
  for (std::size_t i = 0; i < keys.size(); ++i) CHECK(rig.page_is(first_slots[i] / 16, keys[i]));
}

}  // namespace

TEST(groups_of_any_size_land_whole) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    stream::StreamOptions options = few_slots(seed % 2 == 0 ? CopyPath::kernel : CopyPath::batch);
    options.registered_piece_bytes = seed % 4 < 2 ? 64 << 10 : 0;
    options.load_tables = 1;
    GroupRig rig(options, seed);
    rig.device->set_delay_us(20);
    std::mt19937_64 random(seed);
    const auto keys = random_keys(StreamRig::kPages, seed);
    rig.store(keys);
    for (int round = 0; round < 4; ++round) load_all_in_a_group(rig, keys, random);
    CHECK(rig.engine->check().empty() && rig.pool->stats().pinned == 0);
  }
}

// ---- failures ----

TEST(a_load_that_fails_in_the_middle_leaves_the_others_and_lands_first_what_it_has_enqueued) {
  for (const CopyPath path : kPaths) {
    std::shared_ptr<StreamLoad> failing;  // before the rig, whose device looks at it
    GroupRig rig(few_slots(path));
    const auto keys = random_keys(4);
    rig.store(keys);
    rig.device->hold(rig.to_device());
    // While the first layer of all, or of the last one, is enqueued.
    rig.device->at_call(path == CopyPath::kernel ? "run" : "copy", path == CopyPath::kernel ? 1 : 3,
                        [&] { failing->ticket.fail(); });
    rig.engine->hold_loads();
    failing = rig.load({keys[0]}, {3});
    const auto second = rig.load({keys[1]}, {5});
    const auto third = rig.load({keys[2]}, {7});
    rig.engine->release_loads();
    rig.await_enqueued(*third, 2);
    const auto next = rig.load({keys[3]}, {9});  // there is no slot for it yet
    std::this_thread::sleep_for(milliseconds(5));
    CHECK(next->try_wait_layer_on(rig.forward, 0) == std::nullopt);
    CHECK(!failing->ticket.done() && rig.pool->stats().pinned == 4);
    rig.device->release(rig.to_device());
    CHECK(!failing->ticket.wait());
    CHECK(second->ticket.wait() && third->ticket.wait() && next->ticket.wait());
    CHECK(rig.writes() ==
          std::vector<Write>(
              {{0, 3}, {0, 5}, {0, 7}, {1, 5}, {1, 7}, {2, 5}, {2, 7}, {0, 9}, {1, 9}, {2, 9}}));
    CHECK(rig.page_is(5, keys[1]) && rig.page_is(7, keys[2]) && rig.page_is(9, keys[3]));
    CHECK(rig.pool->stats().pinned == 0 && rig.engine->check().empty());
  }
}

TEST(a_load_that_failed_is_over_while_the_others_are_not) {
  GroupRig rig;
  const auto keys = random_keys(2);
  rig.store(keys);
  rig.engine->faults().set_delay(CopyKind::load, 1, hours(1));
  rig.engine->hold_loads();
  const auto failing = rig.load({keys[0]}, {3});
  const auto other = rig.load({keys[1]}, {5});
  rig.engine->release_loads();
  rig.await_enqueued(*other, 0);
  failing->ticket.fail();  // which ends its pause; now the other one has its own
  rig.await_end(*failing);
  CHECK(rig.pool->stats().pinned == 1 && !other->ticket.done());
  rig.engine->close();
  CHECK(!other->ticket.ok() && rig.pool->stats().pinned == 0 && rig.engine->check().empty());
}

TEST(a_load_that_fails_before_its_first_copy_leaves_the_others) {
  GroupRig rig;
  const auto keys = random_keys(4);
  rig.store(keys);
  rig.engine->hold_loads();
  const auto first = rig.load({keys[0]}, {3});
  const auto other_size = rig.engine->load_on_streams(rig.lease({keys[1]}), {9}, {},
                                                      rig.source(StreamRig::kBlockBytes + 16));
  rig.engine->faults().fail_next(CopyKind::load, 1);
  const auto injected = rig.load({keys[2]}, {5});
  const auto last = rig.load({keys[3]}, {7});
  rig.engine->release_loads();
  CHECK(!other_size->ticket.wait() && !injected->ticket.wait());
  CHECK(first->ticket.wait() && last->ticket.wait());
  CHECK(rig.writes() == std::vector<Write>({{0, 3}, {0, 7}, {1, 3}, {1, 7}, {2, 3}, {2, 7}}));
  CHECK(rig.pool->stats().pinned == 0 && rig.engine->check().empty());
}

// ---- holds ----

TEST(nothing_of_a_group_begins_before_the_last_release) {
  GroupRig rig;
  const auto keys = random_keys(1);
  rig.store(keys);
  rig.engine->hold_loads();
  rig.engine->hold_loads();
  const auto load = rig.load(keys, {3});
  rig.engine->release_loads();
  std::this_thread::sleep_for(milliseconds(5));
  CHECK(load->try_wait_layer_on(rig.forward, 0) == std::nullopt);
  rig.engine->release_loads();
  CHECK(load->ticket.wait() && rig.page_is(3, keys[0]));
  CHECK_THROWS(rig.engine->release_loads());
}

TEST(closing_ends_a_hold) {
  GroupRig rig;
  const auto keys = random_keys(2);
  rig.store(keys);
  rig.engine->hold_loads();
  const auto load = rig.load({keys[0]}, {3});
  std::atomic<bool> landed{true};
  std::thread waiter([&] { landed = load->wait_layer_on(rig.forward, 0); });
  rig.engine->close();
  waiter.join();
  CHECK(!landed && load->ticket.done());
  CHECK(!rig.load({keys[1]}, {5})->ticket.wait());
  CHECK(rig.writes().empty() && rig.pool->stats().pinned == 0);
  rig.engine->release_loads();
}

}  // namespace hpkv

TEST_MAIN
