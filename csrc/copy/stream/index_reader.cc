#include "copy/stream/index_reader.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace hpkv::stream {
namespace {

std::int64_t page_of(std::int64_t first_slot, std::uint64_t page_size, std::uint64_t page_count) {
  if (first_slot < 0) return -1;
  const std::uint64_t page = static_cast<std::uint64_t>(first_slot) / page_size;
  return page < page_count ? static_cast<std::int64_t>(page) : -1;
}

}  // namespace

IndexReader::IndexReader(std::shared_ptr<Device> device, std::shared_ptr<Health> health,
                         EventPool& events, std::size_t rows)
    : device_(std::move(device)),
      health_(std::move(health)),
      events_(events),
      rows_(rows),
      // A few bytes that a whole request waits for.
      stream_(device_, health_, events_, true) {
  const Status status = device_->allocate_pinned(rows_ * sizeof(std::int64_t), memory_);
  if (!status.ok()) throw Error(ErrorKind::system, "copy engine: " + status.text());
}

IndexReader::~IndexReader() { device_->free_pinned(memory_); }

bool IndexReader::read(EventHandle after, const DevicePages& pages, std::uint64_t page_count,
                       std::vector<std::int64_t>& out) {
  out.clear();
  if (!stream_.run_after(after)) return false;
  while (out.size() < pages.count) {
    const std::size_t rows = std::min(rows_, pages.count - out.size());
    const Span span{memory_, reinterpret_cast<const std::byte*>(pages.first_slots + out.size()),
                    rows * sizeof(std::int64_t)};
    const bool copied =
        health_->check(device_->copy(stream_.handle(), Direction::to_host, {&span, 1}));
    const EventHandle event = stream_.mark();
    const bool passed = stream_.await(event);
    events_.give(event);
    if (!copied || !passed) return false;
    for (std::size_t row = 0; row < rows; ++row) {
      std::int64_t first_slot = 0;
      std::memcpy(&first_slot, memory_ + row * sizeof first_slot, sizeof first_slot);
      out.push_back(page_of(first_slot, pages.page_size, page_count));
    }
  }
  return true;
}

}  // namespace hpkv::stream
