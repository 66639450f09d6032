#include "disk/breaker.h"

#include <algorithm>

namespace hpkv::disk {
namespace {

constexpr std::int64_t kRestNs = kSecond;
constexpr std::int64_t kRestMostNs = 30 * kSecond;

}  // namespace

Breaker::Breaker(std::string what, std::shared_ptr<Notices> notices, Clock clock,
                 std::int64_t hang_ns)
    : what_(std::move(what)),
      notices_(std::move(notices)),
      clock_(std::move(clock)),
      hang_ns_(hang_ns) {}

bool Breaker::resting() const noexcept {
  const std::int64_t until = rest_until_.load(std::memory_order_acquire);
  return until != 0 && clock_() < until;
}

bool Breaker::hanging() const noexcept {
  const std::int64_t old = clock_() - hang_ns_;
  return std::any_of(started_.begin(), started_.end(), [old](const auto& place) {
    const std::int64_t started = place.load(std::memory_order_relaxed);
    return started != 0 && started <= old;
  });
}

bool Breaker::look() {
  const bool hangs = hanging();
  const std::lock_guard guard(mutex_);
  if (hangs == hang_said_) return false;
  hang_said_ = hangs;
  notices_->say(hangs ? "disk tier: " + what_ + " hangs; requests go on without it"
                      : "disk tier: " + what_ + " no longer hangs");
  return hangs;
}

void Breaker::succeeded() {
  // The common case takes no lock: nothing was wrong.
  if (rest_until_.load(std::memory_order_acquire) == 0) return;
  const std::lock_guard guard(mutex_);
  if (rest_ns_ == 0 || clock_() < rest_until_.load(std::memory_order_relaxed)) return;
  rest_ns_ = 0;
  rest_until_.store(0, std::memory_order_release);
  notices_->say("disk tier: " + what_ + " works again");
}

void Breaker::failed(const std::string& why) {
  const std::lock_guard guard(mutex_);
  const std::int64_t now = clock_();
  if (now < rest_until_.load(std::memory_order_relaxed)) return;  // one of those begun before
  if (rest_ns_ == 0) {
    notices_->say("disk tier: " + what_ + " failed (" + why +
                  "); requests go on without it until it works again");
  }
  rest_ns_ = std::clamp(2 * rest_ns_, kRestNs, kRestMostNs);
  rest_until_.store(now + rest_ns_, std::memory_order_release);
}

Breaker::Call::Call(Breaker& breaker) noexcept {
  const std::int64_t now = std::max<std::int64_t>(breaker.clock_(), 1);
  for (std::atomic<std::int64_t>& place : breaker.started_) {
    std::int64_t none = 0;
    if (place.compare_exchange_strong(none, now, std::memory_order_relaxed)) {
      place_ = &place;
      return;
    }
  }
}

Breaker::Call::~Call() {
  if (place_ != nullptr) place_->store(0, std::memory_order_relaxed);
}

}  // namespace hpkv::disk
