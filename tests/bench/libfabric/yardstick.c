/* The yardstick: what a plain C loop over libfabric costs, on the same provider and settings as tep.
 *
 *   cc -O2 yardstick.c -I<include> <libfabric.so.1> -o yardstick
 *   yardstick cpu  PROVIDER SIZE ROWS WINDOW DC   both ends in one thread; CPU time a write
 *   yardstick rate PROVIDER SIZE ROWS WINDOW DC   two processes; wall time of all rows
 *   yardstick lat  PROVIDER SIZE ROWS WINDOW DC   two processes; half round trips
 *
 * PROVIDER is tcp or efa. DC is 1 for FI_DELIVERY_COMPLETE. One line on standard input makes one run and one line of output,
 * in microseconds (cpu: a write; rate: all; lat: the median); so a caller can interleave runs. */
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void must(long rc, const char *what)
{
	if (rc < 0) {
		fprintf(stderr, "%s: %ld %s\n", what, rc, fi_strerror((int)-rc));
		exit(1);
	}
}

struct card { /* what one end tells the other */
	char name[64];
	size_t namelen;
	uint64_t base, key;
};

struct end {
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_ep *ep;
	struct fid_cq *cq;
	struct fid_av *av;
	struct fid_mr *mr;
	char *buf;
	void *desc;
	struct card mine, theirs;
	fi_addr_t peer;
	size_t written, arrived; /* local completions, immediates */
};

enum { SHARED_MEMORY_PERMITTED = 11 /* 1.17 has no name for it */ };
static int efa;

static uint64_t flags = FI_REMOTE_CQ_DATA | FI_COMPLETION;
static size_t size, rows, window, stride, slots, bufsize;

