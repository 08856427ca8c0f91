/*-------------------------------------------------------------------------
 *
 * policy_cache.c
 *	  Rows of idem_policy, remembered per session.
 *
 * Data: a hash table by operation in a memory context of its own, emptied when a
 * relcache invalidation of idem_policy has come in.  A trigger on the table
 * sends that invalidation for every change, so running sessions follow a commit
 * with their next call.  Operations without a row of their own share 'default'
 * and are remembered under their own name; long names are looked up each time,
 * and a full table is emptied, so memory is bounded whatever names come in.
 *
 * Also here: the triggers that guard the table.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "executor/tuptable.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "idempotency.h"

#define NATTS_POLICY		17
#define CACHED_NAME_BYTES	63
#define MAX_CACHED			256

enum
{
	POLICY_OPERATION,
	POLICY_LEASE,
	POLICY_MAX_ATTEMPTS,
	POLICY_MAX_ELAPSED,
	POLICY_BACKOFF_BASE,
	POLICY_BACKOFF_FACTOR,
	POLICY_BACKOFF_CAP,
	POLICY_JITTER,
	POLICY_ON_LEASE_EXPIRY,
	POLICY_STORE_REQUEST,
	POLICY_DIGEST_IGNORE,
	POLICY_RETRYABLE_CODES,
	POLICY_PERMANENT_CODES,
	POLICY_UNKNOWN_CODES,
	POLICY_MAX_RESULT_SIZE,
	POLICY_NOTIFY,
	POLICY_RETENTION
};

typedef struct PolicyEntry
{
	char		operation[CACHED_NAME_BYTES + 1];	/* hash key */
	IdemPolicy	policy;
} PolicyEntry;

static MemoryContext cache_context = NULL;
static HTAB *cache_table = NULL;
static bool cache_fresh = false;
static Oid	cache_relid = InvalidOid;
static bool replacing_default = false;

/* Called from the invalidation callback: marks only. */
void
idem_policy_forget(Oid relid)
{
	if (!OidIsValid(relid) || relid == cache_relid)
		cache_fresh = false;
}

static void
reset_cache(Oid relid)
{
	HASHCTL		ctl;

	if (cache_context == NULL)
		cache_context = AllocSetContextCreate(CacheMemoryContext, "idempotency policies",
											  ALLOCSET_SMALL_SIZES);
	cache_table = NULL;
	MemoryContextReset(cache_context);
	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = CACHED_NAME_BYTES + 1;
	ctl.entrysize = sizeof(PolicyEntry);
	ctl.hcxt = cache_context;
	cache_table = hash_create("idempotency policies", 16, &ctl, HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
	cache_relid = relid;
	cache_fresh = true;
}

static ArrayType *
array_or_null(Datum value, bool isnull)
{
	ArrayType  *array;

	if (isnull)
		return NULL;
	array = DatumGetArrayTypePCopy(value);
	return ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array)) == 0 ? NULL : array;
}

static int64
interval_or(Datum value, bool isnull, int64 otherwise)
{
	const Interval *span;

	if (isnull)
		return otherwise;
	span = DatumGetIntervalP(value);
	return (int64) span->day * USECS_PER_DAY + span->time;
}

static IdemJitter
jitter_code(Datum value)
{
	char	   *name = TextDatumGetCString(value);

	if (strcmp(name, "none") == 0)
		return IDEM_JITTER_NONE;
	return strcmp(name, "equal") == 0 ? IDEM_JITTER_EQUAL : IDEM_JITTER_FULL;
}

