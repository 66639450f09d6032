#include "disk/demoter.h"

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "disk/format.h"
#include "disk/pause.h"

namespace hpkv::disk {
namespace {

constexpr std::chrono::milliseconds kTick{20};
constexpr std::chrono::seconds kStuck{1};  // pause when blocks are due and none could be written
constexpr std::size_t kSurveyBlocks = 4096;
// A walk over a large pool takes long; it may take this part of one core.
constexpr int kWalkShare = 20;
constexpr std::int64_t kIdleNs = kSecond;  // without a store or a load: time to write the rest
constexpr std::uint64_t kIdleBytes = std::uint64_t{64} << 20U;  // at one look

// Pins what is there, and lets it go again.
class Pins {
 public:
  Pins(Pool& pool, std::span<const Key> keys) : pool_(pool) {
    for (const Key& key : keys) {
      BlockRef ref;
      if (pool_.pin_quietly(std::span(&key, 1), std::span(&ref, 1)) != 1) continue;
      refs_.push_back(ref);
      keys_.push_back(key);
    }
  }
  ~Pins() { pool_.unpin(refs_); }
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

  [[nodiscard]] std::span<const BlockRef> refs() const noexcept { return refs_; }
  [[nodiscard]] std::span<const Key> keys() const noexcept { return keys_; }

 private:
  Pool& pool_;
  std::vector<BlockRef> refs_;
  std::vector<Key> keys_;
};

// A full disk is no failure: nothing rests for it, and the next attempt may find room. But it is
// said once, and once that it is over. True: it was said now that there is none.
bool room_ran_out(Tier& tier, const AppendResult& result) {
  if (result.no_room) {
    if (tier.short_of_room.exchange(true, std::memory_order_relaxed)) return false;
    tier.notices->say("disk tier: writing finds no space (" + tier.store->counters().last_error +
                      "); blocks are not kept on disk until there is some");
    return true;
  }
  if (result.written > 0 && tier.short_of_room.exchange(false, std::memory_order_relaxed)) {
    tier.notices->say("disk tier: writing finds space again");
  }
  return false;
}

void demote_batch(Tier& tier, std::uint32_t namespace_index, std::span<const Key> keys,
                  DemoteResult& total) {
  const Pins pins(*tier.pool, keys);
  if (pins.keys().empty()) return;
  const Breaker::Call call(tier.writing);
  if (const std::int64_t delay = tier.write_delay_ns.load(std::memory_order_relaxed); delay > 0)
    sleep_ns(delay);
  const AppendResult result = tier.store->append(namespace_index, pins.refs(), pins.keys());
  if (result.error != 0) {
    tier.writing.failed(tier.store->counters().last_error);
  } else if (result.written > 0) {
    tier.writing.succeeded();
  }
  const std::uint64_t bytes = result.written * tier.pool->block_bytes(namespace_index);
  tier.pool->count_disk(bytes, 0, room_ran_out(tier, result) || result.error != 0 ? 1 : 0);
  tier.demoted_blocks.fetch_add(result.written, std::memory_order_relaxed);
  tier.demoted_bytes.fetch_add(bytes, std::memory_order_relaxed);
  tier.demotions_refused.fetch_add(result.refused, std::memory_order_relaxed);
  total.written += result.written;
  total.present += result.present;
  total.refused += result.refused;
}

}  // namespace

DemoteResult demote(Tier& tier, std::uint32_t namespace_index, std::span<const Key> keys) {
  DemoteResult total;
  const auto info = tier.pool->name_space(namespace_index);
  if (!info) return total;
  const std::size_t batch = batch_blocks(round_up_page(info->block_bytes));
  for (std::size_t start = 0; start < keys.size() && tier.writing.accepts(); start += batch)
    demote_batch(tier, namespace_index, keys.subspan(start, std::min(batch, keys.size() - start)),
                 total);
  return total;
}

// What the thread works with; shared with it.
class Demoter::Desk {
 public:
  explicit Desk(std::shared_ptr<Tier> tier) : tier_(std::move(tier)) {}

  void serve() {
    std::chrono::nanoseconds pause = kTick;
    while (pause_.sleep(pause)) {
      pause = kTick;
      try {
        const Round done = look();
        if (done.more || done.waits) {
          pause = done.progress ? std::chrono::nanoseconds(0) : std::chrono::nanoseconds(kStuck);
        } else {
          const std::chrono::nanoseconds walk(done.walk_ns * kWalkShare);
          pause = std::max<std::chrono::nanoseconds>(kTick, walk);
        }
      } catch (const std::exception& error) {
        tier_->notices->say(std::string("disk tier: a demotion failed: ") + error.what());
        pause = kStuck;
      }
    }
  }

  struct Round {
    bool more = false;
    bool progress = false;
    bool waits = false;  // for somebody who stores or reads; a walk every second is enough
    std::int64_t walk_ns = 0;
  };

