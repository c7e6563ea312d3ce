/* A program on the fake device's verbs, driven by lines on its standard input: for tests of the
 * device itself (tests/efa/test_device.py). Each line is a command; each answer is one line, "ok ..."
 * or "error ERRNO". Numbers only, in decimal; an "end" is a queue pair with its own queue, PD and NIC. */
#define _GNU_SOURCE
#include "front.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* libefa's, as efadv.h declares them */
struct ibv_cq_ex *efadv_create_cq(struct ibv_context *, struct ibv_cq_init_attr_ex *,
				  struct efa_cq_init_attr *, uint32_t);
struct ibv_qp *efadv_create_qp_ex(struct ibv_context *, struct ibv_qp_init_attr_ex *,
				  struct efa_qp_init_attr *, uint32_t);
void fake_efa_hold(uint32_t hold);
void fake_efa_run(uint32_t turns);

static struct end {
	struct ibv_context *ctx;
	struct ibv_comp_channel *channel;
	struct ibv_pd *pd;
	struct ibv_cq_ex *cq;
	struct ibv_qp *qp;
} ends[64];
static struct ibv_mr *mrs[65536];
static struct ibv_ah *ahs[4096];
static int nends, nmrs, nahs;
static long long a[16]; /* the command's arguments */
static uint64_t next_id = 1;

static void failed(int err) { printf("error %d\n", err); }

static void open_end(int nic, int cqe, int sq, int rq, int rnr_retry, int qkey, int unsolicited)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct end *end = &ends[nends];
	struct ibv_cq_init_attr_ex cq = {.cqe = cqe};
	struct efa_cq_init_attr efa_cq = {.wc_flags = 1};
	struct efa_qp_init_attr efa_qp = {.flags = unsolicited};
	struct ibv_qp_init_attr_ex init = {
		.cap = {.max_send_wr = sq, .max_recv_wr = rq, .max_send_sge = 2, .max_recv_sge = 1},
		.qp_type = IBV_QPT_DRIVER,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
				  IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
				  IBV_QP_EX_WITH_RDMA_READ,
	};
	struct ibv_qp_attr attr = {.port_num = 1, .qkey = qkey, .rnr_retry = rnr_retry};
	union ibv_gid gid;

	end->ctx = ibv_open_device(list[nic]);
	ibv_free_device_list(list);
	end->channel = ibv_create_comp_channel(end->ctx);
	cq.channel = end->channel;
	end->pd = ibv_alloc_pd(end->ctx);
	end->cq = efadv_create_cq(end->ctx, &cq, &efa_cq, sizeof efa_cq);
	if (!end->cq)
		return failed(errno);
	init.pd = end->pd;
	init.send_cq = init.recv_cq = (struct ibv_cq *)end->cq;
	end->qp = efadv_create_qp_ex(end->ctx, &init, &efa_qp, sizeof efa_qp);
	if (!end->qp)
		return failed(errno);
	attr.qp_state = IBV_QPS_INIT;
	ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
	attr.qp_state = IBV_QPS_RTR;
	ibv_modify_qp(end->qp, &attr, IBV_QP_STATE);
	attr.qp_state = IBV_QPS_RTS;
	ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_RNR_RETRY);
	ibv_query_gid(end->ctx, 1, 0, &gid);
	printf("ok %d %u %d %d\n", nends++, end->qp->qp_num, gid.raw[14], gid.raw[15]);
}

static void close_end(struct end *end)
{
	int errs = ibv_destroy_qp(end->qp) + ibv_destroy_cq((struct ibv_cq *)end->cq) +
		   ibv_destroy_comp_channel(end->channel);

	printf("ok %d %d\n", errs, ibv_dealloc_pd(end->pd));
}

static void registered(struct ibv_mr *mr, void *at)
{
	if (!mr)
		return failed(errno);
	mrs[nmrs] = mr;
	printf("ok %d %u %u %llu\n", nmrs++, mr->lkey, mr->rkey, (unsigned long long)at);
}

/* reg END BYTES ACCESS READONLY: new memory, all zero */
static void reg(struct end *end, size_t bytes, int access, bool readonly)
{
	void *at = mmap(NULL, bytes, readonly ? PROT_READ : PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	registered(ibv_reg_mr_iova2(end->pd, at, bytes, (uint64_t)at, access), at);
}

/* dmabuf END BYTES OFFSET LEN IOVA ACCESS: a memfd; the answer's address is its first byte's */
static void dmabuf(struct end *end, size_t bytes, uint64_t offset, size_t len, uint64_t iova, int access)
{
	int fd = memfd_create("dmabuf", MFD_CLOEXEC);
	void *at;

	if (ftruncate(fd, bytes))
		return failed(errno);
	at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	registered(ibv_reg_dmabuf_mr(end->pd, offset, len, iova, fd, access), at);
	close(fd);
}

static void new_ah(struct end *end, int host, int nic_1)
{
	struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1};

	ibv_query_gid(end->ctx, 1, 0, &attr.grh.dgid);
	attr.grh.dgid.raw[14] = host;
	attr.grh.dgid.raw[15] = nic_1;
	ahs[nahs] = ibv_create_ah(end->pd, &attr);
	if (!ahs[nahs])
		return failed(errno);
	printf("ok %d\n", nahs++);
}

