// The CPU backend of the copy engine: "device" memory is ordinary memory, copies are non-temporal
// stores on a fixed set of threads. It is the specification that other backends are tested against.
//
// Internal to csrc/copy/cpu; callers use make_cpu_engine() of copy/engine.h.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "copy/cpu/jobs.h"
#include "copy/engine.h"

namespace hpkv::cpu {

class CpuEngine final : public CopyEngine {
 public:
  CpuEngine(std::shared_ptr<Pool> pool, std::uint32_t namespace_index, BlockLayout layout,
            const EngineOptions& options);
  ~CpuEngine() override;
  CpuEngine(const CpuEngine&) = delete;
  CpuEngine& operator=(const CpuEngine&) = delete;

  std::shared_ptr<SpillTicket> spill(std::vector<Key> keys, std::vector<std::int64_t> pages,
                                     DeviceEvent after, Turn turn) override;
  std::shared_ptr<LoadTicket> load(Lease lease, std::vector<std::int64_t> pages, DeviceEvent after,
                                   std::shared_ptr<const BlockSource> source) override;
  std::shared_ptr<VerifyTicket> verify(Lease lease) override;
  Faults& faults() noexcept override { return faults_; }
  [[nodiscard]] EngineStats stats() const override;
  void quiesce() override;
  void close() override;

 private:
  // Counters only ever rise and are read one by one: relaxed everywhere.
  struct Counters {
    std::atomic<std::uint64_t> spill_stored{0}, spill_present{0}, dropped_full{0}, dropped_busy{0},
        left_to_others{0}, dropped_off{0}, dropped_queue{0}, dropped_cancelled{0}, spilled_bytes{0},
        load_tickets{0}, load_failed{0}, loaded_blocks{0}, loaded_bytes{0}, verified_blocks{0},
        bad_blocks{0};
  };

  void check_pages(std::span<const std::int64_t> pages, std::size_t expected,
                   DeviceEvent after) const;
  [[nodiscard]] std::size_t chunk_pages(std::size_t page_count) const noexcept;

  void work(std::size_t worker);
  void run(const SpillUnit& unit);
  void run(const LoadUnit& unit);
  void run(const VerifyUnit& unit);
  static void stop(const Unit& unit);

  // One page: outcome, counted.
  SpillOutcome spill_page(SpillJob& job, std::size_t index);
  SpillOutcome busy_page(const SpillJob& job, std::size_t index);
  [[nodiscard]] std::uint32_t copy_out(std::int64_t page, std::byte* payload);
  void drop(std::atomic<std::uint64_t>& reason, std::size_t pages = 1) noexcept;
  // Whether the bytes of a pinned block are what was stored, checking them if nobody did yet.
  [[nodiscard]] bool trusted(const BlockRef& ref);
  // The same for all blocks of a job's pages [begin, end), and whether they have the right size.
  [[nodiscard]] bool trusted_pages(const LoadJob& job, std::size_t begin, std::size_t end);
  void copy_in(const LoadUnit& unit, std::size_t begin, std::size_t end);
  void finish_load(LoadJob& job);

  const std::shared_ptr<Pool> pool_;
  const std::uint32_t namespace_index_;
  const BlockLayout layout_;
  const EngineOptions options_;
  const pid_t owner_;  // a forked child has no engine threads
  Faults faults_;
  Counters counters_;

  mutable std::mutex mutex_;
  std::condition_variable work_;              // a unit may be claimable, or stopping_
  std::condition_variable idle_;              // nothing queued or running
  JobQueues queues_;                          // mutex_
  std::vector<std::optional<Unit>> running_;  // by worker; mutex_
  std::size_t running_count_ = 0;             // mutex_
  std::size_t running_spills_ = 0;            // of them; mutex_
  bool stopping_ = false;                     // mutex_
  std::size_t spill_threads_ = 1;             // constant after construction
  std::vector<std::thread> threads_;
};

}  // namespace hpkv::cpu
