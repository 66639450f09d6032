#!/usr/bin/env bash
# What only a GPU can confirm, on a bare machine: one NVIDIA GPU, python3 (3.11 or later) with torch,
# nvcc, cmake, a C++20 compiler and 4 GiB of /dev/shm. Needs no network, no SGLang and no virtual environment.
#
#   scripts/device_check.sh [all|checks|sanitizer]     default: all, one part after the other
#
#   checks      build the module with CUDA for this GPU, run tests/cuda and benchmarks/cuda_copies.py
#   sanitizer   compute-sanitizer's memcheck on cuda_smoke, a C++ program without torch. Its racecheck
#               looks at shared memory, of which the kernel has none; nothing of it sees the order of
#               streams: that is what tests/cuda is for
#
# A part is cut off after HPKV_DEVICE_LIMIT_S (default 235) seconds. One short table comes last.
#   HPKV_PYTHON   the interpreter (default python3)
#   HPKV_WHEELS   a folder of wheels, for what requirements/device.txt lists and is not there
#   OUT           a folder for the results: device_check.json and the logs
set -euo pipefail
cd "$(dirname "$0")/.."

chosen="${1:-all}"
case "$chosen" in
  all | checks | sanitizer) ;;
  *) echo "usage: scripts/device_check.sh [all|checks|sanitizer]" >&2; exit 2 ;;
