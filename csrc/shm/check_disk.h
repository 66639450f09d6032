// The disk tier's part of Pool::check(): regions, their entries, and the tables that lead to them.
#pragma once

#include <string>
#include <vector>

#include "shm/core.h"

namespace hpkv::shm {

// Adds what is wrong to `findings`, in words. Correct while others work; takes each lock briefly.
void check_disk(Core& core, std::vector<std::string>& findings);

}  // namespace hpkv::shm
