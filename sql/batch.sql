--
-- idem_claim_many, idem_complete_many, idem_once_many
--
\set VERBOSITY sqlstate
\set T1 '''00000000-0000-4000-8000-000000000001'''
SET client_min_messages = warning;
CREATE SCHEMA ba;
-- The answer of a batch as that of the single form.
CREATE FUNCTION ba.row_answer(outcome text, owner_token uuid, attempts integer, lease_until timestamptz, retry_after interval, result_json jsonb,
        result_body bytea, error_code text, error_message text, previous text, progress jsonb) RETURNS text LANGUAGE sql AS $$
    SELECT answer(ROW($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)::idem_claim_result)
$$;
CREATE FUNCTION ba.claim_many(keys text[], requests jsonb[] DEFAULT NULL, operation text DEFAULT NULL, lease interval DEFAULT NULL)
    RETURNS TABLE (ordinality bigint, key text, answer text) LANGUAGE sql AS $$
    SELECT ordinality, key, ba.row_answer(outcome, owner_token, attempts, lease_until, retry_after, result_json, result_body, error_code, error_message, previous, progress)
    FROM idem_claim_many($1, $2, $3, $4)
$$;

--
-- Input order, repeated keys.
--
SELECT * FROM ba.claim_many('{z,a,m,B,"",aa}');
SELECT * FROM ba.claim_many('{z,a,m,B,aa,ä,"a b",a}');
SELECT * FROM ba.claim_many('{z,a,m,B,aa,ä,"a b",a}');
SELECT ordinality, key, first FROM idem_once_many('{oz,oa,om,oz,oB,oa,oz}');
SELECT ordinality, key, first FROM idem_once_many('{oz,new,oa,new}');
-- the first of equal keys in input order gets it
SELECT ordinality, outcome, owner_token IS NOT NULL AS token FROM idem_claim_many('{r,q,r,q,r}');
-- the tokens are all different, and are those stored
CREATE TABLE ba.token AS SELECT key, owner_token FROM idem_claim_many(ARRAY(SELECT 'tok' || n FROM generate_series(1, 100) n));
SELECT count(DISTINCT t.owner_token), bool_and(t.owner_token = r.owner_token) FROM ba.token t, idem_status(t.key) r;
-- a lower bound, and columns by name
SELECT ordinality, key, outcome FROM idem_claim_many('[5:6]={l1,l2}');
SELECT * FROM (SELECT (o).* FROM (SELECT o FROM idem_once_many('{l3}') o) s) t;
-- in the select list, and cut off by LIMIT: all are done
SELECT idem_once_many('{l4,l4}');
SELECT ordinality, first FROM idem_once_many('{l5,l6,l7}') LIMIT 1;
SELECT stored('l7');

--
-- NULL, empty, wrong lengths, two dimensions: before anything is written.
--
SELECT * FROM idem_claim_many('{}');
SELECT * FROM idem_complete_many('{}', '{}');
SELECT * FROM idem_once_many('{}');
SELECT * FROM idem_claim_many('{}', '{}');
SELECT call, tried('SELECT count(*) FROM ' || call) FROM unnest(ARRAY[
    'idem_claim_many(NULL)', 'idem_complete_many(NULL, NULL)', $$idem_complete_many('{bad}', NULL)$$, $$idem_complete_many(NULL, '{}')$$, 'idem_once_many(NULL)',
    $$idem_claim_many('{bad,NULL}')$$, $$idem_once_many('{bad,NULL}')$$, $$idem_complete_many('{bad,NULL}', '{00000000-0000-4000-8000-000000000001,00000000-0000-4000-8000-000000000001}')$$,
    $$idem_complete_many('{bad}', '{NULL}')$$,
    $$idem_claim_many('{bad,""}')$$, $$idem_claim_many(ARRAY['bad', repeat('x', 1025)])$$, $$idem_once_many('{bad,""}')$$, $$idem_once_many(ARRAY['bad', repeat('x', 1025)])$$,
    $$idem_claim_many('{bad,bad2}', '{1}')$$, $$idem_claim_many('{bad}', '{1,2}')$$, $$idem_claim_many('{bad}', '{}')$$,
    $$idem_complete_many('{bad,bad2}', '{00000000-0000-4000-8000-000000000001}')$$,
    $$idem_complete_many('{bad}', '{00000000-0000-4000-8000-000000000001}', '{}')$$,
    $$idem_complete_many('{bad}', '{00000000-0000-4000-8000-000000000001}', '{1,2}')$$,
    $$idem_claim_many('{{bad},{bad2}}')$$, $$idem_once_many('{{bad},{bad2}}')$$, $$idem_claim_many('{bad,bad2}', '{{1},{2}}')$$,
    $$idem_claim_many('{bad}', operation => '')$$, $$idem_claim_many('{bad}', operation => repeat('x', 1025))$$,
    $$idem_claim_many('{bad}', lease => '0')$$, $$idem_claim_many('{bad}', lease => '-1 s')$$, $$idem_claim_many('{bad}', lease => '1 mon')$$]) call;
