// A fake driver without a GPU. Device memory is host memory between guard pages. Work is queued, and runs only when the
// host waits for it. A module is the shared object that nvrtc.cc made, and emu.h runs its kernels. Captured work is
// kept, and each launch of its graph runs it again. The signatures are those of cuda.h 13.0. LLAISYS calls no other
// functions.
//
// FAKE_CUDA_DEVICES: number of devices (default 1). They share one memory and one queue.
// FAKE_CUDA_MEMORY_MB: device memory (default 2048).
// FAKE_CUDA_FAULT_AT=N: launch number N faults.
// FAKE_CUDA_COUNTS=FILE: counts of the work, as JSON, written when the context is released.
#include "emu_abi.h"

#include <deque>
#include <dlfcn.h>
#include <elf.h>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace {

enum Status {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_IMAGE = 200, NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700, NOT_READY = 600, CAPTURE_UNSUPPORTED = 900, CAPTURED_EVENT = 907,
};
const size_t PAGE = 4096, GUARD = 1 << 20, ALIGNMENT = 256;
const unsigned char FRESH = 0xff;  // NaN in every float type, -1 as an integer

using emu::Arg;
using emu::Request;
typedef int (*Start)(Request*);
typedef const uint32_t* (*Kinds)(uint32_t*);

typedef std::function<int()> Work;
struct Kernel { Start start; std::vector<uint32_t> kinds; std::string name; int dynamic_bytes = 48 << 10; };
struct Event { size_t at; bool is_captured; };
struct Allocation { size_t n_bytes, map, map_bytes; };
struct Counts { unsigned long long launches, products, copies, fills, graphs, replays, retained, allocations; };

std::mutex lock;
std::deque<Work> queue;
size_t n_done;  // work that has run
bool is_capturing;
std::vector<Work> captured;
int lost;  // the error after which every call fails
std::set<void*> events;
thread_local bool is_current;  // the context is current in this thread
bool is_stuck;  // no more work runs
std::map<size_t, Allocation> memory;
size_t used;
Counts counts;
int fail_next;
uint64_t seed = 1;

size_t setting(const char* name, size_t otherwise) {
    const char* text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : otherwise;
}
size_t total_bytes() { return setting("FAKE_CUDA_MEMORY_MB", 2048) << 20; }

// Returns whether this thread may call the driver.
int usable() { return lost ? lost : is_current ? SUCCESS : INVALID_CONTEXT; }

int put(Work work) {
    if (int status = usable()) return status;
    if (is_capturing) captured.push_back(std::move(work));
    else queue.push_back(std::move(work));
    return SUCCESS;
}

// Runs all work up to number `until` of the queue.
int run(size_t until) {
    while (!lost && n_done < until) {
        Work work = std::move(queue.front());
        queue.pop_front();
        n_done++;
        lost = work();
    }
    return lost;
}
size_t n_queued() { return n_done + queue.size(); }

// Returns whether all work up to `until` is done; the first query returns NOT_READY.
int query(size_t until) {
    if (is_stuck) return NOT_READY;
    if (n_done >= until) return lost;
    int status = run(n_done + 1);
    return status ? status : NOT_READY;
}

// Refuses a call that is not allowed in a capture.
int uncaptured() {
    if (int status = usable()) return status;
    return is_capturing ? CAPTURE_UNSUPPORTED : SUCCESS;
}

int fault(const char* what, const char* message) {
    fprintf(stderr, "fake CUDA: %s: %s\n", what, message);
    return ILLEGAL_ADDRESS;
}

// Returns whether a range is inside one allocation of device memory.
bool is_device(unsigned long long at, size_t n) {
    auto after = memory.upper_bound(at);
    if (after == memory.begin()) return false;
    const auto& [start, allocation] = *--after;
    return at + n <= start + allocation.n_bytes;
}

int run_kernel(const Kernel& kernel, Request request, const std::vector<Arg>& args) {
    if (++counts.launches == setting("FAKE_CUDA_FAULT_AT", 0)) return fault(kernel.name.c_str(), "FAKE_CUDA_FAULT_AT");
    request.n_args = args.size();
    request.args = args.data();
    request.seed = seed = seed * 6364136223846793005u + 1442695040888963407u;
    return kernel.start(&request) ? fault(kernel.name.c_str(), request.message) : SUCCESS;
}

void write_counts() {
    const char* path = getenv("FAKE_CUDA_COUNTS");
    if (FILE* file = path ? fopen(path, "w") : nullptr) {
        fprintf(file, "{\"launches\": %llu, \"products\": %llu, \"copies\": %llu, \"fills\": %llu, \"graphs\": %llu, "
                "\"replays\": %llu}\n", counts.launches, counts.products, counts.copies, counts.fills, counts.graphs,
                counts.replays);
        fclose(file);
    }
}

}  // namespace

