#include "copy/stream/copy_stream.h"

#include "base/error.h"

namespace hpkv::stream {
namespace {

StreamHandle new_stream(Device& device, bool urgent) {
  StreamHandle made = nullptr;
  const Status status = device.make_stream(urgent, made);
  if (!status.ok()) throw Error(ErrorKind::system, "copy engine: " + status.text());
  return made;
}

}  // namespace

// ---- EventPool ----

EventPool::~EventPool() {
  for (const EventHandle event : idle_) device_->destroy_event(event);
}

EventHandle EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      const EventHandle event = idle_.back();
      idle_.pop_back();
      return event;
    }
  }
  EventHandle event = nullptr;
  return health_->check(device_->make_event(event)) ? event : nullptr;
}

EventHandle EventPool::mark(StreamHandle stream) {
  const EventHandle event = take();
  if (event == nullptr || health_->check(device_->record(stream, event))) return event;
  give(event);
  return nullptr;
}

void EventPool::give(EventHandle event) {
  if (event == nullptr) return;
  const std::lock_guard lock(mutex_);
  idle_.push_back(event);
}

void EventPool::give(Gate& gate) {
  give(std::exchange(gate.chooser, nullptr));
  give(std::exchange(gate.user, nullptr));
}

SharedEvent EventPool::share(EventHandle event) {
  if (event == nullptr) return nullptr;
  return {event, [this](EventHandle shared) { give(shared); }};
}

// ---- GateMaker ----

GateMaker::GateMaker(std::shared_ptr<Device> device, std::shared_ptr<Health> health,
                     EventPool& events)
    : device_(std::move(device)),
      health_(std::move(health)),
      events_(events),
      relay_(new_stream(*device_, false)) {}

GateMaker::~GateMaker() { device_->destroy_stream(relay_); }

Gate GateMaker::make(const After& after) {
  if (const auto* event = std::get_if<DeviceEvent>(&after)) return {relayed(event->handle)};
  const Streams& streams = std::get<Streams>(after);
  Gate gate{events_.mark(streams.chooser)};
  if (gate.chooser == nullptr || streams.user == nullptr || streams.user == streams.chooser) {
    return gate;
  }
  gate.user = events_.mark(streams.user);
  return gate;
}

EventHandle GateMaker::relayed(EventHandle event) {
  if (event == nullptr || !health_->check(device_->wait(relay_, event))) return nullptr;
  return events_.mark(relay_);
}

// ---- CopyStream ----

CopyStream::CopyStream(std::shared_ptr<Device> device, std::shared_ptr<Health> health,
                       EventPool& events, bool urgent)
    : device_(std::move(device)),
      health_(std::move(health)),
      events_(events),
      work_(new_stream(*device_, urgent)) {}

CopyStream::~CopyStream() { device_->destroy_stream(work_); }

bool CopyStream::run_after(EventHandle event) {
  if (event == nullptr) return !health_->poisoned();
  return health_->check(device_->wait(work_, event)) && !health_->poisoned();
}

bool CopyStream::pass(Gate& gate) {
  const bool waits = run_after(gate.chooser) && run_after(gate.user);
  events_.give(gate);
  return waits;
}

bool CopyStream::await(EventHandle event) {
  if (event != nullptr && health_->check(device_->synchronize(event))) return true;
  // Twice: a call may fail for a reason of its own. A device that fails twice runs nothing any
  // more.
  if (!health_->check(device_->synchronize_stream(work_))) {
    static_cast<void>(health_->check(device_->synchronize_stream(work_)));
  }
  return false;
}

}  // namespace hpkv::stream
