/*-------------------------------------------------------------------------
 *
 * key.c
 *	  Keys of three parts, and identifiers for downstream services.
 *
 * A three-part key is tenant:operation:business_id, where '%' and ':' inside a
 * part are written '%25' and '%3A'; two keys are equal if and only if their
 * parts are (DESIGN.md section 6).  Every other text is an opaque key.
 *
 * Owns no data; depends on nothing but its arguments.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "funcapi.h"
#include "lib/stringinfo.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"
#include "utils/uuid.h"

#include "canonical.h"
#include "idempotency.h"

#define KEY_PARTS		3
#define ESCAPE_BYTES	3

static const char *const part_names[KEY_PARTS] = {"tenant", "operation", "business_id"};

/* A part as it stands in a key, still escaped. */
typedef struct KeyPart
{
	const char *str;
	int			len;
} KeyPart;

/* An argument of idem_key().  Raises 22004 for NULL, 22023 for an empty one. */
static text *
part_arg(FunctionCallInfo fcinfo, int i)
{
	text	   *part;

	if (PG_ARGISNULL(i))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("\"%s\" must not be null", part_names[i])));
	part = PG_GETARG_TEXT_PP(i);
	if (VARSIZE_ANY_EXHDR(part) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"%s\" must not be empty", part_names[i])));
	return part;
}

/* Copies a part, escaping it; returns the end of the copy. */
static char *
escape_part(char *out, const text *part)
{
	const char *p = VARDATA_ANY(part);
	const char *end = p + VARSIZE_ANY_EXHDR(part);

	for (; p < end; p++)
	{
		if (*p == '%' || *p == ':')
		{
			memcpy(out, *p == '%' ? "%25" : "%3A", ESCAPE_BYTES);
			out += ESCAPE_BYTES;
		}
		else
			*out++ = *p;
	}
	return out;
}

PG_FUNCTION_INFO_V1(idem_key);
Datum
idem_key(PG_FUNCTION_ARGS)
{
	/* room for parts that are too long in sum only because of their escapes */
	char		key[ESCAPE_BYTES * IDEM_MAX_KEY_BYTES + KEY_PARTS];
	char	   *out = key;
	text	   *parts[KEY_PARTS];
	Size		total = KEY_PARTS - 1;
	int			i;

	for (i = 0; i < KEY_PARTS; i++)
	{
		parts[i] = part_arg(fcinfo, i);
		total += VARSIZE_ANY_EXHDR(parts[i]);
	}
	for (i = 0; i < KEY_PARTS && total <= IDEM_MAX_KEY_BYTES; i++)
	{
		if (i > 0)
			*out++ = ':';
		out = escape_part(out, parts[i]);
	}
	if (total > IDEM_MAX_KEY_BYTES || out - key > IDEM_MAX_KEY_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("idempotency key is longer than %d bytes", IDEM_MAX_KEY_BYTES)));
	PG_RETURN_TEXT_P(cstring_to_text_with_len(key, out - key));
}

static inline bool
is_escape(const char *p, const char *end)
{
	return end - p >= ESCAPE_BYTES &&
		((p[1] == '2' && p[2] == '5') || (p[1] == '3' && p[2] == 'A'));
}

/*
 * Finds the parts of a key.  False if it is opaque: idem_key() of any parts
 * would not give back the same bytes.
 */
static bool
split_key(const text *key, KeyPart *parts)
{
	const char *p = VARDATA_ANY(key);
	const char *end = p + VARSIZE_ANY_EXHDR(key);
	const char *start = p;
	int			n = 0;

	for (; p < end; p++)
	{
		if (*p == '%')
		{
			if (!is_escape(p, end))
				return false;
			p += ESCAPE_BYTES - 1;
		}
		else if (*p == ':')
		{
			if (p == start || n == KEY_PARTS - 1)
				return false;
			parts[n].str = start;
			parts[n].len = p - start;
			n++;
			start = p + 1;
		}
	}
	if (n != KEY_PARTS - 1 || start == end)
		return false;
	parts[n].str = start;
	parts[n].len = end - start;
	return true;
}

/* The text that a part stands for. */
static text *
unescape_part(const KeyPart *part)
{
	text	   *result = (text *) palloc(VARHDRSZ + part->len);
	char	   *out = VARDATA(result);
	int			i;

	for (i = 0; i < part->len; i++)
	{
		if (part->str[i] == '%')
		{
			*out++ = part->str[i + 1] == '2' ? '%' : ':';
			i += ESCAPE_BYTES - 1;
		}
		else
			*out++ = part->str[i];
	}
	SET_VARSIZE(result, out - (char *) result);
	return result;
}

/* The operation that a key names, palloc'd; NULL if the key is opaque. */
text *
idem_key_operation(const text *key)
{
	KeyPart		parts[KEY_PARTS];

	return split_key(key, parts) ? unescape_part(&parts[1]) : NULL;
}

PG_FUNCTION_INFO_V1(idem_key_parts);
Datum
idem_key_parts(PG_FUNCTION_ARGS)
{
	text	   *key = idem_key_arg(fcinfo);
	KeyPart		parts[KEY_PARTS];
	Datum		values[KEY_PARTS] = {0};
	bool		nulls[KEY_PARTS] = {true, true, true};
	TupleDesc	desc;
	int			i;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	if (split_key(key, parts))
	{
		for (i = 0; i < KEY_PARTS; i++)
		{
			values[i] = PointerGetDatum(unescape_part(&parts[i]));
			nulls[i] = false;
		}
	}
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls)));
}

/* The second argument of idem_downstream_key(): a step of 1 to IDEM_MAX_STEP_BYTES. */
static text *
step_arg(FunctionCallInfo fcinfo)
{
	text	   *step;

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("\"step\" must not be null")));
	step = PG_GETARG_TEXT_PP(1);
	if (VARSIZE_ANY_EXHDR(step) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"step\" must not be empty")));
	if (VARSIZE_ANY_EXHDR(step) > IDEM_MAX_STEP_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("\"step\" is longer than %d bytes", IDEM_MAX_STEP_BYTES)));
	return step;
}

/* Appends a text in UTF-8 after its length, four bytes, the highest first. */
static void
append_framed(StringInfo buf, const text *item)
{
	int			len = VARSIZE_ANY_EXHDR(item);
	char	   *utf8 = idem_to_utf8(VARDATA_ANY(item), &len);
	uint32		prefix = pg_hton32((uint32) len);

	appendBinaryStringInfo(buf, (const char *) &prefix, sizeof(prefix));
	appendBinaryStringInfo(buf, utf8, len);
}

/*
 * A UUID of version 8 (RFC 9562) made of the first 16 bytes of SHA-256 over
 * the two texts, each after its length.
 */
PG_FUNCTION_INFO_V1(idem_downstream_key);
Datum
idem_downstream_key(PG_FUNCTION_ARGS)
{
	text	   *key = idem_key_arg(fcinfo);
	text	   *step = step_arg(fcinfo);
	pg_uuid_t  *uuid = (pg_uuid_t *) palloc(sizeof(pg_uuid_t));
	uint8		hash[IDEM_SHA256_BYTES];
	StringInfoData buf;

	initStringInfo(&buf);
	append_framed(&buf, key);
	append_framed(&buf, step);
	idem_sha256(buf.data, buf.len, hash);
	memcpy(uuid->data, hash, UUID_LEN);
	uuid->data[6] = (uuid->data[6] & 0x0F) | 0x80;	/* version */
	uuid->data[8] = (uuid->data[8] & 0x3F) | 0x80;	/* variant */
	PG_RETURN_UUID_P(uuid);
}