static double clock_us(clockid_t id)
{
	struct timespec t;
	clock_gettime(id, &t);
	return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static void open_end(struct end *e, const char *provider, int dc)
{
	struct fi_info *hints = fi_allocinfo(), *info;
	struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE, .size = 8192};
	struct fi_av_attr av = {.type = FI_AV_TABLE};
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

	hints->caps = FI_MSG | FI_RMA;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->domain_attr->threading = FI_THREAD_DOMAIN;
	hints->fabric_attr->prov_name = strdup(efa ? "efa" : provider);
	if (efa) { /* as tep asks: see RULES */
		hints->caps |= FI_LOCAL_COMM | FI_REMOTE_COMM;
		hints->tx_attr->size = 512;
		hints->rx_attr->size = 1024;
	}
	const char *node = efa ? NULL : "127.0.0.1";
	must(fi_getinfo(fi_version(), node, NULL, node ? FI_SOURCE : 0, hints, &info), "fi_getinfo");
	while (efa && info && !strcmp(info->fabric_attr->name, "efa-direct"))
		info = info->next;
	if (!info)
		must(-FI_ENODATA, provider);
	if (efa)
		cq.size = info->tx_attr->size + info->rx_attr->size;
	if (dc)
		info->tx_attr->op_flags |= FI_DELIVERY_COMPLETE;
	must(fi_fabric(info->fabric_attr, &e->fabric, NULL), "fi_fabric");
	must(fi_domain(e->fabric, info, &e->domain, NULL), "fi_domain");
	must(fi_cq_open(e->domain, &cq, &e->cq, NULL), "fi_cq_open");
	must(fi_av_open(e->domain, &av, &e->av, NULL), "fi_av_open");
	must(fi_endpoint(e->domain, info, &e->ep, NULL), "fi_endpoint");
	must(fi_ep_bind(e->ep, &e->cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
	must(fi_ep_bind(e->ep, &e->av->fid, 0), "fi_ep_bind");
	bool no = false;
	if (efa) /* peers of this host by the NIC too */
		must(fi_setopt(&e->ep->fid, FI_OPT_ENDPOINT, SHARED_MEMORY_PERMITTED, &no, sizeof no),
		     "fi_setopt");
	must(fi_enable(e->ep), "fi_enable");
	e->buf = mmap(NULL, bufsize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(e->buf, 1, bufsize);
	must(fi_mr_reg(e->domain, e->buf, bufsize, access, 0, 1, 0, &e->mr, NULL), "fi_mr_reg");
	e->desc = fi_mr_desc(e->mr);
	e->mine.namelen = sizeof e->mine.name;
	must(fi_getname(&e->ep->fid, e->mine.name, &e->mine.namelen), "fi_getname");
	e->mine.base = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)e->buf : 0;
	e->mine.key = fi_mr_key(e->mr);
}

static void meet(struct end *e)
{
	if (fi_av_insert(e->av, e->theirs.name, 1, &e->peer, 0, NULL) != 1)
		exit(1);
}

static void poll_cq(struct end *e)
{
	static struct fi_cq_data_entry entry[256];
	ssize_t n = fi_cq_read(e->cq, entry, 256);

	for (ssize_t i = 0; i < n; i++)
		if (entry[i].flags & FI_REMOTE_WRITE)
			e->arrived++;
		else
			e->written++;
	if (n < 0 && n != -FI_EAGAIN)
		must(n, "fi_cq_read");
}

/* 1 = posted, 0 = full */
static int put(struct end *e, size_t i, size_t nbytes)
{
	size_t at = i % slots * stride;
	struct iovec iov = {e->buf + at, nbytes};
	struct fi_rma_iov rma = {e->theirs.base + at, nbytes, e->theirs.key};
	struct fi_msg_rma msg = {&iov, &e->desc, 1, e->peer, &rma, 1, (void *)i, (uint32_t)i};

	ssize_t rc = fi_writemsg(e->ep, &msg, flags);

	if (rc == -FI_EAGAIN)
		return 0;
	must(rc, "fi_writemsg");
	return 1;
}

static void put_now(struct end *e, size_t i, size_t nbytes)
{
	while (!put(e, i, nbytes))
		poll_cq(e);
}

static double run_cpu(struct end *a, struct end *b)
{
	size_t i = 0;
	double start;

	a->written = b->arrived = 0;
	start = clock_us(CLOCK_PROCESS_CPUTIME_ID);
	while (b->arrived < rows || a->written < rows) {
		size_t room = window - (i - a->written), left = rows - i;
		for (size_t n = room < left ? room : left; n && put(a, i, size); n--)
			i++;
		poll_cq(a);
		poll_cq(b);
	}
	return (clock_us(CLOCK_PROCESS_CPUTIME_ID) - start) / rows;
}

static void main_cpu(const char *provider, int dc)
{
	static struct end a, b;
	char line[16];

	open_end(&a, provider, dc);
	open_end(&b, provider, dc);
	a.theirs = b.mine;
	b.theirs = a.mine;
	meet(&a);
	meet(&b);
	while (fgets(line, sizeof line, stdin)) {
		printf("%.4f\n", run_cpu(&a, &b));
		fflush(stdout);
	}
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a - *(const double *)b;
	return x < 0 ? -1 : x > 0;
}

/* The sender of rate and lat: the target answers the last row of a run with one of its own. */
static double run_rate(struct end *e)
{
	size_t i = 0;
	double start = clock_us(CLOCK_MONOTONIC);

	e->written = e->arrived = 0;
	while (!e->arrived || e->written < rows) {
		while (i < rows && i - e->written < window && put(e, i, size))
			i++;
		poll_cq(e);
	}
	return clock_us(CLOCK_MONOTONIC) - start;
}

static double run_lat(struct end *e)
{
	double *took = calloc(rows, sizeof *took), median;

	e->arrived = 0;
	for (size_t i = 0; i < rows; i++) {
		took[i] = clock_us(CLOCK_MONOTONIC);
		put_now(e, 0, size);
		while (e->arrived <= i)
			poll_cq(e);
		took[i] = (clock_us(CLOCK_MONOTONIC) - took[i]) / 2;
	}
	qsort(took, rows, sizeof *took, by_value);
	median = took[rows / 2];
	free(took);
	return median;
}

static void main_two(const char *provider, int dc, int lat)
{
	static struct end e;
	char line[16];
	int pair[2];
	size_t seen = 0;
	pid_t child;

	must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "socketpair");
	child = fork(); /* before libfabric is used: see its notes on fork */
	int fd = pair[child ? 0 : 1];
	open_end(&e, provider, dc);
	if (write(fd, &e.mine, sizeof e.mine) != sizeof e.mine ||
	    read(fd, &e.theirs, sizeof e.theirs) != sizeof e.theirs)
		exit(1);
	meet(&e);
	if (!child) {
		while (getppid() != 1) { /* until killed */
			poll_cq(&e);
			if (lat ? e.arrived > seen : e.arrived - seen >= rows) {
				seen = e.arrived;
				put_now(&e, 0, lat ? size : 8);
			}
		}
		_exit(0);
	}
	while (fgets(line, sizeof line, stdin)) {
		printf("%.4f\n", lat ? run_lat(&e) : run_rate(&e));
		fflush(stdout);
	}
	kill(child, 9);
	waitpid(child, NULL, 0);
}

int main(int argc, char **argv)
{
	int dc;

	if (argc != 7)
		return 2;
	size = strtoull(argv[3], NULL, 0);
	rows = strtoull(argv[4], NULL, 0);
	window = strtoull(argv[5], NULL, 0);
	dc = atoi(argv[6]);
	efa = !strcmp(argv[2], "efa");
	stride = size < 4096 ? 4096 : size;
	bufsize = rows * stride;
	slots = bufsize / stride;
	if (dc)
		flags |= FI_DELIVERY_COMPLETE;
	if (!strcmp(argv[1], "cpu"))
		main_cpu(argv[2], dc);
	else
		main_two(argv[2], dc, !strcmp(argv[1], "lat"));
	return 0;
}
