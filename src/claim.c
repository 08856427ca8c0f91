/*-------------------------------------------------------------------------
 *
 * claim.c
 *	  idem_claim: SQL entry, one round of the claim protocol, waiting.
 *
 * A round: look for a finished record in the current slice; else open the
 * store; take the key lock if it is free, else answer
 * without it where a finished record or a transaction in progress decides, else
 * wait for it; probe; read the clock; decide (state.c); write; let go of the
 * lock.  A waiting claim repeats rounds and holds nothing between them.
 *
 * Order of decisions: arguments, serialization, role, request mismatch, state.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/nodeFuncs.h"
#include "storage/latch.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "compat.h"
#include "claim.h"
#include "failpoint.h"
#include "idempotency.h"

#define WAIT_FIRST_MS		1
#define WAIT_LAST_MS		25
#define MIN_RETRY_AFTER_US	1000

static const char *const outcome_names[] = {
	[IDEM_CLAIMED] = "claimed",
	[IDEM_EXECUTED] = "executed",
	[IDEM_WAS_SUCCEEDED] = "succeeded",
	[IDEM_WAS_FAILED] = "failed",
	[IDEM_IN_PROGRESS] = "in_progress",
	[IDEM_RETRY_LATER] = "retry_later",
	[IDEM_IS_UNKNOWN] = "unknown",
	[IDEM_CONFLICT] = "conflict"
};

/*
 * The last claim or execution of this backend, to recognise (idem_claim(...)).*,
 * which the parser turns into one call per column.
 */
static struct
{
	uint32		key_hash;
	int			location;		/* of the call in the query text, -1 = none */
	const FmgrInfo *site;
} last_given = {.location = -1};

/* ---- the request of the caller against the record ---- */

/* The digest of the caller's request under the ignore list of a policy. */
bytea *
idem_claim_digest(const IdemClaimArgs *args, const IdemPolicy *policy)
{
	if (args->digest != NULL)
		return args->digest;
	if (args->request == NULL)
	{
		bytea	   *empty = (bytea *) palloc(VARHDRSZ);

		SET_VARSIZE(empty, VARHDRSZ);
		return empty;
	}
	return idem_request_digest(args->request, policy->digest_ignore);
}

