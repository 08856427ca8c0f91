-- Records in every state, in several slices, as two roles.
CREATE EXTENSION idempotency CASCADE;
CREATE ROLE app;
CREATE ROLE boss;
SELECT idem_grant('app', 'client'), idem_grant('boss', 'operator');
UPDATE idem_policy SET retention = '1 h', jitter = 'none', backoff_base = '10 s', store_request = true WHERE operation = 'default';
INSERT INTO idem_policy (operation, lease, max_attempts, on_lease_expiry, digest_ignore, retryable_codes) VALUES
	('doubt', '1 min', 3, 'unknown', '{/at}', '{}'), ('one', '1 min', 1, 'retry', '{}', '{23505}');
CREATE INDEX dba_index ON idem_record (operation, updated_at);
CREATE FUNCTION t(n integer) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$ SELECT ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid $$;
CREATE FUNCTION done(key text, n integer, result jsonb, body bytea DEFAULT NULL) RETURNS boolean LANGUAGE sql AS $$
	SELECT idem_claim(key, '{"n": 1}', token => t(n));
	SELECT idem_complete(key, t(n), result, body);
$$;
-- three turns of the ring
SELECT done('old', 1, '{"slice": 1}'), idem_once('once'), idem_reap();
SET idempotency.clock_offset = '31 min';
SELECT done('middle', 2, 'null', '\x00ff');
SELECT idem_reap();
SELECT idem_reap();
SELECT done('large', 3, (SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 2000) i), (SELECT decode(string_agg(md5(i::text), ''), 'hex') FROM generate_series(1, 2000) i));
SET idempotency.clock_offset = '62 min';
SELECT idem_reap();
SELECT idem_reap();
RESET idempotency.clock_offset;
SELECT done('new', 4, '{"slice": 3}');
-- failed, exhausted
SELECT idem_claim('failed', '{"n": 1}', token => t(5)), idem_fail('failed', t(5), 'permanent', 'declined', 'E5');
SELECT idem_claim('exhausted', '{"n": 1}', 'one', token => t(6)), idem_fail('exhausted', t(6), 'retryable', 'late', 'E6');
-- open
SET SESSION AUTHORIZATION app;
SELECT idem_claim('live', '{"n": 1}', lease => '300 days', token => t(7)), idem_checkpoint('live', t(7), 'sent', '{"id": 7}');
RESET SESSION AUTHORIZATION;
SELECT idem_claim('lapsed', '{"n": 1}', lease => '1 us', token => t(8));
SELECT idem_claim('lapsed in doubt', '{"n": 1, "at": 1}', 'doubt', lease => '1 us', token => t(9));
SELECT idem_claim('waiting', '{"n": 1}', token => t(10)), idem_fail('waiting', t(10), 'retryable', 'busy', 'E10', '300 days');
SELECT idem_claim('due', '{"n": 1}', token => t(11)), idem_fail('due', t(11), 'retryable', 'busy', 'E11', '0');
SELECT idem_claim('unknown', '{"n": 1}', token => t(12)), idem_fail('unknown', t(12), 'unknown', 'timeout', 'E12');
SELECT idem_claim('unknown 2', '{"n": 1}', token => t(13)), idem_fail('unknown 2', t(13), 'unknown');
SELECT idem_claim('revoked', '{"n": 1}', token => t(14)), idem_revoke('revoked', 'test');
SELECT idem_claim('retried', '{"n": 1}', token => t(15)), idem_fail('retried', t(15), 'permanent'), idem_retry('retried', 'test');
SELECT idem_claim('taken', '{"n": 1}', lease => '1 us', token => t(16));
SELECT idem_claim('taken', '{"n": 1}', lease => '300 days', token => t(17));
SELECT idem_claim(idem_key('tenant', 'pay', '18'), '{"n": 1}', lease => '300 days', token => t(18));