SELECT stored('bad'), stored('bad2');

--
-- Requests per key, conflicts, operation, lease.
--
SELECT * FROM ba.claim_many('{p1,p2,p3}', '{"{\"a\": 1}",NULL,"null"}', 'three', '10 min');
SELECT key, r.operation, r.lease_until - r.updated_at AS lease, r.status FROM unnest('{p1,p2,p3}'::text[]) key, idem_status(key) r;
SELECT * FROM ba.claim_many('{p1,p2,p3}', '{"{\"a\": 1.0}",NULL,"null"}', 'three');
SELECT * FROM ba.claim_many('{p1,p2,p3}', '{"{\"a\": 2}","null",NULL}', 'three');
SELECT * FROM ba.claim_many('{p1,p2,p3}');
SELECT * FROM ba.claim_many('{p2}', operation => 'single');
-- equal keys with different requests
SELECT * FROM ba.claim_many('{p4,p4,p4}', '{1,2,1}');
-- a request that is stored
INSERT INTO idem_policy (operation, store_request) VALUES ('keeps', true);
SELECT * FROM ba.claim_many('{p5,p6}', '{"{\"keep\": [1]}",NULL}', 'keeps');
SELECT stored('p5'), stored('p6');
DELETE FROM idem_policy WHERE operation = 'keeps';
-- the single and the batch form are told the same of each other's
SELECT answer(c) FROM idem_claim('p1', '{"a": 1}', 'three') c;
SELECT outcome FROM idem_claim('p7', '{"a": 1}');
SELECT * FROM ba.claim_many('{p7}', '{"{\"a\": 1}"}');

--
-- Completing.
--
SELECT array_agg(key ORDER BY ordinality) AS keys, array_agg(owner_token ORDER BY ordinality) AS tokens FROM idem_claim_many('{c3,c1,c2}') \gset
SELECT * FROM idem_complete_many(:'keys', :'tokens', '{1,NULL,"null"}');
SELECT key, stored(key) FROM unnest(:'keys'::text[]) key;
SELECT * FROM idem_complete_many(:'keys', :'tokens', '{1.0,NULL,"null"}');
SELECT * FROM idem_complete_many(:'keys', :'tokens', '{1,2,"null"}');
SELECT * FROM idem_complete_many(:'keys', :'tokens');
-- one that fails: none is completed
SELECT array_agg(key ORDER BY ordinality) AS keys, array_agg(owner_token ORDER BY ordinality) AS tokens FROM idem_claim_many('{d1,d2,d3}') \gset
SELECT * FROM idem_complete_many(:'keys', (:'tokens'::uuid[])[1:2] || :T1::uuid);
SELECT * FROM idem_complete_many(:'keys'::text[] || 'absent'::text, :'tokens'::uuid[] || :T1::uuid);
SELECT key, stored(key) FROM unnest(:'keys'::text[]) key;
-- the same twice; without results
SELECT * FROM idem_complete_many(:'keys'::text[] || 'd2'::text, :'tokens'::uuid[] || (:'tokens'::uuid[])[2]);
SELECT key, stored(key) FROM unnest(:'keys'::text[]) key;
-- too large for the policy
INSERT INTO idem_policy (operation, max_result_size) VALUES ('tight', 10);
SELECT array_agg(key ORDER BY ordinality) AS keys, array_agg(owner_token ORDER BY ordinality) AS tokens FROM idem_claim_many('{e1,e2}', operation => 'tight') \gset
SELECT * FROM idem_complete_many(:'keys', :'tokens', ARRAY['1', to_jsonb(repeat('x', 11))]::jsonb[]);
SELECT * FROM idem_complete_many(:'keys', :'tokens', ARRAY['1', to_jsonb(repeat('x', 8))]::jsonb[]);
DELETE FROM idem_policy WHERE operation = 'tight';