  Round look() {
    const std::lock_guard one(round_mutex_);
    Round done;
    if (tier_->pool->off() || !tier_->writing.accepts()) return done;
    const std::int64_t begin = now_ns();
    const std::uint64_t activity = tier_->catalog->activity();
    if (activity != seen_activity_) quiet_since_ns_ = begin;
    const bool idle = rest_is_due_ && begin - quiet_since_ns_ >= kIdleNs;
    if (!active_ && !idle && activity == seen_activity_) return done;
    const Survey survey =
        tier_->catalog->survey({.blocks = kSurveyBlocks,
                                .min_uses = tier_->admission.min_uses(),
                                .stride_max = round_up_page(tier_->store->info().block_bytes_max)});
    done.walk_ns = now_ns() - begin;
    seen_activity_ = activity;
    const Watermarks marks;
    const std::uint64_t spare = survey.free_bytes + survey.clean_bytes;
    const std::uint64_t enough = survey.pool_bytes / 16 * marks.stop_sixteenths;
    if (spare < survey.pool_bytes / 16 * marks.start_sixteenths) active_ = true;
    if (spare >= enough || survey.coldest.empty()) active_ = false;
    // Nothing moves when a block's last pin goes.
    rest_is_due_ = !survey.coldest.empty() || survey.busy_blocks != 0;
    done.more = active_;
    if (active_) demote_coldest(survey, enough - spare, done);
    if (!active_ && idle) {
      demote_coldest(survey, kIdleBytes, done);
      seen_activity_ = tier_->catalog->activity();  // of our own entries
      rest_is_due_ = done.progress || survey.busy_blocks != 0;
      done.waits = !done.progress && rest_is_due_;
    }
    return done;
  }

  void stop() noexcept { pause_.stop(); }

 private:
  void demote_coldest(const Survey& survey, std::uint64_t wanted_bytes, Round& round) {
    std::map<std::uint32_t, std::vector<Survey::Block>> by_namespace;
    std::uint64_t chosen_bytes = 0;
    for (const Survey::Block& block : survey.coldest) {
      if (chosen_bytes >= wanted_bytes) break;
      const auto info = tier_->pool->name_space(block.namespace_index);
      if (!info) continue;
      const std::uint64_t stride = round_up_page(info->block_bytes);
      chosen_bytes += stride;
      std::vector<Survey::Block>& blocks = by_namespace[block.namespace_index];
      blocks.push_back(block);
      if (blocks.size() >= batch_blocks(stride) && !flush(block.namespace_index, blocks, round))
        return;
    }
    for (auto& [index, blocks] : by_namespace) {
      if (!blocks.empty() && !flush(index, blocks, round)) return;
    }
  }

  // The coldest come tail first; in the file the head of a prefix comes first. False: no more now.
  bool flush(std::uint32_t namespace_index, std::vector<Survey::Block>& blocks, Round& round) {
    std::vector<Key> keys;
    for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) keys.push_back(block->key);
    const DemoteResult result = demote(*tier_, namespace_index, keys);
    charge(namespace_index, blocks, result.written);
    blocks.clear();
    if (result.written + result.present > 0) round.progress = true;
    return result.refused == 0 && tier_->writing.accepts() && !pause_.stopping();
  }

  // Of these blocks so many were written: those never loaded back are paid for.
  void charge(std::uint32_t namespace_index, std::span<const Survey::Block> blocks,
              std::uint64_t written) {
    std::uint64_t unused = 0;
    for (const Survey::Block& block : blocks) {
      DiskRef ref;
      if (!block.used && tier_->catalog->find(block.key, ref)) ++unused;
    }
    const auto info = tier_->pool->name_space(namespace_index);
    if (!info) return;
    tier_->admission.wrote_unused(std::min(unused, written) * round_up_page(info->block_bytes));
  }

  const std::shared_ptr<Tier> tier_;
  std::mutex round_mutex_;    // the next four
  bool active_ = false;       // between the two watermarks
  bool rest_is_due_ = false;  // the last look left blocks that are, or may be, worth writing
  std::int64_t quiet_since_ns_ = 0;
  std::uint64_t seen_activity_ = 0;
  Pause pause_;
};

Demoter::Demoter(std::shared_ptr<Tier> tier) : desk_(std::make_shared<Desk>(std::move(tier))) {}

Demoter::~Demoter() { stop(); }

void Demoter::start() {
  crew_.start(1, [desk = desk_] { desk->serve(); });
}

bool Demoter::round() { return desk_->look().more; }

void Demoter::stop() noexcept { desk_->stop(); }

bool Demoter::join_within(std::chrono::nanoseconds timeout) { return crew_.join_within(timeout); }

}  // namespace hpkv::disk
