-- Recovery in one tale: lapses, the reaper and its ring, recovery workers, operators.
SET client_min_messages = warning;
TRUNCATE idem_record;
INSERT INTO idem_policy (operation, max_attempts, backoff_base, jitter, on_lease_expiry, store_request)
    VALUES ('work', 3, '10 s', 'none', 'retry', true), ('doubt', 3, '10 s', 'none', 'unknown', false);
CREATE FUNCTION token(n integer) RETURNS uuid IMMUTABLE LANGUAGE sql AS
    $$ SELECT ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid $$;
CREATE FUNCTION row_of(k text) RETURNS text LANGUAGE sql AS
    $$ SELECT format('%s %s attempts=%s previous=%s code=%s message=%s',
           CASE slice WHEN 0 THEN 'open' ELSE 'ring' END, status, attempts, previous, error_code, error_message)
       FROM idem_record WHERE idempotency_key = k $$;

-- C64: 10, 20, 40 s; from the call of idem_fail
SELECT idem_backoff(n, '10 s', 2, '5 min', 'none') FROM generate_series(1, 7) n;
SELECT idem_backoff(2147483647, '10 s', 2, '5 min', 'none'), idem_backoff(2147483647, '10 s', 1000, '366 days', 'equal') <= '366 days';
-- C65: ranges of the jitters
SELECT min(d) < '1 s' AS low, max(d) > '9 s' AS high, bool_and(d >= '0' AND d <= '10 s') AS inside, count(DISTINCT d) > 900 AS spread
    FROM (SELECT idem_backoff(1, '10 s', 2, '5 min', 'full') d FROM generate_series(1, 1000)) x;
SELECT min(d) < '6 s' AS low, max(d) > '9 s' AS high, bool_and(d >= '5 s' AND d <= '10 s') AS inside
    FROM (SELECT idem_backoff(1, '10 s', 2, '5 min', 'equal') d FROM generate_series(1, 1000)) x;
SELECT idem_backoff(0, '1 s', 2, '5 min', 'none');
SELECT idem_backoff(1, '1 mon', 2, '5 min', 'none');
SELECT idem_backoff(1, '1 s', 0.5, '5 min', 'none');
SELECT idem_backoff(1, '1 s', 2, '5 min', 'some');

-- C60, C61: crash on every attempt; the last one ends as exhausted, by claim ...
SELECT outcome, attempts FROM idem_claim('t:work:crash', '{"n": 1}');
SET idempotency.clock_offset = '40 s';
SELECT outcome, attempts, previous FROM idem_claim('t:work:crash', '{"n": 1}');
SET idempotency.clock_offset = '80 s';
SELECT outcome, attempts, previous FROM idem_claim('t:work:crash', '{"n": 1}');
SET idempotency.clock_offset = '120 s';
BEGIN;
SELECT outcome, attempts, error_code, error_message FROM idem_claim('t:work:crash', '{"n": 1}');
SELECT row_of('t:work:crash');
ROLLBACK;
-- ... and by the reaper, with the same record
SELECT expired, exhausted, skipped, more FROM idem_reap();
SELECT row_of('t:work:crash');
SELECT outcome, attempts, error_code FROM idem_claim('t:work:crash', '{"n": 1}');
-- C84: an operator's retry allows attempts anew, the lifetime count stays
SELECT idem_retry('t:work:crash', 'machine replaced');
SELECT idem_retry('t:work:crash', 'again');
SELECT outcome, attempts, previous FROM idem_claim('t:work:crash', '{"n": 1}', token => token(4));
SELECT status, attempts FROM idem_fail('t:work:crash', token(4), 'retryable', 'm', 'E', '0');
SELECT outcome, attempts, previous FROM idem_claim('t:work:crash', '{"n": 1}', token => token(5));
SELECT status, attempts FROM idem_fail('t:work:crash', token(5), 'permanent', 'm', 'E');
RESET idempotency.clock_offset;

