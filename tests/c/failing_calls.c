/* Fails calls of the library to the system, one place after the other, and counts what becomes of the process.
 *
 *     failing_calls LIBRARY CHECKPOINT TRACE_FILE KIND once|after PLACES
 *
 * KIND "memory" fails malloc and its like and mmap, "threads" pthread_create, "files" open, read, write and sync, "host"
 * the allocator that a host gives to vvae_create. "once" fails the call at a place, "after" that one and all later ones.
 *
 * With simulated_driver.c as libcuda.so, on its GPUs: "device" fails allocations on the device, "pinned" those of pinned
 * memory, "launch" launches, "driver" any call of the driver. With "taken" another process takes the GPU's memory at any
 * call, with "once" until the next. "lost" loses the GPU at any call, "member" the first of two.
 * On a lost GPU nothing works again, and the run with nothing failing takes the other GPU and the CPU.
 *
 * Each place runs in a child: create, configure, plan, encode, decode, range, stream, resume, free; then, with
 * nothing failing, encode once more, which must give the right bits. Prints "places N answered N completed N aborted N
 * hung N wrong N", and each place that is not right.
 *
 * PLACES is a number: that many, spread over all. 0 is one place for each distinct stack of calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "video_vae.h"

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

static uintptr_t library_start, library_end;
static int64_t made, fail_at, fail_until;
enum kind { MEMORY, THREADS, FILES, HOST, DEVICE, PINNED, LAUNCH, TAKEN, DRIVER, LOST, MEMBER, KINDS };
static const char *const kinds[KINDS] = {"memory", "threads", "files", "host", "device", "pinned",
                                         "launch", "taken", "driver", "lost", "member"};
static enum kind failing;
static const char *device = "cpu";
static void (*simulated_loss)(int), (*simulated_others)(int, int);
static int (*simulated_objects)(void);

/* The first place of each stack. Shared with the child that finds them. */
enum { MOST_STACKS = 1 << 16, DEPTH = 8 };
static struct stacks { int64_t count, place[MOST_STACKS]; uint64_t seen[4 * MOST_STACKS]; } *stacks;
static int finding;

static void note_stack(int64_t place) {
    static __thread int inside;
    void *frames[DEPTH + 3];
    uint64_t hash = 1469598103934665603u;
    if (inside) return;
    inside = 1;
    int i, n = backtrace(frames, DEPTH + 3);
    for (i = 0; i < n; i++) {
        uintptr_t at = (uintptr_t)frames[i];
        if (at >= library_start && at < library_end) hash = (hash ^ (at - library_start)) * 1099511628211u;
    }
    inside = 0;
    for (uint64_t at = hash % (4 * MOST_STACKS);; at = (at + 1) % (4 * MOST_STACKS)) {
        if (stacks->seen[at] == hash) return;
        if (stacks->seen[at] == 0 && stacks->count < MOST_STACKS) {
            stacks->seen[at] = hash;
            stacks->place[stacks->count++] = place;
            return;
        }
        if (stacks->count >= MOST_STACKS) return;
    }
}

static int next_fails(void) {
    int64_t place = __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED);
    if (finding) note_stack(place);
    return place >= fail_at && place < fail_until;
}

/* Whether this call fails. Only those of one kind and from the library's own code count. */
static int fails(enum kind kind, void *caller) {
    if (kind != failing || (uintptr_t)caller < library_start || (uintptr_t)caller >= library_end) return 0;
    return next_fails();
}

#define CALLER __builtin_return_address(0)

void *malloc(size_t bytes) { return fails(MEMORY, CALLER) ? NULL : __libc_malloc(bytes); }
void *calloc(size_t n, size_t bytes) { return fails(MEMORY, CALLER) ? NULL : __libc_calloc(n, bytes); }
void *realloc(void *block, size_t bytes) { return fails(MEMORY, CALLER) ? NULL : __libc_realloc(block, bytes); }
void *aligned_alloc(size_t align, size_t bytes) { return fails(MEMORY, CALLER) ? NULL : __libc_memalign(align, bytes); }

int posix_memalign(void **block, size_t align, size_t bytes) {
    if (fails(MEMORY, CALLER)) return ENOMEM;
    *block = __libc_memalign(align, bytes);
    return *block ? 0 : ENOMEM;
}

