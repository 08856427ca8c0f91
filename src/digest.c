/*-------------------------------------------------------------------------
 *
 * digest.c
 *	  Digests of requests, and the SQL functions over the canonical text.
 *
 * A digest begins with a byte that tells how it was made (DESIGN.md section 6):
 *
 *	  0x01	SHA-256 of the canonical text in UTF-8
 *	  0x81	HMAC-SHA-256 of the same, with a secret of the caller
 *
 * SHA-256 is the server's own; the HMAC is that of pgcrypto, found in the
 * schema that extension is in, never through search_path.  Owns no data.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "common/cryptohash.h"
#include "common/sha2.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "canonical.h"
#include "idempotency.h"

#define DIGEST_V1_KEYED		0x81
#define DIGEST_BYTES		(1 + IDEM_SHA256_BYTES)

StaticAssertDecl(IDEM_SHA256_BYTES == PG_SHA256_DIGEST_LENGTH,
				 "length of SHA-256");

/*
 * SHA-256 of some bytes into IDEM_SHA256_BYTES bytes at "result".  The server
 * frees the hash context if an error is raised in between.
 */
void
idem_sha256(const void *data, Size len, uint8 *result)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA256);

	if (ctx == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("out of memory")));
	if (pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) data, len) < 0 ||
		pg_cryptohash_final(ctx, result, IDEM_SHA256_BYTES) < 0)
	{
		const char *reason = pg_cryptohash_error(ctx);

		pg_cryptohash_free(ctx);
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not compute SHA-256: %s", reason)));
	}
	pg_cryptohash_free(ctx);
}

/* A digest to be filled in: the version byte and IDEM_SHA256_BYTES bytes. */
static bytea *
new_digest(uint8 version)
{
	bytea	   *digest = (bytea *) palloc(VARHDRSZ + DIGEST_BYTES);

	SET_VARSIZE(digest, VARHDRSZ + DIGEST_BYTES);
	VARDATA(digest)[0] = (char) version;
	return digest;
}

/*
 * Digest version 1 of a request, palloc'd, without what "ignore" points at;
 * "ignore" may be NULL.  Raises what idem_canonical_utf8() raises.
 */
bytea *
idem_request_digest(Jsonb *request, ArrayType *ignore)
{
	bytea	   *digest = new_digest(IDEM_DIGEST_V1);
	int			len;
	char	   *canonical = idem_canonical_utf8(request, ignore, &len);

	idem_sha256(canonical, len, (uint8 *) VARDATA(digest) + 1);
	pfree(canonical);
	return digest;
}

/* The first argument of all three functions.  22004 for NULL. */
static Jsonb *
request_arg(FunctionCallInfo fcinfo)
{
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("request must not be null"),
				 errhint("A request that is the JSON value null is given as 'null'::jsonb.")));
	return PG_GETARG_JSONB_P(0);
}

/* The list of JSON Pointers; NULL is an empty one. */
static ArrayType *
ignore_arg(FunctionCallInfo fcinfo, int i)
{
	return PG_ARGISNULL(i) ? NULL : PG_GETARG_ARRAYTYPE_P(i);
}

PG_FUNCTION_INFO_V1(idem_canonical);
Datum
idem_canonical(PG_FUNCTION_ARGS)
{
	Jsonb	   *request = request_arg(fcinfo);
	int			len;
	char	   *canonical = idem_canonical_utf8(request, ignore_arg(fcinfo, 1), &len);

	/* SQL_ASCII: the bytes came unconverted and go unconverted */
	if (GetDatabaseEncoding() != PG_SQL_ASCII)
	{
		char	   *converted = pg_any_to_server(canonical, len, PG_UTF8);

		if (converted != canonical)
			len = strlen(converted);
		canonical = converted;
	}
	PG_RETURN_TEXT_P(cstring_to_text_with_len(canonical, len));
}

PG_FUNCTION_INFO_V1(idem_digest);
Datum
idem_digest(PG_FUNCTION_ARGS)
{
	Jsonb	   *request = request_arg(fcinfo);

	PG_RETURN_BYTEA_P(idem_request_digest(request, ignore_arg(fcinfo, 1)));
}

/* Schema of an extension; InvalidOid if there is no such extension. */
static Oid
extension_schema(Oid extension)
{
	Relation	rel = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			schema = InvalidOid;

	ScanKeyInit(&key, Anum_pg_extension_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(extension));
	scan = systable_beginscan(rel, ExtensionOidIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		schema = ((Form_pg_extension) GETSTRUCT(tuple))->extnamespace;
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return schema;
}

/* OID of pgcrypto's hmac(bytea, bytea, text).  Raises 42704 or 42883 if it is missing. */
static Oid
hmac_function(void)
{
	Oid			types[3] = {BYTEAOID, BYTEAOID, TEXTOID};
	Oid			schema = extension_schema(get_extension_oid("pgcrypto", false));
	oidvector  *arguments = buildoidvector(types, lengthof(types));
	Oid			function = GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid,
										   CStringGetDatum("hmac"),
										   PointerGetDatum(arguments),
										   ObjectIdGetDatum(schema));

	if (!OidIsValid(function))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("extension \"%s\" has no function \"%s\"",
						"pgcrypto", "hmac(bytea, bytea, text)")));
	return function;
}

/* The second argument of idem_keyed_digest().  22004 for NULL, 22023 for an empty one. */
static bytea *
secret_arg(FunctionCallInfo fcinfo)
{
	bytea	   *secret;

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("\"secret\" must not be null")));
	secret = PG_GETARG_BYTEA_PP(1);
	if (VARSIZE_ANY_EXHDR(secret) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"secret\" must not be empty")));
	return secret;
}

PG_FUNCTION_INFO_V1(idem_keyed_digest);
Datum
idem_keyed_digest(PG_FUNCTION_ARGS)
{
	Jsonb	   *request = request_arg(fcinfo);
	bytea	   *secret = secret_arg(fcinfo);
	bytea	   *digest = new_digest(DIGEST_V1_KEYED);
	int			len;
	char	   *canonical = idem_canonical_utf8(request, ignore_arg(fcinfo, 2), &len);
	bytea	   *hmac;

	hmac = DatumGetByteaPP(OidFunctionCall3(hmac_function(),
											PointerGetDatum(cstring_to_text_with_len(canonical, len)),
											PointerGetDatum(secret),
											CStringGetTextDatum("sha256")));
	if (VARSIZE_ANY_EXHDR(hmac) != IDEM_SHA256_BYTES)
		elog(ERROR, "unexpected length of HMAC-SHA-256");
	memcpy(VARDATA(digest) + 1, VARDATA_ANY(hmac), IDEM_SHA256_BYTES);
	PG_RETURN_BYTEA_P(digest);
}
