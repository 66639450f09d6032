// The invariants of the whole pool. Right while others work: what needs a lock is looked at under
// it, the rest is looked at twice. A shard whose lock is not free in time is left out and said so
// by nobody: its holder is at work.
#pragma once

#include <string>
#include <vector>

#include "shm/core.h"

namespace hpkv::shm {

[[nodiscard]] std::vector<std::string> check_pool(Core& core);

}  // namespace hpkv::shm
