/* The shared file: opening it, who lives, rings that many processes fill. See fabric.h. */
#define _GNU_SOURCE
#include "fabric.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct fabric *fabric;
char run_folder[200];
static uint32_t self = UINT32_MAX; /* this process's index; UINT32_MAX: it has none */

uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void make_mutex(pthread_mutex_t *mutex)
{
	pthread_mutexattr_t attr;

	pthread_mutexattr_init(&attr);
	pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(mutex, &attr);
	pthread_mutexattr_destroy(&attr);
}

static int read_settings(struct settings *set)
{
#define X(name, value) set->name = value;
	SETTINGS(X)
#undef X
	char path[300], line[256], name[64];
	long long value;
	FILE *file;

	snprintf(path, sizeof path, "%s/config", run_folder);
	file = fopen(path, "r");
	if (!file)
		return 0; /* all as it is */
	while (fgets(line, sizeof line, file)) {
		bool known = false;

		if (line[0] == '#' || line[0] == '\n')
			continue;
		if (sscanf(line, " %63[a-z_] = %lli", name, &value) == 2) {
#define X(field, preset) if (!strcmp(name, #field)) { set->field = value; known = true; }
			SETTINGS(X)
#undef X
		}
		if (!known) {
			fprintf(stderr, "fake EFA: %s: not a setting: %s", path, line);
			fclose(file);
			return EINVAL;
		}
	}
	fclose(file);
	if (set->nics < 1 || set->nics > NICS_MAX || set->rq < 1 || set->rq > RQ_MAX ||
	    set->cqe < 1 || set->cqe > CQE_MAX || set->max_qp > QPN_MAX - 1 || set->mtu < 1) {
		fprintf(stderr, "fake EFA: %s: nics 1..%d, rq 1..%d, cqe 1..%d, max_qp ..%d, mtu 1..\n",
			path, NICS_MAX, RQ_MAX, CQE_MAX, QPN_MAX - 1);
		return EINVAL;
	}
	return 0;
}

int fabric_open(void)
{
	const char *folder = getenv("TEP_FAKE_EFA");
	char path[300];
	int fd, err = 0;

	if (fabric)
		return 0;
	if (!folder || strlen(folder) >= sizeof run_folder) {
		fprintf(stderr, "fake EFA: TEP_FAKE_EFA must name the folder of the run\n");
		return ENODEV;
	}
	strcpy(run_folder, folder);
	snprintf(path, sizeof path, "%s/fabric", folder);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0 || flock(fd, LOCK_EX)) {
		fprintf(stderr, "fake EFA: %s: %s\n", path, strerror(errno));
		return errno;
	}
	if (ftruncate(fd, sizeof *fabric))
		err = errno;
	else {
		void *at = mmap(NULL, sizeof *fabric, PROT_READ | PROT_WRITE,
				MAP_SHARED | MAP_NORESERVE, fd, 0);

		if (at == MAP_FAILED)
			err = errno;
		else
			fabric = at;
	}
	if (!err && fabric->ready != FABRIC_MAGIC) { /* the first one makes it */
		err = read_settings(&fabric->set);
		if (!err) {
			make_mutex(&fabric->alloc_lock);
			fabric->ready = FABRIC_MAGIC;
		}
	}
	if (err) {
		fprintf(stderr, "fake EFA: %s: %s\n", path, strerror(err));
		if (fabric)
			munmap(fabric, sizeof *fabric);
		fabric = NULL;
	}
	flock(fd, LOCK_UN); /* by hand: the mapping keeps the file open */
	close(fd);
	return err;
}

void fabric_lock(void)
{
	if (pthread_mutex_lock(&fabric->alloc_lock) == EOWNERDEAD)
		pthread_mutex_consistent(&fabric->alloc_lock); /* reap() finds what it left */
}

void fabric_unlock(void)
{
	pthread_mutex_unlock(&fabric->alloc_lock);
}

/* --- processes */

struct holder {
	uint32_t index;
	pthread_mutex_t *done;
};

static void *hold_alive(void *arg)
{
	struct holder *holder = arg;
	sigset_t all;

	sigfillset(&all); /* the program's signals are not for this thread */
	pthread_sigmask(SIG_BLOCK, &all, NULL);
	pthread_mutex_lock(&fabric->procs[holder->index].alive);
	pthread_mutex_unlock(holder->done);
	for (;;)
		pause();
	return NULL;
}

