/*-------------------------------------------------------------------------
 *
 * operator.c
 *	  What a person does with a record: idem_retry, idem_retry_many,
 *	  idem_resolve, idem_revoke, idem_forget.
 *
 *	call		stands as								becomes
 *	retry		unknown, failed, exhausted, waiting		retryable_failed, due now
 *	resolve		unknown									succeeded or failed
 *	revoke		processing as stored					processing, lease over, token dead
 *	forget		anything but held or lapsed				no record
 *
 * Anything else is ID003.  "Stands as" is state.c's, so it makes no difference
 * whether a reaper has stored a lapse; but for revoke, which ends what only a stored
 * token can do.  Each change writes one row of idem_audit
 * in the same transaction; a reason is mandatory.  Having EXECUTE is the right
 * to act on records of every role.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"

#include "change.h"
#include "claim.h"
#include "finish.h"
#include "failpoint.h"
#include "idempotency.h"

#define MAX_REASON_BYTES	8192
#define MAX_RETRY_MANY		100000

typedef struct OperatorArgs
{
	/* resolve only */
	bool		succeeded;
	struct varlena *json;
	struct varlena *body;
	struct varlena *code;
	struct varlena *message;
	/* bulk: leave a record in another state alone instead of raising */
	bool		quiet;
	/* answer */
	IdemRecord	before;
	IdemRecord	after;
	bool		changed;
} OperatorArgs;

/* ---- arguments ---- */

static text *
reason_arg(FunctionCallInfo fcinfo, int n)
{
	text	   *reason;
	char	   *blank;

	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("reason must not be null")));
	reason = PG_GETARG_TEXT_PP(n);
	blank = text_to_cstring(reason);
	if (blank[strspn(blank, " \t\r\n")] == '\0' || VARSIZE_ANY_EXHDR(reason) > MAX_REASON_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("reason must be 1 to %d bytes of text", MAX_REASON_BYTES)));
	return reason;
}

/* ---- changes ---- */

static IdemChange
wrong_state(OperatorArgs *args, const char *problem)
{
	if (args->quiet)
		return IDEM_KEEP;
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_WRONG_STATE),
			 errmsg("idempotency key %s", problem)));
	return IDEM_KEEP;			/* keep compiler quiet */
}

static IdemChange
changed(OperatorArgs *args, const IdemRecord *rec, IdemChange change)
{
	args->after = *rec;
	args->changed = true;
	return change;
}

static bool
retried_already(const IdemRecord *rec, IdemStanding standing)
{
	return standing == IDEM_DUE && rec->limits_from_attempt > 0 &&
		rec->attempts == rec->limits_from_attempt;
}

static IdemChange
apply_retry(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg)
{
	OperatorArgs *args = (OperatorArgs *) arg;
	IdemStanding standing = idem_standing(rec, policy, now);
	bool		finished = rec->slice != IDEM_SLICE_OPEN;

	args->before = *rec;
	args->changed = false;
	if (standing == IDEM_HELD)
		return wrong_state(args, "is being processed");
	if (standing == IDEM_LAPSED || retried_already(rec, standing))
		return wrong_state(args, "can be claimed already");
	if (standing == IDEM_STANDS_SUCCEEDED)
		return wrong_state(args, "has succeeded");
	idem_become_retried(rec, now);
	return changed(args, rec, finished ? IDEM_REOPEN : IDEM_REPLACE);
}

static IdemChange
apply_resolve(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg)
{
	OperatorArgs *args = (OperatorArgs *) arg;

	args->before = *rec;
	args->changed = false;
	if (idem_standing(rec, policy, now) != IDEM_STANDS_UNKNOWN)
		return wrong_state(args, "is not of unknown outcome");
	idem_check_result(policy, args->json, args->body);
	idem_bury_token(rec);
	if (args->succeeded)
		idem_become_succeeded(rec, now, args->json, args->body);
	else
	{
		if (args->code != NULL || args->message != NULL)
		{
			rec->error_code = args->code;
			rec->error_message = args->message;
		}
		idem_become_failed(rec, now);
	}
	return changed(args, rec, IDEM_MOVE);
}

static IdemChange
apply_revoke(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg)
{
	OperatorArgs *args = (OperatorArgs *) arg;

	args->before = *rec;
	args->changed = false;
	if (rec->status != IDEM_PROCESSING)
		return wrong_state(args, "is not being processed");
	idem_end_lease(rec, now);
	return changed(args, rec, IDEM_REPLACE);
}

