/*-------------------------------------------------------------------------
 *
 * ring.c
 *	  The ring of finished records: which slice takes new ones, and turning it.
 *
 * idem_ring holds the state.  A slice goes
 *
 *		empty -> current -> draining -> closed -> empty
 *
 *	to			when									guarded by
 *	current		its predecessor is left					ring lock
 *	draining	it was current for half the retention,	ring lock
 *				and the next slice is empty
 *	closed		no transaction that adds to it is left	ShareLock on the slice
 *	empty		closed for the whole retention			AccessExclusiveLock on the slice, TRUNCATE
 *
 * The ring lock is ShareUpdateExclusiveLock on idem_ring, to the end of the
 * transaction; whoever does not get it leaves the work to its holder.
 *
 * Why no record is lost before its time.  An inserter locks the slice
 * (RowExclusiveLock, to the end of its transaction), which accepts all
 * invalidations sent before, and then asks once more which slice is current.
 * So who holds the lock on a slice that is no longer current got it before the
 * change was committed.  A slice becomes closed only by a later transaction that
 * gets a ShareLock on it: then those inserters are gone and no new one can
 * come.  closed_at is the time of that moment, so every record of the slice was
 * committed before closed_at, and is kept for the whole retention after.
 *
 * The current slice is read with the latest snapshot and remembered until a relcache
 * invalidation of idem_ring, which every change of it sends.  Probes never ask:
 * they read all slices.  No rows in idem_ring means: never turned, slice 1 is
 * current.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/sysattr.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

#include "failpoint.h"
#include "idempotency.h"

#define NATTS_RING		4

/* How long a purge tries to get its slice to itself: 400 times 250 us. */
#define PURGE_TRIES		400
#define PURGE_NAP_US	250

typedef enum SliceState
{
	SLICE_EMPTY,
	SLICE_CURRENT,
	SLICE_DRAINING,
	SLICE_CLOSED
} SliceState;

static const char *const state_names[] = {
	[SLICE_EMPTY] = "empty",
	[SLICE_CURRENT] = "current",
	[SLICE_DRAINING] = "draining",
	[SLICE_CLOSED] = "closed"
};

typedef struct Slice
{
	SliceState	state;
	TimestampTz opened_at;
	TimestampTz closed_at;
	ItemPointerData tid;		/* invalid: no row yet */
	bool		own;			/* row written by this transaction */
} Slice;

/* The rows of idem_ring, by number of the slice; [0] unused. */
typedef struct Ring
{
	const IdemCatalog *cat;
	Relation	rel;
	Slice		slices[IDEM_RING_SLICES + 1];
	bool		found;			/* are there rows? */
	bool		changed;
} Ring;

static int	current_slice = 0;	/* 0 = not known */
static Oid	ring_relid = InvalidOid;

/* Called from the invalidation callback: marks only. */
void
idem_ring_forget(Oid relid)
{
	if (!OidIsValid(relid) || relid == ring_relid)
		current_slice = 0;
}

/* ---- reading ---- */

static SliceState
state_code(Datum value)
{
	char	   *name = TextDatumGetCString(value);

	for (int i = 0; i < lengthof(state_names); i++)
		if (strcmp(name, state_names[i]) == 0)
			return (SliceState) i;
	elog(ERROR, "unexpected word in table idem_ring");
}

static void
take_slice(TupleTableSlot *slot, void *arg)
{
	Ring	   *ring = (Ring *) arg;
	Datum	   *v = slot->tts_values;
	bool	   *n = slot->tts_isnull;
	Slice	   *slice = &ring->slices[DatumGetInt16(v[0])];
	bool		isnull;

	slice->state = state_code(v[1]);
	slice->opened_at = n[2] ? IDEM_NO_TIME : DatumGetTimestampTz(v[2]);
	slice->closed_at = n[3] ? IDEM_NO_TIME : DatumGetTimestampTz(v[3]);
	slice->tid = slot->tts_tid;
	slice->own = TransactionIdIsCurrentTransactionId(DatumGetTransactionId(slot_getsysattr(slot,
																						   MinTransactionIdAttributeNumber,
																						   &isnull)));
	ring->found = true;
}

/* Reads the latest state; ring->rel is open.  False if there are no rows. */
static bool
read_ring(Ring *ring)
{
	if (RelationGetDescr(ring->rel)->natts != NATTS_RING)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"idem_ring\" does not fit the loaded library")));
	ring->found = false;
	idem_scan_latest(ring->rel, take_slice, ring);
	return ring->found;
}

static int
find_current(const Ring *ring)
{
	for (int i = 1; i <= IDEM_RING_SLICES; i++)
		if (ring->slices[i].state == SLICE_CURRENT)
			return i;
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("table \"idem_ring\" has no current slice")));
	return 0;					/* keep compiler quiet */
}

static int
read_current(const IdemCatalog *cat)
{
	Ring		ring = {.cat = cat};
	int			found = 1;

	ring.rel = table_open(cat->ring, AccessShareLock);
	if (read_ring(&ring))
		found = find_current(&ring);
	table_close(ring.rel, AccessShareLock);
	return found;
}

/*
 * The slice, 1 to IDEM_RING_SLICES, that takes new records.  An invalidation
 * that came in while we read is older than our snapshot, which was taken after the
 * lock that accepted it; so what we read is worth remembering.
 */
int
idem_ring_current(const IdemCatalog *cat)
{
	if (current_slice == 0 || ring_relid != cat->ring)
	{
		int			slice;

		ring_relid = cat->ring;
		slice = read_current(cat);
		current_slice = slice;
	}
	return current_slice;
}

/* ---- turning ---- */

static void
put_time(Datum *values, bool *nulls, int col, TimestampTz value)
{
	nulls[col] = value == IDEM_NO_TIME;
	values[col] = TimestampTzGetDatum(value);
}

