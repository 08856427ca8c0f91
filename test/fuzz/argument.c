/*
 * argument.c -- libFuzzer target: checks of arguments and the arithmetic of
 * retries (src/arguments.c, src/policy.c), against 128-bit integers.
 */
#include "shim.h"

#include <math.h>


int			LLVMFuzzerTestOneInput(const uint8 *data, size_t size);

static int64
random_int64(Input *in)
{
	static const int64 edges[] = {0, 1, -1, 2, 1000000, 30000000, PG_INT64_MAX, PG_INT64_MIN, PG_INT64_MAX - 1,
		IDEM_MAX_LEASE_US, IDEM_MAX_LEASE_US + 1, IDEM_MAX_LEASE_US - 1, USECS_PER_DAY, INT64CONST(1) << 53};

	return take(in, 3) ? edges[take(in, lengthof(edges))] : take64(in);
}

static void
intervals(Input *in)
{
	static const int32 edges[] = {0, 1, -1, 366, 367, -366, PG_INT32_MAX, PG_INT32_MIN, 106751991, -106751992};
	Interval   *span = palloc(sizeof(Interval));
	int64		min = take(in, 2);
	int64		max = take(in, 2) ? IDEM_MAX_LEASE_US : PG_INT64_MAX;
	int64		us = 0;
	__int128	exact;
	bool		finite = true;
	const char *state;

	span->time = random_int64(in);
	span->day = take(in, 2) ? edges[take(in, lengthof(edges))] : (int32) take64(in);
	span->month = take(in, 4) ? 0 : edges[take(in, lengthof(edges))];
#ifdef INTERVAL_NOT_FINITE
	finite = !INTERVAL_NOT_FINITE(span);
#endif
	exact = (__int128) span->day * USECS_PER_DAY + span->time;
	/* days alone beyond 64 bits are refused, whatever the time part takes off */
	if ((__int128) span->day * USECS_PER_DAY != (int64) ((__int128) span->day * USECS_PER_DAY))
		finite = false;
	state = TRY(us = idem_interval_us(span, "lease", min, max));
	if (finite && span->month == 0 && exact >= min && exact <= max)
		CHECK(state == NULL && us == exact && idem_us_interval(us)->time == us);
	else
		CHECK(RAISED(state, "22023"));
}

static double
random_double(Input *in)
{
	static const double edges[] = {1, 1.0000001, 2, 10, 1000, 1e300, 1.7976931348623157e308};
	union
	{
		int64		i;
		double		d;
	}			bits;

	if (take(in, 2))
		return edges[take(in, lengthof(edges))];
	bits.i = take64(in);
	/* what the policy and idem_backoff() let through */
	return isfinite(bits.d) && bits.d >= 1 ? bits.d : 2;
}

static void
backoffs(Input *in)
{
	static const int32 attempts[] = {1, 2, 3, 10, 64, 10000, PG_INT32_MAX};
	int32		attempt = take(in, 2) ? attempts[take(in, lengthof(attempts))] : 1 + (int32) take(in, 65536);
	int64		base = random_int64(in);
	int64		cap = random_int64(in);
	double		factor = random_double(in);
	IdemJitter	jitter = (IdemJitter) take(in, 3);
	double		random = take(in, 65536) / 65536.0;
	int64		delay;
	int64		whole;

	base = base < 0 ? 0 : base;
	cap = cap < 0 ? 0 : cap;
	delay = idem_policy_backoff(attempt, base, factor, cap, jitter, random);
	whole = idem_policy_backoff(attempt, base, factor, cap, IDEM_JITTER_NONE, random);
	CHECK(delay >= 0 && delay <= cap && delay <= whole);
	if (base > 0 && cap > 0)
	{
		/* base * factor^(attempt - 1), at most cap */
		long double exact = base * powl(factor, (long double) attempt - 1);

		exact = exact < cap ? exact : cap;
		CHECK(fabsl(whole - exact) <= 1 + exact * 1e-6L);
	}
	/* doubles have 53 bits: at most 1024 microseconds off */
	if (jitter == IDEM_JITTER_FULL)
		CHECK(fabs(delay - (double) whole * random) <= 1024);
	if (jitter == IDEM_JITTER_EQUAL)
		CHECK(fabs(delay - ((double) whole / 2 + (double) whole / 2 * random)) <= 1024);
	CHECK(attempt == 1 || whole >= idem_policy_backoff(attempt - 1, base, factor, cap, IDEM_JITTER_NONE, 0));
	CHECK(whole >= Min(base, cap) || base > (INT64CONST(1) << 53) || cap > (INT64CONST(1) << 53));
}

/* A message is cut before the first character that does not fit whole. */
static void
messages(Input *in)
{
	static const char *const characters[] = {"a", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"};
	Bytes		b = {0};
	int			len = IDEM_MAX_MESSAGE_BYTES - 8 + take(in, 16);
	int			whole = 0;
	const char *character = characters[take(in, 4)];
	text	   *cut;

	put(&b, "", 0);
	for (int i = take(in, 4); i > 0; i--)
		put_str(&b, "x");
	while (b.len < len)
	{
		put_str(&b, character);
		if (b.len <= IDEM_MAX_MESSAGE_BYTES)
			whole = b.len;
	}
	cut = idem_cut_message(shim_text(b.data, b.len, false));
	CHECK(VARSIZE_ANY_EXHDR(cut) == whole && memcmp(VARDATA_ANY(cut), b.data, whole) == 0);
	free(b.data);
}

int
LLVMFuzzerTestOneInput(const uint8 *data, size_t size)
{
	Input		in = {data, data + size};

	shim_reset(PG_UTF8);
	intervals(&in);
	backoffs(&in);
	if (take(&in, 64) == 1)
		messages(&in);
	return 0;
}
