#!/usr/bin/env bash
# ruff (rules and format), mypy --strict on the package, clang-format. Runs all, then fails if one did.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh
. scripts/step.sh

bin="${HPKV_VENV:-.venv}/bin"
bad=0
step "ruff check" "$bin/ruff" check . || bad=1
step "ruff format" "$bin/ruff" format --diff . || bad=1
step "mypy --strict" "$bin/mypy" || bad=1
mapfile -t cpp < <(git ls-files --cached --others --exclude-standard -- 'csrc/*.cc' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'testing/*.c')
step "clang-format" "$bin/clang-format" --dry-run -Werror "${cpp[@]}" || bad=1
exit $bad
