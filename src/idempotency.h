/*-------------------------------------------------------------------------
 *
 * idempotency.h
 *	  Types and entry points shared by the rooms of the extension.
 *
 * A call goes through few rooms:
 *
 *	  SQL entry		claim.c finish.c status.c access.c
 *	  decide		state.c policy.c	pure: no tuples, no clock, no storage
 *	  store			store.c keylock.c ring.c	no policy
 *
 * Beside them: catalog.c (OIDs of our own tables), policy_cache.c (rows of
 * idem_policy), key.c canonical.c digest.c (keys and digests), interval.c
 * (argument checks), idempotency.c (settings, clock).
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_H
#define IDEMPOTENCY_H

#include "access/xact.h"
#include "datatype/timestamp.h"
#include "fmgr.h"
#include "storage/itemptr.h"
#include "utils/array.h"
#include "utils/jsonb.h"
#include "utils/uuid.h"

/* Private SQLSTATE class, DESIGN.md section 5. */
#define ERRCODE_IDEM_TOKEN_LOST		MAKE_SQLSTATE('I', 'D', '0', '0', '1')
#define ERRCODE_IDEM_NO_SUCH_KEY	MAKE_SQLSTATE('I', 'D', '0', '0', '2')
#define ERRCODE_IDEM_WRONG_STATE	MAKE_SQLSTATE('I', 'D', '0', '0', '3')

#define IDEM_MAX_KEY_BYTES		1024
#define IDEM_MAX_MESSAGE_BYTES	8192
#define IDEM_MAX_CODE_BYTES		128
#define IDEM_MAX_DIGEST_BYTES	128
#define IDEM_MAX_STEP_BYTES		256
#define IDEM_MAX_PROGRESS_BYTES	1048576
#define IDEM_MAX_LEASE_US		(INT64CONST(366) * USECS_PER_DAY)
#define IDEM_DEFAULT_OPERATION	"default"

/* "No time": the record's columns are never infinite. */
#define IDEM_NO_TIME			DT_NOBEGIN

#define IDEM_RING_SLICES		4
#define IDEM_SLICE_OPEN			0

typedef enum IdemStatus
{
	IDEM_PROCESSING,
	IDEM_SUCCEEDED,
	IDEM_RETRYABLE_FAILED,
	IDEM_FAILED,
	IDEM_UNKNOWN
} IdemStatus;

typedef enum IdemPrevious
{
	IDEM_PREVIOUS_NONE,
	IDEM_PREVIOUS_RETRYABLE_FAILED,
	IDEM_PREVIOUS_LEASE_EXPIRED,
	IDEM_PREVIOUS_RETRIED
} IdemPrevious;

typedef enum IdemJitter
{
	IDEM_JITTER_FULL,
	IDEM_JITTER_EQUAL,
	IDEM_JITTER_NONE
} IdemJitter;

/*
 * One row of idem_record.  Pointers are NULL for SQL NULL.  The varlena
 * members may be TOAST pointers while the row is in the open partition; rows
 * of the ring are read detoasted, because their slice may be truncated as
 * soon as the probe is over.
 */
typedef struct IdemRecord
{
	int16		slice;
	text	   *key;
	text	   *operation;
	Oid			owner;
	bytea	   *request_hash;
	IdemStatus	status;
	int32		attempts;
	bool		has_token;
	pg_uuid_t	token;
	TimestampTz lease_until;
	TimestampTz retry_at;
	TimestampTz first_claimed_at;
	TimestampTz updated_at;
	struct varlena *result_json;
	struct varlena *result_body;
	struct varlena *error_code;
	struct varlena *error_message;
	struct varlena *request_json;
	struct varlena *progress;
	IdemPrevious previous;
	struct varlena *past_tokens;
	int32		limits_from_attempt;
	TimestampTz limits_from;
} IdemRecord;

/* One row of idem_policy; times in microseconds. */
typedef struct IdemPolicy
{
	int64		lease;
	int32		max_attempts;
	int64		max_elapsed;	/* -1 = no limit */
	int64		backoff_base;
	double		backoff_factor;
	int64		backoff_cap;
	IdemJitter	jitter;
	bool		expiry_is_unknown;
	bool		store_request;
	bool		notify;
	int32		max_result_size;
	int64		retention;		/* row 'default' only, else -1 */
	ArrayType  *digest_ignore;	/* NULL when empty */
	ArrayType  *retryable_codes;
	ArrayType  *permanent_codes;
	ArrayType  *unknown_codes;
} IdemPolicy;

/* ---- idempotency.c ---- */
extern TimestampTz idem_now(void);

/* ---- interval.c: arguments ---- */
extern int64 idem_interval_us(const Interval *span, const char *what, int64 min, int64 max);
extern Interval *idem_us_interval(int64 us);
extern text *idem_check_key(text *key);

/* ---- key.c ---- */
extern text *idem_key_operation(const text *key);

/* ---- canonical.c and digest.c ---- */
/* Canonical text in UTF-8 whatever the server encoding; *len in bytes. ignore may be NULL. */
extern char *idem_canonical_utf8(Jsonb *request, ArrayType *ignore, int *len);

/* Digest by the algorithm of the given version byte; ignore may be NULL. */
#define IDEM_DIGEST_V1			0x01
extern bytea *idem_request_digest(Jsonb *request, ArrayType *ignore);

#endif							/* IDEMPOTENCY_H */
