/*-------------------------------------------------------------------------
 *
 * failpoint.h
 *	  Named places where a test build can be made to fail.
 *
 * IDEM_FAILPOINT("name") is nothing at all unless the library is built with
 * "make IDEM_FAILPOINTS=1"; see failpoint.c.  The name tells what has been done
 * when the place is reached.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_FAILPOINT_H
#define IDEM_FAILPOINT_H

#ifdef IDEM_FAILPOINTS
extern void idem_failpoint(const char *name);
extern void idem_failpoint_init(void);
#define IDEM_FAILPOINT(name)	idem_failpoint(name)
#else
#define IDEM_FAILPOINT(name)	((void) 0)
#endif

#endif							/* IDEM_FAILPOINT_H */
