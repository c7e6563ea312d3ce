/* libefa.so.1 as libfabric's EFA provider sees it: names for what verbs.c and direct.c do. */
#include "front.h"

int efadv_query_device(struct ibv_context *ctx, struct efa_device_attr *attr, uint32_t inlen)
{
	return fake_efa_query_device(ctx, attr, inlen);
}

int efadv_query_ah(struct ibv_ah *ah, struct efa_ah_attr *attr, uint32_t inlen)
{
	return fake_efa_query_ah(ah, attr, inlen);
}

struct ibv_cq_ex *efadv_create_cq(struct ibv_context *ctx, struct ibv_cq_init_attr_ex *attr,
				  struct efa_cq_init_attr *efa_attr, uint32_t inlen)
{
	return fake_efa_create_cq(ctx, attr, efa_attr, inlen);
}

struct efa_cq *efadv_cq_from_ibv_cq_ex(struct ibv_cq_ex *cq)
{
	return fake_efa_cq_from(cq);
}

struct ibv_qp *efadv_create_qp_ex(struct ibv_context *ctx, struct ibv_qp_init_attr_ex *attr,
				  struct efa_qp_init_attr *efa_attr, uint32_t inlen)
{
	return fake_efa_create_qp(ctx, attr, efa_attr, inlen);
}

int efadv_query_qp_wqs(struct ibv_qp *qp, struct efa_wq_attr *send, struct efa_wq_attr *receive,
		       uint32_t inlen)
{
	return fake_efa_query_wqs(qp, send, receive, inlen);
}

int efadv_query_cq(struct ibv_cq *cq, struct efa_cq_attr *attr, uint32_t inlen)
{
	return fake_efa_query_cq(cq, attr, inlen);
}
