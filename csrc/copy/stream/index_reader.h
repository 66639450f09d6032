// Brings page indices that only the device has to the host: behind the work that chooses them, on a
// stream of its own, so that nothing waits for the copies of pages.
//
// Invariant: when read() returns, nothing of ours reads the caller's array any more.
// Threads: one, an engine thread: it waits for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy/stream/copy_stream.h"
#include "copy/stream/device.h"
#include "copy/stream/health.h"

namespace hpkv::stream {

// Indices that only the device has: of each page's first token, in device memory. They stay valid
// and unchanged until the ticket is done.
struct DevicePages {
  const std::int64_t* first_slots = nullptr;
  std::size_t count = 0;
  std::uint64_t page_size = 1;  // tokens
};

class IndexReader {
 public:
  // Longer arrays come in pieces of `rows`. Throws Error{system} when the device refuses.
  IndexReader(std::shared_ptr<Device> device, std::shared_ptr<Health> health, EventPool& events,
              std::size_t rows);
  ~IndexReader();
  IndexReader(const IndexReader&) = delete;
  IndexReader& operator=(const IndexReader&) = delete;

  // The page of each index, in order; -1 for one that is in no page of [0, page_count). Runs behind
  // `after` (null: at once), which stays the caller's. False when the device failed.
  [[nodiscard]] bool read(EventHandle after, const DevicePages& pages, std::uint64_t page_count,
                          std::vector<std::int64_t>& out);

 private:
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Health> health_;
  EventPool& events_;
  const std::size_t rows_;
  CopyStream stream_;
  std::byte* memory_ = nullptr;  // pinned
};

}  // namespace hpkv::stream
