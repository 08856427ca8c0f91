/*-------------------------------------------------------------------------
 *
 * store.c
 *	  The rows of idem_record: finding, writing and moving them.
 *
 * The only file that touches the storage of idem_record, by table and index
 * access methods.  It knows nothing of policies and states; it takes and gives
 * IdemRecord structs.
 *
 * Protocol
 *
 *	1. A writer of key K holds the key lock of K (keylock.c) from its probe to
 *	   its last write, and writes nothing else to K afterwards in that call.
 *	2. A probe reads the open partition first, then every slice of the ring,
 *	   through the primary keys with a dirty snapshot.
 *	3. A row that another transaction in progress wrote or deleted is IN_DOUBT:
 *	   nothing final can be said until that transaction ends.
 *
 * Why a probe under the key lock finds the key if it is anywhere.  A row gets
 * new index entries, or moves, only in calls that hold the key lock.  So while we
 * hold it, all entries of K that will exist are in the indexes before our scan
 * begins; what can still happen is that their transactions commit or abort.  A
 * dirty snapshot sees a row from its insertion to the commit of its deletion.
 * Let a transaction W have moved K from the open partition to the ring.  If W is
 * in progress when we read the open partition, we see the old row, IN_DOUBT.  If
 * W had committed, the ring row is committed too, and we read the ring later.
 * Within one partition, an update leaves the old and the new version; whichever
 * entry the scan meets first, the old one is visible until the commit and the
 * new one from the start, and if the old one is gone when we look at it, the new
 * one's entry is in the same index from before our scan.
 *
 * Without the key lock the scan may miss a version whose entry came in behind
 * it, but the order open -> ring still cannot miss a move of the row.  A caller
 * without the lock may use only IN_DOUBT and finished PRESENT answers.
 *
 * The opposite move, ring -> open, is an operator's.  A probe without the lock may
 * miss the key then, and takes the lock, as for every miss.
 *
 * Locks: RowExclusiveLock on the open partition during a call and, once
 * written, to the end of the transaction; the same on the slice that a record
 * is moved to.  AccessShareLock on the slices that are probed, to the end of the
 * call and not while it waits, so that readers do not keep the reaper from
 * truncating them.  Order: key lock, open partition, slice.  Nothing here waits for a row or a
 * transaction while the key lock is held: writes report IDEM_ROW_BUSY instead.
 *
 * The unique indexes are the last line of defence.  A 23505 from them is a bug.
 *
 * Constraints of the table are not checked here: the structs are made by
 * state.c, and test/t checks the tables against the constraints.  Triggers and
 * foreign keys on these tables do not fire.  Indexes of any kind are kept up.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/wait_event.h"

#include "compat.h"
#include "failpoint.h"
#include "idempotency.h"
#include "record.h"

/* Raises 55000 where the table is not the one the library was built for. */
static void
check_shape(Relation rel)
{
	if (RelationGetDescr(rel)->natts < IDEM_RECORD_COLUMNS)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" does not fit the loaded library", RelationGetRelationName(rel)),
				 errhint("Run ALTER EXTENSION idempotency UPDATE, then reconnect.")));
}

static Relation
open_primary_key(Relation rel)
{
	Oid			index = relation_primary_key_compat(rel);

	if (!OidIsValid(index))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" has no primary key", RelationGetRelationName(rel)),
				 errhint("Restore the primary key on idempotency_key.")));
	return index_open(index, AccessShareLock);
}

static void
key_scankey(ScanKey scankey, const text *key)
{
	ScanKeyInit(scankey, 1, BTEqualStrategyNumber, F_TEXTEQ, PointerGetDatum(key));
}

/* ---- probing ---- */

/*
 * Is the row version committed before the transaction's snapshot?  Reading it
 * with that snapshot also takes the tuple's predicate lock in SERIALIZABLE.
 * There is no lock on index pages: a claim that finds nothing writes the key
 * itself, which no concurrent transaction can do as well, so the gap needs no guard,
 * and keys that share a page do not fail each other.
 */
