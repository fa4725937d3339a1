#!/usr/bin/env bash
# Formats every C, C++ and CUDA file in place; --check only names the files that would change.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v clang-format-16 >/dev/null; then
  echo 'format: clang-format-16 is missing (Debian: apt-get install clang-format-16)' >&2
  exit 1
fi

mapfile -d '' files < <(find include src cli python tests examples bench -type f \
  \( -name '*.h' -o -name '*.hpp' -o -name '*.c' -o -name '*.cpp' -o -name '*.cuh' \) -print0)

if [[ ${1:-} != --check ]]; then
  clang-format-16 -i "${files[@]}"
  exit
fi

if ! printf '%s\0' "${files[@]}" |
  xargs -0 -n 20 -P "$(getconf _NPROCESSORS_ONLN)" clang-format-16 --dry-run --Werror; then
  echo 'make format does it'
  exit 1
fi
