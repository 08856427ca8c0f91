/*-------------------------------------------------------------------------
 *
 * claim.h
 *	  A claim inside the extension: arguments, answer, one round.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CLAIM_H
#define IDEM_CLAIM_H

#include "idempotency.h"

typedef enum IdemOutcome
{
	IDEM_CLAIMED,
	IDEM_EXECUTED,
	IDEM_WAS_SUCCEEDED,
	IDEM_WAS_FAILED,
	IDEM_IN_PROGRESS,
	IDEM_RETRY_LATER,
	IDEM_IS_UNKNOWN,
	IDEM_CONFLICT
} IdemOutcome;

/* Checked arguments; pointers are NULL where not given. */
typedef struct IdemClaimArgs
{
	text	   *key;
	text	   *operation;		/* never NULL */
	bool		operation_named;	/* by the caller, not by the key */
	Jsonb	   *request;
	bytea	   *digest;
	pg_uuid_t  *token;
	int64		lease;			/* 0 = the policy's */
	bool		likely_new;		/* do not look for a replay first */
	const FmgrInfo *site;		/* scalar call site, or NULL */
	int			location;		/* of that call in the query, or -1 */
} IdemClaimArgs;

/* One row of idem_claim_result; NULLs as in IdemRecord. */
typedef struct IdemAnswer
{
	IdemOutcome outcome;
	bool		has_token;
	pg_uuid_t	token;
	int32		attempts;
	TimestampTz lease_until;
	int64		retry_after;	/* -1 = NULL */
	struct varlena *result_json;
	struct varlena *result_body;
	struct varlena *error_code;
	struct varlena *error_message;
	const char *previous;
	struct varlena *progress;
	text	   *operation;		/* of a claimed record; no column */
} IdemAnswer;

#define IDEM_ANSWER_COLUMNS	11

extern text *idem_operation_arg(FunctionCallInfo fcinfo, int number);
extern void idem_claim_args_key(IdemClaimArgs *args, text *key, text *named);
extern void idem_claim_args_site(IdemClaimArgs *args, FunctionCallInfo fcinfo);
extern void idem_remember_site(const IdemClaimArgs *args);
extern bool idem_replay_at_once(IdemStore *st, const IdemClaimArgs *args, IdemAnswer *answer);
extern void idem_claim_with(IdemStore *st, const IdemClaimArgs *args, IdemAnswer *answer);
extern void idem_claim_round(const IdemCatalog *cat, const IdemClaimArgs *args, IdemAnswer *answer);
extern bool idem_answered_by_probe(const IdemProbe *probe);
extern void idem_claim_waiting(Oid function, const IdemClaimArgs *args, int64 wait, IdemAnswer *answer);
extern bytea *idem_claim_digest(const IdemClaimArgs *args, const IdemPolicy *policy);
extern bool idem_claim_same_request(const IdemClaimArgs *args, const IdemRecord *rec, const IdemPolicy *policy);
extern void idem_serialization_failure(void);
extern bool idem_claim_if_due(const IdemCatalog *cat, text *key, int64 lease, IdemAnswer *answer,
							  struct varlena **request);
extern void idem_new_token(const IdemClaimArgs *args, pg_uuid_t *token);
extern void idem_first_attempt(const IdemClaimArgs *args, const IdemPolicy *policy, TimestampTz now,
							   IdemRecord *rec);
extern void idem_answer_columns(const IdemAnswer *answer, Datum *values, bool *nulls);
extern TupleDesc idem_result_desc(FunctionCallInfo fcinfo);
extern Datum idem_answer_datum(FunctionCallInfo fcinfo, const IdemAnswer *answer);

#endif							/* IDEM_CLAIM_H */
