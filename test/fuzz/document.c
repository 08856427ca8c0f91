/*
 * document.c -- libFuzzer target: canonical text and digests (src/canonical.c,
 * digest.c, and number.c and pointer.c below them).
 *
 * The input is a document and a list of pointers.  The document is built in
 * the stored form of jsonb, in a chunk of exactly its size; the expected text
 * is made from the tree by the letter of RFC 8785: names compared as UTF-16,
 * pointers compared as text.
 */
#include "shim.h"


#define MAX_NODES		400
#define MAX_POINTERS	8

int			LLVMFuzzerTestOneInput(const uint8 *data, size_t size);

extern Datum idem_canonical(PG_FUNCTION_ARGS);
extern Datum idem_digest(PG_FUNCTION_ARGS);
extern Datum idem_keyed_digest(PG_FUNCTION_ARGS);

typedef enum Kind
{
	LITERAL_NULL, LITERAL_TRUE, LITERAL_FALSE, STRING, NUMBER, ARRAY, OBJECT
} Kind;

typedef struct Value
{
	Kind		kind;
	Bytes		name;			/* of a member, in the server encoding */
	uint16	   *units;			/* the name in UTF-16, when needed */
	int			nunits;
	Bytes		string;
	Decimal		number;
	struct Value **children;
	int			nchildren;
} Value;

static Value nodes[MAX_NODES];
static int	nnodes;
static int	encoding;

/* ---- a document out of the input ---- */

static void
put_utf8(Bytes *b, uint32 c)
{
	char		s[4];

	if (c < 0x80)
	{
		s[0] = c;
		put(b, s, 1);
	}
	else if (c < 0x800)
	{
		s[0] = 0xC0 | (c >> 6);
		s[1] = 0x80 | (c & 0x3F);
		put(b, s, 2);
	}
	else if (c < 0x10000)
	{
		s[0] = 0xE0 | (c >> 12);
		s[1] = 0x80 | ((c >> 6) & 0x3F);
		s[2] = 0x80 | (c & 0x3F);
		put(b, s, 3);
	}
	else
	{
		s[0] = 0xF0 | (c >> 18);
		s[1] = 0x80 | ((c >> 12) & 0x3F);
		s[2] = 0x80 | ((c >> 6) & 0x3F);
		s[3] = 0x80 | (c & 0x3F);
		put(b, s, 4);
	}
}

static void
random_string(Input *in, Bytes *b)
{
	static const uint32 edges[] = {1, 8, 9, 10, 11, 12, 13, 31, 32, '"', '\\', '/', '~', 0x7F, 0x80, 0xFF, 0x7FF,
		0x800, 0xD7FF, 0xE000, 0xF900, 0xFFFD, 0xFFFF, 0x10000, 0x1F600, 0x10FFFF};
	int			len = take(in, 6);

	put(b, "", 0);
	if (len == 5)
		len = take(in, 300);
	for (int i = 0; i < len && more(in); i++)
	{
		uint32		shape = take(in, 4);
		uint32		c;

		if (encoding == PG_LATIN1)
		{
			char		byte = 1 + take(in, 255);

			put(b, &byte, 1);
			continue;
		}
		c = shape == 0 ? 'a' + take(in, 3) : shape == 1 ? edges[take(in, lengthof(edges))]
			: shape == 2 ? '0' + take(in, 10) : 1 + take(in, 0x10FFFF);
		if (c >= 0xD800 && c < 0xE000)
			c = 0xE000 + (c & 0x7FF);
		put_utf8(b, c);
	}
}

