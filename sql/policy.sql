--
-- idem_policy, and constraints and indexes of idem_record
--
\set VERBOSITY sqlstate
\set T1 '''00000000-0000-4000-8000-000000000001'''
\set T2 '''00000000-0000-4000-8000-000000000002'''

SELECT operation, lease, max_attempts, max_elapsed, backoff_base, backoff_factor, backoff_cap, jitter, on_lease_expiry, store_request,
       digest_ignore, retryable_codes, permanent_codes, unknown_codes, max_result_size, notify, retention
    FROM idem_policy WHERE operation = 'default';

--
-- Constraints refuse nonsense.
--
INSERT INTO idem_policy (operation) VALUES ('probe');
SELECT setting, what_if(format('UPDATE idem_policy SET %s WHERE operation = %L', setting, 'probe')) AS answer FROM unnest(ARRAY[
    $$operation = NULL$$, $$operation = ''$$, $$operation = repeat('o', 1024)$$, $$operation = repeat('o', 1025)$$,
    $$lease = NULL$$, $$lease = '0'$$, $$lease = '-1 s'$$, $$lease = '1 mon'$$, $$lease = '-1 mon 40 days'$$, $$lease = '1 us'$$, $$lease = '366 days'$$, $$lease = '367 days'$$,
    $$max_attempts = NULL$$, $$max_attempts = 0$$, $$max_attempts = -1$$, $$max_attempts = 1$$, $$max_attempts = 10000$$, $$max_attempts = 10001$$,
    $$max_elapsed = NULL$$, $$max_elapsed = '0'$$, $$max_elapsed = '-1 s'$$, $$max_elapsed = '1 year'$$, $$max_elapsed = '3660 days'$$, $$max_elapsed = '3661 days'$$,
    $$backoff_base = NULL$$, $$backoff_base = '-1 s'$$, $$backoff_base = '0'$$, $$backoff_base = '10 min'$$, $$backoff_base = '1 mon', backoff_cap = '60 days'$$,
    $$backoff_factor = NULL$$, $$backoff_factor = 0.99$$, $$backoff_factor = 1$$, $$backoff_factor = 1001$$, $$backoff_factor = 'NaN'$$, $$backoff_factor = 'Infinity'$$, $$backoff_factor = '-Infinity'$$,
    $$backoff_cap = NULL$$, $$backoff_cap = '0'$$, $$backoff_cap = '1 s'$$, $$backoff_cap = '1 mon'$$, $$backoff_cap = '366 days'$$, $$backoff_cap = '367 days'$$,
    $$jitter = NULL$$, $$jitter = 'Full'$$, $$jitter = 'some'$$, $$jitter = 'equal'$$, $$jitter = 'none'$$,
    $$on_lease_expiry = NULL$$, $$on_lease_expiry = 'fail'$$, $$on_lease_expiry = 'unknown'$$,
    $$store_request = NULL$$, $$notify = NULL$$,
    $$digest_ignore = NULL$$, $$digest_ignore = '{NULL}'$$, $$digest_ignore = '{/a,""}'$$, $$digest_ignore = '{/a,/b/0}'$$,
    $$retryable_codes = NULL$$, $$retryable_codes = '{NULL}'$$, $$permanent_codes = '{NULL}'$$, $$unknown_codes = '{NULL}'$$,
    $$retryable_codes = '{A,B}', permanent_codes = '{B}'$$, $$retryable_codes = '{A,B}', unknown_codes = '{B}'$$, $$permanent_codes = '{A}', unknown_codes = '{B,A}'$$,
    $$retryable_codes = '{A}', permanent_codes = '{B}', unknown_codes = '{C}'$$,
    $$max_result_size = NULL$$, $$max_result_size = -1$$, $$max_result_size = 0$$, $$max_result_size = 268435456$$,
    $$retention = '1 day'$$]) setting;
