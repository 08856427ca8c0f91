/*-------------------------------------------------------------------------
 *
 * record.h
 *	  Rows of idem_record and IdemRecord structs: one into the other.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RECORD_H
#define IDEM_RECORD_H

#include "idempotency.h"

/* Columns that the library knows; a table may have more behind them. */
#define IDEM_RECORD_COLUMNS	22

extern void idem_take_record(TupleTableSlot *slot, IdemRecord *rec);
extern void idem_put_record(TupleTableSlot *slot, const IdemRecord *rec);

#endif							/* IDEM_RECORD_H */