uint32_t proc_attach(uint32_t host)
{
	reap();
	for (uint32_t i = 0; i < PROCS_MAX; i++) {
		struct proc *proc = &fabric->procs[i];
		pthread_mutex_t done = PTHREAD_MUTEX_INITIALIZER;
		struct holder holder = {i, &done};
		sigset_t all, old;
		pthread_t thread;

		if (proc->used)
			continue;
		make_mutex(&proc->alive);
		proc->pid = getpid();
		proc->host = host;
		proc->hazard_qp = proc->hazard_mr[0] = proc->hazard_mr[1] = 0;
		pthread_mutex_lock(&done);
		sigfillset(&all);
		pthread_sigmask(SIG_BLOCK, &all, &old);
		if (pthread_create(&thread, NULL, hold_alive, &holder)) {
			pthread_sigmask(SIG_SETMASK, &old, NULL);
			return UINT32_MAX;
		}
		pthread_sigmask(SIG_SETMASK, &old, NULL);
		pthread_mutex_lock(&done); /* until the thread has it */
		proc->dead = 0;
		proc->used = 1;
		self = i;
		return i;
	}
	return UINT32_MAX;
}

void proc_detach(void)
{
	self = UINT32_MAX;
}

bool proc_is_alive(uint32_t index)
{
	struct proc *proc = &fabric->procs[index];

	if (!proc->used || proc->dead)
		return false;
	if (index == self)
		return true;
	switch (pthread_mutex_trylock(&proc->alive)) {
	case EBUSY:
		return true;
	case 0:
	case EOWNERDEAD: /* unlocked as it is, nobody can ever lock it again */
		proc->dead = 1;
		pthread_mutex_unlock(&proc->alive);
		return false;
	default:
		proc->dead = 1;
		return false;
	}
}

void reap(void)
{
	for (uint32_t p = 0; p < PROCS_MAX; p++) {
		if (!fabric->procs[p].used || proc_is_alive(p))
			continue;
		for (uint32_t i = 0; i < QPS_MAX; i++)
			if (fabric->qps[i].gen && fabric->qps[i].state != QP_FREE && fabric->qps[i].proc == p)
				qp_free(i);
		for (uint32_t i = 0; i < CQS_MAX; i++)
			if (fabric->cqs[i].live && fabric->cqs[i].proc == p)
				cq_free(i);
		for (uint32_t i = 0; i < fabric->next_mr; i++)
			if (fabric->mrs[i].live && fabric->mrs[i].proc == p)
				mr_free(i);
		for (uint32_t i = 0; i < PDS_MAX; i++)
			if (fabric->pds[i].live && fabric->pds[i].proc == p)
				pd_free(i);
		fabric->procs[p].used = 0;
	}
}

/* Wait until no process is in the middle of using a queue pair or a registration that was marked
 * dead before this call. One that was stopped in the middle is waited for too, but not for ever:
 * a device would not hang either. */
void wait_for_hazards(uint32_t qp_plus_1, uint32_t mr_plus_1)
{
	uint64_t give_up = now_ns() + 5000000000ull;

	atomic_thread_fence(memory_order_seq_cst);
	for (uint32_t p = 0; p < PROCS_MAX; p++) {
		struct proc *proc = &fabric->procs[p];

		while (proc->used && p != self &&
		       ((qp_plus_1 && proc->hazard_qp == qp_plus_1) ||
			(mr_plus_1 && (proc->hazard_mr[0] == mr_plus_1 ||
				       proc->hazard_mr[1] == mr_plus_1))) &&
		       proc_is_alive(p)) {
			if (now_ns() > give_up) {
				fprintf(stderr, "fake EFA: process %u has been in the middle of a row for "
					"5 s (stopped?); going on without it\n", proc->pid);
				break;
			}
			sched_yield();
		}
	}
}

/* --- objects that end */

int32_t qp_find(uint32_t port, uint32_t qpn)
{
	return qpn < QPN_MAX ? (int32_t)fabric->ports[port].qp_of[qpn] - 1 : -1;
}

bool qp_is_live(const struct qp *qp)
{
	uint32_t state = qp->state;

	return state == IBV_QPS_RTR || state == IBV_QPS_RTS;
}

void qp_free(uint32_t index)
{
	struct qp *qp = &fabric->qps[index];

	qp->state = QP_FREE;
	fabric->ports[qp->port].qp_of[qp->qpn] = 0;
	fabric->ports[qp->port].qps--;
}

void cq_free(uint32_t index)
{
	struct cq *cq = &fabric->cqs[index];

	cq->live = 0;
	fabric->ports[cq->port].cqs--;
}

void mr_free(uint32_t index)
{
	struct mr *mr = &fabric->mrs[index];

	mr->live = 0;
	fabric->ports[mr->port].mrs--;
	fabric->ports[mr->port].mr_bytes -= mr->length;
}

