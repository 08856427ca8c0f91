-- What the benchmark compares the extension with.

-- (a) The bare limit.
CREATE TABLE bare (idempotency_key text COLLATE "C" PRIMARY KEY, result jsonb);
CREATE TABLE business (id bigserial PRIMARY KEY, key text NOT NULL, amount int NOT NULL);
CREATE TABLE business_alone (id bigserial PRIMARY KEY, key text NOT NULL, amount int NOT NULL);

-- A finished row alone, as wide as a record of the extension: for WAL.
CREATE TABLE finished (LIKE idem_record_1 INCLUDING DEFAULTS, PRIMARY KEY (idempotency_key));

-- (b) The table of the article that the project started from; its SQL is run by hand from the client.
CREATE TABLE task_idempotency (
    idempotency_key text PRIMARY KEY,
    request_hash text NOT NULL,
    status text NOT NULL CHECK (status IN ('processing', 'succeeded', 'retryable_failed', 'failed')),
    result_json jsonb,
    error_message text,
    owner_token uuid,
    lease_until timestamptz,
    attempts integer NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- (c) The same contract in PL/pgSQL over that table.  It looks before it locks.
CREATE TYPE pl_answer AS (outcome text, owner_token uuid, attempts integer, result_json jsonb, error_message text);

CREATE FUNCTION pl_claim(p_key text, p_request jsonb, p_lease interval DEFAULT '30 s') RETURNS pl_answer
LANGUAGE plpgsql AS $$
DECLARE
    r task_idempotency;
    h text := encode(sha256(convert_to(p_request::text, 'UTF8')), 'hex');
    t uuid;
    a pl_answer;
BEGIN
    SELECT * INTO r FROM task_idempotency WHERE idempotency_key = p_key;
    IF NOT FOUND THEN
        t := gen_random_uuid();
        INSERT INTO task_idempotency (idempotency_key, request_hash, status, owner_token, lease_until, attempts)
            VALUES (p_key, h, 'processing', t, clock_timestamp() + p_lease, 1)
            ON CONFLICT DO NOTHING;
        IF FOUND THEN
            a := ('claimed', t, 1, NULL, NULL);
            RETURN a;
        END IF;
        SELECT * INTO r FROM task_idempotency WHERE idempotency_key = p_key;
    END IF;
    IF r.request_hash <> h THEN
        a := ('conflict', NULL, NULL, NULL, NULL);
    ELSIF r.status IN ('succeeded', 'failed') THEN
        a := (r.status, NULL, r.attempts, r.result_json, r.error_message);
    ELSIF r.status = 'processing' AND r.lease_until > clock_timestamp() THEN
        a := ('in_progress', NULL, r.attempts, NULL, NULL);
    ELSE
        t := gen_random_uuid();
        UPDATE task_idempotency SET status = 'processing', owner_token = t, lease_until = clock_timestamp() + p_lease,
                attempts = attempts + 1, updated_at = clock_timestamp()
            WHERE idempotency_key = p_key AND (status = 'retryable_failed' OR lease_until <= clock_timestamp())
            RETURNING attempts INTO r.attempts;
        IF FOUND THEN
            a := ('claimed', t, r.attempts, NULL, NULL);
        ELSE
            a := ('in_progress', NULL, r.attempts, NULL, NULL);
        END IF;
    END IF;
    RETURN a;
END $$;

CREATE FUNCTION pl_complete(p_key text, p_token uuid, p_result jsonb) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE task_idempotency SET status = 'succeeded', result_json = p_result, lease_until = NULL, updated_at = clock_timestamp()
        WHERE idempotency_key = p_key AND owner_token = p_token AND status = 'processing';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'token lost' USING ERRCODE = 'ID001';
    END IF;
    RETURN true;
END $$;

-- PL/pgSQL keeps its plan; a handler in SQL is planned at every call.
CREATE FUNCTION pay(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO business (key, amount) VALUES (request->>'k', 1);
    RETURN request;
END $$;

-- Records to replay, in progress, and their rivals' equals.
SELECT count(*) FROM idem_once_many(ARRAY(SELECT 'r' || i FROM generate_series(1, 100000) i));
INSERT INTO bare SELECT 'r' || i, NULL FROM generate_series(1, 100000) i;
INSERT INTO task_idempotency (idempotency_key, request_hash, status, attempts)
    SELECT 'r' || i, encode(sha256(convert_to('{}', 'UTF8')), 'hex'), 'succeeded', 1 FROM generate_series(1, 100000) i;
UPDATE idem_policy SET lease = '1 day' WHERE operation = 'default';
SELECT count(*) FROM idem_claim_many(ARRAY(SELECT 'p' || i FROM generate_series(1, 1000) i));
INSERT INTO task_idempotency (idempotency_key, request_hash, status, attempts, owner_token, lease_until)
    SELECT 'p' || i, encode(sha256(convert_to('{}', 'UTF8')), 'hex'), 'processing', 1, gen_random_uuid(), now() + interval '1 day'
    FROM generate_series(1, 1000) i;
VACUUM ANALYZE;
