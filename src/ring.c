/*-------------------------------------------------------------------------
 *
 * ring.c
 *	  Which slice of the ring takes new records.
 *
 * idem_ring is read with the latest snapshot and remembered until a relcache
 * invalidation of idem_ring, which every change of it sends.  Only inserters
 * ask.  They lock the slice and ask again (store.c): once the lock is held,
 * a slice that stopped being current before is known to have done so, and one
 * that stops later is not closed before the inserter's transaction ends, since
 * closing needs a lock that conflicts.  Probes never ask: they read all slices.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "idempotency.h"

#define ANUM_RING_SLICE		1
#define ANUM_RING_STATE		2

static int	current_slice = 0;	/* 0 = not known */
static Oid	ring_relid = InvalidOid;

void
idem_ring_forget(Oid relid)
{
	if (!OidIsValid(relid) || relid == ring_relid)
		current_slice = 0;
}

static int
read_current(Oid relid)
{
	Relation	rel = table_open(relid, AccessShareLock);
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	HeapTuple	tuple;
	int			found = 1;		/* no rows: never rotated */

	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		bool		isnull;
		Datum		state = heap_getattr(tuple, ANUM_RING_STATE, RelationGetDescr(rel), &isnull);

		if (strcmp(TextDatumGetCString(state), "current") == 0)
			found = DatumGetInt16(heap_getattr(tuple, ANUM_RING_SLICE, RelationGetDescr(rel), &isnull));
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
	return found;
}

/* The slice, 1 to IDEM_RING_SLICES, that takes new records now. */
int
idem_ring_current(const IdemCatalog *cat)
{
	while (current_slice == 0 || ring_relid != cat->ring)
	{
		int			slice;

		ring_relid = cat->ring;
		slice = read_current(cat->ring);

		/*
		 * An invalidation that came in while we read has set current_slice
		 * to 0 before this line, and is overwritten; but the snapshot was
		 * taken after the lock that accepted it.
		 */
		current_slice = slice;
	}
	return current_slice;
}
