/*
 * number.c -- libFuzzer target: canonical text of numbers (src/number.c).
 *
 * A number is made of the input, known by its decimal digits; the text is
 * compared with the rules of ECMA-262, and read back.
 */
#include "shim.h"

int			LLVMFuzzerTestOneInput(const uint8 *data, size_t size);

/* The text must stand for the number: same digits, same place of the point. */
static void
read_back(const char *text, const Decimal *d)
{
	const char *p = text + (*text == '-');
	char	   *digits = malloc(strlen(text) + 1);
	int			n = 0;
	int			point = -1;
	int			zeros = 0;
	int			exponent = 0;

	CHECK((*text == '-') == d->negative);
	for (; *p != '\0' && *p != 'e'; p++)
	{
		if (*p == '.')
			point = n;
		else
			digits[n++] = *p;
	}
	if (point < 0)
		point = n;
	if (*p == 'e')
		exponent = atoi(p + 1);
	while (zeros < n && digits[zeros] == '0')
		zeros++;
	while (n > zeros && digits[n - 1] == '0')
		n--;
	CHECK(n - zeros == d->ndigits);
	CHECK(memcmp(digits + zeros, d->digits, n - zeros) == 0);
	CHECK(d->ndigits == 0 || point - zeros + exponent == d->point);
	free(digits);
}

int
LLVMFuzzerTestOneInput(const uint8 *data, size_t size)
{
	Input		in = {data, data + size};
	Decimal		d;
	Bytes		expected = {0};
	StringInfoData out;
	Size		live;

	shim_reset(PG_UTF8);
	random_decimal(&in, &d);
	initStringInfo(&out);
	live = shim_live_chunks();
	CHECK(TRY(idem_write_number(&out, shim_numeric(d.negative, d.digits, d.ndigits, d.point))) == NULL);
	CHECK(shim_live_chunks() == live + 1);	/* the number itself: nothing is left behind */
	expect_decimal(&expected, &d);
	if (expected.len != out.len || memcmp(expected.data, out.data, out.len) != 0)
		FAIL("%s instead of %s", out.data, expected.data);
	read_back(out.data, &d);
	free(expected.data);
	return 0;
}