static bool
visible_to_transaction(Relation rel, ItemPointer tid)
{
	TupleTableSlot *slot;
	bool		visible;

	if (!IsolationUsesXactSnapshot())
		return true;
	slot = table_slot_create(rel, NULL);
	visible = table_tuple_fetch_row_version(rel, tid, GetTransactionSnapshot(), slot);
	ExecDropSingleTupleTableSlot(slot);
	return visible;
}

static void
take_probe(Relation rel, TupleTableSlot *slot, const SnapshotData *dirty, IdemProbe *probe)
{
	bool		isnull;
	TransactionId xmin;

	idem_take_record(slot, &probe->rec);
	probe->tid = slot->tts_tid;
	probe->xid = TransactionIdIsValid(dirty->xmin) ? dirty->xmin : dirty->xmax;
	if (TransactionIdIsValid(probe->xid))
	{
		probe->presence = IDEM_IN_DOUBT;
		return;
	}
	probe->presence = IDEM_PRESENT;
	xmin = DatumGetTransactionId(slot_getsysattr(slot, MinTransactionIdAttributeNumber, &isnull));
	probe->own = TransactionIdIsCurrentTransactionId(xmin);
	probe->touched = TransactionIdIsValid(DatumGetTransactionId(slot_getsysattr(slot,
																				MaxTransactionIdAttributeNumber,
																				&isnull)));
	if (probe->own)
		probe->cmin = DatumGetCommandId(slot_getsysattr(slot, MinCommandIdAttributeNumber, &isnull));
	probe->snapshot_sees = probe->own || visible_to_transaction(rel, &probe->tid);
}

/* The partition, locked, its index not opened yet. */
static IdemPart *
open_part(IdemStore *st, int slice)
{
	IdemPart   *part = &st->parts[slice];
	MemoryContext old;

	if (part->rel != NULL)
		return part;
	old = MemoryContextSwitchTo(st->context);
	part->rel = table_open(st->cat->slices[slice],
						   slice == IDEM_SLICE_OPEN ? RowExclusiveLock : AccessShareLock);
	check_shape(part->rel);
	MemoryContextSwitchTo(old);
	return part;
}

/* Opens what a probe of the partition needs. */
static void
open_scan(IdemStore *st, IdemPart *part)
{
	MemoryContext old = MemoryContextSwitchTo(st->context);

	part->index = open_primary_key(part->rel);
	part->slot = table_slot_create(part->rel, NULL);
	InitDirtySnapshot(part->dirty);
	part->scan = index_beginscan_compat(part->rel, part->index, &part->dirty, 1);
	MemoryContextSwitchTo(old);
}

/*
 * Has the partition no row, for sure?  Asks for the size of its file, which a
 * writer extends before anything else, so the answer is as good as that of a
 * probe.  Worth while for slices that are likely to be empty: all but the current.
 */
static bool
is_empty(IdemStore *st, int slice, IdemPart *part)
{
	return part->scan == NULL && slice != IDEM_SLICE_OPEN &&
		slice != idem_ring_current(st->cat) &&
		RelationGetNumberOfBlocks(part->rel) == 0;
}

/*
 * Probes one partition; true if it holds a row of the key.  Keeps no buffer
 * pinned.  The access method may keep memory for its next scan, so it runs in the
 * store's context.
 */
static bool
probe_part(IdemStore *st, int slice, const text *key, IdemProbe *probe)
{
	IdemPart   *part = open_part(st, slice);
	MemoryContext old;
	ScanKeyData scankey;
	bool		found;

	IDEM_FAILPOINT("partition-opened");
	if (is_empty(st, slice, part))
		return false;
	if (part->scan == NULL)
		open_scan(st, part);
	old = MemoryContextSwitchTo(st->context);
	key_scankey(&scankey, key);
	index_rescan(part->scan, &scankey, 1, NULL, 0);
	found = index_getnext_slot(part->scan, ForwardScanDirection, part->slot);
	MemoryContextSwitchTo(old);
	if (found)
		take_probe(part->rel, part->slot, &part->dirty, probe);
	ExecClearTuple(part->slot);
	index_rescan(part->scan, &scankey, 1, NULL, 0);	/* lets go of pages */
	return found;
}

