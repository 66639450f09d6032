#include "disk/promote_ticket.h"

namespace hpkv::disk {

bool PinBudget::take(std::uint64_t bytes, std::uint64_t limit) noexcept {
  std::uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    if (used != 0 && used + bytes > limit) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  return true;
}

PromoteTicket::PromoteTicket(std::shared_ptr<Pool> pool, std::shared_ptr<PinBudget> budget,
                             std::uint32_t namespace_index, std::vector<Key> keys)
    : pool_(std::move(pool)),
      budget_(std::move(budget)),
      namespace_index_(namespace_index),
      keys_(std::move(keys)) {
  refs_.reserve(keys_.size());
}

bool PromoteTicket::wait(std::chrono::nanoseconds timeout) {
  std::unique_lock guard(mutex_);
  return changed_.wait_for(guard, timeout, [this] { return done(); });
}

bool PromoteTicket::add(const BlockRef& pinned, std::uint64_t charge, bool from_disk) noexcept {
  {
    const std::lock_guard guard(mutex_);
    if (!done()) {
      refs_.push_back(pinned);  // has room: reserved for every key
      charged_ += charge;
      // The origin first, so that it never counts less than what came.
      if (from_disk) from_disk_.fetch_add(1, std::memory_order_release);
      count_.store(refs_.size(), std::memory_order_release);
      return true;
    }
  }
  pool_->unpin(std::span(&pinned, 1));
  budget_->give(charge);
  return false;
}

void PromoteTicket::finish() noexcept {
  {
    const std::lock_guard guard(mutex_);
    if (done()) return;
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void PromoteTicket::release() noexcept {
  finish();
  std::vector<BlockRef> refs;
  std::uint64_t charged = 0;
  {
    const std::lock_guard guard(mutex_);
    refs.swap(refs_);
    std::swap(charged, charged_);
  }
  if (!refs.empty()) pool_->unpin(refs);
  budget_->give(charged);
}

}  // namespace hpkv::disk
