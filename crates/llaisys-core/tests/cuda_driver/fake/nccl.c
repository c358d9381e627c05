// A fake NCCL for up to 8 ranks that are threads. Exchanges wait for every rank, as NCCL's kernels do, and run during
// the call on host memory. The calls of each rank are recorded. The signatures are those of nccl.h 2.28.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef VERSION
#define VERSION 22809
#endif
enum { RANKS = 8, F16 = 6, F32 = 7, BF16 = 9, IDS = 64 };
typedef struct { char bytes[128]; } Id;
typedef struct {
  int world, n_joined, n_waiting, round, ended;
  const void *from[RANKS];
  size_t n[RANKS];
  int type[RANKS];
} Group;
typedef struct { Group *group; int rank, ended; } Comm;
static Group groups[IDS];
static int n_ids, fails[RANKS], async[RANKS];
static char notes[RANKS][4096];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

const char *fake_notes(int rank) { return notes[rank]; }
// Sets the status that the next call of a rank returns, or the asynchronous error of its communicator from now on.
void fake_fail_next(int rank, int status) { fails[rank] = status; }
void fake_fail_async(int rank, int status) { async[rank] = status; }

static int failed(int rank) {
  int status = fails[rank];
  fails[rank] = 0;
  return status;
}
static void note(int rank, const char *text) { strncat(notes[rank], text, sizeof *notes - strlen(notes[rank]) - 1); }

// Waits until all ranks have arrived, or one has ended. Returns 0 if all have arrived.
static int meet(Group *g) {
  pthread_mutex_lock(&lock);
  int round = g->round;
  if (++g->n_waiting == g->world) {
    g->n_waiting = 0;
    ++g->round;
    pthread_cond_broadcast(&changed);
  }
  while (g->round == round && !g->ended) pthread_cond_wait(&changed, &lock);
  int lost = g->round == round;
  pthread_mutex_unlock(&lock);
  return lost;
}

int ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(int status) {
  return status == 2 ? "unhandled system error" : status == 6 ? "remote process exited" : "another error";
}
// Ends a communicator. Ranks that wait for it continue without a result, because the host never waits in a real NCCL.
static int end(Comm *comm, const char *how) {
  note(comm->rank, how);
  if (comm->ended++) note(comm->rank, "AGAIN;");
  pthread_mutex_lock(&lock);
  comm->group->ended = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return 0;
}
int ncclCommAbort(Comm *comm) { return end(comm, "abort;"); }
#ifndef NO_DESTROY
int ncclCommDestroy(Comm *comm) { return end(comm, "destroy;"); }
#endif
int ncclGetUniqueId(Id *id) {
  if (failed(0)) return 2;
  pthread_mutex_lock(&lock);
  memset(id, 'x', sizeof *id);
  // The number is at the start and at the end, so that a truncated id is detected.
  snprintf(id->bytes, 16, "%d", n_ids);
  id->bytes[127] = 'a' + n_ids++;
  pthread_mutex_unlock(&lock);
  return 0;
}
int ncclCommInitRank(Comm **made, int world, Id id, int rank) {
  int status = failed(rank), number = atoi(id.bytes);
  if (status) return status;
  if (rank < 0 || rank >= world || world > RANKS || id.bytes[127] != 'a' + number) return 4;
  Group *g = &groups[number];
  pthread_mutex_lock(&lock);
  g->world = world;
  pthread_mutex_unlock(&lock);
  char text[64];
  snprintf(text, sizeof text, "init %d of %d;", rank, world);
  note(rank, text);
  *made = calloc(1, sizeof **made);
  **made = (Comm){g, rank, 0};
  return meet(g) ? 2 : 0;
}
int ncclCommGetAsyncError(Comm *comm, int *status) { *status = comm->ended ? 4 : async[comm->rank]; return 0; }

static size_t size(int type) { return type == F32 ? 4 : 2; }
static float value(const void *at, int type, size_t i) {
  if (type == F32) return ((const float *)at)[i];
  if (type == F16) return ((const _Float16 *)at)[i];
  uint32_t word = (uint32_t)((const uint16_t *)at)[i] << 16;
  float x;
  return memcpy(&x, &word, 4), x;
}
static void put(void *at, int type, size_t i, float x) {
  if (type == F32) { ((float *)at)[i] = x; return; }
  if (type == F16) { ((_Float16 *)at)[i] = x; return; }
  uint32_t word;
  memcpy(&word, &x, 4);
  ((uint16_t *)at)[i] = (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

// Runs earlier work of the stream, if the fake driver is loaded and there is a stream.
static void catch_up(void *stream) {
  void *driver = stream ? dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) : NULL;
  int (*synchronize)(void *) = driver ? (int (*)(void *))dlsym(driver, "cuStreamSynchronize") : NULL;
  if (synchronize) synchronize(stream);
}

// Waits for all ranks, lets `work` read their inputs into its own result, and waits again before any rank writes.
typedef void Work(const Group *g, char *result, size_t n, int type, int root);
static int exchange(Comm *comm, const char *text, const void *from, void *to, size_t n, size_t n_out, int type, int root,
                    Work *work, void *stream) {
  char whole[128];
  int status = failed(comm->rank);
  snprintf(whole, sizeof whole, "%s(%zu,%d,%d)@%zx;", text, n, type, root, (size_t)stream);
  note(comm->rank, whole);
  if (status) return status;
  if (comm->ended || type != F16 && type != F32 && type != BF16) return 4;
  catch_up(stream);
  Group *g = comm->group;
  g->from[comm->rank] = from, g->n[comm->rank] = n, g->type[comm->rank] = type;
  if (meet(g)) return 0;  // NCCL's host functions do not report it
  for (int rank = 0; rank < g->world; ++rank)
    if (g->n[rank] != n || g->type[rank] != type) abort();
  char *result = malloc(n_out * size(type) + 1);
  work(g, result, n, type, root);
  if (!meet(g)) memcpy(to, result, n_out * size(type));
  free(result);
  return 0;
}
static void sum(const Group *g, char *result, size_t n, int type, int root) {
  for (size_t i = 0; i < n; ++i) {
    float x = 0;
    for (int rank = 0; rank < g->world; ++rank) x += value(g->from[rank], type, i);
    put(result, type, i, x);
  }
}
static void gather(const Group *g, char *result, size_t n, int type, int root) {
  for (int rank = 0; rank < g->world; ++rank) memcpy(result + rank * n * size(type), g->from[rank], n * size(type));
}
static void copy(const Group *g, char *result, size_t n, int type, int root) {
  memcpy(result, g->from[root], n * size(type));
}
int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, Comm *comm, void *stream) {
  return op ? 4 : exchange(comm, "sum", from, to, n, n, type, 0, sum, stream);
}
int ncclAllGather(const void *from, void *to, size_t n, int type, Comm *comm, void *stream) {
  return exchange(comm, "gather", from, to, n, n * comm->group->world, type, 0, gather, stream);
}
int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, Comm *comm, void *stream) {
  return exchange(comm, "copy", from, to, n, n, type, root, copy, stream);
}
