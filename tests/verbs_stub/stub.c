/* A libibverbs for one process: the calls that tep makes, and a provider behind the table of
 * operations that carries reliable writes, reads, messages and datagrams from queue pair to queue
 * pair at once. For tests of layouts, of error paths and of the backend's own cost; no NIC is modelled.
 *
 * Build: gcc -O2 -shared -fPIC -o libstub.so stub.c -lpthread     (needs <infiniband/verbs.h>)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#undef ibv_query_port
#undef ibv_reg_mr

#define NDEV 8
#define NMR 4096
#define NQP (1 << 18)
#define SEEN 4096
#define NCTX 4096
#define NEVENT 4096
#define NPKEY 4
#define SQ_BYTES_MAX (2 << 20) /* of one send queue, as on ConnectX */
#define INLINE_MAX 60

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
#define LOCKED(...) do { pthread_mutex_lock(&lock); __VA_ARGS__; pthread_mutex_unlock(&lock); } while (0)

/* What tests turn: see stub_set. */
enum { SINK, NO_COPY, DROP_DATAGRAMS, FAIL_POST, FAIL_AFTER, CUT_LINK, LOSE_ACK, ON_OVERRUN, POLL_ERROR, PLAIN_QPS, NO_READS, HOLD_AH, LATE_FORK_INIT, NKNOBS };
static volatile long knob[NKNOBS];

/* `host` is where the bytes are: the address itself, or the mapping of a dma-buf. */
struct mr { struct ibv_mr mr; uint64_t addr; size_t len; unsigned access; int live; char *host, *map; size_t mapped; };
struct recv { uint64_t wr_id; struct ibv_sge sge; int nsge; };
struct ring { struct recv *at; uint32_t cap, head, tail; };
struct done { struct ibv_wc wc; struct qp *qp; uint32_t frees; };
struct channel { struct ibv_comp_channel c; };
struct cq { struct ibv_cq c; struct done *at; uint32_t cap, head, tail; int armed, overrun; };
struct srq { struct ibv_srq s; struct ring r; };
struct wr {
	uint64_t wr_id, raddr;
	uint32_t opcode, flags, rkey;
	__be32 imm;
	struct ibv_sge sge;
	int nsge;
	char inlined[INLINE_MAX];
};
struct qp {
	struct ibv_qp q;
	struct cq *cq;
	struct srq *srq;
	struct ring rq;
	struct wr *sq;
	uint32_t cap, head, tail; /* not carried out */
	uint32_t used, unsaid;    /* slots taken; of these carried out without a completion */
	uint32_t dest, qkey, rq_psn, sq_psn;
	int state, rnr_retry, stuck;
	uint32_t inline_max, pkey, sq_bytes;
	uint32_t reads_out, reads_in, access;
};
/* Plain fields of the work requests as they arrived, for the layout tests. */
struct seen {
	uint64_t wr_id, raddr, addr, qp;
	uint32_t num_sge, opcode, flags, imm_be, rkey, length, lkey, last;
};

static struct ibv_device devs[NDEV];
/* What a device is; link 0 is Ethernet, and below 0 unspecified, as EFA's is. */
static struct { int link; uint64_t subnet; uint16_t pkeys[NPKEY]; } kinds[NDEV];
static struct ibv_device *listed[NDEV + 1];
static struct mr *mrs[NMR];
static struct qp *qps[NQP];
static uint32_t nmr, nqp, nlive, nstuck;
static struct seen seen[SEEN];
static uint64_t nseen;
static uint64_t posts, sunk, sum, overruns, datagrams, datagrams_lost, commands, sq_bytes;

/* A device's own events; one more than fit is lost. */
struct event { int type; void *element; };
struct context { struct verbs_context v; struct event at[NEVENT]; uint32_t head, tail; };
static struct context *contexts[NCTX];

static struct context *whole(struct ibv_context *c)
{
	return (struct context *)((char *)c - offsetof(struct context, v.context));
}

static void tell(struct context *c, int type, void *element)
{
	if (c->tail - c->head == NEVENT) return;
	c->at[c->tail++ % NEVENT] = (struct event){ type, element };
	eventfd_write(c->v.context.async_fd, 1);
}

