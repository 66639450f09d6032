// Spills of bytes that several ranks hold alike: each page stored once, whoever lags or fails.
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "base/error.h"
#include "copy/cpu/jobs.h"
#include "copy/engine.h"
#include "tests/check.h"
#include "tests/copy_rig.h"
#include "tests/pool_rig.h"

namespace hpkv {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;
using test::CopyRig;
using test::Folder;
using test::random_keys;
using test::Server;

namespace {

constexpr int kName = 1;
constexpr std::uint64_t kPages = 16;
constexpr std::uint64_t kBlockBytes = 20'000;

BlockLayout plain(std::uint64_t base) {
  const Region region{.layer = 0,
                      .base = base,
                      .page_stride = kBlockBytes,
                      .piece_count = 1,
                      .piece_stride = 0,
                      .piece_bytes = kBlockBytes,
                      .block_offset = 0};
  return BlockLayout(kBlockBytes, 1, kPages, {region});
}

// Two ranks of one server, each with its own attachment to one pool; their device bytes are equal.
struct Ranks {
  Folder folder;
  std::shared_ptr<Pool> first_pool = Pool::open(folder.options());
  std::shared_ptr<Pool> second_pool = Pool::open(folder.options());
  Server first{first_pool, kName, plain};
  Server second{second_pool, kName, plain};

  Ranks() {
    first.fill(1);
    second.fill(1);
  }
  ~Ranks() {
    first.engine->close();
    second.engine->close();
  }

  static std::shared_ptr<SpillTicket> spill(Server& rank, const std::vector<Key>& keys,
                                            std::int64_t turn, std::int64_t turns = 2) {
    return rank.engine->spill(keys, CopyRig::pages(0, keys.size()), {}, {turn, turns});
  }

  [[nodiscard]] std::size_t present(const std::vector<Key>& keys) const {
    std::size_t count = 0;
    for (const Key& key : keys) count += first_pool->lookup({&key, 1});
    return count;
  }

