/*-------------------------------------------------------------------------
 *
 * finish.h
 *	  Ending an attempt from inside the extension.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_FINISH_H
#define IDEM_FINISH_H

#include "change.h"
#include "idempotency.h"

typedef enum IdemFailKind
{
	IDEM_FAIL_RETRYABLE,
	IDEM_FAIL_PERMANENT,
	IDEM_FAIL_UNKNOWN
} IdemFailKind;

typedef struct IdemFailure
{
	IdemFailKind kind;
	struct varlena *code;
	struct varlena *message;
	int64		retry_after;	/* -1 = backoff of the policy */
	/* answer */
	IdemRecord	after;			/* what the record became */
	IdemEvent	event;			/* unless retryable_failed */
	bool		notify;
} IdemFailure;

extern void idem_check_result(const IdemPolicy *policy, struct varlena *json, struct varlena *body);
extern bool idem_complete_held(IdemStore *st, text *key, const pg_uuid_t *token,
							   struct varlena *json, struct varlena *body);
extern void idem_complete_claimed(IdemStore *st, text *key, const pg_uuid_t *token, struct varlena *json);
extern IdemChange idem_apply_failure(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg);
extern void idem_fail_held(IdemStore *st, text *key, const pg_uuid_t *token, IdemFailure *failure);
extern void idem_fail_claimed(IdemStore *st, text *key, const pg_uuid_t *token, IdemFailure *failure);

#endif							/* IDEM_FINISH_H */
