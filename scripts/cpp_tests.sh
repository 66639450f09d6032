#!/usr/bin/env bash
# Builds and runs the C++ tests.
#
#   scripts/cpp_tests.sh [fast] [plain] [address] [thread] [cuda]     default: plain
#
# 'fast' is 'plain' without the tests labelled slow, 'address' is ASan with UBSan, 'thread' is TSan.
# 'cuda' compiles the CUDA engine for every architecture, warnings being errors, looks for its symbols
# and links a program with the CUDA runtime; it runs nothing. A sanitizer that the compiler does not
# bring, and CUDA without nvcc, are skipped with a notice.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/venv.sh
. scripts/step.sh

bin="${HPKV_VENV:-.venv}/bin"
[ "${bin#/}" != "$bin" ] || bin="$PWD/$bin"
export PATH="$bin:$PATH"

sanitizer_flag() {
  case "$1" in
    address) echo "-fsanitize=address,undefined" ;;
    thread) echo "-fsanitize=thread" ;;
  esac
}

# A program built with the sanitizer must also start: some kernels and containers forbid that.
sanitizer_works() {
  local folder rc=0
  folder=$(mktemp -d)
  printf 'int main() { return 0; }\n' >"$folder/probe.cc"
  "${CXX:-c++}" -std=c++20 "$(sanitizer_flag "$1")" "$folder/probe.cc" -o "$folder/probe" \
    && "$folder/probe" || rc=1
  rm -rf "$folder"
  return $rc
}

# Sanitizer builds are made for finding faults, not for speed: -O1 compiles in half the time.
configure() {
  local speed=(-DCMAKE_BUILD_TYPE=Release)
  [ -z "$2" ] || speed=(-DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1")
  cmake -S . -B "$1" -G Ninja -DHPKV_TESTS=ON "-DHPKV_SANITIZE=$2" "${speed[@]}"
}

# With the core of the plain build, which is there as a rule: it takes minutes to compile.
cuda_links() {
  local plain=build/cpp-plain
  (
    flock 9
    configure $plain ""
    cmake --build $plain --target hpkv_core
    "${CUDACXX:-nvcc}" --cudart static -o build/cpp-cuda/cuda_smoke "$@" $plain/csrc/libhpkv_core.a
  ) 9>$plain.lock
}

# A small toolkit brings no cuobjdump to look for the code of each architecture with: then it must
# have been asked for, in a build that succeeded.
cuda_compiles() {
  local folder=build/cpp-cuda smoke=csrc/tests/CMakeFiles/cuda_smoke.dir/cuda_smoke.cc.o
  local library architecture
  cmake -S . -B $folder -G Ninja -DHPKV_CUDA=ON -DHPKV_TESTS=ON -DCMAKE_BUILD_TYPE=Release
  cmake --build $folder --target hpkv_cuda $smoke
  library=$folder/csrc/libhpkv_cuda.a
  nm --demangle $library | grep -E ' T hpkv::cuda::make_device\('
  nm --demangle $library | grep -E 'copy_pages\(hpkv::stream::PageJobs\)'
  cuda_links $folder/$smoke $library
  if ! command -v cuobjdump; then
    for architecture in 'compute_80,code=\[sm_80\]' 'compute_90,code=\[sm_90\]' \
      'compute_100,code=\[sm_100\]' 'compute_100,code=\[compute_100\]'; do
      grep -m 1 -o "generate-code=arch=$architecture" $folder/build.ninja
    done
    return 0
  fi
  for architecture in 80 90 100; do
    cuobjdump --list-elf $library | grep "sm_$architecture"
  done
  cuobjdump --list-ptx $library | grep 'sm_100'
}

# Whoever asks for CUDA and has no nvcc is told where it was looked for.
no_nvcc_is_an_error() {
  local folder=build/cpp-no-nvcc said
  rm -rf $folder
  if said=$(CUDACXX=/nonexistent cmake -S . -B $folder -G Ninja -DHPKV_CUDA=ON 2>&1); then
    echo "it was configured"
    return 1
  fi
  echo "$said"
  said=$(tr -s '[:space:]' ' ' <<<"$said")  # cmake breaks lines where it likes
  [[ "$said" == *"CUDACXX names ('/nonexistent')"*"in PATH ("* ]]
}

for kind in "${@:-plain}"; do
  if [ "$kind" = cuda ]; then
    step "CUDA engine: without nvcc, an error says so" no_nvcc_is_an_error
    if command -v nvcc >/dev/null; then
      step "CUDA engine: sm_80, sm_90, sm_100, PTX; link" cuda_compiles
    else
      echo "SKIPPED: compiling the CUDA engine: nvcc is not in PATH"
    fi
    continue
  fi
  sanitize=""
  chosen=()
  if [ "$kind" = fast ]; then
    kind=plain
    chosen=(--label-exclude slow)
  fi
  if [ "$kind" != plain ]; then
    sanitize="$kind"
    if ! sanitizer_works "$kind" >/dev/null 2>&1; then
      echo "SKIPPED: C++ tests with the $kind sanitizer: ${CXX:-c++} cannot build or run it here"
      continue
    fi
  fi
  folder="build/cpp-$kind"
  mkdir -p build
  exec {lock}>"$folder.lock"  # the crash rig of the Python tests builds in the same folder
  flock "$lock"
  step "C++ tests ($kind): configure" configure "$folder" "$sanitize"
  step "C++ tests ($kind): build" cmake --build "$folder" --parallel "$(nproc)"
  exec {lock}>&-
  HPKV_LOG_TAIL=120 step "C++ tests ($kind): run" \
    ctest --test-dir "$folder" --parallel 2 --output-on-failure --no-tests=error --timeout 600 "${chosen[@]}"
done
