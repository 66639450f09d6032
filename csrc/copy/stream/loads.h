// Loads of a stream engine: the pool into slots, slots onto the device, layer by layer.
//
//   submit    caller     takes the gate to wait for; queues
//   enqueue   thread 1   checks the blocks; as each layer of all pages is in the slots, enqueues
//                        its copies behind the gate, and an event behind them
//   land      thread 2   waits for the device; only then are slots free, and the ticket is done
//
// A block in memory that is registered with the device is read where it lies, pinned until it has
// landed; the others are staged. Through a source, all are: their parts may be of any size.
//
// Page indices that only the device has stay there, where the kernel reads them. A load through a
// source goes by spans, which are made of indices: thread 1 fetches them.
//
// A load that has slots for all its staged pages goes as one batch, without a wait; a larger one in
// batches of half the lane, and its layers are ready with the last batch (see load_batch.h).
//
// No deadlock: the forward pass that waits for a load runs behind the gate the load waits for, and
// slots come free by device work that is enqueued already.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "copy/stream/core.h"
#include "copy/stream/load_batch.h"
#include "copy/stream/queue.h"
#include "copy/stream/stream_load.h"
#include "copy/stream/transfer.h"
#include "shm/lease.h"

namespace hpkv::stream {

struct LoadRequest {
  Lease lease;
  std::vector<std::int64_t> pages;
  DevicePages resident;  // instead of pages, when it has any
  std::shared_ptr<const BlockSource> source;

  [[nodiscard]] std::size_t count() const noexcept {
    return resident.count != 0 ? resident.count : pages.size();
  }
  [[nodiscard]] std::size_t blocks_per_page() const noexcept {
    return source ? source->blocks_per_page() : 1;
  }
};

class Loads {
 public:
  explicit Loads(Core& core);
  ~Loads();
  Loads(const Loads&) = delete;
  Loads& operator=(const Loads&) = delete;

  // A request whose numbers agree, or that lost its lease: then it fails. Never waits.
  std::shared_ptr<StreamLoad> submit(LoadRequest request, const After& after);
  // Fails what is not over; later submissions fail.
  void stop();
  // Until both threads are gone; after stop().
  void join();

 private:
  struct Work {
    std::shared_ptr<StreamLoad> load;
    LoadRequest request;
    Gate gate;
    std::uint32_t landed_layers = 0;  // thread 2
  };
  using WorkRef = std::shared_ptr<Work>;
  enum class Step : std::uint8_t { layer, batch, end };
  // What thread 2 waits for, and what is over then.
  struct Landing {
    WorkRef work;
    Step step;
    EventHandle event = nullptr;
    LoadBatch batch;
  };

  [[nodiscard]] std::shared_ptr<StreamLoad> refused(LoadRequest& request);
  void enqueue_all();
  [[nodiscard]] bool enqueue(const WorkRef& work);
  [[nodiscard]] bool trusted(const Work& work);
  [[nodiscard]] bool fetch_pages(Work& work);
  // Where the device reads each page; null: nowhere but in a slot.
  [[nodiscard]] std::vector<std::byte*> blocks_in_place(const Work& work);
  [[nodiscard]] bool enqueue_batch(const WorkRef& work, const LoadBatch& batch);
  [[nodiscard]] bool enqueue_layer(const Work& work, const LoadBatch& batch, std::uint32_t layer);
  [[nodiscard]] static PageBlocks pages_of(const Work& work, const LoadBatch& batch);
  void delay(Work& work, std::uint32_t layer);
  void land_all();
  void land(Landing& landing);
  void finish(Work& work);

  Core& core_;
  std::mutex mutex_;
  std::set<std::shared_ptr<StreamLoad>> open_;  // mutex_
  bool stopping_ = false;                       // mutex_
  WorkQueue<WorkRef> to_enqueue_;
  WorkQueue<Landing> to_land_;
  std::vector<std::thread> threads_;
};

}  // namespace hpkv::stream
