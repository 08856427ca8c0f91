/*-------------------------------------------------------------------------
 *
 * canonical.h
 *	  What key.c, canonical.c, number.c, pointer.c and digest.c share.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CANONICAL_H
#define IDEM_CANONICAL_H

#include "lib/stringinfo.h"
#include "utils/array.h"
#include "utils/numeric.h"

/* ---- canonical.c ---- */
extern char *idem_to_utf8(const char *str, int *len);

/* ---- number.c ---- */
extern void idem_write_number(StringInfo out, Numeric number);

/* ---- pointer.c ---- */

/* A JSON Pointer.  A set of them is an array sorted by reference tokens. */
typedef struct IdemPointer IdemPointer;

/*
 * The pointers lo <= i < hi of a set: those that lead to or below one place of
 * the document.
 */
typedef struct IdemPointerRange
{
	int			lo;
	int			hi;
} IdemPointerRange;

extern IdemPointer *idem_pointers_compile(ArrayType *array, IdemPointerRange *all);
extern bool idem_pointers_step(const IdemPointer *set, IdemPointerRange *range,
							   int depth, const char *token, int len);

/* ---- digest.c ---- */
#define IDEM_SHA256_BYTES		32

extern void idem_sha256(const void *data, Size len, uint8 *result);

#endif							/* IDEM_CANONICAL_H */
