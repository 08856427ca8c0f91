/*-------------------------------------------------------------------------
 *
 * change.c
 *	  The protocol of every call that changes an unfinished record.
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
		case IDEM_REMOVE:
			return idem_store_delete_open(st, probe);
	}
	pg_unreachable();
}

static bool
fits(const IdemProbe *probe, const pg_uuid_t *token)
{
	if (probe->presence != IDEM_PRESENT || probe->rec.slice != IDEM_SLICE_OPEN)
		return false;
	return token == NULL ||
		(probe->rec.status == IDEM_PROCESSING && idem_token_is(&probe->rec, token));
}

typedef enum RoundEnd
{
	ROUND_DONE,
	ROUND_NOT_OURS,
	ROUND_WAIT_XACT,
	ROUND_WAIT_ROW
} RoundEnd;

/* One round; the key lock is not held when it returns. */
static RoundEnd
change_round(IdemStore *st, const text *key, const pg_uuid_t *token,
			 IdemApply apply, void *arg, IdemProbe *probe)
{
	RoundEnd	end = ROUND_DONE;

	idem_keylock_wait(key);
	idem_store_probe(st, key, probe);
	if (probe->presence != IDEM_ABSENT)
		idem_check_owner(probe->rec.owner);
	if (probe->presence == IDEM_IN_DOUBT)
		end = ROUND_WAIT_XACT;
	else if (!fits(probe, token))
		end = ROUND_NOT_OURS;
	else
	{
		IdemRecord	next = probe->rec;
		IdemChange	change = apply(&next, idem_policy_get(st->cat, next.operation), idem_now(), arg);

		if (write_change(st, probe, change, &next) == IDEM_ROW_BUSY)
			end = ROUND_WAIT_ROW;
	}
	idem_keylock_release(key);
	return end;
}

bool
idem_change_open(const IdemCatalog *cat, const text *key, const pg_uuid_t *token,
				 IdemApply apply, void *arg, IdemProbe *probe)
{
	IdemStore	st;
	RoundEnd	end;

	idem_store_open(&st, cat);
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		end = change_round(&st, key, token, apply, arg, probe);
		if (end == ROUND_WAIT_XACT)
			idem_store_wait_xact(&st, probe);
		else if (end == ROUND_WAIT_ROW)
			idem_store_wait_row(&st, probe);
		else
			break;
	}
	idem_store_close(&st);
	return end == ROUND_DONE;
}
