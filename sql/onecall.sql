-- One call and many keys: idem_execute, idem_once, the batch forms.
SET client_min_messages = warning;
INSERT INTO idem_policy (operation, max_attempts, backoff_base, jitter, retryable_codes, unknown_codes, max_result_size)
    VALUES ('job', 2, '10 s', 'none', '{22012}', '{P0001}', 1000);
CREATE TABLE work_done (key text, attempt integer);
CREATE FUNCTION job(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO work_done VALUES (key, attempt);
    IF request ? 'raise' THEN
        RAISE EXCEPTION 'told to' USING ERRCODE = request->>'raise';
    END IF;
    IF request ? 'run' THEN
        RETURN to_jsonb(tried(request->>'run'));
    END IF;
    RETURN jsonb_build_object('attempt', attempt);
END $$;
CREATE FUNCTION run(k text, r jsonb DEFAULT '{}', h text DEFAULT 'job(text,jsonb,integer)') RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RETURN answer(idem_execute(k, r, h::regprocedure));
EXCEPTION WHEN OTHERS THEN
    RETURN SQLSTATE;
END $$;

-- Executed once, then replayed; other request refused
SELECT run('t:job:a'), run('t:job:a'), run('t:job:a', '{"x": 1}');
SELECT stored('t:job:a');
-- Signatures and results
CREATE FUNCTION h_sql(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1 || ''{"sql": true}''';
CREATE FUNCTION h_void(jsonb) RETURNS void LANGUAGE plpgsql AS 'BEGIN INSERT INTO work_done VALUES (''void'', 0); END';
CREATE FUNCTION h_null(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
CREATE FUNCTION h_json(jsonb) RETURNS json LANGUAGE sql AS 'SELECT ''{"j":1}''::json';
CREATE FUNCTION h_text(jsonb) RETURNS text LANGUAGE sql AS 'SELECT ''[1]''';
CREATE FUNCTION h_notjson(jsonb) RETURNS text LANGUAGE sql AS 'SELECT ''no json''';
CREATE FUNCTION h_int(jsonb) RETURNS integer LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION h_set(jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION h_two(jsonb, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION h_strict(jsonb) RETURNS jsonb STRICT LANGUAGE sql AS 'SELECT $1';
CREATE PROCEDURE h_proc(jsonb) LANGUAGE sql AS 'SELECT 1';
SELECT h, run('h' || h, '{"a": 1}', h || '(jsonb)')
    FROM unnest('{h_sql,h_void,h_null,h_json,h_text,h_notjson,jsonb_pretty,h_int,h_set,h_strict,h_proc,now}'::text[]) h;
SELECT run('h2', '{}', 'h_two(jsonb,jsonb)'), run('h3', NULL, 'h_strict(jsonb)'), run('h4', NULL, 'h_null(jsonb)');
SELECT idem_execute('h5', '{}', NULL);
SELECT idem_execute('h5', '{}', 999999::regprocedure);
SELECT count(*) FROM idem_record WHERE idempotency_key IN ('hh_int', 'hh_set', 'hh_proc', 'h2', 'h3', 'h5');
CREATE ROLE idem_test_exec;
SELECT idem_grant('idem_test_exec', 'client');
REVOKE EXECUTE ON FUNCTION h_sql(jsonb) FROM PUBLIC;
SET ROLE idem_test_exec;
SELECT idem_execute('h6', '{}', 'h_sql(jsonb)');
SELECT outcome FROM idem_execute('h7', '{}', 'h_json(jsonb)');
RESET ROLE;
-- Classes of errors; the handler's writes are undone, the failure is kept
TRUNCATE work_done;
SELECT c, run('e:job:' || c, jsonb_build_object('raise', c))
    FROM unnest('{IDR00,IDP00,IDU00,08006,53200,55P03,58030,22012,P0001,23505,54000}'::text[]) c;
SELECT count(*) FROM work_done;
-- ... these pass through, and nothing is recorded
SELECT c, run('e:job:' || c, jsonb_build_object('raise', c)) FROM unnest('{40001,40P01,XX000,ID001}'::text[]) c;
SELECT count(*) FROM idem_record WHERE idempotency_key IN ('e:job:40001', 'e:job:40P01', 'e:job:57014', 'e:job:XX000', 'e:job:ID001');
SELECT outcome FROM idem_execute('e:job:57014', '{"raise": "57014"}', 'job(text,jsonb,integer)');
SELECT stored('e:job:57014');
-- The failure is lost only with the caller's own rollback
BEGIN; SELECT run('e:job:lost', '{"raise": "IDP00"}'); ROLLBACK;
SELECT stored('e:job:lost');
-- Retries: attempt 2 of 2, then exhausted
SELECT run('e:job:IDR00', '{"raise": "IDR00"}');
SET idempotency.clock_offset = '20 s';
SELECT run('e:job:IDR00', '{"raise": "IDR00"}'), stored('e:job:IDR00');
RESET idempotency.clock_offset;
-- A result over the limit is a permanent failure
CREATE FUNCTION h_large(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(repeat('x', 2000)) $$;
SELECT run('e:job:large', '{}', 'h_large(jsonb)');
-- Nested: other keys work, the same key is in progress
SELECT run('n:job:1', jsonb_build_object('run', $$SELECT outcome FROM idem_execute('n:job:2', '{}', 'job(text,jsonb,integer)')$$));
SELECT run('n:job:3', jsonb_build_object('run', $$SELECT outcome FROM idem_claim('n:job:3')$$)) UNION ALL
SELECT run('n:job:4', jsonb_build_object('run', $$SELECT outcome FROM idem_execute('n:job:4', '{}', 'job(text,jsonb,integer)')$$)) UNION ALL
SELECT run('n:job:5', jsonb_build_object('run', $$SELECT idem_once('n:job:5')$$)) UNION ALL
SELECT run('n:job:6', jsonb_build_object('run', $$SELECT outcome FROM idem_claim_many('{n:job:6}')$$)) UNION ALL
SELECT run('n:job:7', jsonb_build_object('run', $$SELECT idem_forget('n:job:7', 'x')$$));
-- States
SELECT make_states('x', '{}', 'aaaaaaaa-0000-4000-8000-000000000001');
SET idempotency.clock_offset = '100 s';
BEGIN;
SELECT state, run('x_' || state) FROM states ORDER BY ord;
ROLLBACK;
BEGIN;
SELECT state, tried(format('SELECT idem_once(%L, %L)', 'x_' || state, '{}')), stored('x_' || state) FROM states ORDER BY ord;
ROLLBACK;
-- C19: the batch answers as the single call does, and leaves the same records
BEGIN;
CREATE TEMP TABLE one AS SELECT ord, state, answer(idem_claim('x_' || state, '{}')) AS answer FROM states;
SELECT string_agg(format('%s: %s: %s', state, answer, stored('x_' || state)), E'\n' ORDER BY ord) AS single FROM one \gset
SELECT :'single' AS single;
ROLLBACK;
BEGIN;
CREATE TEMP TABLE many AS
    SELECT s.ord, s.state, answer(ROW(m.outcome, m.owner_token, m.attempts, m.lease_until, m.retry_after, m.result_json, m.result_body,
                                      m.error_code, m.error_message, m.previous, m.progress)::idem_claim_result) AS answer
    FROM idem_claim_many(ARRAY(SELECT 'x_' || state FROM states ORDER BY ord), ARRAY(SELECT '{}'::jsonb FROM states)) m
    JOIN states s ON 'x_' || s.state = m.key;
SELECT count(*), string_agg(format('%s: %s: %s', state, answer, stored('x_' || state)), E'\n' ORDER BY ord) = :'single' AS same_as_single
    FROM many;
ROLLBACK;
RESET idempotency.clock_offset;
-- Order, repetition, arguments
SELECT ordinality, key, outcome FROM idem_claim_many('{z,a,z,m}') ORDER BY ordinality;
SELECT ordinality, key, first FROM idem_once_many('{oz,oa,oz,om}');
SELECT ordinality, key, outcome FROM idem_claim_many('{r1,r2,r1}', ARRAY['{"n": 1}', '{"n": 2}', '{"n": 3}']::jsonb[]);
SELECT ordinality, key, completed FROM idem_complete_many('{z,a,m}', ARRAY(SELECT owner_token FROM unnest('{z,a,m}'::text[]) WITH ORDINALITY u(k, o)
    JOIN idem_record ON idempotency_key = k ORDER BY o), ARRAY['1', NULL, 'null']::jsonb[]);
SELECT idempotency_key, result_json FROM idem_record WHERE idempotency_key IN ('z', 'a', 'm') ORDER BY 1;
SELECT * FROM idem_claim_many('{}');
SELECT count(*) FROM idem_claim_many(NULL);
SELECT count(*) FROM idem_claim_many('{a,NULL}');
SELECT count(*) FROM idem_claim_many('{a,""}');
SELECT count(*) FROM idem_claim_many('{{a,b},{c,d}}');
SELECT count(*) FROM idem_claim_many('{a,b}', ARRAY['1']::jsonb[]);
SELECT count(*) FROM idem_complete_many('{a}', '{NULL}');
SELECT count(*) FROM idem_complete_many('{nope}', ARRAY[gen_random_uuid()]);
BEGIN;
SELECT count(*) FILTER (WHERE outcome = 'claimed') FROM idem_claim_many(ARRAY(SELECT 'many' || i FROM generate_series(1, 10000) i));
SELECT count(*) < 40 AS few_locks, count(*) FILTER (WHERE locktype = 'advisory') AS key_locks FROM pg_locks WHERE pid = pg_backend_pid();
SELECT count(*) FILTER (WHERE completed) FROM idem_complete_many(ARRAY(SELECT idempotency_key FROM idem_record WHERE idempotency_key LIKE 'many%' ORDER BY 1),
    ARRAY(SELECT owner_token FROM idem_record WHERE idempotency_key LIKE 'many%' ORDER BY idempotency_key));
COMMIT;
-- idem_once
SELECT idem_once('once1'), idem_once('once1');
BEGIN; SAVEPOINT s; SELECT idem_once('once2'); ROLLBACK TO s; SELECT idem_once('once2'); COMMIT;
SELECT idem_once('once3', '{"a": 1}'), tried($$SELECT idem_once('once3', '{"a": 2}')$$), tried($$SELECT idem_once('once3', '{"a": 1.0}')$$);
SELECT answer(idem_claim('once1'));
SELECT * FROM idem_check();
TRUNCATE idem_record;
DELETE FROM idem_policy WHERE operation = 'job';
DROP TABLE work_done;
DROP FUNCTION job, run, h_sql, h_void, h_null, h_json, h_text, h_notjson, h_int, h_set, h_two, h_strict, h_large;
DROP PROCEDURE h_proc;
DROP OWNED BY idem_test_exec;
DROP ROLE idem_test_exec;
