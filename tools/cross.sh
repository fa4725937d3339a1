#!/usr/bin/env bash
# Builds the library for other processors and systems, and runs its tests where QEMU can.
#
#   tools/cross.sh [aarch64 | riscv64 | musl | macos | windows]...      default: all of them
#
# aarch64 is built by Debian's g++, the others by zig's clang, which brings their C and C++ libraries.
# Each build is in build/cross/NAME. The last lines are a table; status 1 where something failed that
# is said to work. Windows is not supported: the table counts the files that compile.
set -euo pipefail
cd "$(dirname "$0")/.."

suites='semantics|problem|plan|rows|reference|lanes|forcing|threads|fuzz|.*_scalar|c_api_test'

# zig_compiler NAME TARGET: makes build/cross/NAME-cc, -c++, -ar: the tools as single programs.
zig_compiler() {
  local tool
  for tool in cc c++; do
    printf '#!/bin/sh\nexec "%s" -m ziglang %s -target %s "$@"\n' \
      "$PWD/build/venv/bin/python" "$tool" "$2" >"build/cross/$1-$tool"
  done
  for tool in ar ranlib; do
    printf '#!/bin/sh\nexec "%s" -m ziglang %s "$@"\n' \
      "$PWD/build/venv/bin/python" "$tool" >"build/cross/$1-$tool"
  done
  chmod +x build/cross/"$1"-*
}

# configure NAME SYSTEM PROCESSOR CC CXX OPTION...
configure() {
  cmake -S . -B "build/cross/$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DREGARD_BUILD_CLI=OFF \
    -DCMAKE_SYSTEM_NAME="$2" -DCMAKE_SYSTEM_PROCESSOR="$3" -DCMAKE_C_COMPILER="$4" \
    -DCMAKE_CXX_COMPILER="$5" "${@:6}"
}

configure_zig() {
  local name=$1 tools=$PWD/build/cross/$1
  zig_compiler "$name" "$4"
  configure "$name" "$2" "$3" "$tools-cc" "$tools-c++" -DCMAKE_AR="$tools-ar" \
    -DCMAKE_RANLIB="$tools-ranlib" "${@:5}"
}

configure_target() {
  local emulator
  case $1 in
    aarch64)
      emulator='qemu-aarch64;-L;/usr/aarch64-linux-gnu'
      configure "$1" Linux aarch64 aarch64-linux-gnu-gcc aarch64-linux-gnu-g++ \
        -DREGARD_BUILD_TESTS=ON -DCMAKE_CROSSCOMPILING_EMULATOR="$emulator"
      ;;
    riscv64) configure_zig "$1" Linux riscv64 riscv64-linux-musl -DREGARD_BUILD_TESTS=ON \
      -DCMAKE_CROSSCOMPILING_EMULATOR=qemu-riscv64 -DCMAKE_EXE_LINKER_FLAGS=-static ;;
    musl) configure_zig "$1" Linux x86_64 x86_64-linux-musl -DREGARD_BUILD_TESTS=ON \
      -DCMAKE_EXE_LINKER_FLAGS=-static ;;
    macos) configure_zig "$1" Darwin arm64 aarch64-macos ;;
    windows) configure_zig "$1" Windows x86_64 x86_64-windows-gnu ;;
    *) echo "usage: tools/cross.sh [aarch64 | riscv64 | musl | macos | windows]..." >&2; exit 2 ;;
  esac
}

# compiled NAME: "N of M files", by the objects that are there.
compiled() {
  local objects all
  all=$(ninja -C "build/cross/$1" -t targets all | grep -c '^CMakeFiles/regard_objects.dir/.*: CXX_')
  objects=$(find "build/cross/$1/CMakeFiles/regard_objects.dir" -name '*.o*' -not -name '*.d' | wc -l)
  echo "$objects of $all files"
}

# build NAME: compiles the library, and links it and its tests where they are configured.
build() {
  local folder=build/cross/$1
  cmake --build "$folder" --target regard_objects -- -k 0 || return 1
  cmake --build "$folder" --target regard_static regard_shared || return 1
  [[ $1 == macos ]] || cmake --build "$folder" --target regard_tests c_api_test
}

# one NAME: a line of the table.
one() {
  local name=$1 built=no tests='not run' log=build/cross/$1.log status=0
  configure_target "$name" >"$log" 2>&1 || { tail -n 20 "$log" >&2; return 1; }
  if build "$name" >>"$log" 2>&1; then built=yes; else status=1; fi
  if [[ $built == yes && $name != macos ]]; then
    tests=$(ctest --test-dir "build/cross/$name" -R "^($suites)\$" --output-on-failure 2>&1 |
      tee -a "$log" | grep 'tests passed') || true
    [[ $tests == 100%* ]] || status=1
  fi
  printf '%-9s %-16s %-9s %s\n' "$name" "$(compiled "$name")" "$built" "$tests" >>build/cross/table
  [[ $name == windows ]] || return "$status"
}

tools/setup.sh cross
rm -rf build/cross/table
mkdir -p build/cross
targets=("$@")
((${#targets[@]})) || targets=(aarch64 riscv64 musl macos windows)
failed=0
for target in "${targets[@]}"; do
  one "$target" || failed=1
done
printf '\n%-9s %-16s %-9s %s\n' target compiled linked tests
cat build/cross/table
exit "$failed"
