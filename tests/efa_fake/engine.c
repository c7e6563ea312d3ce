/* How the device carries requests out: in any order, segment by segment, acknowledged late. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sq *all_sqs;
static uint32_t self = UINT32_MAX, host;
static _Atomic uint64_t turns, under_way, taken;
static bool held; /* the device moves by engine_turn() only when a program asks for it */
static FILE *notes;
void (*engine_gone)(uint32_t port);
void (*engine_direct)(void);
void (*engine_forked)(void);

void engine_lock(void) { pthread_mutex_lock(&lock); }
void engine_unlock(void) { pthread_mutex_unlock(&lock); }
uint32_t engine_proc(void) { return self; }
uint32_t engine_host(void) { return host; }

void engine_note(const char *format, ...)
{
	va_list args;

	if (!notes)
		return;
	va_start(args, format);
	vfprintf(notes, format, args);
	va_end(args);
	fflush(notes);
}

static uint64_t dice(struct sq *sq) /* xorshift64* */
{
	sq->dice ^= sq->dice >> 12;
	sq->dice ^= sq->dice << 25;
	sq->dice ^= sq->dice >> 27;
	return sq->dice * 0x2545f4914f6cdd1dull >> 16;
}

/* --- the device goes on while the program does not call it */

static void watch_ports(void)
{
	static bool told[PORTS_MAX];

	for (uint32_t p = host * NICS_MAX; p < (host + 1) * NICS_MAX; p++) {
		if (fabric->ports[p].gone && !told[p] && engine_gone)
			engine_gone(p);
		told[p] = fabric->ports[p].gone;
	}
}

void engine_hold(bool hold)
{
	engine_lock();
	held = hold;
	engine_unlock();
}

void engine_move(void)
{
	if (!held)
		engine_turn();
}

static void *go_on(void *unused)
{
	uint64_t seen = 0, had = 0, quiet = 0, pause_us = 200;
	sigset_t all;

	(void)unused;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, NULL);
	for (;;) {
		struct timespec t = {0, pause_us * 1000};

		nanosleep(&t, NULL);
		watch_ports();
		if (!under_way && !engine_direct) {
			pause_us = 2000;
			continue;
		}
		quiet = under_way || taken != had ? 0 : quiet + 1;
		had = taken;
		/* Of doorbells of mapped queues nobody tells it: it looks, less often once all is quiet. */
		pause_us = !engine_direct ? 200 : quiet < 100 ? 50 : 1000;
		if (turns == seen && !pthread_mutex_trylock(&lock)) {
			engine_move();
			pthread_mutex_unlock(&lock);
		}
		seen = turns;
	}
	return NULL;
}

/* A child has no thread of the device and no queue pairs. What it opens anew is its own; what it
 * inherited it must not touch (verbs.c). */
static void forked(void)
{
	pthread_mutex_unlock(&lock);
	self = UINT32_MAX;
	all_sqs = NULL;
	under_way = 0;
	notes = NULL;
	proc_detach();
	if (engine_forked)
		engine_forked();
}

int engine_attach(void)
{
	static bool hooked;
	const char *which = getenv("TEP_FAKE_EFA_HOST");
	char path[300];
	pthread_t thread;
	sigset_t all, old;
	int err = fabric_open();

	if (err || self != UINT32_MAX)
		return err;
	host = which ? atoi(which) : 0;
	if (host >= HOSTS_MAX) {
		fprintf(stderr, "fake EFA: TEP_FAKE_EFA_HOST must be 0..%d\n", HOSTS_MAX - 1);
		return EINVAL;
	}
	/* Peers copy into this process: say so where the kernel asks (Yama's ptrace_scope 1). */
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	fabric_lock();
	self = proc_attach(host);
	fabric_unlock();
	if (self == UINT32_MAX)
		return EAGAIN;
	if (fabric->set.log) {
		snprintf(path, sizeof path, "%s/log.%d", run_folder, getpid());
		notes = fopen(path, "a");
	}
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &old);
	if (fabric->set.thread && pthread_create(&thread, NULL, go_on, NULL))
		err = EAGAIN;
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (!hooked) /* nobody forks in the middle of a turn */
		pthread_atfork(engine_lock, engine_unlock, forked);
	hooked = true;
	return err;
}

/* --- send queues */

struct sq *sq_open(uint32_t qp, uint32_t port, uint32_t cap)
{
	struct sq *sq = calloc(1, sizeof *sq);