/*
 * Finds the key: the open partition, then every slice of the ring.  See the
 * head of this file for what the answer is worth with and without the key lock.
 * rec is in the current memory context.
 */
void
idem_store_probe(IdemStore *st, const text *key, IdemProbe *probe)
{
	memset(probe, 0, sizeof(*probe));
	for (int slice = IDEM_SLICE_OPEN; slice <= IDEM_RING_SLICES; slice++)
		if (probe_part(st, slice, key, probe))
			return;
	probe->presence = IDEM_ABSENT;
}

/*
 * A look at the current slice alone, without the key lock: where a replay is
 * most likely to be found.  True only for a finished record; anything else has to
 * be probed by the protocol.
 */
bool
idem_store_probe_current(IdemStore *st, const text *key, IdemProbe *probe)
{
	memset(probe, 0, sizeof(*probe));
	return probe_part(st, idem_ring_current(st->cat), key, probe) &&
		probe->presence == IDEM_PRESENT;
}

/*
 * In REPEATABLE READ and SERIALIZABLE: does the transaction's snapshot see a row
 * of the key, although the latest state has none?  Reads all versions, so that
 * no predicate lock on index pages is taken.
 */
static bool
snapshot_sees_in(Relation rel, const text *key, Snapshot snapshot)
{
	Relation	index = open_primary_key(rel);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	ScanKeyData scankey;
	IndexScanDesc scan;
	bool		found = false;

	key_scankey(&scankey, key);
	scan = index_beginscan_compat(rel, index, SnapshotAny, 1);
	index_rescan(scan, &scankey, 1, NULL, 0);
	while (!found && index_getnext_slot(scan, ForwardScanDirection, slot))
		found = table_tuple_satisfies_snapshot(rel, slot, snapshot);
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	index_close(index, AccessShareLock);
	return found;
}

bool
idem_store_snapshot_sees(const IdemCatalog *cat, const text *key)
{
	Snapshot	snapshot = GetTransactionSnapshot();
	bool		found = false;

	for (int i = 0; i <= IDEM_RING_SLICES && !found; i++)
	{
		Relation	rel = table_open(cat->slices[i], AccessShareLock);

		found = snapshot_sees_in(rel, key, snapshot);
		table_close(rel, AccessShareLock);
	}
	return found;
}

static HeapTupleHeader
read_partition(Relation rel, const text *key, Snapshot snapshot, TupleDesc desc)
{
	Relation	index = open_primary_key(rel);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	ScanKeyData scankey;
	IndexScanDesc scan;
	HeapTupleHeader row = NULL;

	key_scankey(&scankey, key);
	scan = index_beginscan_compat(rel, index, snapshot, 1);
	index_rescan(scan, &scankey, 1, NULL, 0);
	if (index_getnext_slot(scan, ForwardScanDirection, slot))
	{
		slot_getallattrs(slot);
		row = DatumGetHeapTupleHeader(HeapTupleGetDatum(heap_form_tuple(desc, slot->tts_values,
																		slot->tts_isnull)));
	}
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	index_close(index, AccessShareLock);
	return row;
}

/*
 * The whole row as the snapshot sees it, as a composite value without TOAST
 * pointers; NULL if there is none.
 */
HeapTupleHeader
idem_store_read(const IdemCatalog *cat, const text *key, Snapshot snapshot, TupleDesc desc)
{
	HeapTupleHeader row = NULL;

	for (int i = 0; i <= IDEM_RING_SLICES && row == NULL; i++)
	{
		Relation	rel = table_open(cat->slices[i], AccessShareLock);

		row = read_partition(rel, key, snapshot, desc);
		table_close(rel, AccessShareLock);
	}
	return row;
}

/* ---- writing ---- */

/* What writing to a partition needs, with its indexes open. */
typedef struct IdemWriter
{
	Relation	rel;			/* RowExclusiveLock, to the end of the transaction */
	EState	   *estate;
	ResultRelInfo *rri;
	TupleTableSlot *slot;
} IdemWriter;