static bool
same_bytes(const void *a, const void *b)
{
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

/*
 * Is it the request that the record was made for?  A named operation must be
 * the record's; otherwise the record's operation says what the digest ignores.
 */
bool
idem_claim_same_request(const IdemClaimArgs *args, const IdemRecord *rec, const IdemPolicy *policy)
{
	if (args->operation_named && !same_bytes(args->operation, rec->operation))
		return false;
	return same_bytes(idem_claim_digest(args, policy), rec->request_hash);
}

/* ---- answers ---- */

static void
clear_answer(IdemAnswer *answer)
{
	memset(answer, 0, sizeof(*answer));
	answer->lease_until = IDEM_NO_TIME;
	answer->retry_after = -1;
}

static void
answer_in_progress(IdemAnswer *answer, const IdemRecord *rec, const IdemPolicy *policy, TimestampTz now)
{
	int64		rest = Max(policy->backoff_base, MIN_RETRY_AFTER_US);

	if (rec->lease_until != IDEM_NO_TIME && rec->lease_until > now)
		rest = Min(rest, rec->lease_until - now);
	answer->outcome = IDEM_IN_PROGRESS;
	answer->attempts = rec->attempts;
	answer->lease_until = rec->lease_until;
	answer->retry_after = Max(rest, MIN_RETRY_AFTER_US);
}

static void
answer_claimed(IdemAnswer *answer, const IdemRecord *rec)
{
	answer->outcome = IDEM_CLAIMED;
	answer->has_token = true;
	answer->token = rec->token;
	answer->attempts = rec->attempts;
	answer->lease_until = rec->lease_until;
	answer->error_code = rec->error_code;
	answer->error_message = rec->error_message;
	answer->previous = idem_previous_name(rec->previous);
	answer->progress = rec->progress;
	answer->operation = rec->operation;
}

/* For every state in which the record itself is the answer. */
static void
answer_stored(IdemAnswer *answer, IdemOutcome outcome, const IdemRecord *rec)
{
	answer->outcome = outcome;
	answer->attempts = rec->attempts;
	answer->result_json = rec->result_json;
	answer->result_body = rec->result_body;
	answer->error_code = rec->error_code;
	answer->error_message = rec->error_message;
}

static void
answer_conflict(IdemAnswer *answer)
{
	answer->outcome = IDEM_CONFLICT;
	answer->attempts = 0;
}

static void
answer_retry_later(IdemAnswer *answer, const IdemRecord *rec, TimestampTz now)
{
	answer_stored(answer, IDEM_RETRY_LATER, rec);
	answer->retry_after = rec->retry_at - now;
}

/* ---- giving a claim ---- */

/*
 * Strong random bytes for a token.  They are drawn for many tokens at once, because a
 * draw costs as much as probing a partition; a process never uses what it inherited,
 * and no bytes are used or kept twice.
 */
static void
draw_token(pg_uuid_t *token)
{
	static pg_uuid_t pool[16];
	static int	left = 0;
	static int	owner = 0;

	if (left == 0 || owner != MyProcPid)
	{
		left = 0;
		if (!pg_strong_random(pool, sizeof(pool)))
			ereport(ERROR,
					(errcode(ERRCODE_INTERNAL_ERROR),
					 errmsg("could not generate random values")));
		owner = MyProcPid;
		left = lengthof(pool);
	}
	left--;
	*token = pool[left];
	memset(&pool[left], 0, sizeof(pg_uuid_t));
}

void
idem_new_token(const IdemClaimArgs *args, pg_uuid_t *token)
{
	if (args != NULL && args->token != NULL)
	{
		*token = *args->token;
		return;
	}
	draw_token(token);
	token->data[6] = (token->data[6] & 0x0f) | 0x40;
	token->data[8] = (token->data[8] & 0x3f) | 0x80;
}

/* The record of a first attempt. */
void
idem_first_attempt(const IdemClaimArgs *args, const IdemPolicy *policy, TimestampTz now, IdemRecord *rec)
{
	memset(rec, 0, sizeof(*rec));
	rec->key = args->key;
	rec->operation = args->operation;
	rec->owner = GetUserId();
	rec->request_hash = idem_claim_digest(args, policy);
	rec->status = IDEM_PROCESSING;
	rec->attempts = 1;
	rec->has_token = true;
	idem_new_token(args, &rec->token);
	rec->lease_until = now + (args->lease > 0 ? args->lease : policy->lease);
	rec->retry_at = IDEM_NO_TIME;
	rec->first_claimed_at = now;
	rec->updated_at = now;
	rec->previous = IDEM_PREVIOUS_NONE;
	rec->limits_from = now;
	if (policy->store_request)
		rec->request_json = (struct varlena *) args->request;
}

static void
give_next(IdemStore *st, const IdemClaimArgs *args, IdemProbe *probe, IdemStanding standing,
		  const IdemPolicy *policy, TimestampTz now, IdemAnswer *answer)
{
	IdemRecord	next = probe->rec;
	pg_uuid_t	token;

	idem_new_token(args, &token);
	idem_become_processing(&next, standing, &token, now, args->lease > 0 ? args->lease : policy->lease);
	if (idem_store_update_open(st, probe, &next) == IDEM_WRITTEN)
		answer_claimed(answer, &next);
	else
		answer_in_progress(answer, &probe->rec, policy, now);
}

static void
settle_unknown(IdemStore *st, IdemProbe *probe, const IdemPolicy *policy, TimestampTz now, IdemAnswer *answer)
{
	IdemRecord	next = probe->rec;

	idem_become_unknown(&next, now);
	if (idem_store_update_open(st, probe, &next) == IDEM_WRITTEN)
	{
		answer_stored(answer, IDEM_IS_UNKNOWN, &next);
		if (policy->notify)
			idem_notify(IDEM_EVENT_UNKNOWN, &next);
	}
	else
		answer_in_progress(answer, &probe->rec, policy, now);
}

static void
settle_exhausted(IdemStore *st, IdemProbe *probe, const IdemPolicy *policy, TimestampTz now, IdemAnswer *answer)
{
	IdemRecord	next = probe->rec;

	idem_become_exhausted(&next, policy, now);
	if (idem_store_finish(st, probe, &next) == IDEM_WRITTEN)
	{
		answer_stored(answer, IDEM_WAS_FAILED, &next);
		if (policy->notify)
			idem_notify(IDEM_EVENT_EXHAUSTED, &next);
	}
	else
		answer_in_progress(answer, &probe->rec, policy, now);
}

static uint32
key_hash(const text *key)
{
	return hash_bytes((const unsigned char *) VARDATA_ANY(key), (int) VARSIZE_ANY_EXHDR(key));
}

/* Called when a claim was given, or a handler was run. */
void
idem_remember_site(const IdemClaimArgs *args)
{
	last_given.key_hash = key_hash(args->key);
	last_given.location = args->location;
	last_given.site = args->site;
}

/*
 * Raises 0A000 if this call is one of the calls that (idem_claim(...)).* was
 * expanded into: same place in the query text as the call that gave the claim or ran
 * the handler, but another node of the plan, in the statement that wrote the row.
 */
static void
refuse_expansion(const IdemClaimArgs *args, const IdemProbe *probe)
{
	if (args->site == NULL || last_given.location < 0 || !probe->own ||
		key_hash(args->key) != last_given.key_hash ||
		args->location != last_given.location || args->site == last_given.site ||
		probe->cmin < GetActiveSnapshot()->curcid)
		return;
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("the result of a claim cannot be expanded with (...).*"),
			 errdetail("The function would be called once per column."),
			 errhint("Use SELECT * FROM the function.")));
}

