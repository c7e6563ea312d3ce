/* What verbs.c and efadv.c share: this process's objects, and libefa's structures. */
#ifndef TEP_FAKE_EFA_FRONT_H
#define TEP_FAKE_EFA_FRONT_H

#include "engine.h"

/* libefa's structures as rdma-core's providers/efa/efadv.h lays them out, with what later versions
 * appended; written out here since a distribution's header may be older than the provider's. */
struct efa_device_attr {
	uint64_t comp_mask;
	uint32_t max_sq_wr, max_rq_wr;
	uint16_t max_sq_sge, max_rq_sge, inline_buf_size;
	uint8_t reserved[2];
	uint32_t device_caps, max_rdma_size;
};

struct efa_ah_attr {
	uint64_t comp_mask;
	uint16_t ahn;
	uint8_t reserved[6];
};

struct efa_qp_init_attr {
	uint64_t comp_mask;
	uint32_t driver_qp_type;
	uint16_t flags;
	uint8_t sl, reserved;
};

struct efa_cq_init_attr {
	uint64_t comp_mask, wc_flags;
};

struct efa_cq {
	uint64_t comp_mask;
	int (*wc_read_sgid)(struct efa_cq *, union ibv_gid *);
	bool (*wc_is_unsolicited)(struct efa_cq *);
};

/* Each begins with the structure that the caller sees. */
struct context {
	struct ibv_context ibv;
	uint32_t port;
	int event_pipe;
	struct context *next;
};

struct vpd {
	struct ibv_pd ibv;
	uint32_t index;
};

struct vmr {
	struct ibv_mr ibv;
	void *mapped; /* a dma-buf's */
	uint64_t mapped_bytes;
};

struct vah {
	struct ibv_ah ibv;
	uint32_t dport;
};

struct channel {
	struct ibv_comp_channel ibv;
	uint32_t number;
};

struct vcq {
	struct ibv_cq_ex ex;
	struct efa_cq dv;
	uint32_t index, port;
	struct wc wc; /* the completion that is being read */
};

struct vqp {
	struct ibv_qp_ex ex;
	uint32_t index, rq_cap;
	struct sq *sq;
	pthread_mutex_t post_lock;
	struct op *batch, scrap;
	uint32_t nbatch;
	int session_err;
	_Atomic uint32_t sq_used, rq_used; /* until their completions are read */
};

/* Source: to_ibv_status in rdma-core's providers/efa/verbs.c. */
static inline enum ibv_wc_status to_ibv_status(uint32_t status)
{
	static const uint8_t table[] = {
		[OK] = IBV_WC_SUCCESS,
		[FLUSHED] = IBV_WC_WR_FLUSH_ERR,
		[QP_INTERNAL] = IBV_WC_LOC_QP_OP_ERR,
		[UNSUPPORTED_OP] = IBV_WC_LOC_QP_OP_ERR,
		[INVALID_AH] = IBV_WC_LOC_QP_OP_ERR,
		[INVALID_LKEY] = IBV_WC_LOC_PROT_ERR,
		[LOCAL_BAD_LENGTH] = IBV_WC_LOC_LEN_ERR,
		[BAD_ADDRESS] = IBV_WC_REM_ACCESS_ERR,
		[REMOTE_ABORT] = IBV_WC_REM_ABORT_ERR,
		[BAD_DEST_QPN] = IBV_WC_REM_INV_RD_REQ_ERR,
		[REMOTE_RNR] = IBV_WC_RNR_RETRY_EXC_ERR,
		[REMOTE_BAD_LENGTH] = IBV_WC_REM_INV_REQ_ERR,
		[BAD_STATUS] = IBV_WC_BAD_RESP_ERR,
		[UNRESP_REMOTE] = IBV_WC_RESP_TIMEOUT_ERR,
		[UNKNOWN_PEER] = IBV_WC_REM_OP_ERR,
		[UNREACH_REMOTE] = IBV_WC_RESP_TIMEOUT_ERR,
	};

	return status < sizeof table ? table[status] : IBV_WC_GENERAL_ERR;
}

/* mapped.c: one mapping, as the program and as the device see it. */
struct window {
	uint8_t *program, *device, *open; /* open: pages that the program has stored to */
	size_t bytes, nopen;
	uint32_t port;
	bool belled; /* a doorbell rang, and no fence came after it */
	void (*rung)(struct window *); /* of a register: told of each store */
	void *owner;
	struct window *next;
};
bool window_open(struct window *, size_t bytes, uint32_t port, void (*rung)(struct window *),
		 void *owner);
void window_close(struct window *);
void window_forget(void);
bool window_rang(struct window *queue); /* its doorbell; false: stores were not fenced, and are lost */
void mapped_fence(void);

/* direct.c */
struct efa_wq_attr;
struct efa_cq_attr;
void direct_turn(void);
void direct_forget(void);
void direct_drop(const struct vqp *, const struct vcq *);
int fake_efa_query_wqs(struct ibv_qp *, struct efa_wq_attr *, struct efa_wq_attr *, uint32_t);
int fake_efa_query_cq(struct ibv_cq *, struct efa_cq_attr *, uint32_t);
void fake_efa_run(uint32_t turns);
void note_batch(struct vqp *qp); /* verbs.c: count and log what a doorbell brought */

int fake_efa_query_device(struct ibv_context *, struct efa_device_attr *, uint32_t);
int fake_efa_query_ah(struct ibv_ah *, struct efa_ah_attr *, uint32_t);
struct ibv_cq_ex *fake_efa_create_cq(struct ibv_context *, struct ibv_cq_init_attr_ex *,
				     struct efa_cq_init_attr *, uint32_t);
struct efa_cq *fake_efa_cq_from(struct ibv_cq_ex *);
struct ibv_qp *fake_efa_create_qp(struct ibv_context *, struct ibv_qp_init_attr_ex *,
				  struct efa_qp_init_attr *, uint32_t);

#endif
