"""Sizes, environment access and dependencies of the C++ sources."""

from collections.abc import Callable

import pytest
from cpp_rules import Body, bodies, dependency_findings, environment_findings, size_findings
from repository import Finding, allowed_exceptions, source_of, tracked_files, verdict

SUFFIXES = (".cc", ".h", ".cu", ".cuh")
Rule = Callable[[str, str], list[Finding]]


def problems(rule: Rule, names: tuple[str, ...], paths: list[str]) -> list[str]:
    assert paths, "no file to look at: the rule would be blind"
    findings = [f for path in paths for f in rule(path, source_of(path))]
    return verdict(names, findings, allowed_exceptions(*SUFFIXES))


def core() -> list[str]:
    paths = tracked_files(*SUFFIXES, under="csrc")
    return [p for p in paths if not p.startswith(("csrc/tests/", "csrc/bind/"))]


def test_cpp_files_functions_and_parameter_lists_stay_small() -> None:
    paths = tracked_files(*SUFFIXES, under="csrc")
    rules = ("file_lines", "function_lines", "parameters")
    assert problems(size_findings, rules, paths) == []


def test_functions_are_found_in_every_shape_clang_format_writes() -> None:
    source = """\
#define MACRO(x) if (x) {
namespace a {
namespace {
// int commented(int a) {
constexpr int kTable[] = {1, 2};
int free(int a, std::map<int, int> b) noexcept { return a; }
}  // namespace
class C : public D {
 public:
  explicit C(int a)
      : a_(a), b_{a} {
    if (a) {
    }
  }
  ~C() = default;
  [[nodiscard]] bool operator==(const C& other) const { return f({1}, [&](int x) { return x; }); }

 private:
  int a_{0};
  std::array<int, 2> b_ = {1, 2};
};
template <typename T>
std::vector<T> C::many(void (*f)(int, int),
                       int b = g(1, 2)) const {
  const char* s = "}";
  switch (b) { case 1: { break; } }
}
struct E { int x = 0; };
enum class F : int { one, two };
}  // namespace a
"""
    assert list(bodies(source)) == [
        Body("free", 6, 1, 2),
        Body("C", 10, 5, 1),
        Body("operator==", 16, 1, 1),
        Body("C::many", 22, 6, 2),
    ]


def test_the_size_rules_see_an_oversized_file_function_and_parameter_list() -> None:
    body = "  x();\n" * 59
    source = f"void f(int a, int b, int c, int d, int e, int f, int g) {{\n{body}}}\n" + "\n" * 440
    found = [(f.rule, f.place, f.value) for f in size_findings("m.cc", source)]
    assert found == [
        ("file_lines", "m.cc", 501),
        ("function_lines", "m.cc:f", 61),
        ("parameters", "m.cc:f", 7),
    ]


def test_the_size_rules_accept_exactly_the_caps() -> None:
    body = "  x();\n" * 58
    source = f"void f(int a, int b, int c, int d, int e, int f) {{\n{body}}}\n" + "\n" * 440
    assert size_findings("m.cc", source) == []


def test_the_core_never_reads_the_environment() -> None:
    paths = [p for p in tracked_files(*SUFFIXES, under="csrc") if "csrc/tests/" not in p]
    assert problems(environment_findings, ("environment",), paths) == []


@pytest.mark.parametrize("call", ['std::getenv("A")', "secure_getenv(name)", "environ"])
def test_the_environment_rule_sees_every_way_in(call: str) -> None:
    assert environment_findings("m.cc", f"auto x = {call};") != []
    assert environment_findings("m.cc", f"// auto x = {call};\n") == []


def test_the_core_knows_neither_python_nor_torch() -> None:
    assert problems(dependency_findings, ("core_dependency",), core()) == []


@pytest.mark.parametrize("header", ["<Python.h>", "<nanobind/nanobind.h>", '"torch/extension.h"'])
def test_the_dependency_rule_sees_a_foreign_header(header: str) -> None:
    assert dependency_findings("m.h", f"#include {header}\n") != []
