-- reference.sql - the contract of the extension once more, in the simplest PL/pgSQL.
--
-- For test/t/050_differential.pl: schema ref has the functions of the extension without the
-- prefix idem_ (ref.claim for idem_claim), over one plain table and one lock.  It is
-- written from README.md, docs/ and the comments of the install script; points that
-- those leave open are marked "open:" and follow the extension.
--
-- What it takes from the extension: types, the table idem_policy, digests, and what
-- nobody can foretell: tokens made by the extension, delays with jitter, the records that
-- a limited idem_reap picked.  Each of these is checked to be a possible one.
--
-- Settings: ref.now is the clock, ref.role the caller, ref.hint the answer of the extension.

CREATE SCHEMA ref;

CREATE TABLE ref.record (
    idempotency_key text COLLATE "C" PRIMARY KEY,
    operation text COLLATE "C" NOT NULL,
    owner regrole NOT NULL,
    request_hash bytea NOT NULL,
    status text NOT NULL,
    attempts integer NOT NULL,
    owner_token uuid,
    lease_until timestamptz,
    retry_at timestamptz,
    first_claimed_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    result_json jsonb,
    result_body bytea,
    error_code text,
    error_message text,
    request_json jsonb,
    progress jsonb,
    previous text NOT NULL,
    past_tokens uuid[],
    limits_from_attempt integer NOT NULL,
    limits_from timestamptz NOT NULL,
    given boolean NOT NULL      -- was owner_token given to anybody?  Not after a revocation.
);

------------------------------------------------------------------------------
-- Tools
------------------------------------------------------------------------------

CREATE FUNCTION ref.now() RETURNS timestamptz LANGUAGE sql STABLE AS
    $$ SELECT current_setting('ref.now')::timestamptz $$;

CREATE FUNCTION ref.me() RETURNS text LANGUAGE sql STABLE AS
    $$ SELECT current_setting('ref.role') $$;

