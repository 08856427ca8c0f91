--
-- idem_complete, idem_fail, idem_renew, idem_release, idem_checkpoint
--
\set VERBOSITY sqlstate
\set T1 '''00000000-0000-4000-8000-000000000001'''
\set T2 '''00000000-0000-4000-8000-000000000002'''
\set T3 '''00000000-0000-4000-8000-000000000003'''
\set T9 '''00000000-0000-4000-8000-000000000009'''
-- A claim by a given token, without output but its outcome.
CREATE FUNCTION take(key text, token uuid, operation text DEFAULT 'three') RETURNS text LANGUAGE sql AS $$
    SELECT outcome FROM idem_claim($1, '{}', $3, token => $2)
$$;

--
-- Completing.
--
SELECT take('c07', :T1);
SELECT idem_complete('c07', :T1, '{"b": 2, "a": [1]}');
SELECT stored('c07');
SELECT fingerprint('c07') AS before \gset
-- the same again is told from the first, and writes nothing (C07)
BEGIN;
SELECT idem_complete('c07', :T1, '{"a": [1.0], "b": 2}');
SELECT pg_current_xact_id_if_assigned() IS NULL AS wrote_nothing;
COMMIT;
-- anything else is refused
SELECT idem_complete('c07', :T1, '{"a": [1], "b": 3}');
SELECT idem_complete('c07', :T1);
SELECT idem_complete('c07', :T1, 'null');
SELECT idem_complete('c07', :T1, '{"b": 2, "a": [1]}', '\x00');
SELECT idem_complete('c07', :T9, '{"b": 2, "a": [1]}');
SELECT idem_fail('c07', :T1, 'retryable');
SELECT idem_release('c07', :T1);
SELECT idem_checkpoint('c07', :T1, 's', '1');
SELECT idem_renew('c07', :T1) IS NULL AS not_held;
SELECT :'before' = fingerprint('c07') AS untouched;
-- nor a repetition in the same transaction
BEGIN;
SELECT take('c07 own', :T1), idem_complete('c07 own', :T1, '1');
SELECT idem_complete('c07 own', :T1, '1');
SELECT tried(format('SELECT idem_complete(%L, %L, %L)', 'c07 own', :T1, 2));
COMMIT;
-- a key that is not there
SELECT idem_complete('absent', :T1);
SELECT idem_fail('absent', :T1, 'permanent');
SELECT idem_release('absent', :T1);
SELECT idem_checkpoint('absent', :T1, 's', '1');
SELECT idem_renew('absent', :T1) IS NULL AS not_held;
SELECT stored('absent');

-- results: JSON and bytes, SQL NULL and JSON null
CREATE TABLE result (name text, json jsonb, body bytea);
INSERT INTO result VALUES ('nothing', NULL, NULL), ('null', 'null', NULL), ('empty', '{}', ''), ('bytes', NULL, '\x0001ff'),
    ('both', '{"status": 201}', '\x7b7d'), ('string', '""', NULL), ('number', '12345678901234567890.10', NULL);
SELECT name, take('result ' || name, :T1), idem_complete('result ' || name, :T1, json, body) FROM result;
SELECT name, c.result_json IS NOT DISTINCT FROM json AS json, c.result_body IS NOT DISTINCT FROM body AS body,
       c.result_json IS NULL AS no_json, c.result_body IS NULL AS no_body, idem_complete('result ' || name, :T1, json, body) AS again
    FROM result, idem_claim('result ' || name, '{}') c;
-- each result is the same as itself only
SELECT a.name, count(*) FILTER (WHERE tried(format('SELECT idem_complete(%L, %L, %L, %L)', 'result ' || a.name, :T1, b.json, b.body)) = 'false') AS same,
       count(*) FILTER (WHERE tried(format('SELECT idem_complete(%L, %L, %L, %L)', 'result ' || a.name, :T1, b.json, b.body)) = 'ID001') AS refused
    FROM result a, result b GROUP BY a.name ORDER BY a.name;
