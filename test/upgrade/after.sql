-- Work goes on after the move; prints t|what for each that is as it should be.
\pset null '~'
SET search_path = public;
CREATE FUNCTION pg_temp.asked(key text, VARIADIC expected text[]) RETURNS boolean LANGUAGE sql AS $$
	SELECT concat_ws('|', outcome, attempts, previous, error_code) = array_to_string(expected, '|') FROM idem_claim(key, '{"n": 1}')
$$;
SELECT pg_temp.asked('old', 'succeeded', '1'), 'replay from an old slice';
SELECT result_json = '{"slice": 3}', 'result' FROM idem_claim('new', '{"n": 1}');
SELECT result_json = 'null' AND result_body = '\x00ff', 'JSON null and body' FROM idem_claim('middle', '{"n": 1}');
SELECT jsonb_array_length(result_json) = 2000 AND length(result_body) = 32000, 'large result' FROM idem_claim('large', '{"n": 1}');
SELECT NOT idem_once('once'), 'once';
SELECT outcome = 'conflict', 'other request' FROM idem_claim('old', '{"n": 2}');
SELECT NOT idem_complete('old', t(1), '{"slice": 1}'), 'the same completion again';
SELECT pg_temp.asked('failed', 'failed', '1', 'E5'), 'failed';
SELECT pg_temp.asked('exhausted', 'failed', '1', 'exhausted'), 'exhausted';
SELECT pg_temp.asked('lapsed', 'claimed', '2', 'lease_expired'), 'lapsed';
SELECT outcome = 'unknown', 'lapsed in doubt, ignoring what the policy says' FROM idem_claim('lapsed in doubt', '{"n": 1, "at": 2}');
SELECT pg_temp.asked('waiting', 'retry_later', '1', 'E10'), 'waiting';
SELECT pg_temp.asked('due', 'claimed', '2', 'retryable_failed', 'E11'), 'due';
SELECT pg_temp.asked('unknown', 'unknown', '1', 'E12'), 'unknown';
SELECT pg_temp.asked('revoked', 'claimed', '2', 'lease_expired'), 'revoked';
SELECT pg_temp.asked('retried', 'claimed', '2', 'retried'), 'retried';
SET SESSION AUTHORIZATION app;
SELECT outcome = 'in_progress', 'live, of its role' FROM idem_claim('live', '{"n": 1}');
SELECT idem_checkpoint('live', t(7), 'more', '1') = '{"sent": {"id": 7}, "more": 1}', 'progress goes on';
SELECT idem_complete('live', t(7), '"after"'), 'an old token finishes its claim';
RESET SESSION AUTHORIZATION;
SELECT idem_renew('taken', t(16)) IS NULL AND idem_renew('taken', t(17)) IS NOT NULL, 'dead and living tokens';
SELECT (idem_status(idem_key('tenant', 'pay', '18'))).operation = 'pay', 'key of parts';
SET SESSION AUTHORIZATION boss;
SELECT idem_resolve('unknown', 'succeeded', 'after', '1') = 'succeeded', 'resolve';
SELECT idem_forget('unknown 2', 'after') IS NOT NULL, 'forget';
SELECT idem_retry('failed', 'after') = 'retryable_failed', 'retry from the ring';
SELECT idem_revoke(idem_key('tenant', 'pay', '18'), 'after') = 'processing', 'revoke';
RESET SESSION AUTHORIZATION;
SELECT count(*) = 4 AND min(id) > (SELECT max(id) FROM idem_audit WHERE reason = 'test'), 'audit goes on' FROM idem_audit WHERE reason = 'after';
SELECT outcome = 'executed', 'execute' FROM idem_execute('fresh', '{"a": 1}', 'jsonb_pretty(jsonb)');
SET idempotency.clock_offset = '10 h';
SELECT purged >= 1 AND rotated = 1, 'reap purges and turns the ring' FROM idem_reap();
RESET idempotency.clock_offset;
SELECT outcome = 'claimed', 'a purged key is new' FROM idem_claim('old', '{"n": 1}');
SELECT count(*) = 0, 'nothing to complain of' FROM idem_check();
CREATE TEMP TABLE objects AS SELECT count(*) AS n FROM pg_depend d JOIN pg_extension e ON d.refobjid = e.oid AND d.deptype = 'e' AND e.extname = 'idempotency';
ALTER EXTENSION idempotency UPDATE;
SELECT o.n = count(*) AND o.n > 30, 'an update to the same version changes nothing' FROM objects o, pg_depend d JOIN pg_extension e ON d.refobjid = e.oid AND d.deptype = 'e' AND e.extname = 'idempotency' GROUP BY o.n;
DROP FUNCTION done, t;
DROP OWNED BY app, boss;
DROP EXTENSION idempotency;
SELECT (SELECT count(*) FROM pg_class WHERE relname LIKE 'idem\_%') + (SELECT count(*) FROM pg_proc WHERE proname LIKE 'idem\_%') + (SELECT count(*) FROM pg_type WHERE typname LIKE 'idem\_%') = 0,
	'dropped without a trace';
SELECT true, 'the last';