void pd_free(uint32_t index)
{
	struct pd *pd = &fabric->pds[index];

	for (uint32_t p = 0; p < PORTS_MAX; p++)
		fabric->ports[pd->port].ahs -= pd->ahs[p];
	pd->live = 0;
}

/* --- rings */

enum { SLOT_FREE, SLOT_BUSY, SLOT_READY }; /* free: may take the completion of that position */

static uint64_t word(uint64_t at, uint32_t pid, int state)
{
	return at << 24 | (uint64_t)(pid & 0x3fffff) << 2 | state;
}

/* A byte of news for a sleeper: the index of the queue, into the channel's pipe. */
void cq_notify(uint32_t index)
{
	static struct { uint32_t pid, channel; int fd; } open_pipes[CQS_MAX];
	struct cq *cq = &fabric->cqs[index];
	char path[300];

	if (!cq->channel || !atomic_exchange(&cq->armed, 0))
		return;
	if (open_pipes[index].pid != cq->channel_pid || open_pipes[index].channel != cq->channel) {
		if (open_pipes[index].pid)
			close(open_pipes[index].fd);
		snprintf(path, sizeof path, "%s/chan.%u.%u", run_folder, cq->channel_pid, cq->channel);
		open_pipes[index].fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
		open_pipes[index].pid = cq->channel_pid;
		open_pipes[index].channel = cq->channel;
	}
	if (write(open_pipes[index].fd, &index, sizeof index) == sizeof index)
		COUNT(cq->port, events, 1);
}

/* Take a slot with one compare-and-swap that also says who took it, fill it, publish it. Who is
 * killed in between leaves a busy slot with the name of a dead process, which the reader passes
 * over. Who is stopped in between holds up that queue until it goes on. */
bool cq_push(uint32_t index, const struct wc *wc)
{
	struct cq *cq = &fabric->cqs[index];
	struct cq_slot *ring = fabric->cq_rings[index];
	uint32_t pid = fabric->procs[self].pid;

	for (;;) {
		uint64_t at = cq->tail, head = cq->head, seen, free_word;
		struct cq_slot *slot = &ring[at % cq->size];

		if (at - head >= cq->depth) { /* the device drops it: libfabric pull request 11337 */
			cq->overruns++;
			COUNT(cq->port, overruns, 1);
			return false;
		}
		seen = slot->word;
		if (seen >> 24 == at && (seen & 3) == SLOT_FREE) {
			free_word = seen;
			if (!atomic_compare_exchange_strong(&slot->word, &free_word, word(at, pid, SLOT_BUSY)))
				continue;
			atomic_compare_exchange_strong(&cq->tail, &at, at + 1);
			slot->wc = *wc;
			slot->word = word(seen >> 24, pid, SLOT_READY);
			COUNT(cq->port, cqes, 1);
			cq_notify(index);
			return true;
		}
		if (seen >> 24 == at) /* taken by one who has not moved the tail on yet */
			atomic_compare_exchange_strong(&cq->tail, &at, at + 1);
	}
}

bool cq_pop(uint32_t index, struct wc *wc)
{
	struct cq *cq = &fabric->cqs[index];

	for (;;) {
		uint64_t at = cq->head, seen;
		struct cq_slot *slot = &fabric->cq_rings[index][at % cq->size];
		bool there;

		seen = slot->word;
		there = (seen & 3) == SLOT_READY;
		if ((seen & 3) == SLOT_FREE)
			return false;
		if (!there) {
			pid_t pid = seen >> 2 & 0x3fffff;

			if (!kill(pid, 0) || errno != ESRCH)
				return false;
			atomic_compare_exchange_strong(&cq->tail, &(uint64_t){at}, at + 1);
		}
		*wc = slot->wc;
		slot->word = word(at + cq->size, 0, SLOT_FREE);
		cq->head = at + 1;
		if (there)
			return true;
	}
}

/* One process fills a ring of receives, any process empties it. An entry stays as it is until the
 * head has passed it, so what was read is right if the head was still there afterwards. */
bool rq_pop(uint32_t index, struct recv_entry *out)
{
	struct qp *qp = &fabric->qps[index];
	uint64_t head = qp->rq_head;

	while (head != qp->rq_tail) {
		*out = fabric->rqs[index][head % qp->rq_size];
		if (atomic_compare_exchange_strong(&qp->rq_head, &head, head + 1))
			return true;
	}
	return false;
}

bool rq_push(uint32_t index, const struct recv_entry *in)
{
	struct qp *qp = &fabric->qps[index];
	uint64_t tail = qp->rq_tail;

	if (tail - qp->rq_head >= qp->rq_size)
		return false;
	fabric->rqs[index][tail % qp->rq_size] = *in;
	qp->rq_tail = tail + 1;
	return true;
}