DROP TABLE result;
-- replay is what was stored: a value, not a text (C53); and it is told from a first run (C54)
SELECT take('c53', :T1), idem_complete('c53', :T1, '{"b":1.0,"a":1e2,"a":100, "big": 9007199254740993}');
SELECT fingerprint('c53') AS before \gset
SELECT outcome, result_json::text FROM idem_claim('c53', '{}');
SELECT outcome, result_json::text FROM idem_claim('c53', '{}');
SELECT outcome, result_json::text FROM idem_claim('c53', '{}');
SELECT :'before' = fingerprint('c53') AS untouched;
-- large results: out of line, whole, comparable
SELECT take('large', :T1);
SELECT jsonb_agg(md5(n::text)) AS large, sha256(convert_to(string_agg(md5((n * 7)::text), ''), 'UTF8')) AS body FROM generate_series(1, 12000) n \gset
SELECT idem_complete('large', :T1, :'large', convert_to(repeat(:'body', 3000), 'UTF8'));
SELECT result_json = :'large' AS json, result_body = convert_to(repeat(:'body', 3000), 'UTF8') AS body FROM idem_claim('large', '{}');
SELECT result_json = :'large' AS json, octet_length(result_body) AS body FROM idem_status('large');
SELECT idem_complete('large', :T1, :'large', convert_to(repeat(:'body', 3000), 'UTF8'));
SELECT idem_complete('large', :T1, :'large', convert_to(repeat(:'body', 3000) || 'x', 'UTF8'));
-- over the limit: refused, and the claim stands
INSERT INTO idem_policy (operation, max_result_size) VALUES ('small', 100), ('none', 0);
SELECT take('small', :T1, 'small');
SELECT fingerprint('small') AS before \gset
SELECT idem_complete('small', :T1, NULL, decode(repeat('00', 101), 'hex'));
SELECT idem_complete('small', :T1, to_jsonb(repeat('x', 101)));
SELECT idem_complete('small', :T1, to_jsonb(repeat('x', 40)), decode(repeat('00', 70), 'hex'));
SELECT :'before' = fingerprint('small') AS untouched;
SELECT idem_complete('small', :T1, NULL, decode(repeat('00', 100), 'hex'));
SELECT take('none', :T1, 'none');
SELECT idem_complete('none', :T1, '{}');
SELECT idem_complete('none', :T1);
-- what cannot be stored (C49): an error before any change, then the failure can be recorded
SELECT take('c49', :T1);
SELECT fingerprint('c49') AS before \gset
BEGIN;
SELECT idem_complete('c49', :T1, '{"a": "\u0000"}');
ROLLBACK;
SELECT idem_complete('c49', :T1, '{"a": "\ud800"}');
SELECT idem_complete('c49', :T1, (repeat('[', 200000) || repeat(']', 200000))::jsonb);
SELECT idem_complete('c49', :T1, to_jsonb(repeat('x', 2000000)));
SELECT :'before' = fingerprint('c49') AS untouched;
SELECT status FROM idem_fail('c49', :T1, 'permanent', 'result cannot be stored');
-- NULL arguments (C24)
SELECT take('c24', :T1);
SELECT fingerprint('c24') AS before \gset
SELECT idem_complete(NULL, :T1);
SELECT idem_complete('c24', NULL);
SELECT idem_fail(NULL, :T1, 'permanent');
SELECT idem_fail('c24', NULL, 'permanent');
SELECT idem_fail('c24', :T1, NULL);
SELECT idem_renew(NULL, :T1);
SELECT idem_renew('c24', NULL);
SELECT idem_release(NULL, :T1);
SELECT idem_release('c24', NULL);
SELECT idem_checkpoint(NULL, :T1, 's', '1');
SELECT idem_checkpoint('c24', NULL, 's', '1');
SELECT idem_checkpoint('c24', :T1, NULL, '1');
SELECT idem_checkpoint('c24', :T1, 's', NULL);
SELECT idem_status(NULL);
SELECT call, tried('SELECT ' || call) FROM unnest(ARRAY[
    $$idem_complete('', '00000000-0000-4000-8000-000000000001')$$, $$idem_complete(repeat('x', 1025), '00000000-0000-4000-8000-000000000001')$$,
    $$idem_renew('', '00000000-0000-4000-8000-000000000001')$$, $$idem_status('')$$, $$idem_status(repeat('x', 1025))$$]) call;