-- the retention belongs to the row default
SELECT setting, what_if(format('UPDATE idem_policy SET %s WHERE operation = %L', setting, 'default')) AS answer FROM unnest(ARRAY[
    $$retention = NULL$$, $$retention = '0'$$, $$retention = '-1 s'$$, $$retention = '1 mon'$$, $$retention = '1 s'$$, $$retention = '3660 days'$$, $$retention = '3661 days'$$]) setting;
SELECT what_if($$INSERT INTO idem_policy (operation) VALUES ('probe')$$) AS twice;

--
-- The row default cannot go away, and inserting it again replaces it.
--
DELETE FROM idem_policy WHERE operation = 'default';
DELETE FROM idem_policy;
UPDATE idem_policy SET operation = 'other' WHERE operation = 'default';
TRUNCATE idem_policy;
SELECT count(*) FROM idem_policy WHERE operation IN ('default', 'probe');
UPDATE idem_policy SET lease = '31 s' WHERE operation = 'default';
SELECT lease FROM idem_policy WHERE operation = 'default';
INSERT INTO idem_policy (operation, lease, retention) VALUES ('restored', '1 min', NULL), ('default', '32 s', '1 day');
SELECT operation, lease, retention FROM idem_policy WHERE operation IN ('default', 'restored') ORDER BY operation;
SELECT what_if($$INSERT INTO idem_policy (operation) VALUES ('default')$$) AS without_retention;
SELECT operation, lease, retention FROM idem_policy WHERE operation = 'default';
-- as a dump does it
COPY idem_policy (operation, lease, retention) FROM stdin;
default	00:00:33	7 days
copied	00:02:00	\N
\.
SELECT operation, lease, retention FROM idem_policy WHERE operation IN ('default', 'copied') ORDER BY operation;
UPDATE idem_policy SET operation = 'renamed' WHERE operation = 'copied';
DELETE FROM idem_policy WHERE operation IN ('renamed', 'restored');
UPDATE idem_policy SET lease = DEFAULT WHERE operation = 'default';
SELECT count(*) FROM idem_policy WHERE operation = 'default';

--
-- Sessions follow changes.
--
CREATE FUNCTION lease_of(key text, operation text) RETURNS interval LANGUAGE sql VOLATILE AS $$
    SELECT idem_claim(key, operation => operation);
    SELECT lease_until - updated_at FROM idem_record WHERE idempotency_key = key;
$$;
SELECT lease_of('follow 1', 'followed');
INSERT INTO idem_policy (operation, lease) VALUES ('followed', '1 min');
SELECT lease_of('follow 2', 'followed');
UPDATE idem_policy SET lease = '2 min' WHERE operation = 'followed';
SELECT lease_of('follow 3', 'followed');
BEGIN;
UPDATE idem_policy SET lease = '3 min' WHERE operation = 'followed';
SELECT lease_of('follow 4', 'followed');
ROLLBACK;
SELECT lease_of('follow 5', 'followed');
BEGIN;
SAVEPOINT s;
UPDATE idem_policy SET lease = '4 min' WHERE operation = 'followed';
SELECT lease_of('follow 6', 'followed');
ROLLBACK TO s;
SELECT lease_of('follow 7', 'followed');
COMMIT;
SELECT lease_of('follow 8', 'followed');
DELETE FROM idem_policy WHERE operation = 'followed';
SELECT lease_of('follow 9', 'followed');
UPDATE idem_policy SET lease = '45 s' WHERE operation = 'default';
SELECT lease_of('follow 10', 'followed'), lease_of('follow 11', NULL);
UPDATE idem_policy SET lease = DEFAULT WHERE operation = 'default';
SELECT lease_of('follow 12', 'followed'), lease_of('follow 13', NULL);
-- names that are long, and more of them than are remembered
INSERT INTO idem_policy (operation, lease) SELECT repeat('o', n), n * interval '1 s' FROM unnest(ARRAY[62, 63, 64, 1024]) n;
SELECT n, lease_of('long ' || n, repeat('o', n)) FROM unnest(ARRAY[61, 62, 63, 64, 65, 1024]) n;
INSERT INTO idem_policy (operation, lease) SELECT 'number ' || n, n * interval '1 s' FROM generate_series(1, 600) n;
SELECT count(*) FROM generate_series(1, 600) n WHERE extract(epoch FROM lease_of('numbered ' || n, 'number ' || n)) = n;
SELECT lease_of('numbered again', 'number 7');
-- the operation is the middle part of a three-part key
INSERT INTO idem_policy (operation, lease) VALUES ('refund', '70 s');
SELECT lease_of(idem_key('t1', 'refund', 'policy'), NULL), lease_of('t1:refund', NULL), lease_of(idem_key('t1', 'charge', 'policy'), 'refund');
-- a record follows the policy of its operation, not that of a later caller
INSERT INTO idem_policy (operation, max_attempts) VALUES ('once', 1);
SELECT outcome FROM idem_claim('own policy', operation => 'once');
SET idempotency.clock_offset = '40 s';
SELECT answer(c) FROM idem_claim('own policy') c;
RESET idempotency.clock_offset;

