/* Scripted faults: `KIND name=value ...`, given to the control program or in RUN/faults.
 *
 *   rnr       the responder says that no receive is posted
 *   mute      nothing goes in or out: requests end as UNRESP_REMOTE or UNREACH_REMOTE in time
 *   lose_ack  the bytes and the immediate arrive, their acknowledgement does not
 *   fail      the request ends with status=N and moves nothing
 *   drop      the completion queue of the responder overruns: that completion is lost
 *   slow      the NIC pauses for us=N before each row
 *   gone      the device disappears: a fatal event there, silence for everyone
 *
 * Filters: host, nic (the responder; of slow and gone the NIC itself), from_host, from_nic,
 * op=send|write|imm|read. How often: p=0.01, skip=N first chances, count=N strikes at most.
 */
#define _GNU_SOURCE
#include "fabric.h"
#include "engine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const kinds[] = {"none", "rnr", "mute", "lose_ack", "fail", "drop", "slow", "gone"};
static const char *const ops[] = {"send", "write", "imm", "read"};

static int find(const char *word, const char *const *list, int n)
{
	for (int i = 0; i < n; i++)
		if (!strcmp(word, list[i]))
			return i;
	return -1;
}

static bool field(struct rule *rule, const char *name, const char *value)
{
	char *end;
	double number = strtod(value, &end);

	if (!strcmp(name, "op"))
		return (rule->op = find(value, ops, 4)) >= 0;
	if (*end)
		return false;
	if (!strcmp(name, "host"))
		rule->host = number;
	else if (!strcmp(name, "nic"))
		rule->nic = number;
	else if (!strcmp(name, "from_host"))
		rule->from_host = number;
	else if (!strcmp(name, "from_nic"))
		rule->from_nic = number;
	else if (!strcmp(name, "status"))
		rule->status = number;
	else if (!strcmp(name, "us"))
		rule->us = number;
	else if (!strcmp(name, "p"))
		rule->ppm = number * 1e6;
	else if (!strcmp(name, "skip"))
		rule->skip = number;
	else if (!strcmp(name, "count"))
		rule->left = number;
	else
		return false;
	return true;
}

static void set_gone(const struct rule *rule)
{
	for (uint32_t p = 0; p < PORTS_MAX; p++)
		if ((rule->host < 0 || rule->host == (int)(p / NICS_MAX)) &&
		    (rule->nic < 0 || rule->nic == (int)(p % NICS_MAX)))
			fabric->ports[p].gone = 1;
}

int fault_add(const char *line)
{
	char copy[256], *save, *word;
	struct rule rule = {.host = -1, .nic = -1, .from_host = -1, .from_nic = -1, .op = -1,
			    .ppm = 1000000, .left = -1};
	int kind;

	snprintf(copy, sizeof copy, "%s", line);
	word = strtok_r(copy, " \t\n", &save);
	if (!word || *word == '#')
		return 0;
	kind = find(word, kinds, sizeof kinds / sizeof *kinds);
	while (kind > 0 && (word = strtok_r(NULL, " \t\n", &save))) {
		char *value = strchr(word, '=');

		if (!value)
			kind = -1;
		else {
			*value = 0;
			if (!field(&rule, word, value + 1))
				kind = -1;
		}
	}
	if (kind <= 0) {
		fprintf(stderr, "fake EFA: not a fault: %s\n", line);
		return EINVAL;
	}
	if (kind == F_GONE)
		set_gone(&rule);
	fabric_lock();
	for (int i = 0; i < RULES_MAX; i++) {
		struct rule *at = &fabric->rules[i];

		if (at->kind != F_NONE)
			continue;
		*at = rule; /* its kind is F_NONE still, so nobody reads it */
		at->kind = kind;
		fabric->rules_made = 1;
		fabric_unlock();
		return 0;
	}
	fabric_unlock();
	fprintf(stderr, "fake EFA: more than %d faults\n", RULES_MAX);
	return EINVAL;
}

void fault_clear(const char *kind)
{
	int which = kind ? find(kind, kinds, sizeof kinds / sizeof *kinds) : -1;

	for (int i = 0; i < RULES_MAX; i++)
		if (which < 0 || fabric->rules[i].kind == (uint32_t)which)
			fabric->rules[i].kind = F_NONE;
	if (which < 0 || which == F_GONE)
		for (uint32_t p = 0; p < PORTS_MAX; p++)
			fabric->ports[p].gone = 0; /* for engines that open it anew */
}

static bool matches(int32_t want, uint32_t is)
{
	return want < 0 || (uint32_t)want == is;
}

struct rule *fault_strikes(enum fault kind, uint32_t port, uint32_t from, int op, uint64_t dice)
{
	if (!fabric->rules_made)
		return NULL;
	for (int i = 0; i < RULES_MAX; i++) {
		struct rule *rule = &fabric->rules[i];

		if (rule->kind != (uint32_t)kind || !matches(rule->host, port / NICS_MAX) ||
		    !matches(rule->nic, port % NICS_MAX) || !matches(rule->from_host, from / NICS_MAX) ||
		    !matches(rule->from_nic, from % NICS_MAX) || (rule->op >= 0 && rule->op != op))
			continue;
		if (dice % 1000000 >= rule->ppm)
			continue;
		if (rule->skip > 0 && atomic_fetch_sub(&rule->skip, 1) > 0)
			continue;
		if (rule->left == 0)
			continue;
		if (rule->left > 0 && atomic_fetch_sub(&rule->left, 1) <= 0)
			continue;
		return rule;
	}
	return NULL;
}
