#include "copy/stream/registered_pool.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hpkv::stream {
namespace {

constexpr std::uint64_t kPage = 4096;

}  // namespace

RegisteredPool::RegisteredPool(std::shared_ptr<Device> device, std::shared_ptr<Pool> pool,
                               std::uint64_t piece_bytes, std::chrono::milliseconds look_every)
    : device_(std::move(device)),
      pool_(std::move(pool)),
      piece_bytes_(piece_bytes / kPage * kPage),
      look_every_(look_every) {
  if (piece_bytes_ != 0) thread_ = std::thread([this] { run(); });
}

RegisteredPool::~RegisteredPool() {
  stop();
  release();
}

RegisteredPool::Lookup::Lookup(RegisteredPool& registered, Cover cover)
    : registered_(registered), cover_(cover), lock_(registered.mutex_) {}

RegisteredPool::Lookup::~Lookup() {
  if (!missed_) return;
  registered_.asked_ = true;
  registered_.changed_.notify_all();
}

bool RegisteredPool::Lookup::holds(std::span<const std::byte> bytes) {
  const std::byte* const first = bytes.data();
  const std::byte* const end = first + bytes.size();
  if (begin_ <= first && end <= end_) return true;
  const auto& ranges = registered_.ranges_;
  auto after = ranges.upper_bound(const_cast<std::byte*>(first));
  if (after != ranges.begin()) {
    const auto& [begin, size] = *std::prev(after);
    const std::byte* covered = begin + size;
    if (cover_ == Cover::adjacent) {
      for (; covered < end && after != ranges.end() && after->first == covered; ++after) {
        covered += after->second;
      }
    }
    if (covered >= end) {
      begin_ = begin;
      end_ = covered;
      return true;
    }
  }
  missed_ = true;
  return false;
}

std::string RegisteredPool::notice() {
  const std::lock_guard lock(mutex_);
  return notice_;
}

void RegisteredPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void RegisteredPool::release() {
  const std::lock_guard lock(mutex_);
  for (const auto& [begin, bytes] : ranges_) device_->unregister_host(begin);
  ranges_.clear();
}

void RegisteredPool::run() {
  const Status entered = device_->enter_thread();
  if (!entered.ok()) {
    const std::lock_guard lock(mutex_);
    return refuse(entered);
  }
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, look_every_, [this] { return asked_ || stopping_; });
      if (stopping_) return;
      asked_ = false;
    }
    if (!register_more()) return;
  }
}

bool RegisteredPool::register_more() {
  for (const std::span<std::byte> gap : missing()) {
    std::byte* begin = gap.data();
    std::byte* const end = begin + gap.size() / kPage * kPage;
    while (begin < end) {
      const std::uint64_t bytes = std::min(piece_bytes_, static_cast<std::uint64_t>(end - begin));
      if (!add(begin, bytes)) return false;
      begin += bytes;
    }
  }
  return true;
}

bool RegisteredPool::add(std::byte* begin, std::uint64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
  }
  const Status status = device_->register_host(begin, bytes);
  const std::lock_guard lock(mutex_);
  if (status.ok()) {
    ranges_.emplace(begin, bytes);
    return true;
  }
  refuse(status);
  return false;
}

void RegisteredPool::refuse(const Status& status) {
  std::uint64_t before = 0;
  for (const auto& [at, size] : ranges_) before += size;
  notice_ = "the device reads " + std::to_string(before >> 20U) +
            " MiB of the pool in place, the rest through staging, because it takes no more: " +
            status.text();
}

std::vector<std::span<std::byte>> RegisteredPool::missing() {
  const std::vector<std::span<std::byte>> segments = pool_->reserved();  // by address
  std::vector<std::span<std::byte>> gaps;
  const std::lock_guard lock(mutex_);
  for (const std::span<std::byte> segment : segments) {
    std::byte* const begin = registered_end(segment);
    std::byte* const end = segment.data() + segment.size();
    if (begin >= end) continue;
    if (!gaps.empty() && gaps.back().data() + gaps.back().size() == begin) {
      gaps.back() = {gaps.back().data(), end};
    } else {
      gaps.emplace_back(begin, end);
    }
  }
  return gaps;
}

// A segment grows at its end and is registered from its start: what is, is a prefix.
std::byte* RegisteredPool::registered_end(std::span<std::byte> segment) const {
  const auto behind = ranges_.lower_bound(segment.data() + segment.size());
  if (behind == ranges_.begin()) return segment.data();
  const auto& [begin, bytes] = *std::prev(behind);
  return std::max(segment.data(), begin + bytes);
}

}  // namespace hpkv::stream
