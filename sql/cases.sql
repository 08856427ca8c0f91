-- Faults that other systems had and that no other test of this folder is about.
\set VERBOSITY terse
SET client_min_messages = warning;
CREATE SCHEMA ca;
SET search_path = public, ca;
CREATE FUNCTION ca.t(n integer) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$ SELECT ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid $$;

-- C32: nobody can hand in a time: no argument of a function is a timestamp or a date
SELECT p.oid::regprocedure FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
    JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND e.oid = d.refobjid AND e.extname = 'idempotency'
    WHERE p.proargtypes::oid[] && ARRAY['timestamptz', 'timestamp', 'date', 'time', 'timetz']::regtype[]::oid[];

-- C42: times far in the future, as after a clock that was stepped back
SELECT outcome FROM idem_claim('far', '1', token => ca.t(1));
UPDATE idem_record SET lease_until = now() + interval '10 years', updated_at = now() + interval '1 year' WHERE idempotency_key = 'far';
SELECT expired, exhausted, purged FROM idem_reap();
SELECT outcome, attempts FROM idem_claim('far', '1');
SELECT idem_revoke('far', 'the clock was wrong');
SELECT outcome, attempts, previous FROM idem_claim('far', '1', token => ca.t(2));
SELECT idem_complete('far', ca.t(1));
SELECT idem_complete('far', ca.t(2));
SELECT action, reason FROM idem_audit WHERE idempotency_key = 'far';

-- C68: a reaper leaves alone what lives, however old and however often renewed
INSERT INTO idem_policy (operation, lease, jitter, on_lease_expiry) VALUES ('ca', '1 hour', 'none', 'retry');
SET idempotency.clock_offset = '-30 d';
SELECT outcome FROM idem_claim('long', '1', 'ca', token => ca.t(3));
SELECT outcome FROM idem_claim('days', '1', 'ca', token => ca.t(4));
SELECT status FROM idem_fail('days', ca.t(4), 'retryable', 'x', 'E', '40 days');
SELECT outcome FROM idem_claim('doubt', '1', 'ca', token => ca.t(5));
SELECT status FROM idem_fail('doubt', ca.t(5), 'unknown');
SELECT idem_renew('long', ca.t(3), '31 days') IS NOT NULL AS renewed;
RESET idempotency.clock_offset;
SELECT count(idem_renew('long', ca.t(3), '1 hour')) FROM generate_series(1, 50);
CREATE TEMP TABLE before AS SELECT idempotency_key, ctid AS c, xmin AS x FROM idem_record WHERE operation = 'ca';
SELECT sum(expired) AS expired, sum(exhausted) AS exhausted FROM generate_series(1, 20) n, idem_reap(CASE WHEN n % 2 = 0 THEN 1 ELSE 100000 END);
SELECT count(*) AS untouched FROM idem_record r JOIN before b USING (idempotency_key) WHERE r.ctid = b.c AND r.xmin = b.x;
SELECT idem_complete('long', ca.t(3));

-- C14, C80: after a revocation, or the release of a take-over, no token holds the key, also not what idem_status shows
SELECT outcome FROM idem_claim('ended', '1', 'ca', token => ca.t(6));
SELECT idem_revoke('ended', 'test');
SELECT owner_token FROM idem_status('ended');
SELECT tried(format('SELECT %s FROM idem_status(''ended'')', call)) FROM unnest(ARRAY['idem_complete(idempotency_key, owner_token)',
    'idem_fail(idempotency_key, owner_token, ''permanent'')', 'idem_release(idempotency_key, owner_token)', 'idem_renew(idempotency_key, owner_token)',
    'idem_checkpoint(idempotency_key, owner_token, ''s'', ''1'')', '(SELECT count(*) FROM idem_complete_many(ARRAY[idempotency_key], ARRAY[owner_token]))',
    '(SELECT outcome FROM idem_claim(idempotency_key, ''1'', token => owner_token))']) call;
SELECT outcome, attempts FROM idem_claim('ended', '1', token => ca.t(7));
SELECT idem_release('ended', ca.t(7));
SELECT owner_token, attempts, cardinality(past_tokens) FROM idem_status('ended');
SELECT tried($$SELECT idem_release('ended', owner_token) FROM idem_status('ended')$$), tried($$SELECT idem_release('ended', ca.t(7))$$);
SELECT * FROM idem_check();

-- C102: digests are SHA-256 with a version before it; nothing needs MD5
SELECT idem_digest('{"a": 1}') = '\x01'::bytea || sha256('{"a":1}') AS sha256;

-- C109: one key has one place, also when the finished records are in another partition
UPDATE idem_policy SET retention = '2 hours' WHERE operation = 'default';
SELECT idem_once('turn');
SELECT rotated FROM idem_reap();
SET idempotency.clock_offset = '61 min';
SELECT count(*) FROM generate_series(1, 2) n, idem_reap();
SELECT outcome FROM idem_claim('turn');
SELECT outcome FROM idem_claim('other side');
SELECT idem_once('turn'), idem_once('next');
SELECT count(*) AS rows, count(DISTINCT tableoid) AS partitions FROM idem_record WHERE idempotency_key IN ('turn', 'next');
RESET idempotency.clock_offset;
SELECT * FROM idem_check();

-- C118: row security on the tables changes nothing for the functions, which have checks of their own
ALTER TABLE idem_record ENABLE ROW LEVEL SECURITY;
ALTER TABLE idem_record FORCE ROW LEVEL SECURITY;
ALTER TABLE idem_record_open ENABLE ROW LEVEL SECURITY;
CREATE ROLE regress_ca;
SELECT idem_grant('regress_ca', 'client');
SET ROLE regress_ca;
SELECT idem_claim('days', '1');
SELECT outcome FROM idem_claim('own', '1');
SELECT outcome FROM idem_claim('own', '1');
RESET ROLE;
SELECT outcome FROM idem_claim('own', '1');
ALTER TABLE idem_record DISABLE ROW LEVEL SECURITY;
ALTER TABLE idem_record NO FORCE ROW LEVEL SECURITY;
ALTER TABLE idem_record_open DISABLE ROW LEVEL SECURITY;

TRUNCATE idem_record, idem_ring;
UPDATE idem_policy SET retention = '7 days' WHERE operation = 'default';
DELETE FROM idem_policy WHERE operation = 'ca';
DROP OWNED BY regress_ca;
DROP ROLE regress_ca;
RESET search_path;
DROP SCHEMA ca CASCADE;
