/* A CUDA driver with two GPUs that have memory and compute nothing, for tests of what becomes of a failing driver.
 * Built as libcuda.so, found through LD_LIBRARY_PATH. Launches and copies only check their arguments. What is copied from
 * a GPU is 0, so that results do not depend on plans.
 *
 * Every call that may fail asks `simulated_failure` first. Misuse ends the process: memory or objects that are gone,
 * copies outside a block. `simulated_objects` counts what was not given back. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind { DEVICE_MEMORY, PINNED_MEMORY, LAUNCH, COPY, OTHER };
enum { GPUS = 2, TOTAL = 1 << 30, ALIGN = 256, MOST_THREADS = 1024, MOST_SHARED = 227 << 10 };
enum { OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NO_CONTEXT = 201, LOST = 700 };
typedef int answer;
typedef uint64_t address;

/* What a call of a kind on a GPU answers; 0: it does its work. */
answer (*simulated_failure)(int kind, int gpu);

enum type { CONTEXT = 1, BLOCK, PINNED, STREAM, EVENT, MODULE, FUNCTION, GRAPH, EXECUTABLE, NODE };
/* A function belongs to its module and a node to its graph, and goes with it. */
struct object { enum type type; int gpu, users; uint8_t *start; size_t bytes; const void *owner; struct object *next; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct object *objects, contexts[GPUS];
static size_t used[GPUS], taken[GPUS];
static int lost[GPUS];
static __thread struct { int count, gpu[64]; } current;

static void misuse(const char *what) {
    fprintf(stderr, "simulated driver: %s\n", what);
    abort();
}

/* From now on everything on this GPU fails, as after a kernel's fault. */
void simulated_loss(int gpu) { __atomic_store_n(&lost[gpu], 1, __ATOMIC_SEQ_CST); }

/* Another process takes all memory that is left, or gives it back. */
void simulated_others(int gpu, int take) {
    pthread_mutex_lock(&lock);
    taken[gpu] = take ? TOTAL - used[gpu] : 0;
    pthread_mutex_unlock(&lock);
}

/* The lock is held. A block that is freed is the library's to allocate again until others take it. */
static size_t free_memory(int gpu) { return TOTAL - used[gpu] - taken[gpu]; }

int simulated_objects(void) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (struct object *at = objects; at; at = at->next) count++;
    for (int gpu = 0; gpu < GPUS; gpu++) count += contexts[gpu].users;
    pthread_mutex_unlock(&lock);
    return count;
}

/* Calls without a context are answered with an error before this. */
static int gpu_of_thread(void) { return current.count ? current.gpu[current.count - 1] : -1; }

static answer ask(enum kind kind, int gpu) {
    if (gpu < 0) return NO_CONTEXT;
    answer fails = simulated_failure ? simulated_failure(kind, gpu) : 0;
    return __atomic_load_n(&lost[gpu], __ATOMIC_SEQ_CST) ? LOST : fails;
}

#define MAY_FAIL(kind)                          \
    do {                                        \
        answer fails = ask(kind, gpu_of_thread()); \
        if (fails) return fails;                \
    } while (0)

static struct object *make(enum type type, int gpu, uint8_t *start, size_t bytes) {
    struct object *new = calloc(1, sizeof *new);
    *new = (struct object){type, gpu, 0, start, bytes, NULL, NULL};
    pthread_mutex_lock(&lock);
    new->next = objects, objects = new;
    pthread_mutex_unlock(&lock);
    return new;
}

static struct object *make_part(enum type type, const void *owner) {
    struct object *part = make(type, gpu_of_thread(), NULL, 0);
    part->owner = owner;
    return part;
}

static struct object **find(const void *what, enum type type) {
    struct object **at = &objects;
    while (*at && (void *)*at != what) at = &(*at)->next;
    if (!*at || (*at)->type != type) misuse("an object that does not exist");
    return at;
}

