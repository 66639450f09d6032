// Memory for O_DIRECT: aligned to 4 KiB, zeroed, freed at the end. Movable, not copyable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>

namespace hpkv::disk {

class AlignedBytes {
 public:
  // Throws std::bad_alloc.
  explicit AlignedBytes(std::uint64_t bytes)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kAlignment}))) {
    std::memset(data_.get(), 0, bytes);
  }

  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
  [[nodiscard]] std::uint64_t size() const noexcept { return bytes_; }
  [[nodiscard]] std::span<std::byte> span() const noexcept { return {data_.get(), bytes_}; }
  // A page of the buffer as the record that it holds: plain bytes, any of which may be there.
  template <typename Page>
  [[nodiscard]] Page& page(std::uint64_t index) const noexcept {
    return *reinterpret_cast<Page*>(data_.get() + index * sizeof(Page));
  }

 private:
  static constexpr std::size_t kAlignment = 4096;
  struct Free {
    void operator()(std::byte* data) const noexcept {
      ::operator delete(data, std::align_val_t{kAlignment});
    }
  };

  std::uint64_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace hpkv::disk
