/*-------------------------------------------------------------------------
 *
 * finish.c
 *	  What the holder of a claim does: idem_complete, idem_fail, idem_renew,
 *	  idem_release, idem_checkpoint.
 *
 *	call			token holds it				otherwise
 *	complete		succeeded, to the ring		false if the same token stored an equal result; else ID001, ID002
 *	fail			retryable_failed, unknown	ID001, ID002
 *					or failed, to the ring
 *	renew			new lease, unless lapsed	NULL
 *	release			as before the claim			ID001, ID002
 *	checkpoint		progress and new lease,		ID001, ID002
 *					unless lapsed
 *
 * A lapsed lease alone does not take the key from its holder: complete, fail
 * and release are accepted until another call has acted on the lapse.  Renewing
 * is refused from the instant of the lapse on.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"

#include "change.h"
#include "claim.h"
#include "finish.h"
#include "idempotency.h"

#define MAX_RETRY_AFTER_US	(INT64CONST(3660) * USECS_PER_DAY)

/* One change of the holder in a store of its own. */
static bool
change_held(FunctionCallInfo fcinfo, const text *key, const pg_uuid_t *token,
			IdemApply apply, void *arg, IdemProbe *probe)
{
	IdemStore	st;
	bool		changed;

	idem_store_open(&st, idem_catalog(fcinfo->flinfo->fn_oid));
	changed = idem_change_held(&st, key, token, apply, arg, probe);
	idem_store_close(&st);
	return changed;
}

/* For calls whose token must hold the key: raises ID002 or ID001. */
static void
refuse(const IdemProbe *probe)
{
	if (probe->presence == IDEM_ABSENT)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_NO_SUCH_KEY),
				 errmsg("idempotency key does not exist")));
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_TOKEN_LOST),
			 errmsg("token does not hold the idempotency key"),
			 errhint("Roll back: the attempt was ended or taken over.")));
}

/* ---- complete ---- */

typedef struct CompleteArgs
{
	struct varlena *json;
	struct varlena *body;
	bool		checked;		/* idem_check_result() was done */
} CompleteArgs;

/* Raises 54000 for a result that is larger than the policy allows. */
void
idem_check_result(const IdemPolicy *policy, struct varlena *json, struct varlena *body)
{
	Size		size = (json ? VARSIZE_ANY_EXHDR(json) : 0) + (body ? VARSIZE_ANY_EXHDR(body) : 0);

	if (size > policy->max_result_size)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("result of %zu bytes is larger than \"max_result_size\" of %d bytes",
						size, policy->max_result_size)));
}

static IdemChange
apply_complete(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg)
{
	CompleteArgs *args = (CompleteArgs *) arg;

	if (!args->checked)
		idem_check_result(policy, args->json, args->body);
	idem_become_succeeded(rec, now, args->json, args->body);
	return IDEM_MOVE;
}

static bool
same_json(struct varlena *a, struct varlena *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return compareJsonbContainers(&((Jsonb *) a)->root, &((Jsonb *) b)->root) == 0;
}

