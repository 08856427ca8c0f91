/*-------------------------------------------------------------------------
 *
 * key.c
 *	  Keys of three parts, and keys for downstream services.
 *
 * A three-part key is tenant:operation:business_id, where '%' and ':' inside a
 * part are written %25 and %3A.  So parts and keys map one to one: equal keys if
 * and only if equal parts.  Any other text is an opaque key.  Pure functions of
 * their arguments: no clock, no random source, no session state.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "common/cryptohash.h"
#include "common/sha2.h"
#include "funcapi.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/uuid.h"

#include "claim.h"
#include "idempotency.h"

#define KEY_PARTS	3

/* A part as it stands in the key, still escaped. */
typedef struct RawPart
{
	const char *data;
	int			len;
} RawPart;

/* ---- building ---- */

static void
append_part(StringInfo buf, const text *part)
{
	const char *p = VARDATA_ANY(part);
	const char *end = p + VARSIZE_ANY_EXHDR(part);

	for (; p < end; p++)
	{
		if (*p == '%')
			appendStringInfoString(buf, "%25");
		else if (*p == ':')
			appendStringInfoString(buf, "%3A");
		else
			appendStringInfoCharMacro(buf, *p);
	}
}

/*
 * idem_key(tenant, operation, business_id)
 */
PG_FUNCTION_INFO_V1(idem_key);
Datum
idem_key(PG_FUNCTION_ARGS)
{
	static const char *const names[KEY_PARTS] = {"tenant", "operation", "business_id"};
	StringInfoData buf;

	initStringInfo(&buf);
	for (int i = 0; i < KEY_PARTS; i++)
	{
		text	   *part;

		if (PG_ARGISNULL(i))
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("key part \"%s\" must not be null", names[i])));
		part = PG_GETARG_TEXT_PP(i);
		if (VARSIZE_ANY_EXHDR(part) == 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("key part \"%s\" must not be empty", names[i])));
		if (i > 0)
			appendStringInfoChar(&buf, ':');
		append_part(&buf, part);
	}
	PG_RETURN_TEXT_P(idem_check_key(cstring_to_text_with_len(buf.data, buf.len)));
}

/* ---- taking apart ---- */

/* Is every '%' the start of an escape that idem_key would write? */
static bool
well_escaped(const RawPart *part)
{
	for (int i = 0; i < part->len; i++)
	{
		if (part->data[i] != '%')
			continue;
		if (i + 2 >= part->len ||
			(memcmp(part->data + i, "%25", 3) != 0 && memcmp(part->data + i, "%3A", 3) != 0))
			return false;
		i += 2;
	}
	return true;
}

/* Splits a three-part key; false for an opaque one.  Points into the key. */
static bool
split_key(const text *key, RawPart parts[KEY_PARTS])
{
	const char *p = VARDATA_ANY(key);
	const char *end = p + VARSIZE_ANY_EXHDR(key);

	for (int i = 0; i < KEY_PARTS; i++)
	{
		const char *stop = memchr(p, ':', end - p);

		if ((stop == NULL) != (i == KEY_PARTS - 1))
			return false;
		parts[i].data = p;
		parts[i].len = (stop ? stop : end) - p;
		if (parts[i].len == 0 || !well_escaped(&parts[i]))
			return false;
		p += parts[i].len + 1;
	}
	return true;
}

static text *
unescape(const RawPart *part)
{
	text	   *result = (text *) palloc(VARHDRSZ + part->len);
	char	   *out = VARDATA(result);

	for (int i = 0; i < part->len; i++)
	{
		char		c = part->data[i];

		if (c == '%')
		{
			c = part->data[i + 1] == '2' ? '%' : ':';
			i += 2;
		}
		*out++ = c;
	}
	SET_VARSIZE(result, out - (char *) result);
	return result;
}

/* The operation of a three-part key; NULL for an opaque one. */
text *
idem_key_operation(const text *key)
{
	RawPart		parts[KEY_PARTS];

	return split_key(key, parts) ? unescape(&parts[1]) : NULL;
}

/*
 * idem_key_parts(key)
 */
PG_FUNCTION_INFO_V1(idem_key_parts);
Datum
idem_key_parts(PG_FUNCTION_ARGS)
{
	text	   *key = idem_key_arg(fcinfo);
	RawPart		parts[KEY_PARTS];
	Datum		values[KEY_PARTS] = {0};
	bool		nulls[KEY_PARTS] = {true, true, true};

	if (split_key(key, parts))
	{
		for (int i = 0; i < KEY_PARTS; i++)
		{
			values[i] = PointerGetDatum(unescape(&parts[i]));
			nulls[i] = false;
		}
	}
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(idem_result_desc(fcinfo), values, nulls)));
}

/* ---- downstream ---- */

static void
hash_update(pg_cryptohash_ctx *hash, const void *data, size_t len)
{
	if (pg_cryptohash_update(hash, data, len) < 0)
		elog(ERROR, "could not update SHA-256: %s", pg_cryptohash_error(hash));
}

/* Length and bytes in UTF-8, so that no two pairs of texts look the same. */
static void
hash_text(pg_cryptohash_ctx *hash, const text *value)
{
	int			len = VARSIZE_ANY_EXHDR(value);
	char	   *copy = pnstrdup(VARDATA_ANY(value), len);
	char	   *utf8 = pg_server_to_any(copy, len, PG_UTF8);
	uint32		size = strlen(utf8);
	unsigned char prefix[4] = {size >> 24, size >> 16, size >> 8, size};

	hash_update(hash, prefix, sizeof(prefix));
	hash_update(hash, utf8, size);
}

/*
 * idem_downstream_key(key, step)
 *		A UUID of version 8: 122 bits of SHA-256 over key and step.
 */
PG_FUNCTION_INFO_V1(idem_downstream_key);
Datum
idem_downstream_key(PG_FUNCTION_ARGS)
{
	text	   *key = idem_key_arg(fcinfo);
	text	   *step;
	pg_cryptohash_ctx *hash;
	uint8		digest[PG_SHA256_DIGEST_LENGTH];
	pg_uuid_t  *uuid = (pg_uuid_t *) palloc(sizeof(pg_uuid_t));

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("step must not be null")));
	step = PG_GETARG_TEXT_PP(1);
	if (VARSIZE_ANY_EXHDR(step) == 0 || VARSIZE_ANY_EXHDR(step) > IDEM_MAX_STEP_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"step\" must be 1 to %d bytes long", IDEM_MAX_STEP_BYTES)));

	hash = pg_cryptohash_create(PG_SHA256);
	if (pg_cryptohash_init(hash) < 0)
		elog(ERROR, "could not start SHA-256: %s", pg_cryptohash_error(hash));
	hash_text(hash, key);
	hash_text(hash, step);
	if (pg_cryptohash_final(hash, digest, sizeof(digest)) < 0)
		elog(ERROR, "could not finish SHA-256: %s", pg_cryptohash_error(hash));
	pg_cryptohash_free(hash);

	memcpy(uuid->data, digest, UUID_LEN);
	uuid->data[6] = (uuid->data[6] & 0x0f) | 0x80;
	uuid->data[8] = (uuid->data[8] & 0x3f) | 0x80;
	PG_RETURN_UUID_P(uuid);
}
