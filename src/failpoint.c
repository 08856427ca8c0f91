/*-------------------------------------------------------------------------
 *
 * failpoint.c
 *	  What happens at the failure points of a test build.
 *
 * Compiled only by "make IDEM_FAILPOINTS=1", never into a library for use.
 *
 *	idempotency.failpoint = ''					nothing
 *	idempotency.failpoint = 'trace'				a NOTICE at each point
 *	idempotency.failpoint = 'ACTION NAME [N]'	at the Nth time that NAME is reached,
 *												counted from the setting
 *
 *	ACTION	error		raises SQLSTATE IDFP0
 *			terminate	as pg_terminate_backend() at this place
 *			cancel		as pg_cancel_backend() at this place
 *			kill		SIGKILL: the server restarts
 *			wait		waits for advisory lock 480, in share mode
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/guc.h"

#include "failpoint.h"

#define ERRCODE_FAILPOINT	MAKE_SQLSTATE('I', 'D', 'F', 'P', '0')
#define WAIT_LOCK			480

static char *failpoint = NULL;
static int	passed = 0;

static void
failpoint_set(const char *value, void *extra)
{
	passed = 0;
}

void
idem_failpoint_init(void)
{
	DefineCustomStringVariable("idempotency.failpoint",
							   "Where a test build fails, and how.", NULL,
							   &failpoint, "", PGC_SUSET, 0, NULL, failpoint_set, NULL);
}

static void
wait_here(void)
{
	LOCKTAG		tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, 0, WAIT_LOCK, 1);
	(void) LockAcquire(&tag, ShareLock, false, false);
	(void) LockRelease(&tag, ShareLock, false);
}

static void
fail(const char *action, const char *name)
{
	if (strcmp(action, "error") == 0)
		ereport(ERROR,
				(errcode(ERRCODE_FAILPOINT),
				 errmsg("failure point \"%s\"", name)));
	else if (strcmp(action, "wait") == 0)
		wait_here();
	else if (strcmp(action, "terminate") == 0)
		kill(MyProcPid, SIGTERM);
	else if (strcmp(action, "cancel") == 0)
		kill(MyProcPid, SIGINT);
	else if (strcmp(action, "kill") == 0)
		kill(MyProcPid, SIGKILL);
	CHECK_FOR_INTERRUPTS();
}

/* Called at the point; returns if nothing is to happen, or after a wait. */
void
idem_failpoint(const char *name)
{
	char		action[32];
	char		where[64];
	int			nth = 1;

	if (failpoint == NULL || failpoint[0] == '\0')
		return;
	if (strcmp(failpoint, "trace") == 0)
		ereport(NOTICE, (errmsg("failpoint %s", name)));
	else if (sscanf(failpoint, "%31s %63s %d", action, where, &nth) >= 2 &&
			 strcmp(where, name) == 0 && ++passed == nth)
		fail(action, name);
}
