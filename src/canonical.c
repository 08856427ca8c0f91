/*-------------------------------------------------------------------------
 *
 * canonical.c
 *	  Canonical text of a request.
 *
 * RFC 8785 with exact numbers, DESIGN.md section 6: members sorted by UTF-16
 * code units, the escapes of section 3.2.2.2, no white space, no Unicode
 * normalisation.  The text is made in UTF-8 whatever the server encoding is,
 * so that the digest is the same everywhere.
 *
 * Walks the stored form of jsonb and owns no data.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "canonical.h"
#include "idempotency.h"

/* A member of an object; the name in UTF-8, the value as in its container. */
typedef struct Member
{
	const char *name;
	int			len;
	bool		converted;		/* the name is palloc'd */
	JEntry		entry;
	uint32		offset;
	uint32		value_len;
	IdemPointerRange ignore;	/* pointers that lead below it */
} Member;

/*
 * State of a walk.  The members of all objects that are open lie on one stack;
 * it moves when it grows.
 */
typedef struct Writer
{
	StringInfoData out;
	const IdemPointer *ignore;
	Member	   *members;
	Size		nmembers;
	Size		capacity;
} Writer;

static void write_container(Writer *w, JsonbContainer *container,
							IdemPointerRange ignore, int depth);

static bool
is_ascii(const char *str, int len)
{
	int			i;

	for (i = 0; i < len; i++)
	{
		if (IS_HIGHBIT_SET(str[i]))
			return false;
	}
	return true;
}

/*
 * Text of the server encoding in UTF-8; the same pointer where nothing has to
 * be converted, else palloc'd.  Bytes of a SQL_ASCII database are taken as
 * they are.
 */
char *
idem_to_utf8(const char *str, int *len)
{
	int			encoding = GetDatabaseEncoding();
	char	   *result;

	if (encoding == PG_UTF8 || encoding == PG_SQL_ASCII || is_ascii(str, *len))
		return unconstify(char *, str);
	result = pg_server_to_any(str, *len, PG_UTF8);
	if (result != str)
		*len = strlen(result);
	return result;
}

/* Appends the escape of a character that cannot stand for itself. */
static void
write_escape(StringInfo out, unsigned char c)
{
	static const char short_escapes[] = "\bb\tt\nn\ff\rr\"\"\\\\";
	const char *p;

	for (p = short_escapes; *p != '\0'; p += 2)
	{
		if ((unsigned char) *p == c)
		{
			appendStringInfoCharMacro(out, '\\');
			appendStringInfoCharMacro(out, p[1]);
			return;
		}
	}
	appendStringInfo(out, "\\u%04x", c);
}

/* Appends a JSON string of UTF-8 text. */
static void
write_string(StringInfo out, const char *str, int len)
{
	const char *end = str + len;
	const char *run = str;

	appendStringInfoCharMacro(out, '"');
	for (; str < end; str++)
	{
		unsigned char c = (unsigned char) *str;

		if (likely(c >= ' ' && c != '"' && c != '\\'))
			continue;
		appendBinaryStringInfo(out, run, str - run);
		write_escape(out, c);
		run = str + 1;
	}
	appendBinaryStringInfo(out, run, end - run);
	appendStringInfoCharMacro(out, '"');
}

/* Appends a JSON string of text in the server encoding. */
static void
write_server_string(StringInfo out, const char *str, int len)
{
	char	   *utf8 = idem_to_utf8(str, &len);

	write_string(out, utf8, len);
	if (utf8 != str)
		pfree(utf8);
}

/*
 * Appends a value, given its entry, the start of the data of the container it
 * is in, and where in there it is.
 */
static void
write_value(Writer *w, JEntry entry, char *data, uint32 offset, uint32 len,
			IdemPointerRange ignore, int depth)
{
	if (JBE_ISSTRING(entry))
		write_server_string(&w->out, data + offset, len);
	else if (JBE_ISNUMERIC(entry))
		idem_write_number(&w->out, (Numeric) (data + INTALIGN(offset)));
	else if (JBE_ISCONTAINER(entry))
		write_container(w, (JsonbContainer *) (data + INTALIGN(offset)), ignore, depth);
	else if (JBE_ISBOOL_TRUE(entry))
		appendBinaryStringInfo(&w->out, "true", 4);
	else if (JBE_ISBOOL_FALSE(entry))
		appendBinaryStringInfo(&w->out, "false", 5);
	else if (JBE_ISNULL(entry))
		appendBinaryStringInfo(&w->out, "null", 4);
	else
		elog(ERROR, "unexpected jsonb entry");
}

/* Does the step to an element of an array lead to one to leave out? */
static bool
step_to_element(const Writer *w, IdemPointerRange *range, int depth, uint32 index)
{
	char		token[12];
	int			len;

	if (range->lo >= range->hi)
		return false;
	len = snprintf(token, sizeof(token), "%u", index);
	return idem_pointers_step(w->ignore, range, depth, token, len);
}

/* Appends the elements of an array, or the one scalar of a scalar document. */
static void
write_elements(Writer *w, JsonbContainer *array, IdemPointerRange ignore, int depth)
{
	uint32		count = JsonContainerSize(array);
	char	   *data = (char *) &array->children[count];
	bool		first = true;
	uint32		offset = 0;
	uint32		i;

	for (i = 0; i < count; i++)
	{
		JEntry		entry = array->children[i];
		uint32		start = offset;
		IdemPointerRange below = ignore;

		CHECK_FOR_INTERRUPTS();
		JBE_ADVANCE_OFFSET(offset, entry);
		if (step_to_element(w, &below, depth, i))
			continue;
		if (!first)
			appendStringInfoCharMacro(&w->out, ',');
		first = false;
		write_value(w, entry, data, start, offset - start, below, depth + 1);
	}
}

