// The disk tier of one process over a long time: a disk that is full for a while, recovery that
// cannot end, a keeper with much to do, and leaving.
#include <thread>

#include "tests/tier_rig.h"

namespace hpkv::test {

TEST(a_full_disk_is_said_and_counted_once_and_used_again_when_it_has_room) {
  Rig rig;
  const auto keys = random_keys(10);
  rig.store_in_pool(keys);
  rig.files->set_available(1 * kMiB);
  CHECK(rig.own.store->demote(rig.own.index, keys) == 0);
  CHECK(rig.own.store->demote(rig.own.index, keys) == 0);
  auto lines = notices(*rig.own.store);
  CHECK(lines.size() == 1 && lines[0].find("disk tier: writing finds no space") == 0);
  CHECK(rig.own.pool->stats().disk_errors == 1);
  CHECK(!rig.own.store->stats().writing_rests);
  rig.files->set_available(1024 * kMiB);
  CHECK(rig.own.store->demote(rig.own.index, keys) == 10);
  lines = notices(*rig.own.store);
  CHECK(lines.size() == 1 && lines[0].find("finds space again") != std::string::npos);
  CHECK(rig.own.pool->stats().disk_errors == 1);
  require_sound(*rig.own.pool);
}

}  // namespace hpkv::test

TEST_MAIN