SELECT :'before' = fingerprint('c24') AS untouched;
SELECT status, attempts, retry_at IS NULL AS no_retry FROM idem_fail('c24', :T1, 'permanent', NULL, NULL, NULL);
SELECT stored('c24');

--
-- Failing.
--
-- three kinds, never one and the same (C55)
SELECT take('kind ' || kind, :T1) FROM unnest(ARRAY['retryable', 'permanent', 'unknown']) kind;
SELECT kind, f.* INTO TEMP failed
    FROM unnest(ARRAY['retryable', 'permanent', 'unknown']) kind, idem_fail('kind ' || kind, :T1, kind, 'it broke', 'E' || left(kind, 1)) f;
SELECT kind, f.status, f.attempts, f.retry_at IS NOT NULL AS retry_at, f.retry_at IS NOT DISTINCT FROM r.retry_at AS as_stored
    FROM failed f, idem_status('kind ' || kind) r;
SELECT stored('kind ' || kind) FROM unnest(ARRAY['retryable', 'permanent', 'unknown']) kind;
SELECT kind, answer(c) FROM unnest(ARRAY['retryable', 'permanent', 'unknown']) kind, idem_claim('kind ' || kind, '{}') c;
SET idempotency.clock_offset = '86400 s';
SELECT kind, answer(c) FROM unnest(ARRAY['retryable', 'permanent', 'unknown']) kind, idem_claim('kind ' || kind, '{}') c;
-- the unknown ones are settled by operators: it happened, it did not
SELECT take('kind unknown 2', :T1), (idem_fail('kind unknown 2', :T1, 'unknown')).status;
SELECT idem_resolve('kind unknown', 'succeeded', 'found downstream', '{"ref": 1}'), idem_retry('kind unknown 2', 'not found downstream');
SELECT answer(c) FROM idem_claim('kind unknown', '{}') c;
SELECT answer(c) FROM idem_claim('kind unknown 2', '{}') c;
SELECT action, idempotency_key, old_status, new_status, reason FROM idem_audit WHERE idempotency_key LIKE 'kind unknown%' ORDER BY id;
RESET idempotency.clock_offset;
-- arguments
SELECT take('arguments', :T1);
SELECT fingerprint('arguments') AS before \gset
SELECT kind, tried(format('SELECT idem_fail(%L, %L, %L)', 'arguments', :T1, kind)) FROM unnest(ARRAY['', 'Retryable', 'retryable ', 'failed', 'timeout']) kind;
SELECT retry_after, tried(format('SELECT idem_fail(%L, %L, %L, retry_after => %L)', 'arguments', :T1, 'retryable', retry_after)) AS answer
    FROM unnest(ARRAY['-1 us', '1 mon', '-1 mon 40 days', '3660 days 1 us', '2147483647 days', '178000000 years']) retry_after;
SELECT kind, tried(format('SELECT idem_fail(%L, %L, %L, retry_after => %L)', 'arguments', :T1, kind, '1 s')) AS answer FROM unnest(ARRAY['permanent', 'unknown']) kind;
SELECT tried(format('SELECT idem_fail(%L, %L, %L, %L, repeat(%L, 129))', 'arguments', :T1, 'permanent', 'm', 'E')) AS long_code;
SELECT :'before' = fingerprint('arguments') AS untouched;
SELECT n, take('after ' || n, :T1), (idem_fail('after ' || n, :T1, 'retryable', retry_after => retry_after)).status
    FROM unnest(ARRAY['0', '1 us', '3660 days', '1 day 1 h']::interval[]) WITH ORDINALITY u (retry_after, n);