static IdemChange
apply_forget(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg)
{
	OperatorArgs *args = (OperatorArgs *) arg;
	IdemStanding standing = idem_standing(rec, policy, now);

	args->before = *rec;
	args->changed = false;
	if (standing == IDEM_HELD || standing == IDEM_LAPSED)
		return wrong_state(args, "is being processed");
	return changed(args, rec, IDEM_REMOVE);
}

/* Runs the change and its audit.  Raises ID002 where there is no record. */
static void
operate(FunctionCallInfo fcinfo, text *key, const char *action, text *reason,
		IdemApply apply, OperatorArgs *args)
{
	const IdemCatalog *cat = idem_catalog(fcinfo->flinfo->fn_oid);
	IdemStore	st;
	IdemProbe	probe;
	bool		gone = apply == apply_forget;

	idem_store_open(&st, cat);
	if (!idem_change_any(&st, key, apply, args, &probe))
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_NO_SUCH_KEY),
				 errmsg("idempotency key does not exist")));
	idem_store_close(&st);
	IDEM_FAILPOINT("operator-acted");
	idem_audit(cat, action, reason, &args->before,
			   gone ? NULL : idem_status_name(args->after.status),
			   gone ? -1 : args->after.attempts);
}

/*
 * idem_retry(key, reason)
 */
PG_FUNCTION_INFO_V1(idem_retry);
Datum
idem_retry(PG_FUNCTION_ARGS)
{
	OperatorArgs args = {0};
	text	   *key;

	idem_write_prologue("idem_retry()");
	key = idem_key_arg(fcinfo);
	operate(fcinfo, key, "retry", reason_arg(fcinfo, 1), apply_retry, &args);
	PG_RETURN_TEXT_P(cstring_to_text(idem_status_name(args.after.status)));
}

/*
 * idem_revoke(key, reason)
 */
PG_FUNCTION_INFO_V1(idem_revoke);
Datum
idem_revoke(PG_FUNCTION_ARGS)
{
	OperatorArgs args = {0};
	text	   *key;

	idem_write_prologue("idem_revoke()");
	key = idem_key_arg(fcinfo);
	operate(fcinfo, key, "revoke", reason_arg(fcinfo, 1), apply_revoke, &args);
	PG_RETURN_TEXT_P(cstring_to_text(idem_status_name(args.after.status)));
}

/*
 * idem_forget(key, reason)
 */
PG_FUNCTION_INFO_V1(idem_forget);
Datum
idem_forget(PG_FUNCTION_ARGS)
{
	OperatorArgs args = {0};
	text	   *key;

	idem_write_prologue("idem_forget()");
	key = idem_key_arg(fcinfo);
	operate(fcinfo, key, "forget", reason_arg(fcinfo, 1), apply_forget, &args);
	PG_RETURN_TEXT_P(cstring_to_text("forgotten"));
}

static bool
resolved_as_succeeded(text *outcome)
{
	char	   *name = text_to_cstring(outcome);

	if (strcmp(name, "succeeded") == 0)
		return true;
	if (strcmp(name, "failed") != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("outcome \"%s\" is not known", name),
				 errhint("Outcomes are \"succeeded\" and \"failed\".")));
	return false;
}

static void
read_resolve_args(FunctionCallInfo fcinfo, OperatorArgs *args)
{
	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("outcome must not be null")));
	args->succeeded = resolved_as_succeeded(PG_GETARG_TEXT_PP(1));
	args->json = PG_ARGISNULL(3) ? NULL : PG_GETARG_VARLENA_P(3);
	args->body = PG_ARGISNULL(4) ? NULL : PG_GETARG_VARLENA_P(4);
	args->code = PG_ARGISNULL(5) ? NULL : (struct varlena *) idem_check_code(PG_GETARG_TEXT_PP(5));
	args->message = PG_ARGISNULL(6) ? NULL : (struct varlena *) idem_cut_message(PG_GETARG_TEXT_PP(6));
	if (args->succeeded ? (args->code || args->message) : (args->json || args->body))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a success has a result, a failure has an error")));
}

/*
 * idem_resolve(key, outcome, reason, result, body, error_code, error_message)
 */
PG_FUNCTION_INFO_V1(idem_resolve);
Datum
idem_resolve(PG_FUNCTION_ARGS)
{
	OperatorArgs args = {0};
	text	   *key;

	idem_write_prologue("idem_resolve()");
	key = idem_key_arg(fcinfo);
	read_resolve_args(fcinfo, &args);
	operate(fcinfo, key, "resolve", reason_arg(fcinfo, 2), apply_resolve, &args);
	PG_RETURN_TEXT_P(cstring_to_text(idem_status_name(args.after.status)));
}

/* ---- bulk retry ---- */

typedef struct RetryCount
{
	int64		retried;
	int64		skipped;
} RetryCount;