/* An object of this thread's GPU, or a null stream. */
static void check(const void *what, enum type type) {
    if (!what && type == STREAM) return;
    pthread_mutex_lock(&lock);
    if ((*find(what, type))->gpu != gpu_of_thread()) misuse("an object of another GPU");
    pthread_mutex_unlock(&lock);
}

/* A lost GPU says so, and has nothing left to give back. */
static answer drop(const void *what, enum type type) {
    pthread_mutex_lock(&lock);
    struct object **at = find(what, type), *gone = *at;
    *at = gone->next;
    for (at = &objects; *at;) {
        struct object *owned = *at;
        if (owned->owner != gone) at = &owned->next;
        else *at = owned->next, free(owned);
    }
    if (type == BLOCK) used[gone->gpu] -= gone->bytes;
    int gpu = gone->gpu;
    pthread_mutex_unlock(&lock);
    free(gone->type == PINNED ? NULL : gone->start);
    free(gone);
    return lost[gpu] ? LOST : 0;
}

/* The block or pinned memory that holds these bytes. */
static struct object *holder(enum type type, const void *start, size_t bytes) {
    uintptr_t from = (uintptr_t)start;
    struct object *at = objects;
    for (; at; at = at->next) {
        uintptr_t first = (uintptr_t)at->start;
        if (at->type == type && from >= first && bytes <= at->bytes && from - first <= at->bytes - bytes) break;
    }
    return at;
}

static uint8_t *on_device(address start, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct object *block = holder(BLOCK, (void *)start, bytes);
    if (!block) misuse("bytes that are not in a block of the GPU");
    if (block->gpu != gpu_of_thread()) misuse("bytes of another GPU");
    pthread_mutex_unlock(&lock);
    return (uint8_t *)start;
}

answer cuInit(unsigned flags) { return flags; }
answer cuDriverGetVersion(int *version) { return *version = 12090, 0; }
answer cuDeviceGetCount(int *count) { return *count = GPUS, 0; }
answer cuDeviceGet(int *gpu, int index) { return index < 0 || index >= GPUS ? INVALID_DEVICE : (*gpu = index, 0); }
answer cuDeviceGetName(char *text, int room, int gpu) { return snprintf(text, room, "Simulated GPU %d", gpu), 0; }
answer cuDeviceTotalMem_v2(size_t *bytes, int gpu) { return *bytes = TOTAL, (void)gpu, 0; }
answer cuDeviceGetUuid_v2(char *uuid, int gpu) { return memset(uuid, 17 + gpu, 16), 0; }

answer cuDeviceGetAttribute(int *value, int which, int gpu) {
    static const int known[][2] = {{75, 9},        {76, 0},        {16, 132}, {97, MOST_SHARED},
                                   {13, 1980000}, {36, 3200000}, {37, 6144}};
    (void)gpu;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == which) return *value = known[i][1], 0;
    misuse("an attribute that is not known");
    return 1;
}

answer cuDevicePrimaryCtxGetState(int gpu, unsigned *flags, int *active) {
    return *flags = 0, *active = contexts[gpu].users > 0, 0;
}

answer cuDevicePrimaryCtxRetain(void **context, int gpu) {
    answer fails = ask(OTHER, gpu);
    if (fails) return fails;
    contexts[gpu].gpu = gpu;
    __atomic_add_fetch(&contexts[gpu].users, 1, __ATOMIC_SEQ_CST);
    return *context = &contexts[gpu], 0;
}

answer cuDevicePrimaryCtxRelease_v2(int gpu) {
    if (__atomic_sub_fetch(&contexts[gpu].users, 1, __ATOMIC_SEQ_CST) < 0) misuse("a context that is released twice");
    return 0;
}

/* A lost GPU's context can still be made current. */
answer cuCtxPushCurrent_v2(void *context) {
    struct object *pushed = context;
    if (pushed < contexts || pushed >= contexts + GPUS || pushed->users <= 0) misuse("a context that does not exist");
    answer fails = ask(OTHER, pushed->gpu);
    if (fails && fails != LOST) return fails;
    if (current.count == 64) misuse("contexts that were not popped");
    return current.gpu[current.count++] = pushed->gpu, 0;
}

