// In the place of rig.cc where the module is built without the device for tests.
#include "bind/bind.h"

namespace hpkv::bind {

void bind_rig(nanobind::module_& /*module*/) {}

}  // namespace hpkv::bind
