#include "copy/stream/loads.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace hpkv::stream {

Loads::Loads(Core& core) : core_(core) {
  try {
    threads_.emplace_back([this] { enqueue_all(); });
    threads_.emplace_back([this] { land_all(); });
  } catch (...) {
    stop();
    to_land_.close();
    join();
    throw;
  }
}

Loads::~Loads() {
  stop();
  join();
}

// ---- callers ----

std::shared_ptr<StreamLoad> Loads::submit(LoadRequest request, const After& after) {
  add(core_.counters.load_tickets, 1);
  const std::size_t count = request.count();
  auto work = std::make_shared<Work>();
  work->load =
      std::make_shared<StreamLoad>(core_.device, core_.health, core_.layout.layer_count(), count);
  if (count == 0) {
    work->load->end();
    return work->load;
  }
  if (request.lease.count() == 0 || core_.health->poisoned()) return refused(request);
  work->by_kernel = scatters_by_kernel(core_, request.resident);
  work->blocks = blocks_in_place(core_, request.lease.refs(), request.source, work->by_kernel);
  work->promised = need_of(work->blocks, work->by_kernel);
  work->gate = core_.load_gates.make(after);
  if (core_.faults.take_failure(CopyKind::load)) work->load->fail();
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_ && !core_.health->poisoned() &&
        open_.size() < core_.options.queues.load_tickets_max) {
      work->request = std::move(request);
      open_.insert(work->load);
      core_.outstanding.add();
      gathered_.push_back(work);
      promise(*work);
      if (holds_ == 0) hand_over();
      return work->load;
    }
  }
  core_.events.give(work->gate);
  return refused(request);
}

std::shared_ptr<StreamLoad> Loads::refused(LoadRequest& request) {
  request.lease.release();
  add(core_.counters.load_failed, 1);
  auto load =
      std::make_shared<StreamLoad>(core_.device, core_.health, core_.layout.layer_count(), 0);
  load->fail();
  return load;
}

void Loads::hold() {
  const std::lock_guard lock(mutex_);
  ++holds_;
}

void Loads::release() {
  const std::lock_guard lock(mutex_);
  if (holds_ == 0) throw Error(ErrorKind::argument, "copy engine: a release without a hold");
  if (--holds_ == 0) hand_over();
}

StagingShare Loads::room() {
  const std::lock_guard lock(mutex_);
  return waiting_ == 0 ? room_left() : StagingShare{};
}

StagingShare Loads::room_left() {
  const std::size_t slots = core_.load_slots.free_count();
  const std::size_t tables = core_.load_tables.lane.free_count();
  return {slots - std::min(slots, promised_.slots), tables - std::min(tables, promised_.tables)};
}

void Loads::promise(Work& work) {
  const StagingShare room = room_left();
  work.waits = work.promised.slots > room.slots || work.promised.tables > room.tables;
  waiting_ += work.waits ? 1 : 0;
  promised_ += work.promised;
}

void Loads::keep_promise(Work& work) {
  promised_ -= std::exchange(work.promised, {});
  waiting_ -= std::exchange(work.waits, false) ? 1 : 0;
}

bool Loads::take_promised(Work& work, LoadBatch& batch, bool waits) {
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!waits) lock.lock();
  const bool taken = take(core_, batch);
  if (waits) lock.lock();
  if (batch.last) keep_promise(work);
  return taken;
}

void Loads::hand_over() {
  if (!gathered_.empty()) to_enqueue_.push(std::exchange(gathered_, {}));
}

void Loads::stop() {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  stopping_ = true;
  for (const auto& load : open_) load->fail();
  hand_over();  // held or not: nobody waits for a load that nobody takes up
  to_enqueue_.close();
}

void Loads::join() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

// ---- thread 1 ----