static int is_cut(struct ibv_context *c) { return knob[CUT_LINK] && c->device - devs == knob[CUT_LINK] - 1; }

long stub_set(int what, long value) { long old = knob[what]; knob[what] = value; return old; }
uint64_t stub_posts(void) { return posts; }
uint64_t stub_overruns(void) { return overruns; }
uint64_t stub_datagrams(void) { return datagrams; }
uint64_t stub_datagrams_lost(void) { return datagrams_lost; }
uint64_t stub_commands(void) { return commands; }
uint64_t stub_sq_bytes(void) { return sq_bytes; }

static void list_devices(void)
{
	for (int i = 0; i < NDEV; i++) { snprintf(devs[i].name, sizeof devs[i].name, "stub%d", i); listed[i] = &devs[i]; }
}

/* Make a device another one: its link layer, its InfiniBand subnet, its folder in sysfs. */
void stub_device(int i, int link, uint64_t subnet, const char *folder)
{
	kinds[i].link = link;
	kinds[i].subnet = subnet;
	snprintf(devs[i].ibdev_path, sizeof devs[i].ibdev_path, "%s", folder);
}
void stub_pkey(int i, int index, int pkey) { kinds[i].pkeys[index] = pkey; }
void stub_reset_devices(void) { memset(kinds, 0, sizeof kinds); memset(devs, 0, sizeof devs); list_devices(); }
static int pkey_of(struct ibv_context *c, int index)
{
	int found = kinds[c->device - devs].pkeys[index];
	return found || index ? found : 0xffff;
}
uint64_t stub_rows(void) { return sunk; }
uint64_t stub_nseen(void) { return nseen; }
struct seen *stub_seen(uint64_t i) { return &seen[i % SEEN]; }
uint32_t stub_live_qps(void)
{
	uint32_t n = 0;
	for (uint32_t i = 0; i < nqp; i++) n += qps[i] != NULL;
	return n;
}
uint32_t stub_live_mrs(void)
{
	uint32_t n = 0;
	for (uint32_t i = 0; i < nmr; i++) n += mrs[i]->live;
	return n;
}

/* --- completions */

static void put(struct cq *cq, struct ibv_wc wc, struct qp *qp, uint32_t frees)
{
	if (cq->tail - cq->head == cq->cap) {
		if (!knob[ON_OVERRUN]) { fprintf(stderr, "stub: completion queue overrun\n"); abort(); }
		overruns++; /* what does not fit is lost, and the queue takes nothing more */
		if (!cq->overrun++) tell(whole(cq->c.context), IBV_EVENT_CQ_ERR, cq);
		return;
	}
	if (cq->overrun) return;
	cq->at[cq->tail++ % cq->cap] = (struct done){ wc, qp, frees };
	if (cq->armed && cq->c.channel) {
		cq->armed = 0;
		eventfd_write(cq->c.channel->fd, 1);
	}
}

static int poll_cq(struct ibv_cq *c, int n, struct ibv_wc *wc)
{
	struct cq *cq = (struct cq *)c;
	int k = 0;
	if (knob[POLL_ERROR] && c->context->device - devs == knob[POLL_ERROR] - 1) return -2;
	LOCKED({
		for (; k < n && cq->head != cq->tail; k++) {
			struct done *d = &cq->at[cq->head++ % cq->cap];
			wc[k] = d->wc;
			if (d->frees) d->qp->used -= d->frees;
		}
	});
	return k;
}

static int req_notify_cq(struct ibv_cq *c, int solicited) { (void)solicited; ((struct cq *)c)->armed = 1; return 0; }

/* `n` immediates arrive on every shared receive queue's owner that has `n` receives of this qp. */
int stub_inject_imms(uint32_t qpn, uint32_t n, uint32_t imm, uint32_t step)
{
	struct qp *qp = qps[qpn];
	struct ring *r = &qp->srq->r;
	if (r->tail - r->head < n) return -1;
	for (uint32_t i = 0; i < n; i++) {
		struct recv *v = &r->at[r->head++ % r->cap];
		struct ibv_wc wc = { .wr_id = v->wr_id, .opcode = IBV_WC_RECV_RDMA_WITH_IMM, .qp_num = qpn,
				     .wc_flags = IBV_WC_WITH_IMM };
		wc.imm_data = htobe32(imm + i * step);
		put(qp->cq, wc, NULL, 0);
	}
	return 0;
}

