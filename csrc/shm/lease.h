// Pins on the leading run of ready blocks of a list of keys, held as one object.
//
// Invariant: every ref in refs() is pinned exactly once by this lease until it is released; keys()
// are their keys. Moving hands the pins over and leaves an empty lease.
// Threads: one owner at a time; the copy engine takes a lease over by moving it, so the last owner
// may be an engine thread.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "shm/pool.h"

namespace hpkv {

class Lease {
 public:
  Lease() = default;

  // Scheduler-safe, as Pool::pin is.
  Lease(std::shared_ptr<Pool> pool, std::span<const Key> keys)
      : pool_(std::move(pool)), keys_(keys.begin(), keys.end()), refs_(keys.size()) {
    const std::size_t count = pool_->pin(keys_, refs_);
    keys_.resize(count);
    refs_.resize(count);
  }

  Lease(Lease&& other) noexcept
      : pool_(std::move(other.pool_)),
        keys_(std::exchange(other.keys_, {})),
        refs_(std::exchange(other.refs_, {})) {}

  Lease& operator=(Lease&& other) noexcept {
    if (this != &other) {
      release();
      pool_ = std::move(other.pool_);
      keys_ = std::exchange(other.keys_, {});
      refs_ = std::exchange(other.refs_, {});
    }
    return *this;
  }

  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { release(); }

  [[nodiscard]] std::size_t count() const noexcept { return refs_.size(); }
  [[nodiscard]] std::span<const Key> keys() const noexcept { return keys_; }
  [[nodiscard]] std::span<const BlockRef> refs() const noexcept { return refs_; }

  // Leading blocks whose checksum was confirmed in this epoch; all, when every load checks anyway.
  [[nodiscard]] std::size_t verified_count() const noexcept {
    if (refs_.empty() || pool_->verify_always()) return refs_.size();
    std::size_t count = 0;
    while (count < refs_.size() && pool_->verified(refs_[count])) ++count;
    return count;
  }

  // Unpins all but the first `count` blocks.
  void keep(std::size_t count) noexcept {
    if (count >= refs_.size()) return;
    pool_->unpin(std::span<const BlockRef>(refs_).subspan(count));
    keys_.resize(count);
    refs_.resize(count);
  }

  // A lease of the first `count` blocks, or of all when there are fewer; this one keeps the rest.
  [[nodiscard]] Lease take(std::size_t count) {
    if (count >= refs_.size()) return std::move(*this);
    Lease head;
    const auto cut = static_cast<std::ptrdiff_t>(count);
    head.keys_.assign(keys_.begin(), keys_.begin() + cut);
    head.refs_.assign(refs_.begin(), refs_.begin() + cut);
    // Nothing throws from here on, so every pin has one owner at any time.
    head.pool_ = pool_;
    keys_.erase(keys_.begin(), keys_.begin() + cut);
    refs_.erase(refs_.begin(), refs_.begin() + cut);
    return head;
  }

  void release() noexcept {
    keep(0);
    pool_.reset();
  }

 private:
  std::shared_ptr<Pool> pool_;
  std::vector<Key> keys_;
  std::vector<BlockRef> refs_;
};

}  // namespace hpkv