-- C55: unknown on expiry, whether or not a reaper ran; never claimable, resolved with an audit row
SELECT outcome FROM idem_claim('t:doubt:a', token => token(1));
SELECT outcome FROM idem_claim('t:doubt:b', token => token(1));
SET idempotency.clock_offset = '40 s';
SELECT operation, processing, expired, unknown, exhausted FROM idem_stats WHERE operation = 'doubt';
SELECT outcome FROM idem_claim('t:doubt:a');
SELECT expired, exhausted, skipped, more FROM idem_reap(1);
SELECT expired, exhausted, skipped, more FROM idem_reap(0);
SELECT operation, processing, expired, unknown, exhausted FROM idem_stats WHERE operation = 'doubt';
SELECT outcome FROM idem_claim('t:doubt:b');
SELECT idem_complete('t:doubt:b', token(1));
SELECT idem_resolve('t:doubt:a', 'succeeded', 'found it downstream', '{"found": true}');
SELECT idem_resolve('t:doubt:b', 'failed', 'never arrived', error_code => 'LOST');
SELECT outcome, result_json, error_code FROM idem_claim('t:doubt:a') UNION ALL
SELECT outcome, result_json, error_code FROM idem_claim('t:doubt:b');
SELECT idem_resolve('t:doubt:a', 'succeeded', 'twice');
SELECT idem_resolve('t:doubt:nope', 'succeeded', 'x');
SELECT idem_resolve('t:doubt:a', 'maybe', 'x');
SELECT idem_resolve('t:doubt:a', 'succeeded', ' ');
SELECT idem_resolve('t:doubt:a', 'failed', 'x', '1');
RESET idempotency.clock_offset;

-- C80: retry is refused on a live claim, revoke ends it, the old token is dead
SELECT outcome FROM idem_claim('t:work:live', token => token(1));
SELECT idem_retry('t:work:live', 'x');
SELECT idem_forget('t:work:live', 'x');
SELECT idem_revoke('t:work:live', 'stuck');
SELECT idem_complete('t:work:live', token(1));
SELECT outcome, attempts, previous FROM idem_claim('t:work:live', token => token(2));
SELECT idem_complete('t:work:live', token(2), '1');
SELECT idem_revoke('t:work:live', 'x');
SELECT idem_retry('t:work:live', 'x');
-- forget: the next claim is the first
SELECT idem_forget('t:work:live', 'test data');
SELECT idem_forget('t:work:live', 'test data');
SELECT outcome, attempts FROM idem_claim('t:work:live', token => token(3));
SELECT idem_complete('t:work:live', token(2));
SELECT idem_release('t:work:live', token(3));
-- C83: who, why, from what to what; stands if and only if the change does; cannot be changed
BEGIN; SELECT idem_forget('t:doubt:a', 'rolled back'); ROLLBACK;
SELECT action, idempotency_key, session_user_name = session_user AS session, current_user_name = current_user AS cur,
       reason, old_status, new_status, old_attempts, new_attempts, length(old_token_digest) AS digest
    FROM idem_audit WHERE idempotency_key LIKE 't:%' ORDER BY id;
UPDATE idem_audit SET reason = 'x';
DELETE FROM idem_audit;
TRUNCATE idem_audit;

-- Bulk retry: by operation and code, bounded, unknown left out
SELECT count(*) FROM idem_claim_many(ARRAY(SELECT 't:work:bulk' || i FROM generate_series(1, 6) i));
SELECT count(idem_fail(idempotency_key, owner_token, CASE WHEN idempotency_key < 't:work:bulk4' THEN 'permanent' ELSE 'unknown' END, 'm',
        CASE idempotency_key WHEN 't:work:bulk1' THEN 'A' ELSE 'B' END))
    FROM idem_record WHERE idempotency_key LIKE 't:work:bulk%' AND status = 'processing';
SELECT * FROM idem_retry_many('work', 'A', 'bulk');
SELECT * FROM idem_retry_many('work', 'B', 'bulk', 1);
SELECT * FROM idem_retry_many('work', 'B', 'bulk', 0);
SELECT * FROM idem_retry_many('work', 'B', 'bulk');
SELECT idempotency_key, status FROM idem_record WHERE idempotency_key LIKE 't:work:bulk%' ORDER BY 1;