/* Acts on a record that is committed or our own.  Needs the key lock unless it is finished. */
static void
act_on_record(IdemStore *st, const IdemClaimArgs *args, IdemProbe *probe, TimestampTz now, IdemAnswer *answer)
{
	const IdemPolicy *policy = idem_policy_get(st->cat, probe->rec.operation);
	IdemStanding standing;

	if (!idem_claim_same_request(args, &probe->rec, policy))
	{
		answer_conflict(answer);
		return;
	}
	standing = idem_standing(&probe->rec, policy, now);
	switch (idem_decide_claim(&probe->rec, standing, args->token))
	{
		case IDEM_GIVE_NEW:
			elog(ERROR, "new claim of an existing record");
			break;
		case IDEM_GIVE_NEXT:
			refuse_expansion(args, probe);
			give_next(st, args, probe, standing, policy, now, answer);
			break;
		case IDEM_GIVE_SAME:
			answer_claimed(answer, &probe->rec);
			break;
		case IDEM_SETTLE_UNKNOWN:
			settle_unknown(st, probe, policy, now, answer);
			break;
		case IDEM_SETTLE_EXHAUSTED:
			settle_exhausted(st, probe, policy, now, answer);
			break;
		case IDEM_ANSWER_IN_PROGRESS:
			refuse_expansion(args, probe);
			answer_in_progress(answer, &probe->rec, policy, now);
			break;
		case IDEM_ANSWER_RETRY_LATER:
			answer_retry_later(answer, &probe->rec, now);
			break;
		case IDEM_ANSWER_UNKNOWN:
			answer_stored(answer, IDEM_IS_UNKNOWN, &probe->rec);
			break;
		case IDEM_ANSWER_FAILED:
			answer_stored(answer, IDEM_WAS_FAILED, &probe->rec);
			break;
		case IDEM_ANSWER_SUCCEEDED:
			answer_stored(answer, IDEM_WAS_SUCCEEDED, &probe->rec);
			break;
		case IDEM_REFUSE_TOKEN:
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("token was used for an earlier attempt of this idempotency key"),
					 errhint("Give every new claim a new token.")));
	}
}

void
idem_serialization_failure(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("could not serialize access due to concurrent use of the idempotency key"),
			 errhint("The transaction might succeed if retried.")));
}