static bool
same_body(struct varlena *a, struct varlena *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

/* Did this token store this very result before? */
static bool
completed_before(const IdemProbe *probe, const pg_uuid_t *token, const CompleteArgs *args)
{
	return probe->presence == IDEM_PRESENT &&
		probe->rec.status == IDEM_SUCCEEDED &&
		idem_token_is(&probe->rec, token) &&
		same_json(probe->rec.result_json, args->json) &&
		same_body(probe->rec.result_body, args->body);
}

/*
 * Stores the result.  True if it was stored now, false if the token stored it
 * before; raises ID001, ID002, 54000.
 */
bool
idem_complete_held(IdemStore *st, text *key, const pg_uuid_t *token,
				   struct varlena *json, struct varlena *body)
{
	CompleteArgs args = {.json = json, .body = body};
	IdemProbe	probe;

	if (idem_change_held(st, key, token, apply_complete, &args, &probe))
		return true;
	if (!completed_before(&probe, token, &args))
		refuse(&probe);
	return false;
}

/* Stores a checked result for a token that this very call gave; raises ID001, ID002. */
void
idem_complete_claimed(IdemStore *st, text *key, const pg_uuid_t *token, struct varlena *json)
{
	CompleteArgs args = {.json = json, .checked = true};
	IdemProbe	probe;

	if (!idem_change_claimed(st, key, token, apply_complete, &args, &probe))
		refuse(&probe);
}

/*
 * idem_complete(key, token, result, body)
 */
PG_FUNCTION_INFO_V1(idem_complete);
Datum
idem_complete(PG_FUNCTION_ARGS)
{
	text	   *key;
	pg_uuid_t  *token;
	struct varlena *json;
	struct varlena *body;
	IdemStore	st;
	bool		now;

	idem_write_prologue("idem_complete()");
	key = idem_key_arg(fcinfo);
	token = idem_token_arg(fcinfo);
	json = PG_ARGISNULL(2) ? NULL : PG_GETARG_VARLENA_P(2);
	body = PG_ARGISNULL(3) ? NULL : PG_GETARG_VARLENA_P(3);
	idem_store_open(&st, idem_catalog(fcinfo->flinfo->fn_oid));
	now = idem_complete_held(&st, key, token, json, body);
	idem_store_close(&st);
	PG_RETURN_BOOL(now);
}

/* ---- fail ---- */

static IdemFailKind
fail_kind(text *kind)
{
	char	   *name = text_to_cstring(kind);

	if (strcmp(name, "retryable") == 0)
		return IDEM_FAIL_RETRYABLE;
	if (strcmp(name, "permanent") == 0)
		return IDEM_FAIL_PERMANENT;
	if (strcmp(name, "unknown") == 0)
		return IDEM_FAIL_UNKNOWN;
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("kind of failure \"%s\" is not known", name),
			 errhint("Kinds are \"retryable\", \"permanent\" and \"unknown\".")));
	return IDEM_FAIL_UNKNOWN;		/* keep compiler quiet */
}

static int64
next_delay(const IdemRecord *rec, const IdemPolicy *policy, int64 asked)
{
	if (asked >= 0)
		return asked;
	return idem_policy_backoff(rec->attempts - rec->limits_from_attempt,
							   policy->backoff_base, policy->backoff_factor, policy->backoff_cap,
							   policy->jitter, pg_prng_double(&pg_global_prng_state));
}

/*
 * Ends the attempt of a processing record with the failure.  IdemApply; also
 * for a record that is not stored yet, where REPLACE means the open partition.
 */
IdemChange
idem_apply_failure(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg)
{
	IdemFailure *args = (IdemFailure *) arg;
	IdemChange	change = IDEM_MOVE;

	rec->error_code = args->code;
	rec->error_message = args->message;
	switch (args->kind)
	{
		case IDEM_FAIL_PERMANENT:
			idem_become_failed(rec, now);
			args->event = IDEM_EVENT_FAILED;
			break;
		case IDEM_FAIL_UNKNOWN:
			idem_become_unknown(rec, now);
			args->event = IDEM_EVENT_UNKNOWN;
			change = IDEM_REPLACE;
			break;
		case IDEM_FAIL_RETRYABLE:
			{
				TimestampTz retry_at = now + next_delay(rec, policy, args->retry_after);

				if (idem_limits_reached(rec, policy, retry_at))
				{
					rec->lease_until = IDEM_NO_TIME;	/* ended by the failure, not by a lapse */
					idem_become_exhausted(rec, policy, now);
					args->event = IDEM_EVENT_EXHAUSTED;
					break;
				}
				idem_become_retryable(rec, now, retry_at);
				change = IDEM_REPLACE;
				break;
			}
	}
	args->after = *rec;
	args->notify = policy->notify && rec->status != IDEM_RETRYABLE_FAILED;
	return change;
}

static void
read_failure(FunctionCallInfo fcinfo, IdemFailure *args)
{
	memset(args, 0, sizeof(*args));
	if (PG_ARGISNULL(2))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("kind of failure must not be null")));
	args->kind = fail_kind(PG_GETARG_TEXT_PP(2));
	if (!PG_ARGISNULL(3))
		args->message = (struct varlena *) idem_cut_message(PG_GETARG_TEXT_PP(3));
	if (!PG_ARGISNULL(4))
		args->code = (struct varlena *) idem_check_code(PG_GETARG_TEXT_PP(4));
	args->retry_after = -1;
	if (PG_ARGISNULL(5))
		return;
	if (args->kind != IDEM_FAIL_RETRYABLE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"retry_after\" goes with kind \"retryable\" only")));
	args->retry_after = idem_interval_us(PG_GETARG_INTERVAL_P(5), "retry_after", 0, MAX_RETRY_AFTER_US);
}

