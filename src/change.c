/*-------------------------------------------------------------------------
 *
 * change.c
 *	  The protocol of every call that changes an existing record, but for claims.
 *
 *		round:	key lock
 *				probe
 *				  in doubt		-> let go of the lock, wait for that transaction, again
 *				  not ours		-> let go, tell the caller
 *				clock, apply, write
 *				  row busy		-> let go, wait for and take the row lock, again
 *				let go of the lock
 *
 * The decision is taken on the latest committed version in every isolation
 * level: the token is the proof, not the snapshot.  So a heartbeat committed by a
 * second connection does not fail a REPEATABLE READ transaction that completes.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "change.h"
#include "failpoint.h"
#include "idempotency.h"

static IdemWrite
write_change(IdemStore *st, IdemProbe *probe, IdemChange change, IdemRecord *next)
{
	switch (change)
	{
		case IDEM_KEEP:
			return IDEM_WRITTEN;
		case IDEM_REPLACE:
			return idem_store_update_open(st, probe, next);
		case IDEM_MOVE:
			return idem_store_finish(st, probe, next);
		case IDEM_REOPEN:
			return idem_store_reopen(st, probe, next);
		case IDEM_REMOVE:
			return idem_store_delete(st, probe);
	}
	pg_unreachable();
}

/* One change in the making. */
typedef struct Job
{
	IdemStore  *st;
	const text *key;
	const pg_uuid_t *token;		/* NULL = any record */
	bool		own_role;		/* only a record of the caller's role */
	IdemApply	apply;
	void	   *arg;
	IdemProbe  *probe;
} Job;

typedef enum RoundEnd
{
	ROUND_DONE,
	ROUND_NOT_OURS,
	ROUND_WAIT_XACT,
	ROUND_WAIT_ROW
} RoundEnd;

static bool
fits(const Job *job)
{
	const IdemRecord *rec = &job->probe->rec;

	if (job->probe->presence != IDEM_PRESENT)
		return false;
	return job->token == NULL ||
		(rec->status == IDEM_PROCESSING && idem_token_is(rec, job->token));
}

/* What follows the key lock in a round. */
static RoundEnd
change_locked(Job *job)
{
	IdemRecord	next;
	IdemChange	change;

	idem_store_probe(job->st, job->key, job->probe);
	if (job->own_role && job->probe->presence != IDEM_ABSENT)
		idem_check_owner(job->probe->rec.owner);
	if (job->probe->presence == IDEM_IN_DOUBT)
		return ROUND_WAIT_XACT;
	if (!fits(job))
		return ROUND_NOT_OURS;
	next = job->probe->rec;
	change = job->apply(&next, idem_policy_get(job->st->cat, next.operation), idem_now(), job->arg);
	IDEM_FAILPOINT("change-decided");
	if (write_change(job->st, job->probe, change, &next) == IDEM_ROW_BUSY)
		return ROUND_WAIT_ROW;
	IDEM_FAILPOINT("change-written");
	return ROUND_DONE;
}

/* Rounds until the change is made or is not to be made. */
static bool
change(Job *job)
{
	RoundEnd	end;

	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		idem_keylock_wait(job->key);
		end = change_locked(job);
		idem_keylock_release(job->key);
		if (end == ROUND_WAIT_XACT)
			idem_store_wait_xact(job->st, job->probe);
		else if (end == ROUND_WAIT_ROW)
			idem_store_wait_row(job->st, job->probe);
		else
			break;
	}
	idem_store_settle(job->st);
	return end == ROUND_DONE;
}

bool
idem_change_held(IdemStore *st, const text *key, const pg_uuid_t *token,
				 IdemApply apply, void *arg, IdemProbe *probe)
{
	Job			job = {.st = st, .key = key, .token = token, .own_role = true, .apply = apply, .arg = arg, .probe = probe};

	return change(&job);
}

bool
idem_change_claimed(IdemStore *st, const text *key, const pg_uuid_t *token,
					IdemApply apply, void *arg, IdemProbe *probe)
{
	Job			job = {.st = st, .key = key, .token = token, .apply = apply, .arg = arg, .probe = probe};

	return change(&job);
}

bool
idem_change_any(IdemStore *st, const text *key, IdemApply apply, void *arg, IdemProbe *probe)
{
	Job			job = {.st = st, .key = key, .apply = apply, .arg = arg, .probe = probe};

	return change(&job);
}

bool
idem_change_now(IdemStore *st, const text *key, IdemApply apply, void *arg)
{
	IdemProbe	probe;
	Job			job = {.st = st, .key = key, .apply = apply, .arg = arg, .probe = &probe};
	RoundEnd	end = ROUND_WAIT_XACT;

	if (idem_keylock_try(key) == IDEM_KEY_LOCKED)
	{
		end = change_locked(&job);
		idem_keylock_release(key);
	}
	idem_store_settle(st);
	return end == ROUND_DONE;
}
