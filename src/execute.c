/*-------------------------------------------------------------------------
 *
 * execute.c
 *	  idem_execute: claim, handler, completion, in one call.
 *
 * The handler runs as the caller in a subtransaction, so that its failure can be
 * recorded by the transaction that its writes are rolled back from.
 *
 * A key without a record is executed under the guard (keylock.c): no row is
 * written before the handler has ended, then the finished one, or the failed
 * one, once.  A key with a record that can be claimed, or a guard that is not
 * free, goes the ordinary way: claim, handler, complete.  Either way every
 * other session sees "in progress", and so does a nested call for the same key.
 *
 * What becomes of an error of the handler:
 *
 *	IDR00, IDP00, IDU00			retryable, permanent, unknown
 *	40, 57, XX, ID001-ID003		passes through: the transaction cannot go on
 *	in a code list of the policy	as the list says
 *	08, 53, 55, 58				retryable
 *	anything else				permanent
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "parser/parse_coerce.h"
#include "pgstat.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "claim.h"
#include "compat.h"
#include "failpoint.h"
#include "finish.h"
#include "idempotency.h"

typedef struct Handler
{
	FmgrInfo	fn;
	int			nargs;			/* 1 or 3 */
	Oid			result_type;
	CoercionPathType cast;		/* to jsonb */
	Oid			cast_function;
} Handler;

/* ---- the handler, before anything is claimed ---- */

static bool
takes(Form_pg_proc proc, int nargs, const Oid *types)
{
	return proc->pronargs == nargs &&
		memcmp(proc->proargtypes.values, types, nargs * sizeof(Oid)) == 0;
}

static int
handler_arguments(Form_pg_proc proc)
{
	static const Oid request_only[] = {JSONBOID};
	static const Oid all[] = {TEXTOID, JSONBOID, INT4OID};

	if (proc->prokind == PROKIND_FUNCTION && !proc->proretset)
	{
		if (takes(proc, 1, request_only))
			return 1;
		if (takes(proc, 3, all))
			return 3;
	}
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
			 errmsg("function \"%s\" cannot be a handler", NameStr(proc->proname)),
			 errdetail("A handler is a function of (jsonb) or of (text, jsonb, integer) that returns one value.")));
	return 0;					/* keep compiler quiet */
}

static void
find_result_cast(Handler *handler, Form_pg_proc proc)
{
	handler->result_type = proc->prorettype;
	handler->cast_function = InvalidOid;
	if (proc->prorettype == VOIDOID || proc->prorettype == JSONBOID)
		return;
	handler->cast = find_coercion_pathway(JSONBOID, proc->prorettype, COERCION_EXPLICIT,
										  &handler->cast_function);
	if (handler->cast != COERCION_PATH_FUNC && handler->cast != COERCION_PATH_RELABELTYPE &&
		handler->cast != COERCION_PATH_COERCEVIAIO)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
				 errmsg("function \"%s\" cannot be a handler", NameStr(proc->proname)),
				 errdetail("Type %s does not cast to jsonb.", format_type_be(proc->prorettype))));
}

/* Checks and prepares the handler.  Raises 42883, 42501, 42P13, 22004. */
static void
find_handler(Oid function, bool request_is_null, Handler *handler)
{
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	Form_pg_proc proc;

	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("handler with OID %u does not exist", function)));
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	if (proc_aclcheck_compat(function, GetUserId(), ACL_EXECUTE) != ACLCHECK_OK)
		aclcheck_error(ACLCHECK_NO_PRIV, OBJECT_FUNCTION, NameStr(proc->proname));
	handler->nargs = handler_arguments(proc);
	find_result_cast(handler, proc);
	if (proc->proisstrict && request_is_null)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("request must not be null for strict handler \"%s\"", NameStr(proc->proname))));
	ReleaseSysCache(tuple);
	fmgr_info(function, &handler->fn);
}

/* ---- running it ---- */

typedef struct Run
{
	Handler    *handler;
	const IdemClaimArgs *args;
	const IdemPolicy *policy;
	int32		attempt;
	struct varlena *result;		/* jsonb or NULL */
} Run;

