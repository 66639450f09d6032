// A load whose layers can be waited for by a stream of the device.
//
// What callers of CopyEngine::load() hold is `ticket`, as of every engine; whoever knows that the
// engine has streams holds all of it. It outlives its engine. Pins, slots and events of the load
// are held until the device is done with them: then the ticket says so.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "copy/stream/copy_stream.h"
#include "copy/stream/device.h"
#include "copy/stream/health.h"
#include "copy/ticket.h"

namespace hpkv::stream {

class StreamLoad {
 public:
  // No pages: done at once.
  StreamLoad(std::shared_ptr<Device> device, std::shared_ptr<Health> health,
             std::uint32_t layer_count, std::size_t page_count)
      : ticket(layer_count, page_count == 0 ? 0 : 1),
        device_(std::move(device)),
        health_(std::move(health)),
        events_(layer_count) {}

  LoadTicket ticket;

  // ---- callers ----
  // Everything enqueued on `stream` from here on runs behind the arrival of this layer. Waits on
  // the host until the layer's copies are enqueued: for a copy only where this load, or one before
  // it, did not fit into the engine's room. False: the load has failed, the pages are not to be
  // used. True: its bytes were good and are on their way; only a failing device can still spoil
  // them, and it is lost for everybody. The ticket's ok() says so in the end.
  [[nodiscard]] bool wait_layer_on(StreamHandle stream, std::uint32_t layer) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_known(layer); });
    return follow(stream, layer);
  }
  // The same when the host need not wait for it; nothing otherwise.
  [[nodiscard]] std::optional<bool> try_wait_layer_on(StreamHandle stream, std::uint32_t layer) {
    const std::lock_guard lock(mutex_);
    if (!is_known(layer)) return std::nullopt;
    return follow(stream, layer);
  }

  // ---- engine threads ----
  // The copies of a layer are enqueued, and the event behind them.
  void enqueued(std::uint32_t layer, SharedEvent event) {
    const std::lock_guard lock(mutex_);
    events_[layer] = std::move(event);
    changed_.notify_all();
  }
  void fail() {
    ticket.fail();
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  // The end, when the device is done: nobody waits for the layers' events any more.
  void end() {
    std::vector<SharedEvent> events(events_.size());
    const std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
    events_.swap(events);
  }

 private:
  [[nodiscard]] bool is_known(std::uint32_t layer) const {
    return over_ || events_[layer] != nullptr || has_failed();
  }
  [[nodiscard]] bool follow(StreamHandle stream, std::uint32_t layer) {
    if (has_failed()) return false;
    // Over: a host thread has seen the layer land, so whatever is enqueued now finds it.
    return over_ || health_->check(device_->wait(stream, events_[layer].get()));
  }
  [[nodiscard]] bool has_failed() const { return ticket.failed() || health_->poisoned(); }

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Health> health_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<SharedEvent> events_;  // by layer; mutex_
  bool over_ = false;                // mutex_
};

}  // namespace hpkv::stream
