#!/usr/bin/env bash
# Configures and builds one preset of CMakePresets.json; prints one line, or the errors.
#
#   tools/build.sh release | library | asan | tsan | fuzz
#   tools/build.sh python                                   the package, into build/venv; compiles only its binding
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:-release}
log=build/$preset.log
mkdir -p build
begin=$EPOCHREALTIME
if [[ $preset == python ]]; then
  text='pip install . (with the library of preset release)'
  build() {
    cmake --preset release && cmake --build --preset release --target regard_static &&
    build/venv/bin/python -m pip install --disable-pip-version-check --no-deps \
      --no-build-isolation --force-reinstall . \
      --config-settings=build-dir=build/binding \
      --config-settings=cmake.define.REGARD_STATIC_LIBRARY="$PWD/build/release/libregard.a"
  }
else
  text="cmake --preset $preset && cmake --build --preset $preset"
  build() { cmake --preset "$preset" && cmake --build --preset "$preset"; }
fi
printf 'build: %-70s ' "$text"
if ! build >"$log" 2>&1; then
  printf 'failed\n'
  grep -E -A 8 'error|Error|FAILED' "$log" | head -n 60 >&2 || tail -n 60 "$log" >&2
  echo "build: the whole output is in $log" >&2
  exit 1
fi
awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%5.1f s\n", b - a }'
