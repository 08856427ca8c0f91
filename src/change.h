/*-------------------------------------------------------------------------
 *
 * change.h
 *	  One change of a record that is in the open partition.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CHANGE_H
#define IDEM_CHANGE_H

#include "idempotency.h"

/* What a change does with the record that it was given. */
typedef enum IdemChange
{
	IDEM_KEEP,					/* write nothing */
	IDEM_REPLACE,				/* new version in the open partition */
	IDEM_MOVE,					/* to the ring */
	IDEM_REMOVE					/* delete the row */
} IdemChange;

/*
 * Decides and edits *rec, which is a copy of the stored row.  Called with the key lock
 * held, so it must not wait; may raise.  May be called again when the row
 * was busy.
 */
typedef IdemChange (*IdemApply) (IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg);

/*
 * Runs the change on the key's row in the open partition, waiting as long as a
 * transaction in progress or a row lock stands in the way.  With token, only if the
 * record is processing and the token holds it.  Returns true if apply was called
 * for good; else *probe tells what is there instead.  Raises 42501 for a
 * record of another role.
 */
extern bool idem_change_open(const IdemCatalog *cat, const text *key, const pg_uuid_t *token,
							 IdemApply apply, void *arg, IdemProbe *probe);

#endif							/* IDEM_CHANGE_H */
