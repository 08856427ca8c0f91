/*-------------------------------------------------------------------------
 *
 * canonical.c
 *	  Canonical text of a request: RFC 8785 with exact numbers.
 *
 * Members are sorted by the UTF-16 code units of their names; strings have only
 * the escapes of the RFC; numbers are laid out by number.c.  The text is UTF-8
 * whatever the server encoding.  jsonb has dropped duplicate members and knows
 * no order of members before we see it.
 *
 * "ignore" holds JSON Pointers (RFC 6901) into the request as it came: an
 * element of an array that is left out does not renumber the others.  A pointer
 * that meets nothing is no error.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/jsonb.h"
#include "utils/numeric.h"

#include "idempotency.h"
#include "number.h"

typedef struct Utf8
{
	const char *data;
	int			len;
} Utf8;

/* A JSON Pointer, cut into its reference tokens. */
typedef struct JsonPointer
{
	Utf8	   *tokens;
	int			count;
} JsonPointer;

/* The pointers whose first "depth" tokens lead to the current place. */
typedef struct Place
{
	JsonPointer **pointers;
	int			count;
	int			depth;
} Place;

typedef struct Member
{
	Utf8		name;
	JsonbValue	value;
} Member;

static void append_container(StringInfo buf, JsonbContainer *container, const Place *place);

/* ---- strings ---- */

static Utf8
to_utf8(const char *data, int len)
{
	Utf8		result = {data, len};

	if (GetDatabaseEncoding() != PG_UTF8 && len > 0)
	{
		char	   *copy = pnstrdup(data, len);

		result.data = pg_server_to_any(copy, len, PG_UTF8);
		result.len = strlen(result.data);
	}
	return result;
}

static void
append_escape(StringInfo buf, unsigned char c)
{
	static const char *const short_escapes[] = {
		['\b'] = "\\b",['\t'] = "\\t",['\n'] = "\\n",['\f'] = "\\f",['\r'] = "\\r"
	};

	if (c == '"')
		appendStringInfoString(buf, "\\\"");
	else if (c == '\\')
		appendStringInfoString(buf, "\\\\");
	else if (c < lengthof(short_escapes) && short_escapes[c] != NULL)
		appendStringInfoString(buf, short_escapes[c]);
	else
		appendStringInfo(buf, "\\u%04x", c);
}

static void
append_string(StringInfo buf, Utf8 string)
{
	const char *p = string.data;
	const char *end = p + string.len;
	const char *plain = p;		/* start of what needs no escape */

	appendStringInfoChar(buf, '"');
	for (; p < end; p++)
	{
		unsigned char c = (unsigned char) *p;

		if (c >= 0x20 && c != '"' && c != '\\')
			continue;
		appendBinaryStringInfo(buf, plain, p - plain);
		append_escape(buf, c);
		plain = p + 1;
	}
	appendBinaryStringInfo(buf, plain, p - plain);
	appendStringInfoChar(buf, '"');
}

/*
 * Place of a byte of UTF-8 in the order of UTF-16 code units: characters of
 * four bytes are surrogates there, which come before U+E000 to U+FFFF.
 */
static int
utf16_rank(unsigned char c)
{
	return c == 0xee || c == 0xef ? c + 0x10 : c;
}

static int
compare_names(const void *a, const void *b)
{
	const Utf8 *x = &((const Member *) a)->name;
	const Utf8 *y = &((const Member *) b)->name;
	int			len = Min(x->len, y->len);

	for (int i = 0; i < len; i++)
	{
		if (x->data[i] != y->data[i])
			return utf16_rank((unsigned char) x->data[i]) - utf16_rank((unsigned char) y->data[i]);
	}
	return x->len - y->len;
}

/* ---- pointers ---- */

static void
bad_pointer(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("element of \"ignore\" is not a JSON Pointer to a part of the request"),
			 errhint("A pointer begins with \"/\"; \"~\" and \"/\" in a name are written \"~0\" and \"~1\".")));
}

static Utf8
unescape_token(const char *data, int len)
{
	char	   *out = palloc(len + 1);
	Utf8		token = {out, 0};

	for (int i = 0; i < len; i++)
	{
		char		c = data[i];

		if (c == '~')
		{
			if (++i >= len || (data[i] != '0' && data[i] != '1'))
				bad_pointer();
			c = data[i] == '0' ? '~' : '/';
		}
		out[token.len++] = c;
	}
	return token;
}

static JsonPointer *
parse_pointer(text *value)
{
	Utf8		string = to_utf8(VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value));
	JsonPointer *pointer = (JsonPointer *) palloc(sizeof(JsonPointer));
	const char *p = string.data;
	const char *end = p + string.len;

	if (string.len == 0 || *p != '/')
		bad_pointer();
	pointer->count = 0;
	pointer->tokens = (Utf8 *) palloc(sizeof(Utf8) * string.len);
	while (p < end)
	{
		const char *start = ++p;

		while (p < end && *p != '/')
			p++;
		pointer->tokens[pointer->count++] = unescape_token(start, p - start);
	}
	return pointer;
}

