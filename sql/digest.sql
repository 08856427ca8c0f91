--
-- Canonical text and digests: idem_canonical, idem_digest, idem_keyed_digest
--

-- SQLSTATE and message of a statement that fails, its result otherwise
CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    result text;
BEGIN
    EXECUTE statement INTO result;
    RETURN result;
EXCEPTION WHEN OTHERS THEN
    RETURN SQLSTATE || ': ' || SQLERRM;
END $$;

-- the same of a digest in hexadecimal, whatever bytea_output is
CREATE FUNCTION pg_temp.hex(digest bytea) RETURNS text LANGUAGE sql AS 'SELECT encode(digest, ''hex'')';

------------------------------------------------------------------------------
-- RFC 8785
------------------------------------------------------------------------------

-- section 3.2.2: primitive data types
SELECT idem_canonical($j${
  "numbers": [333333333.3333333, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
  "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
  "literals": [null, true, false]
}$j$);

-- section 3.2.4: its bytes
SELECT convert_to(idem_canonical($j${
  "numbers": [333333333.3333333, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
  "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
  "literals": [null, true, false]
}$j$), 'UTF8') = decode(replace(replace(
    '7b 22 6c 69 74 65 72 61 6c 73 22 3a 5b 6e 75 6c 6c 2c 74 72
     75 65 2c 66 61 6c 73 65 5d 2c 22 6e 75 6d 62 65 72 73 22 3a
     5b 33 33 33 33 33 33 33 33 33 2e 33 33 33 33 33 33 33 2c 31
     65 2b 33 30 2c 34 2e 35 2c 30 2e 30 30 32 2c 31 65 2d 32 37
     5d 2c 22 73 74 72 69 6e 67 22 3a 22 e2 82 ac 24 5c 75 30 30
     30 66 5c 6e 41 27 42 5c 22 5c 5c 5c 5c 5c 22 2f 22 7d', ' ', ''), E'\n', ''), 'hex') AS bytes_of_the_rfc;

-- the one deliberate difference: the RFC's own example has a digit more than a
-- double holds, and it is kept
SELECT idem_canonical('[333333333.33333329]');

-- section 3.2.3: members by UTF-16 code units
SELECT idem_canonical($j${
  "\u20ac": "Euro Sign",
  "\r": "Carriage Return",
  "\ufb33": "Hebrew Letter Dalet With Dagesh",
  "1": "One",
  "\ud83d\ude00": "Emoji: Grinning Face",
  "\u0080": "Control",
  "\u00f6": "Latin Small Letter O With Diaeresis"
}$j$) = E'{"\\r":"Carriage Return","1":"One","\u0080":"Control","ö":"Latin Small Letter O With Diaeresis","€":"Euro Sign","😀":"Emoji: Grinning Face","\uFB33":"Hebrew Letter Dalet With Dagesh"}' AS order_of_the_rfc;

-- the edges of the surrogates, also behind a common start
SELECT idem_canonical('{"x\uffff":7,"x\udbff\udfff":5,"x\ud800\udc00":4,"x\ue000":6,"x\ud7ff":3,"x":1,"xx":2}')
    = E'{"x":1,"xx":2,"x\uD7FF":3,"x\U00010000":4,"x\U0010FFFF":5,"x\uE000":6,"x\uFFFF":7}' AS order_of_surrogates;

-- the same with names whose lengths make jsonb hand them over the other way round
SELECT idem_canonical('{"\ue000---":3,"\uffff----":4,"\ud800\udc00":1,"\udbff\udfff-":2}')
    = E'{"\U00010000":1,"\U0010FFFF-":2,"\uE000---":3,"\uFFFF----":4}' AS order_of_surrogates;
SELECT idem_canonical('{"\ue000":2,"\ud800\udc00":1}') = E'{"\U00010000":1,"\uE000":2}' AS first_edge,
    idem_canonical('{"\uffff":2,"\udbff\udfff":1}') = E'{"\U0010FFFF":1,"\uFFFF":2}' AS last_edge;

-- jsonb's own order is by length
SELECT idem_canonical('{"b":1,"aa":2,"":3,"B":4,"a":5,"a ":6,"Aa":7}');

-- section 3.2.2.2: escapes
SELECT idem_canonical(to_jsonb(E'\b\t\n\f\r"\\/' || E'\x01\x0b\x1f'));
SELECT bool_and(idem_canonical(to_jsonb(chr(i))) = '"' ||
    CASE WHEN i = 34 THEN '\"' WHEN i = 92 THEN '\\'
         WHEN i IN (8, 9, 10, 12, 13) THEN '\' || substr('btn fr', i - 7, 1)
         WHEN i < 32 THEN '\u00' || lpad(to_hex(i), 2, '0')
         ELSE chr(i) END || '"') AS every_character
FROM generate_series(1, 70000) i WHERE i NOT BETWEEN 55296 AND 57343;

-- appendix B: numbers
SELECT count(*), count(*) FILTER (WHERE idem_canonical(t::jsonb) <> t) AS wrong
FROM unnest(ARRAY['0', '5e-324', '-5e-324', '1.7976931348623157e+308', '-1.7976931348623157e+308',
    '9007199254740992', '-9007199254740992', '295147905179352830000',
    '9.999999999999997e+22', '1e+23', '1.0000000000000001e+23',
    '999999999999999700000', '999999999999999900000', '1e+21',
    '9.999999999999997e-7', '0.000001',
    '333333333.3333332', '333333333.33333325', '333333333.3333333', '333333333.3333334', '333333333.33333343',
    '-0.0000033333333333333333', '1424953923781206.2']) t;

------------------------------------------------------------------------------
-- Numbers
------------------------------------------------------------------------------

-- C93: the value counts, not the spelling
SELECT n, idem_canonical(n::jsonb) FROM unnest(ARRAY['1', '1.0', '1.00', '1e0', '10e-1', '0.1e1', '100E-2',
    '0', '-0', '-0.0', '0e5', '0.000', '-0e-9', '120', '1.2e2', '-120.50']) n;
SELECT count(DISTINCT idem_digest(('{"amount":' || n || '}')::jsonb)) AS one,
    count(DISTINCT idem_digest(('{"amount":' || n || '}')::json::jsonb)) AS json,
    count(DISTINCT idem_digest(jsonb_build_object('amount', n::numeric))) AS numeric
FROM unnest(ARRAY['1', '1.0', '1.00', '1e0', '10e-1', '0.1e1', '1.00000000000000000000000000000']) n;
SELECT count(DISTINCT idem_digest(n::jsonb)) AS zero FROM unnest(ARRAY['0', '-0', '-0.0', '0e5', '0.00']) n;
SELECT count(DISTINCT idem_digest(n::jsonb)) AS classes FROM unnest(ARRAY['1', '0', '-1', '"1"', 'true', '10', '0.1', '[1]', '1.1']) n;

-- where the layout changes
SELECT string_agg(idem_canonical(('12e' || e)::jsonb), ' ' ORDER BY e) FROM generate_series(-10, 22) e;
SELECT string_agg(idem_canonical(('-1e' || e)::jsonb), ' ' ORDER BY e) FROM generate_series(-9, 23) e;
SELECT idem_canonical('[123456789012345678901, 1234567890123456789012, 123456789012345678901.5, 999999999999999999999.9, 0.00000123, 0.000000123]');

-- C94: no digit is lost
SELECT a, b, idem_digest(a::jsonb) <> idem_digest(b::jsonb) AS differ, idem_canonical(a::jsonb) AS canonical
FROM (VALUES ('9007199254740993', '9007199254740992'),
             ('0.1', '0.1000000000000000055511151231257827'),
             ('12345678901234567890', '12345678901234567891'),
             ('10000000000000000000.01', '10000000000000000000.02'),
             ('1e400', '1e401'), ('1e-400', '0'),
             ('18446744073709551616', '18446744073709551617')) v(a, b);
SELECT idem_canonical('1e400') AS big, idem_canonical('1e131071') AS bigger, idem_canonical('-1.5e131071') AS negative,
    idem_canonical('1e-16383') AS small;
SELECT idem_canonical(('1' || repeat('0', 131070) || '1')::jsonb) = '1.' || repeat('0', 131070) || '1e+131071' AS all_digits,
    idem_canonical(('0.' || repeat('0', 16382) || '1')::jsonb) AS smallest,
    idem_canonical(('9' || repeat('9', 131071) || '.' || repeat('9', 16383))::jsonb)
        = '9.' || repeat('9', 131071 + 16383) || 'e+131071' AS longest;

-- every position of the digits within numeric's groups of four, against the numeric type itself
SELECT count(*), count(*) FILTER (WHERE idem_canonical(n::jsonb)::numeric <> n::numeric) AS wrong_value,
    count(*) FILTER (WHERE idem_canonical(n::jsonb) <> idem_canonical(idem_canonical(n::jsonb)::jsonb)) AS not_stable,
    count(*) FILTER (WHERE idem_canonical(n::jsonb) ~ '^-?(0\d|\.)|\.(e|$)|\.\d*0(e|$)') AS not_shortest
FROM (SELECT m || 'e' || e AS n FROM unnest(ARRAY['1', '-10', '1001', '10000', '100010001', '99999', '1.00010', '-123456789.987654321', '5000000005']) m,
      generate_series(-60, 60) e) s;

-- many huge exponents cost no more than small ones
SELECT length(idem_canonical(jsonb_agg('1e131071'::jsonb))) FROM generate_series(1, 20000);

------------------------------------------------------------------------------
-- Documents
------------------------------------------------------------------------------

-- scalars and empty ones
SELECT j, idem_canonical(j::jsonb) FROM unnest(ARRAY['null', 'true', 'false', '""', '"a"', '7', '[]', '{}', '[[]]', '[{}]',
    '{"":{}}', '[null]', '[[1]]', ' [ 1 , 2 ] ']) j;

-- C92: order of members does not count, order of elements does
SELECT idem_digest('{"a":1,"b":{"d":[1,2],"c":3}}') = idem_digest('{"b":{"c":3,"d":[1,2]},"a":1}') AS members,
    idem_digest('[1,2]') <> idem_digest('[2,1]') AS elements,
    idem_digest('{"a":[{"x":1,"y":2}]}') = idem_digest('{"a":[{"y":2,"x":1}]}') AS deep;

-- digest version 1: these never change (C101)
SELECT j, pg_temp.hex(idem_digest(j::jsonb)) FROM unnest(ARRAY['null', '{}', '{"amount":100,"currency":"EUR"}', '"\u00e9\u20ac\ud83d\ude00"']) j;
SELECT bool_and(idem_digest(j::jsonb) = '\x01'::bytea || sha256(convert_to(idem_canonical(j::jsonb), 'UTF8'))) AS built
FROM unnest(ARRAY['null', '{}', '[1.0]', '{"b":1,"a":"é"}']) j;

-- C91: an escape is the character; normalisation forms and scripts differ
SELECT idem_digest('"\u00e9"') = idem_digest('"é"') AS escaped,
    idem_digest('"\ud83d\ude00"') = idem_digest('"😀"') AS pair,
    idem_digest(E'"\u00e9"') <> idem_digest(E'"e\u0301"') AS nfc_nfd,
    idem_digest('{"\u0061":1}') = idem_digest('{"a":1}') AS name;
SELECT count(DISTINCT idem_digest(to_jsonb(t))) AS distinct_texts
FROM unnest(ARRAY['', ' ', '中文', '文中', 'العربية', '😀', '😁', 'a', 'A', 'a ', E'a\u200d', E'\ufeff']) t;

-- C96: duplicates are gone in jsonb, the last one wins
SELECT idem_canonical('{"amount":1,"amount":100}'), idem_canonical('{"amount":100,"amount":1}'::json::jsonb),
    idem_canonical('{"a":1,"\u0061":2}');

-- C85: no request has no digest, the JSON null is a request
SELECT pg_temp.try('SELECT idem_canonical(NULL)');
SELECT pg_temp.try('SELECT idem_digest(NULL)');
SELECT pg_temp.try('SELECT idem_keyed_digest(NULL, ''s'')');
SELECT pg_temp.try($$SELECT idem_digest('{"a":1}'::jsonb -> 'b')$$);
SELECT idem_digest('null') <> idem_digest('"null"') AS null_is_null, idem_digest('null') <> idem_digest('{}') AS not_empty;

-- large ones
SELECT length(idem_canonical(d)) > 5000000 AS five_megabytes, idem_canonical(d)::jsonb = d AS same
FROM (SELECT jsonb_object_agg('member ' || i, jsonb_build_object('text', repeat(E'"\u20ac', i % 50), 'n', i / 7.0)) d FROM generate_series(1, 50000) i) s;
SELECT length(idem_canonical(to_jsonb(repeat(E'\x01', 1000000)))) AS escaped;

-- deep ones: as deep as the server allows, and an error rather than a crash beyond
CREATE TEMP TABLE deep AS SELECT (repeat('[', n) || repeat(']', n))::jsonb AS a, (repeat('{"a":', n) || '1' || repeat('}', n))::jsonb AS o
    FROM (VALUES (2000)) v(n);
SELECT idem_canonical(a) = a::text AS arrays, idem_canonical(o) = replace(o::text, ' ', '') AS objects FROM deep;
SET max_stack_depth = '100kB';
SELECT pg_temp.try('SELECT idem_canonical(a) FROM pg_temp.deep');
SELECT pg_temp.try('SELECT idem_digest(o) FROM pg_temp.deep');
RESET max_stack_depth;

------------------------------------------------------------------------------
-- Ignoring members (C99)
------------------------------------------------------------------------------

CREATE TEMP TABLE doc(d) AS VALUES ('{"a":1,"b":{"c":2,"d":[10,20,{"e":3,"f":4},40]},"x/y":5,"~":6,"":7,"0":8,"~1":9,"é":{"a":1}}'::jsonb);
SELECT i, idem_canonical(d, i) FROM doc, (VALUES
    ('{}'::text[]), (NULL),
    ('{/a}'), ('{/b}'), ('{/b/c}'), ('{/b/d}'), ('{/b/d/0}'), ('{/b/d/0,/b/d/1}'), ('{/b/d/2/e}'), ('{/b/d/2/e,/b/d/2/f}'),
    -- escapes, the empty name, a name that is a number
    ('{/x~1y}'), ('{/~0}'), ('{/}'), ('{/0}'), ('{/~01}'), ('{/é}'), ('{/é/a}'),
    -- absent places
    ('{/z}'), ('{/a/b}'), ('{/b/d/4}'), ('{/b/d/-}'), ('{/b/d/00}'), ('{/b/d/01}'), ('{/b/d/+1}'), ('{"/b/d/ 1"}'), ('{/b/d/1e0}'),
    ('{/b/d/18446744073709551616}'), ('{/b/d/}'), ('{/A}'), ('{/b/}'), ('{//}'), ('{/x/y}'),
    -- one below another, twice, in any order, in any shape of array
    ('{/b/d,/b}'), ('{/b,/b/d/1}'), ('{/a,/a}'), ('{/b/d/3,/a,/b/d/0,/é}'), ('{{/a,/b},{/0,/}}'), ('[5:6]={/a,/b}'),
    ('{/a,/b,/x~1y,/~0,/,/0,/~01,/é}')) v(i);
SELECT idem_canonical('[1,[2,3],4]', '{/0,/1/1}') AS elements, idem_canonical('[1,2]', '{/0,/1}') AS all_elements,
    idem_canonical('7', '{/0}') AS scalar, idem_canonical('"a"', '{/,/a}') AS string, idem_canonical('[[[1,2],3],4]', '{/0/0/0,/1}') AS nested;
SELECT idem_canonical(jsonb_agg(i ORDER BY i), array_agg('/' || i) FILTER (WHERE i % 10 <> 0)) AS every_tenth FROM generate_series(0, 100) i;
SELECT idem_canonical('{"-":1,"01":2,"1":3}', '{/-,/01}') AS names_like_indexes;

-- what does not matter, what does
SELECT idem_digest('{"a":1,"sent":"08:00","t":{"id":1}}', '{/sent,/t/id}') = idem_digest('{"a":1,"sent":"09:30","t":{"id":2}}', '{/sent,/t/id}') AS changed,
    idem_digest('{"a":1,"t":{}}', '{/sent,/t/id}') = idem_digest('{"a":1,"sent":"09:30","t":{"id":2}}', '{/sent,/t/id}') AS absent,
    idem_digest('{"a":1,"sent":"08:00"}', '{/sent}') <> idem_digest('{"a":2,"sent":"08:00"}', '{/sent}') AS other_request,
    idem_digest('{"a":1,"sent":"08:00"}', '{/sent}') <> idem_digest('{"a":1,"sent":"08:00"}', '{/a}') AS other_list,
    idem_digest('{"a":1,"sent":"08:00"}') = idem_digest('{"a":1,"sent":"08:00"}', NULL) AS null_list,
    idem_digest('{"a":1}', '{/b}') = idem_digest('{"a":1}') AS nothing_ignored;

-- errors
SELECT i, pg_temp.try(format('SELECT idem_canonical(%L, %L::text[])', '{"a":1}', i))
FROM unnest(ARRAY['{""}', '{/a,""}', '{a}', '{" /a"}', '{#/a}', '{/a~}', '{/~2}', '{/a~b}', '{/~~0}', '{NULL}', '{/a,NULL}', '{$.a}']) i;
SELECT pg_temp.try($$SELECT idem_canonical('1', '{a}')$$);
SELECT pg_temp.try($$SELECT idem_digest('{"a":1}', '{""}')$$);
SELECT pg_temp.try($$SELECT idem_keyed_digest('{"a":1}', 's', '{""}')$$);

-- many pointers
SELECT idem_canonical(jsonb_object_agg(i, i), array_agg('/' || i) FILTER (WHERE i <> 7)) FROM generate_series(1, 20000) i;

------------------------------------------------------------------------------
-- Keyed digests
------------------------------------------------------------------------------

SELECT pg_temp.hex(idem_keyed_digest('{"card":"4111111111111111"}', 'secret'));
SELECT bool_and(idem_keyed_digest(j, s) = '\x81'::bytea || hmac(convert_to(idem_canonical(j), 'UTF8'), s, 'sha256')) AS built
FROM unnest(ARRAY['null', '{"b":1.0,"a":"é"}']::jsonb[]) j, unnest(ARRAY['k', '\x00', sha256(''), sha256('') || sha256('') || sha256('')]::bytea[]) s;
SELECT idem_keyed_digest('1', 'a') <> idem_keyed_digest('1', 'b') AS secret_counts,
    idem_keyed_digest('{"a":1,"b":2}', 's', '{/b}') = idem_keyed_digest('{"a":1.0}', 's') AS ignore,
    idem_keyed_digest('1', 'a', NULL) = idem_keyed_digest('1', 'a') AS null_list;
SELECT pg_temp.try($$SELECT idem_keyed_digest('1', NULL)$$);
SELECT pg_temp.try($$SELECT idem_keyed_digest('1', '')$$);

-- pgcrypto is found wherever it is, and nothing that stands in front of it
BEGIN;
CREATE SCHEMA hidden;
CREATE SCHEMA trap;
CREATE TEMP TABLE expected AS SELECT idem_keyed_digest('{"a":1}', 's') AS d;
CREATE FUNCTION trap.hmac(bytea, bytea, text) RETURNS bytea LANGUAGE plpgsql AS 'BEGIN RAISE ''trapped''; END';
CREATE FUNCTION pg_temp.hmac(bytea, bytea, text) RETURNS bytea LANGUAGE plpgsql AS 'BEGIN RAISE ''trapped''; END';
SET LOCAL search_path = trap, pg_temp, public;
SELECT idem_keyed_digest('{"a":1}', 's') = d AS same FROM pg_temp.expected;
ALTER EXTENSION pgcrypto SET SCHEMA hidden;
SELECT idem_keyed_digest('{"a":1}', 's') = d AS same FROM pg_temp.expected;
SET LOCAL search_path = pg_catalog, public;
SELECT idem_keyed_digest('{"a":1}', 's') = d AS same FROM pg_temp.expected;
ROLLBACK;

------------------------------------------------------------------------------
-- Settings and parallel workers
------------------------------------------------------------------------------

-- C12
CREATE TEMP TABLE seen AS
    SELECT pg_temp.hex(idem_digest(d)) AS digest, idem_canonical(d) AS canonical, pg_temp.hex(idem_keyed_digest(d, 's')) AS keyed
    FROM (VALUES ('{"n":[1.10,1e21,0.1,123456789.123456789],"é":"ÄÖ","i":"I"}'::jsonb)) v(d);
BEGIN;
SET LOCAL extra_float_digits = -15;
SET LOCAL DateStyle = 'German';
SET LOCAL IntervalStyle = 'sql_standard';
SET LOCAL TimeZone = 'Asia/Tokyo';
SET LOCAL lc_numeric = 'C';
SET LOCAL lc_monetary = 'C';
SET LOCAL bytea_output = 'escape';
SET LOCAL search_path = pg_catalog, public;
SELECT encode(idem_digest(d), 'hex') = digest AS digest, idem_canonical(d) = canonical AS canonical,
    encode(idem_keyed_digest(d, 's'), 'hex') = keyed AS keyed
FROM (VALUES ('{"n":[1.10,1e21,0.1,123456789.123456789],"é":"ÄÖ","i":"I"}'::jsonb)) v(d), pg_temp.seen;
ROLLBACK;

-- C25: the functions run in parallel workers and answer alike there
CREATE TABLE digest_parallel AS
    SELECT jsonb_build_object('id', i, 'amount', i / 100.0, 'text', 'é' || i, 'sent', now()) AS d FROM generate_series(1, 100000) i;
ANALYZE digest_parallel;
CREATE TEMP TABLE serial AS
    SELECT sum(hashtext(idem_canonical(d, '{/sent}'))::bigint) AS canonical,
        sum(hashtext(encode(idem_digest(d), 'hex'))::bigint) AS digest,
        sum(hashtext(encode(idem_keyed_digest(d, 's'), 'hex'))::bigint) AS keyed
    FROM digest_parallel;
DO $$
DECLARE
    plan text;
BEGIN
    -- force_parallel_mode until PostgreSQL 15, debug_parallel_query since 16
    PERFORM set_config(name, 'on', false) FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query');
    SET parallel_setup_cost = 0;
    SET parallel_tuple_cost = 0;
    SET min_parallel_table_scan_size = 0;
    SET max_parallel_workers_per_gather = 2;
    EXECUTE 'EXPLAIN (FORMAT json) SELECT sum(hashtext(idem_canonical(d, ''{/sent}''))::bigint),
                 sum(hashtext(encode(idem_digest(d), ''hex''))::bigint),
                 sum(hashtext(encode(idem_keyed_digest(d, ''s''), ''hex''))::bigint) FROM digest_parallel' INTO plan;
    ASSERT plan ~ '"Partial Mode": "Partial"', plan;
END $$;
SELECT sum(hashtext(idem_canonical(d, '{/sent}'))::bigint) = (SELECT canonical FROM serial) AS canonical,
    sum(hashtext(encode(idem_digest(d), 'hex'))::bigint) = (SELECT digest FROM serial) AS digest,
    sum(hashtext(encode(idem_keyed_digest(d, 's'), 'hex'))::bigint) = (SELECT keyed FROM serial) AS keyed
FROM digest_parallel;
RESET parallel_setup_cost;
RESET parallel_tuple_cost;
RESET min_parallel_table_scan_size;
RESET max_parallel_workers_per_gather;
DO $$ BEGIN
    PERFORM set_config(name, 'off', false) FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query');
END $$;
DROP TABLE digest_parallel;

-- the functions are what the planner may take them for
SELECT proname, provolatile, proparallel, proisstrict FROM pg_proc
WHERE proname IN ('idem_key', 'idem_key_parts', 'idem_downstream_key', 'idem_canonical', 'idem_digest', 'idem_keyed_digest')
ORDER BY proname COLLATE "C";