--
-- Single and batch are the same in every state (C19): answer, error, and the row that is left.
--
SELECT make_states(p || form, '{"amount": 1}', :T1) FROM unnest('{claim,other,op,complete,right,wrong,once}'::text[]) p, unnest('{1,n}'::text[]) form;
SET idempotency.clock_offset = '100 s';
CREATE FUNCTION ba.both(prefix text, state text, single text, batch text) RETURNS TABLE (answer text, same_answer boolean, same_row boolean) LANGUAGE plpgsql AS $$
DECLARE
    a text;
    b text;
BEGIN
    a := tried(format(single, prefix || '1_' || state));
    b := tried(format(batch, prefix || 'n_' || state));
    RETURN QUERY SELECT a, a = b, stored(prefix || '1_' || state) IS NOT DISTINCT FROM stored(prefix || 'n_' || state);
END $$;
CREATE TABLE ba.form (n serial, prefix text, single text, batch text);
INSERT INTO ba.form (prefix, single, batch) VALUES
    ('claim', $$SELECT answer(c) FROM idem_claim(%L, '{"amount": 1}') c$$,
              $$SELECT answer FROM ba.claim_many(ARRAY[%L], ARRAY['{"amount": 1}'::jsonb])$$),
    ('other', $$SELECT answer(c) FROM idem_claim(%L, '{"amount": 2}') c$$,
              $$SELECT answer FROM ba.claim_many(ARRAY[%L], ARRAY['{"amount": 2}'::jsonb])$$),
    ('op',    $$SELECT answer(c) FROM idem_claim(%L, '{"amount": 1}', 'single', '1 min') c$$,
              $$SELECT answer FROM ba.claim_many(ARRAY[%L], ARRAY['{"amount": 1}'::jsonb], 'single', '1 min')$$),
    ('complete', $$SELECT idem_complete(%L, '00000000-0000-4000-8000-000000000001', '{"other": 1}')$$,
              $$SELECT completed FROM idem_complete_many(ARRAY[%L], ARRAY['00000000-0000-4000-8000-000000000001'::uuid], ARRAY['{"other": 1}'::jsonb])$$),
    ('right', $$SELECT idem_complete(%L, '00000000-0000-4000-8000-000000000001', '{"done": true}')$$,
              $$SELECT completed FROM idem_complete_many(ARRAY[%L], ARRAY['00000000-0000-4000-8000-000000000001'::uuid], ARRAY['{"done": true}'::jsonb])$$),
    ('wrong', $$SELECT idem_complete(%L, '00000000-0000-4000-8000-000000000009', '{"done": true}')$$,
              $$SELECT completed FROM idem_complete_many(ARRAY[%L], ARRAY['00000000-0000-4000-8000-000000000009'::uuid], ARRAY['{"done": true}'::jsonb])$$),
    ('once',  $$SELECT idem_once(%L)$$, $$SELECT first FROM idem_once_many(ARRAY[%L])$$);
SELECT prefix, coalesce(state, 'absent') AS state, b.*
    FROM ba.form, (SELECT ord, state FROM states UNION ALL SELECT 99, 'absent') s, ba.both(prefix, state, single, batch) b ORDER BY n, ord;
