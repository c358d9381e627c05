#!/bin/sh
# Builds the fake CUDA into a folder. Usage: build.sh FOLDER. With LD_LIBRARY_PATH and LLAISYS_CUDA_LIB_DIR set to the
# folder, the wheel finds a driver, an NVRTC, an NCCL and a cublasLt there.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
mkdir -p "$folder"

library() { # library NAME SOURCE [OPTION...]
	name=$1 source=$2
	shift 2
	# Under a temporary name first, so that a file with the final name is complete.
	c++ -std=c++17 -O2 -ftree-vectorize -shared -fPIC -Wall -Wextra -Wno-unused-parameter -Wl,-soname,"$name" \
		-o "$folder/$name.$$" "$here/$source" "$@"
	mv "$folder/$name.$$" "$folder/$name"
}

library libcuda.so.1 driver.cc "-I$here/../../cuda/emulator" -ldl -pthread
library libnvrtc.so.13 nvrtc.cc "-DEMULATOR=\"$here/../../cuda/emulator\""
cc -O2 -shared -fPIC -w -Wl,-soname,libnccl.so.2 -o "$folder/libnccl.so.2.$$" "$here/nccl.c" -ldl -pthread
mv "$folder/libnccl.so.2.$$" "$folder/libnccl.so.2"
library libcublasLt.so.13 cublas_lt.cc "$folder/libcuda.so.1" '-Wl,-rpath,$ORIGIN'
