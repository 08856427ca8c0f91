/*
 * shim.c -- the parts of the backend that the fuzz targets need; see shim.h.
 */
#include "shim.h"

#include <stdarg.h>
#include <stdio.h>

#include "access/htup_details.h"
#include "access/table.h"
#include "access/genam.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "common/cryptohash.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/syscache.h"

/* ---- failures ---- */

void
shim_fail(const char *file, int line, const char *format, ...)
{
	va_list		args;

	fprintf(stderr, "CHECK FAILED at %s:%d: ", file, line);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fprintf(stderr, "\n");
	abort();
}

/* ---- memory ---- */

static void **chunks;
static Size nchunks;
static Size chunks_room;

MemoryContext CurrentMemoryContext = NULL;

static void *
track(void *p)
{
	if (nchunks == chunks_room)
	{
		chunks_room = chunks_room * 2 + 64;
		chunks = realloc(chunks, chunks_room * sizeof(void *));
	}
	chunks[nchunks++] = p;
	return p;
}

static void
untrack(void *p)
{
	for (Size i = nchunks; i-- > 0;)
		if (chunks[i] == p)
		{
			chunks[i] = chunks[--nchunks];
			return;
		}
	FAIL("pfree or repalloc of something that is not palloc'd");
}

Size
shim_live_chunks(void)
{
	return nchunks;
}

void *
palloc(Size size)
{
	if (!AllocSizeIsValid(size))
		elog(ERROR, "invalid memory alloc request size %zu", size);
	/* as in the server, the content is not zero */
	return track(memset(malloc(size), 0x7F, size));
}

void *
palloc0(Size size)
{
	return memset(palloc(size), 0, size);
}

void
pfree(void *p)
{
	untrack(p);
	free(p);
}

void *
repalloc(void *p, Size size)
{
	untrack(p);
	return track(realloc(p, size));
}

void *
MemoryContextAllocHuge(MemoryContext context, Size size)
{
	return palloc(size);
}

void *
repalloc_huge(void *p, Size size)
{
	return repalloc(p, size);
}

/* ---- errors ---- */

jmp_buf		shim_catch;
const char *shim_sqlstate;
static int	raised_code;

bool
errstart(int elevel, const char *domain)
{
	raised_code = ERRCODE_INTERNAL_ERROR;
	return elevel >= ERROR;
}

bool
errstart_cold(int elevel, const char *domain)
{
	return errstart(elevel, domain);
}

int
errcode(int sqlerrcode)
{
	raised_code = sqlerrcode;
	return 0;
}

static int
format_message(const char *fmt, va_list args)
{
	char		buffer[256];

	vsnprintf(buffer, sizeof(buffer), fmt, args);	/* reads its arguments */
	return 0;
}

#define MESSAGE_FUNCTION(name) \
int name(const char *fmt, ...) \
{ \
	va_list args; \
	va_start(args, fmt); \
	format_message(fmt, args); \
	va_end(args); \
	return 0; \
}
MESSAGE_FUNCTION(errmsg)
MESSAGE_FUNCTION(errmsg_internal)
MESSAGE_FUNCTION(errdetail)
MESSAGE_FUNCTION(errhint)

void
errfinish(const char *filename, int lineno, const char *funcname)
{
	static char state[6];

	for (int i = 0; i < 5; i++)
		state[i] = PGUNSIXBIT(raised_code >> (6 * i));
	shim_sqlstate = state;
	longjmp(shim_catch, 1);
}

volatile sig_atomic_t InterruptPending = 0;

void
ProcessInterrupts(void)
{
}

Size		shim_stack_limit;
static char *stack_base;

void
check_stack_depth(void)
{
	if ((Size) (stack_base - (char *) __builtin_frame_address(0)) > shim_stack_limit)
		ereport(ERROR, (errcode(ERRCODE_STATEMENT_TOO_COMPLEX), errmsg("stack depth limit exceeded")));
}

/* ---- StringInfo: grows by little, so that an overflow is seen ---- */

static void
enlarge(StringInfo s, int needed)
{
	if (s->len + needed + 1 > s->maxlen)
	{
		s->maxlen = s->len + needed + 1 + s->len / 8;
		s->data = repalloc(s->data, s->maxlen);
	}
}

void
initStringInfo(StringInfo s)
{
	s->maxlen = 4;
	s->data = palloc(s->maxlen);
	s->data[0] = '\0';
	s->len = s->cursor = 0;
}

void
appendBinaryStringInfo(StringInfo s, const
#if PG_VERSION_NUM >= 160000
					   void *data,
#else
					   char *data,
#endif
					   int len)
{
	CHECK(len >= 0);
	enlarge(s, len);
	memcpy(s->data + s->len, data, len);
	s->len += len;
	s->data[s->len] = '\0';
}

