/* The control program: `control RUN make | fault LINE | clear [KIND] | counters`. */
#define _GNU_SOURCE
#include "fabric.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One line for each port that anything happened on: host.nic name=value ... */
static void print_counters(void)
{
	for (uint32_t p = 0; p < PORTS_MAX; p++) {
		struct counters *c = &fabric->ports[p].counters;
		uint64_t sum = 0;

#define X(name) sum += c->name;
		COUNTERS(X)
#undef X
		if (!sum)
			continue;
		printf("%u.%u", p / NICS_MAX, p % NICS_MAX);
#define X(name) printf(" " #name "=%" PRIu64, (uint64_t)c->name);
		COUNTERS(X)
#undef X
		for (int s = 0; s < STATUSES; s++)
			if (c->status[s])
				printf(" status%d=%" PRIu64, s, (uint64_t)c->status[s]);
		printf(" live_qps=%u live_cqs=%u live_mrs=%u live_ahs=%u live_mr_bytes=%" PRIu64 "\n",
		       fabric->ports[p].qps, fabric->ports[p].cqs, fabric->ports[p].mrs,
		       fabric->ports[p].ahs, (uint64_t)fabric->ports[p].mr_bytes);
	}
}

int main(int argc, char **argv)
{
	if (argc < 3 || setenv("TEP_FAKE_EFA", argv[1], 1) || fabric_open())
		return 2;
	if (!strcmp(argv[2], "make"))
		return 0;
	if (!strcmp(argv[2], "fault") && argc == 4)
		return fault_add(argv[3]) ? 1 : 0;
	if (!strcmp(argv[2], "clear"))
		return fault_clear(argc > 3 ? argv[3] : NULL), 0;
	if (!strcmp(argv[2], "counters"))
		return print_counters(), 0;
	fprintf(stderr, "usage: control RUN make | fault LINE | clear [KIND] | counters\n");
	return 2;
}
