// Runs a kernel's source on the CPU. Each thread of a block is a fiber that runs until it must wait. The launch's seed
// chooses the fiber that runs next, and the order of the blocks. modules.rs prepends this file to prim.cuh.
//
// These defects are errors that name kernel, block and thread: an access outside of every allocation or of dynamic
// shared memory (guard pages); a misaligned access or an index outside of an array (traps of the compiler's sanitizer);
// barriers and warp functions that not all threads reach, or that they reach at different lines; arguments that differ
// from the signature. These defects show in results: missing barriers (random order); shared memory that is read before
// it is written or before its cp.async was waited for (NaN). It does not detect real races or errors of memory order,
// and it says nothing about speed.
#pragma once
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>

#include "emu_abi.h"

#define LL_EMU 1
#define __global__
#define __device__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("ll_shared")))
#define LL_DYNAMIC_SHARED(name) unsigned char* const name = emu::dynamic_shared

struct uint3 { unsigned x, y, z; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint3 threadIdx, blockIdx, blockDim, gridDim;

// The static shared memory of the module: all __shared__ arrays are in one section.
extern "C" char __start_ll_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_ll_shared[] __attribute__((weak, visibility("hidden")));

namespace emu {

const size_t STACK = 128 << 10, PAGE = 4096, MAX_THREADS = 1024, MAX_COPIES = 512;
const uint64_t CANARY = 0x57ac4057ac4057acull;
enum State { READY, WAITING, DONE };
struct Copy { void* to; const void* from; bool valid; unsigned group; };
struct Fiber {
    ucontext_t start;
    jmp_buf at;
    char* stack;
    bool started;  // it is in the loop of fiber_main
    State state;
    const char *what, *file;  // where it waits
    int line;
    Copy copies[MAX_COPIES];
    unsigned n_copies, group;
};
struct Barrier {
    unsigned arrived, size, first;  // threads first .. first + size
    uint64_t generation;
    int line;
    const char* file;
};
struct __align__(16) Slot { unsigned char bytes[64]; };

static Fiber* fibers[MAX_THREADS];
static unsigned n_threads, current, n_ready, n_done, ready[MAX_THREADS];
static Barrier block_barrier, warp_barriers[MAX_THREADS / 32];
static Slot slots[2][MAX_THREADS];
static int votes[2][MAX_THREADS];
static unsigned char* dynamic_shared;
static size_t dynamic_bytes;
static uint64_t random_state;
static jmp_buf scheduler;
static sigjmp_buf launch_end;
static volatile bool running;
static pthread_t runner;
static Request* request;
static const char* kernel_name;
static void (*body)(const Arg*);
static pthread_mutex_t one_launch = PTHREAD_MUTEX_INITIALIZER;

// xorshift64* (doi:10.18637/jss.v008.i14).
inline unsigned below(unsigned n) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (unsigned)((random_state * 0x2545f4914f6cdd1dull >> 32) % n);
}

// Ends the launch with an error, from any fiber.
__attribute__((noreturn, noinline, format(printf, 1, 2))) static void fail(const char* format, ...) {
    char* text = request->message;
    const size_t capacity = sizeof request->message;
    int n = snprintf(text, capacity, "%s, block (%u, %u, %u), thread %u: ", kernel_name, blockIdx.x, blockIdx.y,
                     blockIdx.z, current);
    va_list list;
    va_start(list, format);
    vsnprintf(text + n, capacity - n, format, list);
    va_end(list);
    for (unsigned i = 0; i < n_threads; i++) {
        if (fibers[i]) fibers[i]->started = false;
    }
    siglongjmp(launch_end, 1);
}

__attribute__((noinline)) static void yield() {
    if (_setjmp(fibers[current]->at) == 0) _longjmp(scheduler, 1);
    asm volatile("" ::: "memory");
}

// Runs the kernel again and again, so that a fiber is created only once.
static void fiber_main() {
    for (;;) {
        body(request->args);
        fibers[current]->state = DONE;
        n_done++;
        yield();
    }
}

// Returns when all `size` threads have arrived. A thread that has returned never arrives.
__attribute__((noinline)) static void wait(Barrier& b, const char* what, const char* file, int line) {
    if (b.arrived == 0) {
        b.line = line;
        b.file = file;
    } else if (b.line != line || b.file != file) {
        fail("%s at %s:%d while threads of the same group are at %s:%d", what, file, line, b.file, b.line);
    }
    Fiber& me = *fibers[current];
    if (++b.arrived < b.size) {
        me.state = WAITING;
        me.what = what;
        me.file = file;
        me.line = line;
        return yield();
    }
    asm volatile("" ::: "memory");
    b.arrived = 0;
    b.generation++;
    for (unsigned i = b.first; i < b.first + b.size; i++) {
        if (i != current) {
            fibers[i]->state = READY;
            ready[n_ready++] = i;
        }
    }
}

inline unsigned lane() { return current % 32; }
inline Barrier& warp() { return warp_barriers[current / 32]; }

// Every lane contributes `mine` and gets those of all 32. Two sets of slots are enough: a lane that writes the next set
// has left the previous exchange, and so have all others, because it waited for them.
template <class V>
const Slot* exchange(const V& mine, const char* what, const char* file, int line) {
    static_assert(sizeof(V) <= sizeof(Slot), "a lane contributes at most 64 bytes");
    Slot* of_warp = slots[warp().generation & 1] + current / 32 * 32;
    memcpy(of_warp[lane()].bytes, &mine, sizeof mine);
    wait(warp(), what, file, line);
    return of_warp;
}

template <class V>
V of_lane(const Slot* all, unsigned lane) {
    V value;
    memcpy(&value, all[lane].bytes, sizeof value);
    return value;
}

inline void full_warp(unsigned mask, const char* what) {
    if (mask != 0xffffffffu) fail("%s with mask %08x: the emulator knows whole warps only", what, mask);
}

inline bool in_shared(const void* p, size_t n) {
    const char* at = (const char*)p;
    const char* dynamic = (const char*)dynamic_shared;
    return (at >= __start_ll_shared && at + n <= __stop_ll_shared) || (at >= dynamic && at + n <= dynamic + dynamic_bytes);
}

inline void aligned16(const void* p, const char* what) {
    if ((uintptr_t)p % 16) fail("%s of a misaligned address %p: 16-byte accesses want multiples of 16", what, p);
}

static void run_block() {
    if (__start_ll_shared) memset(__start_ll_shared, 0xff, __stop_ll_shared - __start_ll_shared);
    memset(dynamic_shared, 0xff, dynamic_bytes);
    block_barrier = {0, n_threads, 0, 0, 0, 0};
    for (unsigned w = 0; w < n_threads / 32; w++) warp_barriers[w] = {0, 32, w * 32, 0, 0, 0};
    for (unsigned i = 0; i < n_threads; i++) {
        Fiber& f = *fibers[i];
        f.state = READY;
        f.n_copies = f.group = 0;
        ready[i] = i;
    }
    n_ready = n_threads;
    n_done = 0;
    _setjmp(scheduler);
    if (n_done == n_threads) return;
    if (n_ready == 0) {
        unsigned waits = 0, missing = 0;
        while (fibers[waits]->state != WAITING) waits++;
        current = waits;
        const Fiber& f = *fibers[waits];
        bool is_block = !strncmp(f.what, "__syncthreads", 13);
        const Barrier& b = is_block ? block_barrier : warp_barriers[waits / 32];
        for (missing = b.first; fibers[missing]->state == WAITING && fibers[missing]->what == f.what;) missing++;
        const Fiber& m = *fibers[missing];
        if (m.state == DONE) {
            fail("waits at %s (%s:%d), but thread %u has returned", f.what, f.file, f.line, missing);
        }
        fail("waits at %s (%s:%d), but thread %u waits at %s (%s:%d)", f.what, f.file, f.line, missing, m.what, m.file,
             m.line);
    }
    unsigned pick = below(n_ready);
    current = ready[pick];
    ready[pick] = ready[--n_ready];
    threadIdx = {current, 0, 0};
    Fiber& f = *fibers[current];
    if (f.started) _longjmp(f.at, 1);
    f.started = true;
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack;
    f.start.uc_stack.ss_size = STACK;
    f.start.uc_link = nullptr;
    makecontext(&f.start, fiber_main, 0);
    setcontext(&f.start);
}

static struct sigaction before[NSIG];

static void on_signal(int number, siginfo_t* info, void* context) {
    if (running && pthread_equal(pthread_self(), runner)) {
        request->fault_address = (uint64_t)info->si_addr;
        if (number == SIGSEGV || number == SIGBUS) fail("touches memory that is not its own");
        fail("misaligned access, index outside of an array, or undefined arithmetic (signal %d)", number);
    }
    if (before[number].sa_flags & SA_SIGINFO) return before[number].sa_sigaction(number, info, context);
    signal(number, before[number].sa_handler);
}

// Installs the handlers once per process. Other signals go to the previous handlers, so a module is never unloaded.
static void catch_signals() {
    static bool done;
    if (done) return;
    done = true;
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE}) sigaction(number, &action, &before[number]);
}

