--
-- idem_claim
--
\set VERBOSITY sqlstate
\set T1 '''00000000-0000-4000-8000-000000000001'''
\set T2 '''00000000-0000-4000-8000-000000000002'''
\set T3 '''00000000-0000-4000-8000-000000000003'''

--
-- Every outcome.
--
SELECT answer(c) FROM idem_claim('first') c;
SELECT answer(c) FROM idem_claim('first') c;
SELECT stored('first');
-- a token that the extension makes is a random (version 4) UUID, and never the same
SELECT count(DISTINCT owner_token), bool_and(owner_token::text ~ '^.{8}-.{4}-4.{3}-[89ab].{3}-.{12}$')
    FROM generate_series(1, 100) n, idem_claim('random' || n);
-- lease and times come from the clock of the call, not of the transaction (C30)
SELECT clock_timestamp() AS before \gset
BEGIN;
SELECT pg_sleep(0.02) IS NOT NULL AS slept;
SELECT lease_until AS lease_until FROM idem_claim('clock', lease => '1 h') \gset
SELECT :'lease_until'::timestamptz BETWEEN :'before'::timestamptz + '1 h' + '0.02 s' AND clock_timestamp() + '1 h' AS from_the_call,
       r.lease_until = :'lease_until' AS as_stored,
       r.first_claimed_at = r.updated_at AND r.lease_until - r.updated_at = '1 h' AS one_instant
    FROM idem_status('clock') r;
COMMIT;
-- the policy's lease, and the default of 30 s
SELECT r.lease_until - r.updated_at AS lease FROM idem_status('first') r;
-- retry_after: the rest of the lease or the first back-off, the smaller; at least 1 ms
SELECT retry_after = '1 s' AS base FROM idem_claim('clock');
INSERT INTO idem_policy (operation, backoff_base, backoff_cap) VALUES ('slow', '1 h', '1 h'), ('eager', '0', '0');
SELECT outcome FROM idem_claim('short', operation => 'slow', lease => '10 min');
SELECT outcome, retry_after BETWEEN '1 min' AND '10 min' AS rest FROM idem_claim('short');
SELECT outcome FROM idem_claim('shortest', operation => 'eager');
SELECT outcome, retry_after = '1 ms' AS least FROM idem_claim('shortest');

SELECT make_states('m', '{"amount": 1}', :T1);
SET idempotency.clock_offset = '100 s';
SELECT state, answer(c) FROM states, idem_claim('m_' || state, '{"amount": 1}') c ORDER BY ord;
SELECT state, stored('m_' || state) FROM states ORDER BY ord;
-- the same again: what time decided is stored now
SELECT state, answer(c) FROM states, idem_claim('m_' || state, '{"amount": 1}') c ORDER BY ord;
-- retry_later tells the rest of the delay
SELECT retry_after BETWEEN '3480 s' AND '3500 s' AS rest FROM idem_claim('m_retry_waiting', '{"amount": 1}');
RESET idempotency.clock_offset;

-- a claim that was given takes a live lease; at the instant of its end it is over (C33)
SELECT answer(c) FROM idem_claim('edge', lease => '1 h') c;
SET idempotency.clock_offset = '3590 s';
SELECT outcome FROM idem_claim('edge');
SET idempotency.clock_offset = '3600 s';
SELECT outcome, previous FROM idem_claim('edge');
RESET idempotency.clock_offset;

-- one time-to-live for running and finished records would block a crashed key (C56)
SELECT outcome FROM idem_claim('c56', lease => '1 min');
SET idempotency.clock_offset = '20 s';
SELECT outcome FROM idem_claim('c56');
SET idempotency.clock_offset = '70 s';
SELECT outcome, attempts FROM idem_claim('c56');
RESET idempotency.clock_offset;

