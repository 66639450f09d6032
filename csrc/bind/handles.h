// What the Python classes of one binding file hold where another binding file needs it.
//
// The pool is shared by reference count among the Python objects, leases and engines, and the count
// is the core's own: an engine thread that drops the last lease never needs the GIL.
#pragma once

#include <memory>
#include <vector>

#include "base/key.h"
#include "shm/lease.h"
#include "shm/pool.h"

namespace hpkv::bind {

// Python's Pool.
struct PoolHandle {
  std::shared_ptr<Pool> pool;
};

// Python's Lease; empty once an engine took it over.
struct LeaseHandle {
  Lease lease;
};

// Python's KeyBatch.
struct KeyBatch {
  std::vector<Key> keys;
};

}  // namespace hpkv::bind
