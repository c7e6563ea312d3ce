/* libibverbs.so.1 as libfabric's EFA provider sees it: the front of the device in engine.c.
 *
 * Only the 25 functions that the provider imports are here, and those for asynchronous events. The
 * data path is not among them: it goes through the tables of functions in struct ibv_qp_ex and
 * struct ibv_cq_ex, which the caller's inline functions call. What they answer to wrong arguments
 * follows rdma-core's providers/efa/verbs.c; where that is the kernel's business, drivers/infiniband.
 */
#define _GNU_SOURCE
#include "engine.h"
#include "front.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#undef ibv_query_port

static struct ibv_device devices[NICS_MAX];
static struct context *contexts;
static struct vqp *vqps[QPS_MAX]; /* of this process */
static struct vcq *vcqs[CQS_MAX];

static struct context *ctx_of(struct ibv_context *c) { return (struct context *)c; }
static struct counters *counters(struct ibv_context *c)
{
	return &fabric->ports[ctx_of(c)->port].counters;
}

static void set_gid(uint32_t port, union ibv_gid *gid)
{
	static const uint8_t head[] = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x0a, 't', 'e', 'p'};

	memset(gid, 0, sizeof *gid);
	memcpy(gid->raw, head, sizeof head);
	gid->raw[14] = port / NICS_MAX;
	gid->raw[15] = port % NICS_MAX + 1;
}

static uint32_t port_of(const union ibv_gid *gid)
{
	union ibv_gid same;
	uint32_t port = gid->raw[14] * NICS_MAX + gid->raw[15] - 1u;

	if (!gid->raw[15] || port >= PORTS_MAX || (int)(port % NICS_MAX) >= fabric->set.nics)
		return UINT32_MAX;
	set_gid(port, &same);
	return memcmp(&same, gid, sizeof same) ? UINT32_MAX : port;
}

/* --- devices */

static void tell_gone(uint32_t port)
{
	uint32_t event = IBV_EVENT_DEVICE_FATAL;

	for (struct context *c = contexts; c; c = c->next)
		if (c->port == port && write(c->event_pipe, &event, sizeof event) < 0)
			engine_note("gone port=%u untold\n", port);
}

/* In the child of a fork: what the parent opened stays the parent's. */
static void forget_all(void)
{
	memset(vqps, 0, sizeof vqps);
	memset(vcqs, 0, sizeof vcqs);
	direct_forget();
}

struct ibv_device **ibv_get_device_list(int *n)
{
	struct ibv_device **list;

	errno = engine_attach();
	if (errno)
		return NULL;
	engine_gone = tell_gone;
	engine_forked = forget_all;
	list = calloc(fabric->set.nics + 1, sizeof *list);
	for (int i = 0; i < fabric->set.nics; i++) {
		struct ibv_device *dev = &devices[i];

		dev->node_type = IBV_NODE_UNSPECIFIED;
		dev->transport_type = IBV_TRANSPORT_UNSPECIFIED;
		snprintf(dev->name, sizeof dev->name, "rdmap%ds0", 79 + i);
		snprintf(dev->dev_name, sizeof dev->dev_name, "uverbs%d", i);
		snprintf(dev->ibdev_path, sizeof dev->ibdev_path, "%s/sys/class/infiniband/rdmap%ds0",
			 run_folder, 79 + i);
		snprintf(dev->dev_path, sizeof dev->dev_path, "%s/sys/class/infiniband_verbs/uverbs%d",
			 run_folder, i);
		list[i] = dev;
	}
	if (n)
		*n = fabric->set.nics;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

static int post_recv(struct ibv_qp *, struct ibv_recv_wr *, struct ibv_recv_wr **);
static int req_notify(struct ibv_cq *, int);

struct ibv_context *ibv_open_device(struct ibv_device *dev)
{
	struct context *c = calloc(1, sizeof *c);
	int ends[2];