--
-- Tokens given by the caller (C06).
--
SELECT answer(c), owner_token = :T1 AS mine FROM idem_claim('c06', '{"a": 1}', token => :T1) c;
SELECT fingerprint('c06') AS before \gset
SELECT answer(c), owner_token = :T1 AS mine FROM idem_claim('c06', '{"a": 1}', token => :T1) c;
SELECT outcome, attempts FROM idem_claim('c06', '{"a": 1}');
SELECT outcome, attempts FROM idem_claim('c06', '{"a": 1}', token => :T2);
-- the same token with another request
SELECT outcome, attempts FROM idem_claim('c06', '{"a": 2}', token => :T1);
SELECT :'before' = fingerprint('c06') AS untouched;
-- lapsed: a new attempt would be due, and the old token is refused
SET idempotency.clock_offset = '40 s';
SELECT outcome FROM idem_claim('c06', '{"a": 1}', token => :T1);
SELECT :'before' = fingerprint('c06') AS untouched;
SELECT answer(c), owner_token = :T2 AS mine FROM idem_claim('c06', '{"a": 1}', token => :T2) c;
-- taken over: the old token is not admitted again, nor ever later
SELECT outcome, attempts FROM idem_claim('c06', '{"a": 1}', token => :T1);
SELECT answer(c), owner_token = :T2 AS mine FROM idem_claim('c06', '{"a": 1}', token => :T2) c;
SET idempotency.clock_offset = '80 s';
SELECT outcome FROM idem_claim('c06', '{"a": 1}', token => :T1);
SELECT outcome FROM idem_claim('c06', '{"a": 1}', token => :T2);
SELECT outcome, attempts FROM idem_claim('c06', '{"a": 1}', token => :T3);
SELECT outcome FROM idem_claim('c06', '{"a": 2}', token => :T1);
SELECT status FROM idem_fail('c06', :T3, 'retryable', retry_after => '0');
SELECT outcome FROM idem_claim('c06', '{"a": 1}', token => :T1);
SELECT outcome FROM idem_claim('c06', '{"a": 1}', token => :T3);
-- where no new attempt is due the token does not matter
SELECT f.status FROM idem_claim('c06', '{"a": 1}') c, idem_fail('c06', c.owner_token, 'retryable', retry_after => '1 h') f;
SELECT outcome FROM idem_claim('c06', '{"a": 1}', token => :T1);
RESET idempotency.clock_offset;

--
-- Arguments.
--
-- NULLs: of the key an error, of an option its default (C24)
SELECT outcome FROM idem_claim(NULL);
SELECT outcome FROM idem_claim(key => NULL, request => '{}');
SELECT answer(c) FROM idem_claim('nulls', NULL, NULL, NULL, NULL, NULL, NULL) c;
SELECT answer(c) FROM idem_claim('nulls') c;
SELECT r.operation, r.request_hash, r.lease_until - r.updated_at AS lease FROM idem_status('nulls') r;
-- keys: 1 to 1024 bytes, whatever they hold (C89)
SELECT outcome FROM idem_claim('');
SELECT length, tried(format('SELECT outcome FROM idem_claim(repeat(%L, %s))', letter, length)) AS answer
    FROM (VALUES ('a', 1), ('a', 1024), ('a', 1025), ('a', 100000), (chr(8364), 341), (chr(8364), 342)) AS v (letter, length);
SELECT tried($$SELECT outcome FROM idem_claim((SELECT string_agg(md5(n::text), '') FROM generate_series(1, 32) n))$$) AS incompressible;
SELECT count(DISTINCT outcome), min(outcome) FROM unnest(ARRAY['x', ' x', 'x ', 'X', E'x\n', 'x' || chr(769), chr(65368)]) k, idem_claim(k);
-- operation
SELECT operation_length, tried(format('SELECT outcome FROM idem_claim(%L, operation => repeat(%L, %s))', 'op' || operation_length, 'o', operation_length)) AS answer
    FROM unnest(ARRAY[0, 1, 1024, 1025]) operation_length;
-- lease: zero is not "unlimited", and months have no length (C37)
SELECT lease, tried(format('SELECT answer(c) FROM idem_claim(%L, lease => %L) c', 'lease ' || lease, lease)) AS answer
    FROM unnest(ARRAY['0', '-1 s', '1 us', '366 days', '366 days 1 us', '1 mon', '1 year', '-1 mon 40 days', '-1 day 25 h', '1 day -25 h',
                      '2147483647 days', '-2147483648 days', '2562047788:00:54.775807', '178000000 years']) lease;
SELECT tried($$SELECT outcome FROM idem_claim('lease infinity', lease => 'infinity')$$) IN ('22007', '22023') AS refused;
-- wait
SELECT wait, tried(format('SELECT answer(c) FROM idem_claim(%L, wait => %L) c', 'wait ' || wait, wait)) AS answer
    FROM unnest(ARRAY['0', '-1 s', '1 us', '366 days', '366 days 1 us', '1 mon', '-1 mon', '2147483647 days']) wait;
-- digest: 1 to 128 bytes
SELECT size, tried(format('SELECT answer(c) FROM idem_claim(%L, digest => decode(repeat(%L, %s), %L)) c', 'digest' || size, '0a', size, 'hex')) AS answer
    FROM unnest(ARRAY[0, 1, 33, 128, 129]) size;
