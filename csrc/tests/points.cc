// The crash rig's side of base/points.h: which point acts, how, and which seeded bugs are on. Test
// builds only.
#include "tests/points.h"

#include <unistd.h>

#include <csignal>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace hpkv::points {
namespace {

struct Plan {
  std::mutex mutex;
  std::string name;  // armed point, or empty
  int hits_left = 0;
  int signal = 0;
  std::map<std::string, int> counts;
  std::set<std::string> bugs;
};

Plan& plan() {
  static Plan instance;
  return instance;
}

}  // namespace

void arm(const std::string& name, int hit, int signal) {
  const std::lock_guard guard(plan().mutex);
  plan().name = name;
  plan().hits_left = hit;
  plan().signal = signal;
}

bool armed() {
  const std::lock_guard guard(plan().mutex);
  return !plan().name.empty();
}

void switch_bug(const std::string& name) {
  const std::lock_guard guard(plan().mutex);
  plan().bugs.insert(name);
}

void clear_bugs() {
  const std::lock_guard guard(plan().mutex);
  plan().bugs.clear();
}

std::map<std::string, int> hit_counts() {
  const std::lock_guard guard(plan().mutex);
  return plan().counts;
}

void hit(const char* name) noexcept {
  int signal = 0;
  {
    const std::lock_guard guard(plan().mutex);
    ++plan().counts[name];
    if (plan().name == name && --plan().hits_left == 0) {
      signal = plan().signal;
      plan().name.clear();
    }
  }
  // Both signals act before kill() returns to this thread.
  if (signal != 0) ::kill(::getpid(), signal);
}

bool bug(const char* name) noexcept {
  const std::lock_guard guard(plan().mutex);
  return plan().bugs.contains(name);
}

}  // namespace hpkv::points
