/*-------------------------------------------------------------------------
 *
 * pointer.c
 *	  JSON Pointers (RFC 6901) to what a digest leaves out.
 *
 * A set of pointers is sorted by reference tokens, so those that lead to or
 * below one place of the document are neighbours.  A walk over the document
 * carries that range and narrows it with every step down; its cost does not
 * depend on the number of pointers that lead elsewhere.
 *
 * Owns no data: a set lives in the caller's memory context.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"

#include "canonical.h"

typedef struct Token
{
	const char *str;
	int			len;
} Token;

struct IdemPointer
{
	Token	   *tokens;
	int			ntokens;
};

/* Any total order of the tokens will do. */
static int
compare_tokens(const char *a, int alen, const char *b, int blen)
{
	int			result = memcmp(a, b, Min(alen, blen));

	return result != 0 ? result : alen - blen;
}

/* qsort: by tokens, a pointer before those that lead below it. */
static int
compare_pointers(const void *a, const void *b)
{
	const IdemPointer *pa = (const IdemPointer *) a;
	const IdemPointer *pb = (const IdemPointer *) b;
	int			i;

	for (i = 0; i < pa->ntokens && i < pb->ntokens; i++)
	{
		int			result = compare_tokens(pa->tokens[i].str, pa->tokens[i].len,
											pb->tokens[i].str, pb->tokens[i].len);

		if (result != 0)
			return result;
	}
	return pa->ntokens - pb->ntokens;
}

/* Raises 22023 unless the text is a pointer to a part of the document. */
static void
check_pointer(const text *pointer)
{
	const char *str = VARDATA_ANY(pointer);
	int			len = VARSIZE_ANY_EXHDR(pointer);
	int			i;

	if (len == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("cannot ignore the whole request"),
				 errdetail("The empty JSON Pointer stands for the whole document.")));
	if (str[0] != '/')
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("JSON Pointer \"%s\" does not start with \"/\"",
						text_to_cstring(pointer))));
	for (i = 0; i < len; i++)
	{
		if (str[i] != '~')
			continue;
		if (i + 1 == len || (str[i + 1] != '0' && str[i + 1] != '1'))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("JSON Pointer \"%s\" has a \"~\" that is not followed by 0 or 1",
							text_to_cstring(pointer)),
					 errhint("Write ~0 for \"~\" and ~1 for \"/\" inside a name.")));
	}
}

/* Splits a checked pointer at its slashes and undoes the escapes. */
static void
split_pointer(const text *pointer, IdemPointer *result)
{
	const char *in = VARDATA_ANY(pointer);
	const char *end = in + VARSIZE_ANY_EXHDR(pointer);
	char	   *out = palloc(end - in);
	const char *p;
	int			slashes = 0;
	Token	   *token = NULL;

	for (p = in; p < end; p++)
		slashes += (*p == '/');
	result->ntokens = slashes;
	result->tokens = (Token *) palloc(slashes * sizeof(Token));
	for (p = in; p < end; p++)
	{
		if (*p == '/')
		{
			token = (token == NULL) ? result->tokens : token + 1;
			token->str = out;
			token->len = 0;
			continue;
		}
		if (*p == '~')
			*out++ = (*++p == '0') ? '~' : '/';
		else
			*out++ = *p;
		token->len++;
	}
}

/*
 * Makes a set of the elements of a text array, whatever its dimensions, and
 * the range that covers it: the one to begin at the root of the document with.
 * NULL when there are no elements; "array" may be NULL too.  Raises 22004 for
 * a NULL element and 22023 for one that is not a pointer, or is the empty one.
 */
IdemPointer *
idem_pointers_compile(ArrayType *array, IdemPointerRange *all)
{
	IdemPointer *set;
	Datum	   *elements;
	bool	   *nulls;
	int			count = 0;
	int			i;

	if (array != NULL)
		deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT, &elements, &nulls, &count);
	all->lo = 0;
	all->hi = count;
	if (count == 0)
		return NULL;

	set = (IdemPointer *) palloc(count * sizeof(IdemPointer));
	for (i = 0; i < count; i++)
	{
		text	   *pointer;

		CHECK_FOR_INTERRUPTS();
		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("JSON Pointer to ignore must not be null")));
		pointer = DatumGetTextPP(elements[i]);
		check_pointer(pointer);
		split_pointer(pointer, &set[i]);
	}
	qsort(set, count, sizeof(IdemPointer), compare_pointers);
	return set;
}

/* First pointer of the range whose token at the depth is >= or, with "after", > the given one. */
static int
search_range(const IdemPointer *set, IdemPointerRange range, int depth,
			 const char *str, int len, bool after)
{
	while (range.lo < range.hi)
	{
		int			middle = range.lo + (range.hi - range.lo) / 2;
		const Token *token = &set[middle].tokens[depth];
		int			result = compare_tokens(token->str, token->len, str, len);

		if (result < 0 || (after && result == 0))
			range.lo = middle + 1;
		else
			range.hi = middle;
	}
	return range.lo;
}

/*
 * Steps down to the member or element "token" of a place at the given depth
 * (the root has depth 0), narrowing the range to the pointers that lead there.
 * Returns true if one of them ends there: it is to be left out.
 *
 * All pointers of a range that is in use have more tokens than the depth,
 * since the walk does not go below a place where one ends.
 */
bool
idem_pointers_step(const IdemPointer *set, IdemPointerRange *range,
				   int depth, const char *token, int len)
{
	if (range->lo >= range->hi)
		return false;
	range->lo = search_range(set, *range, depth, token, len, false);
	range->hi = search_range(set, *range, depth, token, len, true);
	return range->lo < range->hi && set[range->lo].ntokens == depth + 1;
}