void
appendStringInfoChar(StringInfo s, char c)
{
	appendBinaryStringInfo(s, &c, 1);
}

void
appendStringInfo(StringInfo s, const char *fmt, ...)
{
	char		buffer[256];
	va_list		args;
	int			len;

	va_start(args, fmt);
	len = vsnprintf(buffer, sizeof(buffer), fmt, args);
	va_end(args);
	CHECK(len >= 0 && len < (int) sizeof(buffer));
	appendBinaryStringInfo(s, buffer, len);
}

int
pg_snprintf(char *str, size_t count, const char *fmt, ...)
{
	va_list		args;
	int			len;

	va_start(args, fmt);
	len = vsnprintf(str, count, fmt, args);
	va_end(args);
	CHECK(len >= 0 && len < (int) count);
	return len;
}

void
pg_qsort(void *base, size_t nel, size_t elsize, int (*cmp) (const void *, const void *))
{
	if (nel > 1)
		qsort(base, nel, elsize, cmp);
}

/* ---- text, arrays, rows ---- */

text *
shim_text(const char *str, int len, bool short_header)
{
	text	   *t;

	if (short_header && len + VARHDRSZ_SHORT <= VARATT_SHORT_MAX)
	{
		t = palloc(len + VARHDRSZ_SHORT);
		SET_VARSIZE_SHORT(t, len + VARHDRSZ_SHORT);
	}
	else
	{
		t = palloc(len + VARHDRSZ);
		SET_VARSIZE(t, len + VARHDRSZ);
	}
	memcpy(VARDATA_ANY(t), str, len);
	return t;
}

text *
cstring_to_text_with_len(const char *s, int len)
{
	CHECK(len >= 0);
	return shim_text(s, len, false);
}

text *
cstring_to_text(const char *s)
{
	return shim_text(s, strlen(s), false);
}

char *
text_to_cstring(const text *t)
{
	int			len = VARSIZE_ANY_EXHDR(t);
	char	   *s = palloc(len + 1);

	memcpy(s, VARDATA_ANY(t), len);
	s[len] = '\0';
	return s;
}

struct varlena *
pg_detoast_datum(struct varlena *datum)
{
	CHECK(!VARATT_IS_1B(datum));
	return datum;
}

struct varlena *
pg_detoast_datum_packed(struct varlena *datum)
{
	return datum;
}

typedef struct ShimArray
{
	int32		header;
	int			count;
	text	   *elements[FLEXIBLE_ARRAY_MEMBER];
} ShimArray;

ArrayType *
shim_array(text **elements, int count)
{
	Size		size = offsetof(ShimArray, elements) + count * sizeof(text *);
	ShimArray  *a = palloc(size);

	SET_VARSIZE(a, size);
	a->count = count;
	if (count > 0)
		memcpy(a->elements, elements, count * sizeof(text *));
	return (ArrayType *) a;
}

void
deconstruct_array(
				  ArrayType *array, Oid elmtype, int elmlen, bool elmbyval, char elmalign,
				  Datum **elemsp, bool **nullsp, int *nelemsp)
{
	const ShimArray *a = (const ShimArray *) array;

	CHECK(elmtype == TEXTOID && elmlen == -1 && !elmbyval && elmalign == TYPALIGN_INT);
	*elemsp = palloc(a->count * sizeof(Datum));
	*nullsp = palloc(a->count * sizeof(bool));
	for (int i = 0; i < a->count; i++)
	{
		(*elemsp)[i] = PointerGetDatum(a->elements[i]);
		(*nullsp)[i] = a->elements[i] == NULL;
	}
	*nelemsp = a->count;
}

Datum		shim_row[8];
bool		shim_row_nulls[8];

TypeFuncClass
get_call_result_type(FunctionCallInfo fcinfo, Oid *type, TupleDesc *desc)
{
	*desc = NULL;
	return TYPEFUNC_COMPOSITE;
}

TupleDesc
BlessTupleDesc(TupleDesc desc)
{
	return desc;
}

HeapTuple
heap_form_tuple(TupleDesc desc,
#if PG_VERSION_NUM >= 170000
				const Datum *values, const bool *nulls)
#else
				Datum *values, bool *nulls)
#endif
{
	memcpy(shim_row, values, 3 * sizeof(Datum));
	memcpy(shim_row_nulls, nulls, 3 * sizeof(bool));
	return palloc0(sizeof(HeapTupleData));
}

Datum
HeapTupleHeaderGetDatum(HeapTupleHeader tuple)
{
	return (Datum) 0;
}

/* ---- numeric: a value is kept in the form in which it is sent ---- */

static void
set16(uint8 *p, int v)
{
	p[0] = (uint8) (v >> 8);
	p[1] = (uint8) v;
}

