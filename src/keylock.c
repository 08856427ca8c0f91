/*-------------------------------------------------------------------------
 *
 * keylock.c
 *	  The key lock: a heavyweight lock on the 64-bit hash of a key.
 *
 * Contract: every function that writes a record holds its key's lock from its
 * probe to its last write, and lets go of it before it returns, so that a
 * transaction holds none however many keys it claims.  A holder never waits
 * for a transaction, a row or a latch; so waiting for the lock is short and
 * can be part of no deadlock.  An error releases it with the transaction.
 *
 * The tag is that of an advisory lock with a class of its own in the fourth
 * field (pg_advisory_lock uses 1 and 2), so pg_locks shows it as "advisory" and
 * no advisory lock of an application can collide with it.  Two keys with the
 * same hash only wait for each other.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/lock.h"

#include "idempotency.h"

#define IDEM_LOCK_CLASS		0x1de

static void
key_tag(LOCKTAG *tag, const text *key)
{
	uint64		hash = hash_bytes_extended((const unsigned char *) VARDATA_ANY(key),
										   (int) VARSIZE_ANY_EXHDR(key), 0);

	SET_LOCKTAG_ADVISORY(*tag, MyDatabaseId, (uint32) (hash >> 32), (uint32) hash, IDEM_LOCK_CLASS);
}

/* Takes the lock if it is free; false if not. */
bool
idem_keylock_try(const text *key)
{
	LOCKTAG		tag;

	key_tag(&tag, key);
	return LockAcquire(&tag, ExclusiveLock, false, true) != LOCKACQUIRE_NOT_AVAIL;
}

/* Waits for the lock; interruptible, honours lock_timeout (55P03). */
void
idem_keylock_wait(const text *key)
{
	LOCKTAG		tag;

	key_tag(&tag, key);
	(void) LockAcquire(&tag, ExclusiveLock, false, false);
}

void
idem_keylock_release(const text *key)
{
	LOCKTAG		tag;

	key_tag(&tag, key);
	(void) LockRelease(&tag, ExclusiveLock, false);
}