void *mmap64(void *at, size_t bytes, int protection, int flags, int file, off64_t offset) {
    static void *(*next)(void *, size_t, int, int, int, off64_t);
    if (fails(MEMORY, CALLER)) return errno = ENOMEM, MAP_FAILED;
    if (!next) next = (void *(*)(void *, size_t, int, int, int, off64_t))dlsym(RTLD_NEXT, "mmap64");
    return next(at, bytes, protection, flags, file, offset);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset) {
    static void *(*next)(void *, size_t, int, int, int, off_t);
    if (fails(MEMORY, CALLER)) return errno = ENOMEM, MAP_FAILED;
    if (!next) next = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    return next(at, bytes, protection, flags, file, offset);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*body)(void *), void *user) {
    return fails(THREADS, CALLER) ? EAGAIN : NEXT(pthread_create)(thread, how, body, user);
}

/* The standard library calls those with 64 in their names. */
ssize_t read(int file, void *to, size_t bytes) {
    return fails(FILES, CALLER) ? (errno = EIO, -1) : NEXT(read)(file, to, bytes);
}
ssize_t pread64(int file, void *to, size_t bytes, off64_t at) {
    return fails(FILES, CALLER) ? (errno = EIO, -1) : NEXT(pread64)(file, to, bytes, at);
}
ssize_t write(int file, const void *from, size_t bytes) {
    return fails(FILES, CALLER) ? (errno = ENOSPC, -1) : NEXT(write)(file, from, bytes);
}
int fsync(int file) { return fails(FILES, CALLER) ? (errno = EIO, -1) : NEXT(fsync)(file); }
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = flags & O_CREAT ? va_arg(rest, int) : 0;
    va_end(rest);
    return fails(FILES, CALLER) ? (errno = EMFILE, -1) : NEXT(open64)(path, flags, mode);
}

static void *host_alloc(void *user, uint64_t bytes, uint64_t align) {
    (void)user;
    return failing == HOST && next_fails() ? NULL : __libc_memalign(align, bytes);
}
static void host_free(void *user, void *block, uint64_t bytes) {
    (void)user, (void)bytes;
    free(block);
}

/* The answer of a driver's call: an error of CUDA, or 0. The first of a kind here is DEVICE. */
static int driver_fails(int kind, int gpu) {
    enum { OUT_OF_MEMORY = 2, OUT_OF_RESOURCES = 701, UNKNOWN = 999 };
    if (failing == TAKEN) return simulated_others(gpu, next_fails()), 0;
    if (failing < DRIVER) {
        int fails = kind == (int)(failing - DEVICE) && next_fails();
        return !fails ? 0 : failing == LAUNCH ? OUT_OF_RESOURCES : OUT_OF_MEMORY;
    }
    if (gpu != 0 || !next_fails()) return 0;
    if (failing == DRIVER) return UNKNOWN;
    simulated_loss(gpu);
    return 0;
}

#define FUNCTIONS(X)                                                                                             \
    X(vvae_create) X(vvae_configure) X(vvae_plan) X(vvae_encode) X(vvae_decode) X(vvae_stream_open)             \
    X(vvae_stream_push) X(vvae_stream_pull) X(vvae_stream_open_at) X(vvae_stream_close) X(vvae_error)           \
    X(vvae_free) X(vvae_decode_range)
#define DECLARE(name) static __typeof__(&name) f_##name;
FUNCTIONS(DECLARE)

/* The executable part of the library. */
static int find_library(struct dl_phdr_info *info, size_t size, void *name) {
    (void)size;
    if (!info->dlpi_name || strcmp(info->dlpi_name, name)) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_LOAD && (info->dlpi_phdr[i].p_flags & PF_X)) {
            library_start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            library_end = library_start + info->dlpi_phdr[i].p_memsz;
        }
    }
    return 1;
}

/* Frames of a GPU are larger, so that a limit offloads some. */
enum { FRAMES = 5, SIDE = 16, GPU_SIDE = 160, LATENTS = 2, CHANNELS = 16, PIXELS = FRAMES * GPU_SIDE * GPU_SIDE * 3 };
static uint8_t rgb[PIXELS], decoded[PIXELS];
static float latent[CHANNELS * LATENTS * (GPU_SIDE / 8) * (GPU_SIDE / 8)];
static int64_t video_shape[5] = {1, 3, FRAMES, SIDE, SIDE}, latent_shape[5] = {1, CHANNELS, LATENTS, SIDE / 8, SIDE / 8};
static const char *gpu_settings[][2] = {
    {"memory_limit", "26MiB"}, {"tiles", "never"}, {"rates", "products=1e14,memory=1e12,copies=1e9"}};
static const char *weights, *trace_file;

/* Texts are asked for after every failure, as hosts do. */
static int unnamed;
static int32_t told(vvae *v, int32_t status) {
    char text[512];
    if (status >= 0) return status;
    f_vvae_error(v, text, sizeof text);
    if (text[0] == 0) unnamed = 1, printf("a failure without a text\n");
    if (status == VVAE_ERROR_DEVICE && failing == LOST && !strstr(text, "lost"))
        unnamed = 1, printf("not named: %s\n", text);
    return status;
}

