#include "shm/namespaces.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

namespace hpkv::shm {
namespace {

bool known(const NamespaceRecord& record) noexcept {
  // Acquire: partner of the release store in add(); the fields come first.
  return record.state.load(std::memory_order_acquire) ==
         static_cast<std::uint32_t>(NamespaceState::known);
}

bool in_use(const NamespaceRecord& record) noexcept {
  return std::any_of(record.users.begin(), record.users.end(), [](const AtomicU64& bits) {
    return bits.load(std::memory_order_relaxed) != 0;
  });
}

// Blocks of any state but free, here and on disk, by namespace; and ready ones here.
struct BlockCounts {
  std::array<std::uint64_t, kNamespaceCount> held{};
  std::array<std::uint64_t, kNamespaceCount> ready{};
};

BlockCounts count_blocks(const View& view) noexcept {
  BlockCounts counts;
  view.for_each_run([&](const Run& run) {
    for (std::uint64_t i = 0; i < run.geometry.block_count; ++i) {
      const Descriptor& block = view.descriptor(view.descriptor_offset(run, i));
      const BlockState state = BlockWord::state(block.word.load(std::memory_order_acquire));
      const std::uint32_t index = block.namespace_index.load(std::memory_order_relaxed);
      if (state == BlockState::free || index >= kNamespaceCount) continue;
      ++counts.held[index];
      if (state == BlockState::ready) ++counts.ready[index];
    }
    return true;
  });
  // After the pool: a block that went to disk meanwhile is seen there.
  for (std::uint32_t region = 0; region < view.regions(); ++region) {
    view.for_each_disk_entry(region, [&](std::uint64_t, const DiskEntry& entry) {
      const std::uint32_t index = entry.namespace_index.load(std::memory_order_relaxed);
      if (on_disk(entry.word.load(std::memory_order_acquire)) && index < kNamespaceCount)
        ++counts.held[index];
    });
  }
  return counts;
}

}  // namespace

std::optional<std::uint32_t> Namespaces::find(const NamespaceId& id) const noexcept {
  for (std::uint32_t i = 0; i < kNamespaceCount; ++i) {
    const NamespaceRecord& record = core_.view.name_space(i);
    if (known(record) && record.id == id) return i;
  }
  return std::nullopt;
}

std::optional<std::uint32_t> Namespaces::find_place() const {
  for (std::uint32_t i = 0; i < kNamespaceCount; ++i) {
    if (!known(core_.view.name_space(i))) return i;
  }
  const BlockCounts counts = count_blocks(core_.view);
  for (std::uint32_t i = 0; i < kNamespaceCount; ++i) {
    if (counts.held[i] == 0 && !in_use(core_.view.name_space(i))) return i;
  }
  return std::nullopt;
}

std::uint32_t Namespaces::add(const NamespaceId& id, std::span<const std::byte> text,
                              std::uint64_t block_bytes) {
  if (text.size() > sizeof(NamespaceRecord::text)) {
    throw Error(ErrorKind::argument, "add namespace: its descriptor has " +
                                         std::to_string(text.size()) + " bytes; at most " +
                                         std::to_string(sizeof(NamespaceRecord::text)) +
                                         " are kept: shorten it");
  }
  const std::uint64_t most = block_bytes_max(core_.super().pool_bytes);
  if (block_bytes == 0 || block_bytes > most) {
    throw Error(ErrorKind::size,
                "add namespace: a block has " + std::to_string(block_bytes) + " bytes; a pool of " +
                    std::to_string(core_.super().pool_bytes) + " bytes takes blocks of 1 to " +
                    std::to_string(most) +
                    ": use a larger pool (--hpkv-mem-pool-size) or a smaller --page-size");
  }
  const LockGuard layout(core_, core_.super().layout_lock, kOperatorWaitNs);
  if (!layout) {
    throw Error(ErrorKind::system,
                "add namespace: the pool's layout lock was not free in time; look for a stopped "
                "client (hpkv stat)");
  }
  std::optional<std::uint32_t> index = find(id);
  if (!index) {
    index = find_place();
    if (!index) {
      throw Error(ErrorKind::namespaces, "add namespace: all " + std::to_string(kNamespaceCount) +
                                             " are in use; drop one (hpkv clear --namespace)");
    }
    NamespaceRecord& record = core_.view.name_space(*index);
    record.state.store(static_cast<std::uint32_t>(NamespaceState::free), std::memory_order_release);
    record.id = id;
    record.block_bytes = block_bytes;
    record.text_bytes = static_cast<std::uint32_t>(text.size());
    record.text = {};
    if (!text.empty()) std::memcpy(record.text.data(), text.data(), text.size());
    record.state.store(static_cast<std::uint32_t>(NamespaceState::known),
                       std::memory_order_release);
  }
  NamespaceRecord& record = core_.view.name_space(*index);
  if (record.block_bytes != block_bytes) {
    throw Error(ErrorKind::namespaces,
                "add namespace: its blocks have " + std::to_string(block_bytes) +
                    " bytes, the pool knows it with " + std::to_string(record.block_bytes) +
                    "; the identity must say what differs");
  }
  record.users[core_.slot / 64].fetch_or(std::uint64_t{1} << (core_.slot % 64),
                                         std::memory_order_relaxed);
  return *index;
}

void Namespaces::leave(std::uint32_t index) noexcept {
  if (index >= kNamespaceCount) return;
  core_.view.name_space(index).users[core_.slot / 64].fetch_and(
      ~(std::uint64_t{1} << (core_.slot % 64)), std::memory_order_relaxed);
}

std::uint64_t Namespaces::block_bytes(std::uint32_t index) const noexcept {
  if (index >= kNamespaceCount || !known(core_.view.name_space(index))) return 0;
  return core_.view.name_space(index).block_bytes;
}

std::optional<NamespaceInfo> Namespaces::get(std::uint32_t index) const {
  if (index >= kNamespaceCount || !known(core_.view.name_space(index))) return std::nullopt;
  const NamespaceRecord& record = core_.view.name_space(index);
  const std::size_t text_bytes = std::min<std::size_t>(record.text_bytes, record.text.size());
  return NamespaceInfo{record.id,
                       std::string(reinterpret_cast<const char*>(record.text.data()), text_bytes),
                       record.block_bytes, 0};
}

std::vector<NamespaceInfo> Namespaces::list() const {
  const BlockCounts counts = count_blocks(core_.view);
  std::vector<NamespaceInfo> out;
  for (std::uint32_t i = 0; i < kNamespaceCount; ++i) {
    const NamespaceRecord& record = core_.view.name_space(i);
    if (!known(record)) continue;
    const std::size_t text_bytes = std::min<std::size_t>(record.text_bytes, record.text.size());
    out.push_back({record.id,
                   std::string(reinterpret_cast<const char*>(record.text.data()), text_bytes),
                   record.block_bytes, counts.ready[i]});
  }
  return out;
}

}  // namespace hpkv::shm
