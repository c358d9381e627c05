// A CUDA driver of which one launch writes to an illegal address, so that a real GPU loses the process's context.
// It is the first launch, of a kernel or of a graph, after the file named by CUDA_FAULT_FILE exists; the file is removed.
//
// It is built as libcuda.so.1 and needs the real driver at REAL: functions that are not defined here are found there.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static const char FAULT[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry fault() {\n .reg .b64 %at;\n mov.u64 %at, 16;\n st.global.u64 [%at], %at;\n ret;\n}\n";

typedef int Launch(void* kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra);

static void* real(const char* name) { return dlsym(dlopen(REAL, RTLD_LAZY), name); }

// Puts the fault into the stream if it is time; returns the driver's status.
static int fault_if_due(void* stream) {
    const char* file = getenv("CUDA_FAULT_FILE");
    if (!file || access(file, F_OK)) return 0;
    int (*query)(void*, int*) = real("cuStreamIsCapturing");
    int (*load)(void**, const void*) = real("cuModuleLoadData");
    int (*find)(void**, void*, const char*) = real("cuModuleGetFunction");
    Launch* launch = real("cuLaunchKernel");
    int capturing = 0;
    query(stream, &capturing);
    // A module cannot be loaded during a capture.
    if (capturing || unlink(file)) return 0;
    void *module, *kernel;
    int status = load(&module, FAULT);
    if (!status) status = find(&kernel, module, "fault");
    return status ? status : launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}

int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
    Launch* launch = real("cuLaunchKernel");
    int status = fault_if_due(stream);
    return status ? status : launch(kernel, x, y, z, bx, by, bz, shared, stream, params, extra);
}

int cuGraphLaunch(void* graph, void* stream) {
    int (*launch)(void*, void*) = real("cuGraphLaunch");
    int status = fault_if_due(stream);
    return status ? status : launch(graph, stream);
}
