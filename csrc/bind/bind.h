// One function per binding file, called once when the module is imported, in order of dependence.
#pragma once

#include <nanobind/nanobind.h>

namespace hpkv::bind {

void bind_keys(nanobind::module_& module);
void bind_pool(nanobind::module_& module);
void bind_store(nanobind::module_& module);
void bind_copy(nanobind::module_& module);
void bind_stream(nanobind::module_& module);
void bind_rig(nanobind::module_& module);

inline void register_all(nanobind::module_& module) {
  bind_keys(module);
  bind_pool(module);
  bind_store(module);
  bind_copy(module);
  bind_stream(module);
  bind_rig(module);
}

}  // namespace hpkv::bind
