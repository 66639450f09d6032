#include "copy/stream/copy_stream.h"

#include "base/error.h"

namespace hpkv::stream {

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

void EventPool::give(EventHandle event) {
  if (event == nullptr) return;
  const std::lock_guard lock(mutex_);
  idle_.push_back(event);
}

// ---- CopyStream ----

CopyStream::CopyStream(std::shared_ptr<Device> device, std::shared_ptr<Health> health,
                       EventPool& events, bool urgent)
    : device_(std::move(device)), health_(std::move(health)), events_(events) {
  Status status = device_->make_stream(urgent, work_);
  if (status.ok()) {
    status = device_->make_stream(urgent, relay_);
    if (!status.ok()) device_->destroy_stream(work_);
  }
  if (!status.ok()) throw Error(ErrorKind::system, "copy engine: " + status.text());
}

CopyStream::~CopyStream() {
  device_->destroy_stream(relay_);
  device_->destroy_stream(work_);
}

EventHandle CopyStream::follow(DeviceEvent after) {
  if (after.handle == nullptr) return nullptr;
  const EventHandle ours = events_.take();
  if (ours == nullptr) return nullptr;
  if (health_->check(device_->wait(relay_, after.handle)) &&
      health_->check(device_->record(relay_, ours))) {
    return ours;
  }
  events_.give(ours);
  return nullptr;
}

bool CopyStream::begin_after(EventHandle event) {
  if (event == nullptr) return !health_->poisoned();
  const bool waits = health_->check(device_->wait(work_, event));
  events_.give(event);
  return waits && !health_->poisoned();
}

EventHandle CopyStream::mark() {
  const EventHandle event = events_.take();
  if (event == nullptr || health_->check(device_->record(work_, event))) return event;
  events_.give(event);
  return nullptr;
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