  // Stores other blocks until some of `keys` are gone; true when those that are left are in front.
  [[nodiscard]] bool evicts_tail_first(const std::vector<Key>& keys, std::uint64_t seed) {
    for (std::uint64_t other = 0; present(keys) == keys.size(); ++other) {
      CHECK(other < 5000);
      first.engine->spill(random_keys(1, seed + other), {0}, {})->wait();
    }
    return first_pool->lookup(keys) == present(keys);
  }
};

}  // namespace

TEST(every_page_has_one_place_in_the_order_and_own_ones_come_first) {
  for (std::size_t pages = 1; pages < 20; ++pages) {
    for (std::int64_t turns = 1; turns < 25; ++turns) {
      for (std::int64_t turn = 0; turn < turns; ++turn) {
        std::vector<std::size_t> expected;
        for (std::int64_t later = 0; later < turns; ++later) {
          const auto whose = static_cast<std::size_t>((turn + later) % turns);
          for (std::size_t i = 0; i < pages; ++i) {
            if (i % static_cast<std::size_t>(turns) == whose) expected.push_back(i);
          }
        }
        cpu::TurnOrder order({turn, turns}, pages);
        for (const std::size_t page : expected) CHECK(order.take() == page);
      }
    }
  }
}

TEST(two_ranks_in_turns_store_each_page_once_and_together_all) {
  Ranks ranks;
  for (std::uint64_t round = 0; round < 20; ++round) {
    const auto keys = random_keys(kPages, 100 + round);
    const auto before = ranks.first_pool->stats().stored;
    const auto one = Ranks::spill(ranks.first, keys, 0);
    const auto two = Ranks::spill(ranks.second, keys, 1);
    one->wait();
    two->wait();
    CHECK(ranks.first_pool->lookup(keys) == kPages);
    CHECK(one->stored() + two->stored() == kPages);
    CHECK(ranks.first_pool->stats().stored - before == kPages);
    CHECK(one->stored() + one->present() + one->dropped() == kPages);
    CHECK(two->stored() + two->present() + two->dropped() == kPages);
  }
  const EngineStats one = ranks.first.engine->stats();
  const EngineStats two = ranks.second.engine->stats();
  CHECK(one.spill_dropped_busy == 0 && two.spill_dropped_busy == 0);
}

TEST(a_rank_begins_with_a_page_of_its_own) {
  Ranks ranks;
  const auto keys = random_keys(4);
  // Long enough to look while its first page is being read.
  ranks.second.engine->faults().set_delay(CopyKind::spill, 0, seconds(5));
  const auto spill = Ranks::spill(ranks.second, keys, 1);
  while (ranks.first_pool->stats().writing == 0) std::this_thread::yield();
  BlockRef ref;
  CHECK(ranks.first_pool->reserve(ranks.first.namespace_index, keys[1], ref) ==
        ReserveStatus::busy);
  CHECK(ranks.first_pool->reserve(ranks.first.namespace_index, keys[0], ref) == ReserveStatus::ok);
  ranks.first_pool->abandon(ref);
  spill->cancel();
  spill->wait();
}

TEST(a_page_that_another_rank_writes_is_left_to_it_and_counted_apart) {
  Ranks ranks;
  const auto keys = random_keys(6);
  BlockRef ref;
  CHECK(ranks.first_pool->reserve(ranks.first.namespace_index, keys[2], ref) == ReserveStatus::ok);
  const auto spill = Ranks::spill(ranks.second, keys, 1);
  spill->wait();
  CHECK(spill->stored() == 5 && spill->dropped() == 1 && spill->present() == 0);
  CHECK(ranks.second.engine->stats().spill_left_to_others == 1);
  CHECK(ranks.second.engine->stats().spill_dropped_busy == 0);
  // Alone, nobody is expected to store it.
  Ranks::spill(ranks.second, keys, 0, 1)->wait();
  CHECK(ranks.second.engine->stats().spill_left_to_others == 1);
  CHECK(ranks.second.engine->stats().spill_dropped_busy == 1);
  // Its writer drops it: whoever comes by stores it.
  ranks.first_pool->abandon(ref);
  const auto again = Ranks::spill(ranks.second, keys, 1);
  again->wait();
  CHECK(again->stored() == 1 && again->present() == 5);
}

TEST(one_rank_stores_everything_while_the_other_lags) {
  Ranks ranks;
  const auto keys = random_keys(kPages);
  ranks.first.engine->faults().set_delay(CopyKind::spill, Faults::kEveryLayer, hours(1));
  const auto late = Ranks::spill(ranks.first, keys, 0);
  const auto spill = Ranks::spill(ranks.second, keys, 1);
  spill->wait();
  CHECK(spill->stored() == kPages);
  CHECK(ranks.first_pool->lookup(keys) == kPages);
  CHECK(!late->done());
  late->cancel();
}

TEST(one_rank_stores_everything_when_the_other_fails) {
  Ranks ranks;
  const auto keys = random_keys(kPages);
  ranks.first.engine->faults().fail_next(CopyKind::spill, 1);
  const auto failed = Ranks::spill(ranks.first, keys, 0);
  Ranks::spill(ranks.second, keys, 1)->wait();
  failed->wait();
  CHECK(failed->dropped() == kPages);
  CHECK(ranks.first_pool->lookup(keys) == kPages);
}

TEST(the_tail_goes_before_the_head_when_ranks_share_the_pages) {
  Ranks ranks;
  std::vector<std::vector<Key>> prefixes;
  for (std::uint64_t round = 0; round < 12; ++round) {
    // A rank that cannot have a lock in time leaves a stamp as it is.
    const auto timeouts = [&] { return ranks.first_pool->stats().lock_timeouts; };
    std::vector<Key> keys;
    for (std::uint64_t seed = 300 + round, before = ~timeouts(); before != timeouts(); seed += 12) {
      before = timeouts();
      keys = random_keys(kPages, seed);
      const auto one = Ranks::spill(ranks.first, keys, 0);
      const auto two = Ranks::spill(ranks.second, keys, 1);
      one->wait();
      two->wait();
    }
    prefixes.push_back(std::move(keys));
  }
  for (std::uint64_t round = 0; round < prefixes.size(); ++round) {
    CHECK(ranks.evicts_tail_first(prefixes[round], 1'000'000 * (round + 1)));
  }
}

// The other rank took its stamps later and may not live to stamp the run as a whole.
TEST(the_tail_goes_before_the_head_when_its_writer_is_slower) {
  Ranks ranks;
  const auto keys = random_keys(2);
  BlockRef tail;
  CHECK(ranks.second_pool->reserve(ranks.second.namespace_index, keys[1], tail) ==
        ReserveStatus::ok);
  ranks.first.engine->faults().set_delay(CopyKind::spill, 0, milliseconds(500));
  const auto spill = Ranks::spill(ranks.first, keys, 0);
  const std::uint64_t stamp = ranks.second_pool->take_stamps(2);
  spill->wait();
  CHECK(spill->stored() == 1);
  ranks.first.engine->faults().set_delay(CopyKind::spill, 0, milliseconds(0));
  ranks.second_pool->publish(tail, 0, stamp);
  CHECK(ranks.evicts_tail_first(keys, 5'000'000));
}

TEST(a_turn_outside_the_turns_is_refused) {
  Ranks ranks;
  const auto keys = random_keys(2);
  CHECK_THROWS(Ranks::spill(ranks.first, keys, 2, 2));
  CHECK_THROWS(Ranks::spill(ranks.first, keys, -1, 2));
  CHECK_THROWS(Ranks::spill(ranks.first, keys, 0, 0));
  CHECK_THROWS(Ranks::spill(ranks.first, keys, 0, -1));
}

}  // namespace hpkv

TEST_MAIN