/* --- carrying out */

static struct mr *find_mr(uint32_t key, uint64_t addr, uint64_t len, unsigned access, int remote)
{
	uint32_t i = key / 2 - 1;
	if (key < 2 || (int)(key & 1) != remote || i >= nmr || !mrs[i]->live) return NULL;
	struct mr *m = mrs[i];
	if (addr < m->addr || len > m->len || addr - m->addr > m->len - len) return NULL;
	return (m->access & access) == access ? m : NULL;
}

static void end(struct qp *qp, struct wr *w, int status)
{
	if (status == 0 && !(w->flags & IBV_SEND_SIGNALED)) { qp->unsaid++; return; }
	struct ibv_wc wc = { .wr_id = w->wr_id, .status = status, .qp_num = qp->q.qp_num };
	/* As on Soft-RoCE, the opcode says SEND when the status is bad: nobody may rely on it. */
	if (status == 0 && w->opcode != IBV_WR_SEND) wc.opcode = w->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
	put(qp->cq, wc, qp, qp->unsaid + 1);
	qp->unsaid = 0;
}

static void carry(struct qp *qp);

static void to_error(struct qp *qp)
{
	int fresh = qp->state != IBV_QPS_ERR;
	qp->state = qp->q.state = IBV_QPS_ERR;
	carry(qp);
	if (fresh && qp->srq) tell(whole(qp->q.context), IBV_EVENT_QP_LAST_WQE_REACHED, qp);
}

/* Packets pass between members of one partition; the top bit only tells full ones from limited. */
static int same_pkey(struct qp *a, struct qp *b) { return ((a->pkey ^ b->pkey) & 0x7fff) == 0; }

/* -> status, or -1 where the peer has no receive posted */
static int deliver(struct qp *qp, struct wr *w)
{
	struct qp *to = qp->dest < nqp ? qps[qp->dest] : NULL;
	int imm = w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM, send = w->opcode == IBV_WR_SEND;
	int reads = w->opcode == IBV_WR_RDMA_READ;
	unsigned here = reads ? IBV_ACCESS_LOCAL_WRITE : 0, there = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
	uint64_t len = w->nsge ? w->sge.length : 0;
	if (is_cut(qp->q.context) || (to && is_cut(to->q.context))) return IBV_WC_RETRY_EXC_ERR;
	if (!to || to->state < IBV_QPS_RTR || to->state == IBV_QPS_ERR || to->dest != qp->q.qp_num)
		return IBV_WC_RETRY_EXC_ERR;
	if (!same_pkey(qp, to)) return IBV_WC_RETRY_EXC_ERR;
	if (reads && (!qp->reads_out || !to->reads_in || !(to->access & IBV_ACCESS_REMOTE_READ))) {
		to_error(to);
		return IBV_WC_REM_INV_REQ_ERR;
	}
	char *src = w->inlined, *dst = NULL;
	if (len && !(w->flags & IBV_SEND_INLINE)) {
		struct mr *m = find_mr(w->sge.lkey, w->sge.addr, len, here, 0);
		if (!m) return IBV_WC_LOC_PROT_ERR;
		src = m->host + (w->sge.addr - m->addr);
	}
	if (!send && len) {
		struct mr *m = find_mr(w->rkey, w->raddr, len, there, 1);
		if (!m) {
			to_error(to);
			return IBV_WC_REM_ACCESS_ERR;
		}
		dst = m->host + (w->raddr - m->addr);
	}
	struct ibv_wc wc = { .qp_num = to->q.qp_num, .byte_len = len };
	if (imm || send) {
		struct ring *r = &to->srq->r;
		if (r->head == r->tail) return qp->rnr_retry == 7 ? -1 : IBV_WC_RNR_RETRY_EXC_ERR;
		struct recv *v = &r->at[r->head++ % r->cap];
		wc.wr_id = v->wr_id;
		wc.opcode = imm ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
		wc.wc_flags = imm ? IBV_WC_WITH_IMM : 0;
		wc.imm_data = w->imm;
		if (send) {
			if (len > (v->nsge ? v->sge.length : 0)) {
				wc.status = IBV_WC_LOC_LEN_ERR;
				put(to->cq, wc, NULL, 0);
				to_error(to);
				return IBV_WC_REM_INV_REQ_ERR;
			}
			memcpy((void *)v->sge.addr, src, len);
		}
	}
	if (dst && !knob[NO_COPY]) memmove(reads ? src : dst, reads ? dst : src, len);
	if (imm || send) put(to->cq, wc, NULL, 0);
	return 0;
}

