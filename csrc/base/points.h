// Named points at which the crash rig stops or kills the process, and the switches of its seeded
// bugs. They exist only in the rig's own build (HPKV_TEST_POINTS); the product compiles them to
// nothing.
#pragma once

#ifdef HPKV_TEST_POINTS

namespace hpkv::points {

// Called at a point. Acts when the point is armed (tests/crash explains how), else returns.
void hit(const char* name) noexcept;

// Whether the seeded bug of this name is switched on.
[[nodiscard]] bool bug(const char* name) noexcept;

}  // namespace hpkv::points

#define HPKV_POINT(name) ::hpkv::points::hit(name)
#define HPKV_BUG(name) ::hpkv::points::bug(name)

#else

#define HPKV_POINT(name) static_cast<void>(0)
#define HPKV_BUG(name) false

#endif