/* Ends the held attempt with the failure; raises ID001, ID002. */
void
idem_fail_held(IdemStore *st, text *key, const pg_uuid_t *token, IdemFailure *failure)
{
	IdemProbe	probe;

	if (!idem_change_held(st, key, token, idem_apply_failure, failure, &probe))
		refuse(&probe);
	if (failure->notify)
		idem_notify(failure->event, &failure->after);
}

/* The same for a token that this very call gave. */
void
idem_fail_claimed(IdemStore *st, text *key, const pg_uuid_t *token, IdemFailure *failure)
{
	IdemProbe	probe;

	if (!idem_change_claimed(st, key, token, idem_apply_failure, failure, &probe))
		refuse(&probe);
	if (failure->notify)
		idem_notify(failure->event, &failure->after);
}

/*
 * idem_fail(key, token, kind, error_message, error_code, retry_after)
 */
PG_FUNCTION_INFO_V1(idem_fail);
Datum
idem_fail(PG_FUNCTION_ARGS)
{
	text	   *key;
	pg_uuid_t  *token;
	IdemFailure args;
	IdemStore	st;
	Datum		values[3];
	bool		nulls[3] = {false, false, false};

	idem_write_prologue("idem_fail()");
	key = idem_key_arg(fcinfo);
	token = idem_token_arg(fcinfo);
	read_failure(fcinfo, &args);

	idem_store_open(&st, idem_catalog(fcinfo->flinfo->fn_oid));
	idem_fail_held(&st, key, token, &args);
	idem_store_close(&st);
	values[0] = CStringGetTextDatum(idem_status_name(args.after.status));
	values[1] = Int32GetDatum(args.after.attempts);
	values[2] = TimestampTzGetDatum(args.after.retry_at);
	nulls[2] = args.after.retry_at == IDEM_NO_TIME;
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(idem_result_desc(fcinfo), values, nulls)));
}

/* ---- renew ---- */

typedef struct RenewArgs
{
	int64		lease;			/* 0 = the policy's, never shortening */
	TimestampTz lease_until;	/* answer; IDEM_NO_TIME = lapsed */
} RenewArgs;

/* New end of the lease; IDEM_NO_TIME if it lapsed. */
static TimestampTz
extend_lease(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, int64 lease)
{
	if (now >= rec->lease_until)
		return IDEM_NO_TIME;
	rec->lease_until = lease > 0 ? now + lease : Max(rec->lease_until, now + policy->lease);
	rec->updated_at = now;
	return rec->lease_until;
}

static IdemChange
apply_renew(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg)
{
	RenewArgs  *args = (RenewArgs *) arg;

	args->lease_until = extend_lease(rec, policy, now, args->lease);
	return args->lease_until == IDEM_NO_TIME ? IDEM_KEEP : IDEM_REPLACE;
}

/*
 * idem_renew(key, token, lease)
 */
PG_FUNCTION_INFO_V1(idem_renew);
Datum
idem_renew(PG_FUNCTION_ARGS)
{
	text	   *key;
	pg_uuid_t  *token;
	RenewArgs	args = {0, IDEM_NO_TIME};
	IdemProbe	probe;

	idem_write_prologue("idem_renew()");
	key = idem_key_arg(fcinfo);
	token = idem_token_arg(fcinfo);
	if (!PG_ARGISNULL(2))
		args.lease = idem_interval_us(PG_GETARG_INTERVAL_P(2), "lease", 1, IDEM_MAX_LEASE_US);

	if (!change_held(fcinfo, key, token, apply_renew, &args, &probe) ||
		args.lease_until == IDEM_NO_TIME)
		PG_RETURN_NULL();
	PG_RETURN_TIMESTAMPTZ(args.lease_until);
}

/* ---- release ---- */

/*
 * Undoes the claim.  A first attempt leaves nothing.  A failed record is due
 * again.  A record that had been taken over from a lapsed lease stands lapsed
 * again, held by no token.  The holder's token is forgotten, not
 * buried: as before the claim, and however often a worker takes and gives
 * back, the record does not grow.
 */