/*
 * The writer of a partition whose lock, RowExclusiveLock, is held.
 */
static IdemWriter *
writer_of(IdemStore *st, int slice)
{
	IdemPart   *part = &st->parts[slice];
	IdemWriter *w = part->writer;
	MemoryContext old;

	if (w != NULL)
		return w;
	old = MemoryContextSwitchTo(st->context);
	w = (IdemWriter *) palloc(sizeof(IdemWriter));
	w->rel = table_open(st->cat->slices[slice], NoLock);
	check_shape(w->rel);
	w->estate = CreateExecutorState();
	w->rri = makeNode(ResultRelInfo);
	/* no range table: index 0 says so to whoever asks for changed columns */
	InitResultRelInfo(w->rri, w->rel, 0, NULL, 0);
	ExecOpenIndices(w->rri, false);
	w->slot = table_slot_create(w->rel, NULL);
	part->writer = w;
	MemoryContextSwitchTo(old);
	return w;
}

static void
writer_end(IdemWriter *w)
{
	ExecCloseIndices(w->rri);
	ExecDropSingleTupleTableSlot(w->slot);
	FreeExecutorState(w->estate);
	table_close(w->rel, NoLock);
	pfree(w->rri);
	pfree(w);
}

static void
writer_done(IdemWriter *w)
{
	ExecClearTuple(w->slot);
	ResetPerTupleExprContext(w->estate);
}

static void
insert_row(IdemWriter *w, const IdemRecord *rec)
{
	idem_put_record(w->slot, rec);
	table_tuple_insert(w->rel, w->slot, GetCurrentCommandId(true), 0, NULL);
	IDEM_FAILPOINT("row-inserted");
	insert_index_entries_compat(w->rri, w->slot, w->estate);
	IDEM_FAILPOINT("row-indexed");
	writer_done(w);
}

/*
 * Locks a row, if the policy says so only when that can be had at once.  (A
 * key-share lock of a foreign key does not stop an update.)
 */
static bool
lock_row_now(Relation rel, ItemPointer tid, LockTupleMode mode, LockWaitPolicy policy)
{
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	TM_FailureData tmfd;
	TM_Result	result;

	result = table_tuple_lock(rel, tid, GetLatestSnapshot(), slot, GetCurrentCommandId(true),
							  mode, policy, 0, &tmfd);
	ExecDropSingleTupleTableSlot(slot);
	return result == TM_Ok;
}

static IdemWrite
check_result(TM_Result result)
{
	if (result == TM_Ok)
		return IDEM_WRITTEN;
	if (result == TM_SelfModified || result == TM_Invisible)
		elog(ERROR, "record was changed by the current command");
	return IDEM_ROW_BUSY;
}

static TM_Result
delete_row(Relation rel, ItemPointer tid)
{
	TM_FailureData tmfd;
	TM_Result	result;

	CheckCmdReplicaIdentity(rel, CMD_DELETE);
	result = table_tuple_delete(rel, tid, GetCurrentCommandId(true), InvalidSnapshot,
								InvalidSnapshot, false, &tmfd, false);
	if (result == TM_BeingModified && lock_row_now(rel, tid, LockTupleExclusive, LockWaitSkip))
		result = table_tuple_delete(rel, tid, GetCurrentCommandId(true), InvalidSnapshot,
									InvalidSnapshot, true, &tmfd, false);
	return result;
}

/* ---- the store ---- */

/* Nothing is opened yet.  What will be lives in the current memory context. */
void
idem_store_open(IdemStore *st, const IdemCatalog *cat)
{
	memset(st, 0, sizeof(*st));
	st->cat = cat;
	st->context = CurrentMemoryContext;
}

/* After each key: makes what was written visible to the next command. */
void
idem_store_settle(IdemStore *st)
{
	if (st->wrote)
		CommandCounterIncrement();
	st->wrote = false;
}