--
-- Requests: stored where the policy says so, and without what it says to ignore (C99).
--
INSERT INTO idem_policy (operation, store_request) VALUES ('stored', true);
SELECT outcome FROM idem_claim('request kept', '{"a": 1, "secret": 2}', 'stored', token => :T1);
SELECT outcome FROM idem_claim('request not kept', '{"a": 1}', 'probe');
SELECT outcome FROM idem_claim('request by digest', operation => 'stored', digest => '\x0102');
SELECT key, request_json, request_hash = idem_digest('{"a": 1, "secret": 2}') AS same FROM unnest(ARRAY['request kept', 'request not kept', 'request by digest']) key, idem_status(key);
SELECT status FROM idem_fail('request kept', :T1, 'retryable', retry_after => '0');
SELECT outcome FROM idem_claim('request kept', '{"a": 1, "secret": 2}', token => :T2);
SELECT request_json FROM idem_status('request kept');
SELECT idem_complete('request kept', :T2);
SELECT request_json FROM idem_status('request kept');

INSERT INTO idem_policy (operation, digest_ignore) VALUES ('ignoring', '{/sent_at,/trace/id,/items/0,/a~1b,/c~0d}');
SELECT outcome FROM idem_claim('c99', '{"amount": 1, "sent_at": 1, "trace": {"id": 1, "x": 1}, "items": [1, 2], "a/b": 1, "c~d": 1}', 'ignoring');
SELECT name, outcome FROM (VALUES
    ('same', '{"amount": 1, "sent_at": 1, "trace": {"id": 1, "x": 1}, "items": [1, 2], "a/b": 1, "c~d": 1}'::jsonb),
    ('ignored changed', '{"amount": 1, "sent_at": 2, "trace": {"id": 2, "x": 1}, "items": [9, 2], "a/b": 2, "c~d": 2}'),
    ('ignored absent', '{"amount": 1, "trace": {"x": 1}, "items": [7, 2]}'),
    ('sibling changed', '{"amount": 1, "sent_at": 1, "trace": {"id": 1, "x": 2}, "items": [1, 2]}'),
    ('element changed', '{"amount": 1, "sent_at": 1, "trace": {"id": 1, "x": 1}, "items": [1, 3]}'),
    ('amount changed', '{"amount": 2, "sent_at": 1, "trace": {"id": 1, "x": 1}, "items": [1, 2]}')) v (name, request),
    idem_claim('c99', request);
