/*-------------------------------------------------------------------------
 *
 * status.c
 *	  Reading a record without any effect, also on a standby.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/snapmgr.h"

#include "idempotency.h"

#define ANUM_OWNER	4

/*
 * idem_status(key text)
 *		The row as the calling statement's snapshot sees it, as stored: a lapsed
 *		lease still reads "processing".
 */
PG_FUNCTION_INFO_V1(idem_status);
Datum
idem_status(PG_FUNCTION_ARGS)
{
	const IdemCatalog *cat;
	TupleDesc	desc;
	HeapTupleHeader row;
	text	   *key;
	bool		isnull;

	key = idem_key_arg(fcinfo);
	cat = idem_catalog(fcinfo->flinfo->fn_oid);
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	desc = BlessTupleDesc(desc);

	row = idem_store_read(cat, key, GetActiveSnapshot(), desc);
	if (row == NULL)
		PG_RETURN_NULL();
	if (!idem_may_read_all(cat))
		idem_check_owner(DatumGetObjectId(GetAttributeByNum(row, ANUM_OWNER, &isnull)));
	PG_RETURN_HEAPTUPLEHEADER(row);
}
