#!/usr/bin/env bash
# Tries what tools/release.sh made on clean Debian systems.
#
#   sudo tools/clean_systems.sh [SUITE]...      default: bookworm trixie
#
# In build/systems, debootstrap (a package of that name) makes a system of each Debian suite, with Python,
# g++ and CMake. There, pip installs the wheel, which runs the Python lines of README.md; the archive is
# built and installed, and serves the programs of examples/consumer. Only the network's settings and the
# certificates come from this machine. The last lines are a table; status 1 where something failed. The
# systems are removed, and what they printed stays in build/systems/*.log.
set -euo pipefail
cd "$(dirname "$0")/.."

files=$PWD/build/release-files
out=$PWD/build/systems
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# make_system SUITE FOLDER
make_system() {
  debootstrap --variant=minbase --include=python3-venv,g++,make,cmake "$1" "$2" || return
  mkdir "$2/given"
  cp "$files"/*.whl "$files"/*.tar.gz /etc/ssl/certs/ca-certificates.crt "$2/given"
  {
    sed -n '/^```python$/,/^```$/p' README.md | sed '/^```/d'
    echo 'assert out.shape == q.shape and np.isfinite(lse).all(); print(regard.__file__, out.shape)'
  } >"$2/given/readme.py"
}

# inside FOLDER COMMAND: in the system; its /proc and /dev end with the command.
inside() {
  unshare --mount --propagation private bash -c '
    mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" &&
      exec chroot "$1" /usr/bin/env -i PATH=/venv/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root \
        PIP_CERT=/given/ca-certificates.crt CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" bash -euxc "$2"
  ' bash "$1" "$2"
}

try_wheel='cd /given
python3 -m venv /venv
pip install ./*.whl numpy
python readme.py
regard info'
try_archive="cd /given
tar -xzf regard-$version.tar.gz
cd regard-$version
cmake -B build -DREGARD_BUILD_CLI=OFF
cmake --build build
cmake --install build
cmake -S examples/consumer -B /consumer
cmake --build /consumer
/consumer/consumer_cpp
/consumer/consumer_c"

# step SUITE NAME COMMAND...: a line of the table; the command's output goes to the suite's log.
step() {
  local begin=$SECONDS result=passed
  "${@:3}" >>"$out/$1.log" 2>&1 || result=FAILED
  printf '%-9s %-44s %-6s %4d s\n' "$1" "$2" "$result" "$((SECONDS - begin))"
  [[ $result == passed ]]
}

# one SUITE
one() {
  local system=$out/$1 status=0
  step "$1" debootstrap make_system "$1" "$system" || return 1
  step "$1" 'the wheel, Python lines of README.md' inside "$system" "$try_wheel" || status=1
  step "$1" 'cmake --install, examples/consumer' inside "$system" "$try_archive" || status=1
  rm -rf --one-file-system "$system"
  return "$status"
}

if ((EUID != 0)) || ! ls "$files"/*.whl "$files"/*.tar.gz >/dev/null; then
  echo "clean_systems: needs root, and the files of tools/release.sh" >&2
  exit 2
fi
rm -rf --one-file-system "$out"
mkdir -p "$out"
targets=("$@")
((${#targets[@]})) || targets=(bookworm trixie)
failed=0
for target in "${targets[@]}"; do
  one "$target" || failed=1
done
exit "$failed"
