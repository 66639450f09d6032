#include "copy/ticket.h"

namespace hpkv {

// ---- SpillTicket ----

SpillTicket::SpillTicket(std::size_t page_count) : unsettled_(page_count), unread_(page_count) {
  if (page_count == 0) {
    device_done_.store(true);
    done_.store(true);
  }
}

bool SpillTicket::wait_device(std::chrono::nanoseconds timeout) {
  if (device_done()) return true;
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return device_done(); });
}

void SpillTicket::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done(); });
}

void SpillTicket::cancel() {
  const std::lock_guard lock(mutex_);
  if (done()) return;
  cancelled_.store(true, std::memory_order_release);
  note_reads_over();
  changed_.notify_all();
}

bool SpillTicket::begin_read() {
  const std::lock_guard lock(mutex_);
  if (cancelled()) return false;
  ++reading_;
  return true;
}

bool SpillTicket::end_read() {
  // Under the mutex: whoever returned from cancel() before this saw its flag set here, and whoever
  // cancels later finds the reads behind it.
  const std::lock_guard lock(mutex_);
  --reading_;
  --unread_;
  note_reads_over();
  return !cancelled();
}

void SpillTicket::pass_over(std::size_t pages) {
  const std::lock_guard lock(mutex_);
  unread_ -= pages;
  note_reads_over();
}

void SpillTicket::settle(SpillOutcome outcome, std::size_t pages) {
  switch (outcome) {
    case SpillOutcome::stored:
      stored_.fetch_add(pages);
      break;
    case SpillOutcome::present:
      present_.fetch_add(pages);
      break;
    case SpillOutcome::dropped:
      dropped_.fetch_add(pages);
      break;
  }
  const std::lock_guard lock(mutex_);
  unsettled_ -= pages;
  // A page may settle without ever being read, so this too can end the reading.
  note_reads_over();
  if (unsettled_ == 0) {
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
}

void SpillTicket::note_reads_over() {
  if (reading_ != 0 || device_done()) return;
  // Not reading now, and nothing left that will: cancelled, or every page was read or passed over.
  if (cancelled() || unread_ == 0 || unsettled_ == 0) {
    device_done_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
}

void SpillTicket::sleep(std::chrono::microseconds duration) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, duration, [this] { return cancelled(); });
}

// ---- LoadTicket ----

LoadTicket::LoadTicket(std::uint32_t layer_count, std::size_t units)
    : layer_count_(layer_count),
      left_(std::make_unique<std::atomic<std::size_t>[]>(layer_count)),
      total_left_(units * layer_count) {
  for (std::uint32_t layer = 0; layer < layer_count; ++layer) left_[layer].store(units);
  if (units == 0) done_.store(true);
}

void LoadTicket::wait_layer(std::uint32_t layer) {
  if (layer_done(layer)) return;
  std::unique_lock lock(mutex_);
  progressed_.wait(lock, [this, layer] { return layer_done(layer) || failed(); });
}

bool LoadTicket::wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return done(); });
  return ok();
}

void LoadTicket::fail() {
  const std::lock_guard lock(mutex_);
  failed_.store(true, std::memory_order_release);
  progressed_.notify_all();
}

bool LoadTicket::finish_unit(std::uint32_t layer) {
  // acq_rel: the thread that takes the last part has seen what the others copied.
  if (left_[layer].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    const std::lock_guard lock(mutex_);
    progressed_.notify_all();
  }
  return total_left_.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

void LoadTicket::finish() {
  const std::lock_guard lock(mutex_);
  elapsed_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - submitted_).count();
  done_.store(true, std::memory_order_release);
  finished_.notify_all();
}

void LoadTicket::sleep(std::chrono::microseconds duration) {
  std::unique_lock lock(mutex_);
  progressed_.wait_for(lock, duration, [this] { return failed(); });
}

// ---- VerifyTicket ----

VerifyTicket::VerifyTicket(std::size_t block_count) : good_(block_count), left_(block_count) {
  if (block_count == 0) done_.store(true);
}

void VerifyTicket::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done(); });
}

void VerifyTicket::report_bad(std::size_t index) noexcept {
  std::size_t seen = good_.load(std::memory_order_relaxed);
  while (index < seen && !good_.compare_exchange_weak(seen, index, std::memory_order_acq_rel)) {
  }
  if (index == 0) {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
}

bool VerifyTicket::finish_block() noexcept {
  return left_.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

void VerifyTicket::finish() {
  const std::lock_guard lock(mutex_);
  done_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void VerifyTicket::sleep(std::chrono::microseconds duration) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, duration, [this] { return good() == 0; });
}

}  // namespace hpkv