static Value *
random_node(Input *in, int depth)
{
	Value	   *node = &nodes[nnodes++];
	int			wanted;
	bool		wide = false;

	memset(node, 0, sizeof(*node));
	node->kind = more(in) ? take(in, OBJECT + 1) : LITERAL_NULL;
	if (node->kind == STRING)
		random_string(in, &node->string);
	if (node->kind == NUMBER)
		random_decimal(in, &node->number);
	if (node->kind < ARRAY)
		return node;
	/* more than 32 entries: then some of them have offsets; they take little input */
	wanted = take(in, 10);
	if (wanted == 9)
	{
		wanted = 30 + take(in, 80);
		wide = true;
	}
	node->children = malloc((wanted + 1) * sizeof(Value *));
	for (int i = 0; i < wanted && nnodes < MAX_NODES - 1 && more(in); i++)
	{
		Bytes		name = {0};
		int			j = node->nchildren;

		if (node->kind == OBJECT)
		{
			if (wide && take(in, 8) > 0)
				put(&name, &"abcdefghi"[i % 8], 1 + i / 8 % 2);
			else
				random_string(in, &name);
			if (wide)
				put_utf8(&name, 1 + i);
			for (j = 0; j < node->nchildren; j++)
				if (node->children[j]->name.len == name.len &&
					memcmp(node->children[j]->name.data, name.data, name.len) == 0)
					break;
		}
		/* of equal names the first one stays: jsonb has no other */
		if (j < node->nchildren)
		{
			free(name.data);
			continue;
		}
		node->children[j] = random_node(in, depth + 1);
		node->children[j]->name = name;
		node->nchildren++;
	}
	return node;
}

static void
free_nodes(void)
{
	for (int i = 0; i < nnodes; i++)
	{
		free(nodes[i].name.data);
		free(nodes[i].units);
		free(nodes[i].string.data);
		free(nodes[i].children);
	}
	nnodes = 0;
}

/* ---- jsonb, as the server's convertToJsonb() lays it out ---- */

static void
pad(Bytes *b)
{
	while (b->len % 4 != 0)
		put(b, "", 1);
}

static int
by_length(const void *a, const void *b)
{
	const Value *na = *(Value *const *) a;
	const Value *nb = *(Value *const *) b;

	if (na->name.len != nb->name.len)
		return na->name.len < nb->name.len ? -1 : 1;
	return memcmp(na->name.data, nb->name.data, na->name.len);
}

static JEntry build_container(Bytes *b, Value **children, int n, uint32 flags);

static JEntry
build_value(Bytes *b, Value *node)
{
	int			start = b->len;

	switch (node->kind)
	{
		case LITERAL_NULL:
			return JENTRY_ISNULL;
		case LITERAL_TRUE:
			return JENTRY_ISBOOL_TRUE;
		case LITERAL_FALSE:
			return JENTRY_ISBOOL_FALSE;
		case STRING:
			put(b, node->string.data, node->string.len);
			return JENTRY_ISSTRING | (b->len - start);
		case NUMBER:
			{
				Numeric		n = shim_numeric(node->number.negative, node->number.digits,
											 node->number.ndigits, node->number.point);

				pad(b);
				put(b, n, VARSIZE_ANY(n));
				return JENTRY_ISNUMERIC | (b->len - start);
			}
		case ARRAY:
			return build_container(b, node->children, node->nchildren, JB_FARRAY);
		default:
			return build_container(b, node->children, node->nchildren, JB_FOBJECT);
	}
}

static void
set_entry(Bytes *b, int entries, int i, JEntry entry, int total)
{
	if (i % JB_OFFSET_STRIDE == 0)
		entry = (entry & JENTRY_TYPEMASK) | total | JENTRY_HAS_OFF;
	memcpy(b->data + entries + i * sizeof(JEntry), &entry, sizeof(entry));
}