SELECT n, extract(epoch FROM r.retry_at - r.updated_at) AS delay FROM generate_series(1, 4) n, idem_status('after ' || n) r ORDER BY n;
-- messages are cut at 8192 bytes on a character boundary; codes have 128 bytes
SELECT n, take('message ' || n, :T1), (idem_fail('message ' || n, :T1, 'permanent', message, repeat('E', 128))).status
    FROM (VALUES (1, repeat('x', 8192)), (2, repeat('x', 8193)), (3, repeat('x', 8191) || chr(8364)), (4, repeat('x', 8189) || chr(8364) || 'y'),
                 (5, repeat(chr(8364), 5000)), (6, '')) AS v (n, message) ORDER BY n;
SELECT n, octet_length(error_message), length(error_message), right(error_message, 1) = chr(8364) AS whole, octet_length(error_code)
    FROM generate_series(1, 6) n, idem_claim('message ' || n, '{}') ORDER BY n;
-- ... also in the message of an exhausted record
SELECT take('message 7', :T1, 'single'), (idem_fail('message 7', :T1, 'retryable', repeat(chr(8364), 5000), 'E1')).status;
SELECT left(error_message, 50), octet_length(error_message) BETWEEN 8190 AND 8192 AS cut FROM idem_claim('message 7', '{}');
-- the delay grows from the first failure on, from the call of idem_fail on (C64)
INSERT INTO idem_policy (operation, max_attempts, backoff_base, backoff_factor, backoff_cap, jitter) VALUES
    ('growing', 9, '2 s', 2, '100 s', 'none'), ('full', 9, '1 h', 2, '1 h', 'full'), ('equal', 9, '1 h', 2, '1 h', 'equal');
CREATE FUNCTION delays(key text, times integer) RETURNS SETOF interval LANGUAGE plpgsql AS $$
DECLARE
    c idem_claim_result;
BEGIN
    FOR i IN 1 .. times LOOP
        PERFORM set_config('idempotency.clock_offset', (i * 1000) || 's', true);
        c := idem_claim(key, '{}', 'growing');
        PERFORM set_config('idempotency.clock_offset', (i * 1000 + 20) || 's', true);
        PERFORM idem_fail(key, c.owner_token, 'retryable');
        RETURN NEXT (SELECT retry_at - updated_at FROM idem_record WHERE idempotency_key = key);
    END LOOP;
    RETURN NEXT (SELECT CASE WHEN updated_at - first_claimed_at >= '20 s' THEN retry_at - updated_at END FROM idem_record WHERE idempotency_key = key);
END
$$;
SELECT delays('c64', 8);
-- jitter spreads (C65), and leaves the user's random numbers alone
SELECT setseed(0.5);
SELECT random() AS r \gset
SELECT setseed(0.5);
SELECT jitter, count(DISTINCT delay) > 250 AS spread, min(delay) >= least AS not_less, max(delay) <= '1 h' AS not_more,
       avg(delay) BETWEEN least + ('1 h' - least) * 0.3 AND least + ('1 h' - least) * 0.7 AS even
    FROM (SELECT jitter, least, f.retry_at - clock_timestamp() AS delay
              FROM (VALUES ('full', interval '-1 s'), ('equal', '30 min' - interval '1 s')) v (jitter, least), generate_series(1, 300) n,
                   idem_fail(jitter || n, CASE take(jitter || n, :T1, jitter) WHEN 'claimed' THEN uuid :T1 END, 'retryable') f) s
    GROUP BY jitter, least ORDER BY jitter;
SELECT random() = :r AS undisturbed;
-- attempts used up: the same final state as by a crash (C61)
SELECT take('used up', :T1), (idem_fail('used up', :T1, 'retryable', 'first', 'E1', '0')).status;
SELECT take('used up', :T2), (idem_fail('used up', :T2, 'retryable', 'second', 'E2', '0')).status;
SELECT take('used up', :T3), (idem_fail('used up', :T3, 'retryable', 'third', 'E3', '0')).status;
SELECT answer(c) FROM idem_claim('used up', '{}') c;
SELECT stored('used up');
-- time used up: at once when the next attempt would come too late
INSERT INTO idem_policy (operation, max_elapsed, jitter) VALUES ('sixty', '60 s', 'none');
SELECT take('late', :T1, 'sixty'), (idem_fail('late', :T1, 'retryable', 'm', 'E1', '61 s')).status;
SELECT take('in time', :T1, 'sixty'), (idem_fail('in time', :T1, 'retryable', 'm', 'E1', '10 s')).status;
SELECT answer(c) FROM idem_claim('late', '{}') c;
SELECT answer(c) FROM idem_claim('in time', '{}') c;
SET idempotency.clock_offset = '70 s';
SELECT answer(c) FROM idem_claim('in time', '{}') c;
SELECT stored('in time');
RESET idempotency.clock_offset;