/* post END OP AH QPN QKEY RKEY RADDR LKEY LADDR LEN IMM COUNT CHAIN STRIDE: COUNT requests, the
 * k-th with immediate IMM + k and addresses STRIDE * k further; OP as enum op_kind, 4 sends inline */
static void post(struct end *end)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(end->qp);
	bool chain = a[12];
	int err = 0, posted = 0;

	for (long long k = 0; k < a[11] && !err; k++) {
		struct ibv_sge sge = {a[8] + k * a[13], a[9], a[7]};
		uint64_t raddr = a[6] + k * a[13];
		uint32_t imm = a[10] + k;

		if (!chain || !k)
			ibv_wr_start(qp);
		qp->wr_id = next_id++;
		if (a[1] == OP_SEND)
			ibv_wr_send(qp);
		else if (a[1] == OP_WRITE)
			ibv_wr_rdma_write(qp, a[5], raddr);
		else if (a[1] == OP_WRITE_IMM)
			ibv_wr_rdma_write_imm(qp, a[5], raddr, imm);
		else if (a[1] == OP_READ)
			ibv_wr_rdma_read(qp, a[5], raddr);
		else
			ibv_wr_send_imm(qp, imm);
		if (a[1] > OP_READ)
			ibv_wr_set_inline_data(qp, (void *)sge.addr, sge.length);
		else
			ibv_wr_set_sge_list(qp, 1, &sge);
		ibv_wr_set_ud_addr(qp, ahs[a[2]], a[3], a[4]);
		if (!chain || k == a[11] - 1) {
			err = ibv_wr_complete(qp);
			if (!err)
				posted += chain ? a[11] : 1;
		}
	}
	printf("ok %d %d\n", posted, err);
}

/* recv END COUNT LKEY ADDR LEN */
static void recv_many(struct end *end, long long count, uint32_t lkey, uint64_t addr, uint32_t len)
{
	struct ibv_recv_wr *bad, wr = {0};
	struct ibv_sge sge = {addr, len, lkey};
	int posted = 0, err = 0;

	wr.sg_list = &sge;
	wr.num_sge = len > 0;
	while (posted < count && !err) {
		wr.wr_id = next_id++;
		err = ibv_post_recv(end->qp, &wr, &bad);
		posted += !err;
	}
	printf("ok %d %d\n", posted, err);
}

/* poll END MAX: id:status:opcode:imm:len ... of up to MAX completions */
static void poll_some(struct end *end, int max)
{
	struct ibv_poll_cq_attr attr = {0};
	int n = 0, err = max ? ibv_start_poll(end->cq, &attr) : ENOENT;
	bool active = !err;

	printf("ok");
	while (!err) {
		printf(" %llu:%u:%d:%u:%u", (unsigned long long)end->cq->wr_id,
		       ibv_wc_read_vendor_err(end->cq), ibv_wc_read_opcode(end->cq),
		       ibv_wc_read_imm_data(end->cq), ibv_wc_read_byte_len(end->cq));
		err = ++n < max ? ibv_next_poll(end->cq) : ENOENT;
	}
	if (active)
		ibv_end_poll(end->cq);
	printf("\n");
}

static uint64_t cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* cost END AH QPN QKEY RKEY RADDR LKEY LADDR LEN COUNT CHAIN ROUNDS: what the calls of this library
 * take for a row with an immediate from END to itself while the device is held, in picoseconds of
 * CPU: the median of ROUNDS of COUNT rows, to post, to post its receive, to poll both completions. */
static int by_size(const void *x, const void *y)
{
	uint64_t p = *(const uint64_t *)x, q = *(const uint64_t *)y;

	return p < q ? -1 : p > q;
}