-- Recovery workers: oldest due first, never more than asked, with the request
TRUNCATE idem_record;
SELECT outcome FROM idem_claim('t:work:w1', '{"n": 1}', token => token(1), lease => '20 s') UNION ALL
SELECT outcome FROM idem_claim('t:work:w2', '{"n": 2}', token => token(2), lease => '10 s') UNION ALL
SELECT outcome FROM idem_claim('t:work:w3', '{"n": 3}', token => token(3), lease => '1 h') UNION ALL
SELECT outcome FROM idem_claim('t:work:w4', '{"n": 4}', token => token(4)) UNION ALL
SELECT outcome FROM idem_claim('t:other:w5', '{"n": 5}', token => token(5), lease => '1 s');
SELECT status FROM idem_fail('t:work:w4', token(4), 'retryable', retry_after => '15 s');
SELECT idem_checkpoint('t:work:w1', token(1), 'sent', '"A1"');
SELECT key, outcome FROM idem_claim_due('work', 10);
SET idempotency.clock_offset = '60 s';
SET enable_seqscan = off;
SELECT key, request_json, outcome, attempts, previous, progress FROM idem_claim_due('work', 2, '1 h');
RESET enable_seqscan;
SELECT key, request_json, outcome, attempts, previous, progress, owner_token IS NOT NULL AS token FROM idem_claim_due(max_records => 5);
SELECT * FROM idem_claim_due('work', 0);
SELECT * FROM idem_claim_due('work', -1);
SELECT * FROM idem_claim_due('work', NULL);
RESET idempotency.clock_offset;

-- The ring.  C69, C70: a success is replayed for the whole retention, from every slice, and then the key is new.
TRUNCATE idem_record;
DELETE FROM idem_ring;
UPDATE idem_policy SET retention = '10 days' WHERE operation = 'default';
CREATE FUNCTION day(d numeric) RETURNS text LANGUAGE plpgsql AS $$
DECLARE r idem_reap_result; outcomes text;
BEGIN
    PERFORM set_config('idempotency.clock_offset', (d * 86400)::text, false);
    PERFORM idem_once('day' || d);
    r := idem_reap();
    SELECT string_agg(k || '=' || (SELECT outcome FROM idem_claim(k)), ' ' ORDER BY k) INTO outcomes
        FROM (SELECT idempotency_key k FROM idem_record WHERE status = 'succeeded') x;
    RETURN format('%s | rotated %s purged %s | %s', (SELECT string_agg(state, ' ' ORDER BY slice) FROM idem_ring), r.rotated, r.purged, outcomes);
END $$;
SELECT format('SELECT day(%s)', d) FROM unnest(ARRAY[0, 4, 5, 5.5, 10, 10.5, 15, 15.4, 15.6, 20, 20.5, 21, 30.6, 31]) d \gexec
SELECT * FROM idem_check();
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_reap();
ROLLBACK;
SELECT idem_reap(-1);
RESET idempotency.clock_offset;

-- C67: a row that cannot be settled does not stop the others
TRUNCATE idem_record;
SELECT count(*) FROM idem_claim_many(ARRAY(SELECT 't:work:bad' || i FROM generate_series(1, 5) i));
UPDATE idem_record SET attempts = 3 WHERE idempotency_key LIKE 't:work:bad%';
UPDATE idem_record SET attempts = 2147483647 WHERE idempotency_key = 't:work:bad2';
CREATE INDEX bad ON idem_record ((1 / (CASE WHEN idempotency_key = 't:work:bad3' AND status = 'failed' THEN 0 ELSE 1 END)));
SET idempotency.clock_offset = '40 s';
SELECT expired, exhausted, skipped, more FROM idem_reap();
SELECT idempotency_key, status FROM idem_record ORDER BY 1;
DROP INDEX bad;
SELECT expired, exhausted, skipped, more FROM idem_reap();
SELECT * FROM idem_check();

