#include "tests/async_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

namespace hpkv::test {

using stream::Direction;
using stream::EventHandle;
using stream::kJobsMax;
using stream::PageJob;
using stream::PageRegion;
using stream::Span;
using stream::Status;
using stream::StreamHandle;

namespace {

// Devices that this thread has entered. By thread: ids of threads are used again.
thread_local std::vector<const AsyncDevice*> entered;

void poison(std::byte* at, std::uint64_t bytes) {
  std::memset(at, static_cast<int>(AsyncDevice::kPoison), bytes);
}

template <typename Address>
void poison_region(const PageRegion& region, Address&& address) {
  for (std::uint64_t piece = 0; piece < region.piece_count; ++piece) {
    poison(reinterpret_cast<std::byte*>(address(piece)), region.piece_bytes);
  }
}

// What a gather will write. Which pages it reads is known only when it runs.
void poison_blocks(const PageJob& job) {
  for (std::uint64_t unit = 0; unit < job.count * job.region_count; ++unit) {
    const PageRegion& region = job.regions[unit % job.region_count];
    const std::uint64_t block = job.blocks[unit / job.region_count] + region.block_offset;
    poison_region(region, [&](std::uint64_t piece) { return block + piece * region.block_step; });
  }
}

// What a scatter is about to write.
void poison_pages(const PageJob& job) {
  for (std::uint64_t unit = 0; unit < job.count * job.region_count; ++unit) {
    const PageRegion& region = job.regions[unit % job.region_count];
    const std::int64_t first = job.pages[unit / job.region_count];
    const std::uint64_t page = static_cast<std::uint64_t>(first) / job.tokens_per_page;
    if (first < 0 || page >= job.page_count || job.blocks[unit / job.region_count] == 0) continue;
    const std::uint64_t base = region.base + page * region.page_stride;
    poison_region(region, [&](std::uint64_t piece) { return base + piece * region.piece_stride; });
  }
}

// Where a scatter writes first.
const std::byte* first_page(const PageJob& job) {
  std::uint64_t entry = 0;
  while (job.blocks[entry] == 0 && entry + 1 < job.count) ++entry;
  const std::uint64_t page = static_cast<std::uint64_t>(job.pages[entry]) / job.tokens_per_page;
  const PageRegion& region = job.regions[0];
  return reinterpret_cast<const std::byte*>(region.base + page * region.page_stride);
}

}  // namespace

AsyncDevice::~AsyncDevice() {
  {
    const std::lock_guard lock(mutex_);
    lost_ = true;
    for (const auto& queue : owned_) queue->stopping = true;
    changed_.notify_all();
  }
  for (const auto& queue : owned_) {
    if (queue->thread.joinable()) queue->thread.join();
  }
}

// ---- for tests ----

void AsyncDevice::launch(StreamHandle stream, std::function<void()> work) {
  enqueue(stream, std::move(work));
}

void AsyncDevice::hold(StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  static_cast<Queue*>(stream)->held = true;
}

void AsyncDevice::release(StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  static_cast<Queue*>(stream)->held = false;
  changed_.notify_all();
}

void AsyncDevice::release_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& queue : owned_) queue->held = false;
  changed_.notify_all();
}

void AsyncDevice::fail_call(std::uint64_t nth, bool lost) {
  const std::lock_guard lock(mutex_);
  fail_at_ = nth == 0 ? 0 : calls_ + nth;
  lose_ = lost;
  has_failed_.store(false);
}

void AsyncDevice::at_call(const std::string& name, std::uint64_t nth,
                          std::function<void()> action) {
  const std::lock_guard lock(mutex_);
  planned_[name] = {nth, std::move(action)};
}

void AsyncDevice::fail_calls(const std::string& name, int count) {
  const std::lock_guard lock(mutex_);
  fail_named_[name] = count;
}

StreamHandle AsyncDevice::made_stream(std::size_t index) {
  const std::lock_guard lock(mutex_);
  return streams_.at(index);
}

bool AsyncDevice::has_waited(std::thread::id thread) {
  const std::lock_guard lock(mutex_);
  return std::ranges::find(waited_, thread) != waited_.end();
}

