/*-------------------------------------------------------------------------
 *
 * audit.c
 *	  idem_audit: who changed which record, when, why, from what to what.
 *
 * A row is written in the transaction of the change, so it stands if and only if
 * the change does.  Nobody is granted more than SELECT, and a trigger refuses
 * changes to the table's owner as well.  Contents of requests and results never
 * come here; a token only as its digest.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"

#include "failpoint.h"
#include "idempotency.h"

#define AUDIT_COLUMNS	12

/*
 * Records an action on a record that was "before" and now has new_status and
 * new_attempts (NULL and -1: the record is gone).
 */
void
idem_audit(const IdemCatalog *cat, const char *action, text *reason,
		   const IdemRecord *before, const char *new_status, int32 new_attempts)
{
	Oid			types[AUDIT_COLUMNS] = {TIMESTAMPTZOID, TEXTOID, TEXTOID, TEXTOID, TEXTOID, TEXTOID,
	TEXTOID, TEXTOID, INT4OID, INT4OID, UUIDOID, TEXTOID};
	char		nulls[AUDIT_COLUMNS + 1] = "            ";
	Datum		values[AUDIT_COLUMNS];
	char	   *table = quote_qualified_identifier(get_namespace_name(cat->schema), get_rel_name(cat->audit));

	values[0] = TimestampTzGetDatum(idem_now());
	values[1] = CStringGetTextDatum(action);
	values[2] = PointerGetDatum(before->key);
	values[3] = PointerGetDatum(before->operation);
	values[4] = CStringGetTextDatum(GetUserNameFromId(GetSessionUserId(), false));
	values[5] = CStringGetTextDatum(GetUserNameFromId(GetUserId(), false));
	values[6] = CStringGetTextDatum(idem_status_name(before->status));
	values[7] = new_status ? CStringGetTextDatum(new_status) : (Datum) 0;
	nulls[7] = new_status ? ' ' : 'n';
	values[8] = Int32GetDatum(before->attempts);
	values[9] = Int32GetDatum(new_attempts);
	nulls[9] = new_attempts >= 0 ? ' ' : 'n';
	values[10] = UUIDPGetDatum(&before->token);
	nulls[10] = before->has_token ? ' ' : 'n';
	values[11] = PointerGetDatum(reason);

	idem_run_as_owner(cat->audit,
					  psprintf("INSERT INTO %s (at, action, idempotency_key, operation, session_user_name,"
							   " current_user_name, old_status, new_status, old_attempts, new_attempts,"
							   " old_token_digest, reason)"
							   " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10,"
							   " pg_catalog.sha256(pg_catalog.uuid_send($11)), $12)", table),
					  AUDIT_COLUMNS, types, values, nulls);
	IDEM_FAILPOINT("audited");
}

/* Trigger: the audit is append-only. */
PG_FUNCTION_INFO_V1(idem_audit_guard);
Datum
idem_audit_guard(PG_FUNCTION_ARGS)
{
	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("idem_audit_guard must be called as a trigger")));
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("the audit of idempotency records can only be added to")));
	PG_RETURN_NULL();			/* keep compiler quiet */
}