static void note_stuck(struct qp *qp)
{
	int now = qp->head != qp->tail;
	nstuck += now - qp->stuck;
	qp->stuck = now;
}

static void carry(struct qp *qp)
{
	while (qp->head != qp->tail) {
		struct wr *w = &qp->sq[qp->head % qp->cap];
		int status = qp->state == IBV_QPS_ERR ? IBV_WC_WR_FLUSH_ERR : deliver(qp, w);
		if (status < 0) break;
		if (status == 0 && knob[LOSE_ACK] && --knob[LOSE_ACK] == 0) status = IBV_WC_RETRY_EXC_ERR;
		qp->head++;
		end(qp, w, status);
		if (status && qp->state != IBV_QPS_ERR) to_error(qp);
	}
	note_stuck(qp);
}

static void carry_all(void)
{
	if (!nstuck) return;
	for (uint32_t i = 0; i < nqp; i++)
		if (qps[i] && qps[i]->head != qps[i]->tail) carry(qps[i]);
}

static int datagram(struct qp *qp, struct ibv_send_wr *w)
{
	static long turn;
	struct qp *to = w->wr.ud.remote_qpn < nqp ? qps[w->wr.ud.remote_qpn] : NULL;
	struct ibv_wc wc = { .wr_id = w->wr_id, .qp_num = qp->q.qp_num };
	int lost = knob[DROP_DATAGRAMS] && turn++ % knob[DROP_DATAGRAMS] == 0;
	put(qp->cq, wc, NULL, 0);
	datagrams++;
	if (!to || lost || is_cut(qp->q.context) || is_cut(to->q.context)) return 0;
	if (to->q.qp_type != IBV_QPT_UD || to->qkey != w->wr.ud.remote_qkey || !same_pkey(qp, to)) return 0;
	struct ring *r = &to->rq;
	if (r->head == r->tail) { datagrams_lost++; return 0; }
	struct recv *v = &r->at[r->head++ % r->cap];
	struct ibv_wc in = { .wr_id = v->wr_id, .opcode = IBV_WC_RECV, .qp_num = to->q.qp_num,
			     .src_qp = qp->q.qp_num, .byte_len = 40 + w->sg_list->length };
	memcpy((char *)v->sge.addr + 40, (void *)w->sg_list->addr, w->sg_list->length);
	put(to->cq, in, NULL, 0);
	return 0;
}

static void look(struct qp *qp, struct ibv_send_wr *w)
{
	struct seen *s = &seen[nseen++ % SEEN];
	*s = (struct seen){ w->wr_id, w->wr.rdma.remote_addr, 0, (uint64_t)qp, w->num_sge, w->opcode,
			    w->send_flags, w->imm_data, w->wr.rdma.rkey, 0, 0, w->next == NULL };
	if (w->num_sge) { s->addr = w->sg_list->addr; s->length = w->sg_list->length; s->lkey = w->sg_list->lkey; }
}

/* Reads what a provider reads, completes what asks for it, delivers nothing. */
static int sink(struct qp *qp, struct ibv_send_wr *w)
{
	uint64_t s = 0, n = 0;
	for (; w; w = w->next, n++) {
		s += w->wr.rdma.remote_addr + w->wr.rdma.rkey + w->opcode + w->imm_data;
		if (w->num_sge) s += w->sg_list->addr + w->sg_list->length + w->sg_list->lkey;
		if (w->send_flags & IBV_SEND_SIGNALED) {
			struct ibv_wc wc = { .wr_id = w->wr_id, .opcode = IBV_WC_RDMA_WRITE, .qp_num = qp->q.qp_num };
			put(qp->cq, wc, NULL, 0);
		}
	}
	sum += s;
	sunk += n;
	return 0;
}

