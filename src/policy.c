/*-------------------------------------------------------------------------
 *
 * policy.c
 *	  The arithmetic of retries.  Pure: no clock, no random source, no storage.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "idempotency.h"

/*
 * Delay after the given attempt (1 = the first) in microseconds: base *
 * factor^(attempt-1), never over cap, never negative.  random is in [0, 1) and
 * is used as the jitter says: full = 0 .. delay, equal = delay/2 .. delay,
 * none = delay.
 */
int64
idem_policy_backoff(int32 attempt, int64 base, double factor, int64 cap,
					IdemJitter jitter, double random)
{
	double		delay = (double) base;

	if (base <= 0 || cap <= 0)
		return 0;
	if (attempt > 1)
		delay *= pow(factor, (double) attempt - 1);
	/* !(x < cap) also catches infinity and NaN */
	if (!(delay < (double) cap))
		delay = (double) cap;

	if (jitter == IDEM_JITTER_FULL)
		delay *= random;
	else if (jitter == IDEM_JITTER_EQUAL)
		delay = delay / 2 + delay / 2 * random;

	return delay >= (double) cap ? cap : (int64) rint(delay);
}