std::size_t AsyncDevice::wait_count() {
  const std::lock_guard lock(mutex_);
  return waited_.size();
}

// ---- the machinery ----

void AsyncDevice::act(const char* name) {
  std::function<void()> action;
  {
    const std::lock_guard lock(mutex_);
    const auto plan = planned_.find(name);
    if (plan == planned_.end() || --plan->second.calls_left != 0) return;
    action = std::move(plan->second.action);
    planned_.erase(plan);
  }
  action();
}

Status AsyncDevice::call(const char* name, int line) {
  act(name);
  const std::lock_guard lock(mutex_);
  ++calls_;
  if (lost_) return Status::failed("async_device.cc", line, std::string(name) + ": device lost");
  const auto named = fail_named_.find(name);
  const bool is_named = named != fail_named_.end() && named->second > 0;
  if (is_named) --named->second;
  const bool is_counted = fail_at_ != 0 && calls_ == fail_at_;
  if (!is_named && !is_counted) return {};
  has_failed_.store(true);
  if (is_counted && lose_) {
    lost_ = true;
    changed_.notify_all();
  }
  return Status::failed("async_device.cc", line, std::string(name) + ": injected");
}

Status AsyncDevice::engine_call(const char* name, int line) {
  if (std::ranges::find(entered, this) == entered.end()) ++calls_from_outside_;
  return call(name, line);
}

void AsyncDevice::dawdle(Queue& queue, std::unique_lock<std::mutex>& lock) {
  const std::uint32_t longest = delay_us_.load();
  if (longest == 0) return;
  const std::chrono::microseconds pause(queue.random() % longest);
  lock.unlock();
  std::this_thread::sleep_for(pause);
  lock.lock();
}

void AsyncDevice::serve(Queue& queue) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock,
                  [&] { return queue.stopping || lost_ || (!queue.work.empty() && !queue.held); });
    // What is queued on a lost device never runs.
    if (lost_) queue.work.clear();
    if (queue.work.empty()) {
      changed_.notify_all();
      if (queue.stopping) return;
      if (lost_) changed_.wait(lock, [&] { return queue.stopping || !queue.work.empty(); });
      continue;
    }
    const std::function<void()> work = std::move(queue.work.front());
    queue.work.pop_front();
    queue.running = true;
    dawdle(queue, lock);
    lock.unlock();
    work();
    lock.lock();
    queue.running = false;
    changed_.notify_all();
  }
}

void AsyncDevice::enqueue(StreamHandle stream, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  static_cast<Queue*>(stream)->work.push_back(std::move(work));
  changed_.notify_all();
}

void AsyncDevice::await(std::unique_lock<std::mutex>& lock, std::shared_ptr<const Mark> mark) {
  changed_.wait(lock, [&] { return mark == nullptr || mark->passed || lost_; });
}

void AsyncDevice::note_wait() {
  const std::lock_guard lock(mutex_);
  waited_.push_back(std::this_thread::get_id());
}

// ---- stream::Device ----

// A thread whose call fails has done its part.
Status AsyncDevice::enter_thread() {
  entered.push_back(this);
  return call("enter_thread", __LINE__);
}

Status AsyncDevice::make_stream(bool /*urgent*/, StreamHandle& out) {
  if (Status status = call("make_stream", __LINE__); !status.ok()) return status;
  auto queue = std::make_unique<Queue>();
  Queue* const made = queue.get();
  const std::lock_guard lock(mutex_);
  made->random.seed(random_());
  made->thread = std::thread([this, made] { serve(*made); });
  streams_.push_back(made);
  owned_.push_back(std::move(queue));
  out = made;
  return {};
}

// As in CUDA: what is enqueued runs to its end, and the handle is gone.
void AsyncDevice::destroy_stream(StreamHandle stream) noexcept {
  if (stream == nullptr) return;
  const std::lock_guard lock(mutex_);
  static_cast<Queue*>(stream)->stopping = true;
  changed_.notify_all();
}

Status AsyncDevice::make_event(EventHandle& out) {
  if (Status status = call("make_event", __LINE__); !status.ok()) return status;
  auto event = std::make_unique<Event>();
  out = event.get();
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  ++live_events_;
  return {};
}

