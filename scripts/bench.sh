#!/usr/bin/env bash
# Runs every benchmark, or those named: scripts/bench.sh [name...] (a name is a file of benchmarks/).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh

python="${HPKV_VENV:-.venv}/bin/python"
for script in $(grep -l '__main__' benchmarks/*.py); do
  name=$(basename "$script" .py)
  if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
  echo "== $name"
  "$python" "$script"
done
