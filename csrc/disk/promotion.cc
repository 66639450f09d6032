#include "disk/promotion.h"

#include <algorithm>
#include <ctime>

#include "base/clock.h"
#include "disk/format.h"

namespace hpkv::disk {
namespace {

// How long to wait for a block that another process is storing right now: it is reading the same
// prefix, or it died and its block is in quarantine.
constexpr std::int64_t kOthersNs = 5 * kSecond;
constexpr std::int64_t kOthersPauseNs = 2 * kMillisecond;

std::uint64_t known_block_bytes(const Pool& pool, std::uint32_t namespace_index) {
  const auto info = pool.name_space(namespace_index);
  return info ? info->block_bytes : 0;
}

// The counters have each; the log has one line a while, for a disk that rots has many.
void say_damage(Tier& tier, std::ptrdiff_t blocks) {
  constexpr std::int64_t kPauseNs = 600 * kSecond;
  const std::int64_t now = now_ns();
  std::int64_t said = tier.damage_said_ns.load(std::memory_order_relaxed);
  if (said != 0 && now - said < kPauseNs) return;
  if (!tier.damage_said_ns.compare_exchange_strong(said, now, std::memory_order_relaxed)) return;
  tier.notices->say("disk tier: damaged or missing blocks in a read: " + std::to_string(blocks) +
                    "; requests compute them again, and 'hpkv verify' looks at all there are");
}

std::uint64_t failures(const std::vector<ReadOutcome>& outcomes) {
  return static_cast<std::uint64_t>(std::ranges::count_if(outcomes, [](ReadOutcome outcome) {
    return outcome == ReadOutcome::bad || outcome == ReadOutcome::io_error;
  }));
}

}  // namespace

void sleep_ns(std::int64_t ns) noexcept {
  const timespec pause{ns / kSecond, ns % kSecond};
  ::nanosleep(&pause, nullptr);
}

struct Promotion::Reserved {
  explicit Reserved(Promotion& promotion_) : promotion(promotion_) {}
  ~Reserved() {
    for (std::size_t i = next; i < batch.blocks.size(); ++i) {
      promotion.tier_.pool->abandon(batch.blocks[i]);
      promotion.ticket_.budget().give(promotion.stride_);
    }
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

  Promotion& promotion;
  Batch batch;
  std::size_t next = 0;  // those before are published or abandoned
};

Promotion::Promotion(Tier& tier, PromoteTicket& ticket, const std::atomic<bool>& stopping) noexcept
    : tier_(tier),
      ticket_(ticket),
      stopping_(stopping),
      block_bytes_(known_block_bytes(*tier.pool, ticket.namespace_index())),
      stride_(round_up_page(block_bytes_)),
      // Half of the pool for the waiting requests of all clients together.
      pin_limit_(tier.pool->info().pool_bytes / 2 / std::max(tier.pool->clients(), 1U)),
      first_stamp_(tier.pool->take_stamps(ticket.keys().size())) {}

void Promotion::run() {
  if (block_bytes_ == 0) return;
  std::int64_t waited_ns = 0;
  while (wanted() && position_ < ticket_.keys().size()) {
    const std::size_t before = position_;
    Next next = pin_resident();
    if (next == Next::end || rest().empty()) break;
    if (!tier_.reading.accepts()) break;
    Reserved reserved(*this);
    next = gather(reserved.batch);
    if (!reserved.batch.blocks.empty() && !read(reserved)) break;
    if (next == Next::end) break;
    if (position_ != before) {
      waited_ns = 0;
    } else if (next == Next::wait && waited_ns < kOthersNs) {
      sleep_ns(kOthersPauseNs);
      waited_ns += kOthersPauseNs;
    } else {
      break;
    }
  }
}

Promotion::Next Promotion::pin_resident() {
  const std::size_t resident = tier_.pool->lookup(rest());
  for (std::size_t i = 0; i < resident; ++i) {
    if (!ticket_.budget().take(stride_, pin_limit_)) return Next::end;
    BlockRef ref;
    if (tier_.pool->pin_quietly(rest().first(1), std::span(&ref, 1)) != 1) {
      ticket_.budget().give(stride_);
      return Next::go_on;  // evicted meanwhile: perhaps it is on disk
    }
    if (!ticket_.add(ref, stride_, false)) return Next::end;
    ++position_;
  }
  return Next::go_on;
}

// Reserves places for the next keys that are on disk, as many as one read takes.
Promotion::Next Promotion::gather(Batch& batch) {
  const std::size_t most = std::min(batch_blocks(stride_), rest().size());
  for (std::size_t i = 0; i < most; ++i) {
    const Key& key = rest()[i];
    DiskRef on_disk;
    if (!tier_.catalog->find(key, on_disk)) {
      // In the pool after all (the next round pins it), or nowhere.
      return tier_.pool->lookup(std::span(&key, 1)) == 1 ? Next::wait : Next::end;
    }
    if (on_disk.namespace_index != ticket_.namespace_index()) return Next::end;
    if (!ticket_.budget().take(stride_, pin_limit_)) return Next::end;
    BlockRef block;
    const ReserveStatus status = tier_.pool->reserve(ticket_.namespace_index(), key, block);
    if (status != ReserveStatus::ok) {
      ticket_.budget().give(stride_);
      const bool others = status == ReserveStatus::present || status == ReserveStatus::busy;
      return others ? Next::wait : Next::end;
    }
    batch.refs.push_back(on_disk);
    batch.blocks.push_back(block);
  }
  return Next::go_on;
}

// Reads and publishes a batch. False: the run ends with what came.
bool Promotion::read(Reserved& reserved) {
  const Batch& batch = reserved.batch;
  std::vector<ReadOutcome> outcomes(batch.refs.size(), ReadOutcome::io_error);
  ask_disk(batch, outcomes);
  bool whole = true;  // the run has no gap yet
  std::uint64_t blocks = 0;
  for (; reserved.next < batch.blocks.size(); ++reserved.next) {
    const BlockRef& block = batch.blocks[reserved.next];
    const std::uint32_t checksum = batch.refs[reserved.next].checksum;
    // The deepest page is the coldest; see Pool::take_stamps.
    const std::uint64_t stamp = first_stamp_ + ticket_.keys().size() - 1 - position_;
    const bool good = outcomes[reserved.next] == ReadOutcome::ok;
    blocks += good ? 1 : 0;
    if (good && whole && tier_.pool->publish_pinned(block, checksum, stamp)) {
      whole = ticket_.add(block, stride_, true);
      if (whole) ++position_;
      continue;
    }
    whole = false;
    if (good) {
      tier_.pool->publish(block, checksum);  // nobody waits for it, but here it is
    } else {
      tier_.pool->abandon(block);
    }
    ticket_.budget().give(stride_);
  }
  tier_.promoted_blocks.fetch_add(blocks, std::memory_order_relaxed);
  tier_.promoted_bytes.fetch_add(blocks * block_bytes_, std::memory_order_relaxed);
  tier_.admission.served(blocks * block_bytes_);
  tier_.pool->count_disk(0, blocks * block_bytes_, failures(outcomes));
  return whole;
}

void Promotion::ask_disk(const Batch& batch, std::vector<ReadOutcome>& outcomes) {
  std::vector<std::byte*> targets;
  for (const BlockRef& block : batch.blocks) targets.push_back(tier_.pool->payload(block));
  const Breaker::Call call(tier_.reading);
  if (const std::int64_t delay = tier_.read_delay_ns.load(std::memory_order_relaxed); delay > 0)
    sleep_ns(delay);
  tier_.store->read(batch.refs, targets, outcomes);
  if (const auto bad = std::ranges::count(outcomes, ReadOutcome::bad); bad > 0) {
    say_damage(tier_, bad);
  }
  if (std::ranges::count(outcomes, ReadOutcome::io_error) > 0) {
    tier_.reading.failed(tier_.store->counters().last_error);
  } else {
    tier_.reading.succeeded();
    tier_.catalog->touch(batch.refs);
  }
}

}  // namespace hpkv::disk
