/*
 * pointer.c -- libFuzzer target: sets of JSON Pointers (src/pointer.c).
 *
 * The input is a few pointers and a path.  The walk along the path is compared
 * with a search for the path's own pointer among those given, and what is
 * refused with RFC 6901.
 */
#include "shim.h"

#define MAX_POINTERS	24
#define MAX_DEPTH		6

int			LLVMFuzzerTestOneInput(const uint8 *data, size_t size);

static int
random_token(Input *in, char *token)
{
	static const char letters[] = "ab01/~\xC3\xA9\xF0-";
	int			len = take(in, 4);

	for (int i = 0; i < len; i++)
		token[i] = letters[take(in, sizeof(letters) - 1)];
	return len;
}

static void
put_token(Bytes *b, const char *token, int len)
{
	put_str(b, "/");
	for (int i = 0; i < len; i++)
	{
		if (token[i] == '~')
			put_str(b, "~0");
		else if (token[i] == '/')
			put_str(b, "~1");
		else
			put(b, token + i, 1);
	}
}

static const char *
expected_refusal(text **pointers, int count)
{
	for (int i = 0; i < count; i++)
	{
		char	   *s;
		int			len;

		if (pointers[i] == NULL)
			return "22004";
		s = VARDATA_ANY(pointers[i]);
		len = VARSIZE_ANY_EXHDR(pointers[i]);
		if (len == 0 || s[0] != '/')
			return "22023";
		for (int j = 0; j < len; j++)
			if (s[j] == '~' && !(j + 1 < len && (s[j + 1] == '0' || s[j + 1] == '1')))
				return "22023";
	}
	return NULL;
}

/* Is there a pointer that is "path", or that begins with it and goes on? */
static bool
among(text **pointers, int count, const Bytes *path, bool below)
{
	for (int i = 0; i < count; i++)
	{
		const char *s = VARDATA_ANY(pointers[i]);
		int			len = VARSIZE_ANY_EXHDR(pointers[i]);

		if (len < path->len || memcmp(s, path->data, path->len) != 0)
			continue;
		if (below ? len > path->len && s[path->len] == '/' : len == path->len)
			return true;
	}
	return false;
}

int
LLVMFuzzerTestOneInput(const uint8 *data, size_t size)
{
	Input		in = {data, data + size};
	text	   *pointers[MAX_POINTERS];
	char		path[MAX_DEPTH][4];
	int			lens[MAX_DEPTH];
	int			count = take(&in, MAX_POINTERS + 1);
	int			depth = 1 + take(&in, MAX_DEPTH);
	ArrayType  *array;
	IdemPointer *set;
	IdemPointerRange range;
	Bytes		at = {0};
	const char *state;
	const char *refusal;

	shim_reset(PG_UTF8);
	for (int i = 0; i < depth; i++)
		lens[i] = random_token(&in, path[i]);
	for (int i = 0; i < count; i++)
	{
		Bytes		b = {0};
		uint32		kind = take(&in, 32);

		put(&b, "", 0);
		if (kind < 2)
		{
			/* any bytes, most of them not a pointer */
			int			len = take(&in, 8);

			for (int j = 0; j < len; j++)
			{
				char		c = "/~01a\0\xFF%"[take(&in, 8)];

				put(&b, &c, 1);
			}
		}
		else
		{
			/* along the path, then maybe away from it */
			int			along = take(&in, depth + 1);
			int			away = along == 0 ? 1 + take(&in, 3) : take(&in, 3);

			for (int j = 0; j < along; j++)
				put_token(&b, path[j], lens[j]);
			for (int j = 0; j < away; j++)
			{
				char		token[4];
				int			len = random_token(&in, token);

				put_token(&b, token, len);
			}
		}
		pointers[i] = kind == 31 ? NULL : shim_text(b.data, b.len, kind & 1);
		free(b.data);
	}
	refusal = expected_refusal(pointers, count);
	array = count == 0 && take(&in, 2) ? NULL : shim_array(pointers, count);
	state = TRY(set = idem_pointers_compile(array, &range));
	if (refusal != NULL)
	{
		CHECK(RAISED(state, refusal));
		return 0;
	}
	CHECK(state == NULL);
	CHECK((set == NULL) == (count == 0));
	for (int i = 0; i < depth; i++)
	{
		/* the exact size, so that reading past the token is seen */
		char	   *token = palloc(lens[i]);
		bool		ends;

		memcpy(token, path[i], lens[i]);
		put_token(&at, path[i], lens[i]);
		CHECK(TRY(ends = idem_pointers_step(set, &range, i, token, lens[i])) == NULL);
		if (ends != among(pointers, count, &at, false))
			FAIL("\"%s\" is %sleft out", at.data, ends ? "" : "not ");
		if (ends)
			break;
		if ((range.lo < range.hi) != among(pointers, count, &at, true))
			FAIL("wrong range below \"%s\"", at.data);
	}
	free(at.data);
	return 0;
}