static JEntry
build_container(Bytes *b, Value **children, int n, uint32 flags)
{
	int			start = b->len;
	int			nentries = (flags & JB_FOBJECT) ? 2 * n : n;
	uint32		header = flags | n;
	int			entries;
	int			total = 0;
	int			i = 0;
	Value	  **sorted = malloc((n + 1) * sizeof(Value *));

	if (n > 0)
		memcpy(sorted, children, n * sizeof(Value *));
	pad(b);
	put(b, &header, sizeof(header));
	entries = b->len;
	for (int j = 0; j < nentries; j++)
		put(b, "\0\0\0", sizeof(JEntry));
	if (flags & JB_FOBJECT)
	{
		qsort(sorted, n, sizeof(Value *), by_length);
		for (int j = 0; j < n; j++)
		{
			put(b, sorted[j]->name.data, sorted[j]->name.len);
			total += sorted[j]->name.len;
			set_entry(b, entries, i++, JENTRY_ISSTRING | sorted[j]->name.len, total);
		}
	}
	for (int j = 0; j < n; j++)
	{
		JEntry		entry = build_value(b, sorted[j]);

		total += JBE_OFFLENFLD(entry);
		set_entry(b, entries, i++, entry, total);
	}
	free(sorted);
	return JENTRY_ISCONTAINER | (b->len - start);
}

static Jsonb *
build(Value *root)
{
	Bytes		b = {0};
	Jsonb	   *result;

	put(&b, "\0\0\0", VARHDRSZ);
	if (root->kind < ARRAY)
		build_container(&b, &root, 1, JB_FARRAY | JB_FSCALAR);
	else
		build_value(&b, root);
	result = palloc(b.len);
	memcpy(result, b.data, b.len);
	SET_VARSIZE(result, b.len);
	free(b.data);
	return result;
}

/* ---- what is expected ---- */

static void
to_utf8(const Bytes *in, Bytes *out)
{
	put(out, "", 0);
	if (encoding != PG_LATIN1)
		put(out, in->data, in->len);
	else
		for (int i = 0; i < in->len; i++)
			put_utf8(out, (uint8) in->data[i]);
}

static int
to_utf16(const Bytes *s, uint16 *units)
{
	Bytes		utf8 = {0};
	int			n = 0;

	to_utf8(s, &utf8);
	for (int i = 0; i < utf8.len;)
	{
		uint8	   *p = (uint8 *) utf8.data + i;
		uint32		c;

		if (p[0] < 0x80)
			c = p[0], i += 1;
		else if (p[0] < 0xE0)
			c = (p[0] & 0x1F) << 6 | (p[1] & 0x3F), i += 2;
		else if (p[0] < 0xF0)
			c = (p[0] & 0x0F) << 12 | (p[1] & 0x3F) << 6 | (p[2] & 0x3F), i += 3;
		else
			c = (p[0] & 0x07) << 18 | (p[1] & 0x3F) << 12 | (p[2] & 0x3F) << 6 | (p[3] & 0x3F), i += 4;
		if (c >= 0x10000)
		{
			units[n++] = 0xD800 + ((c - 0x10000) >> 10);
			units[n++] = 0xDC00 + ((c - 0x10000) & 0x3FF);
		}
		else
			units[n++] = c;
	}
	free(utf8.data);
	return n;
}

static void
need_utf16(Value *v)
{
	if (v->units == NULL)
	{
		v->units = malloc((2 * v->name.len + 1) * sizeof(uint16));
		v->nunits = to_utf16(&v->name, v->units);
	}
}

static int
by_utf16(const void *a, const void *b)
{
	Value	   *va = *(Value *const *) a;
	Value	   *vb = *(Value *const *) b;

	need_utf16(va);
	need_utf16(vb);
	for (int i = 0; i < va->nunits && i < vb->nunits; i++)
		if (va->units[i] != vb->units[i])
			return va->units[i] < vb->units[i] ? -1 : 1;
	return va->nunits - vb->nunits;
}

