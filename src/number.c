/*-------------------------------------------------------------------------
 *
 * number.c
 *	  Canonical text of a JSON number.
 *
 * The layout is that of ECMAScript's Number::toString, which RFC 8785 section
 * 3.2.2.3 asks for, but it is applied to the exact decimal value: no binary
 * floating point is involved, no digit is lost, and numbers that JavaScript
 * prints come out as JavaScript prints them.  Owns no data.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/builtins.h"

#include "canonical.h"

/* The binary form of a numeric, as numeric_send() makes it. */
#define WIRE_HEADER_BYTES	8
#define WIRE_POSITIVE		0x0000
#define WIRE_NEGATIVE		0x4000

/* Decimal digits in one digit of a numeric. */
#define GROUP_DIGITS		4

/* Numbers of up to this many groups need no memory but the stack. */
#define STACK_GROUPS		16

/* Decimal exponents between which ECMAScript uses no exponent. */
#define MAX_PLAIN_POINT		21
#define MIN_PLAIN_POINT		(-5)

static inline uint16
read_uint16(const uint8 *p)
{
	return (uint16) ((p[0] << 8) | p[1]);
}

/* Unpacks groups of the binary form to decimal digits, four for each. */
static void
unpack_groups(const uint8 *wire, int ngroups, char *digits)
{
	int			i;

	for (i = 0; i < ngroups; i++)
	{
		int			group = read_uint16(wire + 2 * i);

		*digits++ = (char) ('0' + group / 1000);
		*digits++ = (char) ('0' + group / 100 % 10);
		*digits++ = (char) ('0' + group / 10 % 10);
		*digits++ = (char) ('0' + group % 10);
	}
}

static void
write_zeros(StringInfo out, int count)
{
	while (count-- > 0)
		appendStringInfoCharMacro(out, '0');
}

/*
 * Lays out 0.DIGITS times ten to the power of "point".  The first and the last
 * digit are not zero.
 */
static void
write_layout(StringInfo out, const char *digits, int ndigits, int point)
{
	if (point > MAX_PLAIN_POINT || point < MIN_PLAIN_POINT)
	{
		appendStringInfoCharMacro(out, digits[0]);
		if (ndigits > 1)
		{
			appendStringInfoCharMacro(out, '.');
			appendBinaryStringInfo(out, digits + 1, ndigits - 1);
		}
		appendStringInfo(out, "e%+d", point - 1);
	}
	else if (point <= 0)
	{
		appendBinaryStringInfo(out, "0.", 2);
		write_zeros(out, -point);
		appendBinaryStringInfo(out, digits, ndigits);
	}
	else if (point < ndigits)
	{
		appendBinaryStringInfo(out, digits, point);
		appendStringInfoCharMacro(out, '.');
		appendBinaryStringInfo(out, digits + point, ndigits - point);
	}
	else
	{
		appendBinaryStringInfo(out, digits, ndigits);
		write_zeros(out, point - ndigits);
	}
}

/* Writes groups of the binary form, the first of the given weight. */
static void
write_groups(StringInfo out, const uint8 *wire, int ngroups, int weight)
{
	char		stack_digits[STACK_GROUPS * GROUP_DIGITS];
	char	   *digits = stack_digits;
	int			first = 0;
	int			end = ngroups * GROUP_DIGITS;

	if (ngroups > STACK_GROUPS)
		digits = palloc(end);
	unpack_groups(wire, ngroups, digits);
	while (first < end && digits[first] == '0')
		first++;
	while (end > first && digits[end - 1] == '0')
		end--;
	if (first == end)
		appendStringInfoCharMacro(out, '0');
	else
		write_layout(out, digits + first, end - first, (weight + 1) * GROUP_DIGITS - first);
	if (digits != stack_digits)
		pfree(digits);
}

/*
 * Appends the canonical text of a number.  The cost grows with the number of
 * significant digits, not with the exponent: 1e131071 is short work, unlike
 * with numeric_out().
 */
void
idem_write_number(StringInfo out, Numeric number)
{
	bytea	   *sent = DatumGetByteaPP(DirectFunctionCall1(numeric_send, NumericGetDatum(number)));
	const uint8 *wire = (const uint8 *) VARDATA_ANY(sent);
	uint16		sign = read_uint16(wire + 4);

	if (sign != WIRE_POSITIVE && sign != WIRE_NEGATIVE)
		elog(ERROR, "unexpected number in jsonb");
	if (sign == WIRE_NEGATIVE)
		appendStringInfoCharMacro(out, '-');
	write_groups(out, wire + WIRE_HEADER_BYTES, read_uint16(wire), (int16) read_uint16(wire + 2));
	pfree(sent);
}
