/*-------------------------------------------------------------------------
 *
 * catalog.c
 *	  OIDs of the extension's own tables.
 *
 * Tables are found by name in the schema of the SQL function that was called,
 * never through search_path, and remembered until a relcache invalidation
 * names one of them: DROP and CREATE EXTENSION in another session arrive here
 * with the locks that the next call takes.  "Absent" is never remembered, and the
 * callback only clears flags: it may run at any time, so it must not look
 * anything up.
 *
 * Also here: reading the small tables idem_ring and idem_policy.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/tableam.h"
#include "catalog/pg_proc.h"
#include "executor/tuptable.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "idempotency.h"

static IdemCatalog cache;
static bool cache_valid = false;

static const char *const slice_names[IDEM_RING_SLICES + 1] = {
	"idem_record_open", "idem_record_1", "idem_record_2", "idem_record_3", "idem_record_4"
};

static bool
is_ours(Oid relid)
{
	if (relid == cache.record || relid == cache.ring || relid == cache.policy || relid == cache.audit)
		return true;
	for (int i = 0; i <= IDEM_RING_SLICES; i++)
		if (relid == cache.slices[i])
			return true;
	return false;
}

/* relid InvalidOid means: everything. */
static void
relcache_callback(Datum arg, Oid relid)
{
	if (cache_valid && (!OidIsValid(relid) || is_ours(relid)))
		cache_valid = false;
	idem_ring_forget(relid);
	idem_policy_forget(relid);
}

void
idem_catalog_init(void)
{
	CacheRegisterRelcacheCallback(relcache_callback, (Datum) 0);
}

static Oid
table_in(Oid schema, const char *name)
{
	Oid			relid = get_relname_relid(name, schema);

	if (!OidIsValid(relid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("table \"%s\" of extension \"idempotency\" does not exist", name),
				 errhint("Drop and create the extension, or restore the name of its table.")));
	return relid;
}

/*
 * The tables beside the given SQL function.  Raises 42P01 if one is missing.
 * The answer stays readable; it may be outdated by the next lock taken, which
 * the table_open that follows then reports.
 */
const IdemCatalog *
idem_catalog(Oid function)
{
	Oid			schema;

	if (cache_valid)
		return &cache;

	schema = get_func_namespace(function);
	cache.schema = schema;
	cache.record = table_in(schema, "idem_record");
	for (int i = 0; i <= IDEM_RING_SLICES; i++)
		cache.slices[i] = table_in(schema, slice_names[i]);
	cache.ring = table_in(schema, "idem_ring");
	cache.policy = table_in(schema, "idem_policy");
	cache.audit = table_in(schema, "idem_audit");
	cache_valid = true;
	return &cache;
}

/*
 * Calls visit for every row of a small table of ours in its latest committed
 * state, our own changes included.  All versions are read and each is judged by the
 * latest snapshot: so a SERIALIZABLE transaction takes no predicate lock on the
 * table, which it would otherwise hold against every change of it.
 */
void
idem_scan_latest(Relation rel, void (*visit) (TupleTableSlot *slot, void *arg), void *arg)
{
	Snapshot	latest = RegisterSnapshot(GetLatestSnapshot());
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	TableScanDesc scan = table_beginscan(rel, SnapshotAny, 0, NULL);

	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		if (!table_tuple_satisfies_snapshot(rel, slot, latest))
			continue;
		slot_getallattrs(slot);
		visit(slot, arg);
	}
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	UnregisterSnapshot(latest);
}