static void cost(struct end *end)
{
	enum { ROUNDS_MAX = 256 };
	static uint64_t spent[3][ROUNDS_MAX];
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(end->qp);
	struct ibv_sge sge = {a[7], a[8], a[6]};
	struct ibv_recv_wr *bad, wr = {.sg_list = &sge, .num_sge = 1};
	struct ibv_poll_cq_attr attr = {0};
	int rounds = a[11] < ROUNDS_MAX ? a[11] : ROUNDS_MAX, err = 0;

	fake_efa_hold(1);
	for (int round = 0; round < rounds && !err; round++) {
		uint64_t start = cpu_ns(), posted, received, sum = 0;
		long long back = 0;

		for (long long k = 0; k < a[9] && !err; k++)
			err = ibv_post_recv(end->qp, &wr, &bad);
		received = cpu_ns();
		for (long long k = 0; k < a[9]; k++) {
			if (k % a[10] == 0)
				ibv_wr_start(qp);
			qp->wr_id = k;
			ibv_wr_rdma_write_imm(qp, a[4], a[5], k);
			ibv_wr_set_ud_addr(qp, ahs[a[1]], a[2], a[3]);
			ibv_wr_set_sge(qp, sge.lkey, sge.addr, sge.length);
			if (k % a[10] == a[10] - 1 || k == a[9] - 1)
				err = err ? err : ibv_wr_complete(qp);
		}
		posted = cpu_ns();
		fake_efa_run(1000);
		spent[0][round] = posted - received;
		spent[1][round] = received - start;
		while (!err && back < 2 * a[9]) {
			start = cpu_ns();
			if (!ibv_start_poll(end->cq, &attr)) {
				do {
					back++;
					sum += end->cq->wr_id + ibv_wc_read_vendor_err(end->cq) +
					       ibv_wc_read_opcode(end->cq) +
					       ibv_wc_read_byte_len(end->cq) +
					       ibv_wc_read_imm_data(end->cq);
				} while (!ibv_next_poll(end->cq));
				ibv_end_poll(end->cq);
			}
			spent[2][round] += cpu_ns() - start;
			fake_efa_run(100);
		}
		next_id += sum & 1; /* so that it is not left out */
	}
	fake_efa_hold(0);
	if (err)
		return failed(err);
	printf("ok");
	for (int k = 0; k < 3; k++) {
		qsort(spent[k], rounds, sizeof spent[k][0], by_size);
		printf(" %llu", (unsigned long long)(spent[k][rounds / 2] * 1000 / a[9]));
		memset(spent[k], 0, sizeof spent[k]);
	}
	printf("\n");
}

/* wait END TIMEOUT_MS: 1 if the completion channel has news, which is then taken */
static void wait_event(struct end *end, int timeout_ms)
{
	struct pollfd fd = {.fd = end->channel->fd, .events = POLLIN};
	struct ibv_cq *cq;
	void *context;
	int ready = poll(&fd, 1, timeout_ms);

	if (ready > 0)
		ibv_get_cq_event(end->channel, &cq, &context);
	printf("ok %d\n", ready);
}

static void fatal_event(struct end *end, int timeout_ms)
{
	struct pollfd fd = {.fd = end->ctx->async_fd, .events = POLLIN};
	struct ibv_async_event event = {0};

	if (poll(&fd, 1, timeout_ms) > 0)
		ibv_get_async_event(end->ctx, &event);
	printf("ok %d\n", event.event_type);
}

static void command(const char *what)
{
	struct end *end = &ends[a[0] & 63];

	if (!strcmp(what, "open"))
		open_end(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
	else if (!strcmp(what, "close"))
		close_end(end);
	else if (!strcmp(what, "reg"))
		reg(end, a[1], a[2], a[3]);
	else if (!strcmp(what, "dmabuf"))
		dmabuf(end, a[1], a[2], a[3], a[4], a[5]);
	else if (!strcmp(what, "dereg"))
		printf("ok %d\n", ibv_dereg_mr(mrs[a[0]]));
	else if (!strcmp(what, "ah"))
		new_ah(end, a[1], a[2]);
	else if (!strcmp(what, "unah"))
		printf("ok %d\n", ibv_destroy_ah(ahs[a[0]]));
	else if (!strcmp(what, "post"))
		post(end);
	else if (!strcmp(what, "recv"))
		recv_many(end, a[1], a[2], a[3], a[4]);
	else if (!strcmp(what, "poll"))
		poll_some(end, a[1]);
	else if (!strcmp(what, "cost"))
		cost(end);
	else if (!strcmp(what, "arm"))
		printf("ok %d\n", ibv_req_notify_cq((struct ibv_cq *)end->cq, 0));
	else if (!strcmp(what, "wait"))
		wait_event(end, a[1]);
	else if (!strcmp(what, "fatal"))
		fatal_event(end, a[1]);
	else if (!strcmp(what, "fill")) /* ADDR LEN SEED: byte i is i * SEED + i / 256 */
		for (long long i = 0; i < a[1] || (printf("ok\n"), 0); i++)
			((uint8_t *)a[0])[i] = i * a[2] + i / 256;
	else if (!strcmp(what, "peek")) { /* ADDR LEN: the bytes, in hexadecimal */
		printf("ok ");
		for (long long i = 0; i < a[1]; i++)
			printf("%02x", ((uint8_t *)a[0])[i]);
		printf("\n");
	} else
		failed(ENOSYS);
}

int main(void)
{
	char line[512], what[32];
	int at, n;

	setvbuf(stdout, NULL, _IOFBF, 1 << 16);
	while (fgets(line, sizeof line, stdin)) {
		char *from = line;

		if (sscanf(line, "%31s%n", what, &at) != 1)
			continue;
		from += at;
		memset(a, 0, sizeof a);
		for (n = 0; n < 16; n++) {
			char *end;

			a[n] = strtoll(from, &end, 10);
			if (end == from)
				break;
			from = end;
		}
		command(what);
		fflush(stdout);
	}
	return 0;
}
