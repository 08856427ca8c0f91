/*-------------------------------------------------------------------------
 *
 * number.h
 *	  Layout of numbers in canonical text.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_NUMBER_H
#define IDEM_NUMBER_H

#include "lib/stringinfo.h"

extern void idem_append_number(StringInfo buf, char *text);

#endif							/* IDEM_NUMBER_H */
