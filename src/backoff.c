/*-------------------------------------------------------------------------
 *
 * backoff.c
 *	  idem_backoff: the delay that idem_fail takes, for looking at.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "common/pg_prng.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "idempotency.h"

static IdemJitter
jitter_arg(text *jitter)
{
	char	   *name = text_to_cstring(jitter);

	if (strcmp(name, "full") == 0)
		return IDEM_JITTER_FULL;
	if (strcmp(name, "equal") == 0)
		return IDEM_JITTER_EQUAL;
	if (strcmp(name, "none") == 0)
		return IDEM_JITTER_NONE;
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("jitter \"%s\" is not known", name),
			 errhint("Jitters are \"full\", \"equal\" and \"none\".")));
	return IDEM_JITTER_NONE;	/* keep compiler quiet */
}

/*
 * idem_backoff(attempt, base, factor, cap, jitter)
 */
PG_FUNCTION_INFO_V1(idem_backoff);
Datum
idem_backoff(PG_FUNCTION_ARGS)
{
	double		factor;
	int64		delay;

	for (int i = 0; i < 5; i++)
		if (PG_ARGISNULL(i))
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("arguments of idem_backoff must not be null")));
	factor = PG_GETARG_FLOAT8(2);
	if (PG_GETARG_INT32(0) < 1 || isnan(factor) || isinf(factor) || factor < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("attempt and factor must be at least 1")));
	delay = idem_policy_backoff(PG_GETARG_INT32(0),
								idem_interval_us(PG_GETARG_INTERVAL_P(1), "base", 0, PG_INT64_MAX),
								factor,
								idem_interval_us(PG_GETARG_INTERVAL_P(3), "cap", 0, PG_INT64_MAX),
								jitter_arg(PG_GETARG_TEXT_PP(4)),
								pg_prng_double(&pg_global_prng_state));
	PG_RETURN_INTERVAL_P(idem_us_interval(delay));
}