/*
 * qsort: by UTF-16 code units.  UTF-8 sorts by code points; the orders differ
 * only where characters beyond U+FFFF, which are surrogate pairs in UTF-16,
 * meet U+E000 to U+FFFF.  The former begin with bytes from 0xF0, the latter
 * with 0xEE or 0xEF, and no other byte of UTF-8 is as large.
 */
static int
compare_members(const void *a, const void *b)
{
	const Member *ma = (const Member *) a;
	const Member *mb = (const Member *) b;
	int			shorter = Min(ma->len, mb->len);
	int			i;

	for (i = 0; i < shorter; i++)
	{
		unsigned char ca = (unsigned char) ma->name[i];
		unsigned char cb = (unsigned char) mb->name[i];

		if (ca == cb)
			continue;
		if (ca >= 0xEE && cb >= 0xEE && (ca >= 0xF0) != (cb >= 0xF0))
			return ca >= 0xF0 ? -1 : 1;
		return ca < cb ? -1 : 1;
	}
	return (ma->len > mb->len) - (ma->len < mb->len);
}

/* Makes room for more members on the stack. */
static void
reserve_members(Writer *w, Size count)
{
	Size		wanted = w->nmembers + count;

	if (wanted <= w->capacity)
		return;
	wanted = Max(wanted, Max(w->capacity * 2, 32));
	if (w->members == NULL)
		w->members = (Member *) MemoryContextAllocHuge(CurrentMemoryContext,
													   wanted * sizeof(Member));
	else
		w->members = (Member *) repalloc_huge(w->members, wanted * sizeof(Member));
	w->capacity = wanted;
}

/* Puts the members of an object, without those to ignore, on the stack, sorted. */
static void
push_members(Writer *w, JsonbContainer *object, IdemPointerRange ignore, int depth)
{
	uint32		count = JsonContainerSize(object);
	JEntry	   *names = object->children;
	JEntry	   *values = names + count;
	char	   *data = (char *) (values + count);
	Size		base = w->nmembers;
	uint32		name_offset = 0;
	uint32		value_offset;
	uint32		i;

	reserve_members(w, count);
	value_offset = count > 0 ? getJsonbOffset(object, count) : 0;
	for (i = 0; i < count; i++)
	{
		Member	   *member = &w->members[w->nmembers];
		char	   *name = data + name_offset;
		uint32		start = name_offset;

		CHECK_FOR_INTERRUPTS();
		member->entry = values[i];
		member->offset = value_offset;
		member->ignore = ignore;
		JBE_ADVANCE_OFFSET(name_offset, names[i]);
		JBE_ADVANCE_OFFSET(value_offset, values[i]);
		member->value_len = value_offset - member->offset;
		member->len = name_offset - start;
		if (idem_pointers_step(w->ignore, &member->ignore, depth, name, member->len))
			continue;
		member->name = idem_to_utf8(name, &member->len);
		member->converted = (member->name != name);
		w->nmembers++;
	}
	qsort(w->members + base, w->nmembers - base, sizeof(Member), compare_members);
}

/* Appends the members of an object. */
static void
write_members(Writer *w, JsonbContainer *object, IdemPointerRange ignore, int depth)
{
	char	   *data = (char *) &object->children[2 * JsonContainerSize(object)];
	Size		base = w->nmembers;
	Size		end;
	Size		i;

	push_members(w, object, ignore, depth);
	end = w->nmembers;
	for (i = base; i < end; i++)
	{
		Member		member = w->members[i];

		CHECK_FOR_INTERRUPTS();
		if (i > base)
			appendStringInfoCharMacro(&w->out, ',');
		write_string(&w->out, member.name, member.len);
		appendStringInfoCharMacro(&w->out, ':');
		write_value(w, member.entry, data, member.offset, member.value_len,
					member.ignore, depth + 1);
		if (member.converted)
			pfree(unconstify(char *, member.name));
	}
	w->nmembers = base;
}

/* Appends an array or an object.  Raises 54001 if it is nested too deep. */
static void
write_container(Writer *w, JsonbContainer *container, IdemPointerRange ignore, int depth)
{
	check_stack_depth();
	if (JsonContainerIsScalar(container))
		write_elements(w, container, ignore, depth);
	else if (JsonContainerIsArray(container))
	{
		appendStringInfoCharMacro(&w->out, '[');
		write_elements(w, container, ignore, depth);
		appendStringInfoCharMacro(&w->out, ']');
	}
	else
	{
		appendStringInfoCharMacro(&w->out, '{');
		write_members(w, container, ignore, depth);
		appendStringInfoCharMacro(&w->out, '}');
	}
}

/*
 * Canonical text in UTF-8, palloc'd and terminated by a zero byte; *len in
 * bytes.  Leaves out what "ignore", which may be NULL, points at.  Raises what
 * idem_pointers_compile() raises, 54001, and 54000 for a text over 1 GB.
 */
char *
idem_canonical_utf8(Jsonb *request, ArrayType *ignore, int *len)
{
	Writer		w;
	IdemPointerRange all;

	memset(&w, 0, sizeof(w));
	w.ignore = idem_pointers_compile(ignore, &all);
	initStringInfo(&w.out);
	/* nothing can point into a scalar */
	if (JB_ROOT_IS_SCALAR(request))
		all.lo = all.hi = 0;
	write_container(&w, &request->root, all, 0);
	if (w.members != NULL)
		pfree(w.members);
	*len = w.out.len;
	return w.out.data;
}