	if (pipe2(ends, O_CLOEXEC)) {
		free(c);
		return NULL;
	}
	c->port = engine_host() * NICS_MAX + (dev - devices);
	c->ibv.device = dev;
	c->ibv.num_comp_vectors = 1;
	c->ibv.cmd_fd = -1;
	c->ibv.async_fd = ends[0];
	c->event_pipe = ends[1];
	c->ibv.ops.post_recv = post_recv;
	c->ibv.ops.req_notify_cq = req_notify;
	engine_lock();
	c->next = contexts;
	contexts = c;
	engine_unlock();
	return &c->ibv;
}

int ibv_close_device(struct ibv_context *ctx)
{
	struct context **at = &contexts, *c = ctx_of(ctx);

	engine_lock();
	while (*at != c)
		at = &(*at)->next;
	*at = c->next;
	engine_unlock();
	close(c->ibv.async_fd);
	close(c->event_pipe);
	free(c);
	return 0;
}

int ibv_get_async_event(struct ibv_context *ctx, struct ibv_async_event *event)
{
	uint32_t type;

	if (read(ctx->async_fd, &type, sizeof type) != sizeof type)
		return -1;
	memset(event, 0, sizeof *event);
	event->event_type = type;
	return 0;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	(void)event;
}

int ibv_query_device(struct ibv_context *ctx, struct ibv_device_attr *attr)
{
	const struct settings *set = &fabric->set;

	(void)ctx;
	memset(attr, 0, sizeof *attr);
	strcpy(attr->fw_ver, "0.0.0.fake");
	attr->vendor_id = 0x1d0f; /* Amazon */
	attr->vendor_part_id = set->part;
	attr->max_mr_size = 1ull << 40;
	attr->page_size_cap = ~0xfffull;
	attr->max_qp = set->max_qp;
	attr->max_cq = set->max_cq;
	attr->max_cqe = set->cqe;
	attr->max_mr = set->max_mr;
	attr->max_pd = PDS_MAX;
	attr->max_ah = set->max_ah;
	attr->max_qp_wr = set->sq;
	attr->max_sge = set->send_sge;
	attr->phys_port_cnt = 1;
	return 0;
}

int ibv_query_port(struct ibv_context *ctx, uint8_t port, struct _compat_ibv_port_attr *compat)
{
	struct ibv_port_attr *attr = (void *)compat; /* the same up to link_layer, then shorter */

	if (port != 1)
		return EINVAL;
	attr->state = fabric->ports[ctx_of(ctx)->port].gone ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
	attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
	attr->gid_tbl_len = 1;
	attr->max_msg_sz = fabric->set.mtu;
	attr->active_width = 2; /* four lanes */
	attr->active_speed = fabric->set.gbps >= 200 ? 64 : 32;
	attr->phys_state = 5; /* link up */
	attr->link_layer = IBV_LINK_LAYER_UNSPECIFIED;
	return 0;
}

int ibv_query_gid(struct ibv_context *ctx, uint8_t port, int index, union ibv_gid *gid)
{
	if (port != 1 || index) {
		errno = EINVAL;
		return -1;
	}
	set_gid(ctx_of(ctx)->port, gid);
	return 0;
}

int fake_efa_query_device(struct ibv_context *ctx, struct efa_device_attr *attr, uint32_t inlen)
{
	struct efa_device_attr full = {
		.max_sq_wr = fabric->set.sq,
		.max_rq_wr = fabric->set.rq,
		.max_sq_sge = fabric->set.send_sge,
		.max_rq_sge = 1,
		.inline_buf_size = fabric->set.inline_bytes,
		.device_caps = fabric->set.caps,
		.max_rdma_size = fabric->set.max_rdma,
	};

	(void)ctx;
	memset(attr, 0, inlen);
	memcpy(attr, &full, inlen < sizeof full ? inlen : sizeof full);
	return 0;
}

/* --- protection domains, memory, address handles */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *ctx)
{
	struct vpd *pd = NULL;

	errno = engine_attach(); /* in the child of a fork, for the first time */
	if (errno)
		return NULL;
	fabric_lock();
	reap();
	for (uint32_t i = 0; i < PDS_MAX && !pd; i++)
		if (!fabric->pds[i].live) {
			fabric->pds[i].proc = engine_proc();
			fabric->pds[i].port = ctx_of(ctx)->port;
			memset((void *)fabric->pds[i].ahs, 0, sizeof fabric->pds[i].ahs);
			fabric->pds[i].live = 1;
			pd = calloc(1, sizeof *pd);
			pd->ibv.context = ctx;
			pd->index = i;
		}
	fabric_unlock();
	if (!pd)
		errno = ENOMEM;
	return pd ? &pd->ibv : NULL;
}

int ibv_dealloc_pd(struct ibv_pd *ibv)
{
	struct vpd *pd = (struct vpd *)ibv;
	int busy = 0;

	fabric_lock();
	for (uint32_t i = 0; i < fabric->next_mr; i++)
		busy |= fabric->mrs[i].live && fabric->mrs[i].pd == pd->index;
	for (uint32_t i = 0; i < QPS_MAX; i++)
		busy |= fabric->qps[i].gen && fabric->qps[i].state != QP_FREE &&
			fabric->qps[i].pd == pd->index;
	if (!busy)
		pd_free(pd->index);
	fabric_unlock();
	if (busy)
		return EBUSY;
	free(pd);
	return 0;
}

/* As pinning pages does: they must be there, and writable if the device is to write. */
static int can_pin(uint64_t addr, uint64_t len, bool write)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	unsigned long from, to;
	char line[512], perm[5];

	while (maps && len && fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx %4s", &from, &to, perm) != 3 || to <= addr)
			continue;
		if (from > addr || (write && perm[1] != 'w') || perm[0] != 'r')
			break;
		if (to - addr >= len)
			len = 0;
		else {
			len -= to - addr;
			addr = to;
		}
	}
	if (maps)
		fclose(maps);
	return len ? EFAULT : 0;
}