static char* map(size_t n) {
    void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    return (char*)p;
}

// Places dynamic shared memory directly before a guard page.
static void size_shared(size_t n) {
    static char* base;
    static size_t capacity;
    if (!base) {
        capacity = 256 << 10;
        base = map(capacity + 2 * PAGE);
        mprotect(base, PAGE, PROT_NONE);
        mprotect(base + PAGE + capacity, PAGE, PROT_NONE);
    }
    dynamic_bytes = n;
    dynamic_shared = (unsigned char*)base + PAGE + capacity - (n + 15) / 16 * 16;
}

static int launch(Request* of, const char* name, void (*run)(const Arg*), const uint32_t* kinds, unsigned n_params) {
    pthread_mutex_lock(&one_launch);
    request = of;
    kernel_name = name;
    body = run;
    n_threads = of->block;
    random_state = of->seed | 1;
    blockDim = {of->block, 1, 1};
    gridDim = {of->grid[0], of->grid[1], of->grid[2]};
    size_shared(of->shared_bytes);
    catch_signals();
    unsigned n_blocks = of->grid[0] * of->grid[1] * of->grid[2];
    unsigned* volatile order = (unsigned*)malloc(n_blocks * sizeof(unsigned));
    for (unsigned i = 0; i < n_blocks; i++) order[i] = i;
    for (unsigned i = n_blocks; i > 1; i--) std::swap(order[i - 1], order[below(i)]);
    for (unsigned i = 0; i < n_threads; i++) {
        if (!fibers[i]) {
            fibers[i] = (Fiber*)malloc(sizeof(Fiber));
            fibers[i]->started = false;
            fibers[i]->stack = map(STACK);
            *(uint64_t*)fibers[i]->stack = CANARY;
        }
    }
    runner = pthread_self();
    volatile int failed = 1;
    current = 0;
    blockIdx = {0, 0, 0};
    if (sigsetjmp(launch_end, 1) == 0) {
        if (n_params != of->n_args) fail("%u arguments, the kernel has %u parameters", of->n_args, n_params);
        static const char* const names[] = {"a pointer", "int", "unsigned", "unsigned long long", "float"};
        for (unsigned i = 0; i < n_params; i++) {
            if (of->args[i].kind != kinds[i]) {
                fail("argument %u is %s, the parameter is %s", i, names[of->args[i].kind], names[kinds[i]]);
            }
        }
        running = true;
        for (volatile unsigned i = 0; i < n_blocks; i++) {
            unsigned b = order[i];
            blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
            run_block();
        }
        for (unsigned i = 0; i < n_threads; i++) {
            current = i;
            if (*(uint64_t*)fibers[i]->stack != CANARY) fail("more than %zu bytes of stack", STACK);
        }
        failed = 0;
    }
    running = false;
    free(order);
    pthread_mutex_unlock(&one_launch);
    return failed;
}

