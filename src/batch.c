/*-------------------------------------------------------------------------
 *
 * batch.c
 *	  Many keys in one call: idem_claim_many, idem_complete_many,
 *	  idem_once_many.
 *
 * Each key is treated by the rules of the single form.  Keys are taken in
 * the order of their bytes, so that two batches with the same keys cannot wait for
 * each other in a circle, and the answers are sorted back to the order of the
 * input; equal keys are taken in input order.  Memory is reset per key and the
 * sort spills to disk, so a batch is bounded by its input only; no lock is kept per
 * key.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_operator.h"
#include "catalog/pg_type.h"
#include "executor/tuptable.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/tuplesort.h"

#include "claim.h"
#include "finish.h"
#include "failpoint.h"
#include "idempotency.h"
#include "once.h"

typedef struct Elements
{
	Datum	   *values;
	bool	   *nulls;
	int			n;
} Elements;

typedef struct Batch
{
	FunctionCallInfo fcinfo;
	Elements	keys;
	int		   *order;			/* positions, by bytes of the key */
	Tuplesortstate *sort;
	TupleTableSlot *slot;
	IdemStore	st;
	MemoryContext scratch;
} Batch;

/* ---- input ---- */

static void
read_array(FunctionCallInfo fcinfo, int arg, Oid type, int16 len, bool byval, char align, Elements *elements)
{
	ArrayType  *array = PG_GETARG_ARRAYTYPE_P(arg);

	if (ARR_NDIM(array) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("array must have one dimension")));
	deconstruct_array(array, type, len, byval, align, &elements->values, &elements->nulls, &elements->n);
}

static void
check_length(const Elements *keys, const Elements *others, const char *what)
{
	if (keys->n != others->n)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"%s\" must have as many elements as \"keys\"", what)));
}

static int
by_key(const void *a, const void *b, void *arg)
{
	const Elements *keys = (const Elements *) arg;
	int			x = *(const int *) a;
	int			y = *(const int *) b;
	text	   *kx = DatumGetTextPP(keys->values[x]);
	text	   *ky = DatumGetTextPP(keys->values[y]);
	int			lx = VARSIZE_ANY_EXHDR(kx);
	int			ly = VARSIZE_ANY_EXHDR(ky);
	int			c = memcmp(VARDATA_ANY(kx), VARDATA_ANY(ky), Min(lx, ly));

	if (c == 0)
		c = lx - ly;
	return c != 0 ? c : x - y;
}

/* Reads and checks all keys before the first is touched. */
static void
read_keys(Batch *batch)
{
	FunctionCallInfo fcinfo = batch->fcinfo;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("keys must not be null")));
	read_array(fcinfo, 0, TEXTOID, -1, false, TYPALIGN_INT, &batch->keys);
	batch->order = (int *) palloc(sizeof(int) * Max(batch->keys.n, 1));
	for (int i = 0; i < batch->keys.n; i++)
	{
		if (batch->keys.nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("idempotency key must not be null")));
		(void) idem_check_key(DatumGetTextPP(batch->keys.values[i]));
		batch->order[i] = i;
	}
	qsort_arg(batch->order, batch->keys.n, sizeof(int), by_key, &batch->keys);
}

/* ---- output ---- */

static void
batch_begin(Batch *batch, FunctionCallInfo fcinfo)
{
	AttrNumber	column = 1;
	Oid			less = Int8LessOperator;
	Oid			collation = InvalidOid;
	bool		nulls_first = false;
	TupleDesc	desc;

	batch->fcinfo = fcinfo;
	read_keys(batch);
	InitMaterializedSRF(fcinfo, 0);
	desc = ((ReturnSetInfo *) fcinfo->resultinfo)->setDesc;
	batch->slot = MakeSingleTupleTableSlot(desc, &TTSOpsVirtual);
	batch->sort = tuplesort_begin_heap(desc, 1, &column, &less, &collation, &nulls_first,
									   work_mem, NULL, 0);
	idem_store_open(&batch->st, idem_catalog(fcinfo->flinfo->fn_oid));
	batch->scratch = AllocSetContextCreate(CurrentMemoryContext, "idempotency batch",
										   ALLOCSET_DEFAULT_SIZES);
}

/* Columns from the third on are the caller's to fill, before. */
static void
batch_put(Batch *batch, int position)
{
	TupleTableSlot *slot = batch->slot;

	slot->tts_values[0] = Int64GetDatum(position + 1);
	slot->tts_isnull[0] = false;
	slot->tts_values[1] = batch->keys.values[position];
	slot->tts_isnull[1] = false;
	IDEM_FAILPOINT("batch-key-done");
	ExecStoreVirtualTuple(slot);
	tuplesort_puttupleslot(batch->sort, slot);
	ExecClearTuple(slot);
}

static Datum
batch_end(Batch *batch)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) batch->fcinfo->resultinfo;
	TupleTableSlot *slot = MakeSingleTupleTableSlot(rsinfo->setDesc, &TTSOpsMinimalTuple);

	idem_store_close(&batch->st);
	tuplesort_performsort(batch->sort);
	while (tuplesort_gettupleslot(batch->sort, true, false, slot, NULL))
		tuplestore_puttupleslot(rsinfo->setResult, slot);
	tuplesort_end(batch->sort);
	ExecDropSingleTupleTableSlot(slot);
	ExecDropSingleTupleTableSlot(batch->slot);
	MemoryContextDelete(batch->scratch);
	return (Datum) 0;
}

