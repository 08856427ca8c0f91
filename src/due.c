/*-------------------------------------------------------------------------
 *
 * due.c
 *	  idem_claim_due: work for recovery workers, oldest due first.
 *
 * One pass over the open partition keeps the oldest candidates in a bounded
 * heap; each is then claimed by the ordinary protocol, without waiting, and
 * passed over if another session has it.  If all candidates were passed over,
 * the next pass begins behind them.  No plan is involved: never more than
 * asked is claimed.  Cost follows the work in flight, not the history.
 *
 * Candidates are retries that are due and leases that are over, of records whose
 * owner the caller is a member of, and whose request is stored (the policy says
 * store_request): without it the worker could not run them.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "funcapi.h"
#include "lib/binaryheap.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "claim.h"
#include "idempotency.h"

#define MAX_CLAIM_DUE	10000
#define SPARE_CANDIDATES	64

typedef struct Candidate
{
	TimestampTz due;
	text	   *key;
} Candidate;

typedef struct DuePass
{
	const IdemCatalog *cat;
	text	   *operation;		/* NULL = all */
	TimestampTz now;
	bool		bounded;		/* only candidates behind "behind" */
	Candidate	behind;
	MemoryContext keep;
	binaryheap *heap;			/* youngest on top */
	int			room;
	bool		left_out;		/* did the heap overflow? */
} DuePass;

static int
compare_keys(const text *a, const text *b)
{
	int			la = VARSIZE_ANY_EXHDR(a);
	int			lb = VARSIZE_ANY_EXHDR(b);
	int			c = memcmp(VARDATA_ANY(a), VARDATA_ANY(b), Min(la, lb));

	return c != 0 ? c : la - lb;
}

static int
compare_candidates(const Candidate *a, const Candidate *b)
{
	if (a->due != b->due)
		return a->due < b->due ? -1 : 1;
	return compare_keys(a->key, b->key);
}

static int
heap_order(Datum a, Datum b, void *arg)
{
	return compare_candidates((Candidate *) DatumGetPointer(a), (Candidate *) DatumGetPointer(b));
}

static int
qsort_order(const void *a, const void *b)
{
	return compare_candidates(*(Candidate *const *) a, *(Candidate *const *) b);
}

/* When did the record become claimable?  IDEM_NO_TIME if it is not. */
static TimestampTz
due_since(const IdemRecord *rec, const IdemPolicy *policy, TimestampTz now)
{
	switch (idem_standing(rec, policy, now))
	{
		case IDEM_LAPSED:
			return rec->lease_until;
		case IDEM_DUE:
			return rec->retry_at;
		default:
			return IDEM_NO_TIME;
	}
}

static void
keep_candidate(DuePass *pass, const Candidate *candidate)
{
	MemoryContext old;
	Candidate  *copy;

	if (pass->heap->bh_size >= pass->room)
	{
		pass->left_out = true;
		if (compare_candidates(candidate, (Candidate *) DatumGetPointer(binaryheap_first(pass->heap))) > 0)
			return;
		(void) binaryheap_remove_first(pass->heap);
	}
	old = MemoryContextSwitchTo(pass->keep);
	copy = (Candidate *) palloc(sizeof(Candidate));
	copy->due = candidate->due;
	copy->key = (text *) DatumGetTextPCopy(PointerGetDatum(candidate->key));
	binaryheap_add(pass->heap, PointerGetDatum(copy));
	MemoryContextSwitchTo(old);
}

static bool
is_operation(const DuePass *pass, const IdemRecord *rec)
{
	return pass->operation == NULL || compare_keys(pass->operation, rec->operation) == 0;
}

static void
visit_due(IdemRecord *rec, void *arg)
{
	DuePass    *pass = (DuePass *) arg;
	const IdemPolicy *policy;
	Candidate	candidate;

	if ((rec->status != IDEM_PROCESSING && rec->status != IDEM_RETRYABLE_FAILED) ||
		!is_operation(pass, rec))
		return;
	policy = idem_policy_get(pass->cat, rec->operation);
	candidate.due = due_since(rec, policy, pass->now);
	candidate.key = rec->key;
	if (candidate.due == IDEM_NO_TIME || !idem_is_owner(rec->owner) ||
		(rec->request_json == NULL && !policy->store_request))
		return;
	if (pass->bounded && compare_candidates(&candidate, &pass->behind) <= 0)
		return;
	keep_candidate(pass, &candidate);
}

/* Candidates of one pass, oldest first; *n is their number. */
static Candidate **
find_candidates(DuePass *pass, int *n)
{
	Candidate **list;

	pass->heap = binaryheap_allocate(pass->room, heap_order, NULL);
	pass->left_out = false;
	idem_store_scan_open(pass->cat, visit_due, pass);
	*n = pass->heap->bh_size;
	list = (Candidate **) palloc(sizeof(Candidate *) * Max(*n, 1));
	for (int i = 0; i < *n; i++)
		list[i] = (Candidate *) DatumGetPointer(pass->heap->bh_nodes[i]);
	qsort(list, *n, sizeof(Candidate *), qsort_order);
	return list;
}

static void
put_claim(FunctionCallInfo fcinfo, text *key, struct varlena *request, const IdemAnswer *answer)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	Datum		values[2 + IDEM_ANSWER_COLUMNS];
	bool		nulls[2 + IDEM_ANSWER_COLUMNS];

	values[0] = PointerGetDatum(key);
	nulls[0] = false;
	values[1] = PointerGetDatum(request);
	nulls[1] = request == NULL;
	idem_answer_columns(answer, values + 2, nulls + 2);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/* Claims candidates until "left" is 0; returns what is left. */
static int
claim_candidates(FunctionCallInfo fcinfo, DuePass *pass, int64 lease, int left)
{
	int			n;
	Candidate **list = find_candidates(pass, &n);

	for (int i = 0; i < n && left > 0; i++)
	{
		IdemAnswer	answer;
		struct varlena *request;

		CHECK_FOR_INTERRUPTS();
		if (idem_claim_if_due(pass->cat, list[i]->key, lease, &answer, &request))
		{
			put_claim(fcinfo, list[i]->key, request, &answer);
			left--;
		}
	}
	if (n > 0)
	{
		pass->bounded = true;
		pass->behind = *list[n - 1];
	}
	return left;
}

/*
 * idem_claim_due(operation, max_records, lease)
 */
PG_FUNCTION_INFO_V1(idem_claim_due);
Datum
idem_claim_due(PG_FUNCTION_ARGS)
{
	DuePass		pass = {0};
	int64		lease = 0;
	int			left;

	idem_write_prologue("idem_claim_due()");
	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("max_records must not be null")));
	left = PG_GETARG_INT32(1);
	if (left < 0 || left > MAX_CLAIM_DUE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"max_records\" must be 0 to %d", MAX_CLAIM_DUE)));
	if (!PG_ARGISNULL(2))
		lease = idem_interval_us(PG_GETARG_INTERVAL_P(2), "lease", 1, IDEM_MAX_LEASE_US);
	InitMaterializedSRF(fcinfo, 0);

	pass.cat = idem_catalog(fcinfo->flinfo->fn_oid);
	pass.operation = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);
	pass.now = idem_now();
	pass.keep = CurrentMemoryContext;
	pass.room = 2 * left + SPARE_CANDIDATES;
	if (left > 0)
	{
		do
			left = claim_candidates(fcinfo, &pass, lease, left);
		while (left > 0 && pass.left_out);
	}
	PG_RETURN_NULL();
}
