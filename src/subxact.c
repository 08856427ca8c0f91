/*-------------------------------------------------------------------------
 *
 * subxact.c
 *	  Running something whose failure is to be survived.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

#include "idempotency.h"

/*
 * Runs step in a subtransaction.  NULL is success; an error undoes what step did
 * and is returned, in the current memory context.  It is the caller's to decide
 * which errors must go on.
 */
ErrorData *
idem_in_subtransaction(void (*step) (void *), void *arg)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner resowner = CurrentResourceOwner;
	ErrorData  *volatile error = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		step(arg);
		ReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = resowner;
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = resowner;
	}
	PG_END_TRY();
	return error;
}
