// A device made of host threads that is as asynchronous as a real one: for tests of the stream
// engine.
//
// Every stream is a thread with a queue. Before each piece of work it dawdles for a random time, so
// streams drift apart; only events hold them together. What a copy will overwrite is poisoned: a
// block in host memory at the call, because it belongs to the copy from then on; pages of the
// device when the copy starts, because until then somebody else may use them. So a wait that is
// missing, or a slot or source that is used again too early, shows as wrong bytes.
//
// Threads enter a device as they do a CUDA context; a call of an engine's thread that has not is
// counted, because it would land on another device.
//
// The null stream is the device's default one; nobody enqueues anything there.
//
// Streams may be held (nothing more starts) and released, so that orders can be forced. Any call
// can be made to fail, by its number: once, or with the device lost from then on (what is queued
// never runs, every later call fails), as a CUDA context is after a fault.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "copy/stream/device.h"

namespace hpkv::test {

class AsyncDevice final : public stream::Device {
 public:
  static constexpr std::byte kPoison{0xDD};

  // Dawdles up to `delay_us` before each piece of work.
  explicit AsyncDevice(std::uint64_t seed = 1, std::uint32_t delay_us = 50)
      : delay_us_(delay_us), random_(seed) {}
  ~AsyncDevice() override;
  AsyncDevice(const AsyncDevice&) = delete;
  AsyncDevice& operator=(const AsyncDevice&) = delete;

  // ---- for tests ----
  void set_delay_us(std::uint32_t delay_us) { delay_us_.store(delay_us); }
  // Work of anybody's on a stream, as a forward pass is.
  void launch(stream::StreamHandle stream, std::function<void()> work);
  // Told of each copy to the device as it starts: where it writes first. Set it before there is
  // one.
  void on_write(std::function<void(const std::byte*)> told) { on_write_ = std::move(told); }
  // Nothing of this stream starts until release().
  void hold(stream::StreamHandle stream);
  void release(stream::StreamHandle stream);
  void release_all();
  // The nth call from now on that returns a status fails (0: none); all later ones too when `lost`.
  void fail_call(std::uint64_t nth, bool lost = false);
  // The nth call of that name from now on does this first, in its thread.
  void at_call(const std::string& name, std::uint64_t nth, std::function<void()> action);
  // The next `count` calls of that name fail.
  void fail_calls(const std::string& name, int count);
  [[nodiscard]] bool has_failed() const { return has_failed_.load(); }
  // Streams in the order in which they were made.
  [[nodiscard]] stream::StreamHandle made_stream(std::size_t index);
  // Events and allocations that were made and not given back.
  [[nodiscard]] std::size_t live_events() const { return live_events_.load(); }
  [[nodiscard]] std::size_t live_allocations() const { return live_allocations_.load(); }
  // Copies from or to host memory that is neither pinned nor registered.
  [[nodiscard]] std::size_t pageable_copies() const { return pageable_copies_.load(); }
  // Calls that only threads of an engine make, by threads that had not entered the device.
  [[nodiscard]] std::size_t calls_from_outside() const { return calls_from_outside_.load(); }
  // The next registrations fail, from that one on (0: the first).
  void refuse_registrations_after(std::uint64_t count) { registrations_max_.store(count); }
  [[nodiscard]] std::size_t refused_registrations() const { return refused_registrations_.load(); }
  // Bytes of each registration that is live.
  [[nodiscard]] std::vector<std::uint64_t> registrations();
  // Waits on the host for the device, by synchronize and synchronize_stream, by `thread`.
  [[nodiscard]] bool has_waited(std::thread::id thread);
  // By anybody.
  [[nodiscard]] std::size_t wait_count();
  // Launches, and the jobs of all of them.
  [[nodiscard]] std::size_t run_count() const { return run_count_.load(); }
  [[nodiscard]] std::size_t job_count() const { return job_count_.load(); }

