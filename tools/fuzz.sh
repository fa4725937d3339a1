#!/usr/bin/env bash
# Runs every libFuzzer target of the fuzz preset for some seconds; what it found stays in
# build/fuzz/corpus, and an input that fails in build/fuzz/findings.
#
#   tools/fuzz.sh SECONDS
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-30}
mapfile -t targets < <(find build/fuzz -type f -executable -name 'fuzz_*' | sort)
if ((${#targets[@]} == 0)); then
  echo "fuzz: no target in build/fuzz" >&2
  exit 1
fi
mkdir -p build/fuzz/findings
for target in "${targets[@]}"; do
  corpus=build/fuzz/corpus/$(basename "$target")
  mkdir -p "$corpus"
  echo "== $target"
  "$target" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=4096 \
    -artifact_prefix=build/fuzz/findings/ "$corpus"
done