-- C38: each open record is in one bucket
RESET idempotency.clock_offset;
TRUNCATE idem_record;
SELECT count(*) FROM idem_claim_many(ARRAY(SELECT 't:work:s' || i FROM generate_series(1, 4) i));
SELECT f.status FROM idem_status('t:work:s1') r, idem_fail('t:work:s1', r.owner_token, 'retryable', retry_after => '30 s') f;
SELECT f.status FROM idem_status('t:work:s2') r, idem_fail('t:work:s2', r.owner_token, 'unknown') f;
SELECT operation, processing, expired, retry_waiting, retry_due, unknown, exhausted FROM idem_stats;
SET idempotency.clock_offset = '35 s';
SELECT operation, processing, expired, retry_waiting, retry_due, unknown, exhausted,
       oldest_expired BETWEEN '4 s' AND '6 s' AS expired_for, oldest_due BETWEEN '4 s' AND '6 s' AS due_for FROM idem_stats;
UPDATE idem_policy SET max_attempts = 1 WHERE operation = 'work';
SELECT operation, processing, expired, retry_waiting, retry_due, unknown, exhausted FROM idem_stats;
RESET idempotency.clock_offset;

-- idem_check sees what the functions never make
TRUNCATE idem_record;
ALTER TABLE idem_record DROP CONSTRAINT idem_record_lease;
INSERT INTO idem_record (slice, idempotency_key, operation, owner, request_hash, status, attempts, owner_token, first_claimed_at, updated_at, previous, limits_from_attempt, limits_from)
    SELECT s, 'k' || n, 'default', current_user::regrole, '', st, 1, gen_random_uuid(), now(), now(), 'none', 0, now()
    FROM (VALUES (1, 1, 'succeeded'), (2, 1, 'succeeded'), (0, 2, 'processing')) v(s, n, st);
DELETE FROM idem_ring;
INSERT INTO idem_ring VALUES (1, 'current', now(), NULL), (2, 'empty', NULL, NULL), (3, 'current', now(), NULL);
SELECT violation, slice, idempotency_key, detail FROM idem_check() ORDER BY 1, 2;
TRUNCATE idem_record;
DELETE FROM idem_ring;
ALTER TABLE idem_record ADD CONSTRAINT idem_record_lease CHECK ((status = 'processing') = (lease_until IS NOT NULL));

-- Roles: a client may not, a monitor only looks, an operator may
CREATE ROLE idem_test_client;
CREATE ROLE idem_test_monitor;
CREATE ROLE idem_test_operator;
SELECT idem_grant('idem_test_client', 'client'), idem_grant('idem_test_monitor', 'monitor'), idem_grant('idem_test_operator', 'operator');
SET ROLE idem_test_client;
SELECT outcome FROM idem_claim('t:work:mine', token => token(1));
SELECT status FROM idem_fail('t:work:mine', token(1), 'permanent', 'secret');
SELECT idem_retry('t:work:mine', 'x');
SELECT idem_reap();
SELECT count(*) FROM idem_stats;
SELECT count(*) FROM idem_audit;
SET ROLE idem_test_monitor;
SELECT count(*) FROM idem_stats;
SELECT outcome FROM idem_claim('t:work:mine');
SELECT count(*) FROM idem_record;
SELECT idem_check();
SET ROLE idem_test_operator;
SELECT idem_retry('t:work:mine', 'x');
SELECT status FROM idem_status('t:work:mine');
SELECT current_user_name, session_user_name = session_user AS session FROM idem_audit WHERE idempotency_key = 't:work:mine';
SELECT expired, exhausted, skipped FROM idem_reap();
DELETE FROM idem_audit;
DELETE FROM idem_record;
RESET ROLE;
TRUNCATE idem_record;
DELETE FROM idem_ring;
DELETE FROM idem_policy WHERE operation IN ('work', 'doubt');
UPDATE idem_policy SET retention = '7 days' WHERE operation = 'default';
DROP OWNED BY idem_test_client, idem_test_monitor, idem_test_operator;
DROP ROLE idem_test_client, idem_test_monitor, idem_test_operator;
DROP FUNCTION token(integer);
DROP FUNCTION row_of(text);
DROP FUNCTION day(numeric);
