/*-------------------------------------------------------------------------
 *
 * once.c
 *	  idem_once: the first of a key, in the transaction of its business write.
 *
 *	stands as			idem_once
 *	(no record)			succeeded, written straight to the ring: true
 *	LAPSED, DUE			next attempt, succeeded: true
 *	SUCCEEDED			false
 *	in doubt			waits for that transaction, as a unique index does
 *	anything else		ID003: neither true nor false would be right
 *
 * The uncommitted row in the ring is what other sessions see; no lock is kept.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "claim.h"
#include "failpoint.h"
#include "idempotency.h"
#include "once.h"

typedef enum OnceEnd
{
	ONCE_FIRST,
	ONCE_AGAIN,
	ONCE_WAIT_XACT,
	ONCE_WAIT_ROW
} OnceEnd;

static void
wrong_state(const char *problem)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_WRONG_STATE),
			 errmsg("idempotency key %s", problem)));
}

static OnceEnd
first_ever(IdemStore *st, const IdemClaimArgs *args)
{
	IdemRecord	rec;
	TimestampTz now = idem_now();

	if (IsolationUsesXactSnapshot() && idem_store_snapshot_sees(st->cat, args->key))
		idem_serialization_failure();
	idem_first_attempt(args, idem_policy_get(st->cat, args->operation), now, &rec);
	rec.has_token = false;
	idem_become_succeeded(&rec, now, NULL, NULL);
	idem_store_insert_finished(st, &rec);
	return ONCE_FIRST;
}

static OnceEnd
next_attempt(IdemStore *st, IdemProbe *probe, IdemStanding standing, TimestampTz now)
{
	IdemRecord	next = probe->rec;
	pg_uuid_t	token;

	idem_new_token(NULL, &token);
	idem_become_processing(&next, standing, &token, now, 0);
	idem_become_succeeded(&next, now, NULL, NULL);
	return idem_store_finish(st, probe, &next) == IDEM_WRITTEN ? ONCE_FIRST : ONCE_WAIT_ROW;
}

static OnceEnd
on_record(IdemStore *st, const IdemClaimArgs *args, IdemProbe *probe)
{
	const IdemPolicy *policy = idem_policy_get(st->cat, probe->rec.operation);
	TimestampTz now = idem_now();
	IdemStanding standing = idem_standing(&probe->rec, policy, now);

	if (!idem_claim_same_request(args, &probe->rec, policy))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("idempotency key was used with another request")));
	switch (standing)
	{
		case IDEM_STANDS_SUCCEEDED:
			return ONCE_AGAIN;
		case IDEM_LAPSED:
		case IDEM_DUE:
			return next_attempt(st, probe, standing, now);
		case IDEM_HELD:
			wrong_state("is held by a claim");
			break;
		case IDEM_WAITING:
			wrong_state("waits for its next attempt");
			break;
		case IDEM_STANDS_UNKNOWN:
			wrong_state("is of unknown outcome");
			break;
		case IDEM_STANDS_EXHAUSTED:
		case IDEM_STANDS_FAILED:
			wrong_state("has failed");
			break;
	}
	pg_unreachable();
}

/* Acts on a probe.  Needs the key lock, unless the record is finished or in doubt. */
static OnceEnd
once_act(IdemStore *st, const IdemClaimArgs *args, IdemProbe *probe)
{
	if (probe->presence == IDEM_ABSENT)
		return first_ever(st, args);
	idem_check_owner(probe->rec.owner);
	if (probe->presence == IDEM_IN_DOUBT)
		return ONCE_WAIT_XACT;
	if (!probe->snapshot_sees)
		idem_serialization_failure();
	return on_record(st, args, probe);
}

static OnceEnd
once_round(IdemStore *st, const IdemClaimArgs *args, IdemProbe *probe)
{
	OnceEnd		end;
	IdemKeyLock locked = idem_keylock_try(args->key);

	if (locked == IDEM_KEY_OURS)
		wrong_state("is being executed further out in this transaction");
	idem_store_probe(st, args->key, probe);
	if (locked == IDEM_KEY_BUSY && !idem_answered_by_probe(probe))
	{
		idem_keylock_wait(args->key);
		locked = IDEM_KEY_LOCKED;
		idem_store_probe(st, args->key, probe);
	}
	end = once_act(st, args, probe);
	IDEM_FAILPOINT("once-decided");
	if (locked == IDEM_KEY_LOCKED)
		idem_keylock_release(args->key);
	return end;
}

/* Is this the first of the key?  Waits for transactions in doubt. */
bool
idem_once_with(IdemStore *st, const IdemClaimArgs *args)
{
	IdemProbe	probe;
	OnceEnd		end;

	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		end = once_round(st, args, &probe);
		if (end == ONCE_WAIT_XACT)
			idem_store_wait_xact(st, &probe);
		else if (end == ONCE_WAIT_ROW)
			idem_store_wait_row(st, &probe);
		else
			break;
	}
	idem_store_settle(st);
	return end == ONCE_FIRST;
}

/*
 * idem_once(key, request)
 */
PG_FUNCTION_INFO_V1(idem_once);
Datum
idem_once(PG_FUNCTION_ARGS)
{
	IdemClaimArgs args = {.location = -1};
	IdemStore	st;
	bool		first;

	idem_write_prologue("idem_once()");
	idem_claim_args_key(&args, idem_key_arg(fcinfo), NULL);
	if (!PG_ARGISNULL(1))
		args.request = PG_GETARG_JSONB_P(1);
	idem_store_open(&st, idem_catalog(fcinfo->flinfo->fn_oid));
	first = idem_once_with(&st, &args);
	idem_store_close(&st);
	PG_RETURN_BOOL(first);
}
