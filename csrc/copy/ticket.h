// Tickets: what a caller holds while the engine works. A ticket outlives its engine; everything it
// pins it has given back before it says done.
//
// Each class has two sides. Callers (any thread) poll by atomic loads or wait; engine threads
// report progress. Flags are stored with release after what they promise and loaded with acquire,
// so a caller that sees one may rely on the bytes. The mutex only guards sleeping, and the
// decisions of a spill that must not cross a cancellation.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace hpkv {

// What became of one page of a spill. Dropped: not stored by us, and nothing is known of others (in
// a spill in turns another rank may be storing it).
enum class SpillOutcome : std::uint8_t { stored, present, dropped };

class SpillTicket {
 public:
  explicit SpillTicket(std::size_t page_count);

  // ---- callers ----
  // No copy of this ticket reads device memory any more, or ever will.
  [[nodiscard]] bool device_done() const noexcept {
    return device_done_.load(std::memory_order_acquire);
  }
  // Every page is stored, present or dropped.
  [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  [[nodiscard]] std::size_t stored() const noexcept { return stored_.load(); }
  [[nodiscard]] std::size_t present() const noexcept { return present_.load(); }
  [[nodiscard]] std::size_t dropped() const noexcept { return dropped_.load(); }
  // device_done(), waiting for it at most `timeout`.
  bool wait_device(std::chrono::nanoseconds timeout);
  void wait();
  // From its return on, nothing that is read from device memory is published: pages not started are
  // never read, pages being read are dropped after their last read. Never waits for a copy.
  void cancel();

  // ---- engine threads ----
  // Before the first read of a page; false once cancelled, then the page must be dropped.
  [[nodiscard]] bool begin_read();
  // After its last read, of which each page has one at most; false when a cancellation came in
  // between, then it must be dropped.
  [[nodiscard]] bool end_read();
  // Before settle(): these pages are never read. An engine that says so for all of them, and only
  // such an engine, has device_done() come with the last read instead of the last outcome.
  void pass_over(std::size_t pages);
  // The page is finished, whatever happened; the last one makes the ticket done.
  void settle(SpillOutcome outcome, std::size_t pages = 1);
  [[nodiscard]] bool cancelled() const noexcept {
    return cancelled_.load(std::memory_order_acquire);
  }
  // Sleeps for `duration` or until cancelled.
  void sleep(std::chrono::microseconds duration);

 private:
  void note_reads_over();  // with mutex_ held

  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t unsettled_;    // pages without an outcome; mutex_
  std::size_t unread_;       // pages whose read has not ended and may come, for all we know; mutex_
  std::size_t reading_ = 0;  // pages between begin_read and end_read; mutex_
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> device_done_{false};
  std::atomic<bool> done_{false};
  std::atomic<std::size_t> stored_{0};
  std::atomic<std::size_t> present_{0};
  std::atomic<std::size_t> dropped_{0};
};

class LoadTicket {
 public:
  // Each layer is copied in `units` parts.
  LoadTicket(std::uint32_t layer_count, std::size_t units);

  // ---- callers ----
  // The layer has landed for every page. Also true after a failure, once nobody writes it.
  [[nodiscard]] bool layer_done(std::uint32_t layer) const noexcept {
    return left_[layer].load(std::memory_order_acquire) == 0;
  }
  // Until the layer has landed or the ticket has failed.
  void wait_layer(std::uint32_t layer);
  // Until nothing of this ticket writes device memory and its pins are given back; ok().
  bool wait();
  [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Everything landed; false while not done.
  [[nodiscard]] bool ok() const noexcept { return done() && !failed(); }
  // From submission to done; zero while not done.
  [[nodiscard]] double elapsed_s() const noexcept { return done() ? elapsed_s_ : 0.0; }
  [[nodiscard]] std::uint32_t layer_count() const noexcept { return layer_count_; }

  // ---- engine threads ----
  [[nodiscard]] bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  // Ends waits for layers at once; parts in progress run to their end.
  void fail();
  // One part of a layer is copied or skipped; true for the last part of the last layer left.
  [[nodiscard]] bool finish_unit(std::uint32_t layer);
  // After the pins are given back.
  void finish();
  // Sleeps for `duration` or until failed.
  void sleep(std::chrono::microseconds duration);

 private:
  std::uint32_t layer_count_;
  std::unique_ptr<std::atomic<std::size_t>[]> left_;  // parts to go, by layer
  std::atomic<std::size_t> total_left_;               // sum of left_
  std::mutex mutex_;
  // Two, so that whoever waits for the end is not woken by every layer.
  std::condition_variable progressed_;
  std::condition_variable finished_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> done_{false};
  const std::chrono::steady_clock::time_point submitted_ = std::chrono::steady_clock::now();
  double elapsed_s_ = 0.0;  // written before done_ is released, read after it was acquired
};

class VerifyTicket {
 public:
  explicit VerifyTicket(std::size_t block_count);

  // ---- callers ----
  [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Length of the leading run of blocks whose checksum holds; meaningful once done.
  [[nodiscard]] std::size_t good() const noexcept { return good_.load(std::memory_order_acquire); }
  void wait();

  // ---- engine threads ----
  // Whether the outcome of this block can still change good().
  [[nodiscard]] bool matters(std::size_t index) const noexcept { return index < good(); }
  void report_bad(std::size_t index) noexcept;
  // One block is checked or skipped; true for the last one.
  [[nodiscard]] bool finish_block() noexcept;
  // After the pins are given back.
  void finish();
  // Sleeps for `duration` or until nothing matters any more.
  void sleep(std::chrono::microseconds duration);

 private:
  std::atomic<std::size_t> good_;
  std::atomic<std::size_t> left_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
};

}  // namespace hpkv