answer cuCtxPopCurrent_v2(void **context) {
    if (!current.count) return NO_CONTEXT;
    *context = &contexts[gpu_of_thread()];
    return current.count--, 0;
}

answer cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    MAY_FAIL(OTHER);
    pthread_mutex_lock(&lock);
    *free_bytes = free_memory(gpu_of_thread());
    pthread_mutex_unlock(&lock);
    return *total = TOTAL, 0;
}

answer cuMemAlloc_v2(address *block, size_t bytes) {
    int gpu = gpu_of_thread();
    MAY_FAIL(DEVICE_MEMORY);
    pthread_mutex_lock(&lock);
    int fits = bytes > 0 && bytes <= free_memory(gpu);
    if (fits) used[gpu] += bytes;
    pthread_mutex_unlock(&lock);
    if (!fits) return OUT_OF_MEMORY;
    uint8_t *start = aligned_alloc(ALIGN, (bytes + ALIGN - 1) / ALIGN * ALIGN);
    if (!start) misuse("no memory for the simulation");
    make(BLOCK, gpu, start, bytes);
    return *block = (address)start, 0;
}

answer cuMemFree_v2(address block) {
    pthread_mutex_lock(&lock);
    struct object *found = holder(BLOCK, (void *)block, 1);
    pthread_mutex_unlock(&lock);
    if (!found || found->start != (uint8_t *)block) misuse("a block that is not allocated");
    return drop(found, BLOCK);
}

answer cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
    (void)flags;
    MAY_FAIL(PINNED_MEMORY);
    make(PINNED, gpu_of_thread(), start, bytes);
    return 0;
}

answer cuMemHostUnregister(void *start) {
    pthread_mutex_lock(&lock);
    struct object *found = holder(PINNED, start, 1);
    pthread_mutex_unlock(&lock);
    if (!found || found->start != start) misuse("memory that is not pinned");
    return drop(found, PINNED);
}

answer cuMemHostAlloc(void **start, size_t bytes, unsigned flags) {
    (void)flags;
    MAY_FAIL(PINNED_MEMORY);
    *start = calloc(1, bytes);
    make(PINNED, gpu_of_thread(), *start, bytes);
    return 0;
}

answer cuMemFreeHost(void *start) {
    answer said = cuMemHostUnregister(start);
    free(start);
    return said;
}

answer cuMemHostGetDevicePointer_v2(address *mapped, void *start, unsigned flags) {
    (void)flags;
    MAY_FAIL(OTHER);
    return *mapped = (address)start, 0;
}

answer cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    MAY_FAIL(COPY);
    check(stream, STREAM);
    if (!from) misuse("a copy from nowhere");
    return on_device(to, bytes), 0;
}

answer cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
    MAY_FAIL(COPY);
    check(stream, STREAM);
    on_device(from, bytes);
    memset(to, 0, bytes);
    return 0;
}

answer cuMemsetD8Async(address to, unsigned char value, size_t bytes, void *stream) {
    MAY_FAIL(COPY);
    check(stream, STREAM);
    (void)value;
    return on_device(to, bytes), 0;
}

struct side { size_t x, y; int type; void *host; address device; void *array; size_t pitch; };
struct copy_2d { struct side from, to; size_t width, height; };

answer cuMemcpy2DAsync_v2(const struct copy_2d *copy, void *stream) {
    const struct side *sides[2] = {&copy->to, &copy->from};
    MAY_FAIL(COPY);
    check(stream, STREAM);
    for (size_t row = 0; row < copy->height; row++) {
        uint8_t *at[2];
        for (int i = 0; i < 2; i++) {
            const struct side *side = sides[i];
            size_t offset = (side->y + row) * side->pitch + side->x;
            at[i] = side->type == 1 ? (uint8_t *)side->host + offset : on_device(side->device + offset, copy->width);
        }
        if (copy->to.type == 1) memset(at[0], 0, copy->width);
    }
    return 0;
}