static struct ibv_mr *new_mr(struct vpd *pd, uint64_t addr, uint64_t len, uint64_t iova,
			     unsigned access, void *mapped, uint64_t mapped_bytes)
{
	struct port *port = &fabric->ports[ctx_of(pd->ibv.context)->port];
	struct vmr *vmr = NULL;

	fabric_lock();
	reap();
	if (port->mrs < fabric->set.max_mr &&
	    (!fabric->set.max_mr_bytes || port->mr_bytes + len <= (uint64_t)fabric->set.max_mr_bytes))
		for (uint32_t n = 0; n < MRS_MAX && !vmr; n++) {
			/* An index comes round late, and with another key, so that old keys find nothing. */
			uint32_t i = fabric->mr_cursor++ % MRS_MAX;
			struct mr *mr = &fabric->mrs[i];
			uint32_t key = (mr->lkey & ~KEY_INDEX & 0xfffff) + 0x10000;

			if (mr->live)
				continue;
			key = (key & KEY_TURN) | i;
			*mr = (struct mr){.proc = engine_proc(), .port = ctx_of(pd->ibv.context)->port,
					  .pd = pd->index, .lkey = key | KEY_LOCAL,
					  .rkey = key | KEY_REMOTE, .access = access, .addr = addr,
					  .iova = iova, .length = len};
			mr->live = 1;
			if (i >= fabric->next_mr)
				fabric->next_mr = i + 1;
			port->mrs++;
			port->mr_bytes += len;
			vmr = calloc(1, sizeof *vmr);
			vmr->ibv.context = pd->ibv.context;
			vmr->ibv.pd = &pd->ibv;
			vmr->ibv.addr = (void *)iova;
			vmr->ibv.length = len;
			vmr->ibv.lkey = mr->lkey;
			vmr->ibv.rkey = mr->rkey;
			vmr->mapped = mapped;
			vmr->mapped_bytes = mapped_bytes;
		}
	fabric_unlock();
	if (!vmr) {
		errno = ENOMEM;
		return NULL;
	}
	counters(pd->ibv.context)->mrs++;
	counters(pd->ibv.context)->mr_bytes += len;
	engine_note("reg port=%u lkey=%u rkey=%u addr=%lu len=%lu iova=%lu access=%u\n",
		    ctx_of(pd->ibv.context)->port, vmr->ibv.lkey, vmr->ibv.rkey, addr, len, iova, access);
	return &vmr->ibv;
}