extern "C" {

// --- for tests in the same process ---

void fake_fail_next_launch(int status) { fail_next = status; }
void fake_get_stuck() { is_stuck = true; }
// Allocations and contexts that are not freed.
unsigned long long fake_not_freed() { return counts.retained + counts.allocations; }

// --- device and context ---

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int* n) { return *n = setting("FAKE_CUDA_DEVICES", 1), SUCCESS; }
int cuDeviceGet(int* device, int ordinal) {
    return *device = ordinal, (size_t)ordinal < setting("FAKE_CUDA_DEVICES", 1) ? SUCCESS : 101;
}
int cuDeviceGetName(char* name, int n, int device) { return snprintf(name, n, "Fake H100"), SUCCESS; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    // Capability, multiprocessors, and the most shared memory of a block: the least of all architectures.
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 8 : attribute == 97 ? 99 << 10 : -1;
    return SUCCESS;
}
int cuDeviceTotalMem_v2(size_t* n, int device) { return *n = total_bytes(), SUCCESS; }
int cuGetErrorName(int status, const char** name) {
    *name = status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : status == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : status == CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
                                          : "CUDA_ERROR_OTHER";
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = (void*)1;
    counts.retained++;
    return lost;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    std::lock_guard<std::mutex> held(lock);
    counts.retained--;
    write_counts();
    return lost;
}
int cuCtxSetCurrent(void* context) {
    is_current = context == (void*)1;
    return usable();
}

// --- memory ---

int cuMemGetInfo_v2(size_t* free, size_t* total) {
    std::lock_guard<std::mutex> held(lock);
    *total = total_bytes();
    *free = *total - used;
    return usable();
}
int cuMemAlloc_v2(unsigned long long* at, size_t n) {
    std::lock_guard<std::mutex> held(lock);
    if (int status = uncaptured()) return status;
    if (n == 0) return INVALID_VALUE;
    if (n > total_bytes() - used) return OUT_OF_MEMORY;
    size_t inner = (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, n_mapped = (inner + PAGE - 1) / PAGE * PAGE;
    char* map = (char*)mmap(nullptr, n_mapped + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED || mprotect(map + GUARD, n_mapped, PROT_READ | PROT_WRITE)) return OUT_OF_MEMORY;
    memset(map + GUARD, FRESH, n_mapped);
    *at = (size_t)map + GUARD + n_mapped - inner;
    memory[*at] = {n, (size_t)map, n_mapped + 2 * GUARD};
    used += n;
    counts.allocations++;
    return SUCCESS;
}
int cuMemFree_v2(unsigned long long at) {
    std::lock_guard<std::mutex> held(lock);
    if (int status = usable()) return status;
    run(n_queued());
    auto found = memory.find(at);
    if (found == memory.end()) return INVALID_VALUE;
    munmap((void*)found->second.map, found->second.map_bytes);
    used -= found->second.n_bytes;
    counts.allocations--;
    memory.erase(found);
    return usable();
}
int cuMemHostAlloc(void** at, size_t n, unsigned flags) { return *at = malloc(n), *at ? usable() : OUT_OF_MEMORY; }
int cuMemFreeHost(void* at) { return free(at), usable(); }

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t n, void* stream) {
    std::lock_guard<std::mutex> held(lock);
    if (!is_device(to, n)) return INVALID_VALUE;
    return put([=] { return counts.copies++, memcpy((void*)to, from, n), SUCCESS; });
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t n, void* stream) {
    std::lock_guard<std::mutex> held(lock);
    if (!is_device(from, n)) return INVALID_VALUE;
    return put([=] { return counts.copies++, memcpy(to, (const void*)from, n), SUCCESS; });
}
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t n, void* stream) {
    std::lock_guard<std::mutex> held(lock);
    if (!is_device(to, n) || !is_device(from, n)) return INVALID_VALUE;
    return put([=] { return counts.copies++, memmove((void*)to, (const void*)from, n), SUCCESS; });
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t n, void* stream) {
    std::lock_guard<std::mutex> held(lock);
    if (!is_device(to, n)) return INVALID_VALUE;
    return put([=] { return counts.fills++, memset((void*)to, value, n), SUCCESS; });
}

// --- streams and events: all streams are one queue, which is an allowed order for all of them ---

int cuStreamCreate(void** stream, unsigned flags) { return *stream = (void*)2, flags == 1 ? usable() : INVALID_VALUE; }
int cuStreamDestroy_v2(void* stream) { return usable(); }
int cuStreamSynchronize(void* stream) {
    std::lock_guard<std::mutex> held(lock);
    if (int status = uncaptured()) return status;
    return run(n_queued());
}
int cuStreamQuery(void* stream) {
    std::lock_guard<std::mutex> held(lock);
    if (int status = uncaptured()) return status;
    return query(n_queued());
}
int cuEventCreate(void** event, unsigned flags) {
    std::lock_guard<std::mutex> held(lock);
    events.insert(*event = new Event{});
    return flags == 2 ? usable() : INVALID_VALUE;
}
int cuEventDestroy_v2(void* event) {
    std::lock_guard<std::mutex> held(lock);
    if (!events.erase(event)) {
        fprintf(stderr, "fake CUDA: an event is destroyed that does not exist\n");
        abort();
    }
    delete (Event*)event;
    return usable();
}
int cuEventRecord(void* event, void* stream) {
    std::lock_guard<std::mutex> held(lock);
    *(Event*)event = {n_queued(), is_capturing};
    return usable();
}
int cuEventSynchronize(void* event) {
    std::lock_guard<std::mutex> held(lock);
    return ((Event*)event)->is_captured ? CAPTURED_EVENT : run(((Event*)event)->at);
}
int cuEventQuery(void* event) {
    std::lock_guard<std::mutex> held(lock);
    return ((Event*)event)->is_captured ? CAPTURED_EVENT : query(((Event*)event)->at);
}
// Only the fake cublasLt calls it.
int cuLaunchHostFunc(void* stream, void (*call)(void*), void* data) {
    std::lock_guard<std::mutex> held(lock);
    return put([=] { return counts.products++, call(data), SUCCESS; });
}