-- a refused call leaves nothing
SELECT count(*) FROM idem_record WHERE idempotency_key IN ('op0', 'op1025', 'lease 0', 'lease -1 s', 'wait -1 s', 'digest0', 'digest129');

--
-- The request (C85, C100, C124).
--
SELECT kind, outcome FROM unnest(ARRAY['none', 'null', '{}', '[]', '""', '{"a": 1}']) kind,
    idem_claim('request ' || kind, nullif(kind, 'none')::jsonb);
SELECT a AS stored, string_agg(b || ' ' || outcome, ', ' ORDER BY n) AS claims
    FROM unnest(ARRAY['none', 'null', '{}', '[]', '""', '{"a": 1}']) a,
         unnest(ARRAY['none', 'null', '{}', '[]', '""', '{"a": 1}']) WITH ORDINALITY AS u (b, n),
         idem_claim('request ' || a, nullif(b, 'none')::jsonb)
    GROUP BY a ORDER BY a;
-- a digest stands for the request, and is compared with it
SELECT outcome FROM idem_claim('by digest', '{"b": 2, "a": 1}');
SELECT outcome FROM idem_claim('by digest', digest => idem_digest('{"a": 1, "b": 2}'));
SELECT outcome FROM idem_claim('by digest', digest => '\x01aa');
SELECT outcome FROM idem_claim('of the client', digest => '\xc0ffee');
SELECT outcome FROM idem_claim('of the client', '{"what": "ever"}', digest => '\xc0ffee');
SELECT outcome FROM idem_claim('of the client', digest => '\xc0ffef');
SELECT outcome FROM idem_claim('of the client', digest => '\xc0ffee00');
SELECT outcome FROM idem_claim('of the client');
-- deep documents: an answer or 54001, no crash
SELECT depth, tried(format('SELECT outcome FROM idem_claim(%L, (repeat(%L, %s) || repeat(%L, %s))::jsonb)', 'deep' || depth, '[', depth, ']', depth)) AS first,
       tried(format('SELECT outcome FROM idem_claim(%L, (repeat(%L, %s) || repeat(%L, %s))::jsonb)', 'deep' || depth, '[', depth, ']', depth)) AS second
    FROM unnest(ARRAY[1, 1000, 200000]) depth;
-- an operation named and another than the stored one: conflict; not named: the record's
SELECT outcome FROM idem_claim('c124', '{"a": 1}', 'charge');
SELECT outcome FROM idem_claim('c124', '{"a": 1}', 'charge');
SELECT outcome FROM idem_claim('c124', '{"a": 1}', 'refund');
SELECT outcome FROM idem_claim('c124', '{"a": 1}', 'default');
SELECT outcome FROM idem_claim('c124', '{"a": 1}');
-- the operation of a three-part key is its middle part
SELECT outcome FROM idem_claim(idem_key('t1', 'charge', '7'));
SELECT operation FROM idem_status(idem_key('t1', 'charge', '7'));
SELECT outcome FROM idem_claim(idem_key('t1', 'charge', '7'), operation => 'charge');
SELECT outcome FROM idem_claim(idem_key('t1', 'charge', '7'), operation => 'refund');
-- other tenants and operations are other keys (C87)
SELECT outcome FROM idem_claim(idem_key('t2', 'charge', '7'));
SELECT outcome FROM idem_claim(idem_key('t1', 'refund', '7'));

-- another request is a conflict in every state, before anything else, and changes nothing
SELECT make_states('n', '{"amount": 1}', :T1);
SELECT state, fingerprint('n_' || state) AS before INTO TEMP before FROM states;
BEGIN;
SET LOCAL idempotency.clock_offset = '100 s';
SELECT state, a.outcome, a.attempts, b.outcome, c.outcome, d.outcome, e.outcome
    FROM states, idem_claim('n_' || state, '{"amount": 2}') a, idem_claim('n_' || state) b,
         idem_claim('n_' || state, '{"amount": 1}', 'something else') c,
         idem_claim('n_' || state, '{"amount": 2}', token => :T1) d,
         idem_claim('n_' || state, digest => '\x00') e
    ORDER BY ord;
SELECT answer(c) FROM idem_claim('n_succeeded', 'null') c;
-- neither do the answers that decide nothing
SELECT state, answer(c) FROM states, idem_claim('n_' || state, '{"amount": 1}') c
    WHERE state IN ('live', 'retry_waiting', 'unknown', 'failed', 'exhausted', 'succeeded') ORDER BY ord;
SELECT answer(c) FROM idem_claim('n_live', '{"amount": 1}', token => :T1) c;
SELECT pg_current_xact_id_if_assigned() IS NULL AS wrote_nothing;
COMMIT;
SELECT count(*) AS untouched FROM before WHERE before = fingerprint('n_' || state);

