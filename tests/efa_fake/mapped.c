/* Memory that a program maps of a device: registers and the send queue, which may be written only.
 *
 * With the setting mapped=0 a window is ordinary memory that both sides share. With mapped=1 the
 * program's side is PROT_NONE, and each first touch is a fault that says whether it was a read or a
 * write (x86-64 only, bit 1 of the page fault's error code):
 *
 *   register  one store is let through, and the device is told of it before the next instruction
 *   queue     the page stays open until the next fence or doorbell. Stores reach the device at a
 *             fence, in pieces of 8 bytes and in any order; what a doorbell finds unfenced does not
 *             reach it. rdma-core maps it so: PROT_WRITE, write-combining (providers/efa/verbs.c).
 *
 * A fence is pthread_spin_trylock, which fence.c puts before libc's, or a posting session.
 *
 * Rule: what a device would suffer in silence is counted: `mapped_reads`, `unfenced`.
 */
#define _GNU_SOURCE
#include "front.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { PAGE = 4096, TRAP_FLAG = 0x100, FAULT_WRITE = 2 };

static struct window *all;
static struct sigaction before;
static __thread struct window *stepping __attribute__((tls_model("initial-exec")));
static __thread bool stepping_write __attribute__((tls_model("initial-exec")));

#ifdef __x86_64__

static struct window *window_at(const uint8_t *at)
{
	for (struct window *w = all; w; w = w->next)
		if (at >= w->program && at < w->program + w->bytes)
			return w;
	return NULL;
}

/* Close all pages; with `arrive` what was stored there comes to the device first. */
static void close_pages(struct window *w, bool arrive)
{
	for (size_t page = 0; page < w->bytes / PAGE; page++) {
		const uint64_t *from = (const uint64_t *)(w->program + page * PAGE);
		volatile uint64_t *to = (volatile uint64_t *)(w->device + page * PAGE);

		if (!w->open[page])
			continue;
		for (uint32_t k = 0, at = 0; arrive && k < PAGE / 8; k++, at += 205) /* a coprime step */
			to[at % (PAGE / 8)] = from[at % (PAGE / 8)];
		if (!arrive)
			memcpy(w->program + page * PAGE, w->device + page * PAGE, PAGE);
		mprotect(w->program + page * PAGE, PAGE, PROT_NONE);
		w->open[page] = 0;
	}
	w->nopen = 0;
}

static void on_fault(int number, siginfo_t *info, void *context)
{
	greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
	struct window *w = window_at(info->si_addr);
	bool write = registers[REG_ERR] & FAULT_WRITE;
	size_t page;

	if (!w) { /* somebody else's: what would have happened without us */
		sigaction(number, &before, NULL);
		return;
	}
	if (!write)
		COUNT(w->port, mapped_reads, 1);
	if (w->rung || !write) { /* this instruction only */
		stepping = w;
		stepping_write = write;
		mprotect(w->program, w->bytes, PROT_READ | PROT_WRITE);
		registers[REG_EFL] |= TRAP_FLAG;
		return;
	}
	if (w->belled) { /* stores after a doorbell, and nothing that keeps them behind it */
		COUNT(w->port, unfenced, 1);
		w->belled = false;
	}
	page = ((uint8_t *)info->si_addr - w->program) / PAGE;
	w->open[page] = 1;
	if (!w->nopen++)
		engine_note("mapped what=copy\n");
	mprotect(w->program + page * PAGE, PAGE, PROT_READ | PROT_WRITE);
}

static void on_step(int number, siginfo_t *info, void *context)
{
	struct window *w = stepping;

	(void)number;
	(void)info;
	((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
	stepping = NULL;
	mprotect(w->program, w->bytes, PROT_NONE);
	if (w->rung && stepping_write)
		w->rung(w);
}

void mapped_fence(void)
{
	bool any = false;

	for (struct window *w = all; w; w = w->next) {
		any |= w->belled || w->nopen;
		w->belled = false;
		if (w->nopen)
			close_pages(w, true);
	}
	if (any)
		engine_note("mapped what=fence\n");
}

static int watch(void)
{
	struct sigaction fault = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
	struct sigaction step = {.sa_sigaction = on_step, .sa_flags = SA_SIGINFO};
	void (**hook)(void) = dlsym(RTLD_DEFAULT, "fake_efa_fence_hook");

	if (!hook) {
		fprintf(stderr, "fake EFA: mapped=1 needs libfence.so in LD_PRELOAD\n");
		return EINVAL;
	}
	*hook = mapped_fence;
	sigaction(SIGTRAP, &step, NULL);
	return sigaction(SIGSEGV, &fault, &before) ? errno : 0;
}

#else

static void close_pages(struct window *w, bool arrive) { (void)w, (void)arrive; }
void mapped_fence(void) {}

static int watch(void)
{
	fprintf(stderr, "fake EFA: mapped=1 tells reads from writes on x86-64 only\n");
	return EINVAL;
}

#endif

bool window_rang(struct window *w)
{
	bool whole = !w->nopen;

	if (!whole) {
		COUNT(w->port, unfenced, 1);
		close_pages(w, false);
	}
	w->belled = true;
	return whole;
}

bool window_open(struct window *w, size_t bytes, uint32_t port, void (*rung)(struct window *),
		 void *owner)
{
	static bool watching;
	int fd;

	memset(w, 0, sizeof *w);
	w->bytes = (bytes + PAGE - 1) / PAGE * PAGE;
	w->port = port;
	w->owner = owner;
	if (!fabric->set.mapped) {
		w->device = mmap(NULL, w->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
				 -1, 0);
		w->program = w->device;
		return w->device != MAP_FAILED;
	}
	if (!watching && watch())
		return false;
	watching = true;
	w->rung = rung;
	w->open = calloc(w->bytes / PAGE, 1);
	/* Two memories for a queue: stores are on their way until a fence. One for a register. */
	fd = rung ? memfd_create("register", 0) : -1;
	if (rung && ftruncate(fd, w->bytes))
		return false;
	w->device = mmap(NULL, w->bytes, PROT_READ | PROT_WRITE,
			 rung ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
	w->program = mmap(NULL, w->bytes, PROT_NONE,
			  rung ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
	if (fd >= 0)
		close(fd);
	w->next = all;
	all = w;
	return w->device != MAP_FAILED && w->program != MAP_FAILED;
}

void window_close(struct window *w)
{
	for (struct window **at = &all; *at; at = &(*at)->next)
		if (*at == w) {
			*at = w->next;
			break;
		}
	if (w->program && w->program != w->device)
		munmap(w->program, w->bytes);
	if (w->device)
		munmap(w->device, w->bytes);
	free(w->open);
	memset(w, 0, sizeof *w);
}

void window_forget(void) { all = NULL; /* in the child of a fork: the parent's */ }
