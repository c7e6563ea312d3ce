/* The mapped queues: efadv_query_qp_wqs and efadv_query_cq, and the device's side of the rings.
 *
 * The device reads work queue entries as efa_io_defs.h of rdma-core defines them, byte by byte at
 * the offsets written here, and knows nothing of who wrote them. A doorbell is a word in memory that
 * the device looks at when it next moves, so that it sees several at once as one. With mapped=1 it is
 * a register: the device is told of each store, and more than max_batch entries between two are
 * refused (`overlong`): it takes nothing of that queue any more.
 *
 * Rule: what an entry must be and is not ends in an error of its own or is counted in `malformed`;
 * nothing is repaired.
 */
#define _GNU_SOURCE
#include "front.h"

#include <arpa/inet.h>
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct efa_wq_attr {
	uint64_t comp_mask;
	uint8_t *buffer;
	uint32_t entry_size, num_entries;
	uint32_t *doorbell;
	uint32_t max_batch;
	uint16_t caps;
	uint8_t reserved[2];
};

struct efa_cq_attr {
	uint64_t comp_mask;
	uint8_t *buffer;
	uint32_t entry_size, num_entries;
	uint32_t *doorbell;
};

/* A ring of one queue: what is mapped, and how far the device is. */
struct ring {
	struct window queue, bell;
	uint8_t *buffer; /* the queue as the device sees it */
	uint32_t entry, size; /* bytes of an entry, entries */
	uint32_t told; /* the last doorbell that the device was told of (mapped=1) */
	bool refused; /* it broke a rule of the device, which takes no more of it */
	uint32_t seen; /* of the doorbell; or for completions: written */
	uint32_t rung; /* the last doorbell of a completion queue */
	bool armed;
};

struct direct {
	struct vqp *qp; /* or a completion queue */
	struct vcq *cq;
	struct ring send, receive, done;
	uint32_t dice; /* of how late the device is (mapped=1) */
	struct direct *next;
};

static struct direct *all; /* under the engine's lock */

static uint32_t power_of_two(uint32_t n)
{
	uint32_t size = 1;

	while (size < n)
		size *= 2;
	return size;
}

static uint32_t doorbell(const struct ring *ring)
{
	return atomic_load((_Atomic uint32_t *)ring->bell.device);
}

/* A store to the doorbell of a send queue, at the moment it is made. */
static void send_rung(struct window *bell)
{
	struct direct *d = bell->owner;
	struct ring *ring = &d->send;
	uint16_t n = doorbell(ring) - ring->told;

	engine_lock();
	ring->told = doorbell(ring);
	window_rang(&ring->queue);
	engine_note("mapped what=bell n=%u\n", n);
	if (fabric->set.max_batch && n > fabric->set.max_batch) {
		COUNT(bell->port, overlong, 1);
		ring->refused = true;
	}
	engine_unlock();
}

static void other_rung(struct window *bell) { (void)bell; /* seen when the device moves */ }