static int post_one(struct qp *qp, struct ibv_send_wr *w)
{
	if (qp->q.qp_type == IBV_QPT_UD) return datagram(qp, w);
	if (knob[FAIL_POST] && knob[FAIL_AFTER]-- == 0) { long e = knob[FAIL_POST]; knob[FAIL_POST] = 0; return e; }
	if (qp->state < IBV_QPS_RTS) return EINVAL;
	if (qp->used == qp->cap) return ENOMEM;
	if (w->send_flags & IBV_SEND_INLINE && w->num_sge && w->sg_list->length > qp->inline_max) return ENOMEM;
	look(qp, w);
	struct wr *o = &qp->sq[qp->tail++ % qp->cap];
	*o = (struct wr){ w->wr_id, w->wr.rdma.remote_addr, w->opcode, w->send_flags, w->wr.rdma.rkey, w->imm_data };
	o->nsge = w->num_sge;
	if (w->num_sge) o->sge = *w->sg_list;
	if (w->send_flags & IBV_SEND_INLINE) memcpy(o->inlined, (void *)o->sge.addr, o->nsge ? o->sge.length : 0);
	qp->used++;
	return 0;
}

static int post_send(struct ibv_qp *q, struct ibv_send_wr *w, struct ibv_send_wr **bad)
{
	struct qp *qp = (struct qp *)q;
	int rc = 0;
	pthread_mutex_lock(&lock);
	posts++;
	if (knob[SINK] && q->qp_type == IBV_QPT_RC) rc = sink(qp, w), w = NULL;
	for (; w; w = w->next)
		if ((rc = post_one(qp, w))) { *bad = w; break; }
	if (q->qp_type == IBV_QPT_RC && !knob[SINK]) carry(qp);
	pthread_mutex_unlock(&lock);
	return rc;
}

static int push(struct ring *r, struct ibv_recv_wr *w, struct ibv_recv_wr **bad)
{
	for (; w; w = w->next) {
		if (r->tail - r->head == r->cap) { *bad = w; return ENOMEM; }
		struct recv *v = &r->at[r->tail++ % r->cap];
		*v = (struct recv){ w->wr_id, { 0 }, w->num_sge };
		if (w->num_sge) v->sge = *w->sg_list;
	}
	return 0;
}

static int post_recv(struct ibv_qp *q, struct ibv_recv_wr *w, struct ibv_recv_wr **bad)
{
	int rc;
	LOCKED(rc = push(&((struct qp *)q)->rq, w, bad));
	return rc;
}

static int post_srq_recv(struct ibv_srq *s, struct ibv_recv_wr *w, struct ibv_recv_wr **bad)
{
	int rc;
	LOCKED({ rc = push(&((struct srq *)s)->r, w, bad); if (!knob[SINK]) carry_all(); });
	return rc;
}

/* --- control */

static void make_ring(struct ring *r, uint32_t cap) { r->at = calloc(cap ? cap : 1, sizeof *r->at); r->cap = cap; }

static struct ibv_qp *create_qp_ex(struct ibv_context *c, struct ibv_qp_init_attr_ex *a);

int ibv_fork_init(void) { return knob[LATE_FORK_INIT] ? EINVAL : 0; }

struct ibv_device **ibv_get_device_list(int *n)
{
	list_devices();
	if (n) *n = NDEV;
	return listed;
}
void ibv_free_device_list(struct ibv_device **l) { (void)l; }

struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	struct context *made = calloc(1, sizeof *made);
	struct ibv_context *c = &made->v.context;
	LOCKED({ int i = 0; while (i < NCTX - 1 && contexts[i]) i++; contexts[i] = made; });
	made->v.sz = sizeof made->v;
	made->v.create_qp_ex = knob[PLAIN_QPS] ? NULL : create_qp_ex;
	c->abi_compat = __VERBS_ABI_IS_EXTENDED;
	c->device = d;
	c->async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	c->ops.poll_cq = poll_cq;
	c->ops.req_notify_cq = req_notify_cq;
	c->ops.post_send = post_send;
	c->ops.post_recv = post_recv;
	c->ops.post_srq_recv = post_srq_recv;
	return c;
}
int ibv_close_device(struct ibv_context *c)
{
	LOCKED(for (int i = 0; i < NCTX; i++) if (contexts[i] == whole(c)) contexts[i] = NULL);
	close(c->async_fd);
	free(whole(c));
	return 0;
}

