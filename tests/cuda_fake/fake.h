/* What the files of the fake driver share: settings, contexts, ranges of memory, queues of work. */
#ifndef TEP_FAKE_CUDA_H
#define TEP_FAKE_CUDA_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GPUS_MAX 16

/* Codes of CUresult, from cuda.h. */
enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
};

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;

#define CU_CTX_SYNC_MEMOPS 0x80u

/* --- driver.c: settings, the log of calls, devices, contexts */

long setting(const char *name);
CUresult ready(const char *call, const char *format, ...) __attribute__((format(printf, 2, 3)));

struct queue;
struct context {
    int device, retains;
    unsigned flags;
    struct queue *ordered; /* the legacy default stream and every stream that blocks with it */
};

struct context *current(void);
void each_queue(struct context *context, void (*visit)(struct queue *));

/* --- memory.c: ranges that CUDA knows */

enum { HOST = 1, DEVICE = 2 }; /* CUmemorytype */

/* Device addresses cannot be touched by the CPU, as on a GPU behind PCIe: the bytes of a range are
 * at `bytes`, a mapping of our own. Host and managed memory has its bytes where it is. */
struct range {
    struct range *next;
    CUdeviceptr start;
    size_t nbytes;
    int kind, device;
    bool managed, pooled, capable, sync, registered;
    char *bytes;
    struct chunk *chunk;   /* small allocations share one */
    struct handle *handle; /* memory of cuMemCreate */
};

/* Where the bytes of an address are, if all of them are known to CUDA; NULL otherwise. */
char *bytes_of(CUdeviceptr ptr, size_t nbytes);
/* Copy or set bytes as the GPU does; what has been freed meanwhile is left alone. */
void gpu_copy(CUdeviceptr dst, const char *dst_host, CUdeviceptr src, const char *src_host, size_t n);

/* --- streams.c: work that is done late */

typedef void (*work_fn)(uint64_t *args);
struct queue *queue_new(void);
void queue_close(struct queue *queue);
uint64_t queue_add(struct queue *queue, work_fn run, const uint64_t *args, int nargs);
void queue_wait(struct queue *queue, uint64_t upto);
void queue_drain(struct queue *queue);
void context_drain(struct context *context);
struct queue *queue_of(CUstream stream);

#endif
