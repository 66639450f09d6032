// One stream of ours, its events, and how others' work is waited for.
//
//   caller's stream   ... work | event of ours                 at submission, by the caller
//   copy stream                       wait(event) copies...    later, by the engine
//
// Given the caller's streams, we record an event of our own on each while the caller still is in
// submit(). Given an event of the caller's, a relay stream that does nothing else turns it into one
// of ours: it may be recorded again or destroyed right after. The copy stream takes each wait right
// before the copies it is for, or those of its group: taken at submission it would hold up the
// layers of earlier loads that are not enqueued yet, and with them the forward pass that reads
// those.
//
// Threads: any.
#pragma once

#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "copy/engine.h"
#include "copy/stream/device.h"
#include "copy/stream/health.h"

namespace hpkv::stream {

// The caller's streams, as they are at the submission. `chooser` is the one whose work chooses the
// pages: their indices are valid behind it; null is the device's default stream. `user` is the one
// whose work uses the pages; null is none, and it may be the same. Copies of pages run behind both,
// what needs only the indices behind the chooser.
struct Streams {
  StreamHandle chooser = nullptr;
  StreamHandle user = nullptr;
};

// What must be over before the first copy. An event stands for both streams; a null one for
// nothing.
using After = std::variant<DeviceEvent, Streams>;

// Events of ours behind the caller's work; null for none. A page copy waits for both.
struct Gate {
  EventHandle chooser = nullptr;
  EventHandle user = nullptr;
};

// An event with several users; the last one gives it back.
using SharedEvent = std::shared_ptr<void>;

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
  // An event behind what is on the stream now; null when the device failed.
  [[nodiscard]] EventHandle mark(StreamHandle stream);
  void give(EventHandle event);
  void give(Gate& gate);
  // Null stays null. The pool outlives it.
  [[nodiscard]] SharedEvent share(EventHandle event);

 private:
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Health> health_;
  std::mutex mutex_;
  std::vector<EventHandle> idle_;  // mutex_
};

// Where gates come from, for one direction: a caller's event that is late holds up only the relay.
class GateMaker {
 public:
  // Throws Error{system} when the device has no stream for us.
  GateMaker(std::shared_ptr<Device> device, std::shared_ptr<Health> health, EventPool& events);
  ~GateMaker();
  GateMaker(const GateMaker&) = delete;
  GateMaker& operator=(const GateMaker&) = delete;

  // In the caller's thread; never waits. Check the health afterwards.
  [[nodiscard]] Gate make(const After& after);

 private:
  [[nodiscard]] EventHandle relayed(EventHandle event);

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Health> health_;
  EventPool& events_;
  StreamHandle relay_ = nullptr;
};

class CopyStream {
 public:
  // Throws Error{system} when the device has no stream for us.
  CopyStream(std::shared_ptr<Device> device, std::shared_ptr<Health> health, EventPool& events,
             bool urgent);
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // What is enqueued from here on runs behind the event, or the gate, whose events then go back to
  // the pool. False: it will not, and nothing may be enqueued.
  [[nodiscard]] bool run_after(EventHandle event);
  [[nodiscard]] bool pass(Gate& gate);
  // An event behind all that is enqueued; null when the device failed.
  [[nodiscard]] EventHandle mark() { return events_.mark(work_); }
  // Until the device has passed the event, or, when there is none or it failed, all of the stream:
  // on return the device is not using what was enqueued before. Whether it was done without error.
  bool await(EventHandle event);

  [[nodiscard]] StreamHandle handle() const noexcept { return work_; }

 private:
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Health> health_;
  EventPool& events_;
  StreamHandle work_ = nullptr;
};

}  // namespace hpkv::stream
