/* Streams, events, graphs, and the kernels of scripts/gpu_check: work that is done late.
 *
 * A queue has a thread. What nobody waits for is done `late_us` after it was asked for; whoever
 * synchronises has it done at once. A stream that blocks with the default stream shares its context's
 * queue, which is stricter than a GPU; one that does not has a queue of its own.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <elf.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ARGS_MAX 6

struct work {
    struct work *next;
    work_fn run;
    uint64_t args[ARGS_MAX];
    uint64_t due_ns;
};

struct queue {
    struct queue *next; /* of all queues; none is ever freed, since events point at them */
    struct context *context;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct work *first, **last;
    uint64_t added, done, hurried; /* hurried: somebody waits for all up to this one */
    bool closing;
};

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static struct queue *all;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void *serve(void *given) {
    struct queue *queue = given;
    pthread_mutex_lock(&queue->lock);
    while (queue->first || !queue->closing) {
        struct work *work = queue->first;
        if (!work) {
            pthread_cond_wait(&queue->changed, &queue->lock);
        } else if (queue->hurried <= queue->done && now_ns() < work->due_ns) {
            struct timespec due = {work->due_ns / 1000000000, work->due_ns % 1000000000};
            pthread_cond_timedwait(&queue->changed, &queue->lock, &due);
        } else {
            if (!(queue->first = work->next)) queue->last = &queue->first;
            pthread_mutex_unlock(&queue->lock);
            work->run(work->args);
            free(work);
            pthread_mutex_lock(&queue->lock);
            queue->done++;
            pthread_cond_broadcast(&queue->changed);
        }
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

struct queue *queue_new(void) {
    struct queue *queue = calloc(1, sizeof *queue);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&queue->changed, &monotonic);
    pthread_mutex_init(&queue->lock, NULL);
    queue->last = &queue->first;
    queue->context = current();
    pthread_mutex_lock(&all_lock);
    queue->next = all;
    all = queue;
    pthread_mutex_unlock(&all_lock);
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, queue)) abort();
    pthread_detach(thread);
    return queue;
}

/* What is in it is still done. */
void queue_close(struct queue *queue) {
    pthread_mutex_lock(&queue->lock);
    queue->closing = true;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
}

uint64_t queue_add(struct queue *queue, work_fn run, const uint64_t *args, int nargs) {
    struct work *work = calloc(1, sizeof *work);
    work->run = run;
    memcpy(work->args, args, nargs * sizeof *args);
    work->due_ns = now_ns() + 1000ull * setting("late_us");
    pthread_mutex_lock(&queue->lock);
    *queue->last = work;
    queue->last = &work->next;
    uint64_t place = ++queue->added;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
    return place;
}

void queue_wait(struct queue *queue, uint64_t upto) {
    pthread_mutex_lock(&queue->lock);
    if (queue->hurried < upto) queue->hurried = upto;
    pthread_cond_broadcast(&queue->changed);
    while (queue->done < upto) pthread_cond_wait(&queue->changed, &queue->lock);
    pthread_mutex_unlock(&queue->lock);
}

static uint64_t added(struct queue *queue) {
    pthread_mutex_lock(&queue->lock);
    uint64_t upto = queue->added;
    pthread_mutex_unlock(&queue->lock);
    return upto;
}

static bool is_done(struct queue *queue, uint64_t upto) {
    pthread_mutex_lock(&queue->lock);
    bool done = queue->done >= upto;
    pthread_mutex_unlock(&queue->lock);
    return done;
}

void queue_drain(struct queue *queue) { queue_wait(queue, added(queue)); }

void context_drain(struct context *context) {
    queue_drain(context->ordered);
    pthread_mutex_lock(&all_lock);
    struct queue *one = all; /* queues are added in front only */
    pthread_mutex_unlock(&all_lock);
    for (; one; one = one->next)
        if (one->context == context && one != context->ordered) queue_drain(one);
}

/* --- streams */

