// Spills of a stream engine: device pages into slots, slots into the pool.
//
//   submit    caller      takes the gate to wait for; queues
//   read      thread 1    reserves blocks, enqueues copies of batches of pages behind the gate; by
//                         spans, it fetches page indices that only the device has before that
//   land      thread 2    waits for the device: ends the reads of the batch
//   store     threads 3+  copy each page into its block with its checksum in one pass, publish
//
// Bounds: the slots, half of our quota of reserved blocks, and the pages that may wait. Thread 1
// waits for slots; what does not fit in the queue meanwhile is dropped and counted.
//
// Every page is passed over or has one read, and both are said to the ticket: so it is device_done
// when the last read has landed, before the pages are stored.
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
#include "copy/stream/stream_spill.h"

namespace hpkv::stream {

struct SpillRequest {
  std::vector<Key> keys;
  std::vector<std::int64_t> pages;
  DevicePages resident;  // instead of pages, when it has any
  Turn turn;
};

class Spills {
 public:
  explicit Spills(Core& core);
  ~Spills();
  Spills(const Spills&) = delete;
  Spills& operator=(const Spills&) = delete;

  // A request whose numbers agree. Never waits.
  std::shared_ptr<StreamSpill> submit(SpillRequest request, const After& after);
  // Cancels what is not over; later submissions are dropped.
  void stop();
  // Until the threads are gone; after stop().
  void join();
  // Pages that nobody has looked at yet.
  [[nodiscard]] std::size_t queued_pages() const;

 private:
  // A ticket's job in the CPU engine's words, and what its reads wait for.
  struct Work {
    std::shared_ptr<StreamSpill> spill;
    cpu::SpillJob job;
    DevicePages resident;  // the job's pages are rows of it, or these once they are fetched
    Gate gate;
    std::atomic<bool> over{false};

    Work(std::shared_ptr<StreamSpill> the_spill, SpillRequest request, std::uint64_t stamp)
        : spill(std::move(the_spill)),
          job(std::move(request.keys), std::move(request.pages), stamp, request.turn),
          resident(request.resident) {
      job.ticket = {spill, &spill->ticket};
    }
  };
  using WorkRef = std::shared_ptr<Work>;
  // A page between its reservation and its outcome.
  struct Page {
    WorkRef work;
    std::size_t index;
    BlockRef block;
    Slot slot;
    bool whole = false;    // the slot holds the page's bytes
    bool outside = false;  // its index is that of no page
  };
  struct Batch {
    std::vector<Page> pages;  // of one ticket
    EventHandle event = nullptr;
    bool enqueued = false;
  };

  void read_all();
  void read(const WorkRef& work);
  // The kernel reads the indices on the device: the host never knows them.
  [[nodiscard]] bool by_rows(const Work& work) const {
    return work.resident.count != 0 && core_.options.spill_path == CopyPath::kernel;
  }
  // Whether the job's pages are known and its copies may be enqueued.
  [[nodiscard]] bool open_gate(Work& work);
  // Reserves a page and its slot and begins its read; false when it is settled already.
  [[nodiscard]] bool prepare(const WorkRef& work, std::size_t index, Batch& batch);
  void pass_over_unreserved(Work& work, std::size_t index, ReserveStatus why);
  void pass_over_busy(Work& work, std::size_t index);
  void flush(Batch& batch);
  void land_all();
  void land(Batch& batch);
  void store_all();
  void store(Page& page);
  // Pages that are not read. What is held for them is given back before.
  void pass_over(Work& work, SpillOutcome outcome, std::atomic<std::uint64_t>& reason);
  void settle(Work& work, SpillOutcome outcome);

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