-- a change of the list changes the digest: conflict, not a silent replay
UPDATE idem_policy SET digest_ignore = '{/amount}' WHERE operation = 'ignoring';
SELECT outcome FROM idem_claim('c99', '{"amount": 1, "sent_at": 1, "trace": {"id": 1, "x": 1}, "items": [1, 2], "a/b": 1, "c~d": 1}');
UPDATE idem_policy SET digest_ignore = DEFAULT WHERE operation = 'ignoring';
SELECT outcome FROM idem_claim('c99', '{"amount": 1, "sent_at": 1, "trace": {"id": 1, "x": 1}, "items": [1, 2], "a/b": 1, "c~d": 1}');
-- a pointer that is none is an error, wherever it is found
SELECT what_if($$UPDATE idem_policy SET digest_ignore = '{sent_at}' WHERE operation = 'ignoring'$$, $$SELECT outcome FROM idem_claim('bad pointer', '{}', 'ignoring')$$) IN ('22023', '23514') AS refused;

--
-- Constraints of the records (C38).
--
SELECT outcome FROM idem_claim('p', token => :T1);
SELECT f.status FROM idem_claim('r', token => :T1) c, idem_fail('r', c.owner_token, 'retryable', retry_after => '1 h') f;
SELECT f.status FROM idem_claim('u', token => :T1) c, idem_fail('u', c.owner_token, 'unknown') f;
SELECT f.status FROM idem_claim('f', token => :T1) c, idem_fail('f', c.owner_token, 'permanent') f;
SELECT f FROM idem_claim('s', token => :T1) c, idem_complete('s', c.owner_token, '1') f;
SELECT key, change, what_if(format('UPDATE idem_record SET %s WHERE idempotency_key = %L', change, key)) AS answer FROM (VALUES
    ('p', $$lease_until = NULL$$), ('p', $$lease_until = 'infinity'$$), ('p', $$lease_until = '-infinity'$$), ('p', $$owner_token = NULL$$), ('p', $$retry_at = now()$$),
    ('p', $$status = 'running'$$), ('p', $$status = 'succeeded'$$), ('p', $$status = 'unknown'$$), ('p', $$slice = 1$$), ('p', $$slice = 5$$), ('p', $$slice = 1, status = 'succeeded'$$),
    ('p', $$result_json = '1'$$), ('p', $$result_body = ''$$), ('p', $$attempts = -1$$), ('p', $$previous = 'some'$$), ('p', $$limits_from_attempt = 2$$), ('p', $$limits_from_attempt = -1$$),
    ('p', $$idempotency_key = ''$$), ('p', $$idempotency_key = repeat('x', 1025)$$), ('p', $$idempotency_key = 'r'$$), ('p', $$owner = NULL$$), ('p', $$request_hash = NULL$$), ('p', $$operation = NULL$$),
    ('r', $$retry_at = NULL$$), ('r', $$retry_at = 'infinity'$$), ('r', $$lease_until = now()$$), ('r', $$owner_token = '00000000-0000-4000-8000-000000000001'$$),
    ('u', $$owner_token = '00000000-0000-4000-8000-000000000001'$$), ('u', $$retry_at = now()$$), ('u', $$result_json = '1'$$),
    ('f', $$result_json = '1'$$), ('f', $$lease_until = now()$$), ('f', $$retry_at = now()$$), ('f', $$slice = 0$$),
    ('s', $$lease_until = now()$$), ('s', $$retry_at = now()$$), ('s', $$slice = 0$$), ('s', $$status = 'processing'$$), ('s', $$status = 'processing', slice = 0$$),
    ('s', $$result_json = NULL$$), ('p', $$lease_until = now() + '10 years'$$)) v (key, change);
-- each unfinished record is in one bucket of the statistics, whatever the time (C38)
SELECT make_states('bucket', '{}', :T1);
SELECT sum(processing + expired + retry_waiting + retry_due + unknown + exhausted) = (SELECT count(*) FROM idem_record_open) AS each_once FROM idem_stats;
SET idempotency.clock_offset = '100 s';
SELECT sum(processing + expired + retry_waiting + retry_due + unknown + exhausted) = (SELECT count(*) FROM idem_record_open) AS each_once FROM idem_stats;
SELECT operation, processing > 0 AS processing, expired > 0 AS expired, retry_waiting > 0 AS retry_waiting, retry_due > 0 AS retry_due, unknown > 0 AS unknown, exhausted > 0 AS exhausted
    FROM idem_stats WHERE operation IN ('three', 'doubtful', 'single') ORDER BY operation;
