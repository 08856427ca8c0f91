/*-------------------------------------------------------------------------
 *
 * keylock.c
 *	  The key lock, and the guard of a one-call execution.
 *
 * Key lock: a heavyweight lock on the 64-bit hash of a key.  Every function
 * that writes a record holds its key's lock from its probe to its last write, and lets
 * go of it before it returns, so that a transaction holds none however many
 * keys it claims.  A holder never waits for a transaction, a row or a latch, so
 * waiting for the lock is short.  An error releases it with the transaction.
 *
 * Guard: idem_execute of a new key writes no row before its handler has run.
 * It holds the key lock while the handler runs, and, so that others need not
 * wait that long, a second lock, the guard, which tells them so:
 *
 *	  executor	guard exclusive (only if free at once), then the key lock; both
 *				until its record is written, which then speaks for itself
 *	  others	key lock, if free at once.  Else, before they wait for it, the
 *				guard shared (only if free at once), until they have the key
 *				lock.  Guard not free: in progress.
 *
 * So who waits for the key lock with the shared guard waits for short calls only,
 * since no executor can come in between.  Functions that wait for transactions
 * anyway (idem_complete, operators, idem_once) wait for the key lock as it is.
 *
 * A key lock that we hold ourselves when a call begins is that of an
 * idem_execute further out: the key is in progress.
 *
 * The tags are those of advisory locks with classes of their own in the fourth
 * field (pg_advisory_lock uses 1 and 2), so pg_locks shows them as "advisory" and
 * no advisory lock of an application can collide with them.  Two keys with the
 * same hash only disturb each other.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/lock.h"

#include "idempotency.h"

#define KEY_CLASS		0x1de
#define GUARD_CLASS		0x1df

static LOCKTAG
tag_of(const text *key, uint16 class)
{
	LOCKTAG		tag;
	uint64		hash = hash_bytes_extended((const unsigned char *) VARDATA_ANY(key),
										   (int) VARSIZE_ANY_EXHDR(key), 0);

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) (hash >> 32), (uint32) hash, class);
	return tag;
}

/* Takes the key lock if it is free.  OURS: an outer call holds it, not taken again. */
IdemKeyLock
idem_keylock_try(const text *key)
{
	LOCKTAG		tag = tag_of(key, KEY_CLASS);

	switch (LockAcquire(&tag, ExclusiveLock, false, true))
	{
		case LOCKACQUIRE_NOT_AVAIL:
			return IDEM_KEY_BUSY;
		case LOCKACQUIRE_OK:
			return IDEM_KEY_LOCKED;
		default:
			(void) LockRelease(&tag, ExclusiveLock, false);
			return IDEM_KEY_OURS;
	}
}

/* Waits for the key lock; interruptible, honours lock_timeout (55P03). */
void
idem_keylock_wait(const text *key)
{
	LOCKTAG		tag = tag_of(key, KEY_CLASS);

	(void) LockAcquire(&tag, ExclusiveLock, false, false);
}

void
idem_keylock_release(const text *key)
{
	LOCKTAG		tag = tag_of(key, KEY_CLASS);

	(void) LockRelease(&tag, ExclusiveLock, false);
}

/*
 * After BUSY: waits for the key lock if only a short call holds it.  False,
 * and not locked, if an execution of the key is going on.
 */
bool
idem_keylock_wait_unguarded(const text *key)
{
	LOCKTAG		guard = tag_of(key, GUARD_CLASS);

	if (LockAcquire(&guard, ShareLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		return false;
	idem_keylock_wait(key);
	(void) LockRelease(&guard, ShareLock, false);
	return true;
}

/* Takes guard and key lock for an execution; false, and neither, if the guard is not free. */
bool
idem_guard_try(const text *key)
{
	LOCKTAG		guard = tag_of(key, GUARD_CLASS);

	switch (LockAcquire(&guard, ExclusiveLock, false, true))
	{
		case LOCKACQUIRE_NOT_AVAIL:
			return false;
		case LOCKACQUIRE_OK:
			idem_keylock_wait(key);
			return true;
		default:
			(void) LockRelease(&guard, ExclusiveLock, false);
			return false;
	}
}

void
idem_guard_release(const text *key)
{
	LOCKTAG		guard = tag_of(key, GUARD_CLASS);

	idem_keylock_release(key);
	(void) LockRelease(&guard, ExclusiveLock, false);
}