Numeric
shim_numeric(bool negative, const char *digits, int ndigits, int point)
{
	int			weight = point > 0 ? (point + 3) / 4 - 1 : -(-point / 4) - 1;
	int			lead = (weight + 1) * 4 - point;	/* zeros before the digits */
	int			ngroups = ndigits == 0 ? 0 : (lead + ndigits + 3) / 4;
	Size		size = VARHDRSZ + 8 + 2 * ngroups;
	struct varlena *v = palloc(size);
	uint8	   *wire = (uint8 *) VARDATA(v);

	SET_VARSIZE(v, size);
	set16(wire, ngroups);
	set16(wire + 2, ndigits == 0 ? 0 : weight);
	set16(wire + 4, negative ? 0x4000 : 0);
	set16(wire + 6, 0);
	for (int i = 0; i < ngroups; i++)
	{
		int			group = 0;

		for (int j = 4 * i - lead; j < 4 * i - lead + 4; j++)
			group = group * 10 + (j >= 0 && j < ndigits ? digits[j] - '0' : 0);
		set16(wire + 8 + 2 * i, group);
	}
	return (Numeric) v;
}

Datum
numeric_send(PG_FUNCTION_ARGS)
{
	struct varlena *v = (struct varlena *) DatumGetPointer(PG_GETARG_DATUM(0));
	Size		size = VARSIZE_ANY(v);

	return PointerGetDatum(memcpy(palloc(size), v, size));
}

Datum
DirectFunctionCall1Coll(PGFunction func, Oid collation, Datum arg1)
{
	LOCAL_FCINFO(fcinfo, 1);

	InitFunctionCallInfoData(*fcinfo, NULL, 1, collation, NULL, NULL);
	fcinfo->args[0].value = arg1;
	fcinfo->args[0].isnull = false;
	return func(fcinfo);
}

/* ---- jsonb ---- */

uint32
getJsonbOffset(const JsonbContainer *jc, int index)
{
	uint32		offset = 0;

	for (int i = index - 1; i >= 0; i--)
	{
		offset += JBE_OFFLENFLD(jc->children[i]);
		if (JBE_HAS_OFF(jc->children[i]))
			break;
	}
	return offset;
}

/* ---- encodings: UTF-8, SQL_ASCII and LATIN1 ---- */

static int	encoding;

int
GetDatabaseEncoding(void)
{
	return encoding;
}

char *
pg_server_to_any(const char *s, int len, int to)
{
	char	   *result;
	char	   *out;

	CHECK(to == PG_UTF8);
	if (encoding != PG_LATIN1 || len <= 0)
		return unconstify(char *, s);
	out = result = palloc(2 * len + 1);
	for (int i = 0; i < len; i++)
	{
		uint8		c = (uint8) s[i];

		if (c < 0x80)
			*out++ = c;
		else
		{
			*out++ = 0xC0 | (c >> 6);
			*out++ = 0x80 | (c & 0x3F);
		}
	}
	*out = '\0';
	return result;
}

char *
pg_any_to_server(const char *s, int len, int from)
{
	char	   *result;
	char	   *out;

	CHECK(from == PG_UTF8);
	if (encoding != PG_LATIN1 || len <= 0)
		return unconstify(char *, s);
	out = result = palloc(len + 1);
	for (int i = 0; i < len; i++)
	{
		uint8		c = (uint8) s[i];

		if (c < 0x80)
			*out++ = c;
		else
		{
			CHECK((c & 0xFC) == 0xC0 && i + 1 < len);
			*out++ = (char) ((c << 6) | ((uint8) s[++i] & 0x3F));
		}
	}
	*out = '\0';
	return result;
}

int
pg_mbcliplen(const char *s, int len, int limit)
{
	if (len > limit)
	{
		len = limit;
		while (len > 0 && ((uint8) s[len] & 0xC0) == 0x80)
			len--;
	}
	return len;
}

/* ---- hashes: remember what they were made of ---- */

char	   *shim_hashed;
Size		shim_hashed_len;

struct pg_cryptohash_ctx
{
	int			dummy;
};

static void
remember(const void *data, Size len)
{
	free(shim_hashed);
	shim_hashed = malloc(len + 1);
	memcpy(shim_hashed, data, len);
	shim_hashed_len = len;
}

pg_cryptohash_ctx *
pg_cryptohash_create(pg_cryptohash_type type)
{
	CHECK(type == PG_SHA256);
	return palloc0(sizeof(pg_cryptohash_ctx));
}

int
pg_cryptohash_init(pg_cryptohash_ctx *ctx)
{
	return 0;
}

int
pg_cryptohash_update(pg_cryptohash_ctx *ctx, const uint8 *data, size_t len)
{
	remember(data, len);
	return 0;
}

int
pg_cryptohash_final(pg_cryptohash_ctx *ctx, uint8 *dest, size_t len)
{
	CHECK(len == 32);
	memset(dest, 0xA5, len);
	return 0;
}

