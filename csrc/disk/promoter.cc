#include "disk/promoter.h"

#include <deque>
#include <exception>

#include "disk/promotion.h"

namespace hpkv::disk {
namespace {

constexpr std::size_t kQueueMost = 1024;

}  // namespace

// The queue, and who is at work; shared with the threads.
class Promoter::Desk {
 public:
  [[nodiscard]] bool submit(std::shared_ptr<PromoteTicket> ticket) {
    {
      const std::lock_guard guard(mutex_);
      if (stopping_.load(std::memory_order_relaxed) || queue_.size() >= kQueueMost) return false;
      queue_.push_back(std::move(ticket));
    }
    changed_.notify_one();
    return true;
  }

  void serve(Tier& tier) {
    while (const auto ticket = take()) {
      if (!ticket->done()) {
        try {
          Promotion(tier, *ticket, stopping_).run();
        } catch (const std::exception& error) {  // no memory, most likely; the thread must go on
          tier.notices->say(std::string("disk tier: a promotion failed: ") + error.what());
        }
        if (ticket->count() < ticket->keys().size())
          tier.promotions_cut.fetch_add(1, std::memory_order_relaxed);
      }
      ticket->finish();
    }
  }

  void stop() noexcept {
    std::deque<std::shared_ptr<PromoteTicket>> left;
    {
      const std::lock_guard guard(mutex_);
      stopping_.store(true, std::memory_order_relaxed);
      left.swap(queue_);
    }
    changed_.notify_all();
    for (const auto& ticket : left) ticket->finish();
  }

  [[nodiscard]] std::size_t queued_count() const {
    const std::lock_guard guard(mutex_);
    return queue_.size();
  }

 private:
  std::shared_ptr<PromoteTicket> take() {
    std::unique_lock guard(mutex_);
    changed_.wait(guard,
                  [this] { return stopping_.load(std::memory_order_relaxed) || !queue_.empty(); });
    if (queue_.empty()) return nullptr;
    auto ticket = std::move(queue_.front());
    queue_.pop_front();
    return ticket;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<PromoteTicket>> queue_;
  std::atomic<bool> stopping_{false};  // set under the mutex
};

Promoter::Promoter(std::shared_ptr<Tier> tier, std::uint32_t thread_count)
    : tier_(std::move(tier)), desk_(std::make_shared<Desk>()) {
  crew_.start(thread_count, [tier = tier_, desk = desk_] { desk->serve(*tier); });
}

Promoter::~Promoter() { stop(); }

std::shared_ptr<PromoteTicket> Promoter::promote(std::uint32_t namespace_index,
                                                 std::vector<Key> keys) {
  tier_->promote_tickets.fetch_add(1, std::memory_order_relaxed);
  auto ticket =
      std::make_shared<PromoteTicket>(tier_->pool, budget_, namespace_index, std::move(keys));
  const bool accepted = tier_->reading.accepts() && !tier_->pool->off() && desk_->submit(ticket);
  if (!accepted) {
    tier_->promotions_refused.fetch_add(1, std::memory_order_relaxed);
    ticket->finish();
  }
  return ticket;
}

std::size_t Promoter::queued_count() const { return desk_->queued_count(); }

std::uint64_t Promoter::pinned_bytes() const noexcept { return budget_->used(); }

void Promoter::stop() noexcept { desk_->stop(); }

bool Promoter::join_within(std::chrono::nanoseconds timeout) { return crew_.join_within(timeout); }

}  // namespace hpkv::disk
