// A driver without a GPU: device memory is the host's, work is queued and done only when somebody waits for it, and
// launches are written down. The signatures are those of cuda.h 13.0.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int kind; char *to; const char *from; size_t n; int value; } Work;
enum { COPY, FILL, NOTE };
static Work queue[1 << 16];
static size_t n_queued, n_done;
static char notes[65536], names[64][64];
static int n_names, fail_next, is_capturing;
static size_t free_bytes = 1u << 30;
static __thread void *current;  // a context is current in a thread, not in a process

const char *fake_notes(void) { return notes; }
void fake_fail_next_launch(int status) { fail_next = status; }
void fake_set_free_bytes(size_t n) { free_bytes = n; }

static void note(const char *text) { strncat(notes, text, sizeof notes - strlen(notes) - 1); }

static int put(Work work) {
  if (is_capturing && work.kind == COPY) return 906;
  if (n_queued == sizeof queue / sizeof *queue) abort();
  queue[n_queued++] = work;
  return 0;
}

static void run(size_t until) {
  for (; n_done < until; ++n_done) {
    Work *w = &queue[n_done];
    if (w->kind == COPY) memcpy(w->to, w->from, w->n);
    if (w->kind == FILL) memset(w->to, w->value, w->n);
  }
}

int cuInit(unsigned flags) { return 0; }
// NVRTC looks for a driver and asks it for this: there is none, as on a machine without a driver.
int cuGetExportTable(const void **table, const void *id) { return 500; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int n, int device) { strncpy(name, "Fake H100", n); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  // Capability, multiprocessors, shared memory that a block may ask for.
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : attribute == 97 ? 232448 : -1;
  return 0;
}
int cuDeviceTotalMem_v2(size_t *n, int device) { *n = 2u << 30; return 0; }
int cuGetErrorName(int status, const char **name) {
  *name = status == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; note("retain;"); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { note("release;"); return 0; }
int cuCtxSetCurrent(void *context) { current = context; return context == (void *)1 ? 0 : 201; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)2; return flags == 1 ? 0 : 1; }
int cuStreamDestroy_v2(void *stream) { return 0; }
int cuStreamSynchronize(void *stream) { run(n_queued); return 0; }
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { *p = malloc(n); return 0; }
int cuMemFreeHost(void *p) { free(p); return 0; }
int cuMemAlloc_v2(unsigned long long *p, size_t n) {
  if (n > free_bytes) return 2;
  *p = (unsigned long long)aligned_alloc(256, (n + 255) / 256 * 256);
  return 0;
}
int cuMemFree_v2(unsigned long long p) {
  if (!current) return 201;
  free((void *)p);
  note("free;");
  return 0;
}
int cuMemGetInfo_v2(size_t *left, size_t *total) { *left = free_bytes; *total = 2u << 30; return 0; }
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t n, void *stream) {
  return put((Work){COPY, (char *)to, from, n, 0});
}
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t n, void *stream) {
  return put((Work){COPY, to, (const char *)from, n, 0});
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t n, void *stream) {
  return put((Work){FILL, (char *)to, NULL, n, value});
}
int cuEventCreate(void **event, unsigned flags) { *event = calloc(1, sizeof(size_t)); return flags == 2 ? 0 : 1; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuEventRecord(void *event, void *stream) { *(size_t *)event = n_queued; return 0; }
int cuEventSynchronize(void *event) { run(*(size_t *)event); return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)3; return memcmp(image, "\x7f" "ELF", 4) ? 200 : 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  strncpy(names[n_names], name, 63);
  *function = names[n_names++];
  return 0;
}
int cuFuncLoad(void *function) { return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 1 ? 1024 : -1; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) {
  return attribute == 8 && value == 232448 - 1024 ? 0 : 1;
}
int cuLaunchKernel(const char *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
  char text[256];
  int status = fail_next;
  fail_next = 0;
  // Every kernel that the test starts has four parameters: three pointers, and an int.
  snprintf(text, sizeof text, "%s%s(%u,%u,%u)x(%u,%u,%u)+%u[%llx,%llx,%llx,%d];", is_capturing ? "captured " : "",
           function, x, y, z, bx, by, bz, shared, *(unsigned long long *)params[0], *(unsigned long long *)params[1],
           *(unsigned long long *)params[2], *(int *)params[3]);
  note(text);
  return status;
}
int cuStreamBeginCapture_v2(void *stream, int mode) { is_capturing = mode == 1; return mode == 1 ? 0 : 1; }
int cuStreamEndCapture(void *stream, void **graph) { is_capturing = 0; *graph = (void *)4; return 0; }
int cuGraphInstantiateWithFlags(void **made, void *graph, unsigned long long flags) { *made = (void *)5; return 0; }
int cuGraphDestroy(void *graph) { return graph == (void *)4 ? 0 : 1; }
int cuGraphExecDestroy(void *graph) { return graph == (void *)5 ? 0 : 1; }
int cuGraphUpload(void *graph, void *stream) { return 0; }
int cuGraphLaunch(void *graph, void *stream) { note("replay;"); return graph == (void *)5 ? 0 : 1; }
