#include "shm/transfer.h"

#include <string>

#include "base/crc32c.h"

namespace hpkv {

PutStatus put(Pool& pool, std::uint32_t namespace_index, const Key& key,
              std::span<const std::byte> payload) {
  if (pool.off()) return PutStatus::off;
  if (const std::uint64_t wanted = pool.block_bytes(namespace_index); payload.size() != wanted) {
    throw Error(ErrorKind::argument, "put: the payload has " + std::to_string(payload.size()) +
                                         " bytes, blocks of this namespace have " +
                                         std::to_string(wanted));
  }
  BlockRef block;
  switch (pool.reserve(namespace_index, key, block)) {
    case ReserveStatus::ok:
      pool.publish(block, copy_nt_crc32c(pool.payload(block), payload.data(), payload.size()));
      return PutStatus::stored;
    case ReserveStatus::present:
      return PutStatus::present;
    case ReserveStatus::full:
      return PutStatus::full;
    case ReserveStatus::busy:
      return PutStatus::busy;
    case ReserveStatus::off:
      return PutStatus::off;
  }
  return PutStatus::off;
}

bool verify(Pool& pool, const BlockRef& ref) noexcept {
  if (pool.verified(ref)) return true;
  const std::uint32_t epoch = pool.epoch();
  if (crc32c(std::span<const std::byte>(pool.payload(ref), ref.payload_bytes)) !=
      pool.checksum(ref)) {
    pool.condemn(ref);
    return false;
  }
  pool.mark_verified(ref, epoch);
  return true;
}

bool get(Pool& pool, const Key& key, std::span<std::byte> out) noexcept {
  BlockRef block;
  if (pool.pin(std::span(&key, 1), std::span(&block, 1)) != 1) return false;
  const bool good = block.payload_bytes == out.size() && verify(pool, block);
  if (good) {
    copy_nt(out.data(), pool.payload(block), out.size());
    pool.count_loaded(std::span(&block, 1));
  }
  pool.unpin(std::span(&block, 1));
  return good;
}

}  // namespace hpkv
