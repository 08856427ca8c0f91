/*-------------------------------------------------------------------------
 *
 * state.c
 *	  The state machine of a record.  Pure: no clock, no storage, no caller.
 *
 * What time does to a record is decided by idem_standing() alone, for claim,
 * reap, recovery and views alike:
 *
 *	stored				time					stands as
 *	processing			lease not over			HELD
 *	processing			over, policy 'unknown'	UNKNOWN
 *	processing			over, limits reached	EXHAUSTED
 *	processing			over					LAPSED
 *	retryable_failed	limits reached			EXHAUSTED
 *	retryable_failed	not due					WAITING
 *	retryable_failed	due						DUE
 *	unknown, failed, succeeded					as stored
 *
 * "Over" and "due" include the very instant: a lease holds while now <
 * lease_until.  Unknown goes before exhausted: where nobody may run again before
 * a person has looked, used-up attempts do not turn doubt into a failure.
 *
 * What a claim gets is decided by idem_decide_claim():
 *
 *	stands as		claim
 *	(no record)		NEW attempt 1
 *	HELD			SAME with the holder's token, else in progress
 *	LAPSED, DUE		NEXT attempt; refused with a token of an earlier one
 *	WAITING			retry later
 *	UNKNOWN			unknown (stored first, if it lapsed into it)
 *	EXHAUSTED		failed, stored first
 *	FAILED, SUCCEEDED	the stored answer
 *
 * The idem_become_*() functions are the transitions.  They change the struct
 * only; allocations are in the current memory context.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/builtins.h"

#include "idempotency.h"

static const char *const status_names[] = {
	[IDEM_PROCESSING] = "processing",
	[IDEM_SUCCEEDED] = "succeeded",
	[IDEM_RETRYABLE_FAILED] = "retryable_failed",
	[IDEM_FAILED] = "failed",
	[IDEM_UNKNOWN] = "unknown"
};

static const char *const previous_names[] = {
	[IDEM_PREVIOUS_NONE] = "none",
	[IDEM_PREVIOUS_RETRYABLE_FAILED] = "retryable_failed",
	[IDEM_PREVIOUS_LEASE_EXPIRED] = "lease_expired",
	[IDEM_PREVIOUS_RETRIED] = "retried"
};

const char *
idem_status_name(IdemStatus status)
{
	return status_names[status];
}

const char *
idem_previous_name(IdemPrevious previous)
{
	return previous_names[previous];
}

static int
name_index(const text *name, const char *const *names, int n)
{
	for (int i = 0; i < n; i++)
	{
		if (VARSIZE_ANY_EXHDR(name) == strlen(names[i]) &&
			memcmp(VARDATA_ANY(name), names[i], strlen(names[i])) == 0)
			return i;
	}
	elog(ERROR, "unexpected word in table idem_record");
}

IdemStatus
idem_status_code(const text *name)
{
	return (IdemStatus) name_index(name, status_names, lengthof(status_names));
}

IdemPrevious
idem_previous_code(const text *name)
{
	return (IdemPrevious) name_index(name, previous_names, lengthof(previous_names));
}

/*
 * Is no attempt allowed that would start at "next"?  Attempts before the last
 * operator retry do not count.
 */
bool
idem_limits_reached(const IdemRecord *rec, const IdemPolicy *policy, TimestampTz next)
{
	if (rec->attempts == PG_INT32_MAX ||
		rec->attempts - rec->limits_from_attempt >= policy->max_attempts)
		return true;
	return policy->max_elapsed >= 0 && next - rec->limits_from >= policy->max_elapsed;
}

IdemStanding
idem_standing(const IdemRecord *rec, const IdemPolicy *policy, TimestampTz now)
{
	switch (rec->status)
	{
		case IDEM_PROCESSING:
			if (now < rec->lease_until)
				return IDEM_HELD;
			if (policy->expiry_is_unknown)
				return IDEM_STANDS_UNKNOWN;
			return idem_limits_reached(rec, policy, now) ? IDEM_STANDS_EXHAUSTED : IDEM_LAPSED;
		case IDEM_RETRYABLE_FAILED:
			if (idem_limits_reached(rec, policy, now))
				return IDEM_STANDS_EXHAUSTED;
			return now < rec->retry_at ? IDEM_WAITING : IDEM_DUE;
		case IDEM_UNKNOWN:
			return IDEM_STANDS_UNKNOWN;
		case IDEM_FAILED:
			return IDEM_STANDS_FAILED;
		case IDEM_SUCCEEDED:
			return IDEM_STANDS_SUCCEEDED;
	}
	pg_unreachable();
}

