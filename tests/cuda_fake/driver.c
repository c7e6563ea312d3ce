/* Settings, the log of calls, devices, contexts, and how cuda-python finds the calls. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- settings: TEP_FAKE_CUDA="gpus=2 dmabuf=0", or fake_cuda_set() while the program runs */

static struct {
    const char *name;
    long value, first;
} settings[] = {
    {"gpus", 2, 2},           /* on the machine; CUDA_VISIBLE_DEVICES hides some, as it does from real drivers */
    {"version", 13000, 13000}, /* of the driver, 1000 * major + 10 * minor; newer calls are missing */
    {"ordering", 100, 100},   /* GPU_DIRECT_RDMA_WRITES_ORDERING: 0 none, 100 for the owner, 200 for all */
    {"flush", 1, 1},          /* GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: 1 by the host, 0 not at all */
    {"dmabuf", 1, 1},         /* DMA_BUF_SUPPORTED */
    {"memops", 1, 1},         /* CAN_USE_64_BIT_STREAM_MEM_OPS */
    {"busy", -1, -1},         /* a GPU that another process holds in exclusive mode */
    {"exact", 0, 0},          /* 1: exports beyond the end of an allocation are refused */
    {"late_us", 1000, 1000},  /* how late streams and copies run that nobody waits for */
    /* Faults, for tests of what finds them. */
    {"lose_copies", 0, 0},  /* copies to the host copy nothing */
    {"no_managed", 0, 0},   /* managed memory is not managed */
    {"empty_dmabuf", 0, 0}, /* dma-bufs have no bytes */
    {"deaf", 0, 0},         /* kernels that wait give up at once */
};
#define NSETTINGS (sizeof settings / sizeof *settings)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int set(const char *name, long value) {
    for (size_t k = 0; k < NSETTINGS; k++)
        if (!strcmp(settings[k].name, name)) {
            __atomic_store_n(&settings[k].value, value, __ATOMIC_RELAXED);
            return 0;
        }
    return -1;
}

static void read_settings(void) {
    char *given = getenv("TEP_FAKE_CUDA"), *rest, *pair;
    given = strdup(given ? given : "");
    for (pair = strtok_r(given, " ", &rest); pair; pair = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(pair, '=');
        if (value) *value++ = 0;
        if (!value || set(pair, strtol(value, NULL, 0))) {
            fprintf(stderr, "fake CUDA: no setting %s in TEP_FAKE_CUDA\n", pair);
            abort();
        }
    }
    for (size_t k = 0; k < NSETTINGS; k++) settings[k].first = settings[k].value;
    free(given);
}

long setting(const char *name) {
    pthread_once(&once, read_settings);
    for (size_t k = 0; k < NSETTINGS; k++)
        if (!strcmp(settings[k].name, name)) return __atomic_load_n(&settings[k].value, __ATOMIC_RELAXED);
    abort();
}

int fake_cuda_set(const char *name, long value) {
    pthread_once(&once, read_settings);
    return set(name, value);
}

/* --- the log: a line a call, "cuMemAlloc 4096 @1" with the device of the current context, or @- */

static char *calls;
static size_t ncalls, calls_size;
static pid_t started_by;

