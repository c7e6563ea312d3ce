/* The shared half of the fake EFA fabric: everything that one process must see of another.
 *
 * All processes of a run map one file, RUN/fabric, where RUN is the folder that the environment
 * variable TEP_FAKE_EFA names. In it: the settings of the run, queue pairs with their receive
 * rings, completion rings, memory registrations, address handles, faults, and counters. Bytes of
 * user memory are never in it: they go straight from process to process (engine.c).
 *
 * Rule 1: nobody holds a lock while another process may wait for it, except `alloc_lock`, which is
 *         robust and guards only creation and destruction. A process may be killed or stopped
 *         between any two instructions, and the others must go on.
 * Rule 2: who uses another process's queue pair or registration first writes its index into its own
 *         `hazard_*` word, then looks whether it still lives. Who destroys one marks it dead first,
 *         then waits until no hazard word names it. So nothing is written after deregistration.
 */
#ifndef TEP_FAKE_EFA_FABRIC_H
#define TEP_FAKE_EFA_FABRIC_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	HOSTS_MAX = 16,
	NICS_MAX = 32,
	PORTS_MAX = HOSTS_MAX * NICS_MAX, /* one NIC of one host */
	QPN_MAX = 1024,                   /* queue pair numbers of one port */
	QPS_MAX = 2048,
	CQS_MAX = 2048,
	PDS_MAX = 1024,
	MRS_MAX = 65536,
	PROCS_MAX = 256,
	RULES_MAX = 64,
	RQ_MAX = 8192,  /* receives of one queue pair */
	CQE_MAX = 32768,
};

/* Completion statuses of the device, which libefa hands on as vendor errors.
 * Source: rdma-core providers/efa/efa_io_defs.h, enum efa_io_comp_status. */
enum status {
	OK = 0,
	FLUSHED = 1,
	QP_INTERNAL = 2,
	UNSUPPORTED_OP = 3,
	INVALID_AH = 4,
	INVALID_LKEY = 5,
	LOCAL_BAD_LENGTH = 6,
	BAD_ADDRESS = 7,
	REMOTE_ABORT = 8,
	BAD_DEST_QPN = 9,
	REMOTE_RNR = 10,
	REMOTE_BAD_LENGTH = 11,
	BAD_STATUS = 12,
	UNRESP_REMOTE = 13,
	UNKNOWN_PEER = 14,
	UNREACH_REMOTE = 15,
	STATUSES = 32,
};

/* Settings of a run: RUN/config, one `name=value` a line. X(name, default): meaning.
 * Limits are those of a p5's NIC where a document or a listing gave them, else guesses. */
#define SETTINGS(X) \
	X(nics, 2)            /* NICs of each host */ \
	X(seed, 0)            /* of all that is random */ \
	X(shuffle, 1)         /* 0: each queue pair in order, one row after the other */ \
	X(segments, 1)        /* 1: rows land MTU by MTU, in any order; 0: whole */ \
	X(mtu, 8928)          /* what one packet carries; quoted: EFA's 8,928-byte MTU */ \
	X(thread, 1)          /* 0: the device moves only while the process calls it (tests) */ \
	X(log, 0)             /* 1: RUN/log.PID, one line for each call that matters */ \
	X(sq, 4096)           /* send queue; guessed */ \
	X(rq, 8192)           /* receive queue; guessed */ \
	X(cqe, 32768)         /* longest completion queue; guessed */ \
	X(cq_depth, 0)        /* not 0: every completion queue holds only so many */ \
	X(send_sge, 2)        /* quoted: EFA_IO_TX_DESC_NUM_BUFS */ \
	X(rdma_sge, 1)        /* quoted: EFA_IO_TX_DESC_NUM_RDMA_BUFS */ \
	X(inline_bytes, 32)   /* quoted: EFA_IO_TX_DESC_INLINE_MAX_SIZE */ \
	X(max_rdma, 1 << 30)  /* quoted: 1 GiB */ \
	X(max_qp, 256)        /* of one NIC; guessed */ \
	X(max_cq, 512)        /* of one NIC; guessed */ \
	X(max_mr, 65536)      /* of one NIC; guessed, the fabric holds 65,536 in all */ \
	X(max_mr_bytes, 0)    /* not 0: bytes that one NIC can have registered */ \
	X(max_ah, 4096)       /* of one NIC; guessed */ \
	X(caps, 15)           /* EFADV_DEVICE_ATTR_CAPS_*: read, RNR retry, source GID, write */ \
	X(part, 0xefa2)       /* PCI device: 0xefa2 is p5's, 0xefa3 p5en's */ \
	X(gbps, 200)          /* 100 or 200 */ \
	X(fresh_qpn, 0)       /* 1: numbers of closed queue pairs are not used again soon */ \
	X(queries, 1)         /* 0: a libefa that cannot say where queues are mapped */ \
	X(entry, 64)          /* bytes of a work queue entry: 64 or 128 */ \
	X(cq_entry, 16)       /* bytes of a completion: 16 or 32 */ \
	X(max_batch, 64)      /* entries between two doorbells; 0: no limit. Guessed */ \
	X(mapped, 0)          /* 1: send queue and doorbells as a device maps them, see mapped.c */ \
	X(cq_bell, 1)         /* 0: completion queues without a doorbell */ \
	X(qkey_silent, 1)     /* wrong Q_Key: 1 silence, as InfiniBand says; 0 BAD_DEST_QPN. Guessed */ \
	X(timeout_us, 300000) /* how long the device tries before UNRESP or UNREACH; real: seconds */ \
	X(rnr_us, 200)        /* pause before a row is tried again after RNR; guessed */

