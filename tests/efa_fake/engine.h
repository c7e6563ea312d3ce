/* The device itself: it takes decoded requests and carries them out. It knows nothing of verbs'
 * ABI, so that another front can feed it (one that reads work queue entries from rings, as EFA's
 * direct data path writes them). */
#ifndef TEP_FAKE_EFA_ENGINE_H
#define TEP_FAKE_EFA_ENGINE_H

#include "fabric.h"

enum op_kind { OP_SEND, OP_WRITE, OP_WRITE_IMM, OP_READ };

struct op {
	/* what the program asked for */
	enum op_kind kind;
	bool has_imm, is_inline;
	uint8_t nsge;
	uint32_t imm; /* network byte order */
	uint64_t wr_id, raddr;
	uint32_t rkey;
	uint32_t dport, dqpn, qkey; /* dport UINT32_MAX: no such NIC */
	struct ibv_sge sge[2];
	uint8_t inline_data[32];

	/* how far it is */
	enum { NEW, MOVING, LANDED, ANSWERED } phase;
	uint32_t len, status;
	uint32_t seg_count, seg_done, seg_start, seg_step; /* which segments, in which order */
	uint32_t rnr_tries, holds; /* holds: turns that it stays behind the others */
	uint64_t ready_ns, give_up_ns;
	bool paced;    /* a slow NIC has paused for it */
	bool received; /* took a receive of the responder, for a SEND */
	struct recv_entry recv;
};

/* A queue pair of this process, as the device sees it. */
struct sq {
	uint32_t qp;   /* index in fabric->qps */
	uint32_t port, cap, rnr_retry;
	uint64_t dice; /* state of the random numbers: one stream a queue pair */
	struct op *pool, **spare, **out; /* `out`: under way, in no particular order */
	uint32_t nspare, nout;
	uint8_t *heard; /* one bit for each (port, qpn) that ever answered */
	struct sq *next;
};

int engine_attach(void); /* once; 0 or errno */
uint32_t engine_proc(void);
uint32_t engine_host(void);
struct sq *sq_open(uint32_t qp, uint32_t port, uint32_t cap);
void sq_close(struct sq *sq);
/* Hand over a doorbell's worth of requests, all or none: 0, or ENOMEM. */
int sq_doorbell(struct sq *sq, const struct op *ops, uint32_t n);
void engine_turn(void);   /* let time pass: the device does some of what it has to do */
void engine_hold(bool hold); /* from now on engine_move() does nothing, or moves again */
void engine_move(void);   /* engine_turn(), unless the device is held */
void engine_lock(void);
void engine_unlock(void);
void engine_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Answer once for each port of this process that disappears; set by the front. */
extern void (*engine_gone)(uint32_t port);
/* Answer before and after the device moves, with the engine's lock held; set by mapped queues. */
extern void (*engine_direct)(void);
extern void (*engine_forked)(void); /* in the child of a fork */

/* Where a registration keeps [addr, addr + len), or NULL; any of the access bits that miss: NULL. */
const struct mr *mr_find(uint32_t key, uint32_t port, uint32_t pd, uint64_t addr, uint64_t len,
			 uint32_t access, bool remote);
/* Keys: the index of the registration, and a bit that tells remote from local, so that one is never
 * taken for the other; 24 bits, since an entry has no more for a local one. Guessed: the real device's keys have an order of their own. */
enum { KEY_LOCAL = 0x100000, KEY_REMOTE = 0x200000, KEY_INDEX = 0xffff, KEY_TURN = 0xf0000 };

#endif
