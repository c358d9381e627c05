#!/usr/bin/env bash
# Fuzzes each parser for so many minutes with AFL++, on the stable toolchain: fuzz.sh [MINUTES [TARGET...]].
# Writes one line a target to benches/results/fuzz.txt; exit 1 if anything was found (it stays in target/fuzz).
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=${1:-10}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(safetensors gguf index config generation tokenizer batch)

home=$PWD/target/fuzz
memory=/dev/shm/llaisys-fuzz # fuzz/.cargo/config.toml names it too
export XDG_DATA_HOME=$home/data PATH=$home/bin:$PATH
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$home/build}
if ! command -v cargo-afl >/dev/null; then
  echo "installing cargo-afl (AFL++) into target/fuzz, a few minutes once"
  cargo install --quiet --locked --root "$home" cargo-afl
fi
[ -d "$XDG_DATA_HOME/afl.rs" ] || cargo afl config --build >"$home/afl-build.log" 2>&1
(cd fuzz && cargo afl build --release --quiet)
binary=$CARGO_TARGET_DIR/release/llaisys-fuzz

mkdir -p "$memory"
trap 'rm -rf "$memory"' EXIT
export AFL_NO_UI=1 AFL_SKIP_CPUFREQ=1 AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES=1 AFL_NO_AFFINITY=1
results=benches/results/fuzz.txt
{
  echo "# make fuzz MINUTES=$minutes: AFL++, one process a target; a run fails on a panic, a second, or an allocation"
  echo "# of more than 4 times the input and 64 MiB. $(rustc --version), $(date -u +%F), $(uname -m), commit $(git rev-parse --short HEAD)"
  printf '%-12s %12s %8s %8s %8s %8s\n' target executions corpus edges crashes hangs
} >"$results"
found=0
for target in "${targets[@]}"; do
  out=$home/out-$target
  rm -rf "$out" "$home/in-$target" && mkdir -p "$home/in-$target"
  "$binary" seeds "$target" "$home/in-$target"
  timeout --kill-after=10 $((minutes * 60 + 60)) cargo afl fuzz -i "$home/in-$target" -o "$out" -V $((minutes * 60)) \
    -t 1000 -m none -- "$binary" "$target" >"$home/$target.log" 2>&1 || { tail -20 "$home/$target.log" >&2; exit 1; }
  stat() { awk -F' *: *' -v key="$1" '$1 == key { print $2 }' "$out/default/fuzzer_stats"; }
  printf '%-12s %12s %8s %8s %8s %8s\n' "$target" "$(stat execs_done)" "$(stat corpus_count)" "$(stat edges_found)" \
    "$(stat saved_crashes)" "$(stat saved_hangs)" | tee -a "$results"
  [ "$(stat saved_crashes)" = 0 ] && [ "$(stat saved_hangs)" = 0 ] || found=1
done
exit "$found"
