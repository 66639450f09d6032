#!/usr/bin/env bash
# Every test, or with --fast those that start no server and take no sanitizer build (under 2 minutes).
#
#   scripts/test.sh [--fast] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

begin=$SECONDS
python="${HPKV_VENV:-.venv}/bin/python"
bin=$(realpath -m "${HPKV_VENV:-.venv}/bin")
export PATH="$bin:$PATH"  # tests call cmake and ninja by name
speed=full
if [ "${1:-}" = --fast ]; then
  speed=fast
  shift
fi

# When the user selects tests, a part of the suite with none of them is no failure (pytest exit code 5).
run_pytest() {
  local rc=0
  "$python" -m pytest -q "$@" || rc=$?
  [ $rc -eq 5 ] && [ "$selected" = yes ] && rc=0
  return $rc
}
selected=$([ $# -gt 0 ] && echo yes || echo no)

scripts/build.sh
if [ $speed = fast ]; then
  [ $selected = yes ] || scripts/cpp_tests.sh fast
  echo "Python tests without a server"
  run_pytest -m "not server and not slow" "$@"
else
  # Side by side, for a server under test mostly waits or keeps one core: the C++ tests take what the
  # others leave, and two workers take one file of tests after the other, the long ones first.
  cpp_log=$(mktemp)
  trap 'rm -f "$cpp_log"' EXIT
  cpp_tests=""
  files=()
  if [ $selected = no ]; then
    files=(tests/e2e tests/regress tests/crash tests/cuda tests/model tests/style tests/unit)
    nice -n 5 scripts/cpp_tests.sh plain address thread cuda >"$cpp_log" 2>&1 &
    cpp_tests=$!
  fi
  failed=0
  echo "Python tests, two at a time (the C++ tests run beside them)"
  run_pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25 "${files[@]}" "$@" || failed=$?
  if [ -n "$cpp_tests" ]; then
    wait "$cpp_tests" || failed=$?
    cat "$cpp_log"
  fi
  [ $failed -eq 0 ] || exit $failed
fi
echo "All tests passed ($((SECONDS - begin)) s)"
