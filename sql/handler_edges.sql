-- Later attempts end as first ones do; policies, roles and casts of handlers; (...).* of idem_execute.
SET client_min_messages = warning;
CREATE SCHEMA hb;
SET search_path = public, hb;
CREATE TABLE hb.business (key text, attempt integer);
CREATE FUNCTION hb.due(key text, operation text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM idem_claim(key, '1', operation, token => '00000000-0000-4000-8000-000000000001');
    PERFORM idem_fail(key, '00000000-0000-4000-8000-000000000001', 'retryable', retry_after => '0');
END $$;
INSERT INTO idem_policy (operation, backoff_base, jitter, max_result_size, retryable_codes) VALUES
    ('tight', '1 s', 'none', 10, '{22012}'), ('at_once', '0', 'none', 1000, '{}');

-- a later attempt without the operation's name is under the policy of the record
CREATE FUNCTION hb.big(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(repeat('x', 100)) $$;
CREATE FUNCTION hb.broken(jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RETURN to_jsonb(1 / 0); END $$;
SELECT hb.due('tight 1', 'tight'), hb.due('tight 2', 'tight');
SELECT tried($$SELECT concat_ws(' ', outcome, attempts, error_code) FROM idem_execute('tight 1', '1', 'hb.big(jsonb)')$$);
SELECT tried($$SELECT concat_ws(' ', outcome, attempts, error_code) FROM idem_execute('tight 2', '1', 'hb.broken(jsonb)')$$);

-- a policy that the handler of a later attempt lowers: as in a first attempt
CREATE FUNCTION hb.lowers(jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN UPDATE idem_policy SET max_result_size = 5 WHERE operation = 'three'; RETURN to_jsonb(repeat('x', 100)); END $$;
SELECT hb.due('lowers', 'three');
BEGIN;
SELECT tried($$SELECT concat_ws(' ', outcome, attempts) FROM idem_execute('lowers', '1', 'hb.lowers(jsonb)', 'three')$$);
ROLLBACK;

-- (idem_execute(...)).* runs the handler once, or is refused, also when a retry is due at once (C22)
CREATE FUNCTION hb.fails(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION SQLSTATE 'IDR00'; END $$;
SELECT tried($$SELECT s::text FROM (SELECT (idem_execute('spread', '1', 'hb.fails(text,jsonb,integer)', 'at_once')).* OFFSET 0) s$$) IS NOT NULL AS asked;
SELECT coalesce(max(attempts), 0) <= 1 AS one_attempt FROM idem_record WHERE idempotency_key = 'spread';

-- a handler that sets its role: a later attempt ends as the first does
CREATE ROLE regress_hb;
SELECT idem_grant('regress_hb', 'client');
GRANT USAGE ON SCHEMA hb TO regress_hb;
GRANT INSERT ON hb.business TO regress_hb;
CREATE FUNCTION hb.as_role(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN SET LOCAL ROLE regress_hb; INSERT INTO hb.business VALUES (key, attempt); RETURN to_jsonb(attempt); END $$;
BEGIN;
SELECT tried($$SELECT concat_ws(' ', outcome, attempts) FROM idem_execute('role 1', '1', 'hb.as_role(text,jsonb,integer)')$$);
COMMIT;
SELECT hb.due('role 2', 'three');
BEGIN;
SELECT tried($$SELECT concat_ws(' ', outcome, attempts) FROM idem_execute('role 2', '1', 'hb.as_role(text,jsonb,integer)')$$);
COMMIT;

-- casts with a type modifier and an explicit flag get both; one that gives NULL is no result
CREATE TYPE hb.t AS (n integer);
CREATE FUNCTION hb.cast_of(hb.t, integer, boolean) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RETURN jsonb_build_array(($1).n, $2, $3); END $$;
CREATE CAST (hb.t AS jsonb) WITH FUNCTION hb.cast_of(hb.t, integer, boolean);
CREATE FUNCTION hb.typed(jsonb) RETURNS hb.t LANGUAGE sql AS $$ SELECT ROW(7)::hb.t $$;
SELECT tried($$SELECT answer(c) FROM idem_execute('cast', '1', 'hb.typed(jsonb)') c$$);
DROP CAST (hb.t AS jsonb);
CREATE FUNCTION hb.null_of(hb.t) RETURNS jsonb LANGUAGE sql AS $$ SELECT NULL::jsonb $$;
CREATE CAST (hb.t AS jsonb) WITH FUNCTION hb.null_of(hb.t);
SELECT tried($$SELECT answer(c) FROM idem_execute('cast null', '1', 'hb.typed(jsonb)') c$$);

RESET search_path;
DELETE FROM idem_record;
DELETE FROM idem_policy WHERE operation IN ('tight', 'at_once');
DROP SCHEMA hb CASCADE;
DROP OWNED BY regress_hb;
DROP ROLE regress_hb;
