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
	IDEM_REPLACE,				/* open: new version */
	IDEM_MOVE,					/* open: to the ring */
	IDEM_REOPEN,				/* ring: back to the open partition */
	IDEM_REMOVE					/* delete the row wherever it is */
} IdemChange;

/*
 * Decides and edits *rec, which is a copy of the stored row.  Called with the key lock
 * held, so it must not wait; may raise.  Called again when the row was busy.
 */
typedef IdemChange (*IdemApply) (IdemRecord *rec, const IdemPolicy *policy, TimestampTz now, void *arg);

/*
 * The holder's changes: only if the record is processing and the token holds
 * it.  Waits as long as a transaction in progress or a row lock stands in the way.
 * Returns true if the change was made; else *probe tells what is there instead.
 * Raises 42501 for a record of another role.
 */
extern bool idem_change_held(IdemStore *st, const text *key, const pg_uuid_t *token,
							 IdemApply apply, void *arg, IdemProbe *probe);

/*
 * The same for a token that this very call gave, after the role was checked: the
 * caller's code may have changed its role since.
 */
extern bool idem_change_claimed(IdemStore *st, const text *key, const pg_uuid_t *token,
								IdemApply apply, void *arg, IdemProbe *probe);

/* The operators' changes: any record of any role.  False if there is none. */
extern bool idem_change_any(IdemStore *st, const text *key,
							IdemApply apply, void *arg, IdemProbe *probe);

/*
 * The reaper's changes: any record, but never waits.  False if there is none
 * or if something stands in the way.
 */
extern bool idem_change_now(IdemStore *st, const text *key, IdemApply apply, void *arg);

#endif							/* IDEM_CHANGE_H */