/* Turns a probe into an answer.  Needs the key lock unless idem_answered_by_probe(). */
static void
act(IdemStore *st, const IdemClaimArgs *args, IdemProbe *probe, IdemAnswer *answer)
{
	TimestampTz now = idem_now();

	clear_answer(answer);
	switch (probe->presence)
	{
		case IDEM_ABSENT:
			if (IsolationUsesXactSnapshot() && idem_store_snapshot_sees(st->cat, args->key))
				idem_serialization_failure();
			idem_first_attempt(args, idem_policy_get(st->cat, args->operation), now, &probe->rec);
			idem_store_insert_open(st, &probe->rec);
			answer_claimed(answer, &probe->rec);
			break;
		case IDEM_IN_DOUBT:
			idem_check_owner(probe->rec.owner);
			answer_in_progress(answer, &probe->rec, idem_policy_get(st->cat, probe->rec.operation), now);
			break;
		case IDEM_PRESENT:
			if (!probe->snapshot_sees)
				idem_serialization_failure();
			idem_check_owner(probe->rec.owner);
			act_on_record(st, args, probe, now, answer);
			break;
	}
}

/* May the answer of this probe be used although the key lock was not held? */
bool
idem_answered_by_probe(const IdemProbe *probe)
{
	return probe->presence == IDEM_IN_DOUBT ||
		(probe->presence == IDEM_PRESENT && probe->rec.slice != IDEM_SLICE_OPEN);
}

/* The answer while an execution guards the key: there is no record to tell more. */
static void
answer_guarded(const IdemCatalog *cat, const IdemClaimArgs *args, IdemAnswer *answer)
{
	clear_answer(answer);
	answer->outcome = IDEM_IN_PROGRESS;
	answer->attempts = 1;
	answer->retry_after = Max(idem_policy_get(cat, args->operation)->backoff_base, MIN_RETRY_AFTER_US);
}


/*
 * The protocol.  *locked is what is held of the key lock, before and after.
 */
static void
claim_by_protocol(IdemStore *st, const IdemClaimArgs *args, IdemAnswer *answer, IdemKeyLock *locked)
{
	IdemProbe	probe;

	IDEM_FAILPOINT("claim-locked");
	idem_store_probe(st, args->key, &probe);
	IDEM_FAILPOINT("claim-probed");
	if (*locked == IDEM_KEY_BUSY && !idem_answered_by_probe(&probe))
	{
		if (!idem_keylock_wait_unguarded(args->key))
		{
			answer_guarded(st->cat, args, answer);
			return;
		}
		*locked = IDEM_KEY_LOCKED;
		idem_store_probe(st, args->key, &probe);
	}
	act(st, args, &probe, answer);
	IDEM_FAILPOINT("claim-decided");
}

/* A replay from the current slice, the common duplicate, at the cost of one probe. */
bool
idem_replay_at_once(IdemStore *st, const IdemClaimArgs *args, IdemAnswer *answer)
{
	IdemProbe	probe;

	if (!idem_store_probe_current(st, args->key, &probe))
		return false;
	act(st, args, &probe, answer);
	return true;
}

/* One round with the store open.  Holds no key lock when it returns. */
void
idem_claim_with(IdemStore *st, const IdemClaimArgs *args, IdemAnswer *answer)
{
	IdemKeyLock locked;

	if (!args->likely_new && idem_replay_at_once(st, args, answer))
		return;
	locked = idem_keylock_try(args->key);
	if (locked == IDEM_KEY_OURS)
		answer_guarded(st->cat, args, answer);
	else
		claim_by_protocol(st, args, answer, &locked);
	if (locked == IDEM_KEY_LOCKED)
		idem_keylock_release(args->key);
	idem_store_settle(st);
	if (answer->outcome == IDEM_CLAIMED)
		idem_remember_site(args);
}

/* One round.  Holds nothing but what it wrote when it returns. */
void
idem_claim_round(const IdemCatalog *cat, const IdemClaimArgs *args, IdemAnswer *answer)
{
	IdemStore	st;

	idem_store_open(&st, cat);
	idem_claim_with(&st, args, answer);
	idem_store_close(&st);
}

/*
 * Claims the key if it is due or lapsed and nothing stands in the way; never
 * waits.  On success *request is the stored request.
 */
bool
idem_claim_if_due(const IdemCatalog *cat, text *key, int64 lease, IdemAnswer *answer,
				  struct varlena **request)
{
	IdemClaimArgs args = {.key = key, .lease = lease, .location = -1};
	IdemStore	st;
	IdemProbe	probe;
	TimestampTz now;