static IdemChange
apply_release(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg)
{
	if (rec->previous == IDEM_PREVIOUS_NONE)
		return IDEM_REMOVE;
	rec->attempts--;
	rec->has_token = false;
	if (rec->previous == IDEM_PREVIOUS_LEASE_EXPIRED)
		idem_end_lease(rec, now);
	else
		idem_become_retryable(rec, now, now);
	return IDEM_REPLACE;
}

/*
 * idem_release(key, token)
 */
PG_FUNCTION_INFO_V1(idem_release);
Datum
idem_release(PG_FUNCTION_ARGS)
{
	text	   *key;
	pg_uuid_t  *token;
	IdemProbe	probe;

	idem_write_prologue("idem_release()");
	key = idem_key_arg(fcinfo);
	token = idem_token_arg(fcinfo);
	if (!change_held(fcinfo, key, token, apply_release, NULL, &probe))
		refuse(&probe);
	PG_RETURN_BOOL(true);
}

/* ---- checkpoint ---- */

typedef struct CheckpointArgs
{
	Jsonb	   *entry;			/* {step: value} */
	Jsonb	   *progress;		/* answer */
} CheckpointArgs;

/* The object {step: value}. */
static Jsonb *
progress_entry(text *step, Jsonb *value)
{
	JsonbParseState *state = NULL;
	JsonbValue	item;
	JsonbValue *object;

	pushJsonbValue(&state, WJB_BEGIN_OBJECT, NULL);
	item.type = jbvString;
	item.val.string.val = VARDATA_ANY(step);
	item.val.string.len = VARSIZE_ANY_EXHDR(step);
	pushJsonbValue(&state, WJB_KEY, &item);
	if (!JB_ROOT_IS_SCALAR(value) || !JsonbExtractScalar(&value->root, &item))
	{
		item.type = jbvBinary;
		item.val.binary.data = &value->root;
		item.val.binary.len = VARSIZE(value) - VARHDRSZ;
	}
	pushJsonbValue(&state, WJB_VALUE, &item);
	object = pushJsonbValue(&state, WJB_END_OBJECT, NULL);
	return JsonbValueToJsonb(object);
}

static IdemChange
apply_checkpoint(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg)
{
	CheckpointArgs *args = (CheckpointArgs *) arg;

	args->progress = args->entry;
	if (extend_lease(rec, policy, now, 0) == IDEM_NO_TIME)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_TOKEN_LOST),
				 errmsg("lease of the idempotency key is over"),
				 errhint("Roll back: another executor may take the key over at any time.")));
	if (rec->progress != NULL)
		args->progress = DatumGetJsonbP(DirectFunctionCall2(jsonb_concat,
															PointerGetDatum(rec->progress),
															JsonbPGetDatum(args->entry)));
	if (VARSIZE(args->progress) - VARHDRSZ > IDEM_MAX_PROGRESS_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("progress is larger than %d bytes", IDEM_MAX_PROGRESS_BYTES)));
	rec->progress = (struct varlena *) args->progress;
	return IDEM_REPLACE;
}

/*
 * idem_checkpoint(key, token, step, value)
 */
PG_FUNCTION_INFO_V1(idem_checkpoint);
Datum
idem_checkpoint(PG_FUNCTION_ARGS)
{
	text	   *key;
	pg_uuid_t  *token;
	text	   *step;
	CheckpointArgs args;
	IdemProbe	probe;

	idem_write_prologue("idem_checkpoint()");
	key = idem_key_arg(fcinfo);
	token = idem_token_arg(fcinfo);
	if (PG_ARGISNULL(2) || PG_ARGISNULL(3))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("step and value must not be null")));
	step = PG_GETARG_TEXT_PP(2);
	if (VARSIZE_ANY_EXHDR(step) == 0 || VARSIZE_ANY_EXHDR(step) > IDEM_MAX_STEP_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"step\" must be 1 to %d bytes long", IDEM_MAX_STEP_BYTES)));
	args.entry = progress_entry(step, PG_GETARG_JSONB_P(3));

	if (!change_held(fcinfo, key, token, apply_checkpoint, &args, &probe))
		refuse(&probe);
	PG_RETURN_JSONB_P(args.progress);
}