--
-- Failing beside the work that failed (C47).
--
CREATE TABLE business (n integer CONSTRAINT positive CHECK (n > 0), key text);
-- (1) in the aborted transaction: nothing
SELECT take('c47 1', :T1);
SELECT fingerprint('c47 1') AS before \gset
BEGIN;
INSERT INTO business VALUES (-1, 'c47 1');
SELECT idem_fail('c47 1', :T1, 'retryable');
COMMIT;
SELECT :'before' = fingerprint('c47 1') AS untouched;
-- (2) after ROLLBACK TO
SELECT take('c47 2', :T1);
BEGIN;
SAVEPOINT w;
INSERT INTO business VALUES (1, 'c47 2'), (-1, 'c47 2');
ROLLBACK TO w;
SELECT status FROM idem_fail('c47 2', :T1, 'retryable', 'e');
COMMIT;
SELECT stored('c47 2'), (SELECT count(*) FROM business) AS rows;
-- (3) in a new transaction
SELECT take('c47 3', :T1);
BEGIN;
INSERT INTO business VALUES (1, 'c47 3'), (-1, 'c47 3');
ROLLBACK;
SELECT status FROM idem_fail('c47 3', :T1, 'retryable', 'e');
SELECT stored('c47 3'), (SELECT count(*) FROM business) AS rows;
-- (4) claim and work in one transaction: all or nothing, attempts are not counted
CREATE PROCEDURE all_or_nothing(key text, times integer) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. times LOOP
        RAISE WARNING '%', (SELECT answer(c) FROM idem_claim(key, '{}', 'three') c);
        ROLLBACK;
    END LOOP;
END
$$;
\set VERBOSITY terse
CALL all_or_nothing('c47 4', 10);
\set VERBOSITY sqlstate
SELECT stored('c47 4');
-- the commit itself fails (C48): still claimed, never replayed; then again with the same token
CREATE TABLE deferred (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED);
SELECT take('c48', :T1);
SELECT fingerprint('c48') AS before \gset
BEGIN;
INSERT INTO deferred VALUES (1), (1);
SELECT idem_complete('c48', :T1, '1');
COMMIT;
SELECT count(*) FROM deferred;
SELECT answer(c) FROM idem_claim('c48', '{}') c;
SELECT split_part(:'before', '|', 5) = split_part(fingerprint('c48'), '|', 5) AS same_columns;
BEGIN;
INSERT INTO deferred VALUES (1);
SELECT idem_complete('c48', :T1, '2');
COMMIT;
SELECT answer(c) FROM idem_claim('c48', '{}') c;
SELECT take('c48 fail', :T1);
BEGIN;
INSERT INTO deferred VALUES (1);
SELECT idem_complete('c48 fail', :T1, '1');
COMMIT;
SELECT status FROM idem_fail('c48 fail', :T1, 'permanent', 'duplicate', '23505');

--
-- Renewing (C34).
--
SELECT outcome FROM idem_claim('renew', '{}', lease => '10 s', token => :T1);
SELECT clock_timestamp() AS before \gset
SELECT idem_renew('renew', :T1, '1 h') AS lease_until \gset
SELECT :'lease_until'::timestamptz BETWEEN :'before'::timestamptz + '1 h' AND clock_timestamp() + '1 h' AS from_now,
       (idem_status('renew')).lease_until = :'lease_until' AS as_stored;