static void
expect_string(Bytes *out, const Bytes *s)
{
	Bytes		utf8 = {0};

	to_utf8(s, &utf8);
	put_str(out, "\"");
	for (int i = 0; i < utf8.len; i++)
	{
		uint8		c = utf8.data[i];
		char		escape[8];

		switch (c)
		{
			case '"': put_str(out, "\\\""); break;
			case '\\': put_str(out, "\\\\"); break;
			case '\b': put_str(out, "\\b"); break;
			case '\f': put_str(out, "\\f"); break;
			case '\n': put_str(out, "\\n"); break;
			case '\r': put_str(out, "\\r"); break;
			case '\t': put_str(out, "\\t"); break;
			default:
				if (c < 0x20)
				{
					snprintf(escape, sizeof(escape), "\\u%04x", c);
					put_str(out, escape);
				}
				else
					put(out, &c, 1);
		}
	}
	put_str(out, "\"");
	free(utf8.data);
}

static Bytes pointers[MAX_POINTERS];
static int	npointers;

/* The pointer to a child: that of its parent, and one step. */
static void
step(Bytes *at, const Value *parent, int index)
{
	const Bytes *name = &parent->children[index]->name;
	char		number[12];

	put_str(at, "/");
	if (parent->kind == ARRAY)
	{
		snprintf(number, sizeof(number), "%d", index);
		put_str(at, number);
		return;
	}
	for (int i = 0; i < name->len; i++)
	{
		if (name->data[i] == '~')
			put_str(at, "~0");
		else if (name->data[i] == '/')
			put_str(at, "~1");
		else
			put(at, name->data + i, 1);
	}
}

static bool
is_ignored(const Bytes *at)
{
	for (int i = 0; i < npointers; i++)
		if (pointers[i].len == at->len && memcmp(pointers[i].data, at->data, at->len) == 0)
			return true;
	return false;
}

static void
expect_value(Bytes *out, Value *node, Bytes *at)
{
	static const char *const literals[] = {"null", "true", "false"};
	int			base = at->len;
	bool		first = true;

	if (node->kind <= LITERAL_FALSE)
		put_str(out, literals[node->kind]);
	else if (node->kind == STRING)
		expect_string(out, &node->string);
	else if (node->kind == NUMBER)
		expect_decimal(out, &node->number);
	if (node->kind < ARRAY)
		return;
	if (node->kind == OBJECT && node->nchildren > 0)
		qsort(node->children, node->nchildren, sizeof(Value *), by_utf16);
	put_str(out, node->kind == ARRAY ? "[" : "{");
	for (int i = 0; i < node->nchildren; i++)
	{
		at->len = base;
		step(at, node, i);
		if (is_ignored(at))
			continue;
		if (!first)
			put_str(out, ",");
		first = false;
		if (node->kind == OBJECT)
		{
			expect_string(out, &node->children[i]->name);
			put_str(out, ":");
		}
		expect_value(out, node->children[i], at);
	}
	at->len = base;
	put_str(out, node->kind == ARRAY ? "]" : "}");
}

/* Pointers to places of the document, and some beside it. */
static void
random_pointers(Input *in, Value *root)
{
	npointers = take(in, MAX_POINTERS + 1);
	for (int i = 0; i < npointers; i++)
	{
		Value	   *node = root;
		int			depth = 1 + take(in, 4);

		memset(&pointers[i], 0, sizeof(Bytes));
		for (int d = 0; d < depth && node->kind >= ARRAY && node->nchildren > 0; d++)
		{
			int			child = take(in, node->nchildren);

			step(&pointers[i], node, child);
			node = node->children[child];
		}
		if (pointers[i].len == 0 || take(in, 4) == 0)
			put_str(&pointers[i], ((const char *[]) {"/", "/0", "/00", "/-", "/a", "/~0"})[take(in, 6)]);
	}
}

static Datum
call(PGFunction function, Jsonb *request, text *secret, ArrayType *ignore)
{
	LOCAL_FCINFO(fcinfo, 3);
	int			n = 0;

	InitFunctionCallInfoData(*fcinfo, NULL, secret == NULL ? 2 : 3, 0, NULL, NULL);
	fcinfo->args[n].value = PointerGetDatum(request);
	fcinfo->args[n++].isnull = request == NULL;
	if (secret != NULL)
	{
		fcinfo->args[n].value = PointerGetDatum(secret);
		fcinfo->args[n++].isnull = false;
	}
	fcinfo->args[n].value = PointerGetDatum(ignore);
	fcinfo->args[n].isnull = ignore == NULL;
	return function(fcinfo);
}

