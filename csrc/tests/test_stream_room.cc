// Loads that ask for room first: whoever waits for a layer of those waits for no copy.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "copy/stream/engine.h"
#include "tests/check.h"
#include "tests/parts_rig.h"

namespace hpkv {

using std::chrono::milliseconds;
using stream::StagingShare;
using stream::StreamLoad;
using test::comes;
using test::few_slots;
using test::first_pages;
using test::kSlots;
using test::kTables;
using test::Pages;
using test::PartsRig;
using test::random_keys;
using test::registering;
using test::Repeated;
using test::Source;
using test::StreamRig;

TEST(room_is_less_what_was_submitted_until_that_has_landed) {
  PartsRig rig(few_slots());
  const auto keys = random_keys(4);
  rig.store(keys);
  const auto room = [&] { return rig.engine->load_room().slots; };
  const auto fitting = [&](std::size_t first) {
    StagingShare left = rig.engine->load_room();
    return rig.engine->fit(rig.lease({keys.begin() + static_cast<int>(first), keys.end()}), nullptr,
                           left);
  };
  CHECK(room() == kSlots && fitting(0) == kSlots);
  rig.device->hold(rig.to_device());
  rig.engine->hold_loads();
  const auto first = rig.submit(rig.lease({keys[0], keys[1]}), {1, 2}, nullptr);
  CHECK(room() == 1 && fitting(2) == 1);  // nobody has taken it up
  const auto second = rig.submit(rig.lease({keys[2]}), {3}, nullptr);
  CHECK(room() == 0 && fitting(3) == 0);
  rig.engine->release_loads();
  CHECK(rig.is_enqueued(*first) && rig.is_enqueued(*second));
  CHECK(comes([&] { return fitting(3) == 0; }) && room() == 0);  // they have taken it
  rig.device->release(rig.to_device());
  CHECK(first->ticket.wait() && second->ticket.wait());
  CHECK(comes([&] { return room() == kSlots; }));
}

TEST(tables_are_promised_as_slots_are) {
  PartsRig rig;
  const auto keys = random_keys(2);
  rig.store_parts(keys);
  rig.await_registered(keys, rig.parts);
  CHECK(comes([&] { return rig.engine->load_room().tables == kTables; }));
  rig.engine->hold_loads();
  const auto load = rig.submit(rig.lease(keys), {1}, rig.parts);
  CHECK(rig.engine->load_room().tables == kTables - 3);
  rig.engine->release_loads();
  CHECK(load->ticket.wait());
  CHECK(comes([&] { return rig.engine->load_room().tables == kTables; }));
}

TEST(a_load_that_fails_or_is_refused_gives_its_room_back) {
  PartsRig rig(few_slots());
  const auto keys = random_keys(2);
  rig.store(keys);
  rig.engine->faults().fail_next(CopyKind::load, 1);
  CHECK(!rig.submit(rig.lease(keys), {1, 2}, nullptr)->ticket.wait());
  CHECK(comes([&] { return rig.engine->load_room().slots == kSlots; }));
  CHECK(!rig.submit(Lease(), {1, 2}, nullptr)->ticket.wait());
  CHECK(rig.engine->load_room().slots == kSlots);
}

// Tables neither, which it does not need: whoever came now would be enqueued behind it.
TEST(a_load_that_is_larger_than_all_room_leaves_none_until_it_is_over) {
  PartsRig rig(few_slots());
  const auto keys = random_keys(5);
  rig.store(keys);
  rig.device->hold(rig.to_device());
  const auto load = rig.submit(rig.lease(keys), first_pages(5), nullptr);
  for (int i = 0; i < 20; ++i) {
    const StagingShare room = rig.engine->load_room();
    CHECK(room.slots == 0 && room.tables == 0);
    std::this_thread::sleep_for(milliseconds(1));
  }
  rig.device->release(rig.to_device());
  CHECK(load->ticket.wait());
  CHECK(comes([&] { return rig.engine->load_room().slots == kSlots; }));
  CHECK(rig.engine->load_room().tables != 0);
}

TEST(room_is_taken_off_by_slots_for_what_is_staged_and_by_tables_for_every_format_of_a_chunk) {
  PartsRig rig;
  const auto keys = random_keys(2 * StreamRig::kPages);
  rig.store_parts(keys);
  StagingShare room{2, kTables};
  const Lease some = rig.lease(keys);
  rig.engine->close();  // nothing is registered any more
  CHECK(rig.engine->fit(some, rig.parts, room) == 2);
  CHECK(room.slots == 0 && room.tables == kTables - 3);

  PartsRig other;
  other.store_parts(keys);
  other.await_registered(keys, other.parts);
  const Repeated what(keys, 2, 700);
  room = {0, kTables};
  CHECK(other.engine->fit(other.lease(what.keys), other.parts, room) == 512);
  CHECK(room.slots == 0 && room.tables == 1);
  CHECK(other.engine->fit(other.lease(what.keys), other.parts, room) == 0 && room.tables == 1);
  CHECK(other.engine->fit(Lease(), nullptr, room) == 0);
  CHECK_THROWS(other.engine->fit(other.lease({keys[0]}), other.parts, room));
}

// While the forward stream is held nothing lands, so only what fits without waiting can be there.
TEST(loads_that_fit_are_enqueued_at_once_whatever_they_are) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    std::mt19937_64 random(seed);
    PartsRig rig(few_slots(), seed);
    rig.engine.reset();
    const auto own = random_keys(StreamRig::kPages, seed);
    const auto theirs = random_keys(2 * StreamRig::kPages, seed + 100);
    for (std::size_t i = 0; i < own.size(); ++i) {  // side by side, so both in part registered
      rig.store({own[i]});
      rig.store_parts({theirs[2 * i], theirs[2 * i + 1]});
    }
    rig.device->refuse_registrations_after(random() % 12);
    rig.engine = std::make_unique<stream::StreamEngine>(rig.device, rig.pool, rig.index,
                                                        rig.layout(), registering(32 << 10));
    for (int round = 0; round < 4; ++round) {
      const bool grouped = random() % 2 == 0;
      std::vector<std::shared_ptr<StreamLoad>> loads;
      rig.device->hold(rig.forward);
      if (grouped) rig.engine->hold_loads();
      for (int i = 0; i < 5; ++i) {
        const bool sourced = random() % 2 == 0;
        const Repeated what(sourced ? theirs : own, sourced ? 2 : 1,
                            1 + random() % (random() % 3 == 0 ? 600 : 8));
        const Source source = sourced ? rig.parts : nullptr;
        Lease lease = rig.lease(what.keys);
        StagingShare room = rig.engine->load_room();
        const std::size_t fits = rig.engine->fit(lease, source, room);
        if (fits == 0) continue;
        lease.keep(fits * (sourced ? 2 : 1));
        loads.push_back(rig.submit(
            std::move(lease),
            {what.pages.begin(), what.pages.begin() + static_cast<std::ptrdiff_t>(fits)}, source));
      }
      if (grouped) rig.engine->release_loads();
      CHECK(!loads.empty());
      bool enqueued = true;
      for (const auto& load : loads) enqueued = enqueued && rig.is_enqueued(*load);
      rig.device->release(rig.forward);
      CHECK(enqueued);
      for (const auto& load : loads) CHECK(load->ticket.wait());
      rig.engine->quiesce();
      CHECK(comes([&] {
        const StagingShare room = rig.engine->load_room();
        return room.slots == kSlots && room.tables == kTables;
      }));
    }
  }
}

}  // namespace hpkv

TEST_MAIN