/* Lets go of a partition, but for the lock where something was written. */
static void
close_part(IdemPart *part, LOCKMODE unlock)
{
	if (part->writer != NULL)
	{
		writer_end(part->writer);
		part->writer = NULL;
	}
	if (part->rel == NULL)
		return;
	if (part->scan != NULL)
	{
		index_endscan(part->scan);
		ExecDropSingleTupleTableSlot(part->slot);
		index_close(part->index, AccessShareLock);
		part->scan = NULL;
	}
	table_close(part->rel, unlock);
	part->rel = NULL;
}

/* Lets go of the ring, so as not to hold off truncation while we wait. */
static void
close_ring(IdemStore *st)
{
	for (int slice = 1; slice <= IDEM_RING_SLICES; slice++)
		close_part(&st->parts[slice], AccessShareLock);
}

void
idem_store_close(IdemStore *st)
{
	close_ring(st);
	close_part(&st->parts[IDEM_SLICE_OPEN],
			   st->wrote_open ? NoLock : RowExclusiveLock);
	idem_store_settle(st);
}

/* ---- writes, each needing the key lock and a probe under it ---- */

static IdemWriter *
open_writer(IdemStore *st)
{
	(void) open_part(st, IDEM_SLICE_OPEN);
	st->wrote = st->wrote_open = true;
	return writer_of(st, IDEM_SLICE_OPEN);
}

/* The probe was ABSENT. */
void
idem_store_insert_open(IdemStore *st, IdemRecord *rec)
{
	rec->slice = IDEM_SLICE_OPEN;
	insert_row(open_writer(st), rec);
}

/*
 * The probe was PRESENT in the open partition.  heap_update() cannot be told not
 * to wait, so a row that somebody may have locked is locked first, if that can be
 * had at once.  (A lock taken between probe and update is waited for.)
 */
IdemWrite
idem_store_update_open(IdemStore *st, IdemProbe *probe, IdemRecord *rec)
{
	IdemWriter *w = open_writer(st);
	TM_FailureData tmfd;
	TM_Result	result;

	CheckCmdReplicaIdentity(w->rel, CMD_UPDATE);
	if (probe->touched && !lock_row_now(w->rel, &probe->tid, LockTupleNoKeyExclusive, LockWaitSkip))
		return IDEM_ROW_BUSY;
	rec->slice = IDEM_SLICE_OPEN;
	idem_put_record(w->slot, rec);
	result = update_row_compat(w->rri, w->estate, &probe->tid, w->slot,
							   GetCurrentCommandId(true), &tmfd);
	IDEM_FAILPOINT("row-updated");
	writer_done(w);
	return check_result(result);
}

static IdemWrite
delete_open(IdemStore *st, IdemProbe *probe)
{
	IdemPart   *part = open_part(st, IDEM_SLICE_OPEN);

	st->wrote = st->wrote_open = true;
	return check_result(delete_row(part->rel, &probe->tid));
}

/*
 * The writer of the slice that takes new records, locked to the end of the
 * transaction.  ring.c tells why asking again under the lock is enough.
 */
static IdemWriter *
current_writer(IdemStore *st, int16 *slice)
{
	for (;;)
	{
		int			current = idem_ring_current(st->cat);
		Oid			table = st->cat->slices[current];

		*slice = current;
		if (st->parts[current].writer != NULL)
			return st->parts[current].writer;
		LockRelationOid(table, RowExclusiveLock);
		IDEM_FAILPOINT("slice-locked");
		if (idem_ring_current(st->cat) == current)
			return writer_of(st, current);
		UnlockRelationOid(table, RowExclusiveLock);
		CHECK_FOR_INTERRUPTS();
	}
}

/* The probe was ABSENT. */
void
idem_store_insert_finished(IdemStore *st, IdemRecord *rec)
{
	insert_row(current_writer(st, &rec->slice), rec);
	st->wrote = true;
}

/* Moves the record to the ring.  The probe was PRESENT in the open partition. */
IdemWrite
idem_store_finish(IdemStore *st, IdemProbe *probe, IdemRecord *rec)
{
	IdemWrite	written = delete_open(st, probe);

	IDEM_FAILPOINT("open-row-deleted");
	if (written == IDEM_WRITTEN)
		idem_store_insert_finished(st, rec);
	return written;
}