  // ---- stream::Device ----
  stream::Status enter_thread() override;
  stream::Status make_stream(bool urgent, stream::StreamHandle& out) override;
  void destroy_stream(stream::StreamHandle stream) noexcept override;
  stream::Status make_event(stream::EventHandle& out) override;
  void destroy_event(stream::EventHandle event) noexcept override;
  stream::Status record(stream::StreamHandle stream, stream::EventHandle event) override;
  stream::Status wait(stream::StreamHandle stream, stream::EventHandle event) override;
  stream::Status query(stream::EventHandle event, bool& passed) override;
  stream::Status synchronize(stream::EventHandle event) override;
  stream::Status synchronize_stream(stream::StreamHandle stream) override;
  stream::Status copy(stream::StreamHandle stream, stream::Direction direction,
                      std::span<const stream::Span> spans) override;
  stream::Status run(stream::StreamHandle stream, std::span<const stream::PageJob> jobs) override;
  stream::Status allocate_pinned(std::uint64_t bytes, std::byte*& out) override;
  void free_pinned(std::byte* memory) noexcept override;
  stream::Status register_host(std::byte* memory, std::uint64_t bytes) override;
  void unregister_host(std::byte* memory) noexcept override;
  stream::Status upload(std::span<const std::byte> bytes, void*& out) override;
  void free_uploaded(void* memory) noexcept override;

 private:
  // One record of an event: whether the device has passed it. Shared with whoever waits for it,
  // because the event may be recorded again, or go, meanwhile.
  struct Mark {
    bool passed = false;  // mutex_
  };
  struct Event {
    std::shared_ptr<const Mark> last;  // mutex_; null: never recorded
  };
  struct Queue {
    std::deque<std::function<void()>> work;  // all mutex_
    bool running = false;
    bool held = false;
    bool stopping = false;
    std::mt19937_64 random;
    std::thread thread;
  };

  // What is planned for one call.
  struct Plan {
    std::uint64_t calls_left = 0;
    std::function<void()> action;
  };

  void act(const char* name);
  [[nodiscard]] stream::Status call(const char* name, int line);
  // The same for calls that no caller's thread makes.
  [[nodiscard]] stream::Status engine_call(const char* name, int line);
  void serve(Queue& queue);
  void enqueue(stream::StreamHandle stream, std::function<void()> work);
  void dawdle(Queue& queue, std::unique_lock<std::mutex>& lock);
  // Until the device has passed this record, or is lost. Null is passed.
  void await(std::unique_lock<std::mutex>& lock, std::shared_ptr<const Mark> mark);
  void note_wait();
  // Of a copy the bytes are in one range; kernels read across ranges that lie end to end.
  void require_pinned(const std::byte* at, std::uint64_t bytes, bool by_kernel);
  void require_pinned_tables(const stream::PageJob& job);

  std::atomic<std::uint32_t> delay_us_;
  std::function<void(const std::byte*)> on_write_ = [](const std::byte*) {};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;                            // mutex_
  std::vector<Queue*> streams_;                       // in order of making, never removed; mutex_
  std::vector<std::unique_ptr<Queue>> owned_;         // mutex_
  std::vector<std::unique_ptr<Event>> events_;        // live ones; mutex_
  std::vector<std::thread::id> waited_;               // mutex_
  std::map<std::string, int> fail_named_;             // mutex_
  std::map<std::string, Plan> planned_;               // mutex_
  std::map<const std::byte*, std::uint64_t> pinned_;  // bytes, by address; mutex_
  std::map<const std::byte*, std::uint64_t> registered_;  // the same; mutex_
  std::map<const std::byte*, std::uint64_t> uploaded_;    // the same; mutex_
  std::atomic<std::uint64_t> registrations_max_{~std::uint64_t{0}};
  std::atomic<std::size_t> refused_registrations_{0};
  std::atomic<std::size_t> run_count_{0};
  std::atomic<std::size_t> job_count_{0};
  std::atomic<std::size_t> pageable_copies_{0};
  std::atomic<std::size_t> calls_from_outside_{0};
  std::uint64_t fail_at_ = 0;  // mutex_
  std::uint64_t calls_ = 0;    // mutex_
  bool lose_ = false;          // with the failure; mutex_
  bool lost_ = false;          // mutex_
  std::atomic<bool> has_failed_{false};
  std::atomic<std::size_t> live_events_{0};
  std::atomic<std::size_t> live_allocations_{0};
};

}  // namespace hpkv::test
