// The copy engine: moves blocks between pages of device memory and the pool, on its own threads or
// streams. One backend is one directory beside this file; callers see only this header.
//
//   spill   device pages -> pool     page by page: reserve, copy and checksum in one pass, publish
//   load    pool -> device pages     layer by layer across pages, so the first layer lands first
//   verify  pool                     checksums of blocks nobody checked in this epoch
//
// Bytes that several ranks hold alike are stored once, by spills in turns: every rank submits all
// pages and begins with those whose turn is its own, then helps with the others'. This needs no
// message between ranks: the pool lets one writer reserve a block and no second, what is stored
// already costs a lookup, and a writer that dies or drops a page leaves it to whoever comes by.
//
// A load goes before a verification, a verification before a spill. Submitting copies the indices,
// queues and returns: no pool lock, no system call beyond waking a thread. Every queue is bounded;
// what does not fit is dropped (spill) or fails (load, verify) at once, and is counted.
//
// The backend of streams (stream/) keeps this interface and adds waits that are enqueued on a
// stream instead of blocking a thread.
//
// Threads: every method may be called from any thread, except that close() and the destructor run
// alone. Engine threads never touch Python.
// Lifetime: device memory of the layout stays mapped until close() has returned.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/key.h"
#include "copy/faults.h"
#include "copy/layout.h"
#include "copy/source.h"
#include "copy/ticket.h"
#include "shm/lease.h"
#include "shm/pool.h"

namespace hpkv {

// Work enqueued before it must be over before a copy may touch device memory. A CUDA engine takes a
// cudaEvent_t here and lets its stream wait for it; on the CPU there is nothing to wait for, and a
// handle other than null is an error.
struct DeviceEvent {
  void* handle = nullptr;
};

// Whose pages a spill copies first: pages i with i % count == index, then those of index + 1,
// index + 2 and so on, round to index - 1.
struct Turn {
  std::int64_t index = 0;
  std::int64_t count = 1;
};

struct EngineOptions {
  // With more than one, one thread never spills: a load never waits for a spill to end.
  std::uint32_t threads = 2;
  // Bounds of the queues. A page waiting to be spilled costs 40 bytes, a block to be loaded 72.
  std::size_t spill_pages_max = std::size_t{1} << 20;
  std::size_t load_tickets_max = 4096;
  std::size_t verify_tickets_max = 4096;
};

// Since the engine was made. Pages of spills, blocks of loads and verifications.
struct EngineStats {
  std::uint64_t spill_stored = 0;
  std::uint64_t spill_present = 0;
  std::uint64_t spill_dropped_full = 0;    // the pool had no place
  std::uint64_t spill_dropped_busy = 0;    // somebody else writes the block, or our quota is used
  std::uint64_t spill_left_to_others = 0;  // the same in a spill in turns: another rank stores it
  std::uint64_t spill_dropped_off = 0;     // the pool is off
  std::uint64_t spill_dropped_queue = 0;   // our own queue was full
  std::uint64_t spill_dropped_cancelled = 0;  // cancelled, failed by injection, or closed
  std::uint64_t spill_dropped_outside = 0;    // of indices that only the device had: no such page
  std::uint64_t spilled_bytes = 0;
  std::uint64_t load_tickets = 0;
  std::uint64_t load_failed = 0;  // tickets
  std::uint64_t loaded_blocks = 0;
  std::uint64_t loaded_in_place = 0;  // of the blocks: read by the device where they lie
  std::uint64_t loaded_bytes = 0;
  std::uint64_t verified_blocks = 0;  // checksums computed and right
  std::uint64_t bad_blocks = 0;       // checksums computed and wrong; the blocks are condemned
  std::uint64_t queued_pages = 0;     // spill pages waiting now
};

class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  // One key and one page index per page. Throws Error{argument} when the numbers differ, an index
  // is outside the layout's pages, or not 0 <= turn.index < turn.count.
  //
  // In turns, a page that another rank is writing when we come by counts as dropped, because
  // nothing promises that its writer ends well; what is there in the end, the pool's index knows.
  // Recency goes by page index whoever stores a page: the last rank to finish stamps the run again.
  virtual std::shared_ptr<SpillTicket> spill(std::vector<Key> keys, std::vector<std::int64_t> pages,
                                             DeviceEvent after, Turn turn = {}) = 0;
  // Block i of the lease goes to page i of `pages`, or as `source` says (null: blocks of the
  // layout); throws like spill(), and for a source of another layout, and then the lease's pins are
  // given back. A block found bad is condemned and fails the ticket; so do, without condemning, a
  // block of another size and an empty lease with pages to load.
  virtual std::shared_ptr<LoadTicket> load(Lease lease, std::vector<std::int64_t> pages,
                                           DeviceEvent after,
                                           std::shared_ptr<const BlockSource> source = nullptr) = 0;
  // Checksums of blocks of any size.
  virtual std::shared_ptr<VerifyTicket> verify(Lease lease) = 0;

  virtual Faults& faults() noexcept = 0;
  [[nodiscard]] virtual EngineStats stats() const = 0;
  // Until nothing is queued or running.
  virtual void quiesce() = 0;
  // Drops and fails what has not started, waits for what has, joins. Idempotent; later submissions
  // are dropped or fail.
  virtual void close() = 0;
};

// The CPU backend. Throws Error{argument} when the namespace's block size is not the layout's.
[[nodiscard]] std::unique_ptr<CopyEngine> make_cpu_engine(std::shared_ptr<Pool> pool,
                                                          std::uint32_t namespace_index,
                                                          BlockLayout layout,
                                                          const EngineOptions& options);

}  // namespace hpkv
