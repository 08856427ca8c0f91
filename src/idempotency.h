/*-------------------------------------------------------------------------
 *
 * idempotency.h
 *	  Types and entry points shared by the rooms of the extension.
 *
 * A call goes through few rooms:
 *
 *	  SQL entry		claim.c finish.c execute.c once.c batch.c due.c reap.c
 *					operator.c status.c stats.c backoff.c access.c
 *	  change		change.c			rounds of a change to a record
 *	  decide		state.c policy.c	pure: no tuples, no clock, no storage
 *	  store			store.c record.c keylock.c ring.c	no policy
 *
 * Beside them: catalog.c (OIDs of our own tables), policy_cache.c (rows of
 * idem_policy), audit.c, notify.c, subxact.c, key.c canonical.c number.c
 * pointer.c digest.c (keys and digests), arguments.c (checks), idempotency.c
 * (settings, clock).
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_H
#define IDEMPOTENCY_H

#include "access/htup.h"
#include "access/xact.h"
#include "datatype/timestamp.h"
#include "access/tupdesc.h"
#include "executor/tuptable.h"
#include "fmgr.h"
#include "storage/itemptr.h"
#include "utils/array.h"
#include "utils/jsonb.h"
#include "utils/relcache.h"
#include "utils/snapshot.h"
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

/* ---- arguments.c ---- */
extern int64 idem_interval_us(const Interval *span, const char *what, int64 min, int64 max);
extern Interval *idem_us_interval(int64 us);
extern text *idem_check_key(text *key);
extern text *idem_key_arg(FunctionCallInfo fcinfo);
extern pg_uuid_t *idem_token_arg(FunctionCallInfo fcinfo);
extern text *idem_check_code(text *code);
extern text *idem_cut_message(text *message);

/* ---- catalog.c: OIDs of our own objects ---- */
typedef struct IdemCatalog
{
	Oid			schema;
	Oid			record;			/* partitioned parent, never opened by us */
	Oid			slices[IDEM_RING_SLICES + 1];	/* [0] = open partition */
	Oid			ring;
	Oid			policy;
	Oid			audit;
} IdemCatalog;

extern const IdemCatalog *idem_catalog(Oid function);
extern void idem_catalog_init(void);
extern void idem_scan_latest(Relation rel, void (*visit) (TupleTableSlot *slot, void *arg), void *arg);

/* ---- policy_cache.c ---- */
extern const IdemPolicy *idem_policy_get(const IdemCatalog *cat, const text *operation);
extern void idem_policy_forget(Oid relid);

/* ---- policy.c: pure ---- */
extern int64 idem_policy_backoff(int32 attempt, int64 base, double factor, int64 cap,
								 IdemJitter jitter, double random);

/* ---- ring.c ---- */
typedef struct IdemRingWork
{
	int64		rotated;
	int64		purged;
	int64		skipped;
	bool		more;
} IdemRingWork;

extern int	idem_ring_current(const IdemCatalog *cat);
extern void idem_ring_turn(const IdemCatalog *cat, int64 retention, TimestampTz now, IdemRingWork *work);
extern void idem_ring_forget(Oid relid);

/* ---- keylock.c ---- */
typedef enum IdemKeyLock
{
	IDEM_KEY_LOCKED,
	IDEM_KEY_BUSY,
	IDEM_KEY_OURS
} IdemKeyLock;

extern IdemKeyLock idem_keylock_try(const text *key);
extern bool idem_keylock_wait_unguarded(const text *key);
extern bool idem_guard_try(const text *key);
extern void idem_guard_release(const text *key);
extern void idem_keylock_wait(const text *key);
extern void idem_keylock_release(const text *key);

/* ---- store.c ---- */
typedef enum IdemPresence
{
	IDEM_ABSENT,				/* no row in the partitions probed */
	IDEM_PRESENT,				/* committed, or written by this transaction */
	IDEM_IN_DOUBT				/* written or deleted by a transaction in progress */
} IdemPresence;

