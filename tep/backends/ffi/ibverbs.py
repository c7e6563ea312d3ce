"""libibverbs by ctypes: finding it, its control calls, and the data path of an open device.

Calls are made of their C declarations, word for word (<infiniband/verbs.h> of rdma-core 44.0).
post_send, post_recv, post_srq_recv, poll_cq and req_notify_cq are inline functions in C that go
through the context's table of operations; no library exports them, so DataPath reads that table.
Nothing here decides anything: which device, which address, which queue is the backend's business.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Final, NoReturn, TypeVar, cast

from tep.backends.ffi.ibverbs_structs import Context, Device, VerbsContext
from tep.backends.ffi.load import Step, check, env_step, find, prototypes, system_step

__all__ = [
    "ABI_COMPAT_OFFSETS", "NOT_FORK_SAFE", "OPTIONAL", "PROTOTYPES", "CreateQp", "DataPath",
    "Library", "Ref", "fail", "load", "ref",
]  # fmt: skip

T = TypeVar("T")

_SONAME: Final = "libibverbs.so.1"
_VARIABLE: Final = "TEP_LIBIBVERBS"
_CURE: Final = "install rdma-core 33 or later (Debian: apt install libibverbs1 ibverbs-providers)"

_P, _INT = ctypes.c_void_p, ctypes.c_int

PROTOTYPES: Final = prototypes("""
int ibv_fork_init(void);
struct ibv_device **ibv_get_device_list(int *num_devices);
void ibv_free_device_list(struct ibv_device **list);
struct ibv_context *ibv_open_device(struct ibv_device *device);
int ibv_close_device(struct ibv_context *context);
int ibv_query_device(struct ibv_context *context,
                 struct ibv_device_attr *device_attr);
int ibv_query_port(struct ibv_context *context, uint8_t port_num,
               struct _compat_ibv_port_attr *port_attr);
/* What the inline ibv_query_gid_table calls: all entries of all ports that are not empty. */
ssize_t _ibv_query_gid_table(struct ibv_context *context,
                             struct ibv_gid_entry *entries, size_t max_entries,
                             uint32_t flags, size_t entry_size);
int ibv_query_pkey(struct ibv_context *context, uint8_t port_num,
               int index, __be16 *pkey);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_dealloc_pd(struct ibv_pd *pd);
/* What the macro ibv_reg_mr calls when optional access bits are set; it masks the bits that an
   old kernel does not know. The exported ibv_reg_mr does not know IBV_ACCESS_RELAXED_ORDERING. */
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length,
                            uint64_t iova, unsigned int access);
int ibv_dereg_mr(struct ibv_mr *mr);
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe,
                         void *cq_context,
                         struct ibv_comp_channel *channel,
                         int comp_vector);
int ibv_destroy_cq(struct ibv_cq *cq);
int ibv_get_cq_event(struct ibv_comp_channel *channel,
                 struct ibv_cq **cq, void **cq_context);
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int nevents);
struct ibv_srq *ibv_create_srq(struct ibv_pd *pd,
                           struct ibv_srq_init_attr *srq_init_attr);
int ibv_destroy_srq(struct ibv_srq *srq);
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd,
                         struct ibv_qp_init_attr *qp_init_attr);
int ibv_destroy_qp(struct ibv_qp *qp);
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr,
              int attr_mask);
int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece);
int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece);
struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
int ibv_destroy_ah(struct ibv_ah *ah);
int ibv_get_async_event(struct ibv_context *context,
                    struct ibv_async_event *event);
void ibv_ack_async_event(struct ibv_async_event *event);
const char *ibv_wc_status_str(enum ibv_wc_status status);
""")

OPTIONAL: Final = prototypes("""
/* From rdma-core 34 on (IBVERBS_1.12), so it may be absent. */
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length,
                             uint64_t iova, int fd, int access);