static int check_access(size_t len, unsigned access)
{
	unsigned known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

	if (!len)
		return EINVAL;
	if (access & ~known & ~IBV_ACCESS_OPTIONAL_RANGE) /* efa_verbs.c: EFA_SUPPORTED_ACCESS_FLAGS */
		return EOPNOTSUPP;
	if (access & IBV_ACCESS_REMOTE_WRITE && !(access & IBV_ACCESS_LOCAL_WRITE))
		return EINVAL; /* ib_verbs.h, ib_check_mr_access */
	return 0;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova,
				unsigned access)
{
	int err = check_access(len, access);

	if (!err)
		err = can_pin((uint64_t)addr, len, access & (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	if (err) {
		counters(pd->context)->mr_refused++;
		engine_note("refused addr=%lu len=%zu access=%u errno=%d\n", (uint64_t)addr, len, access, err);
		errno = err;
		return NULL;
	}
	return new_mr((struct vpd *)pd, (uint64_t)addr, len, iova, access, NULL, 0);
}

/* The device reaches [offset, offset + len) of what the file descriptor stands for, and names its
 * first byte `iova`. A memfd stands for the device memory here: it is mapped, and copied to and
 * from like other memory. Source: ibv_reg_dmabuf_mr(3). */
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len, uint64_t iova,
				 int fd, int access)
{
	uint64_t start = offset & ~4095ull, bytes = offset + len - start;
	int err = check_access(len, access);
	struct ibv_mr *mr;
	struct stat stat;
	char *at;

	if (!err && fstat(fd, &stat))
		err = errno;
	if (!err && offset + len > (uint64_t)stat.st_size)
		err = EINVAL; /* beyond the buffer */
	if (err) {
		counters(pd->context)->mr_refused++;
		errno = err;
		return NULL;
	}
	at = mmap(NULL, bytes, access & IBV_ACCESS_LOCAL_WRITE ? PROT_READ | PROT_WRITE : PROT_READ,
		  MAP_SHARED, fd, start);
	if (at == MAP_FAILED)
		return NULL;
	engine_note("dmabuf offset=%lu len=%zu iova=%lu fd=%d\n", offset, len, iova, fd);
	mr = new_mr((struct vpd *)pd, (uint64_t)at + (offset - start), len, iova, access, at, bytes);
	if (mr)
		counters(pd->context)->dmabufs++;
	else
		munmap(at, bytes);
	return mr;
}

int ibv_dereg_mr(struct ibv_mr *ibv)
{
	struct vmr *vmr = (struct vmr *)ibv;
	uint32_t index = ibv->lkey & KEY_INDEX;

	if (fabric->mrs[index].lkey != ibv->lkey || fabric->mrs[index].proc != engine_proc())
		return EINVAL;
	engine_lock(); /* this process's own device stands still meanwhile */
	fabric->mrs[index].live = 2;
	wait_for_hazards(0, index + 1);
	fabric_lock();
	mr_free(index);
	fabric_unlock();
	engine_unlock();
	engine_note("dereg lkey=%u\n", ibv->lkey);
	if (vmr->mapped)
		munmap(vmr->mapped, vmr->mapped_bytes);
	free(vmr);
	return 0;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct port *port = &fabric->ports[ctx_of(pd->context)->port];
	struct vah *ah;

	if (port->ahs >= fabric->set.max_ah) {
		errno = ENOMEM;
		return NULL;
	}
	ah = calloc(1, sizeof *ah);
	ah->ibv.context = pd->context;
	ah->ibv.pd = pd;
	ah->dport = port_of(&attr->grh.dgid); /* any GID will do; nobody may be there */
	if (ah->dport != UINT32_MAX) {
		fabric->pds[((struct vpd *)pd)->index].ahs[ah->dport]++;
		port->ahs++;
	}
	counters(pd->context)->ahs++;
	engine_note("ah port=%u to=%d\n", ctx_of(pd->context)->port, (int)ah->dport);
	return &ah->ibv;
}

int ibv_destroy_ah(struct ibv_ah *ibv)
{
	struct vah *ah = (struct vah *)ibv;

	if (ah->dport != UINT32_MAX) {
		fabric->pds[((struct vpd *)ibv->pd)->index].ahs[ah->dport]--;
		fabric->ports[ctx_of(ibv->context)->port].ahs--;
	}
	free(ah);
	return 0;
}

/* The number of a handle: the same for all handles of a protection domain to one NIC. Guessed. */
static uint16_t ah_number(uint32_t dport)
{
	return dport == UINT32_MAX ? 0xfffe : dport;
}

int fake_efa_query_ah(struct ibv_ah *ibv, struct efa_ah_attr *attr, uint32_t inlen)
{
	memset(attr, 0, inlen);
	attr->ahn = ah_number(((struct vah *)ibv)->dport);
	return 0;
}

/* --- completion queues */

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *ctx)
{
	static _Atomic uint32_t numbers;
	struct channel *channel = calloc(1, sizeof *channel);
	char path[300];

	channel->number = ++numbers;
	snprintf(path, sizeof path, "%s/chan.%d.%u", run_folder, getpid(), channel->number);
	unlink(path);
	if (mkfifo(path, 0600) || (channel->ibv.fd = open(path, O_RDWR | O_CLOEXEC)) < 0) {
		free(channel);
		return NULL;
	}
	channel->ibv.context = ctx;
	return &channel->ibv;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
	struct channel *channel = (struct channel *)ibv;
	char path[300];

	snprintf(path, sizeof path, "%s/chan.%d.%u", run_folder, getpid(), channel->number);
	unlink(path);
	close(ibv->fd);
	free(channel);
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	uint32_t index;

	do {
		if (read(channel->fd, &index, sizeof index) != sizeof index)
			return -1;
	} while (index >= CQS_MAX || !vcqs[index]); /* of one that is closed */
	*cq = (struct ibv_cq *)vcqs[index];
	*cq_context = (*cq)->cq_context;
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n)
{
	(void)cq;
	(void)n;
}

static int req_notify(struct ibv_cq *cq, int solicited_only)
{
	(void)solicited_only;
	fabric->cqs[((struct vcq *)cq)->index].armed = 1;
	return 0;
}

/* The next completion. Those of queue pairs that are closed are passed over, as rdma-core's
 * efa_poll_sub_cq passes over what its table of queue pairs does not know. */
static int next_poll(struct ibv_cq_ex *ex)
{
	struct vcq *cq = (struct vcq *)ex;

	while (vcqs[cq->index] == cq && cq_pop(cq->index, &cq->wc)) {
		int32_t index = qp_find(cq->port, cq->wc.qpn);
		struct vqp *qp = index < 0 ? NULL : vqps[index];

		if (!qp || fabric->qps[index].gen != cq->wc.qp_gen)
			continue;
		/* A place in a queue is free again once its completion was read. */
		if (!cq->wc.is_recv)
			qp->sq_used--;
		else if (!cq->wc.unsolicited)
			qp->rq_used--;
		ex->wr_id = cq->wc.wr_id;
		ex->status = to_ibv_status(cq->wc.status);
		return 0;
	}
	return ENOENT;
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
	if (attr && attr->comp_mask)
		return EINVAL;
	engine_lock();
	engine_move();
	engine_unlock();
	return next_poll(ex);
}

static void end_poll(struct ibv_cq_ex *ex) { (void)ex; }

#define WC(ex) (((struct vcq *)(ex))->wc)
static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *ex) { return WC(ex).opcode; }
static uint32_t read_vendor_err(struct ibv_cq_ex *ex) { return WC(ex).status; }
static uint32_t read_byte_len(struct ibv_cq_ex *ex) { return WC(ex).is_recv ? WC(ex).len : 0; }
static __be32 read_imm(struct ibv_cq_ex *ex) { return WC(ex).imm; }
static uint32_t read_qp_num(struct ibv_cq_ex *ex) { return WC(ex).qpn; }
static uint32_t read_src_qp(struct ibv_cq_ex *ex) { return WC(ex).src_qpn; }
static unsigned read_flags(struct ibv_cq_ex *ex) { return WC(ex).flags; }
static uint8_t read_zero(struct ibv_cq_ex *ex) { (void)ex; return 0; }