/* Stores the state of a slice; all sessions hear of it at commit. */
static void
put_slice(Ring *ring, int number, SliceState state, TimestampTz opened_at, TimestampTz closed_at)
{
	Slice	   *slice = &ring->slices[number];
	Datum		v[NATTS_RING];
	bool		n[NATTS_RING] = {false};
	HeapTuple	tuple;

	v[0] = Int16GetDatum(number);
	v[1] = CStringGetTextDatum(state_names[state]);
	put_time(v, n, 2, opened_at);
	put_time(v, n, 3, closed_at);
	tuple = heap_form_tuple(RelationGetDescr(ring->rel), v, n);
	if (ItemPointerIsValid(&slice->tid))
		CatalogTupleUpdate(ring->rel, &slice->tid, tuple);
	else
		CatalogTupleInsert(ring->rel, tuple);

	slice->state = state;
	slice->opened_at = opened_at;
	slice->closed_at = closed_at;
	slice->tid = tuple->t_self;
	slice->own = true;
	ring->changed = true;
	CacheInvalidateRelcache(ring->rel);
	IDEM_FAILPOINT("slice-state-written");
	CommandCounterIncrement();
}

static void
first_turn(Ring *ring, TimestampTz now)
{
	put_slice(ring, 1, SLICE_CURRENT, now, IDEM_NO_TIME);
	for (int i = 2; i <= IDEM_RING_SLICES; i++)
		put_slice(ring, i, SLICE_EMPTY, IDEM_NO_TIME, IDEM_NO_TIME);
}

typedef struct Purge
{
	Ring	   *ring;
	int			number;
} Purge;

static void
truncate_slice(void *arg)
{
	Purge	   *purge = (Purge *) arg;
	Oid			table = purge->ring->cat->slices[purge->number];

	idem_run_as_owner(table,
					  psprintf("TRUNCATE TABLE ONLY %s",
							   quote_qualified_identifier(get_namespace_name(purge->ring->cat->schema),
														  get_rel_name(table))),
					  0, NULL, NULL, NULL);
	IDEM_FAILPOINT("slice-truncated");
}

/*
 * Locks the slice against everybody, if that can be had soon.  Probes hold their
 * lock for microseconds, but on a busy machine some session always does: so try
 * for a while.  A transaction that writes to the slice makes us give up.
 */
static bool
lock_slice(Oid table)
{
	for (int i = 0; i < PURGE_TRIES; i++)
	{
		if (ConditionalLockRelationOid(table, AccessExclusiveLock))
			return true;
		CHECK_FOR_INTERRUPTS();
		pg_usleep(PURGE_NAP_US);
	}
	return false;
}

/* Empties a slice if nobody uses it; keeps no lock if not. */
static bool
purge_slice(Ring *ring, int number)
{
	Purge		purge = {.ring = ring, .number = number};
	Oid			table = ring->cat->slices[number];

	if (!lock_slice(table))
		return false;
	if (idem_try(truncate_slice, &purge, true))
		return true;
	UnlockRelationOid(table, AccessExclusiveLock);
	return false;
}

/* Empties the slices that have been closed for the whole retention. */
static void
purge_slices(Ring *ring, int64 retention, TimestampTz now, IdemRingWork *work)
{
	for (int i = 1; i <= IDEM_RING_SLICES; i++)
	{
		if (ring->slices[i].state != SLICE_CLOSED || now - ring->slices[i].closed_at < retention)
			continue;
		if (purge_slice(ring, i))
		{
			put_slice(ring, i, SLICE_EMPTY, IDEM_NO_TIME, IDEM_NO_TIME);
			work->purged++;
		}
		else
		{
			work->skipped++;
			work->more = true;
		}
	}
}

/*
 * Closes slices that nobody adds to any more.  The clock is read after the lock:
 * what was committed into the slice was committed before.
 */
static void
close_drained(Ring *ring)
{
	for (int i = 1; i <= IDEM_RING_SLICES; i++)
	{
		Slice	   *slice = &ring->slices[i];

		if (slice->state != SLICE_DRAINING || slice->own ||
			!ConditionalLockRelationOid(ring->cat->slices[i], ShareLock))
			continue;
		UnlockRelationOid(ring->cat->slices[i], ShareLock);
		put_slice(ring, i, SLICE_CLOSED, slice->opened_at, idem_now());
	}
}

/* Opens the next slice when the current one is half a retention old. */
static void
advance(Ring *ring, int64 retention, TimestampTz now, IdemRingWork *work)
{
	int			current = find_current(ring);
	int			next = current % IDEM_RING_SLICES + 1;

	if (now - ring->slices[current].opened_at < retention / 2 ||
		ring->slices[next].state != SLICE_EMPTY)
		return;
	put_slice(ring, current, SLICE_DRAINING, ring->slices[current].opened_at, IDEM_NO_TIME);
	put_slice(ring, next, SLICE_CURRENT, now, IDEM_NO_TIME);
	work->rotated++;
}

/* Does what is due for the ring; never waits. */
void
idem_ring_turn(const IdemCatalog *cat, int64 retention, TimestampTz now, IdemRingWork *work)
{
	Ring		ring = {.cat = cat};

	if (!ConditionalLockRelationOid(cat->ring, ShareUpdateExclusiveLock))
	{
		work->skipped++;
		return;
	}
	ring.rel = table_open(cat->ring, NoLock);
	if (!read_ring(&ring))
		first_turn(&ring, now);
	purge_slices(&ring, retention, now, work);
	close_drained(&ring);
	advance(&ring, retention, now, work);
	table_close(ring.rel, ring.changed ? NoLock : ShareUpdateExclusiveLock);
}
