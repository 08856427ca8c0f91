/*
 * shim.h -- what the fuzz targets use of shim.c.
 *
 * shim.c stands in for the backend below src/key.c, canonical.c, number.c,
 * pointer.c, digest.c, arguments.c and policy.c.  Every palloc() is a malloc()
 * of its own with the exact size, so that AddressSanitizer sees what it
 * cannot see in a server: overflows of small chunks, and use after pfree().
 */
#ifndef FUZZ_SHIM_H
#define FUZZ_SHIM_H

#include "postgres.h"

#include <setjmp.h>

#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/jsonb.h"
#include "utils/numeric.h"

#include "canonical.h"
#include "idempotency.h"

/* the C library's own here, not the server's */
#undef printf
#undef fprintf
#undef vfprintf
#undef snprintf
#undef vsnprintf
#undef qsort

/* Ends the process with the input that led here. */
#define FAIL(...) shim_fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(x) do { if (!(x)) FAIL("%s", #x); } while (0)
extern void shim_fail(const char *file, int line, const char *format, ...)
	__attribute__((noreturn, format(printf, 3, 4)));

/* Runs a statement; SQLSTATE of its ereport(ERROR), or NULL. */
extern jmp_buf shim_catch;
extern const char *shim_sqlstate;
#define TRY(statement) \
	(shim_sqlstate = NULL, setjmp(shim_catch) == 0 ? ((void) (statement), (const char *) NULL) : shim_sqlstate)
#define RAISED(state, code) ((state) != NULL && strcmp((state), (code)) == 0)

/* Frees all memory of the last input and sets the server up anew. */
extern void shim_reset(int encoding);
extern Size shim_live_chunks(void);
extern Size shim_stack_limit;			/* check_stack_depth() raises beyond */

/* A text of the exact size; "short_header" = with a header of one byte. */
extern text *shim_text(const char *str, int len, bool short_header);
/* A text[] for deconstruct_array(); a NULL pointer is a NULL element. */
extern ArrayType *shim_array(text **elements, int count);
extern Numeric shim_numeric(bool negative, const char *digits, int ndigits, int point);

/* The row that heap_form_tuple() was asked for last. */
extern Datum shim_row[8];
extern bool shim_row_nulls[8];
/* What the hash and the HMAC have been made of last. */
extern char *shim_hashed;
extern Size shim_hashed_len;

/* ---- the input, taken from the front ---- */
typedef struct Input
{
	const uint8 *p;
	const uint8 *end;
} Input;

static inline uint32
take(Input *in, uint32 below)
{
	uint32		v = 0;

	if (below <= 1)
		return 0;
	if (in->p < in->end)
		v = *in->p++;
	if (below > 256 && in->p < in->end)
		v = (v << 8) | *in->p++;
	if (below > 65536 && in->p < in->end)
		v = (v << 8) | *in->p++;
	return v % below;
}

static inline int64
take64(Input *in)
{
	uint64		v = 0;

	for (int i = 0; i < 8 && in->p < in->end; i++)
		v = (v << 8) | *in->p++;
	return (int64) v;
}

static inline bool
more(Input *in)
{
	return in->p < in->end;
}

/* Text that grows, for what is expected. */
typedef struct Bytes
{
	char	   *data;
	int			len;
	int			room;
} Bytes;

extern void put(Bytes *b, const void *data, int len);
static inline void
put_str(Bytes *b, const char *s)
{
	put(b, s, strlen(s));
}

/* ---- numbers, known as decimal digits ---- */
typedef struct Decimal
{
	bool		negative;
	int			ndigits;		/* 0 = zero; neither end is '0' */
	char	   *digits;
	int			point;			/* value is 0.DIGITS * 10^point */
} Decimal;

extern void random_decimal(Input *in, Decimal *d);
extern void expect_decimal(Bytes *b, const Decimal *d);

#endif
