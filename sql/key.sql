--
-- Keys: idem_key, idem_key_parts, idem_downstream_key
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

-- three parts
SELECT idem_key('tenant-7', 'charge', 'order-123');
SELECT idem_key('a:b', '50%', '%3A') AS key, idem_key('::', '%%', 'ä:€') AS more;
SELECT * FROM idem_key_parts('tenant-7:charge:order-123');
SELECT * FROM idem_key_parts(idem_key('a:b', '50%', '%3A'));

-- C85: a missing part is an error, a blank one is a part like any other
SELECT pg_temp.try($$SELECT idem_key('t1', 'charge', NULL)$$);
SELECT pg_temp.try($$SELECT idem_key('t1', NULL, '1')$$);
SELECT pg_temp.try($$SELECT idem_key(NULL, 'charge', '1')$$);
SELECT pg_temp.try($$SELECT idem_key('t1', 'charge', '')$$);
SELECT pg_temp.try($$SELECT idem_key('t1', '', '1')$$);
SELECT pg_temp.try($$SELECT idem_key('', 'charge', '1')$$);
SELECT pg_temp.try($$SELECT idem_key('t1', 'charge', '{"a":1}'::jsonb ->> 'b')$$);
SELECT pg_temp.try($$SELECT '[' || idem_key('t1', 'charge', '  ') || ']'$$);
SELECT pg_temp.try($$SELECT idem_key_parts(NULL)$$);
SELECT pg_temp.try($$SELECT idem_key_parts('')$$);

-- opaque keys: not what idem_key makes
SELECT key, p.* FROM unnest(ARRAY[
    'a', 'a:b', 'a:b:c:d', ':b:c', 'a::c', 'a:b:', '::', ':', '%',
    'a:b:c%', 'a:b:%2', 'a:b:%26', 'a:b:%3a', 'a%3:b:c', 'a:b%:c', 'a:%41:c', 'a%3A:b%25:c%3A%25']) key,
    idem_key_parts(key) p;