	sq->qp = qp;
	sq->port = port;
	sq->cap = cap;
	sq->rnr_retry = 7;
	sq->pool = calloc(cap, sizeof *sq->pool);
	sq->spare = calloc(cap, sizeof *sq->spare);
	sq->out = calloc(cap, sizeof *sq->out);
	sq->heard = calloc(PORTS_MAX * QPN_MAX / 8, 1);
	for (uint32_t i = 0; i < cap; i++)
		sq->spare[i] = &sq->pool[cap - 1 - i];
	sq->nspare = cap;
	sq->dice = ((uint64_t)fabric->set.seed + 1) * 0x9e3779b97f4a7c15ull ^
		   ((uint64_t)port << 32 | fabric->qps[qp].qpn) * 0xbf58476d1ce4e5b9ull;
	if (!sq->dice)
		sq->dice = 1;
	sq->next = all_sqs;
	all_sqs = sq;
	return sq;
}

void sq_close(struct sq *sq)
{
	struct sq **at = &all_sqs;

	while (*at != sq)
		at = &(*at)->next;
	*at = sq->next;
	under_way -= sq->nout; /* nobody is told: the queue pair is gone, see verbs.c */
	free(sq->pool);
	free(sq->spare);
	free(sq->out);
	free(sq->heard);
	free(sq);
}

int sq_doorbell(struct sq *sq, const struct op *ops, uint32_t n)
{
	if (n > sq->nspare)
		return ENOMEM;
	for (uint32_t i = 0; i < n; i++) {
		struct op *op = sq->spare[--sq->nspare];

		*op = ops[i];
		if (fabric->set.shuffle && dice(sq) % 8 == 0)
			op->holds = dice(sq) % 16;
		sq->out[sq->nout++] = op;
	}
	under_way += n;
	taken += n;
	return 0;
}

/* --- registrations and copies */

const struct mr *mr_find(uint32_t key, uint32_t port, uint32_t pd, uint64_t addr, uint64_t len,
			 uint32_t access, bool remote)
{
	const struct mr *mr = &fabric->mrs[key & KEY_INDEX];

	if (mr->live != 1 || (remote ? mr->rkey : mr->lkey) != key || mr->port != port || mr->pd != pd)
		return NULL;
	if ((mr->access & access) != access || len > mr->length || addr < mr->iova ||
	    addr - mr->iova > mr->length - len)
		return NULL;
	return mr;
}

/* Copy between this process and another; false if a page is not there. */
static bool copy(bool write, uint32_t proc, uint64_t theirs, void *ours, uint64_t len)
{
	struct iovec local = {ours, len}, remote = {(void *)theirs, len};
	ssize_t n;

	if (!len)
		return true;
	if (proc == self) {
		if (write)
			memmove((void *)theirs, ours, len);
		else
			memmove(ours, (void *)theirs, len);
		return true;
	}
	n = write ? process_vm_writev(fabric->procs[proc].pid, &local, 1, &remote, 1, 0)
		  : process_vm_readv(fabric->procs[proc].pid, &local, 1, &remote, 1, 0);
	if (n < 0 && errno == ESRCH) /* its memory is gone, and its last thread not yet */
		fabric->procs[proc].dead = 1;
	if (n < 0 && errno == EPERM)
		fprintf(stderr, "fake EFA: may not copy to process %u: %s\n", fabric->procs[proc].pid,
			strerror(errno));
	return n == (ssize_t)len;
}

/* Move bytes [from, from + len) of a request between its own buffers and the peer's memory. */
static uint32_t move(struct sq *sq, struct op *op, uint32_t proc, uint64_t theirs, uint64_t from,
		     uint64_t len)
{
	uint32_t pd = fabric->qps[sq->qp].pd;
	uint64_t at = 0;

	if (op->is_inline)
		return copy(true, proc, theirs + from, op->inline_data + from, len) ? OK : BAD_ADDRESS;
	for (int i = 0; i < op->nsge && len; i++) {
		struct ibv_sge *sge = &op->sge[i];
		uint64_t start = from > at ? from - at : 0, n;
		const struct mr *mr;

		at += sge->length;
		if (start >= sge->length)
			continue;
		n = sge->length - start < len ? sge->length - start : len;
		mr = mr_find(sge->lkey, sq->port, pd, sge->addr, sge->length,
			     op->kind == OP_READ ? IBV_ACCESS_LOCAL_WRITE : 0, false);
		if (!mr)
			return INVALID_LKEY;
		if (!copy(op->kind != OP_READ, proc, theirs + from,
			  (void *)(mr->addr + (sge->addr + start - mr->iova)), n))
			return BAD_ADDRESS;
		from += n;
		len -= n;
	}
	return OK;
}