struct launch {
    work_fn run;
    uint64_t args[ARGS_MAX];
    int nargs;
};

struct graph {
    struct launch launches[16];
    int n;
};

struct stream {
    struct queue *queue;
    struct graph *capture;
    bool own;
};

#define START_IN_CONTEXT(...)                                                                      \
    do {                                                                                           \
        CUresult code_ = ready(__VA_ARGS__);                                                       \
        if (code_) return code_;                                                                   \
        if (!current()) return CUDA_ERROR_INVALID_CONTEXT;                                         \
    } while (0)

static bool is_default(CUstream stream) { return (uintptr_t)stream <= 2; } /* NULL, LEGACY, PER_THREAD */

struct queue *queue_of(CUstream stream) { return is_default(stream) ? current()->ordered : stream->queue; }

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    START_IN_CONTEXT("cuStreamCreate", "%u", flags);
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    struct stream *made = calloc(1, sizeof *made);
    made->own = flags == 1; /* CU_STREAM_NON_BLOCKING */
    made->queue = made->own ? queue_new() : current()->ordered;
    *stream = made;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    START_IN_CONTEXT("cuStreamDestroy", "%p", (void *)stream);
    if (is_default(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->own) queue_close(stream->queue);
    free(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    START_IN_CONTEXT("cuStreamSynchronize", "%p", (void *)stream);
    if (!is_default(stream) && stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    queue_drain(queue_of(stream));
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) {
    START_IN_CONTEXT("cuStreamQuery", "%p", (void *)stream);
    struct queue *queue = queue_of(stream);
    return is_done(queue, added(queue)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static void store(uint64_t *args) { /* address, value */
    uint64_t *word = (uint64_t *)bytes_of(args[0], 8);
    if (word) __atomic_store_n(word, args[1], __ATOMIC_SEQ_CST);
}

CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr ptr, uint64_t value, unsigned flags) {
    START_IN_CONTEXT("cuStreamWriteValue64", "%#llx %llu", ptr, (unsigned long long)value);
    if (!setting("memops")) return CUDA_ERROR_NOT_SUPPORTED;
    if (ptr % 8 || !bytes_of(ptr, 8) || flags > 1) return CUDA_ERROR_INVALID_VALUE;
    if (!is_default(stream) && stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    queue_add(queue_of(stream), store, (uint64_t[]){ptr, value}, 2);
    return CUDA_SUCCESS;
}

/* --- events */

struct event {
    struct queue *queue;
    uint64_t upto;
};

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    START_IN_CONTEXT("cuEventCreate", "%u", flags);
    *event = calloc(1, sizeof **event);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    START_IN_CONTEXT("cuEventRecord", "%p", (void *)stream);
    event->queue = queue_of(stream);
    event->upto = added(event->queue);
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
    START_IN_CONTEXT("cuEventQuery", " ");
    return !event->queue || is_done(event->queue, event->upto) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
    START_IN_CONTEXT("cuEventSynchronize", " ");
    if (event->queue) queue_wait(event->queue, event->upto);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    START_IN_CONTEXT("cuEventDestroy", " ");
    free(event);
    return CUDA_SUCCESS;
}

static void wait_for_queue(uint64_t *args) { queue_wait((struct queue *)(uintptr_t)args[0], args[1]); }

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    START_IN_CONTEXT("cuStreamWaitEvent", "%u", flags);
    struct queue *queue = queue_of(stream);
    if (event->queue && event->queue != queue)
        queue_add(queue, wait_for_queue, (uint64_t[]){(uintptr_t)event->queue, event->upto}, 2);
    return CUDA_SUCCESS;
}

/* --- kernels: those of scripts/gpu_check, written once more in C; an image must hold their names */

static volatile uint64_t *word(uint64_t ptr) { return (volatile uint64_t *)bytes_of(ptr, 8); }

static bool seen(volatile uint64_t *at, uint64_t value, uint64_t spins) {
    if (setting("deaf")) return false;
    for (; __atomic_load_n(at, __ATOMIC_SEQ_CST) != value; spins--) {
        if (!spins) return false;
        sched_yield();
    }
    return true;
}

static void advance(uint64_t *args) { ++*word(args[0]); }

static void ask(uint64_t *args) {
    volatile uint64_t *own = word(args[0]);
    uint64_t value = *own + 1, started = now_ns();
    __atomic_store_n(own, value, __ATOMIC_SEQ_CST);
    bool answered = seen(word(args[1]), value, args[3]);
    __atomic_store_n(word(args[2]), answered ? now_ns() - started : 0, __ATOMIC_SEQ_CST);
}

static void wait_for(uint64_t *args) {
    bool told = seen(word(args[0]), args[1], args[5]);
    gpu_copy(args[3], NULL, args[2], NULL, args[4]);
    *bytes_of(args[3] + args[4], 1) = told;
}

struct function {
    const char *name;
    work_fn run;
    int nargs;
};
static const struct function functions[] = {{"advance", advance, 1}, {"ask", ask, 4}, {"wait_for", wait_for, 6}};

struct module {
    const char *names[3];
};

CUresult cuModuleLoadData(struct module **module, const void *image) {
    START_IN_CONTEXT("cuModuleLoadData", " ");
    const Elf64_Ehdr *elf = image;
    if (memcmp(elf->e_ident, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
    size_t n = elf->e_shoff + (size_t)elf->e_shentsize * elf->e_shnum;
    struct module *made = calloc(1, sizeof *made);
    for (int k = 0; k < 3; k++)
        if (memmem(image, n, functions[k].name, strlen(functions[k].name))) made->names[k] = functions[k].name;
    *module = made;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(const struct function **function, struct module *module, const char *name) {
    START_IN_CONTEXT("cuModuleGetFunction", "%s", name);
    for (int k = 0; k < 3; k++)
        if (module->names[k] && !strcmp(name, module->names[k])) {
            *function = &functions[k];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuLaunchKernel(const struct function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void **params, void **extra) {
    START_IN_CONTEXT("cuLaunchKernel", "%s %ux%ux%u %ux%ux%u %u", function->name, gx, gy, gz, bx, by, bz, shared);
    if (gx * gy * gz != 1 || bx * by * bz != 1 || extra) return CUDA_ERROR_INVALID_VALUE; /* one thread */
    struct launch launch = {.run = function->run, .nargs = function->nargs};
    for (int k = 0; k < launch.nargs; k++) launch.args[k] = *(uint64_t *)params[k];
    struct graph *capture = is_default(stream) ? NULL : stream->capture;
    if (capture && capture->n == 16) return CUDA_ERROR_OUT_OF_MEMORY;
    if (capture)
        capture->launches[capture->n++] = launch;
    else
        queue_add(queue_of(stream), launch.run, launch.args, launch.nargs);
    return CUDA_SUCCESS;
}

/* --- graphs of kernels */

CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    START_IN_CONTEXT("cuStreamBeginCapture", "%d", mode);
    if (is_default(stream) || stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    stream->capture = calloc(1, sizeof *stream->capture);
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, struct graph **graph) {
    START_IN_CONTEXT("cuStreamEndCapture", " ");
    if (is_default(stream) || !stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    *graph = stream->capture;
    stream->capture = NULL;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(struct graph **ready_graph, struct graph *graph, uint64_t flags) {
    START_IN_CONTEXT("cuGraphInstantiate", "%llu", (unsigned long long)flags);
    *ready_graph = malloc(sizeof **ready_graph);
    **ready_graph = *graph;
    return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(struct graph *graph, CUstream stream) {
    START_IN_CONTEXT("cuGraphLaunch", " ");
    for (int k = 0; k < graph->n; k++)
        queue_add(queue_of(stream), graph->launches[k].run, graph->launches[k].args, graph->launches[k].nargs);
    return CUDA_SUCCESS;
}