	if (idem_keylock_try(key) != IDEM_KEY_LOCKED)
		return false;
	idem_store_open(&st, cat);
	idem_store_probe(&st, key, &probe);
	now = idem_now();
	clear_answer(answer);
	if (probe.presence == IDEM_PRESENT && probe.snapshot_sees && idem_is_owner(probe.rec.owner))
	{
		const IdemPolicy *policy = idem_policy_get(cat, probe.rec.operation);
		IdemStanding standing = idem_standing(&probe.rec, policy, now);

		if (standing == IDEM_LAPSED || standing == IDEM_DUE)
			give_next(&st, &args, &probe, standing, policy, now, answer);
	}
	*request = probe.presence == IDEM_PRESENT ? probe.rec.request_json : NULL;
	IDEM_FAILPOINT("due-claimed");
	idem_keylock_release(key);
	idem_store_close(&st);
	return answer->outcome == IDEM_CLAIMED && answer->has_token;
}

/* ---- waiting ---- */

/* Is it worth while to ask again within the time that is left? */
static bool
may_change(const IdemAnswer *answer, int64 left)
{
	if (left <= 0)
		return false;
	return answer->outcome == IDEM_IN_PROGRESS ||
		(answer->outcome == IDEM_RETRY_LATER && answer->retry_after <= left);
}

static void
nap(long ms)
{
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, ms, PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/*
 * Rounds until the answer is not "in progress" or "later", or the time is up.
 * Each round allocates in a context of its own; the last one's memory stays
 * below the caller's.
 */
void
idem_claim_waiting(Oid function, const IdemClaimArgs *args, int64 wait, IdemAnswer *answer)
{
	TimestampTz deadline;
	MemoryContext round;
	MemoryContext old;
	long		ms = WAIT_FIRST_MS;

	if (wait == 0)
	{
		idem_claim_round(idem_catalog(function), args, answer);
		return;
	}
	deadline = GetCurrentTimestamp() + wait;
	round = AllocSetContextCreate(CurrentMemoryContext, "idempotency claim", ALLOCSET_SMALL_SIZES);
	old = MemoryContextSwitchTo(round);
	for (;;)
	{
		int64		left;

		idem_claim_round(idem_catalog(function), args, answer);
		left = deadline - GetCurrentTimestamp();
		if (!may_change(answer, left))
			break;
		nap(Min(ms, left / 1000 + 1));
		ms = Min(ms * 2, WAIT_LAST_MS);
		MemoryContextReset(round);
	}
	MemoryContextSwitchTo(old);
}

/* ---- SQL ---- */

static void
check_digest(const bytea *digest)
{
	if (VARSIZE_ANY_EXHDR(digest) == 0 || VARSIZE_ANY_EXHDR(digest) > IDEM_MAX_DIGEST_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"digest\" must be 1 to %d bytes long", IDEM_MAX_DIGEST_BYTES)));
}

/* The checked argument "operation", or NULL.  Raises 22023. */
text *
idem_operation_arg(FunctionCallInfo fcinfo, int number)
{
	text	   *named;

	if (PG_ARGISNULL(number))
		return NULL;
	named = PG_GETARG_TEXT_PP(number);
	if (VARSIZE_ANY_EXHDR(named) == 0 || VARSIZE_ANY_EXHDR(named) > IDEM_MAX_KEY_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"operation\" must be 1 to %d bytes long", IDEM_MAX_KEY_BYTES)));
	return named;
}

/* Sets a checked key and a checked operation, which may be NULL: then the key's. */
void
idem_claim_args_key(IdemClaimArgs *args, text *key, text *named)
{
	args->key = key;
	args->operation_named = named != NULL;
	args->operation = named != NULL ? named : idem_key_operation(args->key);
	if (args->operation == NULL)
		args->operation = cstring_to_text(IDEM_DEFAULT_OPERATION);
}

/* Sets where the call stands in its query, if it is called for a value. */
void
idem_claim_args_site(IdemClaimArgs *args, FunctionCallInfo fcinfo)
{
	args->location = -1;
	if (fcinfo->resultinfo != NULL || fcinfo->flinfo->fn_expr == NULL)
		return;
	args->site = fcinfo->flinfo;
	args->location = exprLocation(fcinfo->flinfo->fn_expr);
}

