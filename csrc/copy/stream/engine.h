// The copy engine over streams of a device: the interface of copy/engine.h, and what only streams
// can do. Loads arrive behind events that the device waits for; the host waits for neither copies
// nor the forward pass, except on the engine's own threads.
//
//   device pages  <-- streams -->  staging (pinned)  <-- engine threads -->  pool
//
// A device call that fails poisons the engine: spills drop, loads fail, error_count() rises and
// first_error() says which call it was. The pool and its blocks stay sound, the server computes.
//
// Threads and lifetime: as copy/engine.h says; and the device outlives the engine by itself (it is
// shared). After fork the child may only destroy the engine.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "copy/engine.h"
#include "copy/stream/core.h"
#include "copy/stream/load_batch.h"
#include "copy/stream/stream_load.h"
#include "copy/stream/stream_spill.h"
#include "copy/stream/transfer.h"

namespace hpkv::stream {

class StreamEngine final : public CopyEngine {
 public:
  // Throws Error{argument} for a namespace of another block size or a number of threads that is not
  // in [1, 64], Error{system} when the device refuses.
  StreamEngine(std::shared_ptr<Device> device, std::shared_ptr<Pool> pool,
               std::uint32_t namespace_index, BlockLayout layout, const StreamOptions& options);
  ~StreamEngine() override;
  StreamEngine(const StreamEngine&) = delete;
  StreamEngine& operator=(const StreamEngine&) = delete;

  std::shared_ptr<SpillTicket> spill(std::vector<Key> keys, std::vector<std::int64_t> pages,
                                     DeviceEvent after, Turn turn = {}) override;
  std::shared_ptr<LoadTicket> load(Lease lease, std::vector<std::int64_t> pages, DeviceEvent after,
                                   std::shared_ptr<const BlockSource> source = nullptr) override;
  // As load(), with all of its answer.
  std::shared_ptr<StreamLoad> load_on_streams(Lease lease, std::vector<std::int64_t> pages,
                                              const After& after,
                                              std::shared_ptr<const BlockSource> source = nullptr);

  // The same of pages whose indices only the device has. The caller reads nothing back and waits
  // for nothing. The indices stay valid and unchanged until the ticket is done, by which time
  // everybody here has read them.
  //
  // Nobody may have seen them on the host, so a page outside the layout is no error of the call: a
  // spill drops it, a load leaves it out. Both throw Error{argument} for another number of pages
  // than keys or blocks, a page size of 0, or an address that no int64 can have; a load then gives
  // its pins back.
  std::shared_ptr<StreamSpill> spill_resident(std::vector<Key> keys, DevicePages pages,
                                              const After& after, Turn turn = {});
  std::shared_ptr<StreamLoad> load_resident(Lease lease, DevicePages pages, const After& after,
                                            std::shared_ptr<const BlockSource> source = nullptr);
  std::shared_ptr<VerifyTicket> verify(Lease lease) override;

  // What loads could take now without waiting for any before them; and how many leading pages of
  // this lease fit into that, which takes off what they need. Loads that fit, of resident pages and
  // submitted together, are enqueued at once: nobody who waits for one waits for a copy. Never
  // waits. fit() throws as load() does.
  [[nodiscard]] StagingShare load_room();
  [[nodiscard]] std::size_t fit(const Lease& lease,
                                const std::shared_ptr<const BlockSource>& source,
                                StagingShare& room);

  // Loads that are submitted between these, by any thread, go side by side: layer 0 of each, then
  // layer 1 of each, and so on. They are for one forward pass: each may wait for the streams of the
  // others too. Nothing of them begins before the last release, so do not wait for one until then;
  // close() need not either. Never waits. Releasing throws Error{argument} when nobody holds.
  void hold_loads();
  void release_loads();

  Faults& faults() noexcept override;
  [[nodiscard]] EngineStats stats() const override;
  [[nodiscard]] bool poisoned() const noexcept;
  [[nodiscard]] std::uint64_t error_count() const noexcept;
  [[nodiscard]] std::string first_error() const;
  // Something to be logged once; usually empty.
  [[nodiscard]] std::string notice() const;
  void quiesce() override;
  void close() override;
  // Violated invariants, in words; call it while nothing is copied.
  [[nodiscard]] std::vector<std::string> check();

 private:
  struct Parts;

  void check_pages(std::span<const std::int64_t> pages, std::size_t expected) const;
  // How many pages the blocks of a lease are.
  [[nodiscard]] std::size_t page_count(const Lease& lease, const BlockSource* source) const;
  [[nodiscard]] Core& core() const noexcept;

  const pid_t owner_;  // a forked child has no engine threads
  std::unique_ptr<Parts> parts_;
};

}  // namespace hpkv::stream