-- postponements do not count as attempts (C62)
SELECT outcome, count(*) FROM (SELECT (idem_claim('n_live', '{"amount": 1}')).outcome FROM generate_series(1, 100)) s GROUP BY outcome;
SELECT outcome, count(*) FROM (SELECT (idem_claim('n_retry_waiting', '{"amount": 1}')).outcome FROM generate_series(1, 100)) s GROUP BY outcome;
SELECT outcome, count(*) FROM (SELECT (idem_claim('n_live', '{"amount": 3}')).outcome FROM generate_series(1, 100)) s GROUP BY outcome;
SELECT count(*) AS untouched FROM before WHERE before = fingerprint('n_' || state);

--
-- Waiting.
--
-- until a lease is over, or a retry is due
SELECT outcome FROM idem_claim('wait lapse', lease => '50 ms');
SELECT answer(c) FROM idem_claim('wait lapse', wait => '10 s') c;
SELECT f.status FROM idem_claim('wait due') c, idem_fail('wait due', c.owner_token, 'retryable', retry_after => '50 ms') f;
SELECT answer(c) FROM idem_claim('wait due', wait => '10 s') c;
-- in vain: about as long as it was told; not at all where waiting cannot help
SELECT clock_timestamp() AS before \gset
SELECT answer(c) FROM idem_claim('wait due', wait => '60 ms') c;
SELECT clock_timestamp() - :'before' BETWEEN '60 ms' AND '5 s' AS waited;
SELECT clock_timestamp() AS before \gset
SELECT state, outcome FROM states, idem_claim('n_' || state, '{"amount": 1}', wait => '20 s')
    WHERE state IN ('retry_waiting', 'unknown', 'failed', 'succeeded') ORDER BY ord;
SELECT outcome FROM idem_claim('n_live', wait => '20 s');
SELECT clock_timestamp() - :'before' < '15 s' AS at_once;
-- it can be cancelled, and holds nothing
SET statement_timeout = '50 ms';
SELECT outcome FROM idem_claim('wait due', wait => '20 s');
RESET statement_timeout;
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';

--
-- One statement.
--
-- duplicates
SELECT n, outcome FROM generate_series(1, 3) n, idem_claim('twice' || n % 2) ORDER BY n;
SELECT n, (idem_claim('twice more')).outcome FROM generate_series(1, 3) n;
SELECT (idem_claim('two calls')).outcome AS one, (idem_claim('two calls')).outcome AS two;
-- (f()).* would call once per column (C22): refused where it claims, coherent where it does not
SELECT (idem_claim('c22')).*;
SELECT count(*) FROM idem_record WHERE idempotency_key = 'c22';
SELECT outcome FROM (SELECT (idem_claim('c22')).*) s;
SELECT outcome, attempts FROM idem_claim('c22');
SET idempotency.clock_offset = '40 s';
SELECT (idem_claim('c22')).*;
SELECT outcome, attempts FROM idem_claim('c22');
RESET idempotency.clock_offset;
SELECT f.status FROM idem_claim('c22 last', '{}', 'three', token => :T1) c, idem_fail('c22 last', c.owner_token, 'retryable', retry_after => '0') f;
SELECT f.status FROM idem_claim('c22 last', '{}', 'three', token => :T2) c, idem_fail('c22 last', c.owner_token, 'retryable', retry_after => '0') f;
SELECT (idem_claim('c22 last', '{}')).*;
SELECT stored('c22 last');
SELECT outcome, attempts FROM idem_claim('c22 last', '{}');
SELECT (idem_fail('c22 last', owner_token, 'permanent')).* FROM idem_status('c22 last');
SELECT stored('c22 last');
SELECT outcome, attempts, result_json, owner_token, error_message FROM (SELECT (idem_claim('m_succeeded', '{"amount": 1}')).*) s;
SELECT outcome, attempts, owner_token FROM (SELECT (idem_claim('c22')).*) s;
SELECT outcome, attempts, owner_token, previous FROM (SELECT (idem_claim('c22 token', token => :T1)).*) s;
DO $$
DECLARE
    r idem_claim_result;
BEGIN
    SELECT (idem_claim('c22 do')).* INTO r;