/* ---- claims ---- */

static void
claim_one(Batch *batch, int position, IdemClaimArgs *args, text *operation)
{
	IdemAnswer	answer;

	idem_claim_args_key(args, DatumGetTextPP(batch->keys.values[position]), operation);
	idem_claim_with(&batch->st, args, &answer);
	idem_answer_columns(&answer, batch->slot->tts_values + 2, batch->slot->tts_isnull + 2);
	batch_put(batch, position);
}

/*
 * idem_claim_many(keys, requests, operation, lease)
 */
PG_FUNCTION_INFO_V1(idem_claim_many);
Datum
idem_claim_many(PG_FUNCTION_ARGS)
{
	Batch		batch;
	Elements	requests = {0};
	IdemClaimArgs args = {.location = -1, .likely_new = true};
	text	   *operation;

	idem_write_prologue("idem_claim_many()");
	operation = idem_operation_arg(fcinfo, 2);
	batch_begin(&batch, fcinfo);
	if (!PG_ARGISNULL(1))
	{
		read_array(fcinfo, 1, JSONBOID, -1, false, TYPALIGN_INT, &requests);
		check_length(&batch.keys, &requests, "requests");
	}
	if (!PG_ARGISNULL(3))
		args.lease = idem_interval_us(PG_GETARG_INTERVAL_P(3), "lease", 1, IDEM_MAX_LEASE_US);

	for (int i = 0; i < batch.keys.n; i++)
	{
		int			position = batch.order[i];
		MemoryContext old = MemoryContextSwitchTo(batch.scratch);

		CHECK_FOR_INTERRUPTS();
		args.request = requests.n == 0 || requests.nulls[position] ? NULL :
			DatumGetJsonbP(requests.values[position]);
		claim_one(&batch, position, &args, operation);
		MemoryContextSwitchTo(old);
		MemoryContextReset(batch.scratch);
	}
	return batch_end(&batch);
}

/* ---- completions ---- */

static pg_uuid_t *
token_at(const Elements *tokens, int position)
{
	if (tokens->nulls[position])
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("token must not be null")));
	return DatumGetUUIDP(tokens->values[position]);
}

/*
 * idem_complete_many(keys, tokens, results)
 */
PG_FUNCTION_INFO_V1(idem_complete_many);
Datum
idem_complete_many(PG_FUNCTION_ARGS)
{
	Batch		batch;
	Elements	tokens;
	Elements	results = {0};

	idem_write_prologue("idem_complete_many()");
	batch_begin(&batch, fcinfo);
	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("tokens must not be null")));
	read_array(fcinfo, 1, UUIDOID, UUID_LEN, false, TYPALIGN_CHAR, &tokens);
	check_length(&batch.keys, &tokens, "tokens");
	if (!PG_ARGISNULL(2))
	{
		read_array(fcinfo, 2, JSONBOID, -1, false, TYPALIGN_INT, &results);
		check_length(&batch.keys, &results, "results");
	}

	for (int i = 0; i < batch.keys.n; i++)
	{
		int			position = batch.order[i];
		MemoryContext old = MemoryContextSwitchTo(batch.scratch);
		bool		now;

		CHECK_FOR_INTERRUPTS();
		now = idem_complete_held(&batch.st,
								 DatumGetTextPP(batch.keys.values[position]),
								 token_at(&tokens, position),
								 results.n == 0 || results.nulls[position] ? NULL :
								 PG_DETOAST_DATUM(results.values[position]),
								 NULL);
		batch.slot->tts_values[2] = BoolGetDatum(now);
		batch.slot->tts_isnull[2] = false;
		batch_put(&batch, position);
		MemoryContextSwitchTo(old);
		MemoryContextReset(batch.scratch);
	}
	return batch_end(&batch);
}

/* ---- once ---- */

/*
 * idem_once_many(keys)
 */
PG_FUNCTION_INFO_V1(idem_once_many);
Datum
idem_once_many(PG_FUNCTION_ARGS)
{
	Batch		batch;
	IdemClaimArgs args = {.location = -1};

	idem_write_prologue("idem_once_many()");
	batch_begin(&batch, fcinfo);
	for (int i = 0; i < batch.keys.n; i++)
	{
		int			position = batch.order[i];
		MemoryContext old = MemoryContextSwitchTo(batch.scratch);
		bool		first;

		CHECK_FOR_INTERRUPTS();
		idem_claim_args_key(&args, DatumGetTextPP(batch.keys.values[position]), NULL);
		first = idem_once_with(&batch.st, &args);
		batch.slot->tts_values[2] = BoolGetDatum(first);
		batch.slot->tts_isnull[2] = false;
		batch_put(&batch, position);
		MemoryContextSwitchTo(old);
		MemoryContextReset(batch.scratch);
	}
	return batch_end(&batch);
}
