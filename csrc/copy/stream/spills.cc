#include "copy/stream/spills.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/crc32c.h"
#include "copy/stream/transfer.h"

namespace hpkv::stream {
namespace {

// Pages whose reads have one event: few enough that the first ones are stored while the last ones
// are read.
constexpr std::size_t kBatchPages = 16;
static_assert(kBatchPages <= kTableRows);  // one table

}  // namespace

Spills::Spills(Core& core) : core_(core) {
  try {
    threads_.emplace_back([this] { read_all(); });
    threads_.emplace_back([this] { land_all(); });
    for (std::uint32_t i = 0; i < core.options.queues.threads; ++i) {
      threads_.emplace_back([this] { store_all(); });
    }
  } catch (...) {
    stop();
    to_land_.close();
    to_store_.close();
    join();
    throw;
  }
}

Spills::~Spills() {
  stop();
  join();
}

// ---- callers ----

std::shared_ptr<StreamSpill> Spills::submit(SpillRequest request, const After& after) {
  const std::size_t count = request.keys.size();
  if (request.resident.count != 0) {
    request.pages.resize(count);
    std::iota(request.pages.begin(), request.pages.end(), 0);  // rows, until they are fetched
  }
  auto spill = std::make_shared<StreamSpill>(core_.device, core_.health, count);
  if (count == 0) return spill;
  const auto work =
      std::make_shared<Work>(spill, std::move(request), core_.pool->take_stamps(count));
  if (core_.faults.take_failure(CopyKind::spill)) spill->cancel();
  if (!core_.health->poisoned()) work->gate = core_.spill_gates.make(after);
  std::atomic<std::uint64_t>* reason = &core_.counters.dropped_queue;
  {
    const std::lock_guard lock(mutex_);
    const bool broken = core_.health->poisoned();
    if (broken) reason = &core_.counters.dropped_off;
    if (!stopping_ && !broken && queued_pages_ + count <= core_.options.queues.spill_pages_max) {
      queued_pages_ += count;
      open_.insert(work);
      core_.outstanding.add();
      to_read_.push(work);
      return spill;
    }
  }
  core_.events.give(work->gate);
  add(*reason, count);
  spill->pass_over(count);
  spill->ticket.settle(SpillOutcome::dropped, count);
  return spill;
}

void Spills::stop() {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  stopping_ = true;
  for (const WorkRef& work : open_) work->spill->cancel();
  to_read_.close();
}

void Spills::join() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

std::size_t Spills::queued_pages() const {
  const std::lock_guard lock(mutex_);
  return queued_pages_;
}

// ---- thread 1 ----

void Spills::read_all() {
  static_cast<void>(core_.health->check(core_.device->enter_thread()));
  while (std::optional<WorkRef> work = to_read_.pop()) read(*work);
  to_land_.close();
}

bool Spills::open_gate(Work& work) {
  // Pages of a cancelled ticket are not asked for.
  const bool known = work.resident.count == 0 || by_rows(work) || work.spill->ticket.cancelled() ||
                     core_.spill_indices.read(work.gate.chooser, work.resident,
                                              core_.layout.page_count(), work.job.pages);
  if (known) return core_.to_host.pass(work.gate);
  core_.events.give(work.gate);
  return false;
}

void Spills::read(const WorkRef& work) {
  cpu::SpillJob& job = work->job;
  const bool ready = open_gate(*work);
  Batch batch;
  for (std::size_t left = job.keys.size(); left > 0; --left) {
    const std::size_t index = job.order.take();
    const auto delay = core_.faults.delay(CopyKind::spill, Faults::kEveryLayer);
    if (delay.count() != 0) job.ticket->sleep(delay);
    {
      const std::lock_guard lock(mutex_);
      --queued_pages_;
    }
    if (!ready || core_.health->poisoned()) {
      pass_over(*work, SpillOutcome::dropped, core_.counters.dropped_off);
      continue;
    }
    if (prepare(work, index, batch) && batch.pages.size() == kBatchPages) flush(batch);
  }
  flush(batch);
}

bool Spills::prepare(const WorkRef& work, std::size_t index, Batch& batch) {
  SpillTicket& ticket = *work->job.ticket;
  if (ticket.cancelled()) {
    pass_over(*work, SpillOutcome::dropped, core_.counters.dropped_cancelled);
    return false;
  }
  if (work->job.pages[index] < 0) {
    pass_over(*work, SpillOutcome::dropped, core_.counters.dropped_outside);
    return false;
  }
  // Slots come free by what is enqueued, so that must not wait for us.
  if (core_.spill_slots.free_count() == 0) flush(batch);
  const std::optional<std::vector<Slot>> slots = core_.spill_slots.take(1);
  if (!slots) {
    pass_over(*work, SpillOutcome::dropped, core_.counters.dropped_cancelled);
    return false;
  }
  BlockRef block;
  const ReserveStatus reserved =
      core_.pool->reserve(core_.namespace_index, work->job.keys[index], block);
  if (reserved != ReserveStatus::ok) {
    core_.spill_slots.give(*slots);
    pass_over_unreserved(*work, index, reserved);
    return false;
  }
  if (!ticket.begin_read()) {
    core_.pool->abandon(block);
    core_.spill_slots.give(*slots);
    pass_over(*work, SpillOutcome::dropped, core_.counters.dropped_cancelled);
    return false;
  }
  for (std::uint32_t layer = 0; layer < core_.layout.layer_count(); ++layer) {
    // Served to its end, cancelled or not: it stands for a copy that is slow to read.
    const auto delay = core_.faults.delay(CopyKind::spill, static_cast<int>(layer));
    if (delay.count() != 0) std::this_thread::sleep_for(delay);
  }
  batch.pages.push_back({work, index, block, slots->front()});
  return true;
}

void Spills::pass_over_unreserved(Work& work, std::size_t index, ReserveStatus why) {
  switch (why) {
    case ReserveStatus::ok:
      return;
    case ReserveStatus::present:
      return pass_over(work, SpillOutcome::present, core_.counters.spill_present);
    case ReserveStatus::full:
      return pass_over(work, SpillOutcome::dropped, core_.counters.dropped_full);
    case ReserveStatus::busy:
      return pass_over_busy(work, index);
    case ReserveStatus::off:
      return pass_over(work, SpillOutcome::dropped, core_.counters.dropped_off);
  }
}

void Spills::pass_over_busy(Work& work, std::size_t index) {
  if (!work.job.shared) {
    pass_over(work, SpillOutcome::dropped, core_.counters.dropped_busy);
  } else if (core_.pool->lookup({&work.job.keys[index], 1}) == 1) {
    // Its writer has published it since.
    pass_over(work, SpillOutcome::present, core_.counters.spill_present);
  } else {
    pass_over(work, SpillOutcome::dropped, core_.counters.left_to_others);
  }
}

void Spills::flush(Batch& batch) {
  if (batch.pages.empty()) return;
  std::vector<std::int64_t> pages;
  std::vector<std::byte*> blocks;
  for (const Page& page : batch.pages) {
    pages.push_back(page.work->job.pages[page.index]);
    blocks.push_back(core_.staging.page(page.slot));
  }
  const Work& work = *batch.pages.front().work;
  const KernelTable table = core_.staging.table(batch.pages.front().slot);
  const PageBlocks all{pages, by_rows(work) ? work.resident : DevicePages{}, blocks, {&table, 1}};
  fill_tables(all);
  batch.enqueued = core_.health->check(enqueue_gather(core_, all));
  batch.event = core_.to_host.mark();
  work.spill->enqueued(batch.pages.size(), batch.event);
  to_land_.push(std::exchange(batch, Batch{}));
}

// ---- thread 2 ----

void Spills::land_all() {
  static_cast<void>(core_.health->check(core_.device->enter_thread()));
  while (std::optional<Batch> batch = to_land_.pop()) land(*batch);
  to_store_.close();
}

void Spills::land(Batch& batch) {
  const bool passed = core_.to_host.await(batch.event);
  const bool whole = passed && batch.enqueued && !core_.health->poisoned();
  const KernelTable table = core_.staging.table(batch.pages.front().slot);
  Work& work = *batch.pages.front().work;
  for (std::size_t i = 0; i < batch.pages.size(); ++i) {
    Page& page = batch.pages[i];
    page.outside = whole && by_rows(work) && !was_page({&table, 1}, i);
    page.whole = work.job.ticket->end_read() && whole && !page.outside;
  }
  work.spill->landed();
  core_.events.give(batch.event);
  for (Page& page : batch.pages) to_store_.push(std::move(page));
}

// ---- threads 3 and on ----

void Spills::store_all() {
  while (std::optional<Page> page = to_store_.pop()) store(*page);
}

void Spills::store(Page& page) {
  Work& work = *page.work;
  if (!page.whole) {
    core_.pool->abandon(page.block);
    core_.spill_slots.give({&page.slot, 1});
    Counters& counters = core_.counters;
    add(page.outside               ? counters.dropped_outside
        : core_.health->poisoned() ? counters.dropped_off
                                   : counters.dropped_cancelled,
        1);
    settle(work, SpillOutcome::dropped);
    return;
  }
  const std::uint64_t bytes = core_.layout.block_bytes();
  const std::uint32_t checksum =
      copy_nt_crc32c(core_.pool->payload(page.block), core_.staging.page(page.slot), bytes);
  core_.spill_slots.give({&page.slot, 1});
  core_.pool->publish(page.block, checksum, work.job.stamp(page.index));
  add(core_.counters.spill_stored, 1);
  add(core_.counters.spilled_bytes, bytes);
  settle(work, SpillOutcome::stored);
}

// ---- outcomes ----

void Spills::pass_over(Work& work, SpillOutcome outcome, std::atomic<std::uint64_t>& reason) {
  add(reason, 1);
  work.spill->pass_over(1);
  settle(work, outcome);
}

void Spills::settle(Work& work, SpillOutcome outcome) {
  cpu::SpillJob& job = work.job;
  if (outcome == SpillOutcome::present) job.any_present.store(true, std::memory_order_relaxed);
  // The run is stamped again as a whole where its pages may carry others' stamps, as in the CPU
  // engine.
  const bool last = job.unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1;
  if (last && (job.shared || job.any_present.load(std::memory_order_relaxed))) {
    core_.pool->touch(job.keys);
  }
  job.ticket->settle(outcome);
  if (!job.ticket->done() || work.over.exchange(true)) return;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(open_, [&work](const WorkRef& one) { return one.get() == &work; });
  }
  core_.outstanding.finish();
}

}  // namespace hpkv::stream
