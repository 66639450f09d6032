// What the stream engine needs of an accelerator: streams, events, copies, page kernels, pinned
// memory. One implementation drives CUDA, another one is made of host threads and is what the
// engine's tests run on; the engine knows neither.
//
// Handles are the device library's own (a cudaStream_t, a cudaEvent_t), so streams and events that
// somebody else made are valid arguments wherever a handle is.
//
// Order: work of a stream runs in the order of the calls. wait() looks at the event as it is at the
// call: recorded again later, the wait is still for the earlier record; never recorded, there is
// nothing to wait for.
//
// Threads: every method from any thread. Only the two synchronize() wait for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "copy/stream/kernels.h"

namespace hpkv::stream {

using StreamHandle = void*;
using EventHandle = void*;

// What a call said: nothing, or where it failed, which call, and the library's words.
class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status failed(const char* file, int line, const std::string& what) {
    Status status;
    status.text_ = std::string(file) + ":" + std::to_string(line) + ": " + what;
    return status;
  }
  [[nodiscard]] bool ok() const noexcept { return text_.empty(); }
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
};

enum class Direction : std::uint8_t { to_host, to_device };

struct Span {
  std::byte* target;
  const std::byte* source;
  std::uint64_t bytes;
};

class Device {
 public:
  virtual ~Device() = default;

  // Of this thread, before it calls anything else.
  virtual Status enter_thread() = 0;

  // `urgent`: before the work of other streams where the device has a choice.
  virtual Status make_stream(bool urgent, StreamHandle& out) = 0;
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  virtual Status make_event(EventHandle& out) = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;

  virtual Status record(StreamHandle stream, EventHandle event) = 0;
  virtual Status wait(StreamHandle stream, EventHandle event) = 0;
  virtual Status query(EventHandle event, bool& passed) = 0;
  // Until everything before the event's record is over. Engine threads only.
  virtual Status synchronize(EventHandle event) = 0;
  virtual Status synchronize_stream(StreamHandle stream) = 0;

  // Host memory of the spans is pinned. The spans themselves may go when the call returns.
  virtual Status copy(StreamHandle stream, Direction direction, std::span<const Span> spans) = 0;
  // At most kJobsMax jobs, each of a unit at least, in any order. Their tables stay until they have
  // run; they are pinned, or on the device.
  virtual Status run(StreamHandle stream, std::span<const PageJob> jobs) = 0;

  virtual Status allocate_pinned(std::uint64_t bytes, std::byte*& out) = 0;
  virtual void free_pinned(std::byte* memory) noexcept = 0;
  // Makes memory of the process pinned: whole pages, in no other registration. May take a second a
  // GiB, in which other memory calls of the process may stall. A failure is no fault of the device.
  virtual Status register_host(std::byte* memory, std::uint64_t bytes) = 0;
  virtual void unregister_host(std::byte* memory) noexcept = 0;
  // A copy of `bytes` in memory that kernels read fast. Waits for the device; for construction.
  virtual Status upload(std::span<const std::byte> bytes, void*& out) = 0;
  virtual void free_uploaded(void* memory) noexcept = 0;
};

}  // namespace hpkv::stream
