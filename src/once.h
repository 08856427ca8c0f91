/*-------------------------------------------------------------------------
 *
 * once.h
 *	  idem_once from inside the extension.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_ONCE_H
#define IDEM_ONCE_H

#include "claim.h"

extern bool idem_once_with(IdemStore *st, const IdemClaimArgs *args);

#endif							/* IDEM_ONCE_H */
