#!/usr/bin/env bash
# Fuzz each parser for the given CPU minutes with AFL++, on the stable toolchain: fuzz.sh [MINUTES [TARGET...]].
# A stopped run continues where it was; FRESH=1 starts over.
# Write one line per target to benches/results/fuzz.txt; exit 1 if anything was found (it stays in target/fuzz).
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=${1:-10}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(safetensors fp8 packed mxfp4 gguf index config encoder adapter adapter_config generation tokenizer batch)

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
stat() { awk -F' *: *' -v key="$2" '$1 == key { print $2 }' "$home/out-$1/default/fuzzer_stats"; }
cpu_s() { cat "$home/$1.cpu_s" 2>/dev/null || echo 0; } # CPU time of the target so far

# A hang is real if the input takes a second of CPU time again: AFL++ measures on a shared machine.
hangs() {
  local n=0 file
  for file in "$home/out-$1/default/hangs"/id*; do
    [ ! -e "$file" ] || (ulimit -t 1 && "$binary" "$1" <"$file" >/dev/null 2>&1) || n=$((n + 1))
  done
  echo "$n"
}

slice() { # target, where its inputs are: a minute at most
  python3 scripts/cpu_seconds.py "$home/$1.cpu_s" cargo afl fuzz -i "$2" -o "$home/out-$1" -V 60 -t 1000 -m none \
    -- "$binary" "$1" >>"$home/$1.log" 2>&1 || { tail -20 "$home/$1.log" >&2; exit 1; }
}

fuzz() { # target, CPU-seconds
  if [ -n "${FRESH:-}" ] || [ ! -e "$home/$1.cpu_s" ]; then
    rm -rf "$home/out-$1" "$home/in-$1" "$home/$1.cpu_s" && mkdir -p "$home/in-$1"
    "$binary" seeds "$1" "$home/in-$1"
    slice "$1" "$home/in-$1"
  fi
  while [ "$(cpu_s "$1")" -lt "$2" ]; do slice "$1" -; done
}

FRESH=1 fuzz canary 1
[ "$(stat canary saved_crashes)" != 0 ] || { echo "the canary did not crash: failures are not detected" >&2; exit 1; }
{
  echo "# make fuzz MINUTES=$minutes (CPU time per target): AFL++; a run fails on a panic, a run time over 1 s, or an allocation"
  echo "# of more than 4 times the input and 64 MiB. $(rustc --version), $(date -u +%F), $(uname -m), commit $(git rev-parse --short HEAD)"
  printf '%-12s %8s %12s %8s %8s %8s %8s\n' target cpu_s executions corpus edges crashes hangs
} >"$results"
found=0
for target in "${targets[@]}"; do
  fuzz "$target" $((minutes * 60))
  crashes=$(stat "$target" saved_crashes) hung=$(hangs "$target")
  printf '%-12s %8s %12s %8s %8s %8s %8s\n' "$target" "$(cpu_s "$target")" "$(stat "$target" execs_done)" \
    "$(stat "$target" corpus_count)" "$(stat "$target" edges_found)" "$crashes" "$hung" | tee -a "$results"
  [ "$crashes" = 0 ] && [ "$hung" = 0 ] || found=1
done
exit "$found"