typedef struct IdemProbe
{
	IdemPresence presence;
	ItemPointerData tid;		/* of the row found */
	bool		own;			/* PRESENT: version written by this transaction */
	CommandId	cmin;			/* own: command that wrote it */
	bool		touched;		/* PRESENT: has an xmax, maybe of a row lock */
	bool		snapshot_sees;	/* PRESENT: visible to the transaction snapshot */
	TransactionId xid;			/* IN_DOUBT: the transaction to wait for */
	IdemRecord	rec;			/* PRESENT and IN_DOUBT; rec.slice tells where */
} IdemProbe;

typedef enum IdemWrite
{
	IDEM_WRITTEN,
	IDEM_ROW_BUSY				/* row lock of another transaction: nothing written */
} IdemWrite;

/* One partition in use by a store; opened when first needed. */
typedef struct IdemPart
{
	Relation	rel;			/* NULL = not open */
	Relation	index;			/* these with scan */
	struct IndexScanDescData *scan; /* NULL = not open */
	TupleTableSlot *slot;
	SnapshotData dirty;
	struct IdemWriter *writer;	/* NULL = nothing written yet */
} IdemPart;

/*
 * The record table in use by one call.  Partitions stay open from key to key of
 * a batch.
 */
typedef struct IdemStore
{
	const IdemCatalog *cat;
	MemoryContext context;		/* of what stays open */
	IdemPart	parts[IDEM_RING_SLICES + 1];
	bool		wrote;			/* since the last idem_store_settle() */
	bool		wrote_open;		/* keep the lock of the open partition */
} IdemStore;

extern void idem_store_open(IdemStore *st, const IdemCatalog *cat);
extern void idem_store_settle(IdemStore *st);
extern void idem_store_close(IdemStore *st);
extern void idem_store_probe(IdemStore *st, const text *key, IdemProbe *probe);
extern bool idem_store_probe_current(IdemStore *st, const text *key, IdemProbe *probe);
extern bool idem_store_snapshot_sees(const IdemCatalog *cat, const text *key);
extern void idem_store_insert_open(IdemStore *st, IdemRecord *rec);
extern IdemWrite idem_store_update_open(IdemStore *st, IdemProbe *probe, IdemRecord *rec);
extern IdemWrite idem_store_delete(IdemStore *st, IdemProbe *probe);
extern IdemWrite idem_store_reopen(IdemStore *st, IdemProbe *probe, IdemRecord *rec);
extern void idem_store_insert_finished(IdemStore *st, IdemRecord *rec);
extern IdemWrite idem_store_finish(IdemStore *st, IdemProbe *probe, IdemRecord *rec);
typedef void (*IdemVisit) (IdemRecord *rec, void *arg);
extern void idem_store_scan_open(const IdemCatalog *cat, IdemVisit visit, void *arg);
extern void idem_store_wait_row(IdemStore *st, IdemProbe *probe);
extern void idem_store_wait_xact(IdemStore *st, IdemProbe *probe);
extern HeapTupleHeader idem_store_read(const IdemCatalog *cat, const text *key, Snapshot snapshot, TupleDesc desc);

/* ---- state.c: pure ---- */
typedef enum IdemStanding
{
	IDEM_HELD,					/* processing, lease not over */
	IDEM_LAPSED,				/* processing, lease over, next claim takes over */
	IDEM_WAITING,				/* retryable_failed, not due */
	IDEM_DUE,					/* retryable_failed, due */
	IDEM_STANDS_UNKNOWN,		/* unknown, stored or lapsed into */
	IDEM_STANDS_EXHAUSTED,		/* limits reached, not yet stored as failed */
	IDEM_STANDS_FAILED,
	IDEM_STANDS_SUCCEEDED
} IdemStanding;