-- with the policy's lease it never shortens, with a given one it can
SELECT idem_renew('renew', :T1) = :'lease_until' AS not_shortened;
SELECT idem_renew('renew', :T1, '20 min') < :'lease_until' AS shortened;
SELECT stored('renew');
SELECT lease, tried(format('SELECT idem_renew(%L, %L, %L)', 'renew', :T1, lease)) AS answer FROM unnest(ARRAY['0', '-1 s', '1 mon', '366 days 1 us']) lease;
SELECT fingerprint('renew') AS before \gset
SELECT idem_renew('renew', :T9) IS NULL AS foreign_token;
-- over: the holder cannot take it back, but may finish what nobody has taken over
SET idempotency.clock_offset = '20 min';
SELECT idem_renew('renew', :T1, '1 h') IS NULL AS over;
SELECT tried(format('SELECT idem_checkpoint(%L, %L, %L, %L)', 'renew', :T1, 's', '1')) AS checkpoint;
SELECT :'before' = fingerprint('renew') AS untouched;
SELECT idem_complete('renew', :T1, '"late"');
SELECT answer(c) FROM idem_claim('renew', '{}') c;
RESET idempotency.clock_offset;
SELECT take('late fail', :T1), take('late release', :T1), take('late doubt', :T1, 'doubtful'), take('late single', :T1, 'single');
SET idempotency.clock_offset = '40 s';
SELECT status FROM idem_fail('late fail', :T1, 'retryable');
SELECT idem_release('late release', :T1);
SELECT idem_complete('late doubt', :T1, '1');
SELECT idem_complete('late single', :T1, '1');
RESET idempotency.clock_offset;
-- once time has been decided upon, it is final
SELECT take('too late doubt', :T1, 'doubtful'), take('too late single', :T1, 'single'), take('too late', :T1);
SET idempotency.clock_offset = '40 s';
SELECT key, answer(c) FROM unnest(ARRAY['too late doubt', 'too late single', 'too late']) key, idem_claim(key, '{}') c;
SELECT key, tried(format('SELECT idem_complete(%L, %L)', key, :T1)) FROM unnest(ARRAY['too late doubt', 'too late single', 'too late']) key;
RESET idempotency.clock_offset;

--
-- Old and foreign tokens.
--
-- a whole cycle has passed (C14); the same session twice (C15)
SELECT take('c14', :T1);
SET idempotency.clock_offset = '40 s';
SELECT take('c14', :T2);
SELECT status FROM idem_fail('c14', :T2, 'retryable', 'm', 'E2', '0');
SELECT take('c14', :T3);
SELECT fingerprint('c14') AS before \gset
SELECT token, tried(format('SELECT idem_complete(%L, %L, %L)', 'c14', token, '1')) AS complete, tried(format('SELECT idem_fail(%L, %L, %L)', 'c14', token, 'permanent')) AS fail,
       tried(format('SELECT idem_renew(%L, %L, %L)', 'c14', token, '1 h')) AS renew, tried(format('SELECT idem_release(%L, %L)', 'c14', token)) AS release,
       tried(format('SELECT idem_checkpoint(%L, %L, %L, %L)', 'c14', token, 's', '1')) AS checkpoint
    FROM unnest(ARRAY[:T1, :T2, :T9]::uuid[]) token;
SELECT :'before' = fingerprint('c14') AS untouched;
SELECT idem_complete('c14', :T3, '3');
RESET idempotency.clock_offset;
-- the key gone and claimed anew: attempts are 1 again, the old token is dead none the less
SELECT idem_forget('c14', 'test');
SELECT outcome, attempts, owner_token AS t4 FROM idem_claim('c14', '{}') \gset
SELECT :'outcome', :attempts;
SELECT token, tried(format('SELECT idem_complete(%L, %L, %L)', 'c14', token, '3')) FROM unnest(ARRAY[:T1, :T3, :'t4']::uuid[]) WITH ORDINALITY u (token, n) WHERE n < 3;
SELECT idem_complete('c14', :'t4', '4');
-- a dying attempt does not write its error onto the new owner's (C45)
SELECT take('c45', :T1);
SET idempotency.clock_offset = '40 s';
SELECT take('c45', :T2);
SELECT fingerprint('c45') AS before \gset
SELECT idem_fail('c45', :T1, 'permanent', 'boom');
SELECT :'before' = fingerprint('c45') AS untouched;
SELECT idem_complete('c45', :T2, '1');
RESET idempotency.clock_offset;

