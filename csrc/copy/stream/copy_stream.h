// One direction of copying: a stream of the device, its events, and how others' work is waited for.
//
//   caller's stream   ... work | event
//   relay stream                  wait(event) record(ours)          at submission, by the caller
//   copy stream                                     wait(ours) copies...   later, by the engine
//
// The relay turns the caller's event into one of ours while the caller still is in submit(): from
// then on it may record its event again or destroy it. And the copy stream takes each wait right
// before the copies it is for: taken at submission it would hold up the layers of earlier loads
// that are not enqueued yet, and with them the forward pass that reads those.
//
// Threads: any.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "copy/engine.h"
#include "copy/stream/device.h"
#include "copy/stream/health.h"

namespace hpkv::stream {

// Events that nobody uses at the moment; makes new ones when there is none. An event may come back
// before the device has passed it, if no host thread waits for it: waits of streams are for the
// record they saw.
class EventPool {
 public:
  EventPool(std::shared_ptr<Device> device, std::shared_ptr<Health> health)
      : device_(std::move(device)), health_(std::move(health)) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // Null when the device refuses: then it is poisoned.
  [[nodiscard]] EventHandle take();
  void give(EventHandle event);

 private:
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Health> health_;
  std::mutex mutex_;
  std::vector<EventHandle> idle_;  // mutex_
};

class CopyStream {
 public:
  // Throws Error{system} when the device has no stream for us.
  CopyStream(std::shared_ptr<Device> device, std::shared_ptr<Health> health, EventPool& events,
             bool urgent);
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // An event of ours that passes after the caller's; null for none. Check the health afterwards.
  [[nodiscard]] EventHandle follow(DeviceEvent after);
  // What is enqueued from here on runs behind the event, which goes back to the pool. False: it
  // will not, and nothing may be enqueued.
  [[nodiscard]] bool begin_after(EventHandle event);
  // An event behind all that is enqueued; null when the device failed.
  [[nodiscard]] EventHandle mark();
  // Until the device has passed the event, or, when there is none or it failed, all of the stream:
  // on return the device is not using what was enqueued before. Whether it was done without error.
  bool await(EventHandle event);

  [[nodiscard]] StreamHandle handle() const noexcept { return work_; }

 private:
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Health> health_;
  EventPool& events_;
  StreamHandle work_ = nullptr;
  StreamHandle relay_ = nullptr;
};

}  // namespace hpkv::stream