typedef enum IdemVerdict
{
	IDEM_GIVE_NEW,				/* no record: insert */
	IDEM_GIVE_NEXT,				/* next attempt: update */
	IDEM_GIVE_SAME,				/* the caller's token holds it: no change */
	IDEM_SETTLE_UNKNOWN,		/* store the lapse, answer unknown */
	IDEM_SETTLE_EXHAUSTED,		/* store the lapse, answer failed */
	IDEM_ANSWER_IN_PROGRESS,
	IDEM_ANSWER_RETRY_LATER,
	IDEM_ANSWER_UNKNOWN,
	IDEM_ANSWER_FAILED,
	IDEM_ANSWER_SUCCEEDED,
	IDEM_REFUSE_TOKEN			/* the token served an earlier attempt */
} IdemVerdict;

extern IdemStanding idem_standing(const IdemRecord *rec, const IdemPolicy *policy, TimestampTz now);
extern bool idem_settles(const IdemRecord *rec, IdemStanding standing);
extern bool idem_limits_reached(const IdemRecord *rec, const IdemPolicy *policy, TimestampTz next);
extern IdemVerdict idem_decide_claim(const IdemRecord *rec, IdemStanding standing, const pg_uuid_t *token);
extern void idem_become_retried(IdemRecord *rec, TimestampTz now);
extern void idem_end_lease(IdemRecord *rec, TimestampTz now);
extern bool idem_token_is_nil(const pg_uuid_t *token);
extern bool idem_token_is(const IdemRecord *rec, const pg_uuid_t *token);
extern bool idem_token_was(const IdemRecord *rec, const pg_uuid_t *token);
extern void idem_bury_token(IdemRecord *rec);
extern void idem_become_processing(IdemRecord *rec, IdemStanding from, const pg_uuid_t *token,
								   TimestampTz now, int64 lease);
extern void idem_become_retryable(IdemRecord *rec, TimestampTz now, TimestampTz retry_at);
extern void idem_become_unknown(IdemRecord *rec, TimestampTz now);
extern void idem_become_failed(IdemRecord *rec, TimestampTz now);
extern void idem_become_exhausted(IdemRecord *rec, const IdemPolicy *policy, TimestampTz now);
extern void idem_become_succeeded(IdemRecord *rec, TimestampTz now, struct varlena *json, struct varlena *body);
extern const char *idem_status_name(IdemStatus status);
extern IdemStatus idem_status_code(const text *name);
extern const char *idem_previous_name(IdemPrevious previous);
extern IdemPrevious idem_previous_code(const text *name);

/* ---- access.c ---- */
extern void idem_write_prologue(const char *function);
extern void idem_check_owner(Oid owner);
extern bool idem_is_owner(Oid owner);
extern bool idem_may_read_all(const IdemCatalog *cat);

extern int	idem_lock_search_path(void);

/* Runs one statement as the owner of a table of ours, with a locked search_path. */
extern void idem_run_as_owner(Oid table, const char *sql, int nargs, Oid *types,
							  Datum *values, const char *nulls);

/* ---- subxact.c ---- */
extern ErrorData *idem_in_subtransaction(void (*step) (void *), void *arg);

/* ---- reap.c ---- */
extern bool idem_try(void (*step) (void *), void *arg, bool loud);

/* ---- notify.c ---- */
typedef enum IdemEvent
{
	IDEM_EVENT_EXHAUSTED,
	IDEM_EVENT_FAILED,
	IDEM_EVENT_UNKNOWN
} IdemEvent;

extern void idem_notify(IdemEvent event, const IdemRecord *rec);

/* ---- audit.c ---- */
extern void idem_audit(const IdemCatalog *cat, const char *action, text *reason,
					   const IdemRecord *before, const char *new_status, int32 new_attempts);

/* ---- key.c ---- */
extern text *idem_key_operation(const text *key);

/* ---- canonical.c and digest.c ---- */
/* Canonical text in UTF-8 whatever the server encoding; *len in bytes. ignore may be NULL. */
extern char *idem_canonical_utf8(Jsonb *request, ArrayType *ignore, int *len);

/* Digest by the algorithm of the given version byte; ignore may be NULL. */
#define IDEM_DIGEST_V1			0x01
extern bytea *idem_request_digest(Jsonb *request, ArrayType *ignore);

#endif							/* IDEMPOTENCY_H */