static CUresult note(const char *call, const char *format, va_list args) {
    char line[256];
    struct context *context = current();
    int n = snprintf(line, sizeof line, "%s ", call);
    n += vsnprintf(line + n, sizeof line - n, format, args);
    n += context ? snprintf(line + n, sizeof line - n, " @%d\n", context->device)
                 : snprintf(line + n, sizeof line - n, " @-\n");
    pthread_mutex_lock(&lock);
    if (ncalls + n + 1 > calls_size) calls = realloc(calls, calls_size = 2 * (calls_size + n + 1));
    memcpy(calls + ncalls, line, n + 1);
    ncalls += n;
    pthread_mutex_unlock(&lock);
    /* A child of fork cannot use the driver that its parent has started. */
    return started_by == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

/* What stands at the start of nearly every call: it is logged, and needs cuInit. */
CUresult ready(const char *call, const char *format, ...) {
    va_list args;
    va_start(args, format);
    CUresult code = note(call, format, args);
    va_end(args);
    return code;
}

/* Copy the log into `out`, of at most `size` bytes; the whole log's length. */
size_t fake_cuda_calls(char *out, size_t size) {
    pthread_mutex_lock(&lock);
    size_t n = ncalls < size ? ncalls : size;
    if (n) memcpy(out, calls, n);
    size_t whole = ncalls;
    pthread_mutex_unlock(&lock);
    return whole;
}

static struct context primary[GPUS_MAX];

/* Forget the log and the contexts' flags, and have every setting be what TEP_FAKE_CUDA says. */
void fake_cuda_reset(void) {
    for (int dev = 0; dev < GPUS_MAX; dev++) primary[dev].flags = 0;
    pthread_once(&once, read_settings);
    for (size_t k = 0; k < NSETTINGS; k++) set(settings[k].name, settings[k].first);
    pthread_mutex_lock(&lock);
    ncalls = 0;
    pthread_mutex_unlock(&lock);
}

/* --- devices */

static int visible[GPUS_MAX], nvisible;

/* GPU-f00000NN-0000-0000-0000-000000000000 */
static void uuid(int gpu, unsigned char out[16]) {
    memset(out, 0, 16);
    out[0] = 0xf0;
    out[3] = gpu;
}

static int named(const char *word, int gpus) {
    char *end;
    if (!strncmp(word, "GPU-", 4)) {
        for (int gpu = 0; gpu < gpus; gpu++) {
            char whole[48];
            snprintf(whole, sizeof whole, "GPU-f00000%02x-0000-0000-0000-000000000000", gpu);
            if (!strncmp(word, whole, strlen(word))) return gpu;
        }
        return -1;
    }
    long gpu = strtol(word, &end, 10);
    return end != word && !*end && gpu >= 0 && gpu < gpus ? (int)gpu : -1;
}

/* As the real driver reads CUDA_VISIBLE_DEVICES: what stands behind a wrong entry is not seen. */
static void find_visible(void) {
    const char *given = getenv("CUDA_VISIBLE_DEVICES");
    int gpus = setting("gpus");
    nvisible = 0;
    if (!given) {
        for (; nvisible < gpus; nvisible++) visible[nvisible] = nvisible;
        return;
    }
    char *words = strdup(given), *rest, *word;
    for (word = strtok_r(words, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        int gpu = named(word, gpus);
        if (gpu < 0 || nvisible == GPUS_MAX) break;
        visible[nvisible++] = gpu;
    }
    free(words);
}

CUresult cuInit(unsigned flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (started_by && started_by != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    find_visible();
    if (!nvisible) return CUDA_ERROR_NO_DEVICE;
    started_by = getpid();
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = setting("version");
    return CUDA_SUCCESS;
}

static CUresult device(const char *call, CUdevice dev) {
    CUresult code = ready(call, "%d", dev);
    return code ? code : dev >= 0 && dev < nvisible ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetCount(int *count) {
    *count = nvisible;
    return ready("cuDeviceGetCount", " ");
}

CUresult cuDeviceGet(CUdevice *dev, int ordinal) {
    CUresult code = device("cuDeviceGet", ordinal);
    if (!code) *dev = ordinal;
    return code;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice dev) {
    CUresult code = device("cuDeviceGetName", dev);
    if (!code) snprintf(name, length, "Fake H100 %d", visible[dev]);
    return code;
}

CUresult cuDeviceGetUuid_v2(unsigned char *out, CUdevice dev) {
    CUresult code = device("cuDeviceGetUuid", dev);
    if (!code) uuid(visible[dev], out);
    return code;
}

CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice dev) {
    CUresult code = device("cuDeviceGetPCIBusId", dev);
    if (!code) snprintf(id, length, "0000:%02X:00.0", 0x1b + visible[dev]);
    return code;
}

/* Numbers of CUdevice_attribute, from cuda.h. What is not here is refused, not answered with 0. */
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice dev) {
    CUresult code = device("cuDeviceGetAttribute", dev);
    if (code) return code;
    switch (attribute) {
    case 41: *value = 1; break;                    /* UNIFIED_ADDRESSING */
    case 75: *value = 9; break;                    /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *value = 0; break;                    /* COMPUTE_CAPABILITY_MINOR */
    case 102: *value = 1; break;                   /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    case 110: *value = 1; break;                   /* GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
    case 116: *value = 1; break;                   /* GPU_DIRECT_RDMA_SUPPORTED */
    case 117: *value = setting("flush"); break;    /* GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS */
    case 118: *value = setting("ordering"); break; /* GPU_DIRECT_RDMA_WRITES_ORDERING */
    case 122: *value = setting("memops"); break;   /* CAN_USE_64_BIT_STREAM_MEM_OPS */
    case 124: *value = setting("dmabuf"); break;   /* DMA_BUF_SUPPORTED */
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* --- contexts: one primary context a device, and a stack of current ones in each thread */

static __thread struct context *stack[32];
static __thread int depth;

struct context *current(void) { return depth ? stack[depth - 1] : NULL; }

static bool is_alive(struct context *context) {
    return context >= primary && context < primary + GPUS_MAX && context->retains > 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice dev) {
    CUresult code = device("cuDevicePrimaryCtxRetain", dev);
    if (code) return code;
    if (visible[dev] == setting("busy")) return CUDA_ERROR_DEVICE_UNAVAILABLE;
    pthread_mutex_lock(&lock);
    primary[dev].device = dev;
    primary[dev].retains++;
    if (!primary[dev].ordered) primary[dev].ordered = queue_new();
    pthread_mutex_unlock(&lock);
    *context = &primary[dev];
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    CUresult code = device("cuDevicePrimaryCtxRelease", dev);
    if (code) return code;
    if (!primary[dev].retains) return CUDA_ERROR_INVALID_CONTEXT;
    if (!--primary[dev].retains) primary[dev].flags = 0;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned *flags, int *active) {
    CUresult code = device("cuDevicePrimaryCtxGetState", dev);
    if (code) return code;
    *flags = primary[dev].flags;
    *active = primary[dev].retains > 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (started_by != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_alive(context) || depth == 32) return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (context && !is_alive(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *dev) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    *dev = current()->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned *flags) {
    CUresult code = ready("cuCtxGetFlags", " ");
    if (code) return code;
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    *flags = current()->flags;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned flags) {
    CUresult code = ready("cuCtxSetFlags", "%#x", flags);
    if (code) return code;
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    if (flags & ~0xffu) return CUDA_ERROR_INVALID_VALUE;
    current()->flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    CUresult code = ready("cuCtxSynchronize", " ");
    if (code) return code;
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    context_drain(current());
    return CUDA_SUCCESS;
}

/* --- how cuda-python finds the calls */

/* The other files' calls are named here only, so they need no declaration of their own. */
#define MORE(X)                                                                                    \
    X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuMemAllocAsync) X(cuMemFreeAsync) X(cuMemHostAlloc)        \
    X(cuMemFreeHost) X(cuMemAllocManaged) X(cuMemHostRegister_v2) X(cuMemHostUnregister)           \
    X(cuMemHostGetDevicePointer_v2) X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemCreate)      \
    X(cuMemRelease) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) X(cuMemGetAllocationGranularity)   \
    X(cuMemGetAddressRange_v2) X(cuPointerGetAttributes) X(cuPointerSetAttribute)                  \
    X(cuMemGetHandleForAddressRange) X(cuFlushGPUDirectRDMAWrites) X(cuMemcpyHtoD_v2)              \
    X(cuMemcpyDtoH_v2) X(cuMemcpyDtoD_v2) X(cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoHAsync_v2)          \
    X(cuMemsetD8_v2) X(cuMemsetD8Async) X(cuStreamCreate) X(cuStreamSynchronize) X(cuStreamQuery)  \
    X(cuStreamDestroy_v2) X(cuStreamWaitEvent) X(cuStreamWriteValue64_v2) X(cuEventCreate)         \
    X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize) X(cuEventDestroy_v2)                    \
    X(cuStreamBeginCapture_v2) X(cuStreamEndCapture) X(cuGraphInstantiateWithFlags)                \
    X(cuGraphLaunch) X(cuModuleLoadData) X(cuModuleGetFunction) X(cuLaunchKernel)
#define DECLARE(name) extern CUresult name();
MORE(DECLARE)

/* Names without their version's suffix, and the release of CUDA that this form of each came with:
 * what the headers of cuda-python ask for. */
static const struct {
    const char *name;
    int since;
    void *call;
} table[] = {
#define CALL(name, since, call) {#name, since, (void *)call}
    CALL(cuInit, 2000, cuInit),
    CALL(cuDriverGetVersion, 2020, cuDriverGetVersion),
    CALL(cuDeviceGetCount, 2000, cuDeviceGetCount),
    CALL(cuDeviceGet, 2000, cuDeviceGet),
    CALL(cuDeviceGetName, 2000, cuDeviceGetName),
    CALL(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2),
    CALL(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId),
    CALL(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute),
    CALL(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain),
    CALL(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2),
    CALL(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState),
    CALL(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2),
    CALL(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2),
    CALL(cuCtxGetCurrent, 4000, cuCtxGetCurrent),
    CALL(cuCtxSetCurrent, 4000, cuCtxSetCurrent),
    CALL(cuCtxGetDevice, 2000, cuCtxGetDevice),
    CALL(cuCtxGetFlags, 7000, cuCtxGetFlags),
    CALL(cuCtxSetFlags, 12010, cuCtxSetFlags),
    CALL(cuCtxSynchronize, 2000, cuCtxSynchronize),
    CALL(cuMemAlloc, 3020, cuMemAlloc_v2),
    CALL(cuMemFree, 3020, cuMemFree_v2),
    CALL(cuMemAllocAsync, 11020, cuMemAllocAsync),
    CALL(cuMemFreeAsync, 11020, cuMemFreeAsync),
    CALL(cuMemHostAlloc, 2020, cuMemHostAlloc),
    CALL(cuMemFreeHost, 2000, cuMemFreeHost),
    CALL(cuMemAllocManaged, 6000, cuMemAllocManaged),
    CALL(cuMemHostRegister, 6050, cuMemHostRegister_v2),
    CALL(cuMemHostUnregister, 4000, cuMemHostUnregister),
    CALL(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2),
    CALL(cuMemAddressReserve, 10020, cuMemAddressReserve),
    CALL(cuMemAddressFree, 10020, cuMemAddressFree),
    CALL(cuMemCreate, 10020, cuMemCreate),
    CALL(cuMemRelease, 10020, cuMemRelease),
    CALL(cuMemMap, 10020, cuMemMap),
    CALL(cuMemUnmap, 10020, cuMemUnmap),
    CALL(cuMemSetAccess, 10020, cuMemSetAccess),
    CALL(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity),
    CALL(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2),
    CALL(cuPointerGetAttributes, 7000, cuPointerGetAttributes),
    CALL(cuPointerSetAttribute, 6000, cuPointerSetAttribute),
    CALL(cuMemGetHandleForAddressRange, 11070, cuMemGetHandleForAddressRange),
    CALL(cuFlushGPUDirectRDMAWrites, 11030, cuFlushGPUDirectRDMAWrites),
    CALL(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2),
    CALL(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2),
    CALL(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2),
    CALL(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2),
    CALL(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2),
    CALL(cuMemsetD8, 3020, cuMemsetD8_v2),
    CALL(cuMemsetD8Async, 3020, cuMemsetD8Async),
    CALL(cuStreamCreate, 2000, cuStreamCreate),
    CALL(cuStreamSynchronize, 2000, cuStreamSynchronize),
    CALL(cuStreamQuery, 2000, cuStreamQuery),
    CALL(cuStreamDestroy, 4000, cuStreamDestroy_v2),
    CALL(cuStreamWaitEvent, 3020, cuStreamWaitEvent),
    CALL(cuStreamWriteValue64, 11070, cuStreamWriteValue64_v2),
    CALL(cuEventCreate, 2000, cuEventCreate),
    CALL(cuEventRecord, 2000, cuEventRecord),
    CALL(cuEventQuery, 2000, cuEventQuery),
    CALL(cuEventSynchronize, 2000, cuEventSynchronize),
    CALL(cuEventDestroy, 4000, cuEventDestroy_v2),
    CALL(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2),
    CALL(cuStreamEndCapture, 10000, cuStreamEndCapture),
    CALL(cuGraphInstantiate, 12000, cuGraphInstantiateWithFlags), /* cuda-python asks for the next one */
    CALL(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags),
    CALL(cuGraphLaunch, 10000, cuGraphLaunch),
    CALL(cuModuleLoadData, 2000, cuModuleLoadData),
    CALL(cuModuleGetFunction, 2000, cuModuleGetFunction),
    CALL(cuLaunchKernel, 4000, cuLaunchKernel),
};

/* NVRTC asks for a table of private calls, whose first word is its size, and crashes without one: an
 * empty one tells it that this driver has none of them. */
CUresult cuGetExportTable(const void **found, const void *id) {
    static const size_t empty = sizeof empty;
    (void)id;
    *found = &empty;
    return CUDA_SUCCESS;
}

/* Whether this driver has a call, by its name without a suffix. */
int fake_cuda_has(const char *name) {
    for (size_t k = 0; k < sizeof table / sizeof *table; k++)
        if (!strcmp(table[k].name, name)) return 1;
    return 0;
}

CUresult cuGetProcAddress_v2(const char *name, void **call, int version, uint64_t flags, int *status) {
    (void)flags;
    *call = NULL;
    int why = 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    for (size_t k = 0; k < sizeof table / sizeof *table; k++)
        if (!strcmp(table[k].name, name)) {
            why = version >= table[k].since ? 0 : 2; /* 2: ..._VERSION_NOT_SUFFICIENT */
            if (!why && table[k].since > setting("version")) why = 1;
            if (!why) *call = table[k].call;
        }
    if (status) *status = why;
    return why ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