void
pg_cryptohash_free(pg_cryptohash_ctx *ctx)
{
	pfree(ctx);
}

const char *
pg_cryptohash_error(pg_cryptohash_ctx *ctx)
{
	return "";
}

/* pgcrypto is there, and its hmac() gives 32 bytes. */
Datum
OidFunctionCall3Coll(Oid functionId, Oid collation, Datum arg1, Datum arg2, Datum arg3)
{
	struct varlena *data = (struct varlena *) DatumGetPointer(arg1);
	char		mac[32];

	remember(VARDATA_ANY(data), VARSIZE_ANY_EXHDR(data));
	memset(mac, 0x5A, sizeof(mac));
	return PointerGetDatum(shim_text(mac, sizeof(mac), true));
}

Oid
get_extension_oid(const char *extname, bool missing_ok)
{
	return 1;
}

oidvector *
buildoidvector(const Oid *oids, int n)
{
	return palloc0(sizeof(oidvector));
}

Oid
GetSysCacheOid(int cacheId, AttrNumber oidcol, Datum key1, Datum key2, Datum key3, Datum key4)
{
	return 1;
}

Relation
table_open(Oid relationId, LOCKMODE lockmode)
{
	return NULL;
}

void
table_close(Relation relation, LOCKMODE lockmode)
{
}

void
ScanKeyInit(ScanKey entry, AttrNumber attributeNumber, StrategyNumber strategy,
			RegProcedure procedure, Datum argument)
{
}

SysScanDesc
systable_beginscan(Relation heapRelation, Oid indexId, bool indexOK, Snapshot snapshot,
				   int nkeys, ScanKey key)
{
	return NULL;
}

HeapTuple
systable_getnext(SysScanDesc sysscan)
{
	return NULL;
}

void
systable_endscan(SysScanDesc sysscan)
{
}

/* ---- one input ---- */

void
shim_reset(int new_encoding)
{
	while (nchunks > 0)
		free(chunks[--nchunks]);
	encoding = new_encoding;
	shim_stack_limit = 1024 * 1024;
	stack_base = __builtin_frame_address(0);
}

/* ---- what the targets share ---- */

void
put(Bytes *b, const void *data, int len)
{
	if (b->len + len + 1 > b->room)
	{
		b->room = (b->len + len + 1) * 2;
		b->data = realloc(b->data, b->room);
	}
	if (len > 0)
		memcpy(b->data + b->len, data, len);
	b->len += len;
	b->data[b->len] = '\0';
}

void
random_decimal(Input *in, Decimal *d)
{
	static const int interesting[] = {0, 1, 2, 3, 4, 20, 21, 22, 23, -1, -4, -5, -6, -7, -8,
		131072, -16382, 15, 16, 17, 308, -323};
	uint32		shape = take(in, 8);
	int			n = shape == 0 ? 0 : shape < 6 ? 1 + take(in, 24) : 1 + take(in, 300);

	d->negative = false;
	d->ndigits = n;
	d->digits = palloc(n + 1);
	if (n == 0)
		return;
	for (int i = 0; i < n; i++)
	{
		uint32		c = take(in, 16);

		/* many zeros and nines inside */
		d->digits[i] = c < 10 ? '0' + c : c < 14 ? '0' : '9';
	}
	if (d->digits[0] == '0')
		d->digits[0] = '1';
	if (d->digits[n - 1] == '0')
		d->digits[n - 1] = '5';
	d->negative = take(in, 2);
	d->point = take(in, 2) ? interesting[take(in, lengthof(interesting))]
		: (int) take(in, 147455) - 16382;
}

/* ECMA-262, Number::toString(x, 10), steps 6 to 13; n is the point. */
void
expect_decimal(Bytes *b, const Decimal *d)
{
	int			k = d->ndigits;
	int			n = d->point;
	char		e[16];

	if (k == 0)
	{
		put_str(b, "0");
		return;
	}
	if (d->negative)
		put_str(b, "-");
	if (k <= n && n <= 21)
	{
		put(b, d->digits, k);
		for (int i = 0; i < n - k; i++)
			put_str(b, "0");
	}
	else if (0 < n && n <= 21)
	{
		put(b, d->digits, n);
		put_str(b, ".");
		put(b, d->digits + n, k - n);
	}
	else if (-6 < n && n <= 0)
	{
		put_str(b, "0.");
		for (int i = n; i < 0; i++)
			put_str(b, "0");
		put(b, d->digits, k);
	}
	else
	{
		put(b, d->digits, 1);
		if (k > 1)
		{
			put_str(b, ".");
			put(b, d->digits + 1, k - 1);
		}
		snprintf(e, sizeof(e), "e%c%d", n - 1 < 0 ? '-' : '+', abs(n - 1));
		put_str(b, e);
	}
}