/* The number of the address handle to the sender, 0xffff if there is none: then the reader asks for
 * the sender's GID. Source: efa_rdm_cq.c of libfabric, rdma-core's efa_wc_read_sgid. */
static uint32_t read_slid(struct ibv_cq_ex *ex)
{
	struct vcq *cq = (struct vcq *)ex;
	int32_t index = qp_find(cq->port, cq->wc.qpn);

	if (index < 0 || !fabric->pds[fabric->qps[index].pd].ahs[cq->wc.src_port])
		return 0xffff;
	return ah_number(cq->wc.src_port);
}

static int read_sgid(struct efa_cq *dv, union ibv_gid *gid)
{
	struct vcq *cq = (struct vcq *)((char *)dv - offsetof(struct vcq, dv));

	if (read_slid(&cq->ex) != 0xffff)
		return -ENOENT;
	set_gid(cq->wc.src_port, gid);
	return 0;
}

static bool is_unsolicited(struct efa_cq *dv)
{
	return ((struct vcq *)((char *)dv - offsetof(struct vcq, dv)))->wc.unsolicited;
}

struct ibv_cq_ex *fake_efa_create_cq(struct ibv_context *ctx, struct ibv_cq_init_attr_ex *attr,
				     struct efa_cq_init_attr *efa_attr, uint32_t inlen)
{
	struct port *port = &fabric->ports[ctx_of(ctx)->port];
	uint32_t size = 1, index = UINT32_MAX;
	struct vcq *vcq;
	struct cq *cq;

	(void)inlen;
	if (!attr->cqe || attr->cqe > fabric->set.cqe || efa_attr->comp_mask) {
		errno = EINVAL;
		return NULL;
	}
	while (size < attr->cqe) /* rdma-core's create_cq rounds up */
		size *= 2;
	if (size > CQE_MAX)
		size = CQE_MAX;
	fabric_lock();
	reap();
	if (port->cqs < fabric->set.max_cq)
		for (uint32_t i = 0; i < CQS_MAX && index == UINT32_MAX; i++)
			if (!fabric->cqs[i].live && !vcqs[i])
				index = i;
	if (index != UINT32_MAX) {
		cq = &fabric->cqs[index];
		cq->proc = engine_proc();
		cq->port = ctx_of(ctx)->port;
		cq->size = size;
		cq->depth = fabric->set.cq_depth && fabric->set.cq_depth < size ? fabric->set.cq_depth : size;
		cq->head = cq->tail = 0;
		cq->overruns = 0;
		cq->armed = 0;
		cq->channel = attr->channel ? ((struct channel *)attr->channel)->number : 0;
		cq->channel_pid = getpid();
		for (uint32_t i = 0; i < size; i++)
			fabric->cq_rings[index][i].word = (uint64_t)i << 24; /* free */
		cq->gen++;
		cq->live = 1;
		port->cqs++;
	}
	fabric_unlock();
	if (index == UINT32_MAX) {
		errno = ENOMEM;
		return NULL;
	}
	vcq = calloc(1, sizeof *vcq);
	vcq->index = index;
	vcq->port = ctx_of(ctx)->port;
	vcq->ex.context = ctx;
	vcq->ex.channel = attr->channel;
	vcq->ex.cq_context = attr->cq_context;
	vcq->ex.cqe = size;
	vcq->ex.start_poll = start_poll;
	vcq->ex.next_poll = next_poll;
	vcq->ex.end_poll = end_poll;
	vcq->ex.read_opcode = read_opcode;
	vcq->ex.read_vendor_err = read_vendor_err;
	vcq->ex.read_byte_len = read_byte_len;
	vcq->ex.read_imm_data = read_imm;
	vcq->ex.read_qp_num = read_qp_num;
	vcq->ex.read_src_qp = read_src_qp;
	vcq->ex.read_wc_flags = read_flags;
	vcq->ex.read_slid = read_slid;
	vcq->ex.read_sl = read_zero;
	vcq->ex.read_dlid_path_bits = read_zero;
	if (efa_attr->wc_flags & 1) /* EFADV_WC_EX_WITH_SGID */
		vcq->dv.wc_read_sgid = read_sgid;
	if (efa_attr->wc_flags & 2) /* EFADV_WC_EX_WITH_IS_UNSOLICITED */
		vcq->dv.wc_is_unsolicited = is_unsolicited;
	vcqs[index] = vcq;
	counters(ctx)->cqs++;
	engine_note("cq port=%u index=%u size=%u channel=%d\n", vcq->port, index, size, !!attr->channel);
	return &vcq->ex;
}

struct efa_cq *fake_efa_cq_from(struct ibv_cq_ex *ex)
{
	return &((struct vcq *)ex)->dv;
}