void Loads::enqueue_all() {
  static_cast<void>(core_.health->check(core_.device->enter_thread()));
  while (std::optional<Group> group = to_enqueue_.pop()) {
    std::vector<Taken> set;
    for (const WorkRef& work : *group) {
      if (gather(work, set)) continue;
      work->load->fail();
      end(work);
    }
    enqueue(set);
  }
  to_land_.close();
}

bool Loads::gather(const WorkRef& work, std::vector<Taken>& set) {
  delay(*work, 0);
  if (work->load->ticket.failed() || !trusted(*work)) return false;
  const std::size_t in_place = work->blocks.count_in_place();
  add(core_.counters.loaded_in_place, in_place * work->request.blocks_per_page());
  if (in_place != work->blocks.count()) {
    work->assembly = assembly_of(work->request.source);
  }
  for (LoadBatch& batch : cut_load(core_, work->blocks, work->by_kernel)) {
    // What take() would wait for comes free by what is enqueued. And a batch is filled while the
    // one before it is on its way.
    const bool waits = !has_room(core_, batch);
    if (batch.first != 0 || waits) enqueue(set);
    if (work->load->ticket.failed() || !take_promised(*work, batch, waits)) return false;
    set.push_back({work, std::move(batch)});
  }
  return true;
}

void Loads::enqueue(std::vector<Taken>& set) {
  for (const Taken& taken : set) fill_all_tables(taken);
  for (std::uint32_t layer = 0; layer < core_.layout.layer_count(); ++layer) {
    enqueue_layer(set, layer);
  }
  set.clear();
}

void Loads::enqueue_layer(std::vector<Taken>& set, std::uint32_t layer) {
  std::vector<PageJob> jobs;
  for (Taken& taken : set) {
    if (taken.work != nullptr && !prepare(taken, layer, jobs)) leave(taken, nullptr);
  }
  if (std::ranges::all_of(set, [](const Taken& taken) { return taken.work == nullptr; })) return;
  const bool whole = core_.health->check(run_scatters(core_, jobs));
  const SharedEvent event = whole ? core_.events.share(core_.to_device.mark()) : nullptr;
  for (Taken& taken : set) {
    if (taken.work == nullptr) continue;
    if (event != nullptr && taken.batch.last) {
      taken.work->load->enqueued(layer, event);
      to_land_.push({taken.work, Step::layer, event, {}});
    }
    if (event == nullptr || layer + 1 == core_.layout.layer_count()) leave(taken, event);
  }
}

void Loads::leave(Taken& taken, SharedEvent event) {
  Taken left = std::exchange(taken, {});
  if (event == nullptr) {
    left.work->load->fail();
    event = core_.events.share(core_.to_device.mark());
  }
  const bool last = left.batch.last;
  to_land_.push({left.work, Step::batch, std::move(event), std::move(left.batch)});
  if (last) end(left.work);
}

void Loads::end(const WorkRef& work) {
  {
    const std::lock_guard lock(mutex_);
    keep_promise(*work);
  }
  core_.events.give(work->gate);
  to_land_.push({work, Step::end, nullptr, {}});
}

bool Loads::trusted(const Work& work) {
  const std::uint64_t bytes =
      work.request.source ? work.request.source->block_bytes() : core_.layout.block_bytes();
  for (const BlockRef& ref : work.request.lease.refs()) {
    // A block of another size has another identity, whatever its key says.
    if (work.load->ticket.failed() || ref.payload_bytes != bytes || !core_.trusted(ref)) {
      return false;
    }
  }
  return true;
}

std::shared_ptr<const Assembly> Loads::assembly_of(
    const std::shared_ptr<const BlockSource>& source) {
  if (source == nullptr) return nullptr;
  const auto known = assemblies_.find(source);
  if (known != assemblies_.end()) return known->second;
  auto assembly = std::make_shared<const Assembly>(core_.layout, *source);
  assemblies_.emplace(source, assembly);
  return assembly;
}