struct settings {
#define X(name, value) int64_t name;
	SETTINGS(X)
#undef X
};

/* What tests may ask about: kept for each port, added up over all processes. */
#define COUNTERS(X) \
	X(doorbells) X(wqes) X(batch_max) X(writes) X(write_imms) X(reads) X(sends) \
	X(inline_sends) X(recvs) X(bytes) X(segments) X(imms_landed) X(cqes) X(overruns) X(drops) \
	X(rnrs) X(retries_spent) X(acks_lost) X(timeouts) X(mrs) X(mr_bytes) X(mr_refused) \
	X(dmabufs) X(ahs) X(qps) X(cqs) X(events) X(malformed) X(mapped_reads) X(unfenced) \
	X(overlong)

struct counters {
#define X(name) _Atomic uint64_t name;
	COUNTERS(X)
#undef X
	_Atomic uint64_t status[STATUSES]; /* completions of requests, by status */
};

/* A scripted fault (faults.c). Filters are -1 where anything matches. */
enum fault { F_NONE, F_RNR, F_MUTE, F_LOSE_ACK, F_FAIL, F_DROP, F_SLOW, F_GONE };

struct rule {
	_Atomic uint32_t kind;  /* enum fault; F_NONE: free */
	int32_t host, nic;      /* the responder; for F_SLOW and F_GONE the NIC itself */
	int32_t from_host, from_nic;
	int32_t op;             /* enum op_kind, or -1 */
	uint32_t ppm;           /* chance in a million, of each time it could strike */
	uint32_t status;        /* F_FAIL */
	uint64_t us;            /* F_SLOW: pause before each row */
	_Atomic int64_t skip;   /* so often it does not strike first */
	_Atomic int64_t left;   /* so often it strikes; negative: for ever */
};

struct recv_entry {
	uint64_t wr_id, addr;
	uint32_t len, lkey;
};

struct wc {
	uint64_t wr_id;
	uint32_t qpn, qp_gen, src_qpn, src_port;
	uint32_t len;
	uint32_t imm; /* as it came: network byte order */
	uint16_t status, opcode, flags;
	uint8_t unsolicited, is_recv;
};

struct cq_slot {
	_Atomic uint64_t word; /* position << 24 | process id << 2 | enum: see cq_push */
	struct wc wc;
};

struct cq {
	_Atomic uint32_t live, gen;
	uint32_t proc, port;
	uint32_t size;  /* slots of the ring */
	uint32_t depth; /* completions it takes before it overruns; size, or less by a fault */
	_Atomic uint64_t head, tail;
	_Atomic uint32_t armed;
	uint32_t channel_pid, channel; /* RUN/chan.PID.N, channel 0: none */
	_Atomic uint64_t overruns;
};