-- C86: keys are equal if and only if the parts are, also in arity
CREATE TEMP TABLE part AS
    WITH RECURSIVE s(part, n) AS (
        SELECT c, 1 FROM unnest(ARRAY[':', '%', '2', '5', '3', 'A']) c
        UNION ALL
        SELECT part || c, n + 1 FROM s, unnest(ARRAY[':', '%', '2', '5', '3', 'A']) c WHERE n < 2)
    SELECT part FROM s
    UNION SELECT unnest(ARRAY['%3A', '%25', '%253A', '%:', '1:a', '\', '\:', '"', ',', E'\n', '\0', '%00', ' ', 'é', '中:文']);
SELECT count(*) AS tuples, count(DISTINCT k) AS keys,
    count(*) FILTER (WHERE (p.tenant, p.operation, p.business_id) IS DISTINCT FROM (a.part, b.part, c.part)) AS wrong
FROM part a, part b, part c,
    LATERAL (SELECT idem_key(a.part, b.part, c.part) k OFFSET 0) k,
    LATERAL idem_key_parts(k) p;

-- and random ones, longer
CREATE TEMP TABLE tuple AS
    SELECT DISTINCT t[1] AS a, t[2] AS b, t[3] AS c FROM generate_series(1, 20000) n,
        LATERAL (SELECT array_agg(part) t FROM (
            SELECT string_agg(substr(E':%25A3a1\\",\n', (random() * 11)::int + 1, 1), '') AS part
            FROM generate_series(1, 3) p, generate_series(1, 1 + (random() * 6 + n * 0)::int) c GROUP BY p) s) r;
SELECT count(*) > 10000 AS enough, count(*) - count(DISTINCT idem_key(a, b, c)) AS collisions,
    count(*) FILTER (WHERE (SELECT (tenant, operation, business_id) FROM idem_key_parts(idem_key(a, b, c)))
                           IS DISTINCT FROM (a, b, c)) AS wrong
FROM tuple;

-- any text: opaque, or exactly what idem_key makes of its parts
SELECT count(*) > 1000 AS enough, count(*) FILTER (WHERE p.tenant IS NOT NULL) > 100 AS with_parts,
    count(*) FILTER (WHERE p.tenant IS NOT NULL AND idem_key(p.tenant, p.operation, p.business_id) <> key) AS wrong,
    count(*) FILTER (WHERE num_nulls(p.tenant, p.operation, p.business_id) NOT IN (0, 3)) AS partial
FROM (SELECT DISTINCT string_agg(substr(':::%25%3Aab', (random() * 10)::int + 1, 1), '') AS key
      FROM generate_series(1, 20000) n, generate_series(1, 9) GROUP BY n) k,
    idem_key_parts(key) p;

-- C89: one limit, in bytes of the finished key, whatever the text is
SELECT length(idem_key('t', 'o', repeat('x', 1020)));
SELECT pg_temp.try($$SELECT idem_key('t', 'o', repeat('x', 1021))$$);
SELECT octet_length(idem_key('t', 'o', repeat('ä', 510)));
SELECT pg_temp.try($$SELECT idem_key('t', 'o', repeat('ä', 510) || 'x')$$);
SELECT octet_length(idem_key('t', 'o', repeat(':', 340)));
SELECT pg_temp.try($$SELECT idem_key('t', 'o', repeat(':', 340) || 'x')$$);
SELECT pg_temp.try($$SELECT idem_key('t', 'o', repeat('%', 1020))$$);
SELECT pg_temp.try($$SELECT idem_key(repeat('x', 100000), 'o', '1')$$);
SELECT pg_temp.try($$SELECT idem_key(repeat('x', 1000000), repeat('y', 1000000), repeat('z', 1000000))$$);
SELECT pg_temp.try($$SELECT idem_key('t', 'o', string_agg(md5(i::text), '')) FROM generate_series(1, 84) i$$);
SELECT business_id = repeat('x', 1020) AS whole FROM idem_key_parts('t:o:' || repeat('x', 1020));
SELECT pg_temp.try($$SELECT idem_key_parts('t:o:' || repeat('x', 1021))$$);
SELECT pg_temp.try($$SELECT idem_downstream_key(repeat('x', 1025), 's')$$);
SELECT pg_temp.try($$SELECT idem_downstream_key('k', repeat('x', 257))$$);
SELECT pg_temp.try($$SELECT idem_downstream_key(repeat('k', 1024), repeat('x', 256))$$);

-- C103, C12: nothing but the parts counts
SELECT idem_key('t1', 'charge', 'order-1') <> idem_key('t1', 'charge', 'order-2') AS two_orders;
CREATE TEMP TABLE seen AS
    SELECT idem_key('t:1', 'charge', 'é') AS key, idem_downstream_key('t1:charge:é', 'mail') AS downstream;
BEGIN;
SET LOCAL TimeZone = 'Asia/Tokyo';
SET LOCAL DateStyle = 'SQL, DMY';
SET LOCAL IntervalStyle = 'iso_8601';
SET LOCAL bytea_output = 'escape';
SET LOCAL search_path = pg_catalog, public;
SET LOCAL client_encoding = 'UTF8';
SELECT pg_sleep(0.01) IS NULL AS later;
SELECT key = idem_key('t:1', 'charge', 'é') AS same_key,
    downstream = idem_downstream_key('t1:charge:é', 'mail') AS same_downstream FROM pg_temp.seen;
ROLLBACK;

-- Downstream keys: the same for every attempt, one per key and step
SELECT idem_downstream_key('tenant-7:charge:order-123', 'card');
SELECT pg_temp.try($$SELECT idem_downstream_key(NULL, 's')$$);
SELECT pg_temp.try($$SELECT idem_downstream_key('k', NULL)$$);
SELECT pg_temp.try($$SELECT idem_downstream_key('', 's')$$);
SELECT pg_temp.try($$SELECT idem_downstream_key('k', '')$$);
SELECT idem_downstream_key('a', 'bc') <> idem_downstream_key('ab', 'c') AS framed;

-- the same, put together by SQL, with version 8 and variant 10 (RFC 9562)
SELECT count(*), count(*) FILTER (WHERE uuid::uuid <> idem_downstream_key(key, step)) AS wrong
FROM (VALUES ('k', 's'), ('a', 'bc'), ('ab', 'c'), ('tenant-7:charge:order-123', 'card'), ('é€', '中文'), ('k', repeat('x', 256))) v(key, step),
    LATERAL (SELECT sha256(int4send(octet_length(convert_to(key, 'UTF8'))) || convert_to(key, 'UTF8') ||
                           int4send(octet_length(convert_to(step, 'UTF8'))) || convert_to(step, 'UTF8')) AS h) h,
    LATERAL (SELECT encode(set_byte(set_byte(substr(h, 1, 16), 6, get_byte(h, 6) & 15 | 128), 8, get_byte(h, 8) & 63 | 128), 'hex') AS uuid) u;
SELECT count(DISTINCT idem_downstream_key(a.part || b.part, c.part)) = count(DISTINCT (a.part || b.part, c.part)) AS injective,
    bool_and(substr(idem_downstream_key(a.part || b.part, c.part)::text, 15, 1) = '8') AS version,
    bool_and(substr(idem_downstream_key(a.part || b.part, c.part)::text, 20, 1) IN ('8', '9', 'a', 'b')) AS variant
FROM part a, part b, part c WHERE length(a.part) + length(b.part) + length(c.part) < 5;

-- C25: the functions run in parallel workers and answer alike there
CREATE TABLE key_parallel AS SELECT 'k:' || i AS part FROM generate_series(1, 20000) i;
ANALYZE key_parallel;
CREATE TEMP TABLE serial AS
    SELECT sum(hashtext(idem_key(part, 'op', '%'))::bigint) AS keys,
        sum(hashtext((idem_key_parts('t:' || part)).operation)::bigint) AS parts,
        sum(uuid_hash(idem_downstream_key(part, 'step'))::bigint) AS downstream
    FROM key_parallel;
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
    EXECUTE 'EXPLAIN (FORMAT json) SELECT sum(hashtext(idem_key(part, ''op'', ''%''))::bigint),
                 sum(uuid_hash(idem_downstream_key(part, ''step''))::bigint) FROM key_parallel' INTO plan;
    ASSERT plan ~ '"Partial Mode": "Partial"', plan;
END $$;
SELECT sum(hashtext(idem_key(part, 'op', '%'))::bigint) = (SELECT keys FROM serial) AS keys,
    sum(hashtext((idem_key_parts('t:' || part)).operation)::bigint) = (SELECT parts FROM serial) AS parts,
    sum(uuid_hash(idem_downstream_key(part, 'step'))::bigint) = (SELECT downstream FROM serial) AS downstream
FROM key_parallel;
RESET parallel_setup_cost;
RESET parallel_tuple_cost;
RESET min_parallel_table_scan_size;
RESET max_parallel_workers_per_gather;
DO $$ BEGIN
    PERFORM set_config(name, 'off', false) FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query');
END $$;
DROP TABLE key_parallel;