void AsyncDevice::destroy_event(EventHandle event) noexcept {
  if (event == nullptr) return;
  const std::lock_guard lock(mutex_);
  std::erase_if(events_, [event](const auto& one) { return one.get() == event; });
  --live_events_;
}

Status AsyncDevice::record(StreamHandle stream, EventHandle event) {
  if (Status status = call("record", __LINE__); !status.ok()) return status;
  const auto mark = std::make_shared<Mark>();
  {
    const std::lock_guard lock(mutex_);
    static_cast<Event*>(event)->last = mark;
    mark->passed = stream == nullptr;
  }
  if (stream == nullptr) return {};
  enqueue(stream, [this, mark] {
    const std::lock_guard lock(mutex_);
    mark->passed = true;
    changed_.notify_all();
  });
  return {};
}

Status AsyncDevice::wait(StreamHandle stream, EventHandle event) {
  if (Status status = call("wait", __LINE__); !status.ok() || stream == nullptr) return status;
  std::shared_ptr<const Mark> mark;
  {
    const std::lock_guard lock(mutex_);
    mark = static_cast<Event*>(event)->last;
  }
  enqueue(stream, [this, mark] {
    std::unique_lock lock(mutex_);
    await(lock, mark);
  });
  return {};
}

Status AsyncDevice::query(EventHandle event, bool& passed) {
  if (Status status = call("query", __LINE__); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  const auto mark = static_cast<Event*>(event)->last;
  passed = mark == nullptr || mark->passed;
  return {};
}

Status AsyncDevice::synchronize(EventHandle event) {
  if (Status status = engine_call("synchronize", __LINE__); !status.ok()) return status;
  note_wait();
  std::unique_lock lock(mutex_);
  await(lock, static_cast<Event*>(event)->last);
  return lost_ ? Status::failed("async_device.cc", __LINE__, "synchronize: device lost") : Status{};
}

Status AsyncDevice::synchronize_stream(StreamHandle stream) {
  if (Status status = call("synchronize_stream", __LINE__); !status.ok()) {
    // Even a lost device has ended its work in progress by the time it says so.
    std::unique_lock lock(mutex_);
    const Queue& queue = *static_cast<Queue*>(stream);
    if (lost_) changed_.wait(lock, [&] { return !queue.running; });
    return status;
  }
  note_wait();
  std::unique_lock lock(mutex_);
  const Queue& queue = *static_cast<Queue*>(stream);
  changed_.wait(lock, [&] { return queue.work.empty() && !queue.running; });
  return lost_ ? Status::failed("async_device.cc", __LINE__, "synchronize_stream: device lost")
               : Status{};
}

Status AsyncDevice::copy(StreamHandle stream, Direction direction, std::span<const Span> spans) {
  if (Status status = engine_call("copy", __LINE__); !status.ok()) return status;
  const std::vector<Span> mine(spans.begin(), spans.end());
  for (const Span& span : mine) {
    require_pinned(direction == Direction::to_host ? span.target : span.source, span.bytes, false);
  }
  if (direction == Direction::to_host) {
    for (const Span& span : mine) poison(span.target, span.bytes);
  }
  enqueue(stream, [this, mine, direction] {
    if (direction == Direction::to_device) {
      on_write_(mine.front().target);
      for (const Span& span : mine) poison(span.target, span.bytes);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us_.load() / 4));
    for (const Span& span : mine) std::memcpy(span.target, span.source, span.bytes);
  });
  return {};
}

Status AsyncDevice::run(StreamHandle stream, std::span<const PageJob> jobs) {
  if (Status status = engine_call("run", __LINE__); !status.ok()) return status;
  if (jobs.empty() || jobs.size() > kJobsMax) std::abort();
  ++run_count_;
  job_count_ += jobs.size();
  for (const PageJob& job : jobs) {
    require_pinned_tables(job);
    if (job.to_block) poison_blocks(job);
  }
  enqueue(stream, [this, mine = std::vector<PageJob>(jobs.begin(), jobs.end())] {
    for (const PageJob& job : mine) {
      if (job.to_block) continue;
      on_write_(first_page(job));
      poison_pages(job);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us_.load() / 4));
    std::ranges::for_each(mine, stream::run_on_host);
  });
  return {};
}