struct qp {
	_Atomic uint32_t state; /* enum ibv_qp_state; QP_FREE: nobody's */
	_Atomic uint32_t gen;
	uint32_t proc, port, qpn, pd, send_cq, recv_cq;
	uint32_t qkey, rq_size;
	uint8_t unsolicited;
	_Atomic uint64_t rq_head, rq_tail; /* of the ring of receives */
};
#define QP_FREE 0xffffffffu

struct mr {
	_Atomic uint32_t live; /* 0 free, 1 live, 2 on its way out */
	uint32_t proc, port, pd, lkey, rkey, access;
	uint64_t addr, iova, length; /* addr: in that process */
};

struct pd {
	_Atomic uint32_t live;
	uint32_t proc, port;
	_Atomic uint16_t ahs[PORTS_MAX]; /* address handles to each port */
};

struct proc {
	/* Held by a thread of the process as long as it lives. The kernel marks it when the process
	 * ends however it ends, so a look at this word says whether the process is there. */
	pthread_mutex_t alive;
	_Atomic uint32_t used, dead;
	uint32_t pid, host;
	_Atomic uint32_t hazard_qp, hazard_mr[2]; /* index + 1 (rule 2) */
};

struct port {
	_Atomic uint32_t gone;      /* the device has disappeared */
	_Atomic uint32_t qps, cqs, mrs, ahs;
	_Atomic uint64_t mr_bytes;
	_Atomic uint64_t busy_ns;   /* F_SLOW: until then */
	uint32_t next_qpn;
	_Atomic uint16_t qp_of[QPN_MAX]; /* slot + 1 */
	struct counters counters;
};

struct fabric {
	_Atomic uint64_t ready; /* FABRIC_MAGIC once the rest can be read */
	struct settings set;
	pthread_mutex_t alloc_lock;
	_Atomic uint32_t rules_made; /* 0: no fault was ever asked for, so no rule is looked at */
	struct rule rules[RULES_MAX];
	struct proc procs[PROCS_MAX];
	struct port ports[PORTS_MAX];
	struct pd pds[PDS_MAX];
	struct qp qps[QPS_MAX];
	struct cq cqs[CQS_MAX];
	struct mr mrs[MRS_MAX];
	uint32_t next_mr, mr_cursor; /* all from next_mr on were never used */
	struct recv_entry rqs[QPS_MAX][RQ_MAX];
	struct cq_slot cq_rings[CQS_MAX][CQE_MAX];
};
#define FABRIC_MAGIC 0x7465702d65666131ull

extern struct fabric *fabric;
extern char run_folder[200];

/* fabric.c */
int fabric_open(void); /* 0, or errno after a line on stderr */
uint64_t now_ns(void);
void fabric_lock(void);
void fabric_unlock(void);
uint32_t proc_attach(uint32_t host); /* fabric locked; this process's index */
void proc_detach(void); /* in the child of a fork: it has no index */
bool proc_is_alive(uint32_t proc);
void reap(void); /* fabric locked; take back what dead processes held */
int32_t qp_find(uint32_t port, uint32_t qpn);
bool qp_is_live(const struct qp *qp);
void qp_free(uint32_t index);
void cq_free(uint32_t index);
void mr_free(uint32_t index);
void pd_free(uint32_t index);
void wait_for_hazards(uint32_t qp_plus_1, uint32_t mr_plus_1);
bool cq_push(uint32_t cq, const struct wc *wc); /* false: overrun, it is lost */
bool cq_pop(uint32_t cq, struct wc *wc);
void cq_notify(uint32_t cq); /* wake its sleeper, if it is armed */
bool rq_pop(uint32_t qp, struct recv_entry *out);
bool rq_push(uint32_t qp, const struct recv_entry *in);
#define COUNT(port, name, n) \
	atomic_fetch_add_explicit(&fabric->ports[port].counters.name, (n), memory_order_relaxed)

/* faults.c */
int fault_add(const char *line); /* 0, or EINVAL after a line on stderr */
void fault_clear(const char *kind);
/* The first rule of that kind that strikes now, or NULL; `dice` is a random number. */
struct rule *fault_strikes(enum fault kind, uint32_t port, uint32_t from, int op, uint64_t dice);

#endif
