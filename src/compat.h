/*-------------------------------------------------------------------------
 *
 * compat.h
 *	  Everything that differs between the supported PostgreSQL majors.
 *
 * This is the only file that looks at PG_VERSION_NUM.  Wrappers carry the
 * suffix _compat and have the newest signature that the project needs.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_COMPAT_H
#define IDEM_COMPAT_H

#include "access/genam.h"
#include "access/tableam.h"
#include "executor/executor.h"
#include "utils/acl.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#if PG_VERSION_NUM < 150000
#error "idempotency needs PostgreSQL 15 or later"
#endif

#if PG_VERSION_NUM < 160000
#include "catalog/pg_class.h"
#include "catalog/pg_proc.h"
#else
#include "catalog/pg_proc_d.h"
#endif

static inline IndexScanDesc
index_beginscan_compat(Relation heap, Relation index, Snapshot snapshot, int nkeys)
{
#if PG_VERSION_NUM >= 190000
	return index_beginscan(heap, index, snapshot, NULL, nkeys, 0, 0);
#elif PG_VERSION_NUM >= 180000
	return index_beginscan(heap, index, snapshot, NULL, nkeys, 0);
#else
	return index_beginscan(heap, index, snapshot, nkeys, 0);
#endif
}

static inline Oid
relation_primary_key_compat(Relation rel)
{
#if PG_VERSION_NUM >= 180000
	return RelationGetPrimaryKeyIndex(rel, false);
#else
	return RelationGetPrimaryKeyIndex(rel);
#endif
}

static inline AclResult
proc_aclcheck_compat(Oid proc, Oid role, AclMode mode)
{
#if PG_VERSION_NUM >= 160000
	return object_aclcheck(ProcedureRelationId, proc, role, mode);
#else
	return pg_proc_aclcheck(proc, role, mode);
#endif
}

/*
 * Updates a row, waiting for locks, then its index entries.  Returns what
 * table_tuple_update() returned; entries are made for TM_Ok only.
 */
static inline TM_Result
update_row_compat(ResultRelInfo *rri, EState *estate, ItemPointer tid, TupleTableSlot *slot,
				  CommandId cid, TM_FailureData *tmfd)
{
	Relation	rel = rri->ri_RelationDesc;
	LockTupleMode lockmode;
	TM_Result	result;
#if PG_VERSION_NUM >= 160000
	TU_UpdateIndexes indexes = TU_None;

	result = table_tuple_update(rel, tid, slot, cid, InvalidSnapshot, InvalidSnapshot,
								true, tmfd, &lockmode, &indexes);
	if (result == TM_Ok && indexes != TU_None && rri->ri_NumIndices > 0)
		ExecInsertIndexTuples(rri, slot, estate, true, false, NULL, NIL,
							  indexes == TU_Summarizing);
#else
	bool		indexes = false;

	result = table_tuple_update(rel, tid, slot, cid, InvalidSnapshot, InvalidSnapshot,
								true, tmfd, &lockmode, &indexes);
	if (result == TM_Ok && indexes && rri->ri_NumIndices > 0)
		ExecInsertIndexTuples(rri, slot, estate, true, false, NULL, NIL);
#endif
	return result;
}

static inline void
insert_index_entries_compat(ResultRelInfo *rri, TupleTableSlot *slot, EState *estate)
{
	if (rri->ri_NumIndices == 0)
		return;
#if PG_VERSION_NUM >= 160000
	ExecInsertIndexTuples(rri, slot, estate, false, false, NULL, NIL, false);
#else
	ExecInsertIndexTuples(rri, slot, estate, false, false, NULL, NIL);
#endif
}

/* Does the interval hold infinity?  Intervals are always finite before 17. */
static inline bool
interval_is_infinite_compat(const Interval *span)
{
#if PG_VERSION_NUM >= 170000
	return INTERVAL_NOT_FINITE(span);
#else
	return false;
#endif
}

#endif							/* IDEM_COMPAT_H */