void AsyncDevice::require_pinned_tables(const PageJob& job) {
  const auto require = [this](const auto* table, std::uint64_t count) {
    require_pinned(reinterpret_cast<const std::byte*>(table), count * sizeof *table, false);
  };
  require(job.regions, job.region_count);
  require(job.blocks, job.count);
  if (job.rows != nullptr) require(job.rows, job.count);
  for (std::uint64_t i = 0; i < job.count; ++i) {
    if (job.blocks[i] == 0) continue;
    for (std::uint64_t region = 0; region < job.region_count; ++region) {
      const PageRegion& one = job.regions[region];
      require_pinned(reinterpret_cast<const std::byte*>(job.blocks[i] + one.block_offset),
                     (one.piece_count - 1) * one.block_step + one.piece_bytes, true);
    }
  }
}

Status AsyncDevice::allocate_pinned(std::uint64_t bytes, std::byte*& out) {
  if (Status status = call("allocate_pinned", __LINE__); !status.ok()) return status;
  out = static_cast<std::byte*>(::operator new(bytes, std::align_val_t{4096}));
  poison(out, bytes);
  ++live_allocations_;
  const std::lock_guard lock(mutex_);
  pinned_.emplace(out, bytes);
  return {};
}

void AsyncDevice::free_pinned(std::byte* memory) noexcept {
  if (memory == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    pinned_.erase(memory);
  }
  ::operator delete(memory, std::align_val_t{4096});
  --live_allocations_;
}

Status AsyncDevice::register_host(std::byte* memory, std::uint64_t bytes) {
  if (Status status = engine_call("register_host", __LINE__); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  if (registered_.size() >= registrations_max_.load()) {
    ++refused_registrations_;
    return Status::failed("async_device.cc", __LINE__, "register_host: no more pinned memory");
  }
  const auto after = registered_.lower_bound(memory);
  const bool meets_next = after != registered_.end() && after->first < memory + bytes;
  const bool meets_last =
      after != registered_.begin() && std::prev(after)->first + std::prev(after)->second > memory;
  if (meets_next || meets_last || bytes == 0) {
    return Status::failed("async_device.cc", __LINE__, "register_host: already registered");
  }
  registered_.emplace(memory, bytes);
  return {};
}

void AsyncDevice::unregister_host(std::byte* memory) noexcept {
  const std::lock_guard lock(mutex_);
  if (registered_.erase(memory) != 1) std::abort();
}

std::vector<std::uint64_t> AsyncDevice::registrations() {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> bytes;
  for (const auto& [at, size] : registered_) bytes.push_back(size);
  return bytes;
}

void AsyncDevice::require_pinned(const std::byte* at, std::uint64_t bytes, bool by_kernel) {
  const std::lock_guard lock(mutex_);
  for (const auto* ranges : {&pinned_, &registered_, &uploaded_}) {
    auto after = ranges->upper_bound(at);
    if (after == ranges->begin()) continue;
    const std::byte* end = std::prev(after)->first + std::prev(after)->second;
    for (; by_kernel && after != ranges->end() && after->first == end; ++after) {
      end += after->second;
    }
    if (at + bytes <= end) return;
  }
  ++pageable_copies_;
}

Status AsyncDevice::upload(std::span<const std::byte> bytes, void*& out) {
  if (Status status = call("upload", __LINE__); !status.ok()) return status;
  out = ::operator new(bytes.size(), std::align_val_t{4096});
  std::memcpy(out, bytes.data(), bytes.size());
  ++live_allocations_;
  const std::lock_guard lock(mutex_);
  uploaded_.emplace(static_cast<std::byte*>(out), bytes.size());
  return {};
}

void AsyncDevice::free_uploaded(void* memory) noexcept {
  if (memory == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    uploaded_.erase(static_cast<std::byte*>(memory));
  }
  ::operator delete(memory, std::align_val_t{4096});
  --live_allocations_;
}

}  // namespace hpkv::test
