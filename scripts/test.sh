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
  [ $selected = yes ] || scripts/cpp_tests.sh plain address thread
  # Side by side: a server takes one core to start, and most of the other tests wait.
  beside=$(mktemp)
  trap 'rm -f "$beside"' EXIT
  run_pytest -m "not server" --durations=8 "$@" >"$beside" 2>&1 &
  without_server=$!
  echo "Python tests on the real server (those without one run beside them)"
  failed=0
  run_pytest -m server --durations=8 "$@" || failed=$?
  wait $without_server || failed=$?
  echo "Python tests without a server"
  cat "$beside"
  [ $failed -eq 0 ] || exit $failed
fi
echo "All tests passed ($((SECONDS - begin)) s)"