END
$$;
SELECT count(*) FROM idem_record WHERE idempotency_key = 'c22 do';
-- ... and the check takes nothing else for it
PREPARE same_place AS SELECT (idem_claim($1)).outcome;
BEGIN;
EXECUTE same_place('c22 prepared');
EXECUTE same_place('c22 prepared');
COMMIT;
DEALLOCATE same_place;
CREATE FUNCTION claims(key text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RETURN (idem_claim(key)).outcome;
END
$$;
SELECT claims('c22 function'), claims('c22 function'), claims('c22 other');
\set VERBOSITY terse
DO $$
DECLARE
    r idem_claim_result;
BEGIN
    FOR i IN 1 .. 2 LOOP
        r := idem_claim('c22 loop');
        RAISE WARNING '%', r.outcome;
        SELECT * INTO r FROM idem_claim('c22 loop ' || i);
    END LOOP;
END
$$;
\set VERBOSITY sqlstate
SELECT attempts, stored('c22 loop 2') FROM idem_status('c22 loop');

-- what the planner does with a call (C23)
CREATE TABLE job (id integer PRIMARY KEY, ready boolean);
INSERT INTO job SELECT n, n % 2 = 0 FROM generate_series(1, 20) n;
ANALYZE job;
SELECT provolatile, proparallel FROM pg_proc WHERE proname = 'idem_claim';
EXPLAIN (COSTS OFF) SELECT outcome FROM idem_claim('c23 explain');
SELECT count(*) FROM idem_record WHERE idempotency_key = 'c23 explain';
DO $$ BEGIN EXECUTE 'EXPLAIN ANALYZE SELECT outcome FROM idem_claim(''c23 analyze'')'; END $$;
SELECT count(*) FROM idem_record WHERE idempotency_key = 'c23 analyze';
WITH c AS (SELECT idem_claim('c23 with')) SELECT 1;
SELECT count(*) FROM idem_record WHERE idempotency_key = 'c23 with';
CREATE VIEW claim_view AS SELECT (idem_claim('c23 view')).outcome;
SELECT * FROM claim_view;
SELECT * FROM claim_view;
-- the safe form: as many claims as rows
SELECT j.id, c.outcome FROM (SELECT id FROM job WHERE ready ORDER BY id LIMIT 3 OFFSET 0) j, idem_claim('c23 safe ' || j.id) c ORDER BY j.id;
SELECT count(*) FROM idem_record WHERE idempotency_key LIKE 'c23 safe%';
WITH j AS MATERIALIZED (SELECT id FROM job ORDER BY id DESC LIMIT 3) SELECT j.id, c.outcome FROM j, idem_claim('c23 cte ' || j.id) c ORDER BY j.id;
SELECT count(*) FROM idem_record WHERE idempotency_key LIKE 'c23 cte%';
-- the unsafe form: a call in WHERE claims what is then not returned
SELECT count(*) FROM (SELECT id FROM job WHERE (idem_claim('c23 unsafe ' || id)).outcome = 'claimed' ORDER BY id LIMIT 3) s;
SELECT count(*) > 3 AS more_claims_than_rows FROM idem_record WHERE idempotency_key LIKE 'c23 unsafe%';

-- beside the claim the statement sees the state before it (C26)
SELECT c.outcome, (SELECT count(*) FROM idem_record WHERE idempotency_key = 'c26') AS rows, (idem_status('c26')).status
    FROM idem_claim('c26') c;
SELECT (idem_status('c26')).status, idem_status('no such key') IS NULL AS absent;

--
-- Transactions.
--
-- claim, finish and claim again in one
BEGIN;
SELECT answer(c) FROM idem_claim('one', token => :T1) c;
SELECT answer(c) FROM idem_claim('one') c;
SELECT status FROM idem_fail('one', :T1, 'retryable', retry_after => '0');
SELECT answer(c) FROM idem_claim('one', token => :T2) c;
SET LOCAL idempotency.clock_offset = '40 s';
SELECT answer(c) FROM idem_claim('one', token => :T3) c;
SELECT idem_complete('one', :T3, '1');
SELECT answer(c) FROM idem_claim('one') c;
COMMIT;
SELECT stored('one');
-- rolled back: as if it had not been
BEGIN;
SELECT outcome FROM idem_claim('back', token => :T1);
ROLLBACK;
SELECT stored('back');
SELECT idem_complete('back', :T1);
-- savepoints
BEGIN;
SAVEPOINT s;
SELECT answer(c) FROM idem_claim('savepoint', token => :T1) c;
ROLLBACK TO s;
SELECT stored('savepoint');
SELECT answer(c) FROM idem_claim('savepoint', token => :T2) c;
SAVEPOINT s;
SELECT idem_complete('savepoint', :T2, '"lost"');
SELECT answer(c) FROM idem_claim('savepoint') c;
ROLLBACK TO s;
SELECT answer(c) FROM idem_claim('savepoint') c;
SAVEPOINT s2;
SELECT answer(c) FROM idem_claim('savepoint released', token => :T1) c;
RELEASE s2;
SELECT answer(c) FROM idem_claim('savepoint released') c;
SELECT idem_complete('savepoint released', :T1);
SELECT idem_complete('savepoint', :T1);
ROLLBACK TO s;
SELECT idem_complete('savepoint', :T2, '"kept"');
COMMIT;
SELECT stored('savepoint'), stored('savepoint released');
-- exception blocks
\set VERBOSITY terse
DO $$
DECLARE
    t uuid;
BEGIN
    BEGIN
        t := (idem_claim('exception')).owner_token;
        PERFORM 1 / 0;
    EXCEPTION WHEN division_by_zero THEN
        RAISE WARNING '% %', stored('exception') IS NULL, (idem_claim('exception')).outcome;
    END;
    BEGIN
        PERFORM idem_complete('exception', t);
    EXCEPTION WHEN SQLSTATE 'ID001' THEN
        RAISE WARNING 'the token of the first claim is dead';
    END;
END
$$;
\set VERBOSITY sqlstate
SELECT stored('exception');
-- procedures with COMMIT and ROLLBACK in between
CREATE TABLE effect (key text, note text);
CREATE PROCEDURE work(key text, rounds integer) LANGUAGE plpgsql AS $$
DECLARE
    c idem_claim_result;
BEGIN
    FOR i IN 1 .. rounds LOOP
        c := idem_claim(key || i);
        COMMIT;
        INSERT INTO effect VALUES (key || i, 'lost');
        PERFORM idem_complete(key || i, c.owner_token, '"lost"');
        ROLLBACK;
        INSERT INTO effect VALUES (key || i, 'kept');
        PERFORM idem_complete(key || i, c.owner_token, to_jsonb(i));
        COMMIT;
        c := idem_claim(key || i);
        RAISE WARNING '% %', c.outcome, c.result_json;
    END LOOP;
END
$$;
\set VERBOSITY terse
CALL work('procedure', 2);
\set VERBOSITY sqlstate
SELECT * FROM effect ORDER BY key;
-- prepared statements, also after a change of the table and of policies
PREPARE p(text) AS SELECT answer(c) FROM idem_claim($1, '{}', 'three') c;
SET plan_cache_mode = force_generic_plan;
EXECUTE p('prepared 1');
CREATE INDEX record_by_owner ON idem_record_open (owner);
UPDATE idem_policy SET lease = '1 h' WHERE operation = 'three';
EXECUTE p('prepared 2');
DROP INDEX record_by_owner;
EXECUTE p('prepared 1');
SELECT lease_until - updated_at AS lease FROM idem_record WHERE idempotency_key LIKE 'prepared%' ORDER BY idempotency_key;
UPDATE idem_policy SET lease = DEFAULT WHERE operation = 'three';
RESET plan_cache_mode;
DEALLOCATE p;
-- many claims in one transaction: few locks, no subtransactions (C10)
BEGIN;
SELECT outcome, count(*) FROM generate_series(1, 50000) n, idem_claim('many' || n) GROUP BY outcome;
SELECT count(*) < 30 AS few_locks FROM pg_locks WHERE pid = pg_backend_pid();
SELECT count(DISTINCT xmin::text), min(xmin::text) = pg_current_xact_id()::xid::text AS top_level FROM idem_record_open WHERE idempotency_key LIKE 'many%';
ROLLBACK;
SELECT count(*) FROM idem_record WHERE idempotency_key LIKE 'many%';
-- no lock outlives a call, nor an error in it (C11)
BEGIN;
SELECT outcome FROM idem_claim('locks');
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';
SELECT tried($$SELECT idem_complete('locks', '00000000-0000-4000-8000-000000000009')$$);
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';
COMMIT;
SELECT idem_complete('locks', :T1);
DISCARD ALL;
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';
SELECT outcome FROM idem_claim('locks');

--
-- Attempts.
--
-- the claim counts them (C60): three crashes, then exhausted, and so it stays
CREATE FUNCTION claims_after_crashes(key text, times integer) RETURNS SETOF text LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. times LOOP
        PERFORM set_config('idempotency.clock_offset', (i * 100) || 's', true);
        RETURN NEXT (SELECT answer(c) FROM idem_claim(key, '{}', 'three') c);
    END LOOP;
END
$$;
SELECT claims_after_crashes('c60', 5);
SELECT stored('c60');
-- crash on the only attempt (C61)
SELECT outcome FROM idem_claim('c61', '{}', 'single');
SET idempotency.clock_offset = '40 s';
SELECT answer(c) FROM idem_claim('c61', '{}') c;
SELECT stored('c61');
RESET idempotency.clock_offset;
-- a limit that is lowered, and raised again
SELECT claims_after_crashes('c61 lowered', 2);
SELECT claims_after_crashes('c61 raised', 2);
UPDATE idem_policy SET max_attempts = 1 WHERE operation = 'three';
SET idempotency.clock_offset = '205 s';
SELECT answer(c) FROM idem_claim('c61 lowered', '{}') c;
SET idempotency.clock_offset = '400 s';
SELECT answer(c) FROM idem_claim('c61 lowered', '{}') c;
UPDATE idem_policy SET max_attempts = 3 WHERE operation = 'three';
SELECT answer(c) FROM idem_claim('c61 raised', '{}') c;
SELECT answer(c) FROM idem_claim('c61 lowered', '{}') c;
-- time limit: over at the next claim, also while a retry is not due
INSERT INTO idem_policy (operation, max_elapsed) VALUES ('hurried', '60 s');
RESET idempotency.clock_offset;
SELECT outcome FROM idem_claim('hurried', '{}', 'hurried');
SELECT outcome FROM idem_claim('hurried live', '{}', 'hurried', '1 h');
SET idempotency.clock_offset = '50 s';
SELECT answer(c) FROM idem_claim('hurried', '{}') c;
SET idempotency.clock_offset = '90 s';
SELECT answer(c) FROM idem_claim('hurried', '{}') c;
SELECT answer(c) FROM idem_claim('hurried live', '{}') c;
RESET idempotency.clock_offset;
-- doubt goes before exhaustion
INSERT INTO idem_policy (operation, max_attempts, on_lease_expiry) VALUES ('doubtful single', 1, 'unknown');
SELECT outcome FROM idem_claim('doubt', '{}', 'doubtful single');
SET idempotency.clock_offset = '40 s';
SELECT answer(c) FROM idem_claim('doubt', '{}') c;
SELECT stored('doubt');
RESET idempotency.clock_offset;

--
-- Session settings.
--
-- time zones (C40)
SET timezone = 'Asia/Tokyo';
SELECT outcome FROM idem_claim('zone', lease => '1 h');
SET timezone = 'America/New_York';
SELECT outcome FROM idem_claim('zone');
SELECT extract(epoch FROM lease_until - updated_at) AS seconds, lease_until > clock_timestamp() + '50 min' AND lease_until <= clock_timestamp() + '1 h' AS same
    FROM idem_status('zone');
-- a day is 24 hours, also where a clock change makes it 23
SELECT set_config('idempotency.clock_offset', extract(epoch FROM timestamptz '2027-03-13 20:00 America/New_York' - now())::text, false) IS NOT NULL AS before_the_change;
SELECT outcome FROM idem_claim('day', lease => '1 day');
SELECT extract(epoch FROM lease_until - updated_at) AS seconds FROM idem_status('day');
RESET timezone;
RESET idempotency.clock_offset;
-- nothing else that a session sets changes the key, the digest or the tables used (C12)
CREATE SCHEMA decoy;
CREATE TABLE decoy.idem_record (idempotency_key text);
CREATE TABLE decoy.idem_policy (operation text);
CREATE FUNCTION decoy.never(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT false';
CREATE OPERATOR decoy.= (LEFTARG = text, RIGHTARG = text, FUNCTION = decoy.never);
SELECT outcome FROM idem_claim('t1:op:c12', '{"a": 1.10, "b": "x", "at": "2026-01-02"}');
CREATE FUNCTION claims_under(setting text, value text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    outcome text;
BEGIN
    PERFORM pg_catalog.set_config(setting, value, true);
    outcome := (public.idem_claim('t1:op:c12', '{"a": 1.10, "b": "x", "at": "2026-01-02"}')).outcome;
    RETURN outcome;
END
$$;
BEGIN;
SELECT setting, value, public.claims_under(setting, value) FROM (VALUES
    ('bytea_output', 'escape'), ('extra_float_digits', '-15'), ('DateStyle', 'German, DMY'), ('IntervalStyle', 'iso_8601'),
    ('timezone', 'Pacific/Apia'), ('lc_numeric', 'C'), ('quote_all_identifiers', 'on'), ('array_nulls', 'off'),
    ('standard_conforming_strings', 'off'), ('enable_indexscan', 'off'), ('enable_seqscan', 'off'), ('row_security', 'off'),
    ('session_replication_role', 'replica'), ('check_function_bodies', 'off'), ('transform_null_equals', 'on'),
    ('synchronous_commit', 'off'), ('default_transaction_isolation', 'serializable'), ('default_tablespace', 'pg_global'),
    ('search_path', ''), ('search_path', 'decoy, pg_catalog, public'), ('search_path', 'pg_temp')) v (setting, value);
ROLLBACK;
SET search_path = decoy, pg_catalog, public;
SELECT public.answer(c) FROM public.idem_claim('decoyed') c;
SELECT public.answer(c) FROM public.idem_claim('decoyed') c;
RESET search_path;
SET client_min_messages = warning;
DROP SCHEMA decoy CASCADE;
BEGIN;
SET LOCAL timezone = 'Asia/Tokyo';
SELECT outcome FROM idem_claim('settings rolled back');
ROLLBACK;
RESET ALL;
SELECT answer(c) FROM idem_claim('settings rolled back') c;

--
-- Where nothing can be written.
--
-- read-only transactions: refused whatever the answer would be (C27)
SELECT make_states('r', '{}', :T1);
BEGIN READ ONLY;
SELECT state, tried(format('SELECT outcome FROM idem_claim(%L, %L)', 'r_' || state, '{}')) AS claim,
       tried(format('SELECT outcome FROM idem_claim(%L)', 'r_' || state)) AS conflict,
       tried(format('SELECT idem_complete(%L, %L, %L)', 'r_' || state, '00000000-0000-4000-8000-000000000001', '{"done": true}')) AS complete,
       (idem_status('r_' || state)).status
    FROM (SELECT * FROM states UNION ALL SELECT 0, 'absent') s ORDER BY ord;
SELECT call, tried('SELECT ' || call) FROM unnest(ARRAY[
    $$idem_fail('r_live', '00000000-0000-4000-8000-000000000001', 'permanent')$$,
    $$idem_renew('r_live', '00000000-0000-4000-8000-000000000001')$$,
    $$idem_release('r_live', '00000000-0000-4000-8000-000000000001')$$,
    $$idem_checkpoint('r_live', '00000000-0000-4000-8000-000000000001', 's', '1')$$,
    $$idem_claim('r_live', '{}', wait => '10 s')$$]) call;
COMMIT;
SELECT stored('r_absent'), stored('r_live');
-- parallel plans: the writers do not run in a worker, and refuse to (C25)
SELECT set_config(CASE WHEN current_setting('server_version_num')::integer >= 160000 THEN 'debug_parallel_query' ELSE 'force_parallel_mode' END, 'on', false);
SET parallel_setup_cost = 0;
SET parallel_tuple_cost = 0;
SET min_parallel_table_scan_size = 0;
SELECT count(*), min(outcome) FROM job, idem_claim('c25 ' || id, token => :T1);
SELECT count(*), min(c.answer::text) FROM (SELECT idem_complete('c25 ' || id, :T1, to_jsonb(id)) AS answer FROM job) c;
SELECT id, (idem_claim('c25 ' || id)).result_json FROM job WHERE id < 3 ORDER BY id;
SELECT (idem_status('c25 1')).status;
CREATE FUNCTION lie(key text) RETURNS text LANGUAGE plpgsql PARALLEL SAFE AS $$
BEGIN
    RETURN (SELECT outcome FROM idem_claim(key));
END
$$;
SELECT lie('c25 lie');
SELECT stored('c25 lie');
-- the pure functions do, and tell the same there
CREATE TABLE request (id integer, body jsonb);
INSERT INTO request SELECT n, jsonb_build_object('id', n, 'amount', n * 1.10, 'text', md5(n::text)) FROM generate_series(1, 20000) n;
ANALYZE request;
SELECT count(*) > 0 AS parallel FROM plan_of($$SELECT md5(string_agg(idem_digest(body)::text || idem_key('t', 'op', id::text), '' ORDER BY id)) FROM request$$) p WHERE p ~ 'Gather';
SELECT md5(string_agg(d, '' ORDER BY id)) AS parallel FROM (SELECT id, idem_digest(body)::text || idem_canonical(body) || idem_key('t', 'op', id::text) || idem_downstream_key(id::text, 's')::text AS d FROM request) s \gset
RESET ALL;
SET max_parallel_workers_per_gather = 0;
SELECT md5(string_agg(d, '' ORDER BY id)) = :'parallel' AS same FROM (SELECT id, idem_digest(body)::text || idem_canonical(body) || idem_key('t', 'op', id::text) || idem_downstream_key(id::text, 's')::text AS d FROM request) s;
RESET max_parallel_workers_per_gather;

-- nothing above broke a rule of the table
SELECT * FROM idem_check();
DROP TABLE request, job, effect;
