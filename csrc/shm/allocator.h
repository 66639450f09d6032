// Places for blocks: free ones, new runs, evicted ones, in this order.
//
// Owns: a small stock of claimed places per class, and the eviction candidates of its last walk.
// Both are private; a place in the stock is `claimed` in the pool, so it is nobody else's and
// returns if we die. Invariant: a pinned block is never taken; a block is taken only if its recency
// has not changed since it was chosen. Threads: safe; engine threads only (a walk and a new run
// take milliseconds).
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "index/eviction.h"
#include "index/shard.h"
#include "shm/segments.h"

namespace hpkv::shm {

struct Place {
  std::uint64_t descriptor_offset = 0;
  std::uint32_t generation = 0;
};

class Allocator {
 public:
  Allocator(Core& core, Segments& segments) noexcept : core_(core), segments_(segments) {}

  // A claimed place of this class; nullopt: full.
  [[nodiscard]] std::optional<Place> claim(std::uint64_t stride) noexcept;
  // Claimed and not used: back to the free ones.
  void give_back(const Place& place) noexcept;
  // Ends the coldest run of blocks, so that a segment is free. False: none may go.
  [[nodiscard]] bool free_segment() noexcept;
  // Evict every unpinned ready block (of a namespace); return how many. Candidates are forgotten:
  // there are free ones.
  std::uint64_t drop_all();
  std::uint64_t drop_namespace(std::uint32_t namespace_index);
  // Gives the whole stock back; before a clean goodbye.
  void release_stock() noexcept;
  // Gives back the stock of classes that were not used since the last call: a claimed place keeps
  // its run from ending.
  void release_idle_stock() noexcept;

  // The class that took a run last, for the background thread; 0 when none since the last call.
  [[nodiscard]] std::uint64_t take_recent_stride() noexcept { return recent_stride_.exchange(0); }

 private:
  template <typename Matches>
  std::uint64_t drop_if(Matches&& matches);

  struct Class {
    std::mutex mutex;
    std::uint64_t stride = 0;
    std::vector<Place> stock;
    bool used = false;  // since the last release_idle_stock
    index::LeastRecent coldest;
    std::uint64_t next_segment = 0;  // where the last free place was found
  };

  [[nodiscard]] Class& class_of(std::uint64_t stride);
  void give_back_stock(Class& cls) noexcept;
  void release_stock_of_others(const Class& cls) noexcept;
  void claim_free(Class& cls, WaitBudget& budget) noexcept;
  [[nodiscard]] bool claim_free_in(Class& cls, const Run& run, WaitBudget& budget) noexcept;
  void claim_new_run(Class& cls, WaitBudget& budget) noexcept;
  void gather_coldest(Class& cls) noexcept;
  void stamp_unstamped(const index::Candidate& block) noexcept;
  [[nodiscard]] std::optional<Place> evict(const index::Candidate& candidate, bool any_stamp,
                                           WaitBudget& budget) noexcept;
  // Ends the coldest runs of classes other than `stride` so that a run of `length` segments fits,
  // if they are colder than `limit_stamp`.
  [[nodiscard]] bool make_room(std::uint64_t stride, std::uint64_t length,
                               std::uint64_t limit_stamp, WaitBudget& budget) noexcept;
  [[nodiscard]] bool empty_run(const Run& run, WaitBudget& budget) noexcept;

  Core& core_;
  Segments& segments_;
  std::mutex classes_mutex_;
  std::map<std::uint64_t, Class> classes_;
  std::atomic<std::uint64_t> recent_stride_{0};
};

}  // namespace hpkv::shm
