/* What CUDA knows of addresses: allocations, mappings, pinned memory, dma-bufs, copies. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096ull
#define BLOCK (2ull << 20) /* cuMemAlloc takes memory from the GPU by this, and shares it out */
#define SMALL (1ull << 20)
#define ALIGNED 512ull
#define JUNK 0xa5 /* fresh GPU memory holds what somebody left there */

/* Addresses of a GPU that nobody but this file turns into bytes. */
struct chunk {
    CUdeviceptr start;
    char *bytes;
    size_t nbytes, used;
    int device, ranges;
};

struct handle {
    char *bytes;
    size_t nbytes;
    int device, uses; /* by the program, and by each mapping */
    bool capable;
};

struct mapping { /* a reservation of cuMemAddressReserve */
    struct mapping *next;
    CUdeviceptr start;
    size_t nbytes;
};

struct export {
    struct export *next;
    CUdeviceptr start;
    size_t nbytes;
    int fd;
};

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct range *ranges;
static struct mapping *reservations;
static struct export *exports;
static struct chunk *filling[2][GPUS_MAX]; /* where the next small allocation of a GPU, or of its pool, goes */

#define LOCKED                                                                                     \
    __attribute__((cleanup(unlocked))) int held_ = pthread_mutex_lock(&lock);                      \
    (void)held_
static void unlocked(int *held) {
    (void)held;
    pthread_mutex_unlock(&lock);
}

#define START(...)                                                                                 \
    do {                                                                                           \
        CUresult code_ = ready(__VA_ARGS__);                                                       \
        if (code_) return code_;                                                                   \
    } while (0)
#define START_IN_CONTEXT(...)                                                                      \
    START(__VA_ARGS__);                                                                            \
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT

static struct range *range_at(CUdeviceptr ptr) {
    for (struct range *one = ranges; one; one = one->next)
        if (ptr - one->start < one->nbytes) return one;
    return NULL;
}

static struct range *range_new(CUdeviceptr start, size_t nbytes, int kind, int device, char *bytes) {
    struct range *one = calloc(1, sizeof *one);
    one->start = start;
    one->nbytes = nbytes;
    one->kind = kind;
    one->device = device;
    one->bytes = bytes;
    one->next = ranges;
    return ranges = one;
}

static void forget_exports(CUdeviceptr start, size_t nbytes) {
    for (struct export **at = &exports; *at;) {
        struct export *one = *at;
        if (one->start < start + nbytes && start < one->start + one->nbytes) {
            *at = one->next;
            close(one->fd);
            free(one);
        } else
            at = &one->next;
    }
}

static void range_drop(struct range *gone) {
    forget_exports(gone->start, gone->nbytes);
    for (struct range **at = &ranges; *at; at = &(*at)->next)
        if (*at == gone) {
            *at = gone->next;
            break;
        }
    free(gone);
}

/* The bytes at an address up to the end of what it belongs to. */
static char *piece(CUdeviceptr ptr, size_t *nbytes) {
    struct range *one = range_at(ptr);
    if (!one || !one->bytes) return NULL;
    *nbytes = one->start + one->nbytes - ptr;
    return one->bytes + (ptr - one->start);
}

static bool is_known(CUdeviceptr ptr, size_t n) {
    for (size_t part; n; ptr += part, n -= part) {
        if (!piece(ptr, &part)) return false;
        if (part > n) part = n;
    }
    return true;
}

char *bytes_of(CUdeviceptr ptr, size_t n) {
    LOCKED;
    size_t part;
    char *found = piece(ptr, &part);
    return found && part >= n ? found : NULL;
}

void gpu_copy(CUdeviceptr dst, const char *dst_host, CUdeviceptr src, const char *src_host, size_t n) {
    LOCKED;
    for (size_t part; n; n -= part, dst += part, src += part) {
        size_t left = n;
        char *to = dst_host ? (char *)dst_host + dst : piece(dst, &left);
        part = left < n ? left : n;
        left = n;
        const char *from = src_host ? src_host + src : piece(src, &left);
        part = left < part ? left : part;
        if (!to || !from) return; /* freed meanwhile */
        memmove(to, from, part);
    }
}

/* --- allocations */

