-- What a handler of idem_execute may do, and where idem_execute may be called from.
\set VERBOSITY terse
\set T1 '''00000000-0000-4000-8000-000000000001'''
SET client_min_messages = warning;
CREATE SCHEMA ha;
SET search_path = public, ha;
CREATE TABLE ha.business (key text, note text);
CREATE FUNCTION ha.run(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    r text;
BEGIN
    EXECUTE request->>'run' INTO r;
    RETURN to_jsonb(r);
END $$;
CREATE FUNCTION ha.x(key text, query text) RETURNS text LANGUAGE sql AS $$
    SELECT answer(c) FROM idem_execute($1, jsonb_build_object('run', $2), 'ha.run(text,jsonb,integer)', 'three') c
$$;
-- A record whose next execution is its second attempt.
CREATE FUNCTION ha.due(key text, request jsonb, operation text DEFAULT 'three') RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM idem_claim(key, request, operation, token => '00000000-0000-4000-8000-000000000001');
    PERFORM idem_fail(key, '00000000-0000-4000-8000-000000000001', 'retryable', retry_after => '0');
END $$;

-- built-in functions in C; what is not JSON is a failure of the handler
SELECT answer(c) FROM idem_execute('c1', '{"b": 1, "a": [true]}', 'jsonb_pretty(jsonb)') c;
SELECT c.outcome, c.error_code FROM idem_execute('c2', '{"b": 1}', 'jsonb_typeof(jsonb)') c;
SELECT answer(c) FROM idem_execute('c3', '[1]', 'jsonb_array_length(jsonb)') c;
-- requests of every shape
CREATE FUNCTION ha.echo(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT jsonb_build_array($1) $$;
SELECT r, answer(c) FROM unnest(ARRAY['1', 'null', '"x"', '[]', '{}', '[[1.50, null]]', NULL]::jsonb[]) WITH ORDINALITY u (r, n),
    idem_execute('shape ' || n, r, 'ha.echo(jsonb)') c ORDER BY n;
-- domains, OUT arguments; not: rows, several OUT arguments, defaults, polymorphic
CREATE DOMAIN ha.doc AS jsonb CHECK (VALUE ? 'id');
CREATE FUNCTION ha.h_domain(jsonb) RETURNS ha.doc LANGUAGE sql AS $$ SELECT $1::ha.doc $$;
CREATE FUNCTION ha.h_out(request jsonb, OUT answer jsonb) LANGUAGE sql AS $$ SELECT $1 $$;
CREATE FUNCTION ha.h_outs(request jsonb, OUT a jsonb, OUT b jsonb) LANGUAGE sql AS $$ SELECT $1, $1 $$;
CREATE FUNCTION ha.h_default(request jsonb, n integer DEFAULT 1) RETURNS jsonb LANGUAGE sql AS $$ SELECT $1 $$;
CREATE FUNCTION ha.h_any(anyelement) RETURNS anyelement LANGUAGE sql AS $$ SELECT $1 $$;
SELECT p.oid::regprocedure, tried(format('SELECT answer(c) FROM idem_execute(%L, %L, %s) c', 'result ' || proname, '{"id": 1}', p.oid))
    FROM pg_proc p WHERE pronamespace = 'ha'::regnamespace AND proname LIKE 'h\_%' ORDER BY proname COLLATE "C";
SELECT c.outcome, c.error_code FROM idem_execute('domain', '{}', 'ha.h_domain(jsonb)') c;
-- a function that says it does not write may not
CREATE FUNCTION ha.stable(jsonb) RETURNS void STABLE LANGUAGE sql AS $$ INSERT INTO ha.business VALUES ('stable', '') $$;
SELECT c.outcome, c.error_code FROM idem_execute('stable', '1', 'ha.stable(jsonb)') c;

-- exception blocks: what they undo is undone, what stays stays
CREATE FUNCTION ha.careful(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    n integer := 0;
BEGIN
    INSERT INTO ha.business VALUES (key, 'kept');
    FOR i IN 1 .. 20 LOOP
        BEGIN
            INSERT INTO ha.business VALUES (key, 'undone');
            PERFORM 1 / (i % 2);
            n := n + 1;
            RAISE EXCEPTION 'after all';
        EXCEPTION WHEN OTHERS THEN NULL;
        END;
    END LOOP;
    RETURN to_jsonb(n);
END $$;
SELECT answer(c) FROM idem_execute('careful', '1', 'ha.careful(text,jsonb,integer)') c;
SELECT ha.due('careful 2', '1');
SELECT answer(c) FROM idem_execute('careful 2', '1', 'ha.careful(text,jsonb,integer)') c;
SELECT * FROM ha.business;

-- it runs as the caller; a definer's rights are the handler's, the record is the caller's
CREATE ROLE regress_ha_a;
CREATE ROLE regress_ha_b;
SELECT idem_grant('regress_ha_a', 'client'), idem_grant('regress_ha_b', 'client');
GRANT USAGE ON SCHEMA ha TO regress_ha_a, regress_ha_b;
CREATE FUNCTION ha.definer(key text, request jsonb, attempt integer) RETURNS jsonb SECURITY DEFINER LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO ha.business VALUES (key, attempt);
    RETURN to_jsonb(current_user = session_user);
END $$;
SET ROLE regress_ha_a;
SELECT answer(c) FROM idem_execute('definer', '1', 'ha.definer(text,jsonb,integer)') c;
SELECT ha.due('definer 2', '1');
SELECT answer(c) FROM idem_execute('definer 2', '1', 'ha.definer(text,jsonb,integer)') c;
SELECT current_user;
SELECT outcome FROM idem_execute('definer fails', '0', 'ha.echo(jsonb)');
-- another role's key: refused before the handler runs, whatever its state
SET ROLE regress_ha_b;
SELECT k, tried(format('SELECT idem_execute(%L, %L, %L)', k, '1', 'ha.definer(text,jsonb,integer)')) FROM unnest('{definer,definer 2,definer fails}'::text[]) k;
SELECT k, tried(format('SELECT idem_once(%L, %L)', k, '1')) FROM unnest('{definer,definer 2,definer fails}'::text[]) k;
SELECT idem_execute('definer', '1', 'ha.definer(text,jsonb,integer)');
RESET ROLE;
SELECT idempotency_key, owner FROM idem_record WHERE idempotency_key LIKE 'definer%' ORDER BY 1;
SELECT * FROM ha.business WHERE key LIKE 'definer%' ORDER BY key COLLATE "C";

-- settings: kept after success as by any function, undone with a failure; none disturbs what is recorded
SET work_mem = '2222kB';
BEGIN;
SELECT ha.x('set 1', $$SELECT set_config('work_mem', '1111kB', true)$$);
SHOW work_mem;
COMMIT;
SHOW work_mem;
SELECT ha.x('set 2', $$SELECT set_config('work_mem', '1111kB', false), 1/0$$);
SHOW work_mem;
SELECT ha.x('set 3', $$SELECT set_config('search_path', 'pg_temp', true)$$);
SELECT ha.due('set 4', jsonb_build_object('run', $$SELECT set_config('search_path', 'pg_temp', true)$$));
SELECT ha.x('set 4', $$SELECT set_config('search_path', 'pg_temp', true)$$);
SELECT ha.x('set 5', $$SELECT set_config('default_table_access_method', 'none', true)$$);
RESET work_mem;
-- DDL, temporary tables, cursors, ANALYZE; not what cannot be in a transaction
CREATE FUNCTION ha.ddl(request jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN EXECUTE request->>0; END $$;
SELECT n, c.outcome, c.error_code FROM unnest(ARRAY['CREATE TABLE ha.made (n integer)', 'CREATE TEMP TABLE made ON COMMIT DROP AS SELECT 1', 'ANALYZE ha.business',
    'TRUNCATE ha.made', 'CREATE TABLE ha.made (n integer)', 'DROP TABLE ha.made', 'LOCK ha.business', 'VACUUM', 'CREATE DATABASE no', 'SAVEPOINT s', 'ROLLBACK']) WITH ORDINALITY u (q, n),
    idem_execute('ddl ' || n, jsonb_build_array(q), 'ha.ddl(jsonb)') c ORDER BY n;
SELECT to_regclass('ha.made'), to_regclass('pg_temp.made');
CREATE FUNCTION ha.cursors(jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    c CURSOR FOR SELECT generate_series(1, 3);
    v integer;
BEGIN
    OPEN c;
    FETCH c INTO v;
    FETCH c INTO v;
    RETURN to_jsonb(v);
END $$;
SELECT answer(c) FROM idem_execute('cursor', '1', 'ha.cursors(jsonb)') c;
SELECT count(*) FROM pg_cursors;

-- replaced and dropped in the same session
CREATE FUNCTION ha.changing(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
PREPARE again (text) AS SELECT outcome, result_json FROM idem_execute($1, '1', 'ha.changing(jsonb)');
EXECUTE again('v1');
CREATE OR REPLACE FUNCTION ha.changing(jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RETURN '2'; END $$;
EXECUTE again('v2');
EXECUTE again('v1');
DROP FUNCTION ha.changing(jsonb);
\set VERBOSITY sqlstate
EXECUTE again('v3');
EXECUTE again('v1');
\set VERBOSITY terse
CREATE FUNCTION ha.changing(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '3'::jsonb $$;
SELECT outcome, result_json FROM idem_execute('v3', '1', 'ha.changing(jsonb)');
DEALLOCATE again;
-- one that drops itself
CREATE FUNCTION ha.last_time(jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN DROP FUNCTION ha.last_time(jsonb); RETURN '1'; END $$;
SELECT answer(c) FROM idem_execute('last', '1', 'ha.last_time(jsonb)') c;
-- a policy that the handler changes: of a first attempt, what stood when it began holds
BEGIN;
SELECT ha.x('policy', $$UPDATE idem_policy SET max_result_size = 5 WHERE operation = 'three' RETURNING repeat('x', 100)$$);
SELECT ha.x('policy 2', $$SELECT repeat('x', 100)$$);
ROLLBACK;

-- what is kept of the request, and what the operation is
INSERT INTO idem_policy (operation, store_request, backoff_base, jitter) VALUES ('keeps', true, '1 s', 'none');
CREATE FUNCTION ha.refuses(jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION USING ERRCODE = $1->>'code'; END $$;
SELECT k, outcome, error_code FROM unnest('{t:keeps:1,t:keeps:2,t:other:3}'::text[]) k, idem_execute(k, '{"code": "IDR00"}', 'ha.refuses(jsonb)');
SELECT outcome FROM idem_execute('opaque', '{"code": "IDR00"}', 'ha.refuses(jsonb)', 'keeps');
SELECT outcome FROM idem_execute('t:keeps:4', '{"code": "IDP00"}', 'ha.refuses(jsonb)');
SELECT outcome FROM idem_execute('t:keeps:5', '{"code": "IDP00"}', 'ha.echo(jsonb)');
SELECT idempotency_key, operation, status, request_json FROM idem_record WHERE idempotency_key ~ 'keeps|other|opaque' ORDER BY 1;
SELECT outcome FROM idem_execute('opaque', '{"code": "IDR00"}', 'ha.refuses(jsonb)', 'three');
-- an execution can be continued by hand, and the other way round
SET idempotency.clock_offset = '40 s';
SELECT key, request_json, outcome, attempts, previous, error_code FROM idem_claim_due('keeps', 10) ORDER BY key COLLATE "C";
RESET idempotency.clock_offset;
SELECT idem_retry('t:keeps:4', 'test');
SELECT answer(c) FROM idem_execute('t:keeps:4', '{"code": "IDP00"}', 'ha.echo(jsonb)') c;

-- wait
SELECT outcome FROM idem_claim('held', '1', token => :T1);
SELECT outcome, attempts FROM idem_execute('held', '1', 'ha.echo(jsonb)', wait => '20 ms');
SELECT outcome, attempts FROM idem_execute('held', '1', 'ha.echo(jsonb)', wait => NULL);
SELECT outcome FROM idem_execute('held', '2', 'ha.echo(jsonb)', wait => '1 h');
SELECT status FROM idem_fail('held', :T1, 'retryable', retry_after => '30 ms');
SELECT outcome, attempts FROM idem_execute('held', '1', 'ha.echo(jsonb)', wait => '1 min');
SELECT outcome, attempts FROM idem_execute('held', '1', 'ha.echo(jsonb)', wait => '1 min');
SELECT outcome, error_code FROM idem_execute('w:three:1', '{"code": "IDR00"}', 'ha.refuses(jsonb)');
SELECT outcome, attempts FROM idem_execute('w:three:1', '{"code": "IDR00"}', 'ha.refuses(jsonb)', wait => '10 ms');
\set VERBOSITY sqlstate
SELECT idem_execute('held', '1', 'ha.echo(jsonb)', wait => '1 month');
SELECT idem_execute('held', '1', 'ha.echo(jsonb)', operation => '');
\set VERBOSITY terse

-- large requests and results
SELECT outcome, octet_length(result_json::text) FROM idem_execute('large', to_jsonb(repeat('x', 500000)), 'ha.echo(jsonb)');
SELECT outcome, octet_length(result_json::text) FROM idem_execute('large', to_jsonb(repeat('x', 500000)), 'ha.echo(jsonb)');
SELECT outcome, error_code FROM idem_execute('larger', to_jsonb(repeat('x', 1048577)), 'ha.echo(jsonb)');

-- called once however it is written (C22, C23)
CREATE FUNCTION ha.count(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN INSERT INTO ha.business VALUES (key, 'counted'); RETURN to_jsonb(attempt); END $$;
DELETE FROM ha.business;
SELECT (r).outcome, (r).attempts, (r).result_json FROM (SELECT (idem_execute('e1', '1', 'ha.count(text,jsonb,integer)')) AS r OFFSET 0) s;
CREATE TABLE ha.spread AS SELECT (idem_execute('e2', '1', 'ha.count(text,jsonb,integer)')).*;
SELECT outcome, attempts, result_json, error_code, owner_token FROM ha.spread;
EXPLAIN (COSTS OFF) SELECT idem_execute('e3', '1', 'ha.count(text,jsonb,integer)');
WITH c AS (SELECT idem_execute('e4', '1', 'ha.count(text,jsonb,integer)')) SELECT 1 AS unreferenced;
SELECT count(*) FROM (SELECT c.outcome FROM generate_series(1, 10) n, idem_execute('e5 ' || n, '1', 'ha.count(text,jsonb,integer)') c LIMIT 3) s;
SELECT count(*) FROM (SELECT n FROM generate_series(1, 10) n WHERE (idem_execute('e6 ' || n, '1', 'ha.count(text,jsonb,integer)')).outcome = 'executed') s;
SELECT left(key, 2) AS k, count(*), count(DISTINCT key) FROM ha.business GROUP BY 1 ORDER BY 1;
SELECT p.provolatile, p.proparallel, p.proisstrict, p.prosecdef, p.proname FROM pg_proc p
    WHERE proname IN ('idem_execute', 'idem_once', 'idem_claim_many', 'idem_complete_many', 'idem_once_many') ORDER BY 5;

-- called from triggers, procedures that commit, exception blocks, a trigger of what the handler writes
DELETE FROM ha.business;
CREATE TABLE ha.inbox (id integer, body jsonb);
CREATE FUNCTION ha.take() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM idem_execute('message ' || NEW.id, NEW.body, 'ha.count(text,jsonb,integer)');
    RETURN NEW;
END $$;
CREATE TRIGGER take AFTER INSERT ON ha.inbox FOR EACH ROW EXECUTE FUNCTION ha.take();
INSERT INTO ha.inbox VALUES (1, '1'), (2, '2'), (1, '1');
CREATE FUNCTION ha.noted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF idem_once('noted ' || NEW.key) THEN INSERT INTO ha.inbox VALUES (100 + length(NEW.key), '1'); END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER noted AFTER INSERT ON ha.business FOR EACH ROW WHEN (NEW.key = 'outer') EXECUTE FUNCTION ha.noted();
SELECT outcome FROM idem_execute('outer', '1', 'ha.count(text,jsonb,integer)');
DO $$
BEGIN
    FOR i IN 1 .. 6 LOOP
        PERFORM idem_execute('do ' || i % 3, '1', 'ha.count(text,jsonb,integer)');
        IF i % 2 = 0 THEN COMMIT; ELSE ROLLBACK; END IF;
    END LOOP;
    BEGIN
        PERFORM idem_execute('block', '1', 'ha.count(text,jsonb,integer)');
        RAISE EXCEPTION 'undo';
    EXCEPTION WHEN OTHERS THEN
        PERFORM idem_execute('block', '2', 'ha.count(text,jsonb,integer)');
    END;
END $$;
SELECT key FROM ha.business ORDER BY key COLLATE "C";
SELECT idempotency_key, status FROM idem_record WHERE idempotency_key ~ '^(message|outer|noted|do|block) ' ORDER BY 1;
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';
SELECT * FROM idem_check();

RESET search_path;
DELETE FROM idem_record;
DELETE FROM idem_policy WHERE operation = 'keeps';
DROP SCHEMA ha CASCADE;
DROP OWNED BY regress_ha_a, regress_ha_b;
DROP ROLE regress_ha_a, regress_ha_b;