RESET idempotency.clock_offset;

--
-- Indexes that a DBA adds are kept up, of every kind, on both sides of a move.
--
CREATE INDEX dba_plain ON idem_record_open (status, attempts);
CREATE INDEX dba_partial ON idem_record_open (lease_until) WHERE status = 'processing';
CREATE INDEX dba_expression ON idem_record_open (md5(idempotency_key), (attempts + 1));
CREATE INDEX dba_partial_expression ON idem_record_open (upper(error_code)) WHERE error_code IS NOT NULL;
CREATE INDEX dba_hash ON idem_record_open USING hash (owner_token);
CREATE INDEX dba_gin ON idem_record_open USING gin (progress);
CREATE INDEX dba_brin ON idem_record_open USING brin (updated_at);
SELECT state, slice FROM idem_ring WHERE state = 'current';
SELECT r.slice AS current FROM idem_status('s') r \gset
CREATE INDEX dba_ring ON idem_record_:current (operation, status);
CREATE INDEX dba_ring_partial ON idem_record_:current (error_code) WHERE status = 'failed';
CREATE INDEX dba_ring_expression ON idem_record_:current ((result_json ->> 'n'));
CREATE FUNCTION live_a_life(key text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c idem_claim_result;
    n integer := substring(key FROM '\d+$')::integer;
BEGIN
    PERFORM set_config('idempotency.clock_offset', '0', true);
    c := idem_claim(key, operation => 'lives');
    PERFORM idem_checkpoint(key, c.owner_token, 'step', to_jsonb(n));
    PERFORM idem_renew(key, c.owner_token, '2 min');
    IF n % 7 = 0 THEN RETURN; END IF;
    IF n % 7 = 1 THEN PERFORM idem_release(key, c.owner_token); RETURN; END IF;
    IF n % 2 = 0 THEN
        PERFORM idem_fail(key, c.owner_token, 'retryable', 'm', 'e' || n % 3, '1 min');
    END IF;
    PERFORM set_config('idempotency.clock_offset', '200 s', true);
    c := idem_claim(key);
    IF n % 7 = 2 THEN RETURN; END IF;
    IF n % 7 = 3 THEN PERFORM idem_fail(key, c.owner_token, 'unknown', 'm', 'u'); RETURN; END IF;
    IF n % 7 = 4 THEN PERFORM idem_fail(key, c.owner_token, 'permanent', 'm', 'p' || n % 3); RETURN; END IF;
    IF n % 7 = 5 THEN PERFORM idem_fail(key, c.owner_token, 'retryable', 'm', 'r'); RETURN; END IF;
    PERFORM idem_complete(key, c.owner_token, jsonb_build_object('n', n));
END
$$;
INSERT INTO idem_policy (operation) VALUES ('lives');
SELECT count(live_a_life('life ' || n)) FROM generate_series(1, 700) n;
-- the same answer through the index as without it
CREATE FUNCTION through_index(index text, query text) RETURNS TABLE (used boolean, same boolean, some boolean) LANGUAGE plpgsql AS $$
DECLARE
    plain text;
    other text;
BEGIN
    PERFORM set_config('enable_seqscan', 'on', true), set_config('enable_indexscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
            set_config('enable_indexonlyscan', 'off', true);
    EXECUTE format('SELECT count(*) > 0, string_agg(idempotency_key, %L ORDER BY idempotency_key) FROM (%s) q', ',', query) INTO some, plain;
    PERFORM set_config('enable_seqscan', 'off', true), set_config('enable_indexscan', 'on', true), set_config('enable_bitmapscan', 'on', true);
    used := EXISTS (SELECT FROM plan_of(query) p WHERE p ~ ('on ' || index || '\M|using ' || index || '\M'));
    EXECUTE format('SELECT string_agg(idempotency_key, %L ORDER BY idempotency_key) FROM (%s) q', ',', query) INTO other;
    same := plain IS NOT DISTINCT FROM other;
    RETURN NEXT;
END
$$;
SELECT index, t.* FROM (VALUES
    ('dba_plain', $$SELECT idempotency_key FROM idem_record_open WHERE status = 'processing' AND attempts = 2$$),
    ('dba_plain', $$SELECT idempotency_key FROM idem_record_open WHERE status = 'retryable_failed' AND attempts > 0$$),
    ('dba_partial', $$SELECT idempotency_key FROM idem_record_open WHERE status = 'processing' AND lease_until > '2000-01-01'$$),
    ('dba_expression', $$SELECT idempotency_key FROM idem_record_open WHERE md5(idempotency_key) = md5('life 7')$$),
    ('dba_expression', $$SELECT idempotency_key FROM idem_record_open WHERE md5(idempotency_key) >= '' AND attempts + 1 = 3$$),
    ('dba_partial_expression', $$SELECT idempotency_key FROM idem_record_open WHERE error_code IS NOT NULL AND upper(error_code) = 'R'$$),
    ('dba_partial_expression', $$SELECT idempotency_key FROM idem_record_open WHERE error_code IS NOT NULL AND upper(error_code) = 'U'$$),
    ('dba_hash', $$SELECT idempotency_key FROM idem_record_open WHERE owner_token = (SELECT owner_token FROM idem_record WHERE idempotency_key = 'life 9')$$),
    ('dba_gin', $$SELECT idempotency_key FROM idem_record_open WHERE progress @> '{"step": 9}'$$),
    ('dba_brin', $$SELECT idempotency_key FROM idem_record_open WHERE updated_at > '2000-01-01'$$)) v (index, query), through_index(index, query) t;
SELECT index, t.* FROM (VALUES
    ('dba_ring', $$SELECT idempotency_key FROM idem_record_%s WHERE operation = 'lives' AND status = 'succeeded'$$),
    ('dba_ring_partial', $$SELECT idempotency_key FROM idem_record_%s WHERE status = 'failed' AND error_code = 'p1'$$),
    ('dba_ring_expression', $$SELECT idempotency_key FROM idem_record_%s WHERE result_json ->> 'n' = '6'$$)) v (index, query), through_index(index, format(query, :current)) t;
-- a unique index of the DBA is an error like any other, and leaves the key as it was
CREATE UNIQUE INDEX dba_unique ON idem_record_open (request_hash) WHERE operation = 'unique';
SELECT outcome FROM idem_claim('unique 1', '{"a": 1}', 'unique');
SELECT outcome FROM idem_claim('unique 2', '{"a": 1}', 'unique');
SELECT stored('unique 1'), stored('unique 2');
DROP INDEX dba_unique;
SELECT outcome FROM idem_claim('unique 2', '{"a": 1}', 'unique');
DROP INDEX dba_plain, dba_partial, dba_expression, dba_partial_expression, dba_hash, dba_gin, dba_brin, dba_ring, dba_ring_partial, dba_ring_expression;

-- many updates of one record, through many pages and versions
CREATE FUNCTION renew_often(key text, token uuid, times integer) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT count(idem_renew(key, token, n * interval '1 min')) FROM generate_series(1, times) n
$$;
SELECT outcome FROM idem_claim('renewed often', token => :T1);
SELECT renew_often('renewed often', :T1, 2000);
SELECT lease_until - updated_at AS lease FROM idem_status('renewed often');
SELECT count(*) FROM idem_record WHERE idempotency_key = 'renewed often';

DELETE FROM idem_policy WHERE operation <> 'default' AND operation NOT IN ('single', 'three', 'doubtful');
SELECT * FROM idem_check();
