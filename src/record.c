/*-------------------------------------------------------------------------
 *
 * record.c
 *	  Rows of idem_record and IdemRecord structs: one into the other.
 *
 * Knows the columns of the table; finds and writes nothing (store.c does).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "executor/tuptable.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "idempotency.h"
#include "record.h"

/* Columns of idem_record, numbered from 0. */
enum
{
	C_SLICE,
	C_KEY,
	C_OPERATION,
	C_OWNER,
	C_REQUEST_HASH,
	C_STATUS,
	C_ATTEMPTS,
	C_OWNER_TOKEN,
	C_LEASE_UNTIL,
	C_RETRY_AT,
	C_FIRST_CLAIMED_AT,
	C_UPDATED_AT,
	C_RESULT_JSON,
	C_RESULT_BODY,
	C_ERROR_CODE,
	C_ERROR_MESSAGE,
	C_REQUEST_JSON,
	C_PROGRESS,
	C_PREVIOUS,
	C_PAST_TOKENS,
	C_LIMITS_FROM_ATTEMPT,
	C_LIMITS_FROM,
	C_COUNT
};

StaticAssertDecl(C_COUNT == IDEM_RECORD_COLUMNS, "columns of idem_record");

/* A copy in the current memory context; fetch = follow TOAST pointers now. */
static struct varlena *
take_varlena(TupleTableSlot *slot, int col, bool fetch)
{
	struct varlena *value;
	struct varlena *copy;

	if (slot->tts_isnull[col])
		return NULL;
	value = (struct varlena *) DatumGetPointer(slot->tts_values[col]);
	if (fetch)
		return (struct varlena *) PG_DETOAST_DATUM_COPY(PointerGetDatum(value));
	copy = (struct varlena *) palloc(VARSIZE_ANY(value));
	memcpy(copy, value, VARSIZE_ANY(value));
	return copy;
}

static TimestampTz
take_time(TupleTableSlot *slot, int col)
{
	return slot->tts_isnull[col] ? IDEM_NO_TIME : DatumGetTimestampTz(slot->tts_values[col]);
}

/* The row in the slot as a struct, in the current memory context. */
void
idem_take_record(TupleTableSlot *slot, IdemRecord *rec)
{
	Datum	   *v = slot->tts_values;
	bool		fetch;

	slot_getallattrs(slot);
	rec->slice = DatumGetInt16(v[C_SLICE]);
	fetch = rec->slice != IDEM_SLICE_OPEN;
	rec->key = (text *) take_varlena(slot, C_KEY, true);
	rec->operation = (text *) take_varlena(slot, C_OPERATION, true);
	rec->owner = DatumGetObjectId(v[C_OWNER]);
	rec->request_hash = (bytea *) take_varlena(slot, C_REQUEST_HASH, true);
	rec->status = idem_status_code(DatumGetTextPP(v[C_STATUS]));
	rec->attempts = DatumGetInt32(v[C_ATTEMPTS]);
	rec->has_token = !slot->tts_isnull[C_OWNER_TOKEN];
	if (rec->has_token)
		rec->token = *DatumGetUUIDP(v[C_OWNER_TOKEN]);
	rec->lease_until = take_time(slot, C_LEASE_UNTIL);
	rec->retry_at = take_time(slot, C_RETRY_AT);
	rec->first_claimed_at = take_time(slot, C_FIRST_CLAIMED_AT);
	rec->updated_at = take_time(slot, C_UPDATED_AT);
	rec->result_json = take_varlena(slot, C_RESULT_JSON, fetch);
	rec->result_body = take_varlena(slot, C_RESULT_BODY, fetch);
	rec->error_code = take_varlena(slot, C_ERROR_CODE, fetch);
	rec->error_message = take_varlena(slot, C_ERROR_MESSAGE, fetch);
	rec->request_json = take_varlena(slot, C_REQUEST_JSON, fetch);
	rec->progress = take_varlena(slot, C_PROGRESS, fetch);
	rec->previous = idem_previous_code(DatumGetTextPP(v[C_PREVIOUS]));
	rec->past_tokens = take_varlena(slot, C_PAST_TOKENS, fetch);
	rec->limits_from_attempt = DatumGetInt32(v[C_LIMITS_FROM_ATTEMPT]);
	rec->limits_from = DatumGetTimestampTz(v[C_LIMITS_FROM]);
}

static void
put_varlena(TupleTableSlot *slot, int col, const void *value)
{
	slot->tts_isnull[col] = value == NULL;
	slot->tts_values[col] = PointerGetDatum(value);
}

static void
put_time(TupleTableSlot *slot, int col, TimestampTz value)
{
	slot->tts_isnull[col] = value == IDEM_NO_TIME;
	slot->tts_values[col] = TimestampTzGetDatum(value);
}

/* Fills a slot with the record; it points into the record's memory. */
void
idem_put_record(TupleTableSlot *slot, const IdemRecord *rec)
{
	Datum	   *v = slot->tts_values;

	ExecClearTuple(slot);
	memset(slot->tts_isnull, true, slot->tts_tupleDescriptor->natts * sizeof(bool));
	memset(slot->tts_isnull, false, C_COUNT * sizeof(bool));
	v[C_SLICE] = Int16GetDatum(rec->slice);
	put_varlena(slot, C_KEY, rec->key);
	put_varlena(slot, C_OPERATION, rec->operation);
	v[C_OWNER] = ObjectIdGetDatum(rec->owner);
	put_varlena(slot, C_REQUEST_HASH, rec->request_hash);
	v[C_STATUS] = CStringGetTextDatum(idem_status_name(rec->status));
	v[C_ATTEMPTS] = Int32GetDatum(rec->attempts);
	v[C_OWNER_TOKEN] = UUIDPGetDatum(&rec->token);
	slot->tts_isnull[C_OWNER_TOKEN] = !rec->has_token;
	put_time(slot, C_LEASE_UNTIL, rec->lease_until);
	put_time(slot, C_RETRY_AT, rec->retry_at);
	put_time(slot, C_FIRST_CLAIMED_AT, rec->first_claimed_at);
	put_time(slot, C_UPDATED_AT, rec->updated_at);
	put_varlena(slot, C_RESULT_JSON, rec->result_json);
	put_varlena(slot, C_RESULT_BODY, rec->result_body);
	put_varlena(slot, C_ERROR_CODE, rec->error_code);
	put_varlena(slot, C_ERROR_MESSAGE, rec->error_message);
	put_varlena(slot, C_REQUEST_JSON, rec->request_json);
	put_varlena(slot, C_PROGRESS, rec->progress);
	v[C_PREVIOUS] = CStringGetTextDatum(idem_previous_name(rec->previous));
	put_varlena(slot, C_PAST_TOKENS, rec->past_tokens);
	v[C_LIMITS_FROM_ATTEMPT] = Int32GetDatum(rec->limits_from_attempt);
	v[C_LIMITS_FROM] = TimestampTzGetDatum(rec->limits_from);
	ExecStoreVirtualTuple(slot);
}