/* Does it stand as something final that is not stored yet? */
bool
idem_settles(const IdemRecord *rec, IdemStanding standing)
{
	return standing == IDEM_STANDS_EXHAUSTED ||
		(standing == IDEM_STANDS_UNKNOWN && rec->status != IDEM_UNKNOWN);
}

bool
idem_token_is_nil(const pg_uuid_t *token)
{
	static const pg_uuid_t nil = {{0}};

	return memcmp(token->data, nil.data, UUID_LEN) == 0;
}

/* Does the token hold the record?  The nil UUID holds nothing. */
bool
idem_token_is(const IdemRecord *rec, const pg_uuid_t *token)
{
	return rec->has_token && !idem_token_is_nil(&rec->token) &&
		memcmp(rec->token.data, token->data, UUID_LEN) == 0;
}

/* The tokens of earlier attempts as a plain array; *n is their number. */
static const pg_uuid_t *
past_tokens(const IdemRecord *rec, int *n)
{
	ArrayType  *array;

	*n = 0;
	if (rec->past_tokens == NULL)
		return NULL;
	array = DatumGetArrayTypeP(PointerGetDatum(rec->past_tokens));
	*n = ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array));
	return (const pg_uuid_t *) ARR_DATA_PTR(array);
}

/* Was the token given to an earlier attempt of the record? */
bool
idem_token_was(const IdemRecord *rec, const pg_uuid_t *token)
{
	int			n;
	const pg_uuid_t *past = past_tokens(rec, &n);

	for (int i = 0; i < n; i++)
	{
		if (memcmp(past[i].data, token->data, UUID_LEN) == 0)
			return true;
	}
	return false;
}

/* Moves the holder's token to the tokens that are never accepted again. */
void
idem_bury_token(IdemRecord *rec)
{
	int			n;
	const pg_uuid_t *past = past_tokens(rec, &n);
	Size		size = ARR_OVERHEAD_NONULLS(1) + (n + 1) * UUID_LEN;
	ArrayType  *array;

	if (!rec->has_token || idem_token_is_nil(&rec->token))
	{
		rec->has_token = false;
		return;
	}
	array = (ArrayType *) palloc0(size);
	SET_VARSIZE(array, size);
	array->ndim = 1;
	array->elemtype = UUIDOID;
	ARR_DIMS(array)[0] = n + 1;
	ARR_LBOUND(array)[0] = 1;
	if (n > 0)
		memcpy(ARR_DATA_PTR(array), past, n * UUID_LEN);
	memcpy(ARR_DATA_PTR(array) + n * UUID_LEN, rec->token.data, UUID_LEN);
	rec->past_tokens = (struct varlena *) array;
	rec->has_token = false;
}

/*
 * rec is NULL where there is no record, and standing then ignored.  token is
 * the caller's own, or NULL.
 */
IdemVerdict
idem_decide_claim(const IdemRecord *rec, IdemStanding standing, const pg_uuid_t *token)
{
	if (rec == NULL)
		return IDEM_GIVE_NEW;

	switch (standing)
	{
		case IDEM_HELD:
			return token && idem_token_is(rec, token) ? IDEM_GIVE_SAME : IDEM_ANSWER_IN_PROGRESS;
		case IDEM_LAPSED:
		case IDEM_DUE:
			if (token && (idem_token_is(rec, token) || idem_token_was(rec, token)))
				return IDEM_REFUSE_TOKEN;
			return IDEM_GIVE_NEXT;
		case IDEM_WAITING:
			return IDEM_ANSWER_RETRY_LATER;
		case IDEM_STANDS_UNKNOWN:
			return idem_settles(rec, standing) ? IDEM_SETTLE_UNKNOWN : IDEM_ANSWER_UNKNOWN;
		case IDEM_STANDS_EXHAUSTED:
			return IDEM_SETTLE_EXHAUSTED;
		case IDEM_STANDS_FAILED:
			return IDEM_ANSWER_FAILED;
		case IDEM_STANDS_SUCCEEDED:
			return IDEM_ANSWER_SUCCEEDED;
	}
	pg_unreachable();
}