int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a)
{
	(void)c;
	memset(a, 0, sizeof *a);
	a->max_qp_wr = 32768; a->max_srq_wr = 32768; a->max_cqe = 1 << 20; a->max_qp = NQP;
	a->max_qp_rd_atom = a->max_qp_init_rd_atom = knob[NO_READS] ? 0 : 16; a->phys_port_cnt = 1; a->max_mr_size = 1ull << 40;
	return 0;
}
int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *p)
{
	struct ibv_port_attr *a = (struct ibv_port_attr *)p;
	if (port != 1) return EINVAL;
	a->state = is_cut(c) ? IBV_PORT_DOWN : IBV_PORT_ACTIVE; a->active_mtu = a->max_mtu = IBV_MTU_4096; a->gid_tbl_len = 4;
	a->max_msg_sz = 1u << 31;
	int i = c->device - devs;
	a->link_layer = kinds[i].link < 0 ? IBV_LINK_LAYER_UNSPECIFIED : kinds[i].link ? kinds[i].link : IBV_LINK_LAYER_ETHERNET;
	a->lid = a->link_layer == IBV_LINK_LAYER_INFINIBAND ? 1 + i : 0;
	a->pkey_tbl_len = NPKEY;
	return 0;
}
ssize_t _ibv_query_gid_table(struct ibv_context *c, struct ibv_gid_entry *e, size_t n, uint32_t f, size_t size)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
	(void)f; (void)size;
	if (n < 3) return -EINVAL;
	memset(e, 0, 3 * sizeof *e);
	int device = c->device - devs;
	if (kinds[device].link == IBV_LINK_LAYER_INFINIBAND) {
		e->port_num = 1;
		e->gid.global.subnet_prefix = htobe64(kinds[device].subnet);
		e->gid.global.interface_id = htobe64(1 + device);
		return 1;
	}
	for (int i = 0; i < 3; i++) {
		e[i].gid_index = i;
		e[i].port_num = 1;
		e[i].gid_type = i ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
		e[i].gid.raw[0] = 0xfe; e[i].gid.raw[1] = 0x80; e[i].gid.raw[15] = 1;
	}
	memset(e[2].gid.raw, 0, 16);
	memcpy(e[2].gid.raw, mapped, 12);
	e[2].gid.raw[12] = 10;
	e[2].gid.raw[15] = 1 + (c->device - devs);
	return 3;
}
int ibv_query_pkey(struct ibv_context *c, uint8_t port, int index, __be16 *pkey)
{
	if (port != 1 || index < 0 || index >= NPKEY) { errno = EINVAL; return -1; }
	*pkey = htobe16(pkey_of(c, index));
	return 0;
}
struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) { struct ibv_pd *p = calloc(1, sizeof *p); p->context = c; return p; }
int ibv_dealloc_pd(struct ibv_pd *p) { free(p); return 0; }

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova, unsigned access)
{
	struct mr *m = NULL;
	LOCKED({
		if (nmr == NMR) for (uint32_t i = 0; i < NMR && !m; i++) if (!mrs[i]->live) m = mrs[i];
		if (!m && nmr < NMR) { m = mrs[nmr] = calloc(1, sizeof *m); m->mr.lkey = 2 * nmr + 2; nmr++; }
		if (m) {
			m->mr.pd = pd; m->mr.addr = addr; m->mr.length = len; m->mr.rkey = m->mr.lkey | 1;
			m->addr = iova; m->len = len; m->access = access; m->live = 1;
			m->host = addr; m->map = NULL;
		} else errno = ENOMEM;
	});
	return m ? &m->mr : NULL;
}
int ibv_dereg_mr(struct ibv_mr *p)
{
	struct mr *m = (struct mr *)p;
	LOCKED({ m->live = 0; if (m->map) munmap(m->map, m->mapped); m->map = NULL; });
	return 0;
}
/* Any file that can be mapped is a dma-buf here: byte `offset` of it answers to address `iova`. */
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len, uint64_t iova, int fd, int access)
{
	size_t before = offset % 4096, mapped = before + len;
	if (lseek(fd, 0, SEEK_END) < (off_t)(offset + len)) { errno = EINVAL; return NULL; }
	char *map = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset - before);
	if (map == MAP_FAILED) return NULL;
	struct ibv_mr *found = ibv_reg_mr_iova2(pd, map + before, len, iova, access);
	if (!found) { munmap(map, mapped); return NULL; }
	LOCKED({ ((struct mr *)found)->map = map; ((struct mr *)found)->mapped = mapped; });
	return found;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
	struct ibv_comp_channel *ch = calloc(1, sizeof *ch);
	ch->context = c;
	ch->fd = eventfd(0, EFD_CLOEXEC);
	return ch;
}
int ibv_destroy_comp_channel(struct ibv_comp_channel *ch) { close(ch->fd); free(ch); return 0; }
int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **ctx)
{
	eventfd_t v;
	(void)cq; (void)ctx;
	return eventfd_read(ch->fd, &v);
}
void ibv_ack_cq_events(struct ibv_cq *c, unsigned n) { (void)c; (void)n; }
struct ibv_cq *ibv_create_cq(struct ibv_context *c, int n, void *x, struct ibv_comp_channel *ch, int v)
{
	struct cq *cq = calloc(1, sizeof *cq);
	(void)x; (void)v;
	cq->c.context = c; cq->c.channel = ch; cq->cap = n; cq->at = calloc(n, sizeof *cq->at);
	return &cq->c;
}
int ibv_destroy_cq(struct ibv_cq *c) { free(((struct cq *)c)->at); free(c); return 0; }
struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *a)
{
	struct srq *s = calloc(1, sizeof *s);
	s->s.pd = pd;
	make_ring(&s->r, a->attr.max_wr);
	return &s->s;
}
int ibv_destroy_srq(struct ibv_srq *s) { free(((struct srq *)s)->r.at); free(s); return 0; }

