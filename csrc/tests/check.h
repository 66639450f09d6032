// The smallest test frame that does: TEST(name) { CHECK(...); } and one main per file.
// A failed CHECK throws, so the test ends and the next one runs; the exit status counts failures.
//   ./test_x            run all tests of the file
//   ./test_x part       run those whose name contains "part"
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace hpkv::test {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

inline void check(bool holds, const char* condition, const char* file, int line) {
  if (holds) return;
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + condition);
}

inline int run_all(int argc, char** argv) {
  int failed = 0;
  for (const Case& one : cases()) {
    if (argc > 1 && std::strstr(one.name, argv[1]) == nullptr) continue;
    try {
      one.body();
      std::printf("ok      %s\n", one.name);
    } catch (const std::exception& error) {
      std::printf("FAILED  %s\n        %s\n", one.name, error.what());
      ++failed;
    }
    std::fflush(stdout);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace hpkv::test

#define TEST(name)                                                         \
  static void test_##name();                                               \
  static const ::hpkv::test::Register register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition) ::hpkv::test::check((condition), #condition, __FILE__, __LINE__)

#define CHECK_THROWS(expression)                                             \
  do {                                                                       \
    bool thrown = false;                                                     \
    try {                                                                    \
      static_cast<void>(expression);                                         \
    } catch (const ::hpkv::Error&) {                                         \
      thrown = true;                                                         \
    }                                                                        \
    ::hpkv::test::check(thrown, "throws: " #expression, __FILE__, __LINE__); \
  } while (false)

#define TEST_MAIN \
  int main(int argc, char** argv) { return ::hpkv::test::run_all(argc, argv); }
