-- The extension, and what the other tests share.
SET client_min_messages = warning;
CREATE EXTENSION idempotency CASCADE;

-- The answer to a claim in one line, without what differs from run to run.
CREATE FUNCTION answer(c idem_claim_result) RETURNS text LANGUAGE sql AS $$
    SELECT concat_ws(' ', c.outcome, 'attempts=' || c.attempts, 'previous=' || c.previous,
                     CASE WHEN c.owner_token IS NOT NULL THEN '+token' END,
                     CASE WHEN c.lease_until IS NOT NULL THEN '+lease' END,
                     CASE WHEN c.retry_after IS NOT NULL THEN '+retry_after' END,
                     'json=' || c.result_json::text, 'body=' || encode(c.result_body, 'hex'),
                     'code=' || c.error_code, 'message=' || c.error_message, 'progress=' || c.progress::text)
$$;

-- What a query returns, or the SQLSTATE that it raises.
CREATE FUNCTION tried(query text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    value text;
BEGIN
    EXECUTE query INTO value;
    RETURN coalesce(value, '(null)');
EXCEPTION WHEN OTHERS THEN
    RETURN SQLSTATE;
END
$$;

-- Everything in a record and where it is; two equal ones mean: not written, not locked.
CREATE FUNCTION fingerprint(key text) RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT string_agg(concat_ws('|', r.tableoid::regclass, r.ctid, r.xmin, r.xmax, r::text), E'\n')
    FROM idem_record r WHERE idempotency_key = $1
$$;

-- The record in one line, without what differs from run to run.
CREATE FUNCTION stored(key text) RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT string_agg(concat_ws(' ', CASE WHEN slice = 0 THEN 'open' ELSE 'ring' END, status, 'attempts=' || attempts,
                                'previous=' || previous, 'past=' || cardinality(past_tokens),
                                CASE WHEN owner_token IS NOT NULL THEN '+token' END,
                                CASE WHEN lease_until IS NOT NULL THEN '+lease' END,
                                CASE WHEN retry_at IS NOT NULL THEN '+retry_at' END,
                                'json=' || result_json::text, 'body=' || encode(result_body, 'hex'),
                                'code=' || error_code, 'message=' || error_message,
                                'request=' || request_json::text, 'progress=' || progress::text), E'\n')
    FROM idem_record WHERE idempotency_key = $1
$$;

INSERT INTO idem_policy (operation, max_attempts, on_lease_expiry, backoff_base, jitter) VALUES
    ('single', 1, 'retry', '1 s', 'none'),
    ('three', 3, 'retry', '1 s', 'none'),
    ('doubtful', 5, 'unknown', '1 s', 'none');

-- A record in every state, under keys PREFIX_STATE, as seen when the clock is 100 s ahead.
CREATE FUNCTION make_states(prefix text, request jsonb, token uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    spec record;
    key text;
BEGIN
    FOR spec IN SELECT * FROM (VALUES
        ('live', 'three', '1 h', NULL, NULL),
        ('lapsed', 'three', '10 s', NULL, NULL),
        ('lapsed_unknown', 'doubtful', '10 s', NULL, NULL),
        ('lapsed_exhausted', 'single', '10 s', NULL, NULL),
        ('retry_waiting', 'three', '1 h', 'retryable', '1 h'),
        ('retry_due', 'three', '1 h', 'retryable', '10 s'),
        ('unknown', 'three', '1 h', 'unknown', NULL),
        ('failed', 'three', '1 h', 'permanent', NULL),
        ('exhausted', 'single', '1 h', 'retryable', NULL),
        ('succeeded', 'three', '1 h', 'complete', NULL)) AS v (state, operation, lease, finish, retry_after)
    LOOP
        key := prefix || '_' || spec.state;
        PERFORM idem_claim(key, request, spec.operation, spec.lease::interval, token => token);
        IF spec.finish = 'complete' THEN
            PERFORM idem_complete(key, token, '{"done": true}');
        ELSIF spec.finish IS NOT NULL THEN
            PERFORM idem_fail(key, token, spec.finish, 'told so', 'E1', spec.retry_after::interval);
        END IF;
    END LOOP;
END
$$;
CREATE VIEW states AS
    SELECT ord, state FROM unnest('{live,lapsed,lapsed_unknown,lapsed_exhausted,retry_waiting,retry_due,unknown,failed,exhausted,succeeded}'::text[])
        WITH ORDINALITY AS s (state, ord);

-- The plan of a query, a line per row.
CREATE FUNCTION plan_of(query text) RETURNS SETOF text LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY EXECUTE 'EXPLAIN (COSTS OFF) ' || query;
END
$$;

-- Does something, tells what came of it, and undoes it.
CREATE FUNCTION what_if(change text, query text DEFAULT $$SELECT 'accepted'$$) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    value text;
BEGIN
    EXECUTE change;
    EXECUTE query INTO value;
    RAISE EXCEPTION SQLSTATE 'XX999';
EXCEPTION
    WHEN SQLSTATE 'XX999' THEN RETURN coalesce(value, '(null)');
    WHEN OTHERS THEN RETURN SQLSTATE;
END
$$;