static int32_t pull_all(vvae *v, vvae_stream *s, vvae_tensor *video) {
    int64_t frames;
    int32_t status;
    while ((status = told(v, f_vvae_stream_pull(s, video, NULL, &frames))) == VVAE_OK) {}
    return status;
}

/* The lowest status of all calls; a brief one ends after encode. */
static int32_t scenario(int brief) {
    vvae_tensor video = {rgb, VVAE_DEVICE_CPU, 0, 5, VVAE_DTYPE_U8, video_shape, NULL, 0};
    vvae_tensor latents = {latent, VVAE_DEVICE_CPU, 0, 5, VVAE_DTYPE_F32, latent_shape, NULL, 0};
    vvae_create_info info = {.struct_size = sizeof info, .abi_version = VVAE_ABI_VERSION, .weights = weights, .device = device};
    if (failing == HOST) info.alloc = host_alloc, info.free = host_free;
    vvae_plan_info plan = {.struct_size = sizeof plan};
    char text[2048];
    vvae *v = NULL;
    vvae_stream *s = NULL;
    int64_t taken;
    int32_t worst = 0;
#define NOTE(call)                              \
    do {                                        \
        int32_t status = told(v, call);         \
        if (status < worst) worst = status;     \
    } while (0)
    NOTE(f_vvae_create(&info, &v));
    if (!v) return worst;
    /* With one thread the places of stacks are the same each time. */
    NOTE(f_vvae_configure(v, "threads", stacks ? "1" : "2"));
    for (int i = 0; !strncmp(device, "cuda", 4) && i < 3; i++) NOTE(f_vvae_configure(v, gpu_settings[i][0], gpu_settings[i][1]));
    NOTE(f_vvae_configure(v, "nonsense", "value")); /* always -1 */
    worst = worst == VVAE_ERROR_ARGUMENT ? 0 : worst;
    NOTE(f_vvae_plan(v, "decode", latent_shape, &plan, text, sizeof text));
    NOTE(f_vvae_encode(v, &video, &latents, NULL));
    if (brief) {
        NOTE(f_vvae_free(v));
        return worst;
    }
    video.data = decoded;
    NOTE(f_vvae_decode(v, &latents, &video, NULL));
    NOTE(f_vvae_decode_range(v, &latents, LATENTS, 0, &video, NULL));
    if (failing == MEMBER) { /* A round of a stream on several devices needs more than this memory_limit. */
        NOTE(f_vvae_free(v));
        return worst;
    }
    NOTE(f_vvae_stream_open(v, "decode", latent_shape, &s));
    if (s) {
        NOTE(f_vvae_stream_push(s, &latents, &taken));
        NOTE(pull_all(v, s, &video));
        NOTE(f_vvae_stream_close(s));
        s = NULL;
        /* Resumed, with a trace of it in a file. */
        NOTE(f_vvae_configure(v, "trace", trace_file));
        NOTE(f_vvae_stream_open_at(v, "decode", latent_shape, 1, &s));
        if (s) NOTE(f_vvae_stream_push(s, &latents, &taken));
        if (s) NOTE(f_vvae_stream_push(s, NULL, NULL));
        if (s) NOTE(pull_all(v, s, &video));
        if (s) NOTE(f_vvae_stream_close(s));
        NOTE(f_vvae_configure(v, "trace", ""));
    }
    NOTE(f_vvae_free(v));
    return worst;
}

enum { COMPLETED, ANSWERED, WRONG, ABORTED, HUNG };

static int child(int64_t place, int once) {
    static float expected[sizeof latent / sizeof *latent];
    memcpy(expected, latent, sizeof latent);
    made = 0;
    fail_at = place;
    fail_until = once ? place + 1 : INT64_MAX;
    int32_t first = scenario(0);
    fail_at = INT64_MAX;
    /* What a failing driver did not take back stays its own. */
    if (simulated_objects && failing != DRIVER && simulated_objects())
        return printf("%d objects are left\n", simulated_objects()), WRONG;
    if (failing >= LOST) device = "cuda:1";
    memset(latent, 1, sizeof latent);
    int32_t second = scenario(1);
    size_t bytes = CHANNELS * LATENTS * latent_shape[3] * latent_shape[4] * sizeof *latent;
    if (second != 0 || memcmp(expected, latent, bytes) || unnamed)
        return WRONG;
    if (failing >= LOST && (device = "cpu", scenario(1)) != 0) return WRONG;
    if (first != 0 && first != VVAE_ERROR_MEMORY && first != VVAE_ERROR_CHECKPOINT && first != VVAE_ERROR_DEVICE &&
        first != VVAE_ERROR_STATE && first != VVAE_ERROR_ARGUMENT)
        return WRONG;
    return first == 0 ? COMPLETED : ANSWERED;
}