#define MAKE(name, type, ...)                                     \
    answer name(void **made, ##__VA_ARGS__) {                     \
        MAY_FAIL(OTHER);                                          \
        return *made = make(type, gpu_of_thread(), NULL, 0), 0;   \
    }
#define DROP(name, type) answer name(void *gone) { return drop(gone, type); }
#define USE(name, type, kind, ...)              \
    answer name(void *what, ##__VA_ARGS__) {    \
        MAY_FAIL(kind);                         \
        return check(what, type), 0;            \
    }

MAKE(cuStreamCreate, STREAM, unsigned flags)
DROP(cuStreamDestroy_v2, STREAM)
USE(cuStreamSynchronize, STREAM, OTHER)
MAKE(cuEventCreate, EVENT, unsigned flags)
DROP(cuEventDestroy_v2, EVENT)
USE(cuEventSynchronize, EVENT, OTHER)
MAKE(cuModuleLoadData, MODULE, const void *image)
DROP(cuModuleUnload, MODULE)
USE(cuFuncSetAttribute, FUNCTION, OTHER, int which, int value)
MAKE(cuGraphCreate, GRAPH, unsigned flags)
DROP(cuGraphDestroy, GRAPH)
DROP(cuGraphExecDestroy, EXECUTABLE)

answer cuStreamIsCapturing(void *stream, int *status) {
    MAY_FAIL(OTHER);
    return check(stream, STREAM), *status = 0, 0;
}

answer cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)flags;
    MAY_FAIL(OTHER);
    return check(stream, STREAM), check(event, EVENT), 0;
}

answer cuEventRecord(void *event, void *stream) {
    MAY_FAIL(OTHER);
    return check(event, EVENT), check(stream, STREAM), 0;
}

answer cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    MAY_FAIL(OTHER);
    return check(start, EVENT), check(end, EVENT), *milliseconds = 1, 0;
}

answer cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)name;
    MAY_FAIL(OTHER);
    return check(module, MODULE), *function = make_part(FUNCTION, module), 0;
}

answer cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned rows,
                      unsigned planes, unsigned shared, void *stream, void **params, void **extra) {
    (void)extra;
    MAY_FAIL(LAUNCH);
    uint64_t block = (uint64_t)threads * rows * planes;
    if (!x || !y || !z || !params || !*params || !block || block > MOST_THREADS || shared > MOST_SHARED)
        misuse("a launch that no GPU takes");
    return check(function, FUNCTION), check(stream, STREAM), 0;
}

answer cuGraphAddKernelNode_v2(void **node, void *graph, void **before, size_t count, void **params) {
    MAY_FAIL(LAUNCH);
    check(graph, GRAPH), check(*params, FUNCTION);
    for (size_t i = 0; i < count; i++) check(before[i], NODE);
    return *node = make_part(NODE, graph), 0;
}

answer cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    (void)flags;
    MAY_FAIL(LAUNCH);
    return check(graph, GRAPH), *executable = make(EXECUTABLE, gpu_of_thread(), NULL, 0), 0;
}

answer cuGraphExecKernelNodeSetParams_v2(void *executable, void *node, void **params) {
    MAY_FAIL(LAUNCH);
    return check(executable, EXECUTABLE), check(node, NODE), check(*params, FUNCTION), 0;
}

answer cuGraphLaunch(void *executable, void *stream) {
    MAY_FAIL(LAUNCH);
    return check(executable, EXECUTABLE), check(stream, STREAM), 0;
}

answer cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *start, const uint64_t *dims,
                              const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                              int swizzle, int promotion, int fill) {
    (void)type, (void)dims, (void)strides, (void)box, (void)steps;
    (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    MAY_FAIL(OTHER);
    if (rank < 1 || rank > 5 || (uintptr_t)start % 16 || (uintptr_t)map % 64) misuse("a tensor map of nothing");
    return memset(map, 0, 128), 0;
}
