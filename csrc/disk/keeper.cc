#include "disk/keeper.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "disk/pause.h"

namespace hpkv::disk {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::seconds kTick{1};

}  // namespace

class Keeper::Desk {
 public:
  explicit Desk(std::shared_ptr<Tier> tier) : tier_(std::move(tier)) {}

  void serve() {
    do {
      try {
        round();
      } catch (const std::exception& error) {
        tier_->notices->say(std::string("disk tier: keeping the store failed: ") + error.what());
      }
    } while (pause_.sleep(kTick));
  }

  void stop() noexcept { pause_.stop(); }

 private:
  // A large store recovers for long: what is due meanwhile is done between two regions.
  void round() {
    if (tier_->pool->off()) return;
    while (!pause_.stopping() && recover_one()) {
      if (steady_clock::now() >= due_) keep();
    }
    if (tier_->store->recovered()) tier_->recovering.succeeded();
    if (!pause_.stopping()) keep();
  }

  bool recover_one() {
    const Breaker::Call call(tier_->recovering);
    const std::optional<int> code = tier_->store->recover_one();
    if (code && *code < 0) {
      tier_->pool->count_disk(0, 0, 1);
      tier_->recovering.failed(tier_->store->counters().last_error);
    }
    return code.has_value();
  }

  void keep() {
    const auto [synced, tended] = ask_disk();
    if (std::max(synced, tended) != 0) {
      tier_->pool->count_disk(0, 0, 1);
      tier_->keeping.failed(tier_->store->counters().last_error);
    } else {
      tier_->keeping.succeeded();
    }
    if (gave_back_ != tier_->store->gives_back()) {
      gave_back_ = !gave_back_;
      tier_->notices->say(gave_back_
                              ? "disk tier: the file system is nearly full: files are given back"
                              : "disk tier: the file system has room again");
    }
    due_ = steady_clock::now() + kTick;
  }

  std::pair<int, int> ask_disk() {
    const Breaker::Call call(tier_->keeping);
    const int synced = tier_->store->sync_aged(false);
    return {synced, tier_->store->tend()};
  }

  const std::shared_ptr<Tier> tier_;
  steady_clock::time_point due_;
  bool gave_back_ = false;  // as it was said last
  Pause pause_;
};

Keeper::Keeper(std::shared_ptr<Tier> tier) : desk_(std::make_shared<Desk>(std::move(tier))) {}

Keeper::~Keeper() { stop(); }

void Keeper::start() {
  crew_.start(1, [desk = desk_] { desk->serve(); });
}

void Keeper::stop() noexcept { desk_->stop(); }

bool Keeper::join_within(std::chrono::nanoseconds timeout) { return crew_.join_within(timeout); }

}  // namespace hpkv::disk
