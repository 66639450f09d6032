// Arming the points of base/points.h. Test builds only.
#pragma once

#include <map>
#include <string>

#include "base/points.h"

namespace hpkv::points {

// At the hit-th time that the point is reached, send this process the signal (SIGKILL, SIGSTOP).
void arm(const std::string& name, int hit, int signal);
[[nodiscard]] bool armed();
void switch_bug(const std::string& name);
void clear_bugs();
[[nodiscard]] std::map<std::string, int> hit_counts();

}  // namespace hpkv::points
