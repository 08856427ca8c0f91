/*-------------------------------------------------------------------------
 *
 * idempotency.c
 *	  Library start, settings, and the extension's clock.
 *
 * Nothing here needs shared_preload_libraries: the functions work in a
 * session that loaded the library on first call.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "fmgr.h"
#include "utils/guc.h"
#include "utils/timestamp.h"

#include "failpoint.h"
#include "idempotency.h"

PG_MODULE_MAGIC;

PGDLLEXPORT void _PG_init(void);

static double clock_offset = 0;

/*
 * Server time, shifted by idempotency.clock_offset.  Read it after the key
 * lock is held: a decision about a lease uses the time at which it is taken,
 * not the time at which the statement or the wait began.
 */
TimestampTz
idem_now(void)
{
	TimestampTz now = GetCurrentTimestamp();

	if (clock_offset != 0)
		now += (int64) rint(clock_offset * USECS_PER_SEC);
	return now;
}

void
_PG_init(void)
{
	DefineCustomRealVariable("idempotency.clock_offset",
							 "Shifts the clock that the extension reads.",
							 "For tests of leases, retries and retention only.",
							 &clock_offset,
							 0, -3.0e9, 3.0e9,
							 PGC_SUSET,
							 GUC_UNIT_S,
							 NULL, NULL, NULL);
#ifdef IDEM_FAILPOINTS
	idem_failpoint_init();
#endif
	MarkGUCPrefixReserved("idempotency");
	idem_catalog_init();
}