static CUdeviceptr reserve(size_t nbytes) {
    void *at = mmap(NULL, nbytes + BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return 0;
    CUdeviceptr start = ((uintptr_t)at + BLOCK - 1) / BLOCK * BLOCK;
    if (start != (uintptr_t)at) munmap(at, start - (uintptr_t)at);
    munmap((void *)(uintptr_t)(start + nbytes), (uintptr_t)at + BLOCK - start);
    return start;
}

static char *backing(size_t nbytes) {
    void *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

static struct chunk *chunk_new(int device, size_t nbytes) {
    struct chunk *made = calloc(1, sizeof *made);
    made->nbytes = (nbytes + BLOCK - 1) / BLOCK * BLOCK;
    made->device = device;
    made->start = reserve(made->nbytes);
    made->bytes = made->start ? backing(made->nbytes) : NULL;
    if (made->bytes) return made;
    free(made);
    return NULL;
}

static CUresult allocate(CUdeviceptr *ptr, size_t nbytes, bool pooled) {
    if (!nbytes || nbytes > 1ull << 40) return nbytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    int device = current()->device;
    struct chunk *chunk = nbytes < SMALL ? filling[pooled][device] : NULL;
    if (!chunk || chunk->nbytes - chunk->used < nbytes) {
        if (!(chunk = chunk_new(device, nbytes))) return CUDA_ERROR_OUT_OF_MEMORY;
        if (nbytes < SMALL) filling[pooled][device] = chunk;
    }
    *ptr = chunk->start + chunk->used;
    struct range *made = range_new(*ptr, nbytes, DEVICE, device, chunk->bytes + chunk->used);
    chunk->used += (nbytes + ALIGNED - 1) / ALIGNED * ALIGNED;
    chunk->ranges++;
    made->chunk = chunk;
    made->pooled = pooled;
    made->capable = true;
    memset(made->bytes, JUNK, nbytes);
    return CUDA_SUCCESS;
}

static void release(struct range *gone) {
    struct chunk *chunk = gone->chunk;
    if (chunk && !--chunk->ranges) {
        forget_exports(chunk->start, chunk->nbytes);
        munmap(chunk->bytes, chunk->nbytes);
        munmap((void *)(uintptr_t)chunk->start, chunk->nbytes);
        for (int k = 0; k < 2; k++)
            if (filling[k][chunk->device] == chunk) filling[k][chunk->device] = NULL;
        free(chunk);
    }
    if (!chunk && !gone->registered && !gone->handle) munmap(gone->bytes, (gone->nbytes + PAGE - 1) / PAGE * PAGE);
    range_drop(gone);
}

CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t nbytes) {
    START_IN_CONTEXT("cuMemAlloc", "%zu", nbytes);
    return allocate(ptr, nbytes, false);
}

CUresult cuMemAllocAsync(CUdeviceptr *ptr, size_t nbytes, CUstream stream) {
    START_IN_CONTEXT("cuMemAllocAsync", "%zu %p", nbytes, (void *)stream);
    return allocate(ptr, nbytes, true);
}

CUresult cuMemFree_v2(CUdeviceptr ptr) {
    START("cuMemFree", "%#llx", ptr);
    if (current()) context_drain(current()); /* it waits for all work of the GPU, as the real one does */
    LOCKED;
    struct range *one = range_at(ptr);
    if (!one || one->start != ptr || one->handle || (one->kind == HOST && !one->managed)) return CUDA_ERROR_INVALID_VALUE;
    release(one);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeAsync(CUdeviceptr ptr, CUstream stream) {
    (void)stream;
    return cuMemFree_v2(ptr);
}

static CUresult allocate_here(char **at, size_t nbytes, bool managed) {
    if (!nbytes) return CUDA_ERROR_INVALID_VALUE;
    char *bytes = backing((nbytes + PAGE - 1) / PAGE * PAGE);
    if (!bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    LOCKED;
    struct range *made = range_new((uintptr_t)bytes, nbytes, managed ? DEVICE : HOST, current()->device, bytes);
    made->managed = managed && !setting("no_managed");
    *at = bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **at, size_t nbytes, unsigned flags) {
    START_IN_CONTEXT("cuMemHostAlloc", "%zu %#x", nbytes, flags);
    if (flags & ~7u) return CUDA_ERROR_INVALID_VALUE;
    return allocate_here((char **)at, nbytes, false);
}

CUresult cuMemFreeHost(void *at) {
    START("cuMemFreeHost", "%p", at);
    if (current()) context_drain(current());
    LOCKED;
    struct range *one = range_at((uintptr_t)at);
    if (!one || one->start != (uintptr_t)at || one->kind != HOST || one->registered) return CUDA_ERROR_INVALID_VALUE;
    release(one);
    return CUDA_SUCCESS;
}

CUresult cuMemAllocManaged(CUdeviceptr *ptr, size_t nbytes, unsigned flags) {
    START_IN_CONTEXT("cuMemAllocManaged", "%zu %#x", nbytes, flags);
    if (flags != 1 && flags != 2) return CUDA_ERROR_INVALID_VALUE;
    return allocate_here((char **)ptr, nbytes, true);
}

CUresult cuMemHostRegister_v2(void *at, size_t nbytes, unsigned flags) {
    START_IN_CONTEXT("cuMemHostRegister", "%zu %#x", nbytes, flags);
    if (!nbytes || flags & ~0xfu) return CUDA_ERROR_INVALID_VALUE;
    uintptr_t first = (uintptr_t)at / PAGE * PAGE, end = (uintptr_t)at + nbytes;
    unsigned char resident;
    for (uintptr_t page = first; page < end; page += PAGE)
        if (mincore((void *)page, PAGE, &resident)) return CUDA_ERROR_INVALID_VALUE; /* not mapped */
    LOCKED;
    for (struct range *one = ranges; one; one = one->next)
        if (one->start < end && (uintptr_t)at < one->start + one->nbytes)
            return one->registered ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_ERROR_INVALID_VALUE;
    range_new((uintptr_t)at, nbytes, HOST, current()->device, at)->registered = true;
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *at) {
    START("cuMemHostUnregister", "%p", at);
    LOCKED;
    struct range *one = range_at((uintptr_t)at);
    if (!one || one->start != (uintptr_t)at || !one->registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    range_drop(one);
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *ptr, void *at, unsigned flags) {
    START("cuMemHostGetDevicePointer", "%p", at);
    LOCKED;
    struct range *one = range_at((uintptr_t)at);
    if (!one || one->kind != HOST || flags) return CUDA_ERROR_INVALID_VALUE;
    *ptr = (uintptr_t)at; /* one address space, as on every 64-bit GPU */
    return CUDA_SUCCESS;
}

/* --- memory that is mapped where the program wants it (torch's expandable segments, sleep modes) */

/* struct CUmemAllocationProp and CUmemAccessDesc of cuda.h */
struct location {
    int type, id; /* type 1: a device */
};
struct prop {
    int type, handle_types; /* type 1: pinned */
    struct location location;
    void *win32;
    unsigned char compression, gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
};
struct access {
    struct location location;
    int flags; /* 0 none, 1 read, 3 read and write */
};

CUresult cuMemGetAllocationGranularity(size_t *out, const struct prop *prop, int which) {
    START("cuMemGetAllocationGranularity", "%d", which);
    if (prop->type != 1 || prop->location.type != 1) return CUDA_ERROR_INVALID_VALUE;
    *out = BLOCK;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t nbytes, size_t alignment, CUdeviceptr hint, uint64_t flags) {
    START("cuMemAddressReserve", "%zu", nbytes);
    (void)hint;
    if (!nbytes || nbytes % BLOCK || alignment > BLOCK || flags) return CUDA_ERROR_INVALID_VALUE;
    if (!(*ptr = reserve(nbytes))) return CUDA_ERROR_OUT_OF_MEMORY;
    LOCKED;
    struct mapping *made = malloc(sizeof *made);
    *made = (struct mapping){reservations, *ptr, nbytes};
    reservations = made;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t nbytes) {
    START("cuMemAddressFree", "%#llx %zu", ptr, nbytes);
    LOCKED;
    for (struct mapping **at = &reservations; *at; at = &(*at)->next) {
        struct mapping *one = *at;
        if (one->start != ptr || one->nbytes != nbytes) continue;
        for (struct range *inside = ranges; inside; inside = inside->next)
            if (inside->start - ptr < nbytes) return CUDA_ERROR_INVALID_VALUE;
        *at = one->next;
        munmap((void *)(uintptr_t)ptr, nbytes);
        free(one);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(struct handle **handle, size_t nbytes, const struct prop *prop, uint64_t flags) {
    START("cuMemCreate", "%zu capable=%d", nbytes, prop->gpu_direct_rdma_capable);
    if (!nbytes || nbytes % BLOCK || prop->type != 1 || prop->location.type != 1 || flags) return CUDA_ERROR_INVALID_VALUE;
    if (prop->location.id < 0 || prop->location.id >= GPUS_MAX) return CUDA_ERROR_INVALID_DEVICE;
    char *bytes = backing(nbytes);
    if (!bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    struct handle *made = malloc(sizeof *made);
    *made = (struct handle){bytes, nbytes, prop->location.id, 1, prop->gpu_direct_rdma_capable};
    *handle = made;
    return CUDA_SUCCESS;
}

static void unuse(struct handle *handle) {
    if (--handle->uses) return;
    munmap(handle->bytes, handle->nbytes);
    free(handle);
}

CUresult cuMemRelease(struct handle *handle) {
    START("cuMemRelease", "%p", (void *)handle);
    LOCKED;
    unuse(handle);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t nbytes, size_t offset, struct handle *handle, uint64_t flags) {
    START("cuMemMap", "%#llx %zu", ptr, nbytes);
    if (ptr % BLOCK || nbytes % BLOCK || !nbytes || offset || nbytes != handle->nbytes || flags) return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    struct mapping *in = reservations;
    while (in && !(ptr >= in->start && ptr + nbytes <= in->start + in->nbytes)) in = in->next;
    if (!in) return CUDA_ERROR_INVALID_VALUE;
    for (struct range *one = ranges; one; one = one->next)
        if (one->start < ptr + nbytes && ptr < one->start + one->nbytes) return CUDA_ERROR_INVALID_VALUE;
    struct range *made = range_new(ptr, nbytes, DEVICE, handle->device, NULL); /* no access so far */
    made->handle = handle;
    made->capable = handle->capable;
    handle->uses++;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t nbytes, const struct access *access, size_t count) {
    START("cuMemSetAccess", "%#llx %zu", ptr, nbytes);
    LOCKED;
    for (CUdeviceptr at = ptr; at < ptr + nbytes;) {
        struct range *one = range_at(at);
        if (!one || !one->handle) return CUDA_ERROR_INVALID_VALUE;
        for (size_t k = 0; k < count; k++)
            if (access[k].location.id == one->device) one->bytes = access[k].flags == 3 ? one->handle->bytes : NULL;
        at = one->start + one->nbytes;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t nbytes) {
    START("cuMemUnmap", "%#llx %zu", ptr, nbytes);
    if (current()) context_drain(current());
    LOCKED;
    for (CUdeviceptr at = ptr; at < ptr + nbytes;) {
        struct range *one = range_at(at);
        if (!one || !one->handle || one->start != at || one->start + one->nbytes > ptr + nbytes) return CUDA_ERROR_INVALID_VALUE;
        at += one->nbytes;
        unuse(one->handle);
        range_drop(one);
    }
    return CUDA_SUCCESS;
}

/* --- what an address is */

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr ptr) {
    START_IN_CONTEXT("cuMemGetAddressRange", "%#llx", ptr);
    LOCKED;
    struct range *one = range_at(ptr);
    if (!one || one->kind != DEVICE) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = one->start;
    if (nbytes) *nbytes = one->nbytes;
    return CUDA_SUCCESS;
}

/* It answers for any address: what CUDA does not know has zeros, and -2 for the device. */
CUresult cuPointerGetAttributes(unsigned count, const int *which, void **out, CUdeviceptr ptr) {
    START_IN_CONTEXT("cuPointerGetAttributes", "%#llx", ptr);
    LOCKED;
    struct range *one = range_at(ptr);
    for (unsigned k = 0; k < count; k++) switch (which[k]) {
        case 2: *(unsigned *)out[k] = one ? (unsigned)one->kind : 0; break;   /* MEMORY_TYPE */
        case 6: *(bool *)out[k] = one && one->sync; break;                    /* SYNC_MEMOPS */
        case 8: *(bool *)out[k] = one && one->managed; break;                 /* IS_MANAGED */
        case 9: *(int *)out[k] = one ? one->device : -2; break;               /* DEVICE_ORDINAL */
        case 15: *(bool *)out[k] = one && one->capable; break;                /* IS_GPU_DIRECT_RDMA_CAPABLE */
        case 17: *(void **)out[k] = one && one->pooled ? &filling : NULL; break; /* MEMPOOL_HANDLE */
        default: return CUDA_ERROR_INVALID_VALUE;
        }
    return CUDA_SUCCESS;
}

/* SYNC_MEMOPS is refused for mapped memory (seen on real drivers: openucx/ucx issue 9895), and, a guess,
 * for pools. */
CUresult cuPointerSetAttribute(const void *value, int which, CUdeviceptr ptr) {
    START_IN_CONTEXT("cuPointerSetAttribute", "%d %#llx", which, ptr);
    LOCKED;
    struct range *one = range_at(ptr);
    if (which != 6 || !one) return CUDA_ERROR_INVALID_VALUE;
    if (one->handle || one->pooled) return CUDA_ERROR_NOT_SUPPORTED;
    one->sync = *(const unsigned *)value;
    return CUDA_SUCCESS;
}

/* --- dma-bufs */

/* Where a page's bytes are: the rest of a block that an allocation does not fill is there as well. */
static char *page_of(CUdeviceptr page) {
    size_t part;
    for (struct range *one = ranges; one; one = one->next)
        if (one->chunk && page - one->chunk->start < one->chunk->nbytes)
            return one->chunk->bytes + (page - one->chunk->start);
    return piece(page, &part);
}

/* What holds both ends of whole pages: one allocation, or mappings without a gap. */
static CUresult may_export(CUdeviceptr start, size_t nbytes) {
    CUdeviceptr end = start + nbytes;
    bool found = false;
    for (struct range *one = ranges; one; one = one->next) {
        bool inside = one->start <= start && one->start + one->nbytes >= end;
        bool around = one->start < start + PAGE && one->start + one->nbytes > end - PAGE;
        if (one->handle || !(setting("exact") ? inside : around)) continue;
        found = true;
        if (one->kind == DEVICE && !one->managed && !one->pooled && one->capable) return CUDA_SUCCESS;
    }
    if (found) return CUDA_ERROR_NOT_SUPPORTED;
    for (CUdeviceptr at = start; at < end;) {
        struct range *one = range_at(at);
        if (!one || !one->handle || !one->bytes) return CUDA_ERROR_INVALID_VALUE;
        if (!one->capable) return CUDA_ERROR_NOT_SUPPORTED;
        at = one->start + one->nbytes;
    }
    return CUDA_SUCCESS;
}

/* The descriptor's file becomes what holds the pages, so that what is written on one side is read on
 * the other. A page has one such file: a later export of other pages around it takes it over. */
CUresult cuMemGetHandleForAddressRange(int *fd, CUdeviceptr start, size_t nbytes, int type, uint64_t flags) {
    START_IN_CONTEXT("cuMemGetHandleForAddressRange", "%#llx %zu %llu", start, nbytes, (unsigned long long)flags);
    if (type != 1 || start % PAGE || nbytes % PAGE || !nbytes) return CUDA_ERROR_INVALID_VALUE;
    if (flags && (flags != 1 || setting("version") < 12080)) return CUDA_ERROR_INVALID_VALUE; /* 1: by PCIe */
    if (!setting("dmabuf")) return CUDA_ERROR_NOT_SUPPORTED;
    LOCKED;
    CUresult code = may_export(start, nbytes);
    if (code) return code;
    for (struct export *one = exports; one; one = one->next)
        if (one->start == start && one->nbytes == nbytes) {
            *fd = fcntl(one->fd, F_DUPFD_CLOEXEC, 0);
            return CUDA_SUCCESS;
        }
    int file = memfd_create("dmabuf", MFD_CLOEXEC);
    if (setting("empty_dmabuf")) {
        *fd = file;
        return CUDA_SUCCESS;
    }
    if (file < 0 || ftruncate(file, nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    forget_exports(start, nbytes);
    for (size_t done = 0; done < nbytes; done += PAGE) {
        char *page = page_of(start + done);
        if (pwrite(file, page, PAGE, done) != (ssize_t)PAGE) return CUDA_ERROR_OUT_OF_MEMORY;
        mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, done);
    }
    struct export *made = malloc(sizeof *made);
    *made = (struct export){exports, start, nbytes, fcntl(file, F_DUPFD_CLOEXEC, 0)};
    exports = made;
    *fd = file;
    return CUDA_SUCCESS;
}

CUresult cuFlushGPUDirectRDMAWrites(int target, int scope) {
    START_IN_CONTEXT("cuFlushGPUDirectRDMAWrites", "%d %d", target, scope);
    if (target || (scope != 100 && scope != 200)) return CUDA_ERROR_INVALID_VALUE;
    return setting("flush") & 1 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

/* --- copies. "Synchronous" ones may return before they are done, as NVIDIA's "API synchronization
 * behavior" says: from pageable memory, between GPUs' memory, and memset; SYNC_MEMOPS ends that. */

enum { DST_IS_HOST = 1, SRC_IS_HOST = 2, FREE_SRC = 4 };

static void copy(uint64_t *args) { /* dst, src, nbytes, what */
    bool to_host = args[3] & DST_IS_HOST, from_host = args[3] & SRC_IS_HOST;
    char *host = (char *)(uintptr_t)args[1];
    if (!to_host || !setting("lose_copies"))
        gpu_copy(to_host ? 0 : args[0], to_host ? (char *)(uintptr_t)args[0] : NULL, from_host ? 0 : args[1],
                 from_host ? host : NULL, args[2]);
    if (args[3] & FREE_SRC) free(host);
}

static void fill(uint64_t *args) { /* dst, value, nbytes */
    LOCKED;
    size_t part;
    for (uint64_t at = args[0], n = args[2]; n; at += part, n -= part) {
        char *bytes = piece(at, &part);
        if (!bytes) return;
        if (part > n) part = n;
        memset(bytes, (int)args[1], part);
    }
}

static bool waits(CUdeviceptr ptr) {
    LOCKED;
    struct range *one = range_at(ptr);
    return current()->flags & CU_CTX_SYNC_MEMOPS || (one && one->sync) || (one && one->bytes == (char *)(uintptr_t)one->start);
}

static bool is_pinned(const void *at) {
    LOCKED;
    return range_at((uintptr_t)at) != NULL;
}

static CUresult issue(struct queue *queue, work_fn run, CUdeviceptr dst, uint64_t src, size_t n, int what, bool wait) {
    uint64_t upto = queue_add(queue, run, (uint64_t[]){dst, src, n, what}, 4);
    if (wait) queue_wait(queue, upto);
    return CUDA_SUCCESS;
}

#define CHECKED(ptr, n)                                                                            \
    do {                                                                                           \
        LOCKED;                                                                                    \
        if (!is_known(ptr, n)) return CUDA_ERROR_INVALID_VALUE;                                    \
    } while (0);                                                                                   \
    if (!(n)) return CUDA_SUCCESS

static CUresult to_device(struct queue *queue, CUdeviceptr dst, const void *src, size_t n, bool wait) {
    int what = SRC_IS_HOST;
    if (!is_pinned(src)) {
        void *staged = malloc(n);
        src = memcpy(staged, src, n);
        what |= FREE_SRC;
    }
    return issue(queue, copy, dst, (uintptr_t)src, n, what, wait);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t n) {
    START_IN_CONTEXT("cuMemcpyHtoD", "%#llx %zu", dst, n);
    CHECKED(dst, n);
    return to_device(current()->ordered, dst, src, n, is_pinned(src) || waits(dst));
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, CUstream stream) {
    START_IN_CONTEXT("cuMemcpyHtoDAsync", "%#llx %zu", dst, n);
    CHECKED(dst, n);
    return to_device(queue_of(stream), dst, src, n, false);
}

CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t n) {
    START_IN_CONTEXT("cuMemcpyDtoH", "%#llx %zu", src, n);
    CHECKED(src, n);
    return issue(current()->ordered, copy, (uintptr_t)dst, src, n, DST_IS_HOST, true);
}

CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, CUstream stream) {
    START_IN_CONTEXT("cuMemcpyDtoHAsync", "%#llx %zu", src, n);
    CHECKED(src, n);
    return issue(queue_of(stream), copy, (uintptr_t)dst, src, n, DST_IS_HOST, !is_pinned(dst));
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t n) {
    START_IN_CONTEXT("cuMemcpyDtoD", "%#llx %#llx %zu", dst, src, n);
    CHECKED(src, n);
    CHECKED(dst, n);
    return issue(current()->ordered, copy, dst, src, n, 0, waits(dst) || waits(src));
}

CUresult cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t n) {
    START_IN_CONTEXT("cuMemsetD8", "%#llx %zu", dst, n);
    CHECKED(dst, n);
    return issue(current()->ordered, fill, dst, value, n, 0, waits(dst));
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t n, CUstream stream) {
    START_IN_CONTEXT("cuMemsetD8Async", "%#llx %zu", dst, n);
    CHECKED(dst, n);
    return issue(queue_of(stream), fill, dst, value, n, 0, false);
}

/* --- for tests */

/* What the GPU's memory holds now, whatever is still to come; 0 where CUDA does not know it. */
int fake_cuda_peek(CUdeviceptr ptr, char *out, size_t n) {
    LOCKED;
    if (!is_known(ptr, n)) return 0;
    gpu_copy(0, out, ptr, NULL, n);
    return 1;
}

/* How many ranges CUDA knows: what is not given back is seen here. */
int fake_cuda_ranges(void) {
    LOCKED;
    int n = 0;
    for (struct range *one = ranges; one; one = one->next) n++;
    return n;
}
