--
-- idem_execute
--
\set VERBOSITY sqlstate
\set T1 '''00000000-0000-4000-8000-000000000001'''
SET client_min_messages = warning;
CREATE SCHEMA ex;
SET search_path = public, ex;

-- The business table, and locks that this session has kept.
CREATE TABLE ex.business (key text, attempt integer);
CREATE FUNCTION ex.locks() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'
$$;

--
-- Handlers.
--
CREATE FUNCTION ex.h_sql(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT jsonb_build_object('got', $1) $$;
CREATE FUNCTION ex.h_plpgsql(jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RETURN jsonb_build_object('pl', $1); END $$;
CREATE FUNCTION ex.h_three(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ex.business VALUES (key, attempt);
    RETURN jsonb_build_object('key', key, 'request', request, 'attempt', attempt);
END $$;
CREATE FUNCTION ex.h_three_sql(text, jsonb, integer) RETURNS jsonb LANGUAGE sql AS $$ SELECT jsonb_build_array($1, $2, $3) $$;
CREATE FUNCTION ex.h_void(jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN INSERT INTO ex.business VALUES ('void', 0); END $$;
CREATE FUNCTION ex.h_void_sql(jsonb) RETURNS void LANGUAGE sql AS $$ INSERT INTO ex.business VALUES ('void sql', 0) $$;
CREATE FUNCTION ex.h_null(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT NULL::jsonb $$;
CREATE FUNCTION ex.h_json_null(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT 'null'::jsonb $$;
CREATE FUNCTION ex.h_json(jsonb) RETURNS json LANGUAGE sql AS $$ SELECT '{"b": 1, "a": 2, "b": 3}'::json $$;
CREATE FUNCTION ex.h_text(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT '{"from": "text"}' $$;
CREATE FUNCTION ex.h_not_json(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'no json' $$;
CREATE FUNCTION ex.h_json_zero(jsonb) RETURNS json LANGUAGE sql AS $$ SELECT '"\u0000"'::json $$;
CREATE FUNCTION ex.h_isnull(jsonb) RETURNS jsonb LANGUAGE sql CALLED ON NULL INPUT AS $$ SELECT to_jsonb($1 IS NULL) $$;
CREATE FUNCTION ex.h_strict(jsonb) RETURNS jsonb LANGUAGE sql STRICT AS $$ SELECT $1 $$;
SELECT h, answer(c), stored('h ' || h)
    FROM unnest(ARRAY['h_sql', 'h_plpgsql', 'jsonb_pretty', 'h_void', 'h_void_sql', 'h_null', 'h_json_null', 'h_json', 'h_text', 'h_not_json', 'h_json_zero', 'h_isnull', 'h_strict']) WITH ORDINALITY u (h, n),
         idem_execute('h ' || h, '{"a": null, "b": 1}',
                      (SELECT p.oid FROM pg_proc p WHERE p.proname = h AND p.proargtypes[0] = 'jsonb'::regtype LIMIT 1)) c
    ORDER BY n;
SELECT answer(c) FROM idem_execute('three args', '[1]', 'ex.h_three(text,jsonb,integer)') c;
SELECT answer(c) FROM idem_execute('three sql', '[1]', 'ex.h_three_sql(text,jsonb,integer)') c;
SELECT answer(c) FROM idem_execute('null request', NULL, 'ex.h_isnull(jsonb)') c;
SELECT * FROM ex.business ORDER BY key;
-- again: each is a replay of what was stored, no handler runs
SELECT h, c.outcome, c.result_json, c.error_code
    FROM unnest(ARRAY['h_sql', 'h_plpgsql', 'h_void', 'h_null', 'h_json_null', 'h_json', 'h_text', 'h_not_json']) WITH ORDINALITY u (h, n),
         idem_execute('h ' || h, '{"a": null, "b": 1}', ('ex.' || h || '(jsonb)')::regprocedure) c
    ORDER BY n;
SELECT answer(c) FROM idem_execute('three args', '[1]', 'ex.h_three(text,jsonb,integer)') c;
SELECT * FROM ex.business ORDER BY key;
SELECT c.result_json IS NULL AS sql_null FROM idem_execute('h h_null', '{"a": null, "b": 1}', 'ex.h_null(jsonb)') c;
SELECT ex.locks();

--
-- Refused before anything is claimed.
--
CREATE FUNCTION ex.r_int(jsonb) RETURNS integer LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION ex.r_record(jsonb) RETURNS record LANGUAGE sql AS $$ SELECT 1, 2 $$;
CREATE FUNCTION ex.r_trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE FUNCTION ex.r_none() RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE FUNCTION ex.r_json(json) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE FUNCTION ex.r_two(text, jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE FUNCTION ex.r_order(jsonb, text, integer) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE FUNCTION ex.r_big(text, jsonb, bigint) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE FUNCTION ex.r_set(jsonb) RETURNS SETOF jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE FUNCTION ex.r_variadic(VARIADIC jsonb[]) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE PROCEDURE ex.r_procedure(jsonb) LANGUAGE sql AS $$ SELECT 1 $$;
CREATE AGGREGATE ex.r_aggregate(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb);
SELECT p.oid::regprocedure, tried(format('SELECT idem_execute(%L, %L, %s)', 'refused', '1', p.oid))
    FROM pg_proc p WHERE pronamespace = 'ex'::regnamespace AND proname LIKE 'r\_%' ORDER BY proname COLLATE "C";
-- dropped, none, NULL
CREATE FUNCTION ex.dropped(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT $1 $$;
SELECT 'ex.dropped(jsonb)'::regprocedure::oid AS dropped \gset
DROP FUNCTION ex.dropped(jsonb);
SELECT idem_execute('refused', '1', :dropped);
SELECT idem_execute('refused', '1', 0);
SELECT idem_execute('refused', '1', NULL);
SELECT idem_execute('refused', '1', 'ex.dropped(jsonb)');
-- a strict one with no request
SELECT idem_execute('refused', NULL, 'ex.h_strict(jsonb)');
SELECT idem_execute('refused', NULL, 'jsonb_pretty(jsonb)');
-- key, wait
SELECT idem_execute(NULL, '1', 'ex.h_sql(jsonb)');
SELECT idem_execute('', '1', 'ex.h_sql(jsonb)');
SELECT idem_execute('refused', '1', 'ex.h_sql(jsonb)', wait => '-1 s');
SELECT stored('refused'), ex.locks();
-- a finished key does not excuse a handler that is not one
SELECT idem_execute('h h_sql', '{"a": null, "b": 1}', 'ex.r_int(jsonb)');
-- the caller needs EXECUTE, and the handler runs as the caller
CREATE ROLE regress_ex_caller;
SELECT idem_grant('regress_ex_caller', 'client');
GRANT USAGE ON SCHEMA ex TO regress_ex_caller;
CREATE FUNCTION ex.h_who(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(current_user::text) $$;
CREATE FUNCTION ex.h_who_definer(jsonb) RETURNS jsonb LANGUAGE sql SECURITY DEFINER AS $$ SELECT to_jsonb(current_user::text = session_user::text) $$;
CREATE FUNCTION ex.h_forbidden(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT $1 $$;
REVOKE ALL ON FUNCTION ex.h_forbidden(jsonb) FROM PUBLIC;
SET ROLE regress_ex_caller;
SELECT idem_execute('role forbidden', '1', 'ex.h_forbidden(jsonb)');
SELECT outcome, result_json FROM idem_execute('role who', '1', 'ex.h_who(jsonb)');
SELECT outcome, result_json FROM idem_execute('role definer', '1', 'ex.h_who_definer(jsonb)');
-- what the caller may not do, the handler may not: permanent (42501)
SELECT answer(c) FROM idem_execute('role business', '1', 'ex.h_three(text,jsonb,integer)') c;
RESET ROLE;
SELECT stored('role forbidden');
SELECT stored('role business');

--
-- Every state.
--
SELECT make_states('x', '{"amount": 1}', :T1);
SET idempotency.clock_offset = '100 s';
DELETE FROM ex.business;
SELECT answer(c) FROM idem_execute('x_absent', '{"amount": 1}', 'ex.h_three(text,jsonb,integer)') c;
SELECT state, answer(c) FROM states, idem_execute('x_' || state, '{"amount": 1}', 'ex.h_three(text,jsonb,integer)') c ORDER BY ord;
SELECT state, stored('x_' || state) FROM states ORDER BY ord;
SELECT state, answer(c) FROM states, idem_execute('x_' || state, '{"amount": 1}', 'ex.h_three(text,jsonb,integer)') c ORDER BY ord;
SELECT * FROM ex.business ORDER BY key;
-- another request, another operation: conflict, and nothing runs
SELECT state, c.outcome, c.attempts FROM states, idem_execute('x_' || state, '{"amount": 2}', 'ex.h_three(text,jsonb,integer)') c ORDER BY ord;
SELECT outcome FROM idem_execute('x_succeeded', '{"amount": 1}', 'ex.h_three(text,jsonb,integer)', 'doubtful');
SELECT outcome FROM idem_execute('x_succeeded', '{"amount": 1}', 'ex.h_three(text,jsonb,integer)', 'three');
SELECT count(*) FROM ex.business;
SELECT ex.locks();
RESET idempotency.clock_offset;

--
-- Errors of the handler.
--
CREATE FUNCTION ex.h_raise(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ex.business VALUES (key, attempt);
    IF attempt <= coalesce((request->>'until')::integer, 1000) THEN
        RAISE EXCEPTION USING ERRCODE = request->>'code', MESSAGE = 'as told by attempt ' || attempt;
    END IF;
    RETURN to_jsonb(attempt);
END $$;
DELETE FROM ex.business;
SELECT code, answer(c), stored('e ' || code)
    FROM unnest(ARRAY['IDR00', 'IDP00', 'IDU00', '08000', '08006', '53200', '53100', '55P03', '55006', '58030', '58000',
                      '22012', '23505', '42P01', '23514', 'P0001', '25006', '28000', 'F0000', 'ID004', 'IDR01', '22023', 'ABCDE']) WITH ORDINALITY u (code, n),
         idem_execute('e ' || code, jsonb_build_object('code', code), 'ex.h_raise(text,jsonb,integer)', 'three') c
    ORDER BY n;
-- these pass through, and nothing is recorded
SELECT code, tried(format('SELECT idem_execute(%L, %L, %L, %L)', 'p ' || code, jsonb_build_object('code', code), 'ex.h_raise(text,jsonb,integer)', 'three')) AS raised,
       stored('p ' || code)
    FROM unnest(ARRAY['40001', '40P01', '40000', '57P01', '57000', 'XX000', 'XX001', 'ID001', 'ID002', 'ID003']) code;
SELECT idem_execute('p alone', '{"code": "40001"}', 'ex.h_raise(text,jsonb,integer)', 'three');
SELECT idem_execute('p alone', '{"code": "57014"}', 'ex.h_raise(text,jsonb,integer)', 'three');
SELECT stored('p alone'), ex.locks();
-- of what they wrote nothing is there
SELECT count(*) FROM ex.business;
-- lists of the policy come before the classes, IDR00 and its like before the lists; what passes through does so all the same
INSERT INTO idem_policy (operation, max_attempts, backoff_base, jitter, retryable_codes, permanent_codes, unknown_codes)
    VALUES ('lists', 3, '1 s', 'none', '{23505,22012}', '{55P03,08006}', '{58030,P0001}');
SELECT code, answer(c) FROM unnest(ARRAY['23505', '22012', '55P03', '08006', '58030', 'P0001', '53200', '23514', 'IDR00', 'IDP00', 'IDU00']) WITH ORDINALITY u (code, n),
         idem_execute('l ' || code, jsonb_build_object('code', code), 'ex.h_raise(text,jsonb,integer)', 'lists') c
    ORDER BY n;
SELECT tried(format('SELECT idem_execute(%L, %L, %L, %L)', 'l 40001', '{"code": "40001"}', 'ex.h_raise(text,jsonb,integer)', 'lists'));
-- a long message is cut
CREATE FUNCTION ex.h_long(jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '%', repeat(chr(8364), 5000); END $$;
SELECT outcome, octet_length(error_message), error_code FROM idem_execute('long', '1', 'ex.h_long(jsonb)');

-- the record survives the handler's rollback, and is lost only with the caller's own
BEGIN;
INSERT INTO ex.business VALUES ('of the caller', 0);
SELECT outcome, error_code FROM idem_execute('kept', '{"code": "IDP00"}', 'ex.h_raise(text,jsonb,integer)');
SELECT key FROM ex.business;
COMMIT;
SELECT key FROM ex.business;
SELECT stored('kept');
BEGIN;
SELECT outcome, error_code FROM idem_execute('lost', '{"code": "IDP00"}', 'ex.h_raise(text,jsonb,integer)');
SELECT outcome, result_json FROM idem_execute('lost too', '1', 'ex.h_three(text,jsonb,integer)');
ROLLBACK;
SELECT stored('lost'), stored('lost too');
SELECT key FROM ex.business;

-- attempts: 1, 2, 3, with the argument to tell them apart
DELETE FROM ex.business;
SELECT answer(c) FROM idem_execute('again', '{"code": "IDR00", "until": 2}', 'ex.h_raise(text,jsonb,integer)', 'three') c;
SELECT answer(c) FROM idem_execute('again', '{"code": "IDR00", "until": 2}', 'ex.h_raise(text,jsonb,integer)', 'three') c;
SET idempotency.clock_offset = '40 s';
SELECT answer(c) FROM idem_execute('again', '{"code": "IDR00", "until": 2}', 'ex.h_raise(text,jsonb,integer)', 'three') c;
SET idempotency.clock_offset = '80 s';
SELECT answer(c) FROM idem_execute('again', '{"code": "IDR00", "until": 2}', 'ex.h_raise(text,jsonb,integer)', 'three') c;
SELECT answer(c) FROM idem_execute('again', '{"code": "IDR00", "until": 2}', 'ex.h_raise(text,jsonb,integer)', 'three') c;
SELECT stored('again');
SELECT * FROM ex.business;
RESET idempotency.clock_offset;
-- exhausted at the last attempt
SELECT answer(c) FROM idem_execute('spent', '{"code": "IDR00"}', 'ex.h_raise(text,jsonb,integer)', 'three') c;
SET idempotency.clock_offset = '40 s';
SELECT answer(c) FROM idem_execute('spent', '{"code": "IDR00"}', 'ex.h_raise(text,jsonb,integer)', 'three') c;
SET idempotency.clock_offset = '80 s';
SELECT answer(c) FROM idem_execute('spent', '{"code": "IDR00"}', 'ex.h_raise(text,jsonb,integer)', 'three') c;
SELECT answer(c) FROM idem_execute('spent', '{"code": "IDR00"}', 'ex.h_raise(text,jsonb,integer)', 'three') c;
SELECT stored('spent');
RESET idempotency.clock_offset;
SELECT answer(c) FROM idem_execute('spent at once', '{"code": "IDR00"}', 'ex.h_raise(text,jsonb,integer)', 'single') c;
SELECT stored('spent at once');
-- a later attempt that passes through leaves the record as it was
SELECT answer(c) FROM idem_execute('passing', '{"code": "IDR00"}', 'ex.h_raise(text,jsonb,integer)', 'three') c;
SET idempotency.clock_offset = '40 s';
CREATE FUNCTION ex.h_serialize(jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION SQLSTATE '40001'; END $$;
SELECT idem_execute('passing', '{"code": "IDR00"}', 'ex.h_serialize(jsonb)', 'three');
SELECT stored('passing');
RESET idempotency.clock_offset;

-- a result over the limit of the policy: as an error of the handler
DELETE FROM ex.business;
INSERT INTO idem_policy (operation, max_result_size) VALUES ('tight', 100);
CREATE FUNCTION ex.h_size(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN INSERT INTO ex.business VALUES (key, attempt); RETURN to_jsonb(repeat('x', request::text::integer)); END $$;
SELECT n, c.outcome, c.error_code, c.error_message IS NOT NULL AS message, octet_length(c.result_json::text)
    FROM unnest(ARRAY[10, 70, 101, 1000]) n, idem_execute('size ' || n, to_jsonb(n), 'ex.h_size(text,jsonb,integer)', 'tight') c;
SELECT * FROM ex.business;
SELECT ex.locks();

--
-- Nested calls.
--
DELETE FROM ex.business;
CREATE FUNCTION ex.h_outer(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    r text;
BEGIN
    INSERT INTO ex.business VALUES (key, attempt);
    EXECUTE request->>'query' INTO r;
    RETURN to_jsonb(r);
END $$;
CREATE FUNCTION ex.nested(key text, query text) RETURNS text LANGUAGE sql AS $$
    SELECT answer(c) FROM idem_execute($1, jsonb_build_object('query', $2), 'ex.h_outer(text,jsonb,integer)', 'three') c
$$;
SELECT ex.nested('n1', $$SELECT answer(c) FROM idem_execute('n1 inner', '1', 'ex.h_three(text,jsonb,integer)') c$$);
SELECT ex.nested('n2', $$SELECT ex.nested('n2 b', 'SELECT ex.nested(''n2 c'', ''SELECT 1'')')$$);
-- the same key: in progress
SELECT ex.nested('n3', $$SELECT answer(c) FROM idem_execute('n3', '1', 'ex.h_three(text,jsonb,integer)') c$$);
SELECT ex.nested('n4', $$SELECT answer(c) FROM idem_claim('n4', '1') c$$);
SELECT ex.nested('n4 many', $$SELECT string_agg(key || ' ' || outcome, ', ' ORDER BY ordinality) FROM idem_claim_many('{n4 many,n4 other}')$$);
SELECT ex.nested('n5', $$SELECT tried('SELECT idem_once(''n5'')')$$);
SELECT ex.nested('n5 many', $$SELECT tried('SELECT idem_once_many(''{n5 many}'')')$$);
SELECT ex.nested('n6', $$SELECT tried('SELECT idem_complete(''n6'', ''00000000-0000-4000-8000-000000000001'')')$$);
SELECT ex.nested('n7', $$SELECT stored('n7')$$);
-- not caught, ID003 passes through
SELECT ex.nested('n8', $$SELECT idem_once('n8')$$);
SELECT stored('n8'), ex.locks();
-- further in
SELECT ex.nested('n9', $$SELECT ex.nested('n9 inner', 'SELECT answer(c) FROM idem_claim(''n9'') c')$$);
-- a failure inside takes only its own with it
SELECT ex.nested('n10', $$SELECT answer(c) FROM idem_execute('n10 inner', '{"code": "IDP00"}', 'ex.h_raise(text,jsonb,integer)') c$$);
-- a failure outside takes both, and the outer one's is recorded
SELECT ex.nested('n11', $$SELECT outcome || 1/0 FROM idem_execute('n11 inner', '1', 'ex.h_three(text,jsonb,integer)')$$);
SELECT stored('n11'), stored('n11 inner');
SELECT key FROM ex.business ORDER BY key;
-- a later attempt is a row: nested calls answer as in the first
CREATE TABLE ex.later (n integer, query text);
INSERT INTO ex.later VALUES
    (1, $$SELECT answer(c) FROM idem_claim('later 1', '1') c$$),
    (2, $$SELECT answer(c) FROM idem_execute('later 2', '1', 'ex.h_sql(jsonb)') c$$),
    (3, $$SELECT tried('SELECT idem_once(''later 3'', ''1'')')$$),
    (4, $$SELECT outcome FROM idem_claim_many('{later 4}', '{1}')$$),
    (5, $$SELECT tried('SELECT idem_once_many(''{later 5}'')')$$);
CREATE FUNCTION ex.h_later(key text, request jsonb, attempt integer) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    r text;
BEGIN
    EXECUTE (SELECT query FROM ex.later WHERE 'later ' || n = key) INTO r;
    IF attempt = 1 THEN
        RAISE EXCEPTION USING ERRCODE = 'IDR00', MESSAGE = r;
    END IF;
    RETURN to_json(r);
END $$;
SELECT n, answer(c) FROM ex.later, idem_execute('later ' || n, CASE WHEN n < 5 THEN '1'::jsonb END, 'ex.h_later(text,jsonb,integer)', 'three') c ORDER BY n;
SET idempotency.clock_offset = '20 s';
SELECT n, answer(c) FROM ex.later, idem_execute('later ' || n, CASE WHEN n < 5 THEN '1'::jsonb END, 'ex.h_later(text,jsonb,integer)', 'three') c ORDER BY n;
RESET idempotency.clock_offset;
SELECT ex.locks();

--
-- Transactions.
--
DELETE FROM ex.business;
BEGIN;
SELECT outcome FROM idem_execute('t1', '1', 'ex.h_three(text,jsonb,integer)');
SELECT outcome, attempts FROM idem_execute('t1', '1', 'ex.h_three(text,jsonb,integer)');
SELECT outcome FROM idem_claim('t1', '1');
SELECT ex.locks();
COMMIT;
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_execute('t2', '1', 'ex.h_three(text,jsonb,integer)');
SELECT outcome, error_code FROM idem_execute('t3', '{"code": "IDP00"}', 'ex.h_raise(text,jsonb,integer)');
ROLLBACK TO s;
SELECT stored('t2'), stored('t3'), ex.locks();
SELECT outcome FROM idem_execute('t2', '1', 'ex.h_three(text,jsonb,integer)');
SAVEPOINT s2;
SELECT tried($$SELECT idem_execute('t4', '{"code": "40001"}', 'ex.h_raise(text,jsonb,integer)')$$), ex.locks();
ROLLBACK TO s2;
SELECT outcome FROM idem_execute('t4', '1', 'ex.h_three(text,jsonb,integer)');
COMMIT;
SELECT * FROM ex.business ORDER BY key;
-- higher isolation
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT outcome FROM idem_execute('rr', '1', 'ex.h_three(text,jsonb,integer)');
SELECT outcome FROM idem_execute('rr', '1', 'ex.h_three(text,jsonb,integer)');
SELECT outcome, error_code FROM idem_execute('rr failed', '{"code": "IDR00"}', 'ex.h_raise(text,jsonb,integer)', 'three');
SELECT outcome FROM idem_execute('rr failed', '{"code": "IDR00"}', 'ex.h_raise(text,jsonb,integer)', 'three');
SELECT outcome FROM idem_execute('t1', '1', 'ex.h_three(text,jsonb,integer)');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outcome FROM idem_execute('ser', '1', 'ex.h_three(text,jsonb,integer)');
SELECT outcome FROM idem_execute('ser', '1', 'ex.h_three(text,jsonb,integer)');
COMMIT;
SELECT key FROM ex.business ORDER BY key;
-- read only
BEGIN READ ONLY;
SELECT idem_execute('ro', '1', 'ex.h_sql(jsonb)');
ROLLBACK;
-- the handler cannot end the transaction
CREATE FUNCTION ex.h_commit(jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$;
SELECT outcome, error_code FROM idem_execute('commit', '1', 'ex.h_commit(jsonb)');
-- session state that a failed handler changed is as it was
CREATE FUNCTION ex.h_set(jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN SET work_mem = '1111kB'; RAISE EXCEPTION 'x'; END $$;
SET work_mem = '2222kB';
SELECT outcome FROM idem_execute('set', '1', 'ex.h_set(jsonb)');
SHOW work_mem;
RESET work_mem;
-- many in one statement, each of its own, one after the other
SELECT c.outcome, count(*) FROM generate_series(1, 500) n, idem_execute('many ' || n % 250, '1', 'ex.h_three(text,jsonb,integer)') c GROUP BY 1 ORDER BY 1;
SELECT count(*), count(DISTINCT key) FROM ex.business WHERE key LIKE 'many%';
SELECT ex.locks();
SELECT * FROM idem_check();

DELETE FROM idem_policy WHERE operation IN ('lists', 'tight');
DELETE FROM idem_record;
RESET search_path;
DROP SCHEMA ex CASCADE;
DROP OWNED BY regress_ex_caller;
DROP ROLE regress_ex_caller;