static void
read_args(FunctionCallInfo fcinfo, IdemClaimArgs *args)
{
	memset(args, 0, sizeof(*args));
	idem_claim_args_key(args, idem_key_arg(fcinfo), idem_operation_arg(fcinfo, 2));
	if (!PG_ARGISNULL(1))
		args->request = PG_GETARG_JSONB_P(1);
	if (!PG_ARGISNULL(3))
		args->lease = idem_interval_us(PG_GETARG_INTERVAL_P(3), "lease", 1, IDEM_MAX_LEASE_US);
	if (!PG_ARGISNULL(5))
		args->token = PG_GETARG_UUID_P(5);
	if (args->token != NULL && idem_token_is_nil(args->token))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"token\" must not be the nil UUID")));
	if (!PG_ARGISNULL(6))
	{
		args->digest = PG_GETARG_BYTEA_PP(6);
		check_digest(args->digest);
	}
	idem_claim_args_site(args, fcinfo);
}

static void
set_pointer(Datum *values, bool *nulls, int col, const void *value)
{
	nulls[col] = value == NULL;
	values[col] = PointerGetDatum(value);
}

/* Fills the columns of idem_claim_result, IDEM_ANSWER_COLUMNS of them. */
void
idem_answer_columns(const IdemAnswer *answer, Datum *values, bool *nulls)
{
	values[0] = CStringGetTextDatum(outcome_names[answer->outcome]);
	nulls[0] = false;
	set_pointer(values, nulls, 1, answer->has_token ? &answer->token : NULL);
	values[2] = Int32GetDatum(answer->attempts);
	nulls[2] = answer->outcome == IDEM_CONFLICT;
	values[3] = TimestampTzGetDatum(answer->lease_until);
	nulls[3] = answer->lease_until == IDEM_NO_TIME;
	set_pointer(values, nulls, 4, answer->retry_after >= 0 ? idem_us_interval(answer->retry_after) : NULL);
	set_pointer(values, nulls, 5, answer->result_json);
	set_pointer(values, nulls, 6, answer->result_body);
	set_pointer(values, nulls, 7, answer->error_code);
	set_pointer(values, nulls, 8, answer->error_message);
	set_pointer(values, nulls, 9, answer->previous ? cstring_to_text(answer->previous) : NULL);
	set_pointer(values, nulls, 10, answer->progress);
}

/* The row type of the calling function, kept for the life of the call site. */
TupleDesc
idem_result_desc(FunctionCallInfo fcinfo)
{
	TupleDesc	desc = (TupleDesc) fcinfo->flinfo->fn_extra;

	if (desc == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(fcinfo->flinfo->fn_mcxt);

		if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
			elog(ERROR, "return type must be a row type");
		desc = BlessTupleDesc(desc);
		fcinfo->flinfo->fn_extra = desc;
		MemoryContextSwitchTo(old);
	}
	return desc;
}

Datum
idem_answer_datum(FunctionCallInfo fcinfo, const IdemAnswer *answer)
{
	Datum		values[IDEM_ANSWER_COLUMNS];
	bool		nulls[IDEM_ANSWER_COLUMNS];

	idem_answer_columns(answer, values, nulls);
	return HeapTupleGetDatum(heap_form_tuple(idem_result_desc(fcinfo), values, nulls));
}

/*
 * idem_claim(key, request, operation, lease, wait, token, digest)
 */
PG_FUNCTION_INFO_V1(idem_claim);
Datum
idem_claim(PG_FUNCTION_ARGS)
{
	IdemClaimArgs args;
	IdemAnswer	answer;
	int64		wait = 0;

	idem_write_prologue("idem_claim()");
	read_args(fcinfo, &args);
	if (!PG_ARGISNULL(4))
		wait = idem_interval_us(PG_GETARG_INTERVAL_P(4), "wait", 0, IDEM_MAX_LEASE_US);
	idem_claim_waiting(fcinfo->flinfo->fn_oid, &args, wait, &answer);
	return idem_answer_datum(fcinfo, &answer);
}