template <class P> struct Param;
template <class P> struct Param<P*> {
    static const uint32_t kind = 0;
    static P* of(uint64_t bits) { return (P*)(uintptr_t)bits; }
};
template <> struct Param<int> {
    static const uint32_t kind = 1;
    static int of(uint64_t bits) { return (int)(uint32_t)bits; }
};
template <> struct Param<unsigned> {
    static const uint32_t kind = 2;
    static unsigned of(uint64_t bits) { return (unsigned)bits; }
};
template <> struct Param<unsigned long long> {
    static const uint32_t kind = 3;
    static unsigned long long of(uint64_t bits) { return bits; }
};
template <> struct Param<float> {
    static const uint32_t kind = 4;
    static float of(uint64_t bits) {
        uint32_t low = (uint32_t)bits;
        float value;
        memcpy(&value, &low, 4);
        return value;
    }
};

template <auto Kernel> struct Entry;
template <class... P, void (*Kernel)(P...)> struct Entry<Kernel> {
    template <size_t... I> static void spread(const Arg* args, std::index_sequence<I...>) {
        Kernel(Param<P>::of(args[I].bits)...);
    }
    static void run(const Arg* args) { spread(args, std::index_sequence_for<P...>()); }
    static constexpr uint32_t KINDS[] = {Param<P>::kind..., 0};
    static int start(Request* request, const char* name) { return launch(request, name, run, KINDS, sizeof...(P)); }
    static const uint32_t* kinds(uint32_t* n) {
        *n = sizeof...(P);
        return KINDS;
    }
};

}  // namespace emu

// Defines the functions that start a kernel and return the kinds of its parameters.
#define LL_EMU_KERNEL(name) \
    extern "C" int ll_emu_##name(emu::Request* request) { return emu::Entry<name>::start(request, #name); } \
    extern "C" const uint32_t* ll_emu_kinds_##name(uint32_t* n) { return emu::Entry<name>::kinds(n); }

#include "emu_functions.h"
