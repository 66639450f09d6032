// A spill whose reads a stream of the device can wait for.
//
// What callers of CopyEngine::spill() hold is `ticket`, as of every engine; whoever knows that the
// engine has streams holds all of it. It outlives its engine.
//
// Invariant: undecided + passed over + enqueued pages are all pages; reads of one spill are
// enqueued on one stream, so the event behind the last ones stands for all.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>

#include "copy/stream/device.h"
#include "copy/stream/health.h"
#include "copy/ticket.h"

namespace hpkv::stream {

class StreamSpill {
 public:
  StreamSpill(std::shared_ptr<Device> device, std::shared_ptr<Health> health,
              std::size_t page_count)
      : ticket(page_count),
        device_(std::move(device)),
        health_(std::move(health)),
        undecided_(page_count) {}

  SpillTicket ticket;

  // ---- callers ----
  // Whatever is enqueued on `stream` from here on may overwrite the pages: it runs behind their
  // reads. Waits on the host, at most `timeout`, until it is known for every page whether it is
  // read, and its read is enqueued; never for a copy.
  //
  // False: time is up. Then cancel() makes it safe to overwrite them, because what is still read is
  // not published. When the device has failed there is no event to rely on: true comes when the
  // engine has drained its stream or the device is lost, for then nobody reads the pages any more.
  [[nodiscard]] bool wait_reads_on(StreamHandle stream, std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    if (!changed_.wait_until(lock, deadline, [&] { return over() || has_event(); })) return false;
    if (over() || health_->check(device_->wait(stream, last_event_))) return true;
    return changed_.wait_until(lock, deadline, [&] { return over(); });
  }
  // As the ticket's, and ends waits for reads that will not come.
  void cancel() {
    ticket.cancel();
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

  // ---- engine threads ----
  // These pages are not read. Before their outcome.
  void pass_over(std::size_t pages) {
    ticket.pass_over(pages);
    const std::lock_guard lock(mutex_);
    undecided_ -= pages;
    changed_.notify_all();
  }
  // The reads of so many pages are enqueued, and the event behind them (null: the device failed).
  void enqueued(std::size_t pages, EventHandle event) {
    const std::lock_guard lock(mutex_);
    undecided_ -= pages;
    ++batches_in_flight_;
    last_event_ = event;
    changed_.notify_all();
  }
  // The oldest of those reads are over, and the ticket knows; before their event is given back.
  void landed() {
    const std::lock_guard lock(mutex_);
    --batches_in_flight_;
    changed_.notify_all();
  }

 private:
  // Nothing reads the pages, or ever will.
  [[nodiscard]] bool over() const {
    return ticket.device_done() || (undecided_ == 0 && batches_in_flight_ == 0);
  }
  [[nodiscard]] bool has_event() const {
    return undecided_ == 0 && last_event_ != nullptr && !health_->poisoned();
  }

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Health> health_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t undecided_;              // pages; mutex_
  std::size_t batches_in_flight_ = 0;  // mutex_
  EventHandle last_event_ = nullptr;   // of the newest batch, ours while it is in flight; mutex_
};

}  // namespace hpkv::stream