int ibv_destroy_cq(struct ibv_cq *ibv)
{
	struct vcq *cq = (struct vcq *)ibv;

	if (vcqs[cq->index] != cq)
		return EINVAL;
	for (uint32_t i = 0; i < QPS_MAX; i++)
		if (vqps[i] && (vqps[i]->ex.qp_base.send_cq == ibv || vqps[i]->ex.qp_base.recv_cq == ibv))
			return EBUSY;
	if (fabric->cqs[cq->index].overruns)
		fprintf(stderr, "fake EFA: a completion queue of %u on NIC %u lost %lu completions\n",
			fabric->cqs[cq->index].depth, cq->port % NICS_MAX,
			(unsigned long)fabric->cqs[cq->index].overruns);
	engine_lock();
	direct_drop(NULL, cq);
	engine_unlock();
	vcqs[cq->index] = NULL;
	fabric_lock();
	cq_free(cq->index);
	fabric_unlock();
	free(cq);
	return 0;
}

/* --- queue pairs */

#define VQP(ex) ((struct vqp *)(ex))

/* wr_start ... wr_complete: requests are gathered, then handed over by one doorbell. The lock is
 * held in between, as the real library holds its own. An error drops the whole session. */
static void wr_start(struct ibv_qp_ex *ex)
{
	pthread_mutex_lock(&VQP(ex)->post_lock);
	mapped_fence(); /* mmio_wc_start of rdma-core */
	VQP(ex)->session_err = 0;
	VQP(ex)->nbatch = 0;
}

static struct op *wr_new(struct ibv_qp_ex *ex, enum op_kind kind)
{
	struct vqp *qp = VQP(ex);
	struct op *op;

	if (ex->qp_base.state != IBV_QPS_RTS)
		qp->session_err = EINVAL;
	else if (qp->sq_used + qp->nbatch >= qp->sq->cap)
		qp->session_err = ENOMEM;
	if (qp->session_err)
		return &qp->scrap;
	op = &qp->batch[qp->nbatch++];
	memset(op, 0, offsetof(struct op, inline_data));
	memset(&op->phase, 0, sizeof *op - offsetof(struct op, phase));
	op->kind = kind;
	op->wr_id = ex->wr_id;
	return op;
}

static struct op *wr_now(struct ibv_qp_ex *ex)
{
	struct vqp *qp = VQP(ex);

	return qp->session_err || !qp->nbatch ? &qp->scrap : &qp->batch[qp->nbatch - 1];
}

static void wr_send(struct ibv_qp_ex *ex)
{
	wr_new(ex, OP_SEND);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm)
{
	struct op *op = wr_new(ex, OP_SEND);

	op->has_imm = true;
	op->imm = imm;
}

static void wr_rdma(struct ibv_qp_ex *ex, enum op_kind kind, uint32_t rkey, uint64_t addr, __be32 imm)
{
	struct op *op = wr_new(ex, kind);

	op->rkey = rkey;
	op->raddr = addr;
	op->has_imm = kind == OP_WRITE_IMM;
	op->imm = imm;
}

static void wr_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	wr_rdma(ex, OP_WRITE, rkey, addr, 0);
}

static void wr_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, __be32 imm)
{
	wr_rdma(ex, OP_WRITE_IMM, rkey, addr, imm);
}

static void wr_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	wr_rdma(ex, OP_READ, rkey, addr, 0);
}

static void set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	struct op *op = wr_now(ex);

	op->dport = ((struct vah *)ah)->dport;
	op->dqpn = qpn;
	op->qkey = qkey;
}

static void set_sge_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_sge *list)
{
	struct op *op = wr_now(ex);

	if (n > (size_t)(op->kind == OP_SEND ? fabric->set.send_sge : fabric->set.rdma_sge) || n > 2) {
		VQP(ex)->session_err = EINVAL;
		return;
	}
	op->nsge = n;
	memcpy(op->sge, list, n * sizeof *list);
}

static void set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t len)
{
	struct ibv_sge sge = {addr, len, lkey};

	set_sge_list(ex, 1, &sge);
}

static void set_inline_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_data_buf *list)
{
	struct op *op = wr_now(ex);
	uint64_t total = 0;

	for (size_t i = 0; i < n; i++)
		total += list[i].length;
	if (op->kind != OP_SEND || total > (uint64_t)fabric->set.inline_bytes ||
	    total > sizeof op->inline_data) {
		VQP(ex)->session_err = EINVAL;
		return;
	}
	op->is_inline = true;
	op->len = 0;
	for (size_t i = 0; i < n; i++) {
		memcpy(op->inline_data + op->len, list[i].addr, list[i].length);
		op->len += list[i].length;
	}
}

static void set_inline(struct ibv_qp_ex *ex, void *addr, size_t len)
{
	struct ibv_data_buf buf = {addr, len};

	set_inline_list(ex, 1, &buf);
}

