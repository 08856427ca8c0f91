/*
 * key.c -- libFuzzer target: keys of three parts (src/key.c, arguments.c).
 *
 * Packing and unpacking are inverse in both directions, unlike parts give
 * unlike keys, limits hold to the byte, and a downstream key is made of
 * exactly its two texts.
 */
#include "shim.h"

int			LLVMFuzzerTestOneInput(const uint8 *data, size_t size);

extern Datum idem_key(PG_FUNCTION_ARGS);
extern Datum idem_key_parts(PG_FUNCTION_ARGS);
extern Datum idem_downstream_key(PG_FUNCTION_ARGS);

static Datum
call(PGFunction function, int nargs, text **args)
{
	LOCAL_FCINFO(fcinfo, 3);
	Datum		result;

	InitFunctionCallInfoData(*fcinfo, NULL, nargs, 0, NULL, NULL);
	for (int i = 0; i < nargs; i++)
	{
		fcinfo->args[i].value = PointerGetDatum(args[i]);
		fcinfo->args[i].isnull = args[i] == NULL;
	}
	result = function(fcinfo);
	CHECK(!fcinfo->isnull);
	return result;
}

static bool
same(const text *a, const text *b)
{
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

/* Is it exactly these bytes? */
static bool
is_text(const text *a, const char *data, int len)
{
	return VARSIZE_ANY_EXHDR(a) == len && memcmp(VARDATA_ANY(a), data, len) == 0;
}

static text *
random_text(Input *in, int limit)
{
	static const char letters[] = "%:%:253AaA\xC3\xA9";
	Bytes		b = {0};
	uint32		shape = take(in, 16);
	int			len;
	text	   *t;

	put(&b, "", 0);
	if (shape < 13)
	{
		len = take(in, 8);
		for (int i = 0; i < len; i++)
			put(&b, &letters[take(in, sizeof(letters) - 1)], 1);
	}
	else
	{
		/* around a limit: a run of one character, then another */
		char		c = letters[take(in, sizeof(letters) - 1)];
		char		d = letters[take(in, sizeof(letters) - 1)];

		len = shape == 13 ? take(in, 3000) : limit - 8 + take(in, 16);
		for (int i = 0; i < len; i++)
			put(&b, i == 0 ? &d : &c, 1);
	}
	t = shape == 0 && take(in, 4) == 0 ? NULL : shim_text(b.data, b.len, take(in, 2));
	free(b.data);
	return t;
}

/* "%" and ":" written %25 and %3A, the parts joined by ":". */
static void
expect_key(Bytes *b, text **parts)
{
	for (int i = 0; i < 3; i++)
	{
		if (i > 0)
			put_str(b, ":");
		for (int j = 0; j < VARSIZE_ANY_EXHDR(parts[i]); j++)
		{
			char		c = VARDATA_ANY(parts[i])[j];

			if (c == '%')
				put_str(b, "%25");
			else if (c == ':')
				put_str(b, "%3A");
			else
				put(b, &c, 1);
		}
	}
}

static const char *
expected_refusal(text **args, int nargs, const int *limits)
{
	/* each argument by itself, the first one first */
	for (int i = 0; i < nargs; i++)
	{
		if (args[i] == NULL)
			return "22004";
		if (VARSIZE_ANY_EXHDR(args[i]) == 0)
			return "22023";
		if (limits[i] > 0 && VARSIZE_ANY_EXHDR(args[i]) > limits[i])
			return "54000";
	}
	return NULL;
}

static void
check_state(const char *state, const char *expected)
{
	if (expected == NULL ? state != NULL : !RAISED(state, expected))
		FAIL("%s instead of %s", state ? state : "no error", expected ? expected : "no error");
}

/* Parts to key and back. */
static text *
pack(text **parts)
{
	const int	limits[3] = {0, 0, 0};
	const char *refusal = expected_refusal(parts, 3, limits);
	const char *state;
	Bytes		expected = {0};
	Datum		packed = 0;
	text	   *key;

	state = TRY(packed = call(idem_key, 3, parts));
	if (refusal == NULL)
	{
		expect_key(&expected, parts);
		if (expected.len > IDEM_MAX_KEY_BYTES)
			refusal = "54000";
	}
	check_state(state, refusal);
	if (state != NULL)
	{
		free(expected.data);
		return NULL;
	}
	key = (text *) DatumGetPointer(packed);
	if (!is_text(key, expected.data, expected.len))
		FAIL("key is not %s", expected.data);
	free(expected.data);
	CHECK(TRY(call(idem_key_parts, 1, &key)) == NULL);
	for (int i = 0; i < 3; i++)
	{
		CHECK(!shim_row_nulls[i]);
		CHECK(same((text *) DatumGetPointer(shim_row[i]), parts[i]));
	}
	CHECK(same(idem_key_operation(key), parts[1]));
	return key;
}

/* Any text to parts and back: the same key, or no key of three parts can be it. */
static void
unpack(text *key)
{
	const int	limits[1] = {IDEM_MAX_KEY_BYTES};
	const char *refusal = expected_refusal(&key, 1, limits);
	const char *s;
	int			len;
	int			colons = 0;
	bool		has_parts = true;
	text	   *parts[3];
	Datum		packed = 0;

	check_state(TRY(call(idem_key_parts, 1, &key)), refusal);
	if (refusal != NULL)
		return;
	s = VARDATA_ANY(key);
	len = VARSIZE_ANY_EXHDR(key);
	for (int i = 0; i < len; i++)
	{
		if (s[i] == ':')
		{
			colons++;
			if (i == 0 || i == len - 1 || s[i - 1] == ':')
				has_parts = false;
		}
		if (s[i] == '%' && !(i + 2 < len && (memcmp(s + i, "%25", 3) == 0 || memcmp(s + i, "%3A", 3) == 0)))
			has_parts = false;
	}
	if (colons != 2)
		has_parts = false;
	for (int i = 0; i < 3; i++)
	{
		CHECK(shim_row_nulls[i] == !has_parts);
		parts[i] = has_parts ? (text *) DatumGetPointer(shim_row[i]) : NULL;
	}
	if (!has_parts)
	{
		CHECK(idem_key_operation(key) == NULL);
		return;
	}
	CHECK(TRY(packed = call(idem_key, 3, parts)) == NULL);
	CHECK(same((text *) DatumGetPointer(packed), key));
}

static void
downstream(text **args)
{
	const int	limits[2] = {IDEM_MAX_KEY_BYTES, IDEM_MAX_STEP_BYTES};
	const char *refusal = expected_refusal(args, 2, limits);
	Bytes		framed = {0};
	Datum		result = 0;
	pg_uuid_t  *uuid;

	check_state(TRY(result = call(idem_downstream_key, 2, args)), refusal);
	if (refusal != NULL)
		return;
	uuid = DatumGetUUIDP(result);
	CHECK((uuid->data[6] & 0xF0) == 0x80 && (uuid->data[8] & 0xC0) == 0x80);
	for (int i = 0; i < 2; i++)
	{
		int			len = VARSIZE_ANY_EXHDR(args[i]);
		char		prefix[4] = {0, 0, (char) (len >> 8), (char) len};

		put(&framed, prefix, 4);
		put(&framed, VARDATA_ANY(args[i]), len);
	}
	CHECK(framed.len == shim_hashed_len && memcmp(framed.data, shim_hashed, framed.len) == 0);
	free(framed.data);
}

int
LLVMFuzzerTestOneInput(const uint8 *data, size_t size)
{
	Input		in = {data, data + size};
	text	   *parts[3];
	text	   *others[3];
	text	   *key;
	text	   *other;
	text	   *args[2];

	shim_reset(PG_UTF8);
	for (int i = 0; i < 3; i++)
		parts[i] = random_text(&in, IDEM_MAX_KEY_BYTES / (i + 1));
	key = pack(parts);
	for (int i = 0; i < 3; i++)
		others[i] = take(&in, 2) ? parts[i] : random_text(&in, 20);
	other = pack(others);
	if (key != NULL && other != NULL)
		CHECK(same(key, other) == (same(parts[0], others[0]) && same(parts[1], others[1]) && same(parts[2], others[2])));
	unpack(random_text(&in, IDEM_MAX_KEY_BYTES));
	args[0] = random_text(&in, IDEM_MAX_KEY_BYTES);
	args[1] = random_text(&in, IDEM_MAX_STEP_BYTES);
	downstream(args);
	return 0;
}