// --- kernels ---

// An image ends with its last section header, because linkers put the section table at the end.
int cuModuleLoadData(void** module, const void* image) {
    const Elf64_Ehdr* head = (const Elf64_Ehdr*)image;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG)) return INVALID_IMAGE;
    size_t n = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
    int file = memfd_create("module", MFD_CLOEXEC);
    bool written = file >= 0 && write(file, image, n) == (ssize_t)n;
    std::string path = "/proc/self/fd/" + std::to_string(file);
    *module = written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!*module) fprintf(stderr, "fake CUDA: %s\n", written ? dlerror() : "a module cannot be written");
    // The file stays open, because the loader identifies libraries by name, and the next file would get the same name.
    return *module ? usable() : INVALID_IMAGE;
}
// A module is never unloaded, because its signal handler stays installed.
int cuModuleUnload(void* module) { return usable(); }
int cuModuleGetFunction(void** function, void* module, const char* name) {
    auto start = (Start)dlsym(module, (std::string("ll_emu_") + name).c_str());
    auto kinds = (Kinds)dlsym(module, (std::string("ll_emu_kinds_") + name).c_str());
    if (!start || !kinds) return NOT_FOUND;
    uint32_t n;
    const uint32_t* first = kinds(&n);
    *function = new Kernel{start, {first, first + n}, name};
    return usable();
}
int cuFuncLoad(void* function) { return usable(); }
int cuFuncGetAttribute(int* value, int attribute, void* function) {
    return *value = 1024, attribute == 1 ? usable() : INVALID_VALUE;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
    if (attribute != 8 || value > (99 << 10) - 1024) return INVALID_VALUE;
    ((Kernel*)function)->dynamic_bytes = value;
    return usable();
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
    std::lock_guard<std::mutex> held(lock);
    if (int status = fail_next) {
        fail_next = 0;
        return status;
    }
    const Kernel& kernel = *(Kernel*)function;
    bool fits = x && y && z && x <= 0x7fffffff && y <= 65535 && z <= 65535 && bx && bx <= 1024 && by == 1 && bz == 1;
    if (!fits || (int)shared > kernel.dynamic_bytes) return INVALID_VALUE;
    std::vector<Arg> args;
    for (size_t i = 0; i < kernel.kinds.size(); i++) {
        Arg arg = {kernel.kinds[i], 0};
        memcpy(&arg.bits, params[i], arg.kind == 0 || arg.kind == 3 ? 8 : 4);
        args.push_back(arg);
    }
    Request request = {{x, y, z}, bx, shared, 0, nullptr, 0, 0, {}};
    return put([&kernel, request, args] { return run_kernel(kernel, request, args); });
}

// --- graphs ---

int cuStreamBeginCapture_v2(void* stream, int mode) {
    std::lock_guard<std::mutex> held(lock);
    if (int status = uncaptured()) return status;
    is_capturing = mode == 1;
    captured.clear();
    return mode == 1 ? SUCCESS : INVALID_VALUE;
}
int cuStreamEndCapture(void* stream, void** graph) {
    std::lock_guard<std::mutex> held(lock);
    if (!is_capturing) return usable() ? usable() : INVALID_VALUE;
    is_capturing = false;
    *graph = new std::vector<Work>(std::move(captured));
    return usable();
}
int cuGraphInstantiateWithFlags(void** made, void* graph, unsigned long long flags) {
    counts.graphs++;
    *made = new std::vector<Work>(*(std::vector<Work>*)graph);
    return usable();
}
int cuGraphDestroy(void* graph) { return delete (std::vector<Work>*)graph, usable(); }
int cuGraphExecDestroy(void* graph) { return delete (std::vector<Work>*)graph, usable(); }
int cuGraphUpload(void* graph, void* stream) { return usable(); }
int cuGraphLaunch(void* graph, void* stream) {
    std::lock_guard<std::mutex> held(lock);
    if (int status = uncaptured()) return status;
    counts.replays++;
    for (const Work& work : *(std::vector<Work>*)graph) queue.push_back(work);
    return SUCCESS;
}

}  // extern "C"
