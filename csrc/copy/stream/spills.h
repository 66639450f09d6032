// Spills of a stream engine: device pages into slots, slots into the pool.
//
//   submit    caller      takes the event to wait for; queues
//   read      thread 1    reserves blocks, enqueues copies of batches of pages behind that event
//   land      thread 2    waits for the device: ends the reads of the batch
//   store     threads 3+  copy each page into its block with its checksum in one pass, publish
//
// Bounds: the slots, half of our quota of reserved blocks, and the pages that may wait. Thread 1
// waits for slots; what does not fit in the queue meanwhile is dropped and counted.
//
// A ticket says device_done as SpillTicket defines it: once cancelled, when the reads in progress
// have ended; otherwise with the outcome of its last page, which is the store's and so later than
// the device needs.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "copy/cpu/jobs.h"
#include "copy/stream/core.h"
#include "copy/stream/queue.h"

namespace hpkv::stream {

struct SpillRequest {
  std::vector<Key> keys;
  std::vector<std::int64_t> pages;
  Turn turn;
};

class Spills {
 public:
  explicit Spills(Core& core);
  ~Spills();
  Spills(const Spills&) = delete;
  Spills& operator=(const Spills&) = delete;

  // A request whose numbers agree. Never waits.
  std::shared_ptr<SpillTicket> submit(SpillRequest request, DeviceEvent after);
  // Cancels what is not over; later submissions are dropped.
  void stop();
  // Until the threads are gone; after stop().
  void join();
  // Pages that nobody has looked at yet.
  [[nodiscard]] std::size_t queued_pages() const;

 private:
  // A ticket's job in the CPU engine's words, and the event its reads wait for.
  struct Work {
    cpu::SpillJob job;
    EventHandle after = nullptr;
    std::atomic<bool> over{false};

    Work(SpillRequest request, std::uint64_t stamp)
        : job(std::move(request.keys), std::move(request.pages), stamp, request.turn) {}
  };
  using WorkRef = std::shared_ptr<Work>;
  // A page between its reservation and its outcome.
  struct Page {
    WorkRef work;
    std::size_t index;
    BlockRef block;
    Slot slot;
    bool whole = false;  // the slot holds the page's bytes
  };
  struct Batch {
    std::vector<Page> pages;  // of one ticket
    EventHandle event = nullptr;
    bool enqueued = false;
  };

  void read_all();
  void read(const WorkRef& work);
  // Reserves a page and its slot and begins its read; false when it is settled already.
  [[nodiscard]] bool prepare(const WorkRef& work, std::size_t index, Batch& batch);
  [[nodiscard]] bool reserve(const WorkRef& work, std::size_t index, BlockRef& block);
  void settle_busy(Work& work, std::size_t index);
  void flush(Batch& batch);
  void land_all();
  void store_all();
  void store(Page& page);
  void drop(Work& work, std::atomic<std::uint64_t>& reason, std::size_t pages = 1);
  void settle(Work& work, SpillOutcome outcome, std::size_t pages = 1);

  Core& core_;
  mutable std::mutex mutex_;
  std::set<WorkRef> open_;        // mutex_
  std::size_t queued_pages_ = 0;  // mutex_
  bool stopping_ = false;         // mutex_
  WorkQueue<WorkRef> to_read_;
  WorkQueue<Batch> to_land_;
  WorkQueue<Page> to_store_;
  std::vector<std::thread> threads_;
};

}  // namespace hpkv::stream
