#include "disk/evictor.h"

#include "base/points.h"

namespace hpkv::disk {
namespace {

constexpr int kForgetTries = 10;
constexpr int kRemovalsAtOnce = 4;

}  // namespace

std::optional<std::uint32_t> Evictor::take_oldest(std::uint32_t places) {
  Catalog& catalog = *context_.catalog;
  // Another process may be faster with the one that was chosen: look again, but not for ever.
  for (int attempt = 0; attempt < 16; ++attempt) {
    std::optional<RegionInfo> oldest;
    for (std::uint32_t i = 0; i < context_.region_count(); ++i) {
      const RegionInfo info = catalog.region(i);
      if (info.state != RegionState::sealed || info.owned || info.places < places) continue;
      const auto rank = [](const RegionInfo& r) { return std::pair(r.live != 0, r.sequence); };
      if (!oldest || rank(info) < rank(*oldest)) oldest = info;
    }
    if (!oldest) return std::nullopt;
    if (catalog.claim(oldest->region, RegionState::sealed, RegionState::dropping)) {
      return oldest->region;
    }
  }
  return std::nullopt;
}

std::vector<DiskRef> Evictor::worth_carrying(std::uint32_t region) const {
  const Catalog& catalog = *context_.catalog;
  std::vector<DiskRef> refs;
  catalog.entries(region, refs);
  std::erase_if(refs, [&](const DiskRef& ref) {
    return !catalog.touched(ref) || context_.pool->lookup(std::span(&ref.key, 1)) == 1;
  });
  const std::size_t most = catalog.region(region).capacity / 2;
  if (refs.size() > most) refs.resize(most);
  return refs;
}

bool Evictor::finish(std::uint32_t region) {
  Catalog& catalog = *context_.catalog;
  bool forgotten = HPKV_BUG("reuse_before_forget");
  for (int i = 0; i < kForgetTries && !forgotten; ++i) forgotten = catalog.forget_region(region);
  const RegionState state = forgotten ? RegionState::free : RegionState::sealed;
  static_cast<void>(catalog.settle(region, RegionState::dropping, state));
  if (forgotten) context_.tally.regions_evicted.fetch_add(1, std::memory_order_relaxed);
  return forgotten;
}

bool Evictor::evict_oldest(std::uint32_t places) {
  const auto region = take_oldest(places);
  return region && finish(*region);
}

int Evictor::shrink() {
  int code = 0;
  for (int i = 0; i < kRemovalsAtOnce; ++i) {
    std::uint64_t available = 0;
    if (const int unknown = context_.available_bytes(available); unknown < 0) return unknown;
    if (available >= context_.grow_bytes()) context_.gives_back = false;
    if (available >= context_.spare_bytes()) return 0;
    if (!remove_one(code)) return code;
    context_.gives_back = true;
  }
  return code;
}

// Files of free regions first: they hold nothing.
bool Evictor::remove_one(int& code) {
  for (std::uint32_t i = 0; i < context_.region_count(); ++i) {
    const RegionInfo info = context_.catalog->region(i);
    if (info.state != RegionState::free || info.owned || !context_.files.exists(i)) continue;
    if (remove_file(i, RegionState::free, code)) return true;
  }
  const auto oldest = take_oldest();
  if (!oldest || !finish(*oldest)) return false;
  return remove_file(*oldest, RegionState::free, code);
}

bool Evictor::remove_file(std::uint32_t region, RegionState from, int& code) {
  Catalog& catalog = *context_.catalog;
  if (!catalog.claim(region, from, RegionState::dropping)) return false;
  bool forgotten = HPKV_BUG("reuse_before_forget");
  for (int i = 0; i < kForgetTries && !forgotten; ++i) forgotten = catalog.forget_region(region);
  code = 0;
  if (forgotten) {
    code = context_.files.remove(region);
    if (code < 0) {
      context_.tally.failed(context_.tally.write_errors, "remove", region, code);
    } else {
      context_.tally.regions_removed.fetch_add(1, std::memory_order_relaxed);
    }
  }
  const RegionState state = forgotten ? RegionState::free : RegionState::sealed;
  static_cast<void>(catalog.settle(region, RegionState::dropping, state));
  return forgotten && code == 0;
}

}  // namespace hpkv::disk