void note_batch(struct vqp *qp)
{
	static const char *const names[] = {"send", "write", "write_imm", "read"};
	struct counters *count = counters(qp->ex.qp_base.context);
	uint64_t longest = count->batch_max;

	count->doorbells++;
	count->wqes += qp->nbatch;
	while (longest < qp->nbatch &&
	       !atomic_compare_exchange_weak(&count->batch_max, &longest, qp->nbatch))
		;
	for (uint32_t i = 0; i < qp->nbatch; i++) {
		const struct op *op = &qp->batch[i];
		uint64_t len = op->is_inline ? op->len : 0;

		for (int k = 0; k < op->nsge; k++)
			len += op->sge[k].length;
		switch (op->kind) {
		case OP_SEND:
			count->sends++;
			count->inline_sends += op->is_inline;
			break;
		case OP_WRITE:
			count->writes++;
			break;
		case OP_WRITE_IMM:
			count->write_imms++;
			break;
		case OP_READ:
			count->reads++;
		}
		if (fabric->set.log)
			engine_note("wr op=%s port=%u qpn=%u to=%d qpn_to=%u len=%lu nsge=%u lkey=%u rkey=%u "
				    "raddr=%lu imm=%u inline=%d at=%u of=%u\n", names[op->kind], qp->sq->port,
				    qp->ex.qp_base.qp_num, (int)op->dport, op->dqpn, len, op->nsge,
				    op->nsge ? op->sge[0].lkey : 0, op->rkey, op->raddr, op->imm,
				    op->is_inline, i, qp->nbatch);
	}
}

static int wr_complete(struct ibv_qp_ex *ex)
{
	struct vqp *qp = VQP(ex);
	int err = qp->session_err;

	if (!err && qp->nbatch) {
		note_batch(qp);
		engine_lock();
		err = sq_doorbell(qp->sq, qp->batch, qp->nbatch);
		engine_unlock();
		if (!err)
			qp->sq_used += qp->nbatch;
	}
	qp->nbatch = 0;
	pthread_mutex_unlock(&qp->post_lock);
	return err;
}

static void wr_abort(struct ibv_qp_ex *ex)
{
	VQP(ex)->nbatch = 0;
	pthread_mutex_unlock(&VQP(ex)->post_lock);
}

static uint32_t new_qpn(struct port *port)
{
	uint32_t first = fabric->set.fresh_qpn ? port->next_qpn : 0;

	for (uint32_t n = 0; n < QPN_MAX - 1; n++) {
		uint32_t qpn = 1 + (first + n) % (QPN_MAX - 1);

		if (!port->qp_of[qpn]) {
			port->next_qpn = qpn;
			return qpn;
		}
	}
	return 0;
}

static uint32_t new_qp(struct ibv_context *ctx, struct ibv_qp_init_attr_ex *attr, uint16_t flags)
{
	uint32_t number = ctx_of(ctx)->port, qpn;
	struct port *port = &fabric->ports[number];

	if (port->qps >= fabric->set.max_qp || !(qpn = new_qpn(port)))
		return UINT32_MAX;
	for (uint32_t i = 0; i < QPS_MAX; i++) {
		struct qp *qp = &fabric->qps[i];

		if ((qp->gen && qp->state != QP_FREE) || vqps[i])
			continue;
		qp->state = IBV_QPS_RESET;
		qp->gen++;
		qp->proc = engine_proc();
		qp->port = number;
		qp->qpn = qpn;
		qp->pd = ((struct vpd *)attr->pd)->index;
		qp->send_cq = ((struct vcq *)attr->send_cq)->index;
		qp->recv_cq = ((struct vcq *)attr->recv_cq)->index;
		qp->rq_size = attr->cap.max_recv_wr ? attr->cap.max_recv_wr : 1;
		qp->rq_head = qp->rq_tail = 0;
		qp->unsolicited = flags & 1; /* EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV */
		port->qp_of[qpn] = i + 1;
		port->qps++;
		return i;
	}
	return UINT32_MAX;
}

static void fill_qp(struct vqp *qp, struct ibv_context *ctx, struct ibv_qp_init_attr_ex *attr)
{
	struct ibv_qp_ex *ex = &qp->ex;
	uint64_t ops = attr->send_ops_flags;

	ex->qp_base.context = ctx;
	ex->qp_base.qp_context = attr->qp_context;
	ex->qp_base.pd = attr->pd;
	ex->qp_base.send_cq = attr->send_cq;
	ex->qp_base.recv_cq = attr->recv_cq;
	ex->qp_base.qp_type = attr->qp_type;
	ex->qp_base.state = IBV_QPS_RESET;
	ex->wr_start = wr_start;
	ex->wr_complete = wr_complete;
	ex->wr_abort = wr_abort;
	if (ops & IBV_QP_EX_WITH_SEND)
		ex->wr_send = wr_send;
	if (ops & IBV_QP_EX_WITH_SEND_WITH_IMM)
		ex->wr_send_imm = wr_send_imm;
	if (ops & IBV_QP_EX_WITH_RDMA_WRITE)
		ex->wr_rdma_write = wr_write;
	if (ops & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM)
		ex->wr_rdma_write_imm = wr_write_imm;
	if (ops & IBV_QP_EX_WITH_RDMA_READ)
		ex->wr_rdma_read = wr_read;
	ex->wr_set_ud_addr = set_ud_addr;
	ex->wr_set_sge = set_sge;
	ex->wr_set_sge_list = set_sge_list;
	ex->wr_set_inline_data = set_inline;
	ex->wr_set_inline_data_list = set_inline_list;
}