-- for idem_once_many, whose requests are none: states of records without one
RESET idempotency.clock_offset;
SELECT make_states('bare' || form, NULL, :T1) FROM unnest('{1,n}'::text[]) form;
SET idempotency.clock_offset = '100 s';
SELECT state, b.* FROM ba.form, states, ba.both('bare', state, single, batch) b WHERE prefix = 'once' ORDER BY ord;
-- all states in one call, against one by one
RESET idempotency.clock_offset;
SELECT make_states(p, '{"amount": 1}', :T1) FROM unnest('{all1,alln}'::text[]) p;
SET idempotency.clock_offset = '100 s';
SELECT array_agg('alln_' || state ORDER BY md5(state)) AS keys, array_agg('{"amount": 1}'::jsonb) AS requests FROM states \gset
CREATE TABLE ba.in_one AS SELECT * FROM ba.claim_many(:'keys', :'requests');
CREATE TABLE ba.one_by_one AS SELECT 'alln_' || state AS key, answer(a) FROM states, idem_claim('all1_' || state, '{"amount": 1}') a;
SELECT count(*), bool_and(c.answer = s.answer) AS same_answers, bool_and(stored(key) = stored(replace(key, 'alln', 'all1'))) AS same_rows
    FROM ba.in_one c JOIN ba.one_by_one s USING (key);
RESET idempotency.clock_offset;

--
-- 10,000 keys in one call: few locks, in one transaction, in order.
--
BEGIN;
SELECT array_agg('big' || n ORDER BY md5(n::text)) AS keys, array_agg(to_jsonb(n) ORDER BY md5(n::text)) AS results FROM generate_series(1, 10000) n \gset
CREATE TEMP TABLE big AS SELECT * FROM idem_claim_many(:'keys', :'results');
SELECT count(*) < 30 AS few_locks, count(*) FILTER (WHERE locktype = 'advisory') AS advisory FROM pg_locks WHERE pid = pg_backend_pid();
SELECT outcome, count(*), bool_and(key = (:'keys'::text[])[ordinality]) AS in_order, min(ordinality), max(ordinality) FROM big GROUP BY outcome;
SELECT completed, count(*), bool_and(key = (:'keys'::text[])[ordinality]) AS in_order
    FROM idem_complete_many(:'keys', (SELECT array_agg(owner_token ORDER BY ordinality) FROM big), :'results') GROUP BY completed;
SELECT count(*) < 30 AS few_locks, count(*) FILTER (WHERE locktype = 'advisory') AS advisory FROM pg_locks WHERE pid = pg_backend_pid();
SELECT outcome, count(*), bool_and(result_json = (:'results'::jsonb[])[ordinality]) AS result FROM idem_claim_many(:'keys', :'results') GROUP BY outcome;
SELECT first, count(*) FROM idem_once_many(ARRAY(SELECT 'bigonce' || n % 10000 FROM generate_series(1, 20000) n)) GROUP BY first ORDER BY first;
SELECT count(*) < 30 AS few_locks, count(*) FILTER (WHERE locktype = 'advisory') AS advisory FROM pg_locks WHERE pid = pg_backend_pid();
SELECT count(*), count(DISTINCT xmin::text) AS transactions FROM idem_record WHERE idempotency_key ~ '^big';
ROLLBACK;
SELECT count(*) FROM idem_record WHERE idempotency_key ~ '^big';
-- little work_mem: the answers spill
SET work_mem = '64kB';
SELECT outcome, count(*), bool_and(key = 'spill' || ordinality) AS in_order FROM idem_claim_many(ARRAY(SELECT 'spill' || n FROM generate_series(1, 10000) n)) GROUP BY outcome;
RESET work_mem;

--
-- Transactions.
--
BEGIN;
SAVEPOINT s;
SELECT * FROM idem_once_many('{s1,s2}');
ROLLBACK TO s;
SELECT * FROM idem_once_many('{s2,s3}');
COMMIT;
SELECT * FROM idem_once_many('{s1,s2,s3}');
-- ID003 for one takes all back
SELECT outcome FROM idem_claim('s5');
SELECT * FROM idem_once_many('{s4,s5,s6}');
SELECT stored('s4'), stored('s6');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT ordinality, key, outcome FROM idem_claim_many('{s1,s7,s7}');
COMMIT;
BEGIN READ ONLY;
SELECT tried($$SELECT 1 FROM idem_claim_many('{s8}')$$), tried($$SELECT 1 FROM idem_once_many('{s8}')$$);
ROLLBACK;

SELECT * FROM idem_check();
DELETE FROM idem_record;
DROP SCHEMA ba CASCADE;
