// The extension module hpkv_sglang._core. Each concept binds itself in its own file.
#include <nanobind/nanobind.h>

#include "bind/bind.h"

NB_MODULE(_core, module) {
  module.doc() = "The C++ core of hpkv_sglang: keys, the shared host pool, the copy engine.";
  // A server that exits with tickets alive has nothing to report: the pool outlives it by design.
  nanobind::set_leak_warnings(false);
  hpkv::bind::register_all(module);
}