-- Every state x every call x the token of make_states, and a foreign one (C57): the
-- answer, and the record if it changed.  Each is undone.
CREATE FUNCTION answer_and_record(key text, query text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    before text := fingerprint(key);
    value text;
    after text;
BEGIN
    EXECUTE query INTO value;
    after := CASE WHEN fingerprint(key) IS DISTINCT FROM before THEN ' -> ' || coalesce(stored(key), 'gone') ELSE '' END;
    RAISE EXCEPTION SQLSTATE 'XX999';
EXCEPTION
    WHEN SQLSTATE 'XX999' THEN RETURN coalesce(value, '(null)') || after;
    WHEN OTHERS THEN RETURN SQLSTATE;
END
$$;
SELECT make_states('c57', '{}', :T1);
SELECT state, r::text AS before INTO TEMP before FROM states, idem_status('c57_' || state) r;
SET idempotency.clock_offset = '100 s';
\pset format unaligned
SELECT state, call, answer, CASE WHEN answer <> other THEN other END AS foreign_token
    FROM states, unnest(ARRAY[$$idem_complete(%1$L, %2$L, '{"done": true}')$$, $$idem_complete(%1$L, %2$L, '2')$$, $$(idem_fail(%1$L, %2$L, 'retryable', 'm', 'E9')).status$$,
        $$(idem_fail(%1$L, %2$L, 'permanent', 'm', 'E9')).status$$, $$(idem_fail(%1$L, %2$L, 'unknown', 'm', 'E9')).status$$,
        $$idem_renew(%1$L, %2$L, '1 h') IS NOT NULL$$, $$idem_release(%1$L, %2$L)$$, $$idem_checkpoint(%1$L, %2$L, 's', '1')$$]) WITH ORDINALITY c (call, n),
    answer_and_record('c57_' || state, 'SELECT ' || format(call, 'c57_' || state, :T1)) answer, answer_and_record('c57_' || state, 'SELECT ' || format(call, 'c57_' || state, :T9)) other
    ORDER BY ord, n;
\pset format aligned
RESET idempotency.clock_offset;
SELECT count(*) AS untouched FROM before WHERE before = idem_status('c57_' || state)::text;

--
-- Checkpoints.
--
SELECT take('progress', :T1);
SELECT idem_checkpoint('progress', :T1, 'sent', '{"to": "bank", "n": [1, 2]}');
SELECT idem_checkpoint('progress', :T1, 'got', 'null');
SELECT idem_checkpoint('progress', :T1, 'sent', '[]');
SELECT idem_checkpoint('progress', :T1, 'text', '"x"'), idem_checkpoint('progress', :T1, 'number', '1.50'), idem_checkpoint('progress', :T1, 'true', 'true');
SELECT idem_checkpoint('progress', :T1, 'nested', '{"a": {"b": [{}, [], null]}}') = (idem_status('progress')).progress || '{"nested": {"a": {"b": [{}, [], null]}}}' AS merged;
SELECT stored('progress');
-- it renews the lease by the policy's
SELECT outcome FROM idem_claim('progress lease', '{}', lease => '5 min', token => :T1);
SELECT lease_until AS lease_until FROM idem_status('progress lease') \gset
SELECT idem_checkpoint('progress lease', :T1, 's', '1');
SELECT lease_until = :'lease_until' AS not_shortened FROM idem_status('progress lease');
SET idempotency.clock_offset = '290 s';
SELECT idem_checkpoint('progress lease', :T1, 's', '2');
SELECT lease_until > :'lease_until' AS renewed, lease_until - updated_at AS lease FROM idem_status('progress lease');
RESET idempotency.clock_offset;
-- the next attempt gets it, whatever ended the last one; success keeps it
SET idempotency.clock_offset = '40 s';
SELECT previous, progress FROM idem_claim('progress', '{}', token => :T2);
SELECT idem_checkpoint('progress', :T2, 'got', '"ok"') -> 'got' AS got, (idem_fail('progress', :T2, 'retryable', retry_after => '0')).status;
SELECT previous, progress -> 'got' AS got FROM idem_claim('progress', '{}', token => :T3);
SELECT idem_complete('progress', :T3);
SELECT progress -> 'sent' AS sent, progress -> 'got' AS got FROM idem_status('progress');
RESET idempotency.clock_offset;
-- limits: names of 1 to 256 bytes, 1 MB in all
SELECT take('limits', :T1);
SELECT size, tried(format('SELECT length(idem_checkpoint(%L, %L, repeat(%L, %s), %L)::text)', 'limits', :T1, 's', size, '1')) AS answer FROM unnest(ARRAY[0, 1, 256, 257]) size;
SELECT tried(format('SELECT length(idem_checkpoint(%L, %L, %L, to_jsonb(repeat(%L, %s)))::text)', 'limits', :T1, 'big', 'x', size)) AS answer FROM unnest(ARRAY[1000000, 1048576]) size;
SELECT tried(format('SELECT length(idem_checkpoint(%L, %L, %L, to_jsonb(repeat(%L, %s)))::text)', 'limits', :T1, 'more', 'x', 100000)) AS answer;
SELECT length(progress::text), status FROM idem_status('limits');

--
-- Releasing.
--
-- a first attempt leaves nothing
SELECT take('release first', :T1), idem_release('release first', :T1);
SELECT stored('release first');
SELECT idem_release('release first', :T1);
SELECT answer(c) FROM idem_claim('release first', '{"other": "request"}', token => :T2) c;
SELECT idem_complete('release first', :T1);
-- a retry is due again at once, its attempt not counted, its error kept
SELECT take('release retry', :T1), (idem_fail('release retry', :T1, 'retryable', 'm', 'E1', '0')).status;
SELECT take('release retry', :T2), idem_release('release retry', :T2);
SELECT stored('release retry');
SELECT idem_release('release retry', :T2);
SELECT answer(c) FROM idem_claim('release retry', '{}') c;
-- a take-over stands lapsed again
SELECT take('release lapsed', :T1);
SET idempotency.clock_offset = '40 s';
SELECT take('release lapsed', :T2), idem_release('release lapsed', :T2);
SELECT stored('release lapsed');
SELECT token, tried(format('SELECT idem_complete(%L, %L)', 'release lapsed', token)) FROM unnest(ARRAY[:T1, :T2]::uuid[]) token;
SELECT answer(c) FROM idem_claim('release lapsed', '{}') c;
RESET idempotency.clock_offset;
-- released claims do not use up attempts
CREATE FUNCTION claims_and_releases(key text, times integer) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    c idem_claim_result;
BEGIN
    FOR i IN 1 .. times LOOP
        c := idem_claim(key, '{}', 'three');
        PERFORM idem_release(key, c.owner_token);
    END LOOP;
    RETURN stored(key);
END
$$;
SELECT take('released often', :T1), (idem_fail('released often', :T1, 'retryable', retry_after => '0')).status;
SELECT claims_and_releases('released often', 20);
SELECT outcome, attempts FROM idem_claim('released often', '{}');
-- released in a savepoint that is rolled back
BEGIN;
SELECT take('release back', :T1);
SAVEPOINT s;
SELECT idem_release('release back', :T1);
SELECT stored('release back');
ROLLBACK TO s;
SELECT idem_complete('release back', :T1);
COMMIT;

--
-- Many in one transaction: few locks (C10).
--
BEGIN;
SELECT count(*) FROM generate_series(1, 5000) n, idem_complete('many' || n, CASE take('many' || n, :T1) WHEN 'claimed' THEN uuid :T1 END, to_jsonb(n)) c WHERE c;
SELECT count(*) < 30 AS few_locks FROM pg_locks WHERE pid = pg_backend_pid();
SELECT count(*), count(DISTINCT xmin::text) AS transactions FROM idem_record WHERE idempotency_key LIKE 'many%';
ROLLBACK;

SELECT * FROM idem_check();
DROP TABLE business, deferred;