static int run(int64_t place, int once, int *signal) {
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        alarm(300); /* Others may hold the cores. */
        if (!getenv("VVAE_SHOW_ABORTS")) freopen("/dev/null", "w", stderr);
        _exit(child(place, once));
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return WRONG;
    *signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Takes the simulated driver, which the library will find under the same name. */
static int simulate(void) {
    void *driver = dlopen("libcuda.so", RTLD_NOW);
    int (**failure)(int, int) = driver ? dlsym(driver, "simulated_failure") : NULL;
    if (!failure) return fprintf(stderr, "libcuda.so is not the simulated driver\n"), 1;
    *failure = driver_fails;
    video_shape[3] = video_shape[4] = GPU_SIDE, latent_shape[3] = latent_shape[4] = GPU_SIDE / 8;
    simulated_loss = (void (*)(int))dlsym(driver, "simulated_loss");
    simulated_others = (void (*)(int, int))dlsym(driver, "simulated_others");
    simulated_objects = (int (*)(void))dlsym(driver, "simulated_objects");
    device = failing == MEMBER ? "cuda:0,cuda:1" : "cuda:0";
    return 0;
}

int main(int argc, char **argv) {
    int64_t total, places, i, count[5] = {0};
    int pipes[2], once;
    void *library;
    if (argc != 7) return fprintf(stderr, "see the head of the source\n"), 2;
    fail_at = INT64_MAX;
    if (!(library = dlopen(argv[1], RTLD_NOW))) return fprintf(stderr, "%s\n", dlerror()), 2;
    dl_iterate_phdr(find_library, argv[1]);
#define LOOK_UP(name) \
    if (!(f_##name = (__typeof__(f_##name))dlsym(library, #name))) return fprintf(stderr, "no " #name "\n"), 2;
    FUNCTIONS(LOOK_UP)
    weights = argv[2], trace_file = argv[3], once = !strcmp(argv[5], "once"), places = atoll(argv[6]);
    while (failing < KINDS && strcmp(argv[4], kinds[failing])) failing++;
    if (failing == KINDS) return fprintf(stderr, "no kind %s\n", argv[4]), 2;
    if (failing >= DEVICE && simulate()) return 2;
    for (i = 0; i < PIXELS; i++) rgb[i] = (uint8_t)(i * 7 + i / 50);
    /* One place in this process, for a debugger. */
    if (getenv("VVAE_PLACE")) return child(atoll(getenv("VVAE_PLACE")), once);
    if (places == 0) {
        void *frame;
        stacks = mmap(NULL, sizeof *stacks, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        backtrace(&frame, 1); /* It allocates when it is first called. */
    }
    /* A child counts the places and computes the right bits: this process must not create a handle before it forks. */
    if (pipe(pipes)) return 2;
    pid_t pid = fork();
    if (pid == 0) {
        finding = stacks != NULL;
        int32_t status = scenario(0);
        write(pipes[1], &status, sizeof status);
        write(pipes[1], &made, sizeof made);
        write(pipes[1], latent, sizeof latent);
        _exit(0);
    }
    int32_t status = -100;
    if (read(pipes[0], &status, sizeof status) != sizeof status || status != 0) return printf("the run without failures: %d\n", status), 2;
    read(pipes[0], &total, sizeof total);
    read(pipes[0], latent, sizeof latent);
    waitpid(pid, NULL, 0);
    if (stacks) printf("%lld stacks\n", (long long)(places = stacks->count));
    if (places > total) places = total;
    fflush(stdout);
    for (i = 0; i < places; i++) {
        /* The same places each time; the first ones densely, as create has few. */
        int64_t place = stacks ? stacks->place[i] : places == total ? i + 1 : i < places / 4 ? i + 1 : places / 4 + 1 + (i - places / 4) * (total - places / 4) / (places - places / 4);
        int signal = 0, outcome = run(place, once, &signal);
        outcome = signal == SIGALRM ? HUNG : outcome < 0 ? ABORTED : outcome > WRONG ? WRONG : outcome;
        count[outcome]++;
        if (outcome >= WRONG) {
            printf("place %lld: %s, signal %d\n", (long long)place, outcome == HUNG ? "hung" : outcome == ABORTED ? "aborted" : "wrong", signal);
            fflush(stdout);
        }
    }
    printf("of %lld: places %lld answered %lld completed %lld aborted %lld hung %lld wrong %lld\n", (long long)total, (long long)places,
           (long long)count[ANSWERED], (long long)count[COMPLETED], (long long)count[ABORTED], (long long)count[HUNG], (long long)count[WRONG]);
    return 0;
}