void Loads::delay(Work& work, std::uint32_t layer) {
  auto delay = core_.faults.delay(CopyKind::load, static_cast<int>(layer));
  delay += core_.faults.delay(CopyKind::load, Faults::kEveryLayer);
  if (delay.count() != 0) work.load->ticket.sleep(delay);
}

PageBlocks Loads::column_of(const Taken& taken, const BlockColumn& blocks,
                            std::span<const KernelTable> tables) {
  const LoadRequest& request = taken.work->request;
  PageBlocks column =
      PageBlocks{request.pages, request.resident, {}, {}}.sub(taken.batch.first, blocks.size());
  column.blocks = blocks;
  column.tables = tables;
  return column;
}

void Loads::fill_all_tables(const Taken& taken) {
  const LoadBatch& batch = taken.batch;
  fill_tables(column_of(taken, batch.blocks.own, batch.tables));
  for (std::size_t part = 0; part < batch.blocks.parts.size(); ++part) {
    fill_tables(column_of(taken, batch.blocks.parts[part], batch.part_tables[part]));
  }
}

bool Loads::prepare(const Taken& taken, std::uint32_t layer, std::vector<PageJob>& jobs) {
  const auto& [work, batch] = taken;
  if (layer != 0 && batch.first == 0) delay(*work, layer);
  // The gate, once, before the first copy that it is for. The rest of the set runs behind it too,
  // which is needed by the same forward pass.
  if (work->load->ticket.failed() || !core_.to_device.pass(work->gate)) return false;
  const LoadRequest& request = work->request;
  const std::size_t count = batch.blocks.count();
  const std::size_t per_page = request.blocks_per_page();
  const auto refs = request.lease.refs().subspan(batch.first * per_page, count * per_page);
  const PageBlocks own = column_of(taken, batch.blocks.own, batch.tables);
  if (!batch.slots.empty()) fill_slots(core_, layer, own, refs, work->assembly.get());
  add(core_.counters.loaded_bytes, count * core_.layout.layer_bytes(layer));
  if (!batch.by_kernel) return core_.health->check(enqueue_scatter(core_, layer, own));
  add_scatter(core_, layer, own, jobs);
  for (std::size_t part = 0; part < batch.blocks.parts.size(); ++part) {
    const PageBlocks column = column_of(taken, batch.blocks.parts[part], batch.part_tables[part]);
    add_scatter(core_, batch.blocks.regions->of(layer, part), column, jobs);
  }
  return true;
}

// ---- thread 2 ----

void Loads::land_all() {
  static_cast<void>(core_.health->check(core_.device->enter_thread()));
  while (std::optional<Landing> landing = to_land_.pop()) land(*landing);
}

void Loads::land(Landing& landing) {
  Work& work = *landing.work;
  if (landing.step == Step::end) return finish(work);
  static_cast<void>(core_.to_device.await(landing.event.get()));
  if (core_.health->poisoned()) work.load->fail();
  if (landing.step == Step::layer) {
    ++work.landed_layers;
    static_cast<void>(work.load->ticket.finish_unit(work.landed_layers - 1));
    return;
  }
  give(core_, landing.batch);
}

void Loads::finish(Work& work) {
  LoadTicket& ticket = work.load->ticket;
  if (core_.health->poisoned()) work.load->fail();
  Lease& lease = work.request.lease;
  if (ticket.failed()) {
    add(core_.counters.load_failed, 1);
  } else {
    add(core_.counters.loaded_blocks, lease.count());
    core_.pool->count_loaded(lease.refs());
    core_.pool->touch(lease.keys());
  }
  lease.release();
  // Layers that never got here: nobody writes them any more.
  for (; work.landed_layers < ticket.layer_count(); ++work.landed_layers) {
    static_cast<void>(ticket.finish_unit(work.landed_layers));
  }
  work.load->end();
  {
    const std::lock_guard lock(mutex_);
    open_.erase(work.load);
  }
  ticket.finish();
  core_.outstanding.finish();
}

}  // namespace hpkv::stream