/* A cast function may take a type modifier and a flag for explicit casts, too. */
static struct varlena *
call_cast(Oid function, Datum value)
{
	LOCAL_FCINFO(call, 3);
	FmgrInfo	fn;
	Datum		result;

	fmgr_info(function, &fn);
	InitFunctionCallInfoData(*call, &fn, fn.fn_nargs, DEFAULT_COLLATION_OID, NULL, NULL);
	call->args[0].value = value;
	call->args[0].isnull = false;
	call->args[1].value = Int32GetDatum(-1);
	call->args[1].isnull = false;
	call->args[2].value = BoolGetDatum(true);
	call->args[2].isnull = false;
	result = FunctionCallInvoke(call);
	return call->isnull ? NULL : PG_DETOAST_DATUM(result);
}

static struct varlena *
result_to_jsonb(const Handler *handler, Datum value)
{
	Oid			output;
	Oid			input;
	Oid			param;
	bool		is_varlena;

	if (handler->result_type == JSONBOID)
		return PG_DETOAST_DATUM(value);
	switch (handler->cast)
	{
		case COERCION_PATH_FUNC:
			return call_cast(handler->cast_function, value);
		case COERCION_PATH_RELABELTYPE:
			return PG_DETOAST_DATUM(value);
		default:
			getTypeOutputInfo(handler->result_type, &output, &is_varlena);
			getTypeInputInfo(JSONBOID, &input, &param);
			return PG_DETOAST_DATUM(OidInputFunctionCall(input, OidOutputFunctionCall(output, value),
														 param, -1));
	}
}

static void
call_handler(void *arg)
{
	Run		   *run = (Run *) arg;
	LOCAL_FCINFO(call, 3);
	PgStat_FunctionCallUsage usage;
	int			request = run->handler->nargs == 3 ? 1 : 0;
	Datum		value;

	InitFunctionCallInfoData(*call, &run->handler->fn, run->handler->nargs, DEFAULT_COLLATION_OID, NULL, NULL);
	call->args[request].value = PointerGetDatum(run->args->request);
	call->args[request].isnull = run->args->request == NULL;
	if (run->handler->nargs == 3)
	{
		call->args[0].value = PointerGetDatum(run->args->key);
		call->args[0].isnull = false;
		call->args[2].value = Int32GetDatum(run->attempt);
		call->args[2].isnull = false;
	}
	IDEM_FAILPOINT("handler-begins");
	PushActiveSnapshot(GetTransactionSnapshot());
	pgstat_init_function_usage(call, &usage);
	value = FunctionCallInvoke(call);
	pgstat_end_function_usage(&usage, true);
	run->result = call->isnull || run->handler->result_type == VOIDOID ? NULL :
		result_to_jsonb(run->handler, value);
	idem_check_result(run->policy, run->result, NULL);
	PopActiveSnapshot();
	IDEM_FAILPOINT("handler-ended");
}

/* ---- what becomes of an error ---- */

static bool
in_codes(ArrayType *codes, const char *code)
{
	Datum	   *items;
	int			n;

	if (codes == NULL)
		return false;
	deconstruct_array(codes, TEXTOID, -1, false, TYPALIGN_INT, &items, NULL, &n);
	for (int i = 0; i < n; i++)
		if (strcmp(TextDatumGetCString(items[i]), code) == 0)
			return true;
	return false;
}

static bool
passes_through(int sqlstate)
{
	int			class = ERRCODE_TO_CATEGORY(sqlstate);

	return class == ERRCODE_TO_CATEGORY(ERRCODE_TRANSACTION_ROLLBACK) ||
		class == ERRCODE_TO_CATEGORY(ERRCODE_OPERATOR_INTERVENTION) ||
		class == ERRCODE_TO_CATEGORY(ERRCODE_INTERNAL_ERROR) ||
		sqlstate == ERRCODE_IDEM_TOKEN_LOST ||
		sqlstate == ERRCODE_IDEM_NO_SUCH_KEY ||
		sqlstate == ERRCODE_IDEM_WRONG_STATE;
}