/*
 * Deletes a finished record.  The slice is locked to the end of the
 * transaction, then probed once more: it may have been truncated since the
 * caller's probe, which ends as IDEM_ROW_BUSY.
 */
static IdemWrite
delete_finished(IdemStore *st, IdemProbe *probe)
{
	int			slice = probe->rec.slice;
	IdemProbe	again;

	st->wrote = true;
	LockRelationOid(st->cat->slices[slice], RowExclusiveLock);
	memset(&again, 0, sizeof(again));
	if (!probe_part(st, slice, probe->rec.key, &again) ||
		again.presence != IDEM_PRESENT || !ItemPointerEquals(&again.tid, &probe->tid))
		return IDEM_ROW_BUSY;
	return check_result(delete_row(st->parts[slice].rel, &probe->tid));
}

/* Deletes a record wherever it is.  The probe was PRESENT. */
IdemWrite
idem_store_delete(IdemStore *st, IdemProbe *probe)
{
	return probe->rec.slice == IDEM_SLICE_OPEN ? delete_open(st, probe) : delete_finished(st, probe);
}

/* Moves a finished record back to the open partition.  The probe was PRESENT in the ring. */
IdemWrite
idem_store_reopen(IdemStore *st, IdemProbe *probe, IdemRecord *rec)
{
	IdemWrite	written = delete_finished(st, probe);

	IDEM_FAILPOINT("finished-row-deleted");
	if (written == IDEM_WRITTEN)
		idem_store_insert_open(st, rec);
	return written;
}

/* ---- looking through what is not finished ---- */

/*
 * Calls visit for every committed row of the open partition, and for our own,
 * that no transaction in progress has written or deleted.  The record, and the
 * memory context that visit runs in, last for the call.  Nothing is locked: whoever acts on a row probes it anew.
 * A dirty snapshot, so that SERIALIZABLE takes no lock on the whole table.
 */
void
idem_store_scan_open(const IdemCatalog *cat, IdemVisit visit, void *arg)
{
	Relation	rel = table_open(cat->slices[IDEM_SLICE_OPEN], AccessShareLock);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	MemoryContext row = AllocSetContextCreate(CurrentMemoryContext, "idempotency scan",
											  ALLOCSET_DEFAULT_SIZES);
	MemoryContext old;
	SnapshotData dirty;
	TableScanDesc scan;

	check_shape(rel);
	InitDirtySnapshot(dirty);
	scan = table_beginscan(rel, &dirty, 0, NULL);
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		IdemRecord	rec;

		CHECK_FOR_INTERRUPTS();
		if (TransactionIdIsValid(dirty.xmin) || TransactionIdIsValid(dirty.xmax))
			continue;
		old = MemoryContextSwitchTo(row);
		idem_take_record(slot, &rec);
		visit(&rec, arg);
		MemoryContextSwitchTo(old);
		MemoryContextReset(row);
	}
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, AccessShareLock);
	MemoryContextDelete(row);
}

/* ---- waiting, never with the key lock held ---- */

/* Waits for the transaction of an IN_DOUBT probe to end. */
void
idem_store_wait_xact(IdemStore *st, IdemProbe *probe)
{
	close_ring(st);
	IDEM_FAILPOINT("transaction-awaited");
	XactLockTableWait(probe->xid, open_part(st, IDEM_SLICE_OPEN)->rel, &probe->tid, XLTW_Update);
}

/*
 * Waits for the row lock that made a write IDEM_ROW_BUSY, and takes it.  For a
 * finished record it only gives way: its slice may be gone.
 */
void
idem_store_wait_row(IdemStore *st, IdemProbe *probe)
{
	close_ring(st);
	IDEM_FAILPOINT("row-lock-awaited");
	if (probe->rec.slice == IDEM_SLICE_OPEN)
	{
		st->wrote = st->wrote_open = true;
		(void) lock_row_now(open_part(st, IDEM_SLICE_OPEN)->rel, &probe->tid,
							LockTupleExclusive, LockWaitBlock);
		return;
	}
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, 1, PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
}