static void
parse_pointers(ArrayType *ignore, Place *place)
{
	Datum	   *items;
	bool	   *nulls;

	memset(place, 0, sizeof(*place));
	if (ignore == NULL)
		return;
	deconstruct_array(ignore, TEXTOID, -1, false, TYPALIGN_INT, &items, &nulls, &place->count);
	place->pointers = (JsonPointer **) palloc(sizeof(JsonPointer *) * Max(place->count, 1));
	for (int i = 0; i < place->count; i++)
	{
		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("element of \"ignore\" must not be null")));
		place->pointers[i] = parse_pointer(DatumGetTextPP(items[i]));
	}
}

/*
 * Goes one token down.  True if that place is to be left out; else *below has
 * the pointers that go on from there.
 */
static bool
step_down(const Place *place, Utf8 name, Place *below)
{
	below->count = 0;
	below->depth = place->depth + 1;
	if (place->count == 0)
		return false;
	below->pointers = (JsonPointer **) palloc(sizeof(JsonPointer *) * place->count);
	for (int i = 0; i < place->count; i++)
	{
		JsonPointer *pointer = place->pointers[i];
		Utf8		token = pointer->tokens[place->depth];

		if (token.len != name.len || memcmp(token.data, name.data, name.len) != 0)
			continue;
		if (pointer->count == below->depth)
			return true;
		below->pointers[below->count++] = pointer;
	}
	return false;
}

/* ---- values ---- */

static void
append_value(StringInfo buf, JsonbValue *value, const Place *place)
{
	switch (value->type)
	{
		case jbvNull:
			appendStringInfoString(buf, "null");
			break;
		case jbvBool:
			appendStringInfoString(buf, value->val.boolean ? "true" : "false");
			break;
		case jbvNumeric:
			{
				char	   *text = DatumGetCString(DirectFunctionCall1(numeric_out,
																	   NumericGetDatum(value->val.numeric)));

				idem_append_number(buf, text);
				pfree(text);
				break;
			}
		case jbvString:
			append_string(buf, to_utf8(value->val.string.val, value->val.string.len));
			break;
		case jbvBinary:
			append_container(buf, value->val.binary.data, place);
			break;
		default:
			elog(ERROR, "unexpected type of jsonb value: %d", (int) value->type);
	}
}

/* The members of an object, sorted. */
static Member *
sorted_members(JsonbContainer *container, int count)
{
	Member	   *members = (Member *) palloc(sizeof(Member) * Max(count, 1));
	JsonbIterator *it = JsonbIteratorInit(container);
	JsonbValue	name;
	int			n = 0;

	(void) JsonbIteratorNext(&it, &name, true);
	while (JsonbIteratorNext(&it, &name, true) == WJB_KEY)
	{
		members[n].name = to_utf8(name.val.string.val, name.val.string.len);
		(void) JsonbIteratorNext(&it, &members[n].value, true);
		n++;
	}
	qsort(members, n, sizeof(Member), compare_names);
	return members;
}

static void
append_object(StringInfo buf, JsonbContainer *container, const Place *place)
{
	int			count = JsonContainerSize(container);
	Member	   *members = sorted_members(container, count);
	bool		first = true;

	appendStringInfoChar(buf, '{');
	for (int i = 0; i < count; i++)
	{
		Place		below;

		if (step_down(place, members[i].name, &below))
			continue;
		if (!first)
			appendStringInfoChar(buf, ',');
		first = false;
		append_string(buf, members[i].name);
		appendStringInfoChar(buf, ':');
		append_value(buf, &members[i].value, &below);
	}
	appendStringInfoChar(buf, '}');
	pfree(members);
}

static void
append_array(StringInfo buf, JsonbContainer *container, const Place *place)
{
	JsonbIterator *it = JsonbIteratorInit(container);
	JsonbValue	value;
	bool		first = true;

	appendStringInfoChar(buf, '[');
	(void) JsonbIteratorNext(&it, &value, true);
	for (int i = 0; JsonbIteratorNext(&it, &value, true) == WJB_ELEM; i++)
	{
		char		index[16];
		Utf8		name = {index, 0};
		Place		below;

		if (place->count > 0)
			name.len = snprintf(index, sizeof(index), "%d", i);
		if (step_down(place, name, &below))
			continue;
		if (!first)
			appendStringInfoChar(buf, ',');
		first = false;
		append_value(buf, &value, &below);
	}
	appendStringInfoChar(buf, ']');
}

static void
append_container(StringInfo buf, JsonbContainer *container, const Place *place)
{
	check_stack_depth();
	CHECK_FOR_INTERRUPTS();
	if (JsonContainerIsObject(container))
		append_object(buf, container, place);
	else
		append_array(buf, container, place);
}

/*
 * Canonical text in UTF-8, NUL-terminated, in the current memory context; *len
 * is its length.  Raises 22023 and 22004 for a bad ignore list, 54001 for
 * nesting beyond max_stack_depth.
 */
char *
idem_canonical_utf8(Jsonb *request, ArrayType *ignore, int *len)
{
	StringInfoData buf;
	JsonbValue	scalar;
	Place		root;

	parse_pointers(ignore, &root);
	initStringInfo(&buf);
	if (JB_ROOT_IS_SCALAR(request) && JsonbExtractScalar(&request->root, &scalar))
		append_value(&buf, &scalar, &root);
	else
		append_container(&buf, &request->root, &root);
	*len = buf.len;
	return buf.data;
}