static IdemFailKind
kind_of(int sqlstate, const IdemPolicy *policy)
{
	const char *code = unpack_sql_state(sqlstate);
	int			class = ERRCODE_TO_CATEGORY(sqlstate);

	if (strcmp(code, "IDR00") == 0)
		return IDEM_FAIL_RETRYABLE;
	if (strcmp(code, "IDP00") == 0)
		return IDEM_FAIL_PERMANENT;
	if (strcmp(code, "IDU00") == 0)
		return IDEM_FAIL_UNKNOWN;
	if (in_codes(policy->retryable_codes, code))
		return IDEM_FAIL_RETRYABLE;
	if (in_codes(policy->permanent_codes, code))
		return IDEM_FAIL_PERMANENT;
	if (in_codes(policy->unknown_codes, code))
		return IDEM_FAIL_UNKNOWN;
	if (class == ERRCODE_TO_CATEGORY(ERRCODE_CONNECTION_EXCEPTION) ||
		class == ERRCODE_TO_CATEGORY(ERRCODE_INSUFFICIENT_RESOURCES) ||
		class == ERRCODE_TO_CATEGORY(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE) ||
		class == ERRCODE_TO_CATEGORY(ERRCODE_SYSTEM_ERROR))
		return IDEM_FAIL_RETRYABLE;
	return IDEM_FAIL_PERMANENT;
}

/* The failure to record; raises the error again if it is to pass through. */
static void
failure_of(ErrorData *error, const IdemPolicy *policy, IdemFailure *failure)
{
	if (passes_through(error->sqlerrcode))
		ReThrowError(error);
	memset(failure, 0, sizeof(*failure));
	failure->kind = kind_of(error->sqlerrcode, policy);
	failure->code = (struct varlena *) cstring_to_text(unpack_sql_state(error->sqlerrcode));
	failure->message = error->message == NULL ? NULL :
		(struct varlena *) idem_cut_message(cstring_to_text(error->message));
	failure->retry_after = -1;
}

/* ---- answers ---- */

static void
answer_executed(IdemAnswer *answer, int32 attempt, struct varlena *result)
{
	memset(answer, 0, sizeof(*answer));
	answer->outcome = IDEM_EXECUTED;
	answer->attempts = attempt;
	answer->lease_until = IDEM_NO_TIME;
	answer->retry_after = -1;
	answer->result_json = result;
}

static void
answer_failure(IdemAnswer *answer, const IdemRecord *rec)
{
	memset(answer, 0, sizeof(*answer));
	answer->outcome = rec->status == IDEM_RETRYABLE_FAILED ? IDEM_RETRY_LATER :
		rec->status == IDEM_UNKNOWN ? IDEM_IS_UNKNOWN : IDEM_WAS_FAILED;
	answer->attempts = rec->attempts;
	answer->lease_until = IDEM_NO_TIME;
	answer->retry_after = rec->status == IDEM_RETRYABLE_FAILED ? rec->retry_at - rec->updated_at : -1;
	answer->error_code = rec->error_code;
	answer->error_message = rec->error_message;
}

/* ---- the ordinary way: the claim is a row ---- */

static void
execute_claimed(Oid function, Handler *handler, const IdemClaimArgs *args, IdemAnswer *answer)
{
	pg_uuid_t	token = answer->token;
	IdemStore	st;
	Run			run = {.handler = handler, .args = args, .attempt = answer->attempts};
	IdemFailure failure;
	ErrorData  *error;

	run.policy = idem_policy_get(idem_catalog(function), answer->operation);
	error = idem_in_subtransaction(call_handler, &run);
	IDEM_FAILPOINT("claimed-handler-over");
	idem_store_open(&st, idem_catalog(function));
	if (error == NULL)
	{
		idem_complete_claimed(&st, args->key, &token, run.result);
		answer_executed(answer, run.attempt, run.result);
	}
	else
	{
		failure_of(error, run.policy, &failure);
		idem_fail_claimed(&st, args->key, &token, &failure);
		answer_failure(answer, &failure.after);
	}
	idem_store_close(&st);
	idem_remember_site(args);
}

/* ---- the short way: the guard is the claim ---- */

/* Writes the one row of an execution; the guard is held, the key is absent. */
static void
store_ended(const IdemCatalog *cat, IdemRecord *rec, bool finished)
{
	IdemStore	st;

	idem_store_open(&st, cat);
	if (finished)
		idem_store_insert_finished(&st, rec);
	else
		idem_store_insert_open(&st, rec);
	idem_store_close(&st);
}