/* --- one request */

enum step { AGAIN, WAITS, ENDED };

static void answer(struct op *op, uint32_t status)
{
	op->status = status;
	op->phase = ANSWERED;
}

/* Nothing comes back from the peer. In time that becomes an error of its own. */
static enum step no_answer(struct sq *sq, struct op *op, uint64_t now)
{
	uint32_t bit = op->dport * QPN_MAX + op->dqpn % QPN_MAX;

	if (!op->give_up_ns)
		op->give_up_ns = now + fabric->set.timeout_us * 1000;
	if (now < op->give_up_ns)
		return WAITS;
	COUNT(sq->port, timeouts, 1);
	answer(op, op->dport < PORTS_MAX && sq->heard[bit / 8] >> bit % 8 & 1 ? UNRESP_REMOTE
									       : UNREACH_REMOTE);
	return AGAIN;
}

static enum step not_ready(struct sq *sq, struct op *op, uint64_t now)
{
	COUNT(op->dport, rnrs, 1);
	/* Source: InfiniBand's rnr_retry, 7 for ever; libfabric asks 7 on efa-direct (efa_base_ep.c). */
	if (sq->rnr_retry != 7 && op->rnr_tries++ >= sq->rnr_retry) {
		COUNT(op->dport, retries_spent, 1);
		answer(op, REMOTE_RNR);
		return AGAIN;
	}
	op->ready_ns = now + fabric->set.rnr_us * 1000;
	return WAITS;
}

/* The peer's queue pair, guarded against its end (fabric.h, rule 2), or NULL. */
static struct qp *responder(struct op *op)
{
	int32_t index = op->dport < PORTS_MAX ? qp_find(op->dport, op->dqpn) : -1;
	struct qp *qp;

	if (index < 0)
		return NULL;
	qp = &fabric->qps[index];
	fabric->procs[self].hazard_qp = index + 1;
	if (qp->port != op->dport || qp->qpn != op->dqpn || !qp_is_live(qp) || !proc_is_alive(qp->proc))
		return NULL;
	return qp;
}

static const struct mr *guarded(int which, uint32_t key, uint32_t port, uint32_t pd, uint64_t addr,
				uint64_t len, uint32_t access, bool remote)
{
	fabric->procs[self].hazard_mr[which] = (key & KEY_INDEX) + 1;
	atomic_thread_fence(memory_order_seq_cst);
	return mr_find(key, port, pd, addr, len, access, remote);
}

static uint32_t remote_access(const struct op *op)
{
	return op->kind == OP_READ ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
}

/* Where the bytes of this request are at the peer, or 0 and a status. */
static uint64_t target(struct op *op, struct qp *qp, uint32_t *status)
{
	const struct mr *mr;

	*status = OK;
	if (!op->len)
		return 0;
	if (op->kind == OP_SEND) {
		mr = guarded(1, op->recv.lkey, qp->port, qp->pd, op->recv.addr, op->len,
			     IBV_ACCESS_LOCAL_WRITE, false);
		*status = mr ? OK : REMOTE_ABORT; /* guessed; the responder sees INVALID_LKEY */
		return mr ? mr->addr + (op->recv.addr - mr->iova) : 0;
	}
	mr = guarded(1, op->rkey, qp->port, qp->pd, op->raddr, op->len, remote_access(op), true);
	*status = mr ? OK : BAD_ADDRESS;
	return mr ? mr->addr + (op->raddr - mr->iova) : 0;
}

static uint32_t check_local(struct sq *sq, struct op *op)
{
	uint64_t len = 0;

	for (int i = 0; i < op->nsge; i++)
		len += op->sge[i].length;
	if (!op->is_inline)
		op->len = len;
	if (len > (uint64_t)(op->kind == OP_SEND ? fabric->set.mtu : fabric->set.max_rdma))
		return LOCAL_BAD_LENGTH;
	for (int i = 0; i < op->nsge && !op->is_inline; i++)
		if (op->sge[i].length &&
		    !mr_find(op->sge[i].lkey, sq->port, fabric->qps[sq->qp].pd, op->sge[i].addr,
			     op->sge[i].length, op->kind == OP_READ ? IBV_ACCESS_LOCAL_WRITE : 0, false))
			return INVALID_LKEY;
	return OK;
}

/* The peer's device says no; unless the peer is just dying, and its registrations go with it. */
static enum step refuse(struct op *op, struct qp *qp, uint32_t status)
{
	if (proc_is_alive(qp->proc))
		answer(op, status);
	return AGAIN;
}

