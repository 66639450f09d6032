// Linked in the place of the CPU engine's factory: the tests of the CPU engine, which is the
// specification, run against the stream engine on a device of threads. They know no device events
// and no device's indices, so every submission here gets one of a stream that dawdles, as a forward
// pass does, or streams and indices that only the device has.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "copy/engine.h"
#include "copy/stream/engine.h"
#include "tests/async_device.h"
#include "tests/check.h"

namespace hpkv {

using stream::Streams;

namespace {

class DrivenEngine final : public CopyEngine {
 public:
  DrivenEngine(std::shared_ptr<Pool> pool, std::uint32_t namespace_index, BlockLayout layout,
               const stream::StreamOptions& options, bool resident)
      : device_(std::make_shared<test::AsyncDevice>()),
        page_count_(layout.page_count()),
        resident_(resident) {
    CHECK(device_->make_stream(false, forward_).ok());
    CHECK(device_->make_stream(false, schedule_).ok());
    engine_ = std::make_unique<stream::StreamEngine>(device_, std::move(pool), namespace_index,
                                                     std::move(layout), options);
  }
  ~DrivenEngine() override {
    close();
    const bool sound = engine_->check().empty() && !engine_->poisoned();
    engine_.reset();
    device_->destroy_stream(forward_);
    device_->destroy_stream(schedule_);
    // What the engine took from the device it has given back.
    if (!sound || device_->live_events() != 0 || device_->live_allocations() != 0 ||
        device_->pageable_copies() != 0 || device_->calls_from_outside() != 0 ||
        !device_->registrations().empty()) {
      std::abort();
    }
  }
  DrivenEngine(const DrivenEngine&) = delete;
  DrivenEngine& operator=(const DrivenEngine&) = delete;

  std::shared_ptr<SpillTicket> spill(std::vector<Key> keys, std::vector<std::int64_t> pages,
                                     DeviceEvent after, Turn turn) override {
    if (goes_by_indices(pages)) {
      const auto spill = engine_->spill_resident(std::move(keys), on_device(std::move(pages)),
                                                 Streams{schedule_, forward_}, turn);
      return {spill, &spill->ticket};
    }
    const Recorded event(*this, after);
    return engine_->spill(std::move(keys), std::move(pages), {event.handle}, turn);
  }
  std::shared_ptr<LoadTicket> load(Lease lease, std::vector<std::int64_t> pages, DeviceEvent after,
                                   std::shared_ptr<const BlockSource> source) override {
    if (goes_by_indices(pages)) {
      const auto load = engine_->load_resident(std::move(lease), on_device(std::move(pages)),
                                               Streams{schedule_, forward_}, std::move(source));
      return {load, &load->ticket};
    }
    const Recorded event(*this, after);
    return engine_->load(std::move(lease), std::move(pages), {event.handle}, std::move(source));
  }
  std::shared_ptr<VerifyTicket> verify(Lease lease) override {
    return engine_->verify(std::move(lease));
  }
  Faults& faults() noexcept override { return engine_->faults(); }
  [[nodiscard]] EngineStats stats() const override { return engine_->stats(); }
  void quiesce() override { engine_->quiesce(); }
  void close() override { engine_->close(); }

 private:
  // Destroyed as soon as the submission is over: the engine may not need it any longer.
  struct Recorded {
    Recorded(DrivenEngine& engine, DeviceEvent given) : device(*engine.device_) {
      if (given.handle != nullptr) {
        throw Error(ErrorKind::argument, "the tests of the CPU engine know no events");
      }
      CHECK(device.make_event(handle).ok());
      CHECK(device.record(engine.forward_, handle).ok());
    }
    ~Recorded() { device.destroy_event(handle); }
    Recorded(const Recorded&) = delete;
    Recorded& operator=(const Recorded&) = delete;

    test::AsyncDevice& device;
    stream::EventHandle handle = nullptr;
  };

  // Of these only the host can say that they are none.
  [[nodiscard]] bool goes_by_indices(const std::vector<std::int64_t>& pages) const {
    return resident_ && std::ranges::all_of(pages, [this](std::int64_t page) {
             return page >= 0 && static_cast<std::uint64_t>(page) < page_count_;
           });
  }
  // Written by the schedule stream, and kept: somebody may want them until the end.
  stream::DevicePages on_device(std::vector<std::int64_t> pages) {
    const std::lock_guard lock(mutex_);
    // The stream may get to it when a cancelled ticket, and the engine, are long gone.
    const auto first_slots = std::make_shared<std::vector<std::int64_t>>(pages.size(), -1);
    arrays_.push_back(first_slots);
    device_->launch(schedule_, [first_slots, pages] {
      for (std::size_t i = 0; i < pages.size(); ++i) (*first_slots)[i] = pages[i] * kTokens + 1;
    });
    return {first_slots->data(), pages.size(), kTokens};
  }

  static constexpr std::int64_t kTokens = 4;

  const std::shared_ptr<test::AsyncDevice> device_;
  const std::uint64_t page_count_;
  const bool resident_;
  stream::StreamHandle forward_ = nullptr;
  stream::StreamHandle schedule_ = nullptr;
  std::mutex mutex_;
  std::vector<std::shared_ptr<std::vector<std::int64_t>>> arrays_;  // mutex_
  std::unique_ptr<stream::StreamEngine> engine_;
};

}  // namespace

// Engines take turns between few slots and many, between kernels and batches of spans, and between
// indices of the host and of the device.
std::unique_ptr<CopyEngine> make_cpu_engine(std::shared_ptr<Pool> pool,
                                            std::uint32_t namespace_index, BlockLayout layout,
                                            const EngineOptions& options) {
  static std::atomic<unsigned> made{0};
  const unsigned kind = made.fetch_add(1);
  stream::StreamOptions wanted;
  wanted.queues = options;
  wanted.staging_bytes = std::uint64_t{4} << 20;
  wanted.index_rows = 7;
  wanted.registered_piece_bytes = kind % 5 < 3 ? std::uint64_t{1} << 30 : 0;
  wanted.staging_slots = kind % 3 == 0 ? 5 : 0;
  wanted.spill_path = kind % 2 == 0 ? stream::CopyPath::kernel : stream::CopyPath::batch;
  wanted.load_path = kind / 2 % 2 == 0 ? stream::CopyPath::kernel : stream::CopyPath::batch;
  return std::make_unique<DrivenEngine>(std::move(pool), namespace_index, std::move(layout), wanted,
                                        kind % 4 < 2);
}

}  // namespace hpkv
