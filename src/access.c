/*-------------------------------------------------------------------------
 *
 * access.c
 *	  Who may do what, and when writing is possible at all.
 *
 * The hot functions write their tables through the access methods, so the
 * executor's own checks do not happen: this file makes them.  A caller's right
 * is EXECUTE on the function; the tables are writable by their owner only.
 * A record belongs to the role that first claimed it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_class.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#include "compat.h"
#include "idempotency.h"

/*
 * Start of every function that may write: raises 25006 in a read-only
 * transaction or on a standby, 25000 in parallel mode, whatever the answer
 * would be, so that no caller takes a decision from a lagging copy.
 */
void
idem_write_prologue(const char *function)
{
	PreventCommandIfReadOnly(function);
	PreventCommandDuringRecovery(function);
	PreventCommandIfParallelMode(function);
}

/* Is the caller a member of the record's owner? */
bool
idem_is_owner(Oid owner)
{
	return owner == GetUserId() || has_privs_of_role(GetUserId(), owner);
}

/* Raises 42501 unless the caller is a member of the record's owner. */
void
idem_check_owner(Oid owner)
{
	if (idem_is_owner(owner))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied for idempotency key")));
}

/* Operators are granted SELECT on idem_record: they see every record. */
bool
idem_may_read_all(const IdemCatalog *cat)
{
	return pg_class_aclcheck(cat->record, GetUserId(), ACL_SELECT) == ACLCHECK_OK;
}

/*
 * Pins search_path for statements of ours.  The caller ends it with
 * AtEOXact_GUC(true, level); an abort ends it too.
 */
int
idem_lock_search_path(void)
{
	int			level = NewGUCNestLevel();

	(void) set_config_option("search_path", "pg_catalog, pg_temp", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	return level;
}

/*
 * The right to call a function of ours is the right to this statement, so it
 * runs as the table's owner.  The statement is a constant of the library with
 * every name qualified; values come as parameters.  An abort restores what is
 * set here.
 */
void
idem_run_as_owner(Oid table, const char *sql, int nargs, Oid *types, Datum *values, const char *nulls)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(table));
	Oid			owner;
	Oid			save_user;
	int			save_context;
	int			level;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for relation %u", table);
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	ReleaseSysCache(tuple);

	GetUserIdAndSecContext(&save_user, &save_context);
	SetUserIdAndSecContext(owner, save_context | SECURITY_LOCAL_USERID_CHANGE | SECURITY_NOFORCE_RLS);
	level = idem_lock_search_path();
	SPI_connect();
	if (SPI_execute_with_args(sql, nargs, types, values, nulls, false, 0) < 0)
		elog(ERROR, "could not run \"%s\"", sql);
	SPI_finish();
	AtEOXact_GUC(true, level);
	SetUserIdAndSecContext(save_user, save_context);
}

/*
 * What each level may do, beside the helpers that everybody may call.  A level
 * has what stands at its own and, for operators, at every name.
 */
#define LEVEL_CLIENT	1
#define LEVEL_MONITOR	2
#define LEVEL_OPERATOR	4

typedef struct GrantLine
{
	int			levels;
	const char *privilege;
	const char *object;			/* %s = quoted schema */
} GrantLine;

static const GrantLine grant_lines[] = {
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_claim(text, jsonb, text, interval, interval, uuid, bytea)"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_complete(text, uuid, jsonb, bytea)"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_fail(text, uuid, text, text, text, interval)"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_renew(text, uuid, interval)"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_release(text, uuid)"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_checkpoint(text, uuid, text, jsonb)"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_status(text)"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_execute(text, jsonb, regprocedure, text, interval)"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_once(text, jsonb)"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_claim_many(text[], jsonb[], text, interval)"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_complete_many(text[], uuid[], jsonb[])"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_once_many(text[])"},
	{LEVEL_CLIENT | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_claim_due(text, integer, interval)"},
	{LEVEL_CLIENT | LEVEL_MONITOR | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_backoff(integer, interval, double precision, interval, text)"},
	{LEVEL_MONITOR | LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_open_stats()"},
	{LEVEL_MONITOR | LEVEL_OPERATOR, "SELECT", "TABLE %s.idem_stats"},
	{LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_reap(integer)"},
	{LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_retry(text, text)"},
	{LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_retry_many(text, text, text, integer)"},
	{LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_resolve(text, text, text, jsonb, bytea, text, text)"},
	{LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_revoke(text, text)"},
	{LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_forget(text, text)"},
	{LEVEL_OPERATOR, "EXECUTE", "FUNCTION %s.idem_check()"},
	{LEVEL_OPERATOR, "SELECT", "TABLE %s.idem_audit"},
	{LEVEL_OPERATOR, "SELECT", "TABLE %s.idem_record"},
	{LEVEL_MONITOR | LEVEL_OPERATOR, "SELECT", "TABLE %s.idem_ring"},
	{LEVEL_MONITOR | LEVEL_OPERATOR, "SELECT", "TABLE %s.idem_policy"},
};

static int
level_bit(text *level)
{
	char	   *name = text_to_cstring(level);

	if (strcmp(name, "client") == 0)
		return LEVEL_CLIENT;
	if (strcmp(name, "monitor") == 0)
		return LEVEL_MONITOR;
	if (strcmp(name, "operator") == 0)
		return LEVEL_OPERATOR;
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("level \"%s\" is not known", name),
			 errhint("Levels are \"client\", \"monitor\" and \"operator\".")));
	return 0;					/* keep compiler quiet */
}

static void
run_grant(const char *privilege, const char *object, const char *grantee)
{
	char	   *sql = psprintf("GRANT %s ON %s TO %s", privilege, object, grantee);

	if (SPI_execute(sql, false, 0) != SPI_OK_UTILITY)
		elog(ERROR, "could not run \"%s\"", sql);
}

/*
 * idem_grant(role regrole, level text)
 *		Grants as the caller: only who may grant these privileges can use it.
 */
PG_FUNCTION_INFO_V1(idem_grant);
Datum
idem_grant(PG_FUNCTION_ARGS)
{
	Oid			role;
	int			level;
	int			nest;
	const char *grantee;
	const char *schema;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("role and level must not be null")));
	role = PG_GETARG_OID(0);
	level = level_bit(PG_GETARG_TEXT_PP(1));
	grantee = quote_identifier(GetUserNameFromId(role, false));
	schema = quote_identifier(get_namespace_name(get_func_namespace(fcinfo->flinfo->fn_oid)));

	nest = idem_lock_search_path();
	SPI_connect();
	run_grant("USAGE", psprintf("SCHEMA %s", schema), grantee);
	for (int i = 0; i < lengthof(grant_lines); i++)
	{
		if ((grant_lines[i].levels & level) != 0)
			run_grant(grant_lines[i].privilege, psprintf(grant_lines[i].object, schema), grantee);
	}
	SPI_finish();
	AtEOXact_GUC(true, nest);
	PG_RETURN_VOID();
}