CREATE FUNCTION ref.refuse(state text, why text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = state, MESSAGE = why;
END $$;

-- Start of every function: the right to call it, and the lock that serialises all.
CREATE FUNCTION ref.enter(VARIADIC levels text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(4711);
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = ref.me() AND (rolsuper OR rolname ~ ('_(' || array_to_string(levels, '|') || ')$'))) THEN
        PERFORM ref.refuse('42501', 'no right to call it');
    END IF;
END $$;

CREATE FUNCTION ref.is_owner(owner regrole) RETURNS boolean LANGUAGE sql STABLE AS
    $$ SELECT pg_has_role(ref.me(), owner::oid, 'USAGE') $$;

CREATE FUNCTION ref.check_owner(owner regrole) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF NOT ref.is_owner(owner) THEN
        PERFORM ref.refuse('42501', 'not the owner');
    END IF;
END $$;

CREATE FUNCTION ref.check_key(key text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF key IS NULL THEN
        PERFORM ref.refuse('22004', 'key is null');
    ELSIF key = '' THEN
        PERFORM ref.refuse('22023', 'key is empty');
    ELSIF octet_length(key) > 1024 THEN
        PERFORM ref.refuse('54000', 'key is too long');
    END IF;
END $$;

CREATE FUNCTION ref.not_null(value anyelement) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF value IS NULL THEN
        PERFORM ref.refuse('22004', 'argument is null');
    END IF;
END $$;

CREATE FUNCTION ref.check(good boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF good IS NOT TRUE THEN
        PERFORM ref.refuse('22023', 'bad argument');
    END IF;
END $$;

-- An interval without days, checked; a day has 24 hours.
CREATE FUNCTION ref.span(value interval, least_us integer, most_days integer DEFAULT 366) RETURNS interval LANGUAGE plpgsql AS $$
DECLARE
    seconds numeric;
BEGIN
    IF value IS NULL THEN
        RETURN NULL;
    END IF;
    IF value::text ~ 'infinity' OR extract(year FROM value) <> 0 OR extract(month FROM value) <> 0 THEN
        PERFORM ref.refuse('22023', 'no months, no infinity');
    END IF;
    seconds := extract(epoch FROM value);
    IF seconds * 1000000 < least_us OR seconds > most_days * 86400 THEN
        PERFORM ref.refuse('22023', 'out of range');
    END IF;
    RETURN seconds * interval '1 second';
END $$;

CREATE FUNCTION ref.cut(message text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    WHILE octet_length(message) > 8192 LOOP
        message := left(message, -greatest(1, (octet_length(message) - 8192) / 4));
    END LOOP;
    RETURN message;
END $$;

CREATE FUNCTION ref.policy(operation text) RETURNS idem_policy LANGUAGE plpgsql STABLE AS $$
DECLARE
    p idem_policy;
BEGIN
    SELECT * INTO p FROM idem_policy o WHERE o.operation = $1;
    IF NOT FOUND THEN
        SELECT * INTO p FROM idem_policy o WHERE o.operation = 'default';
    END IF;
    RETURN p;
END $$;

-- A token of the extension's own making that the record has not seen; one of ours if there is none.
CREATE FUNCTION ref.fresh_token(key text) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    token uuid;
BEGIN
    SELECT t INTO token FROM idem_record r, unnest(array_append(r.past_tokens, r.owner_token)) t
        WHERE r.idempotency_key = key AND t IS NOT NULL
            AND NOT EXISTS (SELECT FROM ref.record o WHERE o.idempotency_key = key AND t = ANY (array_append(o.past_tokens, o.owner_token)))
        LIMIT 1;
    RETURN coalesce(token, gen_random_uuid());
END $$;

CREATE FUNCTION ref.get(key text) RETURNS ref.record LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
BEGIN
    SELECT * INTO r FROM ref.record o WHERE o.idempotency_key = key;
    RETURN r;
END $$;

CREATE FUNCTION ref.drop(key text) RETURNS void LANGUAGE sql AS
    $$ DELETE FROM ref.record r WHERE r.idempotency_key = $1 $$;

CREATE FUNCTION ref.put(r ref.record) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM ref.record o WHERE o.idempotency_key = r.idempotency_key;
    INSERT INTO ref.record SELECT r.*;
END $$;

------------------------------------------------------------------------------
-- What time makes of a record
------------------------------------------------------------------------------

CREATE FUNCTION ref.at_limits(r ref.record, next timestamptz) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
DECLARE
    p idem_policy := ref.policy(r.operation);
BEGIN
    RETURN r.attempts - r.limits_from_attempt >= p.max_attempts
        OR coalesce(next >= r.limits_from + extract(epoch FROM p.max_elapsed) * interval '1 second', false);
END $$;

CREATE FUNCTION ref.standing(r ref.record) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    IF r.status = 'processing' THEN
        IF ref.now() < r.lease_until THEN
            RETURN 'held';
        ELSIF (ref.policy(r.operation)).on_lease_expiry = 'unknown' THEN
            RETURN 'unknown';
        END IF;
        RETURN CASE WHEN ref.at_limits(r, ref.now()) THEN 'exhausted' ELSE 'lapsed' END;
    ELSIF r.status = 'retryable_failed' THEN
        -- open: also before it is due a record without attempts or time left stands exhausted
        IF ref.at_limits(r, ref.now()) THEN
            RETURN 'exhausted';
        END IF;
        RETURN CASE WHEN ref.now() < r.retry_at THEN 'waiting' ELSE 'due' END;
    END IF;
    RETURN r.status;
END $$;

-- In place of a token that was ended by an operator or a release; never accepted.
CREATE FUNCTION ref.nil() RETURNS uuid LANGUAGE sql IMMUTABLE AS $$ SELECT '00000000-0000-0000-0000-000000000000'::uuid $$;

-- The token of the holder is never accepted again.
CREATE FUNCTION ref.buried(r ref.record) RETURNS ref.record LANGUAGE plpgsql AS $$
BEGIN
    IF r.owner_token <> ref.nil() THEN
        r.past_tokens := array_append(r.past_tokens, r.owner_token);
    END IF;
    r.owner_token := NULL;
    RETURN r;
END $$;

-- Leaves the state it is in for another one.
CREATE FUNCTION ref.moved(r ref.record, new_status text) RETURNS ref.record LANGUAGE plpgsql AS $$
BEGIN
    r.status := new_status;
    r.lease_until := NULL;
    r.retry_at := NULL;
    r.updated_at := ref.now();
    RETURN r;
END $$;

CREATE FUNCTION ref.exhausted(r ref.record, lapsed boolean) RETURNS ref.record LANGUAGE plpgsql AS $$
DECLARE
    used_up boolean := r.attempts - r.limits_from_attempt >= (ref.policy(r.operation)).max_attempts;
BEGIN
    -- open: the words of the message ("the last error in its message")
    r.error_message := ref.cut(format('%s after %s attempts; last: %s',
        CASE WHEN used_up THEN 'no attempts left' ELSE 'time limit passed' END, r.attempts,
        CASE WHEN lapsed THEN 'lease expired'
             WHEN r.error_code IS NULL AND r.error_message IS NULL THEN 'no error recorded'
             ELSE concat_ws(': ', r.error_code, r.error_message) END));
    r.error_code := 'exhausted';
    RETURN ref.moved(r, 'failed');
END $$;

CREATE FUNCTION ref.unknown(r ref.record) RETURNS ref.record LANGUAGE sql AS
    $$ SELECT ref.moved(ref.buried(r), 'unknown') $$;

CREATE FUNCTION ref.succeeded(r ref.record, result jsonb, body bytea) RETURNS ref.record LANGUAGE plpgsql AS $$
BEGIN
    r := ref.moved(r, 'succeeded');
    r.result_json := result;
    r.result_body := body;
    -- open: a success keeps no error, request and past tokens
    r.error_code := NULL;
    r.error_message := NULL;
    r.request_json := NULL;
    r.past_tokens := NULL;
    RETURN r;
END $$;

-- The next attempt, of a lapsed or due record.
CREATE FUNCTION ref.next_attempt(r ref.record, token uuid, lease interval) RETURNS ref.record LANGUAGE plpgsql AS $$
BEGIN
    r.previous := CASE WHEN r.status = 'processing' THEN 'lease_expired'
        WHEN r.limits_from_attempt > 0 AND r.attempts = r.limits_from_attempt THEN 'retried'
        ELSE 'retryable_failed' END;
    r := ref.moved(ref.buried(r), 'processing');
    r.attempts := r.attempts + 1;
    r.owner_token := token;
    r.given := true;
    r.lease_until := ref.now() + coalesce(lease, ref.span((ref.policy(r.operation)).lease, 1));
    RETURN r;
END $$;

-- base * factor^(n-1), at most cap; with jitter the extension's choice, if it is one.
CREATE FUNCTION ref.backoff_of(r ref.record) RETURNS interval LANGUAGE plpgsql AS $$
DECLARE
    p idem_policy := ref.policy(r.operation);
    -- open: after an operator's retry the delays begin anew
    delay interval := least(extract(epoch FROM p.backoff_base)::float8 * p.backoff_factor ^ (r.attempts - r.limits_from_attempt - 1),
        extract(epoch FROM p.backoff_cap)::float8) * interval '1 second';
    taken interval;
BEGIN
    IF p.jitter = 'none' THEN
        RETURN delay;
    END IF;
    SELECT e.retry_at - e.updated_at INTO taken FROM idem_record e WHERE e.idempotency_key = r.idempotency_key;
    IF taken BETWEEN (CASE p.jitter WHEN 'equal' THEN delay / 2 ELSE interval '0' END) AND delay THEN
        RETURN taken;
    END IF;
    RETURN delay * 2;
END $$;

------------------------------------------------------------------------------
-- Claiming
------------------------------------------------------------------------------

CREATE FUNCTION ref.digest_of(operation text, request jsonb, digest bytea) RETURNS bytea LANGUAGE sql AS $$
    -- open: with both a digest and a request, the digest counts
    SELECT CASE WHEN digest IS NOT NULL THEN digest
        WHEN request IS NULL THEN ''::bytea
        ELSE idem_digest(request, (ref.policy(operation)).digest_ignore) END
$$;

CREATE FUNCTION ref.operation_of(key text) RETURNS text LANGUAGE sql AS
    $$ SELECT coalesce((SELECT operation FROM idem_key_parts(key)), 'default') $$;

CREATE FUNCTION ref.check_operation(operation text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- open: a longer operation is 22023
    PERFORM ref.check(operation IS NULL OR octet_length(operation) BETWEEN 1 AND 1024);
END $$;

CREATE FUNCTION ref.first_attempt(key text, operation text, request jsonb, digest bytea, token uuid, lease interval) RETURNS ref.record LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
    p idem_policy;
BEGIN
    r.idempotency_key := key;
    r.operation := coalesce(operation, ref.operation_of(key));
    p := ref.policy(r.operation);
    r.owner := ref.me()::regrole;
    r.request_hash := ref.digest_of(r.operation, request, digest);
    r.attempts := 1;
    r.first_claimed_at := ref.now();
    r.limits_from := ref.now();
    r.limits_from_attempt := 0;
    r.previous := 'none';
    r.given := true;
    r.request_json := CASE WHEN p.store_request THEN request END;
    r := ref.moved(r, 'processing');
    r.owner_token := token;
    r.lease_until := ref.now() + coalesce(lease, ref.span(p.lease, 1));
    RETURN r;
END $$;

CREATE FUNCTION ref.same_request(r ref.record, operation text, request jsonb, digest bytea) RETURNS boolean LANGUAGE sql AS $$
    SELECT coalesce(operation = r.operation, true) AND r.request_hash = ref.digest_of(r.operation, request, digest)
$$;

CREATE FUNCTION ref.answer(r ref.record, what text) RETURNS idem_claim_result LANGUAGE plpgsql AS $$
DECLARE
    a idem_claim_result;
BEGIN
    a.outcome := what;
    IF what = 'conflict' THEN       -- open: it tells nothing more, also not attempts
        RETURN a;
    END IF;
    a.attempts := r.attempts;
    IF what = 'in_progress' THEN
        a.lease_until := r.lease_until;
        -- open: the smaller of backoff_base and the rest of the lease, at least 1 ms
        a.retry_after := greatest(least((ref.policy(r.operation)).backoff_base, r.lease_until - ref.now()), interval '1 ms');
        RETURN a;
    END IF;
    a.error_code := r.error_code;
    a.error_message := r.error_message;
    CASE what
        WHEN 'claimed' THEN
            a.owner_token := r.owner_token;
            a.lease_until := r.lease_until;
            a.previous := r.previous;
            a.progress := r.progress;
        WHEN 'succeeded', 'executed' THEN
            a.result_json := r.result_json;
            a.result_body := r.result_body;
        WHEN 'retry_later' THEN
            a.retry_after := r.retry_at - ref.now();
        ELSE
            NULL;
    END CASE;
    RETURN a;
END $$;

-- A claim whose arguments are checked.
CREATE FUNCTION ref.decide(key text, request jsonb, operation text, lease interval, token uuid, digest bytea)
    RETURNS idem_claim_result LANGUAGE plpgsql AS $$
DECLARE
    r ref.record := ref.get(key);
    standing text;
BEGIN
    IF r.status IS NULL THEN
        r := ref.first_attempt(key, operation, request, digest, coalesce(token, ref.fresh_token(key)), lease);
        PERFORM ref.put(r);
        RETURN ref.answer(r, 'claimed');
    END IF;
    PERFORM ref.check_owner(r.owner);
    IF NOT ref.same_request(r, operation, request, digest) THEN
        RETURN ref.answer(r, 'conflict');
    END IF;
    standing := ref.standing(r);
    CASE standing
        WHEN 'held' THEN
            RETURN ref.answer(r, CASE WHEN token = r.owner_token THEN 'claimed' ELSE 'in_progress' END);
        WHEN 'lapsed', 'due' THEN
            IF token = ANY (array_append(r.past_tokens, r.owner_token)) THEN
                PERFORM ref.refuse('22023', 'token of an earlier attempt');
            END IF;
            r := ref.next_attempt(r, coalesce(token, ref.fresh_token(key)), lease);
            PERFORM ref.put(r);
            RETURN ref.answer(r, 'claimed');
        WHEN 'waiting' THEN
            RETURN ref.answer(r, 'retry_later');
        WHEN 'unknown' THEN
            IF r.status <> 'unknown' THEN
                r := ref.unknown(r);
                PERFORM ref.put(r);
            END IF;
            RETURN ref.answer(r, 'unknown');
        WHEN 'exhausted' THEN
            r := ref.exhausted(r, r.status = 'processing');
            PERFORM ref.put(r);
            RETURN ref.answer(r, 'failed');
        ELSE
            RETURN ref.answer(r, r.status);
    END CASE;
END $$;

CREATE FUNCTION ref.claim(key text, request jsonb DEFAULT NULL, operation text DEFAULT NULL, lease interval DEFAULT NULL,
    wait interval DEFAULT '0', token uuid DEFAULT NULL, digest bytea DEFAULT NULL) RETURNS idem_claim_result LANGUAGE plpgsql AS $$
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_key(key);
    PERFORM ref.check_operation(operation);
    PERFORM ref.span(wait, 0);
    PERFORM ref.check(digest IS NULL OR octet_length(digest) BETWEEN 1 AND 128);
    PERFORM ref.check(token IS DISTINCT FROM ref.nil());
    RETURN ref.decide(key, request, operation, ref.span(lease, 1), token, digest);
END $$;

------------------------------------------------------------------------------
-- The holder
------------------------------------------------------------------------------

-- Checks arguments, right and existence.
CREATE FUNCTION ref.record_of(key text, token uuid) RETURNS ref.record LANGUAGE plpgsql AS $$
DECLARE
    r ref.record := ref.get(key);
BEGIN
    IF r.status IS NULL THEN
        PERFORM ref.refuse('ID002', 'no such key');
    END IF;
    PERFORM ref.check_owner(r.owner);
    RETURN r;
END $$;

CREATE FUNCTION ref.check_holder(r ref.record, token uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF r.status <> 'processing' OR r.owner_token <> token OR NOT r.given THEN
        PERFORM ref.refuse('ID001', 'token does not hold the key');
    END IF;
END $$;

CREATE FUNCTION ref.check_result(operation text, result jsonb, body bytea) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- open: the four bytes of a header do not count
    IF coalesce(pg_column_size(result) - 4, 0) + coalesce(octet_length(body), 0) > (ref.policy(operation)).max_result_size THEN
        PERFORM ref.refuse('54000', 'result is too large');
    END IF;
END $$;

CREATE FUNCTION ref.complete(key text, token uuid, result jsonb DEFAULT NULL, body bytea DEFAULT NULL) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_key(key);
    PERFORM ref.not_null(token);
    r := ref.record_of(key, token);
    IF r.status = 'succeeded' AND r.owner_token = token AND r.result_json IS NOT DISTINCT FROM result
        AND r.result_body IS NOT DISTINCT FROM body THEN
        RETURN false;
    END IF;
    PERFORM ref.check_holder(r, token);
    PERFORM ref.check_result(r.operation, result, body);
    PERFORM ref.put(ref.succeeded(r, result, body));
    RETURN true;
END $$;

-- The record after a failure of its attempt.
CREATE FUNCTION ref.failed(r ref.record, kind text, message text, code text, retry_after interval) RETURNS ref.record LANGUAGE plpgsql AS $$
DECLARE
    due timestamptz;
BEGIN
    r.error_code := code;
    r.error_message := ref.cut(message);
    IF kind = 'permanent' THEN
        RETURN ref.moved(r, 'failed');
    ELSIF kind = 'unknown' THEN
        RETURN ref.unknown(r);
    END IF;
    due := ref.now() + coalesce(retry_after, ref.backoff_of(r));
    -- open: max_elapsed is reached if the next attempt would be due too late
    IF ref.at_limits(r, due) THEN
        RETURN ref.exhausted(r, false);
    END IF;
    r := ref.moved(ref.buried(r), 'retryable_failed');
    r.retry_at := due;
    RETURN r;
END $$;

CREATE FUNCTION ref.fail(key text, token uuid, kind text, error_message text DEFAULT NULL, error_code text DEFAULT NULL,
    retry_after interval DEFAULT NULL) RETURNS idem_fail_result LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_key(key);
    PERFORM ref.not_null(token);
    PERFORM ref.not_null(kind);
    PERFORM ref.check(kind IN ('retryable', 'permanent', 'unknown'));
    PERFORM ref.check(coalesce(octet_length(error_code), 0) <= 128);
    -- open: retry_after goes with retryable only
    PERFORM ref.check(retry_after IS NULL OR kind = 'retryable');
    retry_after := ref.span(retry_after, 0, 3660);      -- open: the largest
    r := ref.record_of(key, token);
    PERFORM ref.check_holder(r, token);
    r := ref.failed(r, kind, error_message, error_code, retry_after);
    PERFORM ref.put(r);
    RETURN (r.status, r.attempts, r.retry_at)::idem_fail_result;
END $$;

CREATE FUNCTION ref.renew(key text, token uuid, lease interval DEFAULT NULL) RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_key(key);
    PERFORM ref.not_null(token);
    lease := ref.span(lease, 1);
    r := ref.get(key);
    IF r.status IS NULL THEN
        RETURN NULL;
    END IF;
    PERFORM ref.check_owner(r.owner);
    IF r.status <> 'processing' OR r.owner_token <> token OR NOT r.given OR ref.now() >= r.lease_until THEN
        RETURN NULL;
    END IF;
    -- open: without a lease of its own it never shortens
    r.lease_until := coalesce(ref.now() + lease, greatest(r.lease_until, ref.now() + ref.span((ref.policy(r.operation)).lease, 1)));
    r.updated_at := ref.now();
    PERFORM ref.put(r);
    RETURN r.lease_until;
END $$;

CREATE FUNCTION ref.release(key text, token uuid) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_key(key);
    PERFORM ref.not_null(token);
    r := ref.record_of(key, token);
    PERFORM ref.check_holder(r, token);
    IF r.previous = 'none' THEN
        PERFORM ref.drop(key);
        RETURN true;
    END IF;
    r.attempts := r.attempts - 1;
    r.updated_at := ref.now();
    -- open: the token is forgotten, not buried; times are those of the release; previous stays
    IF r.previous = 'lease_expired' THEN
        r.owner_token := ref.nil();
        r.given := false;
        r.lease_until := ref.now();
    ELSE
        r := ref.moved(r, 'retryable_failed');
        r.owner_token := NULL;
        r.retry_at := ref.now();
    END IF;
    PERFORM ref.put(r);
    RETURN true;
END $$;

CREATE FUNCTION ref.checkpoint(key text, token uuid, step text, value jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_key(key);
    PERFORM ref.not_null(token);
    PERFORM ref.not_null(step);
    PERFORM ref.not_null(value);
    PERFORM ref.check(octet_length(step) BETWEEN 1 AND 256);
    r := ref.record_of(key, token);
    PERFORM ref.check_holder(r, token);
    IF ref.now() >= r.lease_until THEN
        PERFORM ref.refuse('ID001', 'lease is over');
    END IF;
    r.progress := coalesce(r.progress, '{}') || jsonb_build_object(step, value);
    IF pg_column_size(r.progress) - 4 > 1048576 THEN
        PERFORM ref.refuse('54000', 'progress is too large');
    END IF;
    r.lease_until := greatest(r.lease_until, ref.now() + ref.span((ref.policy(r.operation)).lease, 1));
    r.updated_at := ref.now();
    PERFORM ref.put(r);
    RETURN r.progress;
END $$;

CREATE FUNCTION ref.status(key text) RETURNS ref.record LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_key(key);
    r := ref.get(key);
    IF r.status IS NOT NULL AND NOT has_table_privilege(ref.me(), 'idem_record', 'SELECT') THEN
        PERFORM ref.check_owner(r.owner);
    END IF;
    RETURN r;
END $$;

------------------------------------------------------------------------------
-- One call, many keys
------------------------------------------------------------------------------

-- Runs a handler of the accepted signatures; NULL for void.
CREATE FUNCTION ref.run(handler regprocedure, key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    result jsonb;
    f pg_proc;
    arguments text;
BEGIN
    SELECT * INTO f FROM pg_proc WHERE oid = handler;
    arguments := CASE f.pronargs WHEN 1 THEN '($2)' ELSE '($1, $2, $3)' END;
    IF f.prorettype = 'void'::regtype THEN
        EXECUTE 'SELECT ' || f.oid::regproc || arguments USING key, request, attempt;
        RETURN NULL;
    END IF;
    EXECUTE 'SELECT ' || f.oid::regproc || arguments || '::jsonb' INTO result USING key, request, attempt;
    RETURN result;
END $$;

CREATE FUNCTION ref.check_handler(handler regprocedure, request jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    f pg_proc;
BEGIN
    SELECT * INTO f FROM pg_proc WHERE oid = handler;
    IF NOT FOUND THEN
        PERFORM ref.refuse('42883', 'no such function');
    ELSIF f.proretset OR f.prokind <> 'f' OR oidvectortypes(f.proargtypes) NOT IN ('jsonb', 'text, jsonb, integer')
        OR f.prorettype NOT IN ('void'::regtype, 'json'::regtype, 'jsonb'::regtype, 'text'::regtype) THEN
        PERFORM ref.refuse('42P13', 'not a handler');
    ELSIF f.proisstrict AND request IS NULL THEN
        PERFORM ref.refuse('22004', 'request is null');
    END IF;
END $$;

CREATE FUNCTION ref.kind_of(code text, p idem_policy) RETURNS text LANGUAGE sql AS $$
    SELECT CASE
        WHEN code ~ '^(40|57|XX)' OR code IN ('ID001', 'ID002', 'ID003') THEN 'passes'
        WHEN code = 'IDR00' THEN 'retryable'
        WHEN code = 'IDP00' THEN 'permanent'
        WHEN code = 'IDU00' THEN 'unknown'
        WHEN code = ANY (p.retryable_codes) THEN 'retryable'
        WHEN code = ANY (p.permanent_codes) THEN 'permanent'
        WHEN code = ANY (p.unknown_codes) THEN 'unknown'
        WHEN code ~ '^(08|53|55|58)' THEN 'retryable'
        ELSE 'permanent' END
$$;

CREATE FUNCTION ref.execute(key text, request jsonb, handler regprocedure, operation text DEFAULT NULL, wait interval DEFAULT '0')
    RETURNS idem_claim_result LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
    a idem_claim_result;
    result jsonb;
    code text;
    message text;
    kind text;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_key(key);
    PERFORM ref.check_operation(operation);
    PERFORM ref.not_null(handler);
    PERFORM ref.check_handler(handler, request);
    PERFORM ref.span(wait, 0);
    a := ref.decide(key, request, operation, NULL, NULL, NULL);
    IF a.outcome <> 'claimed' THEN
        RETURN a;
    END IF;
    r := ref.get(key);
    BEGIN
        result := ref.run(handler, key, request, r.attempts);
        PERFORM ref.check_result(r.operation, result, NULL);
    EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
        GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT;
        kind := ref.kind_of(code, ref.policy(r.operation));
        IF kind = 'passes' THEN
            RAISE;
        END IF;
    END;
    IF code IS NULL THEN
        r := ref.succeeded(r, result, NULL);
        PERFORM ref.put(r);
        RETURN ref.answer(r, 'executed');
    END IF;
    IF code = '54000' THEN      -- open: the words of the message
        SELECT e.error_message INTO message FROM idem_record e WHERE e.idempotency_key = key;
    END IF;
    r := ref.failed(r, kind, message, code, NULL);
    PERFORM ref.put(r);
    RETURN ref.answer(r, CASE r.status WHEN 'retryable_failed' THEN 'retry_later' ELSE r.status END);
END $$;

CREATE FUNCTION ref.is_first(key text, request jsonb) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    r ref.record := ref.get(key);
    token uuid;
BEGIN
    IF r.status IS NULL THEN
        -- open: it leaves no token
        PERFORM ref.put(ref.succeeded(ref.first_attempt(key, NULL, request, NULL, NULL, NULL), NULL, NULL));
        RETURN true;
    END IF;
    PERFORM ref.check_owner(r.owner);
    IF NOT ref.same_request(r, NULL, request, NULL) THEN
        PERFORM ref.refuse('22023', 'another request');
    END IF;
    CASE ref.standing(r)
        WHEN 'succeeded' THEN
            RETURN false;
        WHEN 'lapsed', 'due' THEN
            -- open: an attempt more, with a token of its own
            PERFORM ref.put(ref.succeeded(ref.next_attempt(r, ref.fresh_token(key), NULL), NULL, NULL));
            RETURN true;
        ELSE
            PERFORM ref.refuse('ID003', 'not first, and not done');
    END CASE;
END $$;

CREATE FUNCTION ref.once(key text, request jsonb DEFAULT NULL) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_key(key);
    RETURN ref.is_first(key, request);
END $$;

CREATE FUNCTION ref.check_keys(keys text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    key text;
BEGIN
    PERFORM ref.not_null(keys);
    PERFORM ref.check(coalesce(array_ndims(keys), 1) = 1);
    FOREACH key IN ARRAY keys LOOP
        PERFORM ref.check_key(key);
    END LOOP;
END $$;

CREATE FUNCTION ref.check_lengths(keys text[], others anyarray) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM ref.check(coalesce(array_ndims(others), 1) = 1 AND cardinality(keys) = cardinality(others));
END $$;

-- Positions in the order of the keys' bytes, and of the input for a repeated key.
CREATE FUNCTION ref.in_order(keys text[]) RETURNS SETOF integer LANGUAGE sql AS
    $$ SELECT n::integer FROM unnest(keys) WITH ORDINALITY u (k, n) ORDER BY k COLLATE "C", n $$;

CREATE TYPE ref.claim_row AS (ordinality bigint, key text, outcome text, owner_token uuid, attempts integer, lease_until timestamptz,
    retry_after interval, result_json jsonb, result_body bytea, error_code text, error_message text, previous text, progress jsonb);
CREATE TYPE ref.due_row AS (key text, request_json jsonb, outcome text, owner_token uuid, attempts integer, lease_until timestamptz,
    retry_after interval, result_json jsonb, result_body bytea, error_code text, error_message text, previous text, progress jsonb);

CREATE FUNCTION ref.claim_many(keys text[], requests jsonb[] DEFAULT NULL, operation text DEFAULT NULL, lease interval DEFAULT NULL)
    RETURNS SETOF ref.claim_row LANGUAGE plpgsql AS $$
DECLARE
    answers ref.claim_row[] := '{}';
    a idem_claim_result;
    i integer;
    row ref.claim_row;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_keys(keys);
    PERFORM ref.check_operation(operation);
    IF requests IS NOT NULL THEN
        PERFORM ref.check_lengths(keys, requests);
    END IF;
    lease := ref.span(lease, 1);
    FOR i IN SELECT ref.in_order(keys) LOOP
        a := ref.decide(keys[i], requests[i], operation, lease, NULL, NULL);
        row := (i, keys[i], a.outcome, a.owner_token, a.attempts, a.lease_until, a.retry_after, a.result_json, a.result_body,
            a.error_code, a.error_message, a.previous, a.progress);
        answers := answers || row;
    END LOOP;
    RETURN QUERY SELECT * FROM unnest(answers) ORDER BY ordinality;
END $$;

CREATE FUNCTION ref.complete_many(keys text[], tokens uuid[], results jsonb[] DEFAULT NULL)
    RETURNS TABLE (ordinality bigint, key text, completed boolean) LANGUAGE plpgsql AS $$
DECLARE
    done boolean[] := array_fill(NULL::boolean, ARRAY[coalesce(cardinality(keys), 0)]);
    i integer;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_keys(keys);
    PERFORM ref.not_null(tokens);
    PERFORM ref.check_lengths(keys, tokens);
    IF results IS NOT NULL THEN
        PERFORM ref.check_lengths(keys, results);
    END IF;
    FOR i IN SELECT ref.in_order(keys) LOOP
        done[i] := ref.complete(keys[i], tokens[i], results[i]);
    END LOOP;
    RETURN QUERY SELECT n, keys[n], done[n] FROM generate_series(1::bigint, cardinality(keys)) n;
END $$;

CREATE FUNCTION ref.once_many(keys text[]) RETURNS TABLE (ordinality bigint, key text, first boolean) LANGUAGE plpgsql AS $$
DECLARE
    firsts boolean[] := array_fill(NULL::boolean, ARRAY[coalesce(cardinality(keys), 0)]);
    i integer;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.check_keys(keys);
    FOR i IN SELECT ref.in_order(keys) LOOP
        firsts[i] := ref.is_first(keys[i], NULL);
    END LOOP;
    RETURN QUERY SELECT n, keys[n], firsts[n] FROM generate_series(1::bigint, cardinality(keys)) n;
END $$;

------------------------------------------------------------------------------
-- Recovery
------------------------------------------------------------------------------

CREATE FUNCTION ref.claim_due(operation text DEFAULT NULL, max_records integer DEFAULT 1, lease interval DEFAULT NULL)
    RETURNS SETOF ref.due_row LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
    a idem_claim_result;
BEGIN
    PERFORM ref.enter('client', 'operator');
    PERFORM ref.not_null(max_records);
    PERFORM ref.check(max_records BETWEEN 0 AND 10000);     -- open: the largest
    lease := ref.span(lease, 1);
    FOR r IN
        SELECT o.* FROM ref.record o
            WHERE o.operation = coalesce($1, o.operation) AND o.status IN ('processing', 'retryable_failed')
                AND ref.standing(o) IN ('lapsed', 'due') AND ref.is_owner(o.owner)
                -- open: without a stored request, only where the policy stores requests
                AND (o.request_json IS NOT NULL OR (ref.policy(o.operation)).store_request)
            ORDER BY coalesce(o.lease_until, o.retry_at), o.idempotency_key LIMIT max_records
    LOOP
        r := ref.next_attempt(r, ref.fresh_token(r.idempotency_key), lease);
        PERFORM ref.put(r);
        a := ref.answer(r, 'claimed');
        RETURN NEXT (r.idempotency_key, r.request_json, a.outcome, a.owner_token, a.attempts, a.lease_until, a.retry_after, a.result_json,
            a.result_body, a.error_code, a.error_message, a.previous, a.progress)::ref.due_row;
    END LOOP;
END $$;

-- Does the record stand as something final that is not stored?
CREATE FUNCTION ref.settles(r ref.record) RETURNS boolean LANGUAGE sql AS
    $$ SELECT ref.standing(r) = 'exhausted' OR (ref.standing(r) = 'unknown' AND r.status <> 'unknown') $$;

-- What it did to records.  Which of too many it took, and the ring, is the extension's choice.
CREATE FUNCTION ref.reap(max_records integer DEFAULT 1000) RETURNS idem_reap_result LANGUAGE plpgsql AS $$
DECLARE
    a idem_reap_result;
    r ref.record;
    waiting bigint;
BEGIN
    PERFORM ref.enter('operator');
    PERFORM ref.not_null(max_records);
    PERFORM ref.check(max_records BETWEEN 0 AND 1000000);   -- open: the largest
    a := jsonb_populate_record(NULL::idem_reap_result, current_setting('ref.hint')::jsonb -> 0);
    a.expired := 0;
    a.exhausted := 0;
    SELECT count(*) INTO waiting FROM ref.record o WHERE o.status IN ('processing', 'retryable_failed') AND ref.settles(o);
    FOR r IN
        SELECT o.* FROM ref.record o LEFT JOIN idem_record e USING (idempotency_key)
            WHERE o.status IN ('processing', 'retryable_failed') AND ref.settles(o)
            ORDER BY e.status IN ('failed', 'unknown') DESC LIMIT max_records
    LOOP
        IF ref.standing(r) = 'unknown' THEN
            a.expired := a.expired + 1;
            PERFORM ref.put(ref.unknown(r));
        ELSE
            a.exhausted := a.exhausted + 1;
            PERFORM ref.put(ref.exhausted(r, r.status = 'processing'));
        END IF;
    END LOOP;
    IF waiting > max_records THEN
        a.more := max_records > 0;      -- open: reap(0) looks at nothing and says false
    END IF;
    -- a purge may take what was finished the whole retention ago, and only that; the driver's clock steps back by up to 21 s
    DELETE FROM ref.record o USING ref.policy('default') p
        WHERE a.purged > 0 AND o.status IN ('succeeded', 'failed') AND o.updated_at <= ref.now() - p.retention + interval '21 s'
            AND NOT EXISTS (SELECT FROM idem_record e WHERE e.idempotency_key = o.idempotency_key);
    RETURN a;
END $$;

------------------------------------------------------------------------------
-- Operators
------------------------------------------------------------------------------

CREATE TABLE ref.audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz, action text, idempotency_key text COLLATE "C", operation text, current_user_name text, reason text,
    old_status text, new_status text, old_attempts integer, new_attempts integer, old_token_digest bytea
);

CREATE FUNCTION ref.note(action text, reason text, before ref.record, after ref.record) RETURNS void LANGUAGE sql AS $$
    INSERT INTO ref.audit (at, action, idempotency_key, operation, current_user_name, reason, old_status, new_status, old_attempts, new_attempts, old_token_digest)
    VALUES (ref.now(), action, before.idempotency_key, before.operation, ref.me(), reason, before.status, after.status,
        before.attempts, after.attempts, sha256(uuid_send(before.owner_token)))
$$;

-- Checks of every operator call; the record.
CREATE FUNCTION ref.to_operate(key text, reason text) RETURNS ref.record LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
BEGIN
    PERFORM ref.enter('operator');
    PERFORM ref.check_key(key);
    PERFORM ref.check_reason(reason);
    r := ref.get(key);
    IF r.status IS NULL THEN
        PERFORM ref.refuse('ID002', 'no such key');
    END IF;
    RETURN r;
END $$;

CREATE FUNCTION ref.check_reason(reason text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- open: a blank reason, and one of more than 8192 bytes, are refused
    PERFORM ref.not_null(reason);
    PERFORM ref.check(reason ~ '[^ \t\r\n]' AND octet_length(reason) <= 8192);
END $$;

CREATE FUNCTION ref.wrong_state() RETURNS void LANGUAGE sql AS
    $$ SELECT ref.refuse('ID003', 'does not fit the state') $$;

-- open: a due retry can be retried too (its limits count anew), but not one that was just retried
CREATE FUNCTION ref.may_be_retried(r ref.record) RETURNS boolean LANGUAGE sql AS $$
    SELECT CASE ref.standing(r) WHEN 'due' THEN NOT (r.limits_from_attempt > 0 AND r.attempts = r.limits_from_attempt)
        ELSE ref.standing(r) IN ('failed', 'exhausted', 'unknown', 'waiting') END
$$;

CREATE FUNCTION ref.retried(r ref.record, reason text) RETURNS ref.record LANGUAGE plpgsql AS $$
DECLARE
    before ref.record := r;
BEGIN
    r := ref.moved(ref.buried(r), 'retryable_failed');
    r.retry_at := ref.now();
    r.limits_from := ref.now();
    r.limits_from_attempt := r.attempts;
    PERFORM ref.put(r);
    PERFORM ref.note('retry', reason, before, r);
    RETURN r;
END $$;

CREATE FUNCTION ref.retry(key text, reason text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    r ref.record := ref.to_operate(key, reason);
BEGIN
    IF NOT ref.may_be_retried(r) THEN
        PERFORM ref.wrong_state();
    END IF;
    RETURN (ref.retried(r, reason)).status;
END $$;

CREATE FUNCTION ref.retry_many(operation text, error_code text, reason text, max_records integer DEFAULT 100)
    RETURNS TABLE (old_status text, retried bigint, skipped bigint) LANGUAGE plpgsql AS $$
DECLARE
    r ref.record;
    fits boolean;
    failed bigint[] := '{0,0}';
    waiting bigint[] := '{0,0}';
BEGIN
    PERFORM ref.enter('operator');
    PERFORM ref.not_null(operation);
    PERFORM ref.not_null(max_records);
    PERFORM ref.check_reason(reason);
    PERFORM ref.check(max_records BETWEEN 0 AND 100000);    -- open: the largest
    FOR r IN
        SELECT o.* FROM ref.record o WHERE o.operation = $1 AND ($2 IS NULL OR o.error_code = $2) AND o.status IN ('failed', 'retryable_failed')
            ORDER BY o.updated_at, o.idempotency_key LIMIT max_records      -- open: the order
    LOOP
        fits := ref.may_be_retried(r);
        IF fits THEN
            PERFORM ref.retried(r, reason);
        END IF;
        IF r.status = 'failed' THEN
            failed[2 - fits::integer] := failed[2 - fits::integer] + 1;
        ELSE
            waiting[2 - fits::integer] := waiting[2 - fits::integer] + 1;
        END IF;
    END LOOP;
    RETURN QUERY SELECT * FROM (VALUES ('retryable_failed', waiting[1], waiting[2]), ('failed', failed[1], failed[2])) v (s, a, b) WHERE a + b > 0;
END $$;

CREATE FUNCTION ref.resolve(key text, outcome text, reason text, result jsonb DEFAULT NULL, body bytea DEFAULT NULL,
    error_code text DEFAULT NULL, error_message text DEFAULT NULL) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    before ref.record;
    r ref.record;
BEGIN
    PERFORM ref.enter('operator');
    PERFORM ref.check_key(key);
    PERFORM ref.not_null(outcome);
    PERFORM ref.check(outcome IN ('succeeded', 'failed'));
    PERFORM ref.check(coalesce(octet_length(error_code), 0) <= 128);
    -- open: a result goes with a success, an error with a failure
    PERFORM ref.check(CASE outcome WHEN 'succeeded' THEN error_code IS NULL AND error_message IS NULL ELSE result IS NULL AND body IS NULL END);
    before := ref.to_operate(key, reason);
    IF ref.standing(before) <> 'unknown' THEN
        PERFORM ref.wrong_state();
    END IF;
    PERFORM ref.check_result(before.operation, result, body);
    r := ref.buried(before);
    IF outcome = 'succeeded' THEN
        r := ref.succeeded(r, result, body);
    ELSE
        -- open: without an error of its own, the last one stays
        IF error_code IS NOT NULL OR error_message IS NOT NULL THEN
            r.error_code := error_code;
            r.error_message := ref.cut(error_message);
        END IF;
        r := ref.moved(r, 'failed');
    END IF;
    PERFORM ref.put(r);
    PERFORM ref.note('resolve', reason, before, r);
    RETURN r.status;
END $$;

CREATE FUNCTION ref.revoke(key text, reason text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    before ref.record := ref.to_operate(key, reason);
    r ref.record := before;
BEGIN
    IF r.status <> 'processing' THEN
        PERFORM ref.wrong_state();
    END IF;
    r := ref.buried(r);
    r.owner_token := ref.nil();
    r.given := false;
    r.lease_until := ref.now();
    r.updated_at := ref.now();
    PERFORM ref.put(r);
    PERFORM ref.note('revoke', reason, before, r);
    RETURN r.status;
END $$;

CREATE FUNCTION ref.forget(key text, reason text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    r ref.record := ref.to_operate(key, reason);
BEGIN
    -- open: a lapsed claim still counts as being processed, one that lapsed into unknown or exhausted does not
    IF ref.standing(r) IN ('held', 'lapsed') THEN
        PERFORM ref.wrong_state();
    END IF;
    PERFORM ref.drop(key);
    PERFORM ref.note('forget', reason, r, NULL);
    RETURN 'forgotten';
END $$;
