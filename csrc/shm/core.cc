#include "shm/core.h"

#include <cstring>
#include <utility>

#include "base/points.h"

namespace hpkv::shm {

Core::Core(PoolFile opened, const PoolOptions& pool_options)
    : options(pool_options),
      file(std::move(opened)),
      view(file.mapping->view()),
      slot(file.info.slot),
      generation(file.generation) {}

void Core::poison(const char* reason) noexcept {
  std::uint32_t sound = 0;
  if (!super().poisoned.compare_exchange_strong(sound, 1, std::memory_order_acq_rel)) return;
  // Only the first comes here. The text is for people; nothing decides by it.
  std::strncpy(super().poison_reason.data(), reason, super().poison_reason.size() - 1);
}

bool Core::client_gone(std::uint32_t other, std::uint32_t other_generation) const noexcept {
  if (other >= kClientCount) return true;
  const std::uint64_t word = view.client(other).word.load(std::memory_order_acquire);
  if (ClientWord::state(word) == ClientState::free) return true;
  if (!HPKV_BUG("lock_without_generation") &&
      (ClientWord::generation(word) & LockWord::kGenerationMask) != other_generation) {
    return true;
  }
  return other != slot && !file.liveness->held_by_other(other);
}

}  // namespace hpkv::shm
