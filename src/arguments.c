/*-------------------------------------------------------------------------
 *
 * arguments.c
 *	  Checks of arguments that several functions take.
 *
 * Intervals are microseconds inside the extension.  A day is 24 hours in every
 * time zone; months and years have no length and are refused.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/int.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "idempotency.h"

/*
 * Microseconds of an interval that must lie in [min, max].  Raises 22023
 * naming the argument "what".
 */
int64
idem_interval_us(const Interval *span, const char *what, int64 min, int64 max)
{
	int64		us;

	if (interval_is_infinite_compat(span))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"%s\" must be finite", what)));
	if (span->month != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"%s\" must not contain months or years", what),
				 errhint("Give days, hours or smaller units; a day is 24 hours.")));
	if (pg_mul_s64_overflow((int64) span->day, USECS_PER_DAY, &us) ||
		pg_add_s64_overflow(us, span->time, &us) ||
		us > max)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"%s\" is larger than " INT64_FORMAT " seconds", what, max / USECS_PER_SEC)));
	if (us < min)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 min > 0 ? errmsg("\"%s\" must be positive", what)
				 : errmsg("\"%s\" must not be negative", what)));
	return us;
}

/* A palloc'd interval of the given microseconds, without days. */
Interval *
idem_us_interval(int64 us)
{
	Interval   *span = (Interval *) palloc0(sizeof(Interval));

	span->time = us;
	return span;
}

/*
 * Checks a key argument that is not NULL; returns it detoasted.  Raises 22023
 * for an empty key, 54000 for one over IDEM_MAX_KEY_BYTES.
 */
text *
idem_check_key(text *key)
{
	if (VARSIZE_ANY_EXHDR(key) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("idempotency key must not be empty")));
	if (VARSIZE_ANY_EXHDR(key) > IDEM_MAX_KEY_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("idempotency key is longer than %d bytes", IDEM_MAX_KEY_BYTES)));
	return key;
}

/* The first argument of most functions: a checked key.  22004 for NULL. */
text *
idem_key_arg(FunctionCallInfo fcinfo)
{
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("idempotency key must not be null")));
	return idem_check_key(PG_GETARG_TEXT_PP(0));
}

/* The second argument of the holder's functions. */
pg_uuid_t *
idem_token_arg(FunctionCallInfo fcinfo)
{
	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("token must not be null")));
	return PG_GETARG_UUID_P(1);
}

/* An error code; 22023 if it is too long. */
text *
idem_check_code(text *code)
{
	if (VARSIZE_ANY_EXHDR(code) > IDEM_MAX_CODE_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"error_code\" is longer than %d bytes", IDEM_MAX_CODE_BYTES)));
	return code;
}

/* An error message, cut to IDEM_MAX_MESSAGE_BYTES on a character boundary. */
text *
idem_cut_message(text *message)
{
	int			len = VARSIZE_ANY_EXHDR(message);

	if (len > IDEM_MAX_MESSAGE_BYTES)
		len = pg_mbcliplen(VARDATA_ANY(message), len, IDEM_MAX_MESSAGE_BYTES);
	return cstring_to_text_with_len(VARDATA_ANY(message), len);
}