/* Arrays are allocated in the current memory context. */
static void
decode_policy(const Datum *v, const bool *n, IdemPolicy *policy)
{
	policy->lease = interval_or(v[POLICY_LEASE], false, 0);
	policy->max_attempts = DatumGetInt32(v[POLICY_MAX_ATTEMPTS]);
	policy->max_elapsed = interval_or(v[POLICY_MAX_ELAPSED], n[POLICY_MAX_ELAPSED], -1);
	policy->backoff_base = interval_or(v[POLICY_BACKOFF_BASE], false, 0);
	policy->backoff_factor = DatumGetFloat8(v[POLICY_BACKOFF_FACTOR]);
	policy->backoff_cap = interval_or(v[POLICY_BACKOFF_CAP], false, 0);
	policy->jitter = jitter_code(v[POLICY_JITTER]);
	policy->expiry_is_unknown = strcmp(TextDatumGetCString(v[POLICY_ON_LEASE_EXPIRY]), "unknown") == 0;
	policy->store_request = DatumGetBool(v[POLICY_STORE_REQUEST]);
	policy->digest_ignore = array_or_null(v[POLICY_DIGEST_IGNORE], n[POLICY_DIGEST_IGNORE]);
	policy->retryable_codes = array_or_null(v[POLICY_RETRYABLE_CODES], n[POLICY_RETRYABLE_CODES]);
	policy->permanent_codes = array_or_null(v[POLICY_PERMANENT_CODES], n[POLICY_PERMANENT_CODES]);
	policy->unknown_codes = array_or_null(v[POLICY_UNKNOWN_CODES], n[POLICY_UNKNOWN_CODES]);
	policy->max_result_size = DatumGetInt32(v[POLICY_MAX_RESULT_SIZE]);
	policy->notify = DatumGetBool(v[POLICY_NOTIFY]);
	policy->retention = interval_or(v[POLICY_RETENTION], n[POLICY_RETENTION], -1);
}

/* The row of an operation that is looked for, and the row 'default'. */
typedef struct PolicySearch
{
	const text *operation;
	IdemPolicy *policy;
	bool		found;			/* the operation's own row */
	bool		found_default;
} PolicySearch;

static bool
same_text(const text *a, const char *b, int len)
{
	return VARSIZE_ANY_EXHDR(a) == len && memcmp(VARDATA_ANY(a), b, len) == 0;
}

static void
visit_policy(TupleTableSlot *slot, void *arg)
{
	PolicySearch *search = (PolicySearch *) arg;
	text	   *name = DatumGetTextPP(slot->tts_values[POLICY_OPERATION]);

	if (same_text(name, VARDATA_ANY(search->operation), VARSIZE_ANY_EXHDR(search->operation)))
		search->found = true;
	else if (!search->found && same_text(name, IDEM_DEFAULT_OPERATION, strlen(IDEM_DEFAULT_OPERATION)))
		search->found_default = true;
	else
		return;
	decode_policy(slot->tts_values, slot->tts_isnull, search->policy);
}

/* Reads the operation's row, else 'default'. */
static void
read_policy(Oid relid, const text *operation, IdemPolicy *policy)
{
	Relation	rel = table_open(relid, AccessShareLock);
	PolicySearch search = {.operation = operation, .policy = policy};

	if (RelationGetDescr(rel)->natts != NATTS_POLICY)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"idem_policy\" does not fit the loaded library")));
	idem_scan_latest(rel, visit_policy, &search);
	if (!search.found && !search.found_default)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"idem_policy\" has no row \"%s\"", IDEM_DEFAULT_OPERATION)));
	table_close(rel, AccessShareLock);
}

static ArrayType *
copy_array(ArrayType *array)
{
	return array == NULL ? NULL : (ArrayType *) DatumGetArrayTypePCopy(PointerGetDatum(array));
}

static const IdemPolicy *
copy_policy(const IdemPolicy *policy)
{
	IdemPolicy *copy = (IdemPolicy *) palloc(sizeof(IdemPolicy));

	*copy = *policy;
	copy->digest_ignore = copy_array(policy->digest_ignore);
	copy->retryable_codes = copy_array(policy->retryable_codes);
	copy->permanent_codes = copy_array(policy->permanent_codes);
	copy->unknown_codes = copy_array(policy->unknown_codes);
	return copy;
}

/*
 * The policy of an operation, in the current memory context.
 */