/* `wqe` bytes for each request, and the queue rounded up to a power of two, as on ConnectX. */
static struct ibv_qp *create(struct ibv_pd *pd, struct ibv_qp_init_attr *a, uint32_t wqe, uint32_t inlined)
{
	uint64_t bytes = 1;
	while (bytes < (uint64_t)a->cap.max_send_wr * wqe) bytes *= 2;
	if (bytes > SQ_BYTES_MAX || a->cap.max_inline_data > INLINE_MAX) { errno = EINVAL; return NULL; }
	struct qp *q = calloc(1, sizeof *q);
	q->inline_max = a->cap.max_inline_data = inlined;
	q->sq_bytes = bytes;
	q->cq = (struct cq *)a->send_cq; q->srq = (struct srq *)a->srq;
	q->cap = a->cap.max_send_wr; q->sq = calloc(q->cap, sizeof *q->sq);
	make_ring(&q->rq, a->cap.max_recv_wr);
	q->q.context = pd->context; q->q.qp_type = a->qp_type;
	LOCKED({
		static uint32_t at = 16;
		if (!nqp) nqp = 16;
		uint32_t i = nqp;
		if (nqp >= 4096 && nlive < nqp - 16) { /* numbers are used again, as NICs do */
			while (qps[at]) at = at + 1 < nqp ? at + 1 : 16;
			i = at;
		}
		if (i == nqp) nqp++;
		nlive++;
		commands++;
		sq_bytes += bytes;
		q->q.qp_num = i;
		qps[i] = q;
	});
	return &q->q;
}
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a) { return create(pd, a, 256, INLINE_MAX); }
static struct ibv_qp *create_qp_ex(struct ibv_context *c, struct ibv_qp_init_attr_ex *a)
{
	uint64_t ops = IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND;
	(void)c;
	if (a->comp_mask != (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) || a->send_ops_flags & ~ops) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	return create(a->pd, (struct ibv_qp_init_attr *)a, 64, 28); /* the fields begin alike */
}
int ibv_destroy_qp(struct ibv_qp *p)
{
	struct qp *q = (struct qp *)p;
	LOCKED({
		qps[p->qp_num] = NULL;
		nlive--;
		commands++;
		nstuck -= q->stuck;
		sq_bytes -= q->sq_bytes;
		/* As real providers do: completions of a destroyed queue pair leave the queue. */
		struct cq *cq = q->cq;
		uint32_t out = cq->head;
		for (uint32_t i = cq->head; i != cq->tail; i++) {
			struct done d = cq->at[i % cq->cap];
			if (d.wc.qp_num != p->qp_num) cq->at[out++ % cq->cap] = d;
		}
		cq->tail = out;
	});
	free(q->sq); free(q->rq.at); free(q);
	return 0;
}
int ibv_modify_qp(struct ibv_qp *p, struct ibv_qp_attr *a, int mask)
{
	struct qp *q = (struct qp *)p;
	if (mask & IBV_QP_PKEY_INDEX && (a->pkey_index >= NPKEY || !pkey_of(p->context, a->pkey_index))) return EINVAL;
	LOCKED({
		commands++;
		if (mask & IBV_QP_PKEY_INDEX) q->pkey = pkey_of(p->context, a->pkey_index);
		if (mask & IBV_QP_QKEY) q->qkey = a->qkey;
		if (mask & IBV_QP_DEST_QPN) q->dest = a->dest_qp_num;
		if (mask & IBV_QP_RQ_PSN) q->rq_psn = a->rq_psn;
		if (mask & IBV_QP_SQ_PSN) q->sq_psn = a->sq_psn;
		if (mask & IBV_QP_RNR_RETRY) q->rnr_retry = a->rnr_retry;
		if (mask & IBV_QP_MAX_QP_RD_ATOMIC) q->reads_out = a->max_rd_atomic;
		if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) q->reads_in = a->max_dest_rd_atomic;
		if (mask & IBV_QP_ACCESS_FLAGS) q->access = a->qp_access_flags;
		if ((mask & IBV_QP_STATE) && a->qp_state == IBV_QPS_ERR) to_error(q);
		else if (mask & IBV_QP_STATE) q->state = q->q.state = a->qp_state;
		/* Three rules of the handshake: the peer is ready to receive before this end may send, it
		 * answers as many reads as this end asks, and packet numbers are not swapped. The peer's queue pair may have failed and gone since. */
		struct qp *to = q->dest < nqp ? qps[q->dest] : NULL;
		if (q->state == IBV_QPS_RTS && p->qp_type == IBV_QPT_RC && to) {
			if (to->state < IBV_QPS_RTR) fprintf(stderr, "stub: RTS before the peer is in RTR\n"), abort();
			if (to->dest == p->qp_num && to->rq_psn != q->sq_psn)
				fprintf(stderr, "stub: packet numbers do not match\n"), abort();
			if (to->dest == p->qp_num && q->reads_out > to->reads_in)
				fprintf(stderr, "stub: more reads than the peer answers\n"), abort();
		}
	});
	return 0;
}
struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *a)
{
	(void)a;
	int held = knob[HOLD_AH] != 0;
	for (int ms = 0; knob[HOLD_AH] && ms < 5000; ms++) usleep(1000);
	if (held) { errno = ETIMEDOUT; return NULL; }
	struct ibv_ah *h = calloc(1, sizeof *h);
	h->pd = pd;
	return h;
}
int ibv_destroy_ah(struct ibv_ah *h) { free(h); return 0; }
int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *e)
{
	struct context *of = whole(c);
	eventfd_t v;
	if (eventfd_read(c->async_fd, &v)) return -1;
	memset(e, 0, sizeof *e);
	struct event *found = &of->at[of->head++ % NEVENT];
	e->event_type = found->type;
	e->element.qp = found->element;
	return 0;
}
void ibv_ack_async_event(struct ibv_async_event *e) { (void)e; }
const char *ibv_wc_status_str(enum ibv_wc_status s) { static const char *n[] = { "success", "local length error" }; return s < 2 ? n[s] : "some error"; }
const char *ibv_event_type_str(enum ibv_event_type e) { (void)e; return "some event"; }

/* A device reports an event, e.g. IBV_EVENT_DEVICE_FATAL, or one of a queue pair. */
void stub_event(int async_fd, int type, void *qp)
{
	LOCKED(for (int i = 0; i < NCTX; i++) if (contexts[i] && contexts[i]->v.context.async_fd == async_fd) tell(contexts[i], type, qp));
}
