#!/usr/bin/env bash
# Installs what is missing to build, test, compare, document or cross-compile: Debian packages and build/venv.
#
#   tools/setup.sh build | test | test-all | bench | docs | cross | release
#   tools/setup.sh PURPOSE --packages      only the Debian packages
#
# Each step is skipped where nothing is missing, so that a second run takes a fraction of a second.
# Python packages have exactly the contents that tools/requirements/*.txt name by their hashes.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-build}
packages=(g++ cmake ninja-build pkg-config doctest-dev libcli11-dev nlohmann-json3-dev libfmt-dev)
locks=("$purpose")
case $purpose in
  build | release) ;;
  bench) locks=(bench torch) ;;
  test)
    packages+=(clang-format-16)
    locks=(test model torch)
    ;;
  test-all)
    packages+=(clang-format-16 clang-16 libclang-rt-16-dev)
    locks=(test model torch)
    ;;
  docs) packages+=(doxygen) ;;
  cross) packages+=(g++-aarch64-linux-gnu g++-riscv64-linux-gnu qemu-user) ;;
  *) echo "usage: tools/setup.sh build | test | test-all | bench | docs | cross | release" >&2; exit 2 ;;
esac

# step TEXT COMMAND...: runs the command quietly; its output appears only where it fails.
step() {
  local text=$1 begin=$EPOCHREALTIME log
  shift
  log=$(mktemp)
  printf 'setup: %-70s ' "$text"
  if ! "$@" >"$log" 2>&1 </dev/null; then
    printf 'failed\n'
    tail -n 30 "$log" >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
  awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%5.1f s\n", b - a }'
}

installed() {
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

as_root() {
  if ((EUID == 0)); then "$@"; else sudo "$@"; fi
}

install_packages() {
  local missing=() package
  for package in "${packages[@]}"; do
    installed "$package" || missing+=("$package")
  done
  python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
  [[ -f $(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] ||
    missing+=(python3-dev)
  ((${#missing[@]})) || return 0
  if ! command -v apt-get >/dev/null; then
    echo "setup: please install: ${missing[*]} (no apt-get here to do it)" >&2
    return 1
  fi
  step 'apt-get update' as_root apt-get update
  step "apt-get install ${missing[*]}" as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install --yes --no-install-recommends "${missing[@]}"
}

# pip_install LOCK... [-- OPTION...]: what the locks name, and nothing that they do not.
pip_install() {
  local files=()
  while (($#)) && [[ $1 != -- ]]; do
    files+=(-r "tools/requirements/$1.txt")
    shift
  done
  build/venv/bin/python -m pip install --disable-pip-version-check --no-deps --require-hashes \
    --only-binary :all: --no-compile "${files[@]}" "${@:2}"
}

# PyTorch's build for CPUs where pip is offered it; else PyPI's, with gigabytes of NVIDIA's libraries.
install_locks() {
  if [[ ${locks[-1]} != torch ]]; then
    pip_install "${locks[@]}"
  else
    pip_install torch-cpu "${locks[@]::${#locks[@]}-1}" || pip_install "${locks[@]}"
  fi
}

# build/venv holds a stamp for each purpose: the hash of the locks that were installed for it.
install_python() {
  local stamp=build/venv/${locks[0]}.sha256 hash
  hash=$(cd tools/requirements && cat "${locks[@]/%/.txt}" | sha256sum | cut -d ' ' -f 1)
  [[ -f $stamp && $(<"$stamp") == "$hash" ]] && return 0
  mkdir -p build
  [[ -x build/venv/bin/python ]] || step 'python3 -m venv build/venv' python3 -m venv build/venv
  step "pip install, locked: ${locks[*]}" install_locks
  echo "$hash" >"$stamp"
}

# The last compiler that knows GPUs before 7.5, in a folder of its own.
install_old_compiler() {
  [[ -f build/nvrtc12/nvidia/cuda_nvrtc/lib/libnvrtc.so.12 ]] && return 0
  step 'pip install, locked: old-compiler' pip_install old-compiler -- --target build/nvrtc12
}

install_packages
if [[ ${2:-} == --packages ]]; then exit 0; fi
install_python
if [[ $purpose == test-all ]]; then install_old_compiler; fi
