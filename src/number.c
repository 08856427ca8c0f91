/*-------------------------------------------------------------------------
 *
 * number.c
 *	  Layout of an exact decimal number by the rules of ECMAScript.
 *
 * ECMAScript's Number::toString lays out the shortest digits of a double; here
 * the same layout is given to all significant digits of the decimal value.  So
 * a number that a JavaScript program printed comes out as it printed it, and no
 * two different values ever come out the same.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "number.h"

/* Value = 0.digits * 10^point, negative or not; no digits = zero. */
typedef struct Decimal
{
	bool		negative;
	char	   *digits;			/* without leading and trailing zeros */
	int			count;
	int			point;
} Decimal;

/*
 * Takes text like "-0012.3400" apart.  The digits are squeezed together in
 * place.
 */
static void
take_apart(char *text, Decimal *d)
{
	char	   *in = text;
	char	   *out = text;
	int			before = -1;	/* digits before the decimal point */

	d->negative = *in == '-';
	if (*in == '-' || *in == '+')
		in++;
	for (; *in != '\0'; in++)
	{
		if (*in == '.')
			before = out - text;
		else
			*out++ = *in;
	}
	d->digits = text;
	d->count = out - text;
	d->point = before < 0 ? d->count : before;
	while (d->count > 0 && d->digits[0] == '0')
	{
		d->digits++;
		d->count--;
		d->point--;
	}
	while (d->count > 0 && d->digits[d->count - 1] == '0')
		d->count--;
}

static void
append_zeros(StringInfo buf, int n)
{
	for (int i = 0; i < n; i++)
		appendStringInfoCharMacro(buf, '0');
}

static void
append_exponent_form(StringInfo buf, const Decimal *d)
{
	int			exponent = d->point - 1;

	appendStringInfoChar(buf, d->digits[0]);
	if (d->count > 1)
	{
		appendStringInfoChar(buf, '.');
		appendBinaryStringInfo(buf, d->digits + 1, d->count - 1);
	}
	appendStringInfo(buf, "e%c%d", exponent < 0 ? '-' : '+', abs(exponent));
}

/*
 * Appends the number whose plain decimal text (as numeric_out writes it) is
 * given; the text is overwritten.
 */
void
idem_append_number(StringInfo buf, char *text)
{
	Decimal		d;

	take_apart(text, &d);
	if (d.count == 0)
	{
		appendStringInfoChar(buf, '0');
		return;
	}
	if (d.negative)
		appendStringInfoChar(buf, '-');
	if (d.point > 21 || d.point <= -6)
		append_exponent_form(buf, &d);
	else if (d.point <= 0)
	{
		appendStringInfoString(buf, "0.");
		append_zeros(buf, -d.point);
		appendBinaryStringInfo(buf, d.digits, d.count);
	}
	else if (d.point >= d.count)
	{
		appendBinaryStringInfo(buf, d.digits, d.count);
		append_zeros(buf, d.point - d.count);
	}
	else
	{
		appendBinaryStringInfo(buf, d.digits, d.point);
		appendStringInfoChar(buf, '.');
		appendBinaryStringInfo(buf, d.digits + d.point, d.count - d.point);
	}
}