const IdemPolicy *
idem_policy_get(const IdemCatalog *cat, const text *operation)
{
	int			len = VARSIZE_ANY_EXHDR(operation);
	char		name[CACHED_NAME_BYTES + 1];
	PolicyEntry *entry;
	IdemPolicy	policy;
	MemoryContext old;

	if (len > CACHED_NAME_BYTES)
	{
		read_policy(cat->policy, operation, &policy);
		return copy_policy(&policy);
	}
	memset(name, 0, sizeof(name));
	memcpy(name, VARDATA_ANY(operation), len);

	if (!cache_fresh || cache_relid != cat->policy ||
		hash_get_num_entries(cache_table) >= MAX_CACHED)
		reset_cache(cat->policy);
	entry = (PolicyEntry *) hash_search(cache_table, name, HASH_FIND, NULL);
	if (entry == NULL)
	{
		/* an invalidation that comes in here leaves the cache stale, not fresh */
		old = MemoryContextSwitchTo(cache_context);
		read_policy(cat->policy, operation, &policy);
		MemoryContextSwitchTo(old);
		entry = (PolicyEntry *) hash_search(cache_table, name, HASH_ENTER, NULL);
		entry->policy = policy;
	}
	return copy_policy(&entry->policy);
}

static bool
is_default(HeapTuple tuple, TupleDesc desc)
{
	bool		isnull;
	Datum		value = heap_getattr(tuple, POLICY_OPERATION + 1, desc, &isnull);

	return !isnull && strcmp(TextDatumGetCString(value), IDEM_DEFAULT_OPERATION) == 0;
}

static void
delete_default(Relation rel)
{
	char	   *sql = psprintf("DELETE FROM %s WHERE operation OPERATOR(pg_catalog.=) '%s'",
							   quote_qualified_identifier(get_namespace_name(RelationGetNamespace(rel)),
														  RelationGetRelationName(rel)),
							   IDEM_DEFAULT_OPERATION);

	replacing_default = true;
	PG_TRY();
	{
		SPI_connect();
		if (SPI_execute(sql, false, 0) != SPI_OK_DELETE)
			elog(ERROR, "could not replace the default policy");
		SPI_finish();
	}
	PG_FINALLY();
	{
		replacing_default = false;
	}
	PG_END_TRY();
}

/*
 * Trigger: the row 'default' cannot go away.  Inserting it replaces it, so that
 * the rows of a dump can be loaded into a new installation.
 */
PG_FUNCTION_INFO_V1(idem_policy_guard);
Datum
idem_policy_guard(PG_FUNCTION_ARGS)
{
	TriggerData *trig = (TriggerData *) fcinfo->context;
	TupleDesc	desc;

	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("idem_policy_guard must be called as a trigger")));
	desc = RelationGetDescr(trig->tg_relation);

	if (TRIGGER_FIRED_BY_INSERT(trig->tg_event))
	{
		if (is_default(trig->tg_trigtuple, desc))
			delete_default(trig->tg_relation);
		return PointerGetDatum(trig->tg_trigtuple);
	}
	if (TRIGGER_FIRED_BY_UPDATE(trig->tg_event) &&
		(!is_default(trig->tg_trigtuple, desc) || is_default(trig->tg_newtuple, desc)))
		return PointerGetDatum(trig->tg_newtuple);
	if (TRIGGER_FIRED_BY_DELETE(trig->tg_event) &&
		(replacing_default || !is_default(trig->tg_trigtuple, desc)))
		return PointerGetDatum(trig->tg_trigtuple);

	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("policy \"%s\" cannot be removed", IDEM_DEFAULT_OPERATION),
			 errhint("Change its columns with UPDATE instead.")));
	PG_RETURN_NULL();			/* keep compiler quiet */
}

/* Trigger, also of idem_ring: tells every session that the table has changed, at commit. */
PG_FUNCTION_INFO_V1(idem_policy_changed);
Datum
idem_policy_changed(PG_FUNCTION_ARGS)
{
	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("idem_policy_changed must be called as a trigger")));
	CacheInvalidateRelcache(((TriggerData *) fcinfo->context)->tg_relation);
	return PointerGetDatum(NULL);
}
