#!/usr/bin/env bash
# Builds the library for other processors and systems, and runs its tests where they can run here.
#
#   tools/cross.sh [aarch64 | riscv64 | musl | macos | windows]...      default: all of them
#
# Debian's g++ builds for aarch64 and riscv64; zig's clang, which brings C and C++ libraries, for the
# others. QEMU runs what this machine cannot; QEMU_CPU names the processor, for example cortex-a57.
# Programs for musl (x86-64) are static; the tool is built too, and tests of AVX run. Each build is
# in build/cross/NAME, with its log. The last lines are a table; the status is 1 where something
# failed that is said to work. Windows is not supported: the table counts the files that compile.
set -euo pipefail
cd "$(dirname "$0")/.."

suites='semantics|problem|plan|rows|reference|lanes|forcing|work|threads|fuzz|c_api_test'
suites+='|.*_(scalar|neon|avx2|avx512)'
file_suites='cuda_(missing|disk|trust)'
fake_suites='cuda|steady|cuda_(older|broken|uncompiled)' # load a driver, which static programs cannot
timed_suites='cuda_plan'                                # fails where QEMU makes planning slow
row='%-9s %-16s %-9s %-19s %s\n'

# The header-only libraries of the tool and the tests, apart from this machine's other headers.
link_headers() {
  local library
  mkdir -p build/cross/include
  for library in CLI doctest fmt nlohmann; do
    ln -sfn "/usr/include/$library" "build/cross/include/$library"
  done
}

# zig_compiler NAME TARGET: makes build/cross/NAME-cc, -c++, -ar, -ranlib: the tools as programs.
# Without a level of optimisation zig would build its libraries once more, for debugging.
zig_compiler() {
  local tool options zig
  zig=$(build/venv/bin/python -c 'import ziglang; print(ziglang.__path__[0] + "/zig")')
  for tool in cc c++ ar ranlib; do
    options=
    if [[ $tool == c* ]]; then options="-target $2 -O2"; fi
    printf '#!/bin/sh\nexec "%s" %s %s "$@"\n' "$zig" "$tool" "$options" >"build/cross/$1-$tool"
    chmod +x "build/cross/$1-$tool"
  done
}

# configure NAME SYSTEM PROCESSOR CC CXX OPTION...
configure() {
  local headers=$PWD/build/cross/include
  cmake -S . -B "build/cross/$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DREGARD_BUILD_CLI=OFF \
    -DCMAKE_SYSTEM_NAME="$2" -DCMAKE_SYSTEM_PROCESSOR="$3" -DCMAKE_C_COMPILER="$4" \
    -DCMAKE_CXX_COMPILER="$5" -DCMAKE_CXX_FLAGS="-isystem $headers" \
    -DREGARD_DOCTEST_INCLUDE="$headers" -DREGARD_FMT_INCLUDE_DIR="$headers" "${@:6}"
}

# configure_zig NAME SYSTEM PROCESSOR TARGET OPTION...
configure_zig() {
  local tools=$PWD/build/cross/$1
  zig_compiler "$1" "$4"
  configure "$1" "$2" "$3" "$tools-cc" "$tools-c++" -DCMAKE_AR="$tools-ar" \
    -DCMAKE_RANLIB="$tools-ranlib" "${@:5}"
}

configure_target() {
  case $1 in
    aarch64 | riscv64) configure "$1" Linux "$1" "$1-linux-gnu-gcc" "$1-linux-gnu-g++" \
      -DREGARD_BUILD_TESTS=ON -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-$1;-L;/usr/$1-linux-gnu" ;;
    musl) configure_zig "$1" Linux x86_64 x86_64-linux-musl -DREGARD_BUILD_TESTS=ON \
      -DREGARD_BUILD_CLI=ON -DCMAKE_EXE_LINKER_FLAGS=-static -DCMAKE_CROSSCOMPILING_EMULATOR=env ;;
    macos) configure_zig "$1" Darwin arm64 aarch64-macos ;;
    windows) configure_zig "$1" Windows x86_64 x86_64-windows-gnu ;;
    *) echo "usage: tools/cross.sh [aarch64 | riscv64 | musl | macos | windows]..." >&2; exit 2 ;;
  esac
}

# run_tests NAME: "100% tests passed, 0 tests failed out of 14", or what did not pass.
run_tests() {
  local which=$suites
  case $1 in
    musl) which+="|$file_suites|$timed_suites" ;;
    riscv64) which+="|$file_suites|$fake_suites" ;;
  esac
  ctest --test-dir "build/cross/$1" -R "^($which)\$" --output-on-failure -j "$(nproc)" 2>&1 |
    tee -a "build/cross/$1.log" | grep 'tests passed'
}

# forced NAME: the instruction sets whose kernels the tests force.
forced() {
  ctest --test-dir "build/cross/$1" -N -R "^($suites)\$" | sed -n 's/.*: kernels_//p' | paste -sd ' '
}

# compiled NAME: "N of M files", by the objects of the library that are there.
compiled() {
  local objects all
  all=$(ninja -C "build/cross/$1" -t targets all | grep -c '^CMakeFiles/regard_objects.dir/.*: CXX_')
  objects=$(find "build/cross/$1/CMakeFiles/regard_objects.dir" -name '*.o*' -not -name '*.d' | wc -l)
  echo "$objects of $all files"
}

# one NAME: a line of the table.
one() {
  local name=$1 log=build/cross/$1.log linked=no tests='not run' isas=- status=0 programs=()
  case $name in
    aarch64) programs=(regard_tests c_api_test) ;;
    riscv64) programs=(regard_tests regard_cuda_tests c_api_test) ;;
    musl) programs=(regard_cli regard_tests regard_cuda_tests c_api_test) ;;
  esac
  configure_target "$name" >"$log" 2>&1 || { tail -n 20 "$log" >&2; return 1; }
  if cmake --build "build/cross/$name" --target regard_static regard_shared "${programs[@]}" \
    -- -k 0 >>"$log" 2>&1; then
    linked=yes
  else
    status=1
  fi
  if [[ " ${programs[*]} " == *regard_tests* ]]; then
    tests=$(run_tests "$name") || true
    isas=$(forced "$name")
    [[ $tests == 100%* ]] || status=1
  fi
  printf "$row" "$name" "$(compiled "$name")" "$linked" "$isas" "$tests" >>build/cross/table
  [[ $name == windows ]] || return "$status"
}

tools/setup.sh cross
mkdir -p build/cross
rm -f build/cross/table
link_headers
targets=("$@")
((${#targets[@]})) || targets=(aarch64 riscv64 musl macos windows)
failed=0
for target in "${targets[@]}"; do
  one "$target" || failed=1
done
printf "\n$row" target compiled linked kernels tests
if [[ -f build/cross/table ]]; then cat build/cross/table; fi
exit "$failed"