""")


NOT_FORK_SAFE: Final = (
    "; a fork may take registered pages away from the NIC: memory was registered in this process "
    "before tep was loaded, on a kernel before 5.12"
)
"""The words for `Library.fork_safe` being False."""


class Library:
    """libibverbs with its calls typed; pointers travel as plain ints, 0 for NULL.

    Attributes:
        path: what was loaded.
        has_dmabuf: whether ibv_reg_dmabuf_mr is there.
        fork_safe: whether children that are forked leave registered pages alone.
    """

    def __init__(self, lib: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._lib = lib
        for name, (result, arguments) in PROTOTYPES.items():
            call = getattr(lib, name)
            call.restype, call.argtypes = result, arguments
        self.has_dmabuf = True
        for name, (result, arguments) in OPTIONAL.items():
            call = getattr(lib, name, None)
            if call is None:
                self.has_dmabuf = False
            else:
                call.restype, call.argtypes = result, arguments
        self.fork_safe = self._fork_init()

    def _fork_init(self) -> bool:
        """Call ibv_fork_init, before any other call; False: it came too late.

        Kernels from 5.12 on copy pinned pages at fork; there the library does nothing. On older
        ones it keeps registered pages out of children, and answers EINVAL where something in this
        process has registered memory first (libfabric's provider, NCCL).
        """
        rc = self.ask("ibv_fork_init")
        if rc not in {0, errno.EINVAL}:
            fail("ibv_fork_init", rc)
        return rc == 0

    def ok(self, name: str, *arguments: object, what: str = "", **context: object) -> None:
        """Make a call that returns 0 or an errno.

        Args:
            name: of the call.
            *arguments: as in C.
            what: the step in words, e.g. "RESET->INIT"; for the message.
            **context: values that help whoever reads the message, e.g. qpn=7.

        Raises:
            FabricError: it failed; code "PROVIDER".
        """
        rc = int(getattr(self._lib, name)(*arguments))
        if rc:
            fail(f"{name} {what}".rstrip(), rc if rc > 0 else ctypes.get_errno(), **context)

    def make(self, name: str, *arguments: object, what: str = "", **context: object) -> int:
        """Make a call that returns a pointer, or NULL and sets errno; arguments as `ok`."""
        found = getattr(self._lib, name)(*arguments)
        if not found:
            fail(f"{name} {what}".rstrip(), ctypes.get_errno(), **context)
        return int(found)

    def ask(self, name: str, *arguments: object) -> int:
        """Make a call whose non-zero result is an answer and no failure; return it."""
        return int(getattr(self._lib, name)(*arguments))

    def do(self, name: str, *arguments: object) -> None:
        """Make a call that returns nothing."""
        getattr(self._lib, name)(*arguments)

    def extended_create(self, context: int) -> CreateQp | None:
        """create_qp_ex of an open device, as the inline ibv_create_qp_ex finds it; None: not there.

        It takes a pointer to QpInitAttrEx, and returns a pointer to the queue pair or 0 and errno.
        """
        after_mutex = ABI_COMPAT_OFFSETS.get(platform.machine())
        if after_mutex is None:
            return None
        if ctypes.c_void_p.from_address(context + after_mutex).value != _ABI_IS_EXTENDED:
            return None
        whole = VerbsContext.from_address(context - VerbsContext.context.offset)
        call = whole.create_qp_ex
        # `sz` counts the context too, to the end of abi_compat, beyond the mirror's end.
        if not call or whole.sz < VerbsContext.context.offset + after_mutex + 8:
            return None
        create = ctypes.CFUNCTYPE(_P, _P, _P, use_errno=True)(call)
        return lambda attr: create(context, attr) or 0

    def status_str(self, status: int) -> str:
        """Name a completion's status as the library does."""
        return bytes(self._lib.ibv_wc_status_str(status)).decode()

    def devices(self) -> list[tuple[str, str]]:
        """List the RDMA devices: (name, folder in sysfs); empty where the kernel has no RDMA."""
        return self._with_devices(
            lambda found: [(one.name.decode(), one.ibdev_path.decode()) for _, one in found]
        )

    def open_device(self, name: str) -> tuple[int, str]:
        """Open a device by name; return the context and the device's folder in sysfs.

        Raises:
            FabricError: the library cannot open it.
            LookupError: there is no such device.
        """

        def pick(found: list[tuple[int, Device]]) -> tuple[int, str]:
            for pointer, device in found:
                if device.name.decode() == name:
                    path = device.ibdev_path.decode()
                    return self.make("ibv_open_device", pointer, device=name), path
            raise LookupError(name)

        return self._with_devices(pick)

    def _with_devices(self, use: Callable[[list[tuple[int, Device]]], T]) -> T:
        count = ctypes.c_int()
        listed = self._lib.ibv_get_device_list(ctypes.byref(count))
        if not listed:  # no RDMA in this kernel: ENOSYS
            return use([])
        try:
            pointers = (ctypes.c_void_p * count.value).from_address(listed)
            found = [
                (int(pointer), Device.from_address(pointer)) for pointer in pointers if pointer
            ]
            return use(found)
        finally:
            self._lib.ibv_free_device_list(listed)


CreateQp = Callable[[int], int]

_ABI_IS_EXTENDED: Final = 2**64 - 1  # __VERBS_ABI_IS_EXTENDED

ABI_COMPAT_OFFSETS: Final = {"x86_64": 320, "aarch64": 328}
"""Offsets of `abi_compat` in struct ibv_context, behind a mutex of 40 bytes, or 48 on aarch64."""

# One type for all devices: each PYFUNCTYPE is a new class, garbage once its device is closed.
_POST: Final = ctypes.PYFUNCTYPE(_INT, _P, _P, _P)
_POST_REFS: Final = ctypes.PYFUNCTYPE(_INT)
_POLL: Final = ctypes.PYFUNCTYPE(_INT, _P, _INT, _P)
_NOTIFY: Final = ctypes.PYFUNCTYPE(_INT, _P, _INT)

Post = Callable[[int, int, int], int]
Ref = object
"""A pointer that was made ready for a call, by `ref`."""


def ref(pointer: int) -> Ref:
    """Make a pointer ready for `DataPath.post_send_refs`; nothing keeps alive what it points to."""
    return ctypes.byref(ctypes.c_char.from_address(pointer))


class DataPath:
    """The hot calls of one open device; pointers are plain ints, except for `post_send_refs`.

    The calls keep the interpreter's lock: they are shorter than what giving it up would cost (243
    against 281 ns a call, measured with a provider that does nothing, CPython 3.11).
    """

    __slots__ = (
        "poll_cq",
        "post_recv",
        "post_send",
        "post_send_refs",
        "post_srq_recv",
        "req_notify_cq",
    )

    def __init__(self, context: int) -> None:
        ops = Context.from_address(context).ops
        # int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
        self.post_send = cast("Post", _POST(ops.post_send))
        # The same, for pointers that were made ready by ref(). Without argtypes ctypes hands such
        # on as they are; converting three ints costs 100 of 250 ns a call (measured, CPython 3.11).
        # Anything but refs would be cut to 32 bits here.
        self.post_send_refs = cast("Callable[[Ref, Ref, Ref], int]", _POST_REFS(ops.post_send))
        # int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
        self.post_recv = cast("Post", _POST(ops.post_recv))
        # int (*post_srq_recv)(struct ibv_srq *srq, struct ibv_recv_wr *recv_wr,
        #                      struct ibv_recv_wr **bad_recv_wr);
        self.post_srq_recv = cast("Post", _POST(ops.post_srq_recv))
        # int (*poll_cq)(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
        self.poll_cq = cast("Post", _POLL(ops.poll_cq))
        # int (*req_notify_cq)(struct ibv_cq *cq, int solicited_only);
        self.req_notify_cq = cast("Callable[[int, int], int]", _NOTIFY(ops.req_notify_cq))


def fail(what: str, code: int, **context: object) -> NoReturn:
    """Raise a FabricError for an errno, with the values at hand."""
    check(-(code or errno.EIO), what, describe=_describe, **context)
    raise AssertionError(code)


def _describe(code: int) -> str:
    hint = _HINTS.get(code)
    return os.strerror(code) + (f"; {hint}" if hint else "")


_HINTS: Final = {
    errno.EPERM: "may this user open /dev/infiniband, and is the memory limit high enough?",
    errno.ENOMEM: "most often locked memory: `ulimit -l` should be unlimited",
    errno.EACCES: "may this user open /dev/infiniband?",
    errno.EFAULT: "is all of this memory mapped, and writable if peers may write to it?",
    errno.EOPNOTSUPP: "this provider does not offer it",
}


def load(path: str | None = None) -> Library:
    """Load libibverbs; the same object each time.

    Args:
        path: of another library; None = the environment variable TEP_LIBIBVERBS, or else
            libibverbs.so.1 where the dynamic linker finds it.

    Raises:
        BackendUnavailable: it cannot be loaded, or lacks a call.
    """
    named = path or os.environ.get(_VARIABLE)
    if path is not None:
        steps = [Step(name="library option", paths=lambda: (path,), binding=True)]
    else:
        steps = [env_step(_VARIABLE), system_step(_SONAME)]
    found = find(f"libibverbs{f' ({named})' if named else ''}", steps, _accept, _CURE)
    return _typed(found.path)


def _accept(lib: ctypes.CDLL) -> str:
    if missing := [name for name in PROTOTYPES if not hasattr(lib, name)]:
        raise LookupError(f"it has no {', '.join(missing)}; rdma-core 33 and later have all calls")
    return "with dma-buf" if hasattr(lib, "ibv_reg_dmabuf_mr") else "without dma-buf"


@cache
def _typed(path: str) -> Library:
    # Opened again for the sake of errno, which ctypes keeps for calls of such handles only.
    return Library(ctypes.CDLL(path, use_errno=True), path)