/* The first look at a request, up to where its bytes may move. */
static enum step begin(struct sq *sq, struct op *op, struct qp *qp, uint64_t now)
{
	struct rule *rule = fault_strikes(F_FAIL, op->dport, sq->port, op->kind, dice(sq));
	uint32_t status, segment;

	if (rule) {
		answer(op, rule->status);
		return AGAIN;
	}
	/* Source: EFA_IO_COMP_STATUS_REMOTE_ERROR_UNKNOWN_PEER, "no valid AH at remote side (required
	 * for RDMA operations)". Guessed: that handles of another protection domain do not count. */
	if (op->kind != OP_SEND && !fabric->pds[qp->pd].ahs[sq->port]) {
		answer(op, UNKNOWN_PEER);
		return AGAIN;
	}
	if ((op->kind == OP_SEND || op->kind == OP_WRITE_IMM) &&
	    fault_strikes(F_RNR, op->dport, sq->port, op->kind, dice(sq)))
		return not_ready(sq, op, now);
	if (op->kind == OP_WRITE_IMM && !qp->unsolicited && qp->rq_head == qp->rq_tail)
		return not_ready(sq, op, now);
	if (op->kind == OP_SEND && !op->received) {
		if (!rq_pop(qp - fabric->qps, &op->recv))
			return not_ready(sq, op, now);
		op->received = true;
		if (op->recv.len < op->len) {
			answer(op, REMOTE_BAD_LENGTH);
			return AGAIN;
		}
	}
	target(op, qp, &status);
	if (status)
		return refuse(op, qp, status);
	segment = fabric->set.segments ? fabric->set.mtu : UINT32_MAX;
	op->seg_count = op->len / segment + (op->len % segment != 0);
	op->seg_start = op->seg_done = 0;
	op->seg_step = 1;
	if (fabric->set.shuffle && op->seg_count > 1) { /* any order: start anywhere, step by a coprime */
		uint32_t a, b;

		op->seg_start = dice(sq) % op->seg_count;
		do {
			op->seg_step = 1 + dice(sq) % op->seg_count;
			for (a = op->seg_step, b = op->seg_count; b;) {
				uint32_t rest = a % b;

				a = b;
				b = rest;
			}
		} while (a != 1);
	}
	op->phase = op->seg_count ? MOVING : LANDED;
	return AGAIN;
}

static enum step move_segment(struct sq *sq, struct op *op, struct qp *qp)
{
	uint32_t which = (op->seg_start + (uint64_t)op->seg_done * op->seg_step) % op->seg_count;
	uint64_t segment = fabric->set.segments ? (uint64_t)fabric->set.mtu : op->len;
	uint64_t from = which * segment, len = op->len - from < segment ? op->len - from : segment;
	uint32_t status;
	uint64_t theirs = target(op, qp, &status);

	if (!status)
		status = move(sq, op, qp->proc, theirs, from, len);
	if (status)
		return refuse(op, qp, status);
	COUNT(sq->port, bytes, len);
	COUNT(sq->port, segments, 1);
	if (++op->seg_done == op->seg_count)
		op->phase = LANDED;
	return AGAIN;
}

/* All bytes are there: tell the responder's program if it is to be told. */
static enum step land(struct sq *sq, struct op *op, struct qp *qp, uint64_t now)
{
	uint32_t bit = op->dport * QPN_MAX + op->dqpn % QPN_MAX;
	struct qp *own = &fabric->qps[sq->qp];

	if (op->kind == OP_SEND || op->kind == OP_WRITE_IMM) {
		bool unsolicited = op->kind == OP_WRITE_IMM && qp->unsolicited;
		struct wc wc = {.qpn = qp->qpn, .qp_gen = qp->gen, .src_qpn = own->qpn,
				.src_port = sq->port, .len = op->len, .imm = op->imm,
				.flags = op->has_imm ? IBV_WC_WITH_IMM : 0, .is_recv = 1,
				.opcode = op->kind == OP_SEND ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM,
				.unsolicited = unsolicited};

		/* A write's immediate takes a receive once its bytes are there. Guessed: the real device
		 * may look at the first packet; either way the row is repeated after RNR. */
		if (op->kind == OP_WRITE_IMM && !unsolicited && !rq_pop(qp - fabric->qps, &op->recv)) {
			op->phase = NEW;
			return not_ready(sq, op, now);
		}
		wc.wr_id = unsolicited ? 0 : op->recv.wr_id;
		if (fault_strikes(F_DROP, op->dport, sq->port, op->kind, dice(sq))) {
			COUNT(op->dport, drops, 1);
		} else {
			if (op->kind == OP_WRITE_IMM) /* first: the program counts once it sees it */
				COUNT(op->dport, imms_landed, 1);
			cq_push(qp->recv_cq, &wc);
		}
	}
	sq->heard[bit / 8] |= 1 << bit % 8;
	if (fault_strikes(F_LOSE_ACK, op->dport, sq->port, op->kind, dice(sq))) {
		COUNT(sq->port, acks_lost, 1);
		answer(op, UNRESP_REMOTE); /* what the device says once it has waited long enough */
		op->ready_ns = now + fabric->set.timeout_us * 1000;
		return WAITS;
	}
	answer(op, OK);
	return AGAIN;
}

