/*-------------------------------------------------------------------------
 *
 * digest.c
 *	  Digests of requests.
 *
 *	first byte	rest
 *	0x01		SHA-256 of the canonical text in UTF-8
 *	0x81		HMAC-SHA-256 of it, by pgcrypto, under a secret of the caller
 *
 * The first byte is stored with every record, so that a later version can check
 * what an earlier one wrote.
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

#include "idempotency.h"

#define DIGEST_KEYED_V1		0x81

/* ---- arguments ---- */

static Jsonb *
request_arg(FunctionCallInfo fcinfo)
{
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("request must not be null")));
	return PG_GETARG_JSONB_P(0);
}

static ArrayType *
ignore_arg(FunctionCallInfo fcinfo, int n)
{
	return PG_ARGISNULL(n) ? NULL : PG_GETARG_ARRAYTYPE_P(n);
}

/* ---- canonical text ---- */

/*
 * idem_canonical(request, ignore)
 */
PG_FUNCTION_INFO_V1(idem_canonical);
Datum
idem_canonical(PG_FUNCTION_ARGS)
{
	int			len;
	char	   *utf8 = idem_canonical_utf8(request_arg(fcinfo), ignore_arg(fcinfo, 1), &len);

	PG_RETURN_TEXT_P(cstring_to_text(pg_any_to_server(utf8, len, PG_UTF8)));
}

/* ---- plain digest ---- */

/* Version 1, in the current memory context. */
bytea *
idem_request_digest(Jsonb *request, ArrayType *ignore)
{
	int			len;
	char	   *utf8 = idem_canonical_utf8(request, ignore, &len);
	bytea	   *digest = (bytea *) palloc(VARHDRSZ + 1 + PG_SHA256_DIGEST_LENGTH);
	pg_cryptohash_ctx *hash = pg_cryptohash_create(PG_SHA256);

	SET_VARSIZE(digest, VARHDRSZ + 1 + PG_SHA256_DIGEST_LENGTH);
	VARDATA(digest)[0] = IDEM_DIGEST_V1;
	if (pg_cryptohash_init(hash) < 0 ||
		pg_cryptohash_update(hash, (const uint8 *) utf8, len) < 0 ||
		pg_cryptohash_final(hash, (uint8 *) VARDATA(digest) + 1, PG_SHA256_DIGEST_LENGTH) < 0)
		elog(ERROR, "could not compute SHA-256: %s", pg_cryptohash_error(hash));
	pg_cryptohash_free(hash);
	pfree(utf8);
	return digest;
}

/*
 * idem_digest(request, ignore)
 */
PG_FUNCTION_INFO_V1(idem_digest);
Datum
idem_digest(PG_FUNCTION_ARGS)
{
	PG_RETURN_BYTEA_P(idem_request_digest(request_arg(fcinfo), ignore_arg(fcinfo, 1)));
}

/* ---- keyed digest ---- */

static Oid
extension_schema(Oid extension)
{
	Relation	rel = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			schema = InvalidOid;

	ScanKeyInit(&key, Anum_pg_extension_oid, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(extension));
	scan = systable_beginscan(rel, ExtensionOidIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		schema = ((Form_pg_extension) GETSTRUCT(tuple))->extnamespace;
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return schema;
}

/* pgcrypto's hmac(bytea, bytea, text), found in its own schema. */
static Oid
hmac_function(void)
{
	Oid			types[] = {BYTEAOID, BYTEAOID, TEXTOID};
	Oid			schema = extension_schema(get_extension_oid("pgcrypto", false));
	Oid			function = GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid,
										   CStringGetDatum("hmac"),
										   PointerGetDatum(buildoidvector(types, 3)),
										   ObjectIdGetDatum(schema));

	if (!OidIsValid(function))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function \"hmac\" of extension \"pgcrypto\" does not exist")));
	return function;
}

static bytea *
secret_arg(FunctionCallInfo fcinfo)
{
	bytea	   *secret;

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("secret must not be null")));
	secret = PG_GETARG_BYTEA_P(1);
	if (VARSIZE_ANY_EXHDR(secret) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("secret must not be empty")));
	return secret;
}

/*
 * idem_keyed_digest(request, secret, ignore)
 */
PG_FUNCTION_INFO_V1(idem_keyed_digest);
Datum
idem_keyed_digest(PG_FUNCTION_ARGS)
{
	Jsonb	   *request = request_arg(fcinfo);
	bytea	   *secret = secret_arg(fcinfo);
	int			len;
	char	   *utf8 = idem_canonical_utf8(request, ignore_arg(fcinfo, 2), &len);
	bytea	   *mac;
	bytea	   *digest;

	mac = DatumGetByteaPP(OidFunctionCall3(hmac_function(),
										   PointerGetDatum(cstring_to_text_with_len(utf8, len)),
										   PointerGetDatum(secret),
										   CStringGetTextDatum("sha256")));
	digest = (bytea *) palloc(VARHDRSZ + 1 + VARSIZE_ANY_EXHDR(mac));
	SET_VARSIZE(digest, VARHDRSZ + 1 + VARSIZE_ANY_EXHDR(mac));
	VARDATA(digest)[0] = (char) DIGEST_KEYED_V1;
	memcpy(VARDATA(digest) + 1, VARDATA_ANY(mac), VARSIZE_ANY_EXHDR(mac));
	PG_RETURN_BYTEA_P(digest);
}