/* A record to retry, as the search saw it. */
typedef struct RetryTarget
{
	text	   *key;
	IdemStatus	status;
} RetryTarget;

/*
 * Failed and waiting records of the operation, read with the caller's rights: at
 * most max of them.  In the current memory context.
 */
static RetryTarget *
find_targets(const IdemCatalog *cat, text *operation, text *code, int64 max, uint64 *n)
{
	MemoryContext result = CurrentMemoryContext;
	Oid			types[3] = {TEXTOID, TEXTOID, INT8OID};
	Datum		values[3] = {PointerGetDatum(operation), PointerGetDatum(code), Int64GetDatum(max)};
	char		nulls[4] = "   ";
	RetryTarget *targets;
	int			level = idem_lock_search_path();
	char	   *table = quote_qualified_identifier(get_namespace_name(cat->schema), "idem_record");

	nulls[1] = code == NULL ? 'n' : ' ';
	SPI_connect();
	if (SPI_execute_with_args(psprintf("SELECT idempotency_key, status FROM %s"
									   " WHERE operation = $1 AND ($2 IS NULL OR error_code = $2)"
									   " AND (status = 'failed' OR status = 'retryable_failed')"
									   " ORDER BY updated_at, idempotency_key LIMIT $3", table),
							  3, types, values, nulls, false, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not look for records to retry");
	*n = SPI_processed;
	targets = (RetryTarget *) MemoryContextAlloc(result, sizeof(RetryTarget) * Max(*n, 1));
	for (uint64 i = 0; i < *n; i++)
	{
		bool		isnull;
		MemoryContext old = MemoryContextSwitchTo(result);
		HeapTuple	tuple = SPI_tuptable->vals[i];

		targets[i].key = DatumGetTextPCopy(SPI_getbinval(tuple, SPI_tuptable->tupdesc, 1, &isnull));
		targets[i].status = idem_status_code(DatumGetTextPP(SPI_getbinval(tuple, SPI_tuptable->tupdesc, 2,
																		  &isnull)));
		MemoryContextSwitchTo(old);
	}
	SPI_finish();
	AtEOXact_GUC(true, level);
	return targets;
}

static void
retry_one(const IdemCatalog *cat, const RetryTarget *target, text *reason, RetryCount *counts)
{
	OperatorArgs args = {.quiet = true};
	IdemStore	st;
	bool		done;

	idem_store_open(&st, cat);
	done = idem_change_now(&st, target->key, apply_retry, &args);
	idem_store_close(&st);
	if (done && args.changed)
	{
		idem_audit(cat, "retry", reason, &args.before,
				   idem_status_name(args.after.status), args.after.attempts);
		counts[args.before.status].retried++;
	}
	else
		counts[target->status].skipped++;
}

static void
put_counts(FunctionCallInfo fcinfo, const RetryCount *counts)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	for (IdemStatus status = IDEM_PROCESSING; status <= IDEM_UNKNOWN; status++)
	{
		Datum		values[3];
		bool		nulls[3] = {false, false, false};

		if (counts[status].retried == 0 && counts[status].skipped == 0)
			continue;
		values[0] = CStringGetTextDatum(idem_status_name(status));
		values[1] = Int64GetDatum(counts[status].retried);
		values[2] = Int64GetDatum(counts[status].skipped);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
}

/*
 * idem_retry_many(operation, error_code, reason, max_records)
 *		Records of unknown outcome are left out: each needs a look of its own.
 */
PG_FUNCTION_INFO_V1(idem_retry_many);
Datum
idem_retry_many(PG_FUNCTION_ARGS)
{
	const IdemCatalog *cat;
	RetryCount	counts[IDEM_UNKNOWN + 1] = {{0}};
	text	   *reason;
	RetryTarget *targets;
	uint64		n;

	idem_write_prologue("idem_retry_many()");
	if (PG_ARGISNULL(0) || PG_ARGISNULL(3))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("operation and max_records must not be null")));
	reason = reason_arg(fcinfo, 2);
	if (PG_GETARG_INT32(3) < 0 || PG_GETARG_INT32(3) > MAX_RETRY_MANY)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"max_records\" must be 0 to %d", MAX_RETRY_MANY)));
	InitMaterializedSRF(fcinfo, 0);

	cat = idem_catalog(fcinfo->flinfo->fn_oid);
	targets = find_targets(cat, PG_GETARG_TEXT_PP(0), PG_ARGISNULL(1) ? NULL : PG_GETARG_TEXT_PP(1),
						   PG_GETARG_INT32(3), &n);
	for (uint64 i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		retry_one(cat, &targets[i], reason, counts);
	}
	put_counts(fcinfo, counts);
	PG_RETURN_NULL();
}
