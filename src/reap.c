/*-------------------------------------------------------------------------
 *
 * reap.c
 *	  idem_reap: stores what time has decided, and turns the ring.
 *
 * Nothing depends on it for being right: claims decide by the same rules
 * whether or not a reaper ran.  It makes lapses visible as rows (unknown,
 * exhausted), and keeps the history to what is retained.
 *
 * A call settles at most max_records records and never waits: what another
 * session has in hand is skipped.  Which records are taken first is left to
 * chance, so that some which cannot be settled do not stand before the others for
 * ever.  Each batch runs in a subtransaction; if an error ends it, its records
 * are tried one by one, each in a subtransaction of its own, and those that
 * fail are reported with a WARNING and counted as skipped.
 *
 * Any number of reapers may run.  READ COMMITTED only: a reaper must see the
 * latest state.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "common/pg_prng.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "change.h"
#include "claim.h"
#include "failpoint.h"
#include "idempotency.h"

#define MAX_REAP			1000000

typedef struct ReapCounts
{
	int64		expired;		/* became unknown */
	int64		exhausted;		/* became failed */
	int64		skipped;
} ReapCounts;

/* A random sample of the records to settle. */
typedef struct Sample
{
	const IdemCatalog *cat;
	TimestampTz now;
	MemoryContext keep;
	text	  **keys;
	int64		room;
	int64		n;
	int64		seen;
} Sample;

static void
visit_lapsed(IdemRecord *rec, void *arg)
{
	Sample	   *sample = (Sample *) arg;
	int64		place;
	MemoryContext old;

	if (rec->status == IDEM_UNKNOWN ||
		!idem_settles(rec, idem_standing(rec, idem_policy_get(sample->cat, rec->operation), sample->now)))
		return;
	sample->seen++;
	if (sample->n < sample->room)
		place = sample->n++;
	else
		place = (int64) (pg_prng_double(&pg_global_prng_state) * sample->seen);
	if (place >= sample->room)
		return;
	old = MemoryContextSwitchTo(sample->keep);
	sample->keys[place] = (text *) DatumGetTextPCopy(PointerGetDatum(rec->key));
	MemoryContextSwitchTo(old);
}

typedef struct Settled
{
	IdemRecord	after;
	bool		changed;
	bool		notify;
} Settled;

static IdemChange
apply_settle(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg)
{
	Settled    *settled = (Settled *) arg;
	IdemStanding standing = idem_standing(rec, policy, now);

	settled->changed = idem_settles(rec, standing);
	if (!settled->changed)
		return IDEM_KEEP;
	if (standing == IDEM_STANDS_UNKNOWN)
		idem_become_unknown(rec, now);
	else
		idem_become_exhausted(rec, policy, now);
	settled->after = *rec;
	settled->notify = policy->notify;
	return standing == IDEM_STANDS_UNKNOWN ? IDEM_REPLACE : IDEM_MOVE;
}

static void
settle(IdemStore *st, text *key, ReapCounts *counts)
{
	Settled		settled = {.changed = false};

	if (!idem_change_now(st, key, apply_settle, &settled))
		counts->skipped++;
	else if (settled.changed)
	{
		bool		unknown = settled.after.status == IDEM_UNKNOWN;

		if (unknown)
			counts->expired++;
		else
			counts->exhausted++;
		if (settled.notify)
			idem_notify(unknown ? IDEM_EVENT_UNKNOWN : IDEM_EVENT_EXHAUSTED, &settled.after);
	}
}

/* ---- subtransactions ---- */

typedef struct Batch
{
	const IdemCatalog *cat;
	text	  **keys;
	int64		n;
	ReapCounts	counts;
} Batch;

static void
settle_batch(void *arg)
{
	Batch	   *batch = (Batch *) arg;
	IdemStore	st;

	idem_store_open(&st, batch->cat);
	for (int64 i = 0; i < batch->n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		settle(&st, batch->keys[i], &batch->counts);
		IDEM_FAILPOINT("lapse-settled");
	}
	idem_store_close(&st);
}

/*
 * Runs step in a subtransaction.  An error undoes it: false, with a WARNING if
 * loud.  A cancelled query or a shutdown goes through.
 */
bool
idem_try(void (*step) (void *), void *arg, bool loud)
{
	ErrorData  *error = idem_in_subtransaction(step, arg);

	if (error == NULL)
		return true;
	if (ERRCODE_TO_CATEGORY(error->sqlerrcode) == ERRCODE_OPERATOR_INTERVENTION)
		ReThrowError(error);
	if (loud)
		ereport(WARNING,
				(errcode(error->sqlerrcode),
				 errmsg("idempotency reaper passed over an error: %s", error->message)));
	FreeErrorData(error);
	return false;
}

static void
settle_all(const IdemCatalog *cat, text **keys, int64 n, ReapCounts *counts)
{
	Batch		batch = {.cat = cat, .keys = keys, .n = n};

	if (n == 0)
		return;
	if (idem_try(settle_batch, &batch, false))
	{
		*counts = batch.counts;
		return;
	}
	for (int64 i = 0; i < n; i++)
	{
		Batch		single = {.cat = cat, .keys = &keys[i], .n = 1};

		if (!idem_try(settle_batch, &single, true))
		{
			single.counts = (ReapCounts) {0};
			single.counts.skipped = 1;
		}
		counts->expired += single.counts.expired;
		counts->exhausted += single.counts.exhausted;
		counts->skipped += single.counts.skipped;
	}
}

/* Settles up to max records; *more tells whether some are left. */
static void
settle_lapses(const IdemCatalog *cat, int64 max, ReapCounts *counts, bool *more)
{
	Sample		sample = {.cat = cat, .now = idem_now(), .keep = CurrentMemoryContext, .room = max};

	sample.keys = (text **) MemoryContextAllocHuge(CurrentMemoryContext, sizeof(text *) * max);
	idem_store_scan_open(cat, visit_lapsed, &sample);
	settle_all(cat, sample.keys, sample.n, counts);
	*more = sample.seen > sample.n || counts->skipped > 0;
}

static void
reap_prologue(void)
{
	idem_write_prologue("idem_reap()");
	if (IsolationUsesXactSnapshot())
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_TRANSACTION_STATE),
				 errmsg("idem_reap() must run in READ COMMITTED")));
}

/*
 * idem_reap(max_records)
 */
PG_FUNCTION_INFO_V1(idem_reap);
Datum
idem_reap(PG_FUNCTION_ARGS)
{
	const IdemCatalog *cat;
	ReapCounts	counts = {0};
	IdemRingWork ring = {0};
	bool		more = false;
	Datum		values[6];
	bool		nulls[6] = {false};
	int32		max;

	reap_prologue();
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("max_records must not be null")));
	max = PG_GETARG_INT32(0);
	if (max < 0 || max > MAX_REAP)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"max_records\" must be 0 to %d", MAX_REAP)));
	if (max > 0)
	{
		cat = idem_catalog(fcinfo->flinfo->fn_oid);
		settle_lapses(cat, max, &counts, &more);
		idem_ring_turn(cat, idem_policy_get(cat, cstring_to_text(IDEM_DEFAULT_OPERATION))->retention,
					   idem_now(), &ring);
	}
	values[0] = Int64GetDatum(counts.expired);
	values[1] = Int64GetDatum(counts.exhausted);
	values[2] = Int64GetDatum(counts.skipped + ring.skipped);
	values[3] = Int64GetDatum(ring.purged);
	values[4] = Int64GetDatum(ring.rotated);
	values[5] = BoolGetDatum(more || ring.more);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(idem_result_desc(fcinfo), values, nulls)));
}
