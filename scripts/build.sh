#!/usr/bin/env bash
# Installs this working tree into the virtual environment (editable), building the C++ extension, with
# the device of threads that our tests run on and, to be quick, without the CUDA engine (HPKV_CUDA=ON
# or AUTO for one that has it).
# Python changes need no new build; C++ and packaging changes are found by their hash. The build
# folder is kept, so a rebuild compiles only what changed.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/venv.sh

venv="${HPKV_VENV:-.venv}"
python="$PWD/$venv/bin/python"
[ "${venv#/}" = "$venv" ] || python="$venv/bin/python"
export PATH="${python%/*}:$PATH"
export HPKV_RIG=ON HPKV_CUDA="${HPKV_CUDA:-OFF}"

sources() {
  echo "$PWD $HPKV_CUDA"
  find csrc CMakeLists.txt pyproject.toml testing/pyproject.toml -type f \( -not -path 'csrc/tests/*' -o -name 'async_device.*' \) \
    | LC_ALL=C sort | xargs sha256sum
}

install_here() {
  "$python" -m pip --disable-pip-version-check install -v --no-deps --no-build-isolation -e "$@"
}

wanted=$(sources | sha256sum | cut -c1-16)
stamp="$venv/hpkv-build"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] \
  && "$python" -c 'import hpkv_sglang._core' 2>/dev/null; then
  exit 0
fi
. scripts/step.sh
step "build the C++ extension and install the plugin" install_here .
if ! "$python" -c 'import hpkv_testing' 2>/dev/null || [ "$(head -n 1 "$stamp.tree" 2>/dev/null)" != "$PWD" ]; then
  step "install the test distribution" install_here ./testing
fi
echo "$PWD" >"$stamp.tree"
echo "$wanted" >"$stamp"
