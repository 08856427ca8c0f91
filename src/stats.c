/*-------------------------------------------------------------------------
 *
 * stats.c
 *	  idem_open_stats: what is in flight, per operation; behind view idem_stats.
 *
 * One pass over the open partition: cost follows the work in flight.  Every
 * record falls in exactly one bucket, by the standing that a claim at this time
 * would find, whether or not a reaper ran.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

#include "idempotency.h"

#define STATS_COLUMNS	11

typedef struct OperationStats
{
	char		operation[IDEM_MAX_KEY_BYTES + 1];	/* hash key */
	int64		count[IDEM_STANDS_SUCCEEDED + 1];	/* by IdemStanding */
	TimestampTz oldest[IDEM_STANDS_SUCCEEDED + 1];
} OperationStats;

typedef struct StatsPass
{
	const IdemCatalog *cat;
	TimestampTz now;
	HTAB	   *table;
} StatsPass;

/* Since when does the record stand as it does? */
static TimestampTz
standing_since(const IdemRecord *rec, IdemStanding standing)
{
	switch (standing)
	{
		case IDEM_LAPSED:
			return rec->lease_until;
		case IDEM_DUE:
			return rec->retry_at;
		case IDEM_STANDS_UNKNOWN:
			return rec->status == IDEM_UNKNOWN ? rec->updated_at : rec->lease_until;
		case IDEM_HELD:
			return rec->first_claimed_at;
		default:
			return rec->updated_at;
	}
}

static void
visit_stats(IdemRecord *rec, void *arg)
{
	StatsPass  *pass = (StatsPass *) arg;
	IdemStanding standing = idem_standing(rec, idem_policy_get(pass->cat, rec->operation), pass->now);
	TimestampTz since = standing_since(rec, standing);
	char		name[IDEM_MAX_KEY_BYTES + 1];
	OperationStats *stats;
	bool		found;

	text_to_cstring_buffer(rec->operation, name, sizeof(name));
	stats = (OperationStats *) hash_search(pass->table, name, HASH_ENTER, &found);
	if (!found)
	{
		memset(stats->count, 0, sizeof(stats->count));
		memset(stats->oldest, 0, sizeof(stats->oldest));
	}
	if (stats->count[standing]++ == 0 || since < stats->oldest[standing])
		stats->oldest[standing] = since;
}

static void
put_age(Datum *values, bool *nulls, int col, const OperationStats *stats, IdemStanding standing, TimestampTz now)
{
	nulls[col] = stats->count[standing] == 0;
	values[col] = nulls[col] ? (Datum) 0 :
		PointerGetDatum(idem_us_interval(Max(now - stats->oldest[standing], 0)));
}

static void
put_stats(ReturnSetInfo *rsinfo, const OperationStats *stats, TimestampTz now)
{
	Datum		v[STATS_COLUMNS];
	bool		n[STATS_COLUMNS] = {false};

	v[0] = CStringGetTextDatum(stats->operation);
	v[1] = Int64GetDatum(stats->count[IDEM_HELD]);
	v[2] = Int64GetDatum(stats->count[IDEM_LAPSED]);
	v[3] = Int64GetDatum(stats->count[IDEM_WAITING]);
	v[4] = Int64GetDatum(stats->count[IDEM_DUE]);
	v[5] = Int64GetDatum(stats->count[IDEM_STANDS_UNKNOWN]);
	v[6] = Int64GetDatum(stats->count[IDEM_STANDS_EXHAUSTED]);
	put_age(v, n, 7, stats, IDEM_HELD, now);
	put_age(v, n, 8, stats, IDEM_LAPSED, now);
	put_age(v, n, 9, stats, IDEM_DUE, now);
	put_age(v, n, 10, stats, IDEM_STANDS_UNKNOWN, now);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, v, n);
}

/*
 * idem_open_stats()
 */
PG_FUNCTION_INFO_V1(idem_open_stats);
Datum
idem_open_stats(PG_FUNCTION_ARGS)
{
	StatsPass	pass;
	HASHCTL		ctl;
	HASH_SEQ_STATUS seq;
	OperationStats *stats;

	InitMaterializedSRF(fcinfo, 0);
	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = IDEM_MAX_KEY_BYTES + 1;
	ctl.entrysize = sizeof(OperationStats);
	ctl.hcxt = CurrentMemoryContext;
	pass.cat = idem_catalog(fcinfo->flinfo->fn_oid);
	pass.now = idem_now();
	pass.table = hash_create("idempotency stats", 16, &ctl, HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);

	idem_store_scan_open(pass.cat, visit_stats, &pass);
	hash_seq_init(&seq, pass.table);
	while ((stats = (OperationStats *) hash_seq_search(&seq)) != NULL)
		put_stats((ReturnSetInfo *) fcinfo->resultinfo, stats, pass.now);
	PG_RETURN_NULL();
}