/* The host's own memory: receives and completions. */
static bool plain(struct window *w, size_t bytes)
{
	w->bytes = (bytes + 4095) & ~4095ull;
	w->device = mmap(NULL, w->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	w->program = w->device;
	return w->device != MAP_FAILED;
}

static bool make_ring(struct ring *ring, uint32_t entries, uint32_t bytes, uint32_t port,
		      struct direct *d)
{
	bool is_send = ring == &d->send, good;
	size_t length;

	ring->size = power_of_two(entries);
	ring->entry = bytes;
	length = (size_t)ring->size * bytes;
	good = is_send ? window_open(&ring->queue, length, port, NULL, d) : plain(&ring->queue, length);
	ring->buffer = ring->queue.device;
	return good && window_open(&ring->bell, 4, port, is_send ? send_rung : other_rung, d);
}

static void drop_ring(struct ring *ring)
{
	window_close(&ring->queue);
	window_close(&ring->bell);
}

static struct direct *find(const struct vqp *qp, const struct vcq *cq)
{
	for (struct direct *d = all; d; d = d->next)
		if (d->qp == qp && d->cq == cq)
			return d;
	return NULL;
}

static struct direct *add(struct vqp *qp, struct vcq *cq)
{
	struct direct *d = find(qp, cq);

	bool good;

	if (d)
		return d;
	d = calloc(1, sizeof *d);
	d->qp = qp;
	d->cq = cq;
	if (qp) {
		good = make_ring(&d->send, qp->sq->cap, fabric->set.entry, qp->sq->port, d);
		good = good && make_ring(&d->receive, qp->rq_cap, 16, qp->sq->port, d);
	} else {
		good = make_ring(&d->done, fabric->cqs[cq->index].size, fabric->set.cq_entry, cq->port, d);
	}
	if (!good) {
		drop_ring(&d->send);
		drop_ring(&d->receive);
		drop_ring(&d->done);
		free(d);
		return NULL;
	}
	d->next = all;
	all = d;
	engine_direct = direct_turn;
	return d;
}

void direct_drop(const struct vqp *qp, const struct vcq *cq)
{
	struct direct **at = &all, *d;

	while (*at && ((*at)->qp != qp || (*at)->cq != cq))
		at = &(*at)->next;
	d = *at;
	if (!d)
		return;
	*at = d->next;
	drop_ring(&d->send);
	drop_ring(&d->receive);
	drop_ring(&d->done);
	free(d);
}

void direct_forget(void)
{
	all = NULL; /* in the child of a fork: the parent's */
	window_forget();
	engine_direct = NULL;
}

int fake_efa_query_wqs(struct ibv_qp *ibv, struct efa_wq_attr *send, struct efa_wq_attr *receive,
		       uint32_t inlen)
{
	struct direct *d;

	if (!fabric->set.queries)
		return EOPNOTSUPP;
	if (inlen < offsetof(struct efa_wq_attr, caps))
		return EINVAL;
	engine_lock();
	d = add((struct vqp *)ibv, NULL);
	engine_unlock();
	if (!d)
		return ENOMEM;
	memset(send, 0, inlen);
	memset(receive, 0, inlen);
	send->buffer = d->send.queue.program;
	send->entry_size = d->send.entry;
	send->num_entries = d->send.size;
	send->doorbell = (uint32_t *)d->send.bell.program;
	send->max_batch = fabric->set.max_batch ? (uint32_t)fabric->set.max_batch : 0xffff;
	receive->buffer = d->receive.queue.program;
	receive->entry_size = d->receive.entry;
	receive->num_entries = receive->max_batch = d->receive.size;
	receive->doorbell = (uint32_t *)d->receive.bell.program;
	return 0;
}

int fake_efa_query_cq(struct ibv_cq *ibv, struct efa_cq_attr *attr, uint32_t inlen)
{
	struct direct *d;

	if (!fabric->set.queries)
		return EOPNOTSUPP;
	if (inlen < offsetof(struct efa_cq_attr, doorbell))
		return EINVAL;
	engine_lock();
	d = add(NULL, (struct vcq *)ibv);
	engine_unlock();
	if (!d)
		return ENOMEM;
	memset(attr, 0, inlen);
	attr->buffer = d->done.queue.program;
	attr->entry_size = d->done.entry;
	attr->num_entries = d->done.size;
	if (inlen >= sizeof *attr && fabric->set.cq_bell)
		attr->doorbell = (uint32_t *)d->done.bell.program;
	return 0;
}

/* --- work queue entries */

static uint64_t number(const uint8_t *at, int bytes)
{
	uint64_t n = 0;

	for (int i = bytes; i--;)
		n = n << 8 | at[i];
	return n;
}

static bool all_zero(const uint8_t *at, int bytes)
{
	while (bytes--)
		if (*at++)
			return false;
	return true;
}

/* Decode one entry; false: the device would not know what to do with it. */
static bool decode(const struct vqp *qp, const uint8_t *e, struct op *op)
{
	uint8_t ctrl1 = e[2], ctrl2 = e[3];
	uint32_t kind = ctrl1 & 15, buffers = number(e + 6, 2), ah = number(e + 12, 2);
	const uint8_t *local = e + (kind == 0 ? 32 : 48);
	bool good = ctrl1 & 0x80 && !(ctrl1 & 0x40) && (ctrl2 & 0xfe) == 0x1c && kind <= 2 &&
		    !e[14] && !e[15] && all_zero(e + 20, 12) && !(ctrl1 & 0x20);

	memset(op, 0, sizeof *op);
	op->wr_id = number(e, 2);
	op->has_imm = ctrl1 >> 4 & 1;
	op->imm = htonl(number(e + 8, 4));
	op->kind = kind == 0 ? OP_SEND : kind == 1 ? OP_READ : op->has_imm ? OP_WRITE_IMM : OP_WRITE;
	op->dqpn = number(e + 4, 2);
	op->qkey = number(e + 16, 4);
	op->dport = ah < PORTS_MAX && fabric->pds[fabric->qps[qp->index].pd].ahs[ah] ? ah : UINT32_MAX;
	op->nsge = buffers;
	if (buffers > (uint32_t)(kind == 0 ? fabric->set.send_sge : fabric->set.rdma_sge) || buffers > 2)
		good = false;
	for (uint32_t i = 0; good && i < buffers; i++, local += 16) {
		op->sge[i].length = number(local, 4);
		op->sge[i].lkey = number(local + 4, 3);
		op->sge[i].addr = number(local + 8, 8);
		good = !local[7];
	}
	if (kind) {
		op->rkey = number(e + 36, 4);
		op->raddr = number(e + 40, 8);
		/* One length for both ends; the header does not say which counts. */
		good = good && (!buffers || number(e + 32, 4) == op->sge[0].length);
	}
	return good;
}

static void take_sends(struct direct *d)
{
	struct vqp *qp = d->qp;
	struct counters *counters = &fabric->ports[qp->sq->port].counters;
	struct ring *ring = &d->send;
	uint16_t n = doorbell(ring) - ring->seen;

	if (ring->refused)
		n = 0;
	if (n > ring->size) { /* entries were overwritten before the device had them */
		counters->malformed++;
		n = 0;
	}
	if (fabric->set.mapped) { /* it fetches when it comes to it, and some of them */
		d->dice = d->dice * 1664525 + 1013904223;
		n = (d->dice >> 8) % (n + 1u);
	}
	if (n > qp->sq->nspare)
		n = qp->sq->nspare; /* fetched later */
	qp->nbatch = 0;
	while (n--) {
		const uint8_t *e = ring->buffer + (size_t)(ring->seen % ring->size) * ring->entry;

		if ((e[3] & 1) != (ring->seen / ring->size & 1) ||
		    !decode(qp, e, &qp->batch[qp->nbatch])) {
			counters->malformed++;
			engine_note("malformed qpn=%u at=%u\n", qp->ex.qp_base.qp_num, ring->seen);
		} else {
			qp->nbatch++;
		}
		ring->seen++;
	}
	if (!qp->nbatch)
		return;
	note_batch(qp);
	sq_doorbell(qp->sq, qp->batch, qp->nbatch);
	qp->nbatch = 0;
}

static void take_receives(struct direct *d)
{
	struct counters *counters = &fabric->ports[d->qp->sq->port].counters;
	struct ring *ring = &d->receive;
	uint16_t n = doorbell(ring) - ring->seen;

	for (; n; n--, ring->seen++) {
		const uint8_t *e = ring->buffer + (size_t)(ring->seen % ring->size) * 16;
		struct recv_entry entry = {.wr_id = number(e + 8, 2), .addr = number(e, 8),
					   .len = number(e + 10, 2), .lkey = number(e + 12, 3)};

		if (e[15] != 0xc0 || !rq_push(d->qp->index, &entry))
			counters->malformed++;
		else
			counters->recvs++;
	}
}

/* --- completions */

/* Store an entry, the byte with its phase last. With mapped=1 the rest is rubbish for a while, so that
 * a program that looks before the phase has changed finds no entry. */
static void store(uint8_t *to, const uint8_t *entry, uint32_t bytes)
{
	if (fabric->set.mapped) {
		memset(to, 0xee, 3);
		memset(to + 4, 0xee, bytes - 4);
		atomic_thread_fence(memory_order_release);
		sched_yield();
	}
	memcpy(to + 4, entry + 4, bytes - 4);
	memcpy(to, entry, 3);
	atomic_thread_fence(memory_order_release);
	*(volatile uint8_t *)(to + 3) = entry[3];
}

static void give_completions(struct direct *d)
{
	struct ring *ring = &d->done;
	uint32_t rung = doorbell(ring);
	uint64_t written = 0;
	struct wc wc;

	while (written < ring->size && cq_pop(d->cq->index, &wc)) {
		uint8_t e[32] = {0};
		bool write = wc.opcode == IBV_WC_RDMA_WRITE || wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
		uint32_t op = write ? 2 : wc.opcode == IBV_WC_RDMA_READ;
		uint8_t flags = (~(ring->seen / ring->size) & 1) | (wc.is_recv ? 2 : 1) << 1 | op << 4 |
				wc.unsolicited << 7;
		uint16_t id = wc.wr_id, qpn = wc.qpn, length = wc.len, ah = wc.src_port;
		uint16_t src = wc.src_qpn, high = wc.len >> 16;
		uint32_t imm = ntohl(wc.imm);
		int32_t index = qp_find(d->cq->port, wc.qpn);

		if (index < 0 || fabric->qps[index].gen != wc.qp_gen)
			continue; /* of a queue pair that is closed */
		memcpy(e, &id, 2);
		e[2] = wc.status;
		memcpy(e + 4, &qpn, 2);
		if (wc.is_recv) {
			flags |= wc.flags & IBV_WC_WITH_IMM ? 8 : 0;
			memcpy(e + 6, &length, 2);
			if (!fabric->pds[fabric->qps[index].pd].ahs[ah])
				ah = 0xffff;
			memcpy(e + 8, &ah, 2);
			memcpy(e + 10, &src, 2);
			memcpy(e + 12, &imm, 4);
			if (ring->entry > 16)
				memcpy(e + 16, &high, 2);
		}
		e[3] = flags;
		store(ring->buffer + (size_t)(ring->seen % ring->size) * ring->entry, e, ring->entry);
		ring->seen++;
		written++;
	}
	if (rung != ring->rung) {
		ring->rung = rung;
		ring->armed = rung >> 31;
	}
	if (ring->armed && (uint16_t)rung != (uint16_t)ring->seen) {
		ring->armed = false;
		fabric->cqs[d->cq->index].armed = 1;
		cq_notify(d->cq->index);
	}
}

/* Called with the engine's lock, before and after the device moves. */
void direct_turn(void)
{
	for (struct direct *d = all; d; d = d->next) {
		if (d->qp && d->qp->ex.qp_base.state != IBV_QPS_ERR) {
			take_receives(d);
			take_sends(d);
		}
	}
	for (struct direct *d = all; d; d = d->next)
		if (d->cq)
			give_completions(d);
}

/* For programs that measure: a device that is held moves in fake_efa_run() only, so that no call of
 * theirs pays for its work. */
void fake_efa_hold(uint32_t hold) { engine_hold(hold); }

/* For programs that measure (held) or replay (thread=0): let the device do all it can now. */
void fake_efa_run(uint32_t turns)
{
	engine_lock();
	while (turns--)
		engine_turn();
	engine_unlock();
}
