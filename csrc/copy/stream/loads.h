// Loads of a stream engine: the pool into slots, slots onto the device, layer by layer.
//
//   submit    caller     takes the gate to wait for; queues, under a hold as one of a group
//   enqueue   thread 1   checks the blocks; as each layer of all pages is in the slots, enqueues
//                        its copies behind the gate, and an event behind them
//   land      thread 2   waits for the device; only then are slots free, and the ticket is done
//
// A block in memory that is registered with the device is read where it lies, pinned until it has
// landed; the others are staged. So with a source: the parts of a page are read where they lie, or,
// where one of them is not registered, become a block of the layout's own format in a slot
// (assembly.h).
//
// Page indices that only the device has stay there, where the kernel reads them.
//
// A load that has slots for all its staged pages goes as one batch, without a wait; a larger one in
// batches of half the lane, and its layers are ready with the last batch (see load_batch.h). Who
// asks room() first need not submit a larger one.
//
// A group is for one forward pass, which needs layer 0 of all its loads before layer 1 of any:
//
//   one by one   a0 a1 a2 | b0 b1 b2 | c0 c1 c2
//   as a group   a0 b0 c0   a1 b1 c1   a2 b2 c2
//
// What the kernel does for one layer of all of them is one launch, and one event is behind it, so
// its loads begin when the gates of all are passed.
//
// Side by side go the batches of a set: they have their slots, and are of different loads. What has
// no room beside them begins the next set.
//
// No deadlock: the forward pass that waits for a load runs behind the gate the load waits for; no
// gate of a group is behind a copy of it, because all are taken before any of it is enqueued; and
// slots come free by device work that is enqueued already, because thread 1 waits for slots only
// when its set is empty.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "copy/stream/assembly.h"
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
  // What is submitted between these is one group, handed over by the last release(), or by stop().
  // Throws Error{argument} for a release() without its hold().
  void hold();
  void release();
  // What loads that are submitted now could take without waiting for any before them; nothing while
  // one that had no room is not enqueued.
  [[nodiscard]] StagingShare room();
  // Fails what is not over; later submissions fail.
  void stop();
  // Until both threads are gone; after stop().
  void join();

 private:
  struct Work {
    std::shared_ptr<StreamLoad> load;
    LoadRequest request;
    bool by_kernel = false;
    LoadBlocks blocks;
    StagingShare promised;  // of promised_, until it has taken what it needs
    bool waits = false;     // of waiting_: it may have to wait for that, and others behind it
    std::shared_ptr<const Assembly> assembly;  // of its source; thread 1
    Gate gate;
    std::uint32_t landed_layers = 0;  // thread 2
  };
  using WorkRef = std::shared_ptr<Work>;
  using Group = std::vector<WorkRef>;
  // A batch that has its slots, to be enqueued.
  struct Taken {
    WorkRef work;
    LoadBatch batch;
  };
  enum class Step : std::uint8_t { layer, batch, end };
  // What thread 2 waits for, and what is over then.
  struct Landing {
    WorkRef work;
    Step step;
    SharedEvent event;
    LoadBatch batch;
  };

  [[nodiscard]] std::shared_ptr<StreamLoad> refused(LoadRequest& request);
  void hand_over();                        // with mutex_ held
  [[nodiscard]] StagingShare room_left();  // with mutex_ held
  void promise(Work& work);                // with mutex_ held
  void keep_promise(Work& work);           // with mutex_ held; once
  // As take(), and the end of the promise: one step for room() unless it waits.
  [[nodiscard]] bool take_promised(Work& work, LoadBatch& batch, bool waits);
  void enqueue_all();
  // Puts the load's batches into the set, enqueueing what is in it where there is no room beside
  // it. False: the load has failed, and its last batch is not in the set.
  [[nodiscard]] bool gather(const WorkRef& work, std::vector<Taken>& set);
  // Layer by layer across the set, which is empty afterwards.
  void enqueue(std::vector<Taken>& set);
  // One launch for all that the kernel does, and one event behind it. Who fails leaves the set.
  void enqueue_layer(std::vector<Taken>& set, std::uint32_t layer);
  // Stages a layer, and says what the kernel is to do of it. False: the load has failed.
  [[nodiscard]] bool prepare(const Taken& taken, std::uint32_t layer, std::vector<PageJob>& jobs);
  // It is enqueued as far as it will be: up to `event`, or, having failed, up to here.
  void leave(Taken& taken, SharedEvent event);
  void end(const WorkRef& work);
  [[nodiscard]] bool trusted(const Work& work);
  [[nodiscard]] std::shared_ptr<const Assembly> assembly_of(
      const std::shared_ptr<const BlockSource>& source);
  // The pages of a batch, and blocks of one format.
  [[nodiscard]] static PageBlocks column_of(const Taken& taken, const BlockColumn& blocks,
                                            std::span<const KernelTable> tables);
  static void fill_all_tables(const Taken& taken);
  void delay(Work& work, std::uint32_t layer);
  void land_all();
  void land(Landing& landing);
  void finish(Work& work);

  Core& core_;
  std::map<std::shared_ptr<const BlockSource>, std::shared_ptr<const Assembly>>
      assemblies_;  // thread 1
  std::mutex mutex_;
  std::set<std::shared_ptr<StreamLoad>> open_;  // mutex_
  bool stopping_ = false;                       // mutex_
  std::size_t holds_ = 0;                       // mutex_
  Group gathered_;                              // not handed over yet; mutex_
  StagingShare promised_;                       // to what is submitted and has not taken it; mutex_
  std::size_t waiting_ = 0;                     // submitted without room; mutex_
  WorkQueue<Group> to_enqueue_;
  WorkQueue<Landing> to_land_;
  std::vector<std::thread> threads_;
};

}  // namespace hpkv::stream