static void
execute_guarded(Oid function, Handler *handler, const IdemClaimArgs *args, IdemAnswer *answer)
{
	Run			run = {.handler = handler, .args = args, .attempt = 1};
	IdemRecord	rec;
	IdemFailure failure;
	ErrorData  *error;

	run.policy = idem_policy_get(idem_catalog(function), args->operation);
	idem_first_attempt(args, run.policy, idem_now(), &rec);
	error = idem_in_subtransaction(call_handler, &run);
	IDEM_FAILPOINT("guarded-handler-over");
	if (error == NULL)
	{
		idem_become_succeeded(&rec, idem_now(), run.result, NULL);
		store_ended(idem_catalog(function), &rec, true);
		answer_executed(answer, 1, run.result);
		return;
	}
	failure_of(error, run.policy, &failure);
	store_ended(idem_catalog(function), &rec,
				idem_apply_failure(&rec, run.policy, idem_now(), &failure) == IDEM_MOVE);
	if (failure.notify)
		idem_notify(failure.event, &failure.after);
	answer_failure(answer, &failure.after);
}

/* Under the guard: is there no record, also not for the transaction's snapshot? */
static bool
is_new(IdemStore *st, text *key)
{
	IdemProbe	probe;

	idem_store_probe(st, key, &probe);
	if (probe.presence != IDEM_ABSENT)
		return false;
	if (IsolationUsesXactSnapshot() && idem_store_snapshot_sees(st->cat, key))
		idem_serialization_failure();
	return true;
}

typedef enum Look
{
	LOOK_REPLAYED,				/* *answer tells */
	LOOK_NEW,					/* no record, and the guard is held */
	LOOK_OTHER					/* the ordinary way; nothing is held */
} Look;

/* Finds out which way to go, with one store for all probes, closed again. */
static Look
look(const IdemCatalog *cat, const IdemClaimArgs *args, IdemAnswer *answer)
{
	IdemStore	st;
	Look		found = LOOK_OTHER;

	idem_store_open(&st, cat);
	if (idem_replay_at_once(&st, args, answer))
		found = LOOK_REPLAYED;
	else if (idem_guard_try(args->key))
	{
		IDEM_FAILPOINT("guard-taken");
		if (is_new(&st, args->key))
			found = LOOK_NEW;
		else
			idem_guard_release(args->key);
	}
	idem_store_close(&st);
	return found;
}

/* Answers, executes or claims and executes the key. */
static void
execute(Oid function, Handler *handler, const IdemClaimArgs *args, int64 wait, IdemAnswer *answer)
{
	switch (look(idem_catalog(function), args, answer))
	{
		case LOOK_REPLAYED:
			return;
		case LOOK_NEW:
			execute_guarded(function, handler, args, answer);
			idem_remember_site(args);
			IDEM_FAILPOINT("guard-ends");
			idem_guard_release(args->key);
			return;
		case LOOK_OTHER:
			idem_claim_waiting(function, args, wait, answer);
			if (answer->outcome == IDEM_CLAIMED)
				execute_claimed(function, handler, args, answer);
			return;
	}
}

/*
 * idem_execute(key, request, handler, operation, wait)
 */
PG_FUNCTION_INFO_V1(idem_execute);
Datum
idem_execute(PG_FUNCTION_ARGS)
{
	Oid			function = fcinfo->flinfo->fn_oid;
	IdemClaimArgs args = {.key = NULL};
	IdemAnswer	answer;
	Handler		handler;
	int64		wait = 0;

	idem_write_prologue("idem_execute()");
	idem_claim_args_key(&args, idem_key_arg(fcinfo), idem_operation_arg(fcinfo, 3));
	idem_claim_args_site(&args, fcinfo);
	if (!PG_ARGISNULL(1))
		args.request = PG_GETARG_JSONB_P(1);
	if (PG_ARGISNULL(2))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("handler must not be null")));
	find_handler(PG_GETARG_OID(2), args.request == NULL, &handler);
	if (!PG_ARGISNULL(4))
		wait = idem_interval_us(PG_GETARG_INTERVAL_P(4), "wait", 0, IDEM_MAX_LEASE_US);

	execute(function, &handler, &args, wait, &answer);
	return idem_answer_datum(fcinfo, &answer);
}