esac
work=build/device
export HPKV_LOGS="$work/logs"
rm -rf "$HPKV_LOGS" "$work"/*.xml "$work"/*.json "$work"/outcomes
mkdir -p "$work"
. scripts/step.sh
python="${HPKV_PYTHON:-python3}"
tools="$PWD/$work/tools"
[ ! -d /usr/local/cuda/bin ] || PATH="$PATH:/usr/local/cuda/bin"
programs=$("$python" -c 'import os, sys; print(os.path.dirname(sys.executable))')
export PATH="$tools/bin:$programs:$PATH" PYTHONPATH="$PWD/$work/site:$tools"

# One step of a part: an outcome for the table, and no end to the others.
failed=0
note() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$work/outcomes"; }
time_left() { echo $((part_begin + ${HPKV_DEVICE_LIMIT_S:-235} - SECONDS)); }
checked() {
  local label="$1" begin=$SECONDS rc=0 left
  shift
  left=$(time_left)
  if [ $left -le 0 ]; then
    echo "$label: no time is left for it"
    rc=124
  else
    # A function runs here and not in a program of its own, so the limit is put on what it starts.
    limit=$left HPKV_LOG_TAIL=80 step "$label" "$@" || rc=$?
  fi
  if [ $rc -eq 0 ]; then
    note "$label" ok $((SECONDS - begin))
  else
    note "$label" "FAILED ($rc)" $((SECONDS - begin))
    failed=1
  fi
  return $rc
}
limited() { timeout --kill-after=5 "$limit" "$@"; }
skipped() {
  echo "SKIPPED: $1: $2"
  note "$1" "SKIPPED: $2" 0
}

# ---- what the machine must have ----

# Names of requirements/device.txt that are not here. Of two of them a program will do.
missing_tools() {
  "$python" - requirements/device.txt <<'PY'
import re, shutil, sys
from importlib.metadata import PackageNotFoundError, version

for line in open(sys.argv[1], encoding="utf-8"):
    name = re.split(r"[#>\s]", line.strip(), maxsplit=1)[0]
    if not name or (name in ("cmake", "ninja") and shutil.which(name)):
        continue
    try:
        version(name)
    except PackageNotFoundError:
        print(name)
PY
}

bring_tools() {
  local missing
  mapfile -t missing < <(missing_tools)
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ -z "${HPKV_WHEELS:-}" ]; then
    echo "not installed here: ${missing[*]}. Install them, or name a folder that holds their wheels:" \
      "HPKV_WHEELS=FOLDER scripts/device_check.sh" >&2
    return 1
  fi
  "$python" -m pip --disable-pip-version-check install -q --no-index -f "$HPKV_WHEELS" --no-deps \
    --upgrade --target "$tools" "${missing[@]}"
}

# The GPU's architecture as nvcc names it, such as 90; an error that says what is not there.
gpu_architecture() {
  "$python" - <<'PY'
import sys

if sys.version_info < (3, 11):
    sys.exit("this Python is older than 3.11: name another one with HPKV_PYTHON")
try:
    import torch
except ImportError:
    sys.exit("this Python has no torch: name another one with HPKV_PYTHON")
if not torch.cuda.is_available():
    sys.exit("torch finds no CUDA device here: nothing can be checked")
print("{}{}".format(*torch.cuda.get_device_capability(0)))
PY
}

# ---- checks ----

build_module() {
  rm -rf "$work/site"
  limited "$python" -m pip --disable-pip-version-check install -v --no-index --no-deps \
    --no-build-isolation --target "$work/site" -C "build-dir=$work/module" \
    -C cmake.define.HPKV_CUDA=ON -C "cmake.define.HPKV_CUDA_ARCHITECTURES=$architecture-real" .
}

# -P: the package under test is the one just built and not the folder of its sources.
run_tests() {
  HPKV_GPU_REQUIRED=1 limited "$python" -P -m pytest tests/cuda -q -p no:cacheprovider \
    --durations=10 --junitxml="$work/tests.xml"
}

run_benchmark() {
  limited "$python" benchmarks/cuda_copies.py --json >"$work/benchmark.json"
}

checks() {
  part_begin=$SECONDS
  checked "build the module with CUDA" build_module || return 0
  checked "tests on the GPU" run_tests || true
  checked "benchmark" run_benchmark || true
}

# ---- sanitizer ----

build_smoke() {
  limited cmake -S . -B "$work/smoke" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHPKV_TESTS=ON \
    -DHPKV_WERROR=OFF -DHPKV_CUDA=ON "-DHPKV_CUDA_ARCHITECTURES=$architecture-real" \
    "-DCMAKE_RUNTIME_OUTPUT_DIRECTORY=$PWD/$work/smoke/bin" \
    && limited cmake --build "$work/smoke" --target cuda_smoke --parallel
}

# Some drivers and virtual machines do not let it look at the device.
sanitizer_is_refused() {
  local said left
  left=$(time_left)
  [ "$left" -gt 0 ] || return 1
  said=$(timeout --kill-after=5 $((left < 60 ? left : 60)) \
    compute-sanitizer --tool memcheck "$work/smoke/bin/cuda_smoke" 2>&1 || true)
  [[ "$said" == *"Device not supported"* ]]
}

sanitize() { limited compute-sanitizer --tool memcheck --error-exitcode 9 "$work/smoke/bin/cuda_smoke"; }

sanitizer() {
  local reason=""
  part_begin=$SECONDS
  checked "build cuda_smoke" build_smoke || return 0
  checked "cuda_smoke by itself" limited "$work/smoke/bin/cuda_smoke" || return 0
  if ! command -v compute-sanitizer >/dev/null; then
    reason="it is not installed here"
  elif sanitizer_is_refused; then
    reason="it does not support this device or its driver"
  fi
  if [ -n "$reason" ]; then
    skipped "compute-sanitizer memcheck" "$reason"
  else
    checked "compute-sanitizer memcheck" sanitize || true
  fi
}

# ---- the end ----

# The table, and device_check.json.
summary() {
  "$python" - "$work" <<'PY'
import json, subprocess, sys, xml.etree.ElementTree as xml
from pathlib import Path

work = Path(sys.argv[1])
rows = [line.split("\t") for line in (work / "outcomes").read_text("utf-8").splitlines()]
found = {"steps": [{"step": s, "outcome": o, "seconds": int(t)} for s, o, t in rows]}
query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
try:
    done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    found["gpu"] = done.stdout.strip()
except (OSError, subprocess.TimeoutExpired) as error:
    found["gpu"] = f"nvidia-smi: {error}"
print(f"\n{found['gpu']}")
for step, outcome, seconds in rows:
    print(f"  {step:<44} {seconds:>4} s  {outcome}")
if (work / "tests.xml").exists():
    suite = xml.parse(work / "tests.xml").getroot().find("testsuite")
    kinds = ("tests", "failures", "errors", "skipped")
    found["tests"] = {kind: int(suite.get(kind, 0)) for kind in kinds}
    found["failed"] = [
        case.get("name") for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    print("  " + ", ".join(f"{count} {kind}" for kind, count in found["tests"].items()))
    for name in found["failed"][:20]:
        print(f"  FAILED {name}")
text = (work / "benchmark.json").read_text("utf-8") if (work / "benchmark.json").exists() else ""
if text.strip():
    found["benchmark"] = json.loads(text.splitlines()[-1])
    print(f"\n{found['benchmark']['question']} {found['benchmark'].get('skipped', '')}")
    for row in found["benchmark"]["rows"]:
        spread = f"{row['low']:.3g} - {row['high']:.3g}"
        print(f"  {row['name']:<44} {row['median']:>8.3g} {row['unit']:<11} {spread:<16} {row['aim']}")
(work / "device_check.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
PY
}

bring_tools
architecture=$(gpu_architecture)
[ "$chosen" = sanitizer ] || checks
[ "$chosen" = checks ] || sanitizer
summary
if [ -n "${OUT:-}" ]; then
  mkdir -p "$OUT"
  cp "$work/device_check.json" "$OUT"
  cat "$HPKV_LOGS"/*.log >"$OUT/device_check.log"
fi
exit $failed
