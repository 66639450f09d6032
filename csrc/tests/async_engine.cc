// Linked in the place of the CPU engine's factory: the tests of the CPU engine, which is the
// specification, run against the stream engine on a device of threads. They know no device events,
// so every submission here gets one of a stream that dawdles, as a forward pass does.
#include <atomic>
#include <memory>
#include <utility>

#include "base/error.h"
#include "copy/engine.h"
#include "copy/stream/engine.h"
#include "tests/async_device.h"
#include "tests/check.h"

namespace hpkv {
namespace {

class DrivenEngine final : public CopyEngine {
 public:
  DrivenEngine(std::shared_ptr<Pool> pool, std::uint32_t namespace_index, BlockLayout layout,
               const stream::StreamOptions& options)
      : device_(std::make_shared<test::AsyncDevice>()) {
    CHECK(device_->make_stream(false, forward_).ok());
    engine_ = std::make_unique<stream::StreamEngine>(device_, std::move(pool), namespace_index,
                                                     std::move(layout), options);
  }
  ~DrivenEngine() override {
    close();
    const bool sound = engine_->check().empty() && !engine_->poisoned();
    engine_.reset();
    device_->destroy_stream(forward_);
    // What the engine took from the device it has given back.
    if (!sound || device_->live_events() != 0 || device_->live_allocations() != 0) std::abort();
  }
  DrivenEngine(const DrivenEngine&) = delete;
  DrivenEngine& operator=(const DrivenEngine&) = delete;

  std::shared_ptr<SpillTicket> spill(std::vector<Key> keys, std::vector<std::int64_t> pages,
                                     DeviceEvent after, Turn turn) override {
    const Recorded event(*this, after);
    return engine_->spill(std::move(keys), std::move(pages), {event.handle}, turn);
  }
  std::shared_ptr<LoadTicket> load(Lease lease, std::vector<std::int64_t> pages, DeviceEvent after,
                                   std::shared_ptr<const BlockSource> source) override {
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

  const std::shared_ptr<test::AsyncDevice> device_;
  stream::StreamHandle forward_ = nullptr;
  std::unique_ptr<stream::StreamEngine> engine_;
};

}  // namespace

// Engines take turns between few slots and many, and between kernels and batches of spans.
std::unique_ptr<CopyEngine> make_cpu_engine(std::shared_ptr<Pool> pool,
                                            std::uint32_t namespace_index, BlockLayout layout,
                                            const EngineOptions& options) {
  static std::atomic<unsigned> made{0};
  const unsigned kind = made.fetch_add(1);
  stream::StreamOptions wanted;
  wanted.queues = options;
  wanted.staging_bytes = std::uint64_t{4} << 20;
  wanted.staging_slots = kind % 3 == 0 ? 5 : 0;
  wanted.spill_path = kind % 2 == 0 ? stream::CopyPath::kernel : stream::CopyPath::batch;
  wanted.load_path = kind / 2 % 2 == 0 ? stream::CopyPath::kernel : stream::CopyPath::batch;
  return std::make_unique<DrivenEngine>(std::move(pool), namespace_index, std::move(layout),
                                        wanted);
}

}  // namespace hpkv