/* The next attempt, by the holder of token.  from is LAPSED or DUE. */
void
idem_become_processing(IdemRecord *rec, IdemStanding from, const pg_uuid_t *token,
					   TimestampTz now, int64 lease)
{
	if (from == IDEM_LAPSED)
		rec->previous = IDEM_PREVIOUS_LEASE_EXPIRED;
	else if (rec->limits_from_attempt > 0 && rec->attempts == rec->limits_from_attempt)
		rec->previous = IDEM_PREVIOUS_RETRIED;
	else
		rec->previous = IDEM_PREVIOUS_RETRYABLE_FAILED;

	idem_bury_token(rec);
	rec->status = IDEM_PROCESSING;
	rec->attempts++;
	rec->has_token = true;
	rec->token = *token;
	rec->lease_until = now + lease;
	rec->retry_at = IDEM_NO_TIME;
	rec->updated_at = now;
}

/* Error fields are the caller's to set. */
void
idem_become_retryable(IdemRecord *rec, TimestampTz now, TimestampTz retry_at)
{
	idem_bury_token(rec);
	rec->status = IDEM_RETRYABLE_FAILED;
	rec->lease_until = IDEM_NO_TIME;
	rec->retry_at = retry_at;
	rec->updated_at = now;
}

/* An operator allows attempts anew: limits count from here. */
void
idem_become_retried(IdemRecord *rec, TimestampTz now)
{
	rec->limits_from_attempt = rec->attempts;
	rec->limits_from = now;
	idem_become_retryable(rec, now, now);
}

/*
 * Ends the lease of a processing record now.  The old token is dead; the nil UUID
 * stands in its place, which is never accepted.
 */
void
idem_end_lease(IdemRecord *rec, TimestampTz now)
{
	idem_bury_token(rec);
	rec->has_token = true;
	memset(&rec->token, 0, sizeof(rec->token));
	rec->lease_until = now;
	rec->updated_at = now;
}

/* Error fields are the caller's to set. */
void
idem_become_unknown(IdemRecord *rec, TimestampTz now)
{
	idem_bury_token(rec);
	rec->status = IDEM_UNKNOWN;
	rec->lease_until = IDEM_NO_TIME;
	rec->retry_at = IDEM_NO_TIME;
	rec->updated_at = now;
}

/* Final; the token stays as that of the last holder.  Error fields are the caller's. */
void
idem_become_failed(IdemRecord *rec, TimestampTz now)
{
	rec->status = IDEM_FAILED;
	rec->lease_until = IDEM_NO_TIME;
	rec->retry_at = IDEM_NO_TIME;
	rec->updated_at = now;
}

static char *
text_of(struct varlena *value)
{
	return text_to_cstring((text *) value);
}

/*
 * Final failure because limits are reached, from processing or
 * retryable_failed.  The last error is kept in the message.
 */
void
idem_become_exhausted(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now)
{
	bool		by_time = rec->attempts - rec->limits_from_attempt < policy->max_attempts;
	char	   *text = psprintf("%s after %d attempts; last: ",
								by_time ? "time limit passed" : "no attempts left", rec->attempts);

	if (rec->status == IDEM_PROCESSING && rec->lease_until != IDEM_NO_TIME && now >= rec->lease_until)
		text = psprintf("%slease expired", text);
	else if (rec->error_message != NULL || rec->error_code != NULL)
		text = psprintf("%s%s%s%s", text,
						rec->error_code ? text_of(rec->error_code) : "",
						rec->error_code && rec->error_message ? ": " : "",
						rec->error_message ? text_of(rec->error_message) : "");
	else
		text = psprintf("%sno error recorded", text);

	rec->error_code = (struct varlena *) cstring_to_text("exhausted");
	rec->error_message = (struct varlena *)
		cstring_to_text_with_len(text, pg_mbcliplen(text, strlen(text), IDEM_MAX_MESSAGE_BYTES));
	idem_become_failed(rec, now);
}

/* Final; what only a further attempt would need is dropped. */
void
idem_become_succeeded(IdemRecord *rec, TimestampTz now, struct varlena *json, struct varlena *body)
{
	rec->status = IDEM_SUCCEEDED;
	rec->lease_until = IDEM_NO_TIME;
	rec->retry_at = IDEM_NO_TIME;
	rec->updated_at = now;
	rec->result_json = json;
	rec->result_body = body;
	rec->error_code = NULL;
	rec->error_message = NULL;
	rec->request_json = NULL;
	rec->past_tokens = NULL;
}