struct ibv_qp *fake_efa_create_qp(struct ibv_context *ctx, struct ibv_qp_init_attr_ex *attr,
				  struct efa_qp_init_attr *efa_attr, uint32_t inlen)
{
	const struct settings *set = &fabric->set;
	uint16_t flags = inlen > offsetof(struct efa_qp_init_attr, flags) + 1 ? efa_attr->flags : 0;
	uint32_t index;
	struct vqp *qp;

	if (attr->qp_type != IBV_QPT_DRIVER || efa_attr->driver_qp_type ||
	    attr->cap.max_send_wr > set->sq || attr->cap.max_recv_wr > set->rq ||
	    attr->cap.max_send_sge > set->send_sge || attr->cap.max_recv_sge > 1 ||
	    attr->cap.max_inline_data > set->inline_bytes || !attr->cap.max_send_wr) {
		errno = EINVAL;
		return NULL;
	}
	fabric_lock();
	reap();
	index = new_qp(ctx, attr, flags);
	fabric_unlock();
	if (index == UINT32_MAX) {
		errno = ENOMEM;
		return NULL;
	}
	qp = calloc(1, sizeof *qp);
	qp->index = index;
	qp->rq_cap = attr->cap.max_recv_wr;
	qp->batch = calloc(attr->cap.max_send_wr, sizeof *qp->batch);
	pthread_mutex_init(&qp->post_lock, NULL);
	fill_qp(qp, ctx, attr);
	qp->ex.qp_base.qp_num = fabric->qps[index].qpn;
	engine_lock();
	qp->sq = sq_open(index, ctx_of(ctx)->port, attr->cap.max_send_wr);
	vqps[index] = qp;
	engine_unlock();
	counters(ctx)->qps++;
	engine_note("qp port=%u qpn=%u sq=%u rq=%u unsolicited=%d\n", ctx_of(ctx)->port,
		    qp->ex.qp_base.qp_num, attr->cap.max_send_wr, qp->rq_cap, flags & 1);
	return &qp->ex.qp_base;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	return (struct ibv_qp_ex *)qp;
}

int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
	struct vqp *vqp = (struct vqp *)ibv;
	struct qp *qp = &fabric->qps[vqp->index];
	bool forward = attr->qp_state == ibv->state + 1 && attr->qp_state <= IBV_QPS_RTS;

	if (fabric->ports[qp->port].gone)
		return EIO;
	if (mask & IBV_QP_STATE && !forward && attr->qp_state != IBV_QPS_ERR &&
	    attr->qp_state != IBV_QPS_RESET)
		return EINVAL;
	if (mask & IBV_QP_QKEY)
		qp->qkey = attr->qkey;
	if (mask & IBV_QP_RNR_RETRY)
		vqp->sq->rnr_retry = attr->rnr_retry;
	if (mask & IBV_QP_STATE) {
		ibv->state = attr->qp_state;
		qp->state = attr->qp_state;
	}
	engine_note("modify port=%u qpn=%u state=%d mask=%d rnr_retry=%u\n", qp->port, qp->qpn,
		    ibv->state, mask, vqp->sq->rnr_retry);
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *ibv)
{
	struct vqp *qp = (struct vqp *)ibv;

	if (vqps[qp->index] != qp)
		return EINVAL; /* another process's: this one was forked off it */
	engine_lock();
	fabric->qps[qp->index].state = IBV_QPS_ERR;
	wait_for_hazards(qp->index + 1, 0);
	direct_drop(qp, NULL);
	sq_close(qp->sq);
	vqps[qp->index] = NULL;
	fabric_lock();
	qp_free(qp->index);
	fabric_unlock();
	engine_unlock();
	engine_note("destroy qpn=%u\n", ibv->qp_num);
	pthread_mutex_destroy(&qp->post_lock);
	free(qp->batch);
	free(qp);
	return 0;
}

static int post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct vqp *qp = (struct vqp *)ibv;
	int err = 0;

	engine_lock();
	for (; wr && !err; wr = wr->next) {
		struct recv_entry entry = {.wr_id = wr->wr_id};

		if (wr->num_sge > 1 || ibv->state == IBV_QPS_RESET || ibv->state == IBV_QPS_ERR)
			err = EINVAL;
		else if (qp->rq_used >= qp->rq_cap)
			err = ENOMEM;
		else {
			if (wr->num_sge) {
				entry.addr = wr->sg_list[0].addr;
				entry.len = wr->sg_list[0].length;
				entry.lkey = wr->sg_list[0].lkey;
			}
			rq_push(qp->index, &entry);
			qp->rq_used++;
			counters(ibv->context)->recvs++;
		}
		if (err)
			*bad = wr;
	}
	engine_unlock();
	return err;
}

int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	(void)qp;
	(void)op;
	(void)flags;
	return 0; /* nothing is in order */
}

/* --- forks: pages are never pinned here, so there is nothing to prepare */

int ibv_fork_init(void) { return 0; }
enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }
