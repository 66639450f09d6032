// Random traffic through the stream engine against a model, and the failure of every device call in
// turn. The seed of a failing round is in its message.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "copy/stream/engine.h"
#include "tests/check.h"
#include "tests/stream_rig.h"

namespace hpkv {

using stream::CopyPath;
using stream::StreamLoad;
using stream::Streams;
using stream::StreamSpill;
using test::few_slots;
using test::random_keys;
using test::RecordedEvent;
using test::StreamRig;

namespace {

constexpr std::size_t kMany = 40;  // keys; half of them fit the device

// A cancelled spill may still read pages that somebody else writes by now, and throws away what it
// has read. That is a data race by design, which the thread sanitizer is spared.
#ifdef __SANITIZE_THREAD__
constexpr bool kCancelledKeepPages = true;
#else
constexpr bool kCancelledKeepPages = false;
#endif

// A server in small, with a stream that chooses pages and one that uses them: pages are taken from
// a free list and go back the moment the engine allows it, and what the forward stream writes and
// reads is checked byte by byte. The model of a page or block is its key.
class Traffic {
 public:
  Traffic(StreamRig& rig, std::uint64_t seed)
      : rig_(rig), random_(seed), keys_(random_keys(kMany)) {
    for (std::int64_t page = 0; page < static_cast<std::int64_t>(StreamRig::kPages); ++page) {
      free_.push_back(page);
    }
    CHECK(rig.device->make_stream(false, schedule_).ok());
  }

  void step() {
    collect();
    // Little is free: let the oldest end.
    if (free_.size() < 8) {
      if (!spills_.empty()) spills_.front().ticket->wait();
      if (!loads_.empty()) loads_.front()->load->ticket.wait();
      for (auto& one : residents_) {
        if (!one.pages.empty()) one.spill->ticket.wait();
      }
      CHECK(rig_.device->synchronize_stream(rig_.forward).ok());
      collect();
    }
    switch (random_() % 5) {
      case 0:
        return spill();
      case 1:
      case 2:
        return spill_resident();
      case 3:
        return load(1);
      default:
        return load(1 + random_() % 3);
    }
  }

  // To the end of everything.
  void finish() {
    for (auto& one : spills_) one.ticket->wait();
    for (auto& one : residents_) one.spill->ticket.wait();
    for (auto& one : loads_) one->load->ticket.wait();
    rig_.engine->quiesce();
    CHECK(rig_.device->synchronize_stream(rig_.forward).ok());
    collect();
    CHECK(free_.size() == StreamRig::kPages);
    CHECK(wrong_ == 0);
    for (const Key& key : keys_) {
      if (rig_.pool->lookup({&key, 1}) == 1) CHECK(rig_.block_is(key));
    }
    // Where the lock is not free in time, a page that is given up stays its writer's.
    const auto stats = rig_.pool->stats();
    CHECK(stats.pinned == 0 && stats.writing <= stats.lock_timeouts);
    CHECK(rig_.engine->check().empty());
    test::require_sound(*rig_.pool);
  }

  [[nodiscard]] std::size_t loaded() const { return loaded_; }

 private:
  // Page indices, in "device" memory.
  using Indices = std::shared_ptr<std::vector<std::int64_t>>;
  struct Spill {
    std::shared_ptr<SpillTicket> ticket;
    std::vector<std::int64_t> pages;
  };
  // Its pages are free already: whoever has them next writes them behind the reads.
  struct Resident {
    std::shared_ptr<StreamSpill> spill;
    Indices first_slots;              // until the ticket is done
    std::vector<std::int64_t> pages;  // those that are not free yet
  };
  struct Load {
    std::shared_ptr<StreamLoad> load;
    std::vector<std::int64_t> pages;
    Indices first_slots;
    std::vector<Key> keys;
    std::atomic<bool> read{false};  // by the forward stream, last layer
  };

  std::vector<std::int64_t> take_pages(std::size_t count) {
    count = std::min(count, free_.size());
    std::vector<std::int64_t> taken;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t at = random_() % free_.size();
      taken.push_back(free_[at]);
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(at));
    }
    return taken;
  }

  void give_pages(const std::vector<std::int64_t>& pages) {
    free_.insert(free_.end(), pages.begin(), pages.end());
  }

  void collect() {
    for (auto it = spills_.begin(); it != spills_.end();) {
      const bool over = it->ticket->device_done();
      if (over) give_pages(it->pages);
      it = over ? spills_.erase(it) : std::next(it);
    }
    std::erase_if(residents_, [this](const auto& one) {
      const bool over = one.spill->ticket.done();
      if (over) give_pages(one.pages);
      return over;
    });
    for (auto it = loads_.begin(); it != loads_.end();) {
      const Load& one = **it;
      // The forward may still read: the next owner's copies wait for its event, so the end of the
      // load is enough.
      const bool over = one.load->ticket.done() && one.read;
      if (over) {
        if (!one.load->ticket.ok()) ++wrong_;
        give_pages(one.pages);
      }
      it = over ? loads_.erase(it) : std::next(it);
    }
  }

  // As many keys in a row as pages; the forward stream writes those.
  std::vector<Key> computed(const std::vector<std::int64_t>& pages) {
    const std::size_t first = random_() % (kMany - pages.size());
    const std::vector<Key> keys(keys_.begin() + static_cast<std::ptrdiff_t>(first),
                                keys_.begin() + static_cast<std::ptrdiff_t>(first + pages.size()));
    rig_.device->launch(rig_.forward, [this, keys, pages] {
      for (std::size_t i = 0; i < keys.size(); ++i) rig_.fill_page(pages[i], keys[i]);
    });
    return keys;
  }

  Turn some_turn() {
    const std::uint64_t count = 1 + random_() % 3;
    return {static_cast<std::int64_t>(random_() % count), static_cast<std::int64_t>(count)};
  }

  void spill() {
    const std::vector<std::int64_t> pages = take_pages(1 + random_() % 8);
    if (pages.empty()) return;
    const std::vector<Key> keys = computed(pages);
    const RecordedEvent event(*rig_.device, rig_.forward);
    const auto ticket = rig_.engine->spill(keys, pages, event.get(), some_turn());
    if (random_() % 4 == 0) ticket->cancel();
    spills_.push_back({ticket, pages});
  }

  void spill_resident() {
    const std::vector<std::int64_t> pages = take_pages(1 + random_() % 8);
    if (pages.empty()) return;
    const std::vector<Key> keys = computed(pages);
    Resident one{nullptr, chosen(pages), {}};
    one.spill = rig_.engine->spill_resident(
        keys, {one.first_slots->data(), pages.size(), StreamRig::kTokens},
        Streams{schedule_, rig_.forward}, some_turn());
    // In time, or not, as it comes; afterwards the forward may write the pages.
    const auto budget = std::chrono::microseconds(random_() % 3 * 500);
    const bool in_time = one.spill->wait_reads_on(rig_.forward, budget);
    if (!in_time) one.spill->cancel();
    if (!in_time && kCancelledKeepPages) {
      one.pages = pages;
    } else {
      give_pages(pages);
    }
    residents_.push_back(std::move(one));
  }

  // What the schedule stream writes. It may get to that when a cancelled ticket is long done.
  Indices chosen(const std::vector<std::int64_t>& pages) {
    auto first_slots = std::make_shared<std::vector<std::int64_t>>(pages.size(), -1);
    rig_.device->launch(schedule_, [first_slots, pages] {
      for (std::size_t i = 0; i < pages.size(); ++i) {
        (*first_slots)[i] = pages[i] * static_cast<std::int64_t>(StreamRig::kTokens);
      }
    });
    return first_slots;
  }

  // For one forward pass. Loads that are not held begin one by one.
  void load(std::size_t count) {
    const bool held = random_() % 4 != 0;
    if (held) rig_.engine->hold_loads();
    std::vector<Load*> loads;
    for (std::size_t i = 0; i < count; ++i) {
      if (Load* const started = start_load(random_() % 2 == 0)) loads.push_back(started);
    }
    if (held) rig_.engine->release_loads();
    for (std::uint32_t layer = 0; layer < StreamRig::kLayers; ++layer) {
      for (Load* const one : loads) read(*one, layer);
    }
  }

  // Null when there is nothing to load, or no page for it.
  Load* start_load(bool resident) {
    const std::size_t first = random_() % (kMany - 8);
    const std::vector<Key> some(keys_.begin() + static_cast<std::ptrdiff_t>(first),
                                keys_.begin() + static_cast<std::ptrdiff_t>(first + 8));
    Lease lease = rig_.lease(some);
    auto one = std::make_unique<Load>();
    one->pages = take_pages(lease.count());
    lease.keep(one->pages.size());
    if (one->pages.empty()) return nullptr;
    one->keys.assign(lease.keys().begin(), lease.keys().end());
    loaded_ += one->pages.size();
    Load& load = *one;
    load.first_slots = chosen(load.pages);
    load.load = resident ? rig_.engine->load_resident(
                               std::move(lease),
                               {load.first_slots->data(), load.pages.size(), StreamRig::kTokens},
                               Streams{schedule_, rig_.forward},
                               random_() % 2 == 0 ? rig_.source() : nullptr)
                         : rig_.engine->load_on_streams(std::move(lease), load.pages,
                                                        Streams{schedule_, rig_.forward});
    loads_.push_back(std::move(one));
    return &load;
  }

  void read(Load& load, std::uint32_t layer) {
    CHECK(load.load->wait_layer_on(rig_.forward, layer));
    rig_.device->launch(rig_.forward, [this, &load, layer] {
      for (std::size_t i = 0; i < load.pages.size(); ++i) {
        if (!rig_.layer_is(load.pages[i], layer, load.keys[i])) ++wrong_;
      }
      if (layer + 1 == StreamRig::kLayers) load.read = true;
    });
  }

  StreamRig& rig_;
  std::mt19937_64 random_;
  std::vector<Key> keys_;
  std::vector<std::int64_t> free_;
  stream::StreamHandle schedule_ = nullptr;
  std::list<Spill> spills_;
  std::list<Resident> residents_;
  std::list<std::unique_ptr<Load>> loads_;
  std::atomic<std::size_t> wrong_{0};
  std::size_t loaded_ = 0;
};

}  // namespace

TEST(random_traffic_moves_every_byte_to_where_the_model_has_it) {
  std::size_t loaded = 0;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    stream::StreamOptions options = few_slots(seed % 2 == 0 ? CopyPath::kernel : CopyPath::batch);
    options.registered_piece_bytes = seed % 4 < 2 ? 64 << 10 : 0;
    StreamRig rig(options, seed);
    rig.device->set_delay_us(seed % 3 == 0 ? 400 : 40);
    Traffic traffic(rig, seed);
    for (int i = 0; i < 120; ++i) traffic.step();
    traffic.finish();
    loaded += traffic.loaded();
  }
  CHECK(loaded > 500);
}

// ---- errors ----

namespace {

// Some of everything, on one stream after the other; what fails, fails softly.
void run_scenario(StreamRig& rig, const std::vector<Key>& keys) {
  const std::vector<Key> old(keys.begin(), keys.begin() + 4);
  const std::vector<Key> fresh(keys.begin() + 4, keys.begin() + 8);
  const std::vector<Key> chosen(keys.begin() + 8, keys.end());
  const std::vector<std::int64_t> first_slots = {64, 80, 96, 112};
  const std::vector<std::int64_t> last_slots = {224, 240, 256, 272};
  const Streams streams{rig.forward, rig.to_host()};  // any other stream
  const RecordedEvent event(*rig.device, rig.forward);
  const auto spill = rig.engine->spill(fresh, {10, 11, 12, 13}, event.get());
  const auto by_indices = rig.engine->spill_resident(chosen, {last_slots.data(), 4, 16}, streams);
  rig.engine->hold_loads();
  const auto load = rig.engine->load_on_streams(rig.lease(old), {0, 1, 2, 3}, event.get());
  const auto resident =
      rig.engine->load_resident(rig.lease(old), {first_slots.data(), 4, 16}, streams);
  const std::vector<std::int64_t> more_slots = {288, 304, 320, 336};
  const auto sourced = rig.engine->load_resident(rig.lease(old), {more_slots.data(), 4, 16},
                                                 Streams{rig.forward}, rig.source());
  rig.engine->release_loads();
  for (std::uint32_t layer = 0; layer < StreamRig::kLayers; ++layer) {
    for (const auto& one : {load, resident, sourced}) {
      static_cast<void>(one->wait_layer_on(rig.forward, layer));
    }
  }
  if (by_indices->wait_reads_on(rig.forward, std::chrono::seconds(60))) {
    rig.device->launch(rig.forward, [&rig] {
      for (std::int64_t page = 14; page < 18; ++page) rig.wipe_page(page);
    });
  }
  spill->wait();
  by_indices->ticket.wait();
  CHECK(spill->device_done() && by_indices->ticket.device_done());
  int wrong = 0;
  for (const auto& [one, first] : {std::pair{load, 0}, {resident, 4}, {sourced, 18}}) {
    if (!one->ticket.wait()) continue;
    for (std::size_t i = 0; i < 4; ++i) {
      if (!rig.page_is(first + static_cast<std::int64_t>(i), old[i])) ++wrong;
    }
  }
  CHECK(wrong == 0);
  rig.engine->quiesce();
  static_cast<void>(rig.device->synchronize_stream(rig.forward));
}

void check_after_error(StreamRig& rig, const std::vector<Key>& keys, bool failed) {
  if (failed && rig.engine->poisoned()) {
    CHECK(rig.engine->error_count() >= 1);
    CHECK(rig.engine->first_error().find("async_device.cc:") == 0);
    // Off for good, softly.
    const auto spill = rig.engine->spill({keys[0]}, {1}, {});
    CHECK(spill->done() && spill->dropped() == 1);
    CHECK(!rig.engine->load(rig.lease({keys[0]}), {1}, {})->wait());
    // Verifications need no device.
    const auto verify = rig.engine->verify(rig.lease({keys[0]}));
    verify->wait();
    CHECK(verify->good() == 1);
    CHECK(rig.engine->stats().spill_dropped_off > 0);
  }
  rig.engine->close();
  CHECK(rig.pool->stats().pinned == 0 && rig.pool->stats().writing == 0);
  CHECK(rig.engine->check().empty());
  test::require_sound(*rig.pool);
  for (const Key& key : keys) {
    if (rig.pool->lookup({&key, 1}) == 1) CHECK(rig.block_is(key));
  }
  rig.engine.reset();
  CHECK(rig.device->live_events() == 0 && rig.device->live_allocations() == 0);
}

// How many calls there are to fail, found by failing each.
std::uint64_t fail_each_call(CopyPath path, bool lost) {
  std::uint64_t poisoned = 0;
  for (std::uint64_t nth = 1;; ++nth) {
    StreamRig rig(few_slots(path), nth);
    rig.device->set_delay_us(20);
    const auto keys = random_keys(12);
    for (std::size_t i = 4; i < keys.size(); ++i) {
      rig.fill_page(static_cast<std::int64_t>(6 + i), keys[i]);
    }
    rig.store({keys[0], keys[1], keys[2], keys[3]});
    rig.device->fail_call(nth, lost);
    run_scenario(rig, keys);
    poisoned += rig.engine->poisoned() ? 1 : 0;
    const bool failed = rig.device->has_failed();
    if (!lost) rig.device->fail_call(0);
    check_after_error(rig, keys, failed);
    if (!failed) return poisoned;
  }
}

}  // namespace

TEST(each_device_call_that_fails_once_ends_copying_and_nothing_else) {
  for (const CopyPath path : {CopyPath::kernel, CopyPath::batch}) {
    CHECK(fail_each_call(path, false) > 20);
  }
}

TEST(a_device_that_is_lost_at_any_call_ends_copying_and_nothing_else) {
  for (const CopyPath path : {CopyPath::kernel, CopyPath::batch}) {
    CHECK(fail_each_call(path, true) > 20);
  }
}

// The device may go on with what was enqueued before the call that failed.
TEST(no_page_is_given_back_before_the_device_has_stopped_whatever_wait_fails) {
  for (const int failing_drains : {0, 1}) {
    StreamRig rig;
    const auto keys = random_keys(2);
    rig.device->hold(rig.to_host());
    rig.device->fail_calls("synchronize", 1);
    rig.device->fail_calls("synchronize_stream", failing_drains);
    const auto spill = rig.engine->spill(keys, {5, 6}, {});
    while (!rig.engine->poisoned()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(!spill->device_done() && rig.pool->stats().writing == 2);
    rig.device->release_all();
    spill->wait();
    CHECK(spill->dropped() == 2);
    CHECK(rig.engine->error_count() == static_cast<std::uint64_t>(1 + failing_drains));
  }
}

TEST(no_pin_is_given_back_before_the_device_has_stopped_whatever_wait_fails) {
  for (const int failing_drains : {0, 1}) {
    StreamRig rig;
    const auto keys = random_keys(2);
    rig.store(keys);
    rig.device->hold(rig.to_device());
    rig.device->fail_calls("synchronize", 1);
    rig.device->fail_calls("synchronize_stream", failing_drains);
    const auto load = rig.engine->load(rig.lease(keys), {0, 1}, {});
    while (!rig.engine->poisoned()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(!load->done() && rig.pool->stats().pinned == 2);
    rig.device->release_all();
    CHECK(!load->wait());
    check_after_error(rig, keys, true);
  }
}

TEST(an_engine_that_the_device_refuses_is_an_error_and_leaves_nothing) {
  for (std::uint64_t nth = 1;; ++nth) {
    StreamRig rig;
    rig.engine.reset();
    CHECK(rig.device->live_allocations() == 0);
    rig.device->fail_call(nth);
    bool refused = false;
    try {
      rig.engine = std::make_unique<stream::StreamEngine>(rig.device, rig.pool, rig.index,
                                                          rig.layout(), few_slots());
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::system);
      CHECK(std::string(error.what()).find("async_device.cc:") != std::string::npos);
      refused = true;
    }
    if (refused) {
      CHECK(rig.device->live_events() == 0 && rig.device->live_allocations() == 0);
      continue;
    }
    CHECK(nth > 6);  // pinned memory, the table, four streams
    break;
  }
}

}  // namespace hpkv

TEST_MAIN
