#!/usr/bin/env bash
# The peers of `make bench-peers`, at pinned versions, into .venv-peers: llama.cpp's tools from the source inside the
# sdist of llama-cpp-python, ik_llama.cpp and OpenVINO from their wheels, and the models in each engine's format.
# 10 to 20 minutes on two cores, 8 GB of disk. What is there already is kept.
# With --only-server, only llama-server is built, for `make bench-speculation-peers`; with --only-avx2, llama.cpp's
# tools once more, for a CPU without AVX-512, for `make bench-peers-avx2`.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build
native=ON
tools=(llama-bench llama-batched-bench llama-server llama-quantize)
case "$*" in
"") ;;
--only-server) tools=(llama-server) ;;
--only-avx2) folder=build-avx2 native=OFF tools=(llama-bench llama-batched-bench llama-server) ;;
*) echo "usage: build-peers.sh [--only-server | --only-avx2]" >&2 && exit 2 ;;
esac

LLAMA_CPP_PYTHON=0.3.36
LLAMA_CPP_SHA256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
IK_LLAMA_CPP_PYTHON=0.1.5
OPENVINO_GENAI=2026.4.1.0
NNCF=3.4.0
GGUF=0.19.0
CMAKE=4.4.4
JOBS=${CMAKE_BUILD_PARALLEL_LEVEL:-2}

peers=$PWD/.venv-peers
[ -x "$peers/bin/python" ] || python3 -m venv "$peers"
"$peers/bin/pip" install --quiet "cmake==$CMAKE" scikit-build-core
if [ $# = 0 ]; then
    "$peers/bin/pip" install --quiet "ik-llama-cpp-python==$IK_LLAMA_CPP_PYTHON" \
        "openvino-genai==$OPENVINO_GENAI" "nncf==$NNCF" "gguf==$GGUF"
fi

src=$peers/src
if [ ! -d "$src/vendor/llama.cpp" ]; then
    "$peers/bin/pip" download --quiet --no-deps --no-build-isolation --no-binary llama-cpp-python \
        --dest "$peers/sdist" "llama-cpp-python==$LLAMA_CPP_PYTHON"
    archive=$peers/sdist/llama_cpp_python-$LLAMA_CPP_PYTHON.tar.gz
    echo "$LLAMA_CPP_SHA256  $archive" | sha256sum --check --quiet
    mkdir -p "$src"
    tar xf "$archive" -C "$src" --strip-components 1
fi
export PATH=$peers/bin:$PATH
build=$src/vendor/llama.cpp/$folder
# Print the flags that keep AMX out of a build: some virtual machines list it, but end a program that uses it.
without_amx() {
    grep -q amx_tile /proc/cpuinfo || return 0
    cat >"$peers/amx.c" <<'END'
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) {
    if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */)) return 1;
    _tile_zero(0);
    return 0;
}
END
    cc -mamx-tile -o "$peers/amx" "$peers/amx.c"
    "$peers/amx" 2>/dev/null || echo "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
}
for tool in "${tools[@]}"; do
    if [ ! -x "$build/bin/$tool" ]; then
        echo "building llama.cpp's tools (long); the log is $peers/build.log"
        flags=$(without_amx)
        { cmake -S "$src/vendor/llama.cpp" -B "$build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF \
            -DCMAKE_C_FLAGS="$flags" -DCMAKE_CXX_FLAGS="$flags" \
            -DGGML_NATIVE=$native -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF &&
            cmake --build "$build" -j "$JOBS" \
                --target "${tools[@]}" mtmd; } >"$peers/build.log" 2>&1
    fi
done
[ $# = 0 ] || exit 0

# llama.cpp's Python binding, for `make bench-quality`: the package of the sdist with the libraries just built.
"$peers/bin/pip" install --quiet typing_extensions diskcache jinja2
mkdir -p "$src/llama_cpp/lib"
ln -sf "$build"/bin/lib{llama,ggml,ggml-base,ggml-cpu,mtmd}.so* "$src/llama_cpp/lib/"
"$peers/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' |
    while read -r packages; do echo "$src" >"$packages/llama_cpp_sdist.pth"; done

rustc -C opt-level=3 -C target-cpu=native -o "$peers/bin/machine_speed" benches/machine_speed.rs
"$peers/bin/python" benches/peers_models.py "$peers/models"
"$peers/bin/python" benches/peers_shapes.py "$peers/models"
"$peers/bin/python" benches/peers_encoder.py "$peers/models"

cat >"$peers/versions.json" <<JSON
{
 "llama.cpp": "llama-cpp-python $LLAMA_CPP_PYTHON, native build",
 "ik_llama.cpp": "ik-llama-cpp-python $IK_LLAMA_CPP_PYTHON, wheel",
 "openvino": "openvino-genai $OPENVINO_GENAI, nncf $NNCF"
}
JSON
