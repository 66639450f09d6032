// The extension module hpkv_sglang._core. Each concept binds itself in its own file.
#include <nanobind/nanobind.h>

#include "bind/bind.h"

NB_MODULE(_core, module) {
  module.doc() = "The C++ core of hpkv_sglang: keys, the shared host pool, the copy engine.";
  hpkv::bind::register_all(module);
}