static void
check_digest(Datum digest, uint8 version, uint8 filler, const Bytes *expected)
{
	bytea	   *d = (bytea *) DatumGetPointer(digest);

	CHECK(VARSIZE_ANY_EXHDR(d) == 33);
	CHECK((uint8) VARDATA_ANY(d)[0] == version && (uint8) VARDATA_ANY(d)[32] == filler);
	CHECK(shim_hashed_len == expected->len && memcmp(shim_hashed, expected->data, expected->len) == 0);
}

int
LLVMFuzzerTestOneInput(const uint8 *data, size_t size)
{
	static const int encodings[] = {PG_UTF8, PG_UTF8, PG_UTF8, PG_LATIN1};
	Input		in = {data, data + size};
	bool		shallow;
	Value	   *root;
	Jsonb	   *request;
	ArrayType  *ignore;
	text	   *list[MAX_POINTERS];
	Bytes		expected = {0};
	Bytes		at = {0};
	Bytes		server = {0};
	Datum		result = 0;
	const char *state;
	int			len = 0;
	char	   *canonical = NULL;
	Size		live;

	encoding = encodings[take(&in, lengthof(encodings))];
	shim_reset(encoding);
	shallow = take(&in, 32) == 31;
	root = random_node(&in, 0);
	request = build(root);
	random_pointers(&in, root);
	for (int i = 0; i < npointers; i++)
		list[i] = shim_text(pointers[i].data, pointers[i].len, take(&in, 2));
	ignore = npointers == 0 ? NULL : shim_array(list, npointers);
	put(&at, "", 0);
	expect_value(&expected, root, &at);

	live = shim_live_chunks();
	if (shallow)
		shim_stack_limit = 0;
	state = TRY(canonical = idem_canonical_utf8(request, ignore, &len));
	shim_stack_limit = 1024 * 1024;
	CHECK(shallow ? RAISED(state, "54001") : state == NULL);
	if (!shallow)
	{
		if (len != expected.len || memcmp(canonical, expected.data, len) != 0 || canonical[len] != '\0')
			FAIL("%s instead of %s", canonical, expected.data);
		/* without pointers, nothing is left behind but the text */
		CHECK(npointers > 0 || shim_live_chunks() == live + 1);
		CHECK(TRY(result = call(idem_canonical, request, NULL, ignore)) == NULL);
		if (encoding == PG_LATIN1)
			for (int i = 0; i < expected.len; i++)
			{
				char		c = expected.data[i];

				if (c & 0x80)
					c = (char) ((uint8) c << 6 | (expected.data[++i] & 0x3F));
				put(&server, &c, 1);
			}
		else
			put(&server, expected.data, expected.len);
		CHECK(VARSIZE_ANY_EXHDR(DatumGetPointer(result)) == server.len);
		CHECK(memcmp(VARDATA_ANY(DatumGetPointer(result)), server.data, server.len) == 0);
		CHECK(TRY(result = call(idem_digest, request, NULL, ignore)) == NULL);
		check_digest(result, 0x01, 0xA5, &expected);
		CHECK(TRY(result = call(idem_keyed_digest, request, shim_text("s", 1, true), ignore)) == NULL);
		check_digest(result, 0x81, 0x5A, &expected);
	}
	CHECK(RAISED(TRY(call(idem_digest, NULL, NULL, ignore)), "22004"));
	CHECK(RAISED(TRY(call(idem_keyed_digest, request, shim_text("", 0, true), ignore)), "22023"));
	free(expected.data);
	free(at.data);
	free(server.data);
	for (int i = 0; i < npointers; i++)
		free(pointers[i].data);
	free_nodes();
	return 0;
}
