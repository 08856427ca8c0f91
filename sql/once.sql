--
-- idem_once
--
\set VERBOSITY sqlstate
\set T1 '''00000000-0000-4000-8000-000000000001'''
SET client_min_messages = warning;
CREATE SCHEMA oc;
CREATE TABLE oc.business (key text);
CREATE FUNCTION oc.handler(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE FUNCTION oc.locks() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'
$$;
-- As a consumer does it: the business write depends on the answer.
CREATE FUNCTION oc.consume(key text, request jsonb DEFAULT NULL) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF idem_once(key, request) THEN
        INSERT INTO oc.business VALUES (key);
        RETURN true;
    END IF;
    RETURN false;
END $$;

--
-- true, then false.
--
SELECT idem_once('o1');
SELECT stored('o1');
SELECT fingerprint('o1') AS before \gset
SELECT idem_once('o1');
SELECT idem_once('o1', NULL);
SELECT idem_once(key => 'o1');
SELECT :'before' = fingerprint('o1') AS untouched, oc.locks();
-- false writes nothing
BEGIN;
SELECT idem_once('o1'), pg_current_xact_id_if_assigned() IS NULL AS wrote_nothing;
COMMIT;
-- what others are told of it
SELECT answer(c) FROM idem_claim('o1') c;
SELECT answer(c) FROM idem_execute('o1', NULL, 'oc.handler(jsonb)') c;
SELECT outcome FROM idem_claim('o1', '{"a": 1}');
SELECT c.outcome FROM idem_claim_many('{o1}') c;
SELECT o.key, o.first FROM idem_once_many('{o1}') o;
-- there is no token by which it could be completed again
SELECT idem_complete('o1', :T1);
SELECT idem_release('o1', :T1);

--
-- The request.
--
SELECT idem_once('o2', '{"a": 1, "b": [1.0]}');
SELECT stored('o2');
SELECT idem_once('o2', '{"b": [1], "a": 1.00}');
SELECT idem_once('o2', '{"a": 2}');
SELECT idem_once('o2');
SELECT idem_once('o1', '{"a": 1}');
SELECT idem_once('o1', 'null');
SELECT idem_once('o3', 'null');
SELECT idem_once('o3', 'null');
SELECT idem_once('o3');
SELECT answer(c) FROM idem_claim('o2', '{"a": 1, "b": [1]}') c;
-- keys
SELECT idem_once(NULL);
SELECT idem_once('');
SELECT tried($$SELECT idem_once(repeat('x', 1025))$$), idem_once(repeat('x', 1024)), idem_once(repeat('x', 1024)) AS again;
SELECT idem_once('O1'), idem_once('o1 '), idem_once('ключ'), idem_once('ключ') AS again;

--
-- Every state.
--
SELECT make_states('s', '{"amount": 1}', :T1);
SET idempotency.clock_offset = '100 s';
CREATE TABLE oc.before AS SELECT state, fingerprint('s_' || state) AS record FROM states;
SELECT state, tried(format('SELECT idem_once(%L, %L)', 's_' || state, '{"amount": 1}')) AS answer FROM states ORDER BY ord;
SELECT state, stored('s_' || state), b.record = fingerprint('s_' || state) AS untouched FROM states JOIN oc.before b USING (state) ORDER BY ord;
SELECT state, tried(format('SELECT idem_once(%L, %L)', 's_' || state, '{"amount": 1}')) AS again FROM states ORDER BY ord;
-- another request is told as such first
SELECT state, tried(format('SELECT idem_once(%L, %L)', 's_' || state, '{"amount": 2}')) AS answer FROM states ORDER BY ord;
SELECT state, tried(format('SELECT idem_once(%L)', 's_' || state)) AS answer FROM states ORDER BY ord;
-- the token of a lapsed claim is dead
SELECT idem_complete('s_lapsed', :T1, '{"done": true}');
SELECT idem_renew('s_lapsed', :T1) IS NULL AS lost;
SELECT oc.locks();
RESET idempotency.clock_offset;
-- released, forgotten: anew
SELECT idem_once('o4'), idem_forget('o4', 'test'), idem_once('o4') AS anew;
SELECT outcome FROM idem_claim('o5', token => :T1);
SELECT tried($$SELECT idem_once('o5')$$), idem_release('o5', :T1), idem_once('o5');
-- its record ages as others do
SELECT r.status, r.attempts, r.operation, r.owner_token IS NULL AS no_token, r.first_claimed_at = r.updated_at AS one_instant FROM idem_status('o1') r;

--
-- Transactions.
--
BEGIN;
SELECT oc.consume('t1');
SELECT oc.consume('t1');
SELECT oc.locks();
ROLLBACK;
SELECT stored('t1');
SELECT * FROM oc.business;
SELECT oc.consume('t1');
SELECT oc.consume('t1');
SELECT * FROM oc.business;
BEGIN;
SAVEPOINT s;
SELECT oc.consume('t2');
ROLLBACK TO s;
SELECT oc.consume('t2');
SELECT oc.consume('t2');
SAVEPOINT s2;
SELECT oc.consume('t3');
RELEASE s2;
SELECT oc.consume('t3');
SAVEPOINT s3;
SELECT oc.consume('t4');
ROLLBACK TO s3;
COMMIT;
SELECT * FROM oc.business ORDER BY key;
SELECT oc.consume('t3'), oc.consume('t4');
-- an error after it takes it back
SELECT oc.consume('t5'), 1/0;
SELECT stored('t5');
-- after a claim of the same transaction, and before one
BEGIN;
SELECT outcome FROM idem_claim('t6', token => :T1);
SELECT tried($$SELECT idem_once('t6')$$);
SELECT idem_complete('t6', :T1), idem_once('t6');
SELECT idem_once('t7'), (idem_claim('t7')).outcome;
COMMIT;
-- a lapsed one, undone
SELECT outcome FROM idem_claim('t8', lease => '10 s', token => :T1);
SET idempotency.clock_offset = '40 s';
BEGIN;
SELECT idem_once('t8');
ROLLBACK;
SELECT stored('t8');
SELECT idem_once('t8'), idem_once('t8') AS again;
SELECT stored('t8');
RESET idempotency.clock_offset;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_once('t9'), idem_once('t9') AS again, idem_once('t8') AS older;
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idem_once('t10'), idem_once('t10') AS again, idem_once('t8') AS older;
COMMIT;
BEGIN READ ONLY;
SELECT idem_once('t11');
ROLLBACK;
BEGIN READ ONLY;
SELECT tried($$SELECT idem_once('t10')$$);
ROLLBACK;
-- many messages, each twice, in one transaction: few locks
BEGIN;
SELECT f, count(*) FROM (SELECT oc.consume('many ' || n % 1000) AS f FROM generate_series(1, 2000) n) s GROUP BY f ORDER BY f;
SELECT count(*) < 30 AS few_locks FROM pg_locks WHERE pid = pg_backend_pid();
COMMIT;
SELECT count(*), count(DISTINCT key) FROM oc.business WHERE key LIKE 'many%';

-- a client may; others may not
CREATE ROLE regress_oc_client;
SET ROLE regress_oc_client;
SELECT idem_once('role');
RESET ROLE;
SELECT idem_grant('regress_oc_client', 'client');
SET ROLE regress_oc_client;
SELECT idem_once('role'), idem_once('role') AS again;
RESET ROLE;

SELECT * FROM idem_check();
DELETE FROM idem_record;
DROP SCHEMA oc CASCADE;
DROP OWNED BY regress_oc_client;
DROP ROLE regress_oc_client;
