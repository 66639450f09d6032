// One function per binding file, called once when the module is imported, in order of dependence.
#pragma once

#include <nanobind/nanobind.h>

namespace hpkv::bind {

void bind_keys(nanobind::module_& module);
void bind_pool(nanobind::module_& module);
void bind_copy(nanobind::module_& module);

inline void register_all(nanobind::module_& module) {
#ifdef HPKV_BIND_KEYS
  bind_keys(module);
#endif
#ifdef HPKV_BIND_POOL
  bind_pool(module);
#endif
#ifdef HPKV_BIND_COPY
  bind_copy(module);
#endif
}

}  // namespace hpkv::bind