static enum step complete(struct sq *sq, struct op *op)
{
	static const uint16_t opcodes[] = {IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_WRITE,
					   IBV_WC_RDMA_READ};
	struct qp *own = &fabric->qps[sq->qp];
	struct wc wc = {.wr_id = op->wr_id, .qpn = own->qpn, .qp_gen = own->gen,
			.status = op->status, .opcode = opcodes[op->kind]};

	COUNT(sq->port, status[op->status], 1);
	cq_push(own->send_cq, &wc);
	return ENDED;
}

static enum step step(struct sq *sq, struct op *op, uint64_t now)
{
	struct port *port = &fabric->ports[sq->port];
	struct qp *qp;
	struct rule *rule;

	if (op->ready_ns > now)
		return WAITS;
	if (port->gone)
		return WAITS; /* a device that is not there completes nothing; guessed */
	if (op->phase == ANSWERED)
		return complete(sq, op);
	if (op->phase == NEW) {
		uint32_t status = check_local(sq, op);

		if (status) {
			answer(op, status);
			return AGAIN;
		}
		rule = op->paced ? NULL : fault_strikes(F_SLOW, sq->port, sq->port, op->kind, dice(sq));
		if (rule) {
			op->paced = true;
			uint64_t free_at = port->busy_ns > now ? (uint64_t)port->busy_ns : now;

			port->busy_ns = free_at + rule->us * 1000;
			if (free_at > now) {
				op->ready_ns = free_at;
				return WAITS;
			}
		}
	}
	if (op->dport == UINT32_MAX || fabric->ports[op->dport].gone ||
	    fault_strikes(F_MUTE, op->dport, sq->port, op->kind, dice(sq)) ||
	    fault_strikes(F_MUTE, sq->port, op->dport, op->kind, dice(sq)))
		return no_answer(sq, op, now);
	qp = responder(op);
	if (!qp) {
		answer(op, BAD_DEST_QPN);
		return AGAIN;
	}
	if (qp->qkey != op->qkey) {
		if (fabric->set.qkey_silent)
			return no_answer(sq, op, now);
		answer(op, BAD_DEST_QPN);
		return AGAIN;
	}
	switch (op->phase) {
	case NEW:
		return begin(sq, op, qp, now);
	case MOVING:
		return move_segment(sq, op, qp);
	default:
		return land(sq, op, qp, now);
	}
}

static void turn_sq(struct sq *sq, uint64_t now)
{
	struct proc *proc = &fabric->procs[self];
	uint32_t picks = sq->nout * 3 + 8;

	if (picks > 512)
		picks = 512;
	while (picks-- && sq->nout) {
		uint32_t at = fabric->set.shuffle ? dice(sq) % sq->nout : 0;
		struct op *op = sq->out[at];
		enum step how;

		if (op->holds) {
			op->holds--;
			continue;
		}
		how = step(sq, op, now);
		if (!fabric->set.shuffle)
			while (how == AGAIN)
				how = step(sq, op, now);
		proc->hazard_qp = proc->hazard_mr[0] = proc->hazard_mr[1] = 0;
		if (how == ENDED) {
			if (fabric->set.shuffle)
				sq->out[at] = sq->out[--sq->nout];
			else
				memmove(sq->out, sq->out + 1, --sq->nout * sizeof *sq->out);
			sq->spare[sq->nspare++] = op;
			under_way--;
		} else if (how == WAITS && !fabric->set.shuffle)
			break;
	}
}

void engine_turn(void)
{
	uint64_t now;

	turns++;
	if (self == UINT32_MAX)
		return;
	if (engine_direct)
		engine_direct();
	now = under_way ? now_ns() : 0;
	for (struct sq *sq = under_way ? all_sqs : NULL; sq; sq = sq->next)
		if (sq->nout)
			turn_sq(sq, now);
	if (engine_direct)
		engine_direct();
}
