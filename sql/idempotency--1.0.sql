/* sql/idempotency--1.0.sql */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION idempotency" to load this file. \quit

-- Every name below is qualified or resolves in pg_catalog.
SET LOCAL search_path TO pg_catalog, pg_temp;

------------------------------------------------------------------------------
-- Records: slice 0 holds what is not finished, slices 1 to 4 are the ring of
-- finished records.  Written by src/store.c only.
------------------------------------------------------------------------------

CREATE TABLE @extschema@.idem_record (
    slice smallint NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL
        CONSTRAINT idem_record_key_length CHECK (octet_length(idempotency_key) >= 1 AND octet_length(idempotency_key) <= 1024),
    operation text COLLATE "C" NOT NULL,
    owner regrole NOT NULL,
    request_hash bytea NOT NULL,
    status text COLLATE "C" NOT NULL
        CONSTRAINT idem_record_status CHECK (status = ANY (ARRAY['processing', 'succeeded', 'retryable_failed', 'failed', 'unknown'])),
    attempts integer NOT NULL
        CONSTRAINT idem_record_attempts CHECK (attempts >= 0),
    owner_token uuid,
    lease_until timestamptz
        CONSTRAINT idem_record_lease_finite CHECK (lease_until IS NULL OR isfinite(lease_until)),
    retry_at timestamptz
        CONSTRAINT idem_record_retry_finite CHECK (retry_at IS NULL OR isfinite(retry_at)),
    first_claimed_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    result_json jsonb,
    result_body bytea,
    error_code text,
    error_message text,
    request_json jsonb,
    progress jsonb,
    previous text COLLATE "C" NOT NULL
        CONSTRAINT idem_record_previous CHECK (previous = ANY (ARRAY['none', 'retryable_failed', 'lease_expired', 'retried'])),
    past_tokens uuid[],
    limits_from_attempt integer NOT NULL,
    limits_from timestamptz NOT NULL,
    CONSTRAINT idem_record_slice CHECK ((slice = 0) = (status = ANY (ARRAY['processing', 'retryable_failed', 'unknown']))),
    CONSTRAINT idem_record_lease CHECK ((status = 'processing') = (lease_until IS NOT NULL)),
    CONSTRAINT idem_record_retry CHECK ((status = 'retryable_failed') = (retry_at IS NOT NULL)),
    CONSTRAINT idem_record_token CHECK (
        CASE WHEN status = 'processing' THEN owner_token IS NOT NULL
             WHEN status = 'succeeded' OR status = 'failed' THEN true
             ELSE owner_token IS NULL END),
    CONSTRAINT idem_record_result CHECK (status = 'succeeded' OR (result_json IS NULL AND result_body IS NULL)),
    CONSTRAINT idem_record_limits CHECK (limits_from_attempt >= 0 AND limits_from_attempt <= attempts)
) PARTITION BY LIST (slice);

CREATE TABLE @extschema@.idem_record_open PARTITION OF @extschema@.idem_record FOR VALUES IN (0)
    USING heap WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
CREATE TABLE @extschema@.idem_record_1 PARTITION OF @extschema@.idem_record FOR VALUES IN (1) USING heap;
CREATE TABLE @extschema@.idem_record_2 PARTITION OF @extschema@.idem_record FOR VALUES IN (2) USING heap;
CREATE TABLE @extschema@.idem_record_3 PARTITION OF @extschema@.idem_record FOR VALUES IN (3) USING heap;
CREATE TABLE @extschema@.idem_record_4 PARTITION OF @extschema@.idem_record FOR VALUES IN (4) USING heap;

ALTER TABLE @extschema@.idem_record_open ADD CONSTRAINT idem_record_open_pkey PRIMARY KEY (idempotency_key);
ALTER TABLE @extschema@.idem_record_1 ADD CONSTRAINT idem_record_1_pkey PRIMARY KEY (idempotency_key);
ALTER TABLE @extschema@.idem_record_2 ADD CONSTRAINT idem_record_2_pkey PRIMARY KEY (idempotency_key);
ALTER TABLE @extschema@.idem_record_3 ADD CONSTRAINT idem_record_3_pkey PRIMARY KEY (idempotency_key);
ALTER TABLE @extschema@.idem_record_4 ADD CONSTRAINT idem_record_4_pkey PRIMARY KEY (idempotency_key);

COMMENT ON TABLE @extschema@.idem_record IS 'one row per idempotency key; written only by the functions of the extension';
COMMENT ON COLUMN @extschema@.idem_record.slice IS 'partition: 0 = not finished, 1 to 4 = ring of finished records';
COMMENT ON COLUMN @extschema@.idem_record.idempotency_key IS 'the key, 1 to 1024 bytes, compared by bytes';
COMMENT ON COLUMN @extschema@.idem_record.operation IS 'names the row of idem_policy that applies';
COMMENT ON COLUMN @extschema@.idem_record.owner IS 'role that first claimed the key; members of it may use the record';
COMMENT ON COLUMN @extschema@.idem_record.request_hash IS 'digest of the request, first byte is the version; empty = claimed without a request';
COMMENT ON COLUMN @extschema@.idem_record.status IS 'processing, succeeded, retryable_failed, failed or unknown';
COMMENT ON COLUMN @extschema@.idem_record.attempts IS 'attempts started so far';
COMMENT ON COLUMN @extschema@.idem_record.owner_token IS 'token of the holder, the nil UUID where an operator or a release ended the lease; in a finished record the token that finished it';
COMMENT ON COLUMN @extschema@.idem_record.lease_until IS 'processing only: until when nobody else may take over';
COMMENT ON COLUMN @extschema@.idem_record.retry_at IS 'retryable_failed only: when the next attempt is due';
COMMENT ON COLUMN @extschema@.idem_record.first_claimed_at IS 'time of the first claim';
COMMENT ON COLUMN @extschema@.idem_record.updated_at IS 'time of the last change; in a finished record the time of completion';
COMMENT ON COLUMN @extschema@.idem_record.result_json IS 'stored result; SQL NULL and JSON null are different';
COMMENT ON COLUMN @extschema@.idem_record.result_body IS 'stored exact bytes of a response';
COMMENT ON COLUMN @extschema@.idem_record.error_code IS 'SQLSTATE or application code of the last error, or ''exhausted''';
COMMENT ON COLUMN @extschema@.idem_record.error_message IS 'message of the last error, at most 8 kB';
COMMENT ON COLUMN @extschema@.idem_record.request_json IS 'the request, only where the policy says store_request';
COMMENT ON COLUMN @extschema@.idem_record.progress IS 'checkpoints recorded by the attempts';
COMMENT ON COLUMN @extschema@.idem_record.previous IS 'what stood before the current attempt: none, retryable_failed, lease_expired or retried';
COMMENT ON COLUMN @extschema@.idem_record.past_tokens IS 'tokens of earlier attempts, never accepted again';
COMMENT ON COLUMN @extschema@.idem_record.limits_from_attempt IS 'attempts that do not count towards max_attempts, because an operator allowed a retry';
COMMENT ON COLUMN @extschema@.idem_record.limits_from IS 'start of the time that max_elapsed limits: first claim or last operator retry';

CREATE TABLE @extschema@.idem_ring (
    slice smallint NOT NULL CONSTRAINT idem_ring_pkey PRIMARY KEY
        CONSTRAINT idem_ring_slice CHECK (slice >= 1 AND slice <= 4),
    state text COLLATE "C" NOT NULL
        CONSTRAINT idem_ring_state CHECK (state = ANY (ARRAY['current', 'draining', 'closed', 'empty'])),
    opened_at timestamptz,
    closed_at timestamptz,
    CONSTRAINT idem_ring_times CHECK (
        CASE state WHEN 'current' THEN opened_at IS NOT NULL AND closed_at IS NULL
                   WHEN 'draining' THEN opened_at IS NOT NULL AND closed_at IS NULL
                   WHEN 'closed' THEN opened_at IS NOT NULL AND closed_at IS NOT NULL
                   ELSE opened_at IS NULL AND closed_at IS NULL END)
) USING heap;

COMMENT ON TABLE @extschema@.idem_ring IS 'state of the four slices of finished records; no rows means: slice 1 is current, the others were never used';
COMMENT ON COLUMN @extschema@.idem_ring.slice IS 'number of the slice, 1 to 4';
COMMENT ON COLUMN @extschema@.idem_ring.state IS 'current (takes new records), draining (a transaction may still be adding), closed or empty';
COMMENT ON COLUMN @extschema@.idem_ring.opened_at IS 'when the slice became current';
COMMENT ON COLUMN @extschema@.idem_ring.closed_at IS 'when the last transaction that added to it was known to be over; the retention counts from here';

------------------------------------------------------------------------------
-- Keys and digests
------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.idem_key(tenant text, operation text, business_id text) RETURNS text
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_key(text, text, text) IS 'three-part key tenant:operation:business_id, with % and : escaped';

CREATE FUNCTION @extschema@.idem_key_parts(key text, OUT tenant text, OUT operation text, OUT business_id text) RETURNS record
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_key_parts(text) IS 'parts of a three-part key; NULLs for an opaque key';

CREATE FUNCTION @extschema@.idem_downstream_key(key text, step text) RETURNS uuid
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_downstream_key(text, text) IS 'identifier to send to a downstream service, the same for every attempt of the key';

CREATE FUNCTION @extschema@.idem_canonical(request jsonb, ignore text[] DEFAULT '{}') RETURNS text
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_canonical(jsonb, text[]) IS 'canonical text of a request (RFC 8785, numbers exact), without the members that ignore points at';

CREATE FUNCTION @extschema@.idem_digest(request jsonb, ignore text[] DEFAULT '{}') RETURNS bytea
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest(jsonb, text[]) IS 'digest version 1 of a request: 0x01 and SHA-256 of the canonical text in UTF-8';

CREATE FUNCTION @extschema@.idem_keyed_digest(request jsonb, secret bytea, ignore text[] DEFAULT '{}') RETURNS bytea
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_keyed_digest(jsonb, bytea, text[]) IS 'digest of a request with few possible values: 0x81 and HMAC-SHA-256 of the canonical text in UTF-8';

------------------------------------------------------------------------------
-- Policies
------------------------------------------------------------------------------

CREATE TABLE @extschema@.idem_policy (
    operation text COLLATE "C" NOT NULL CONSTRAINT idem_policy_pkey PRIMARY KEY
        CONSTRAINT idem_policy_operation CHECK (octet_length(operation) >= 1 AND octet_length(operation) <= 1024),
    lease interval NOT NULL DEFAULT '30 seconds'
        CONSTRAINT idem_policy_lease CHECK (lease > '0' AND lease <= '366 days' AND date_part('month', lease) = 0 AND date_part('year', lease) = 0),
    max_attempts integer NOT NULL DEFAULT 5
        CONSTRAINT idem_policy_max_attempts CHECK (max_attempts >= 1 AND max_attempts <= 10000),
    max_elapsed interval
        CONSTRAINT idem_policy_max_elapsed CHECK (max_elapsed > '0' AND max_elapsed <= '3660 days' AND date_part('month', max_elapsed) = 0 AND date_part('year', max_elapsed) = 0),
    backoff_base interval NOT NULL DEFAULT '1 second'
        CONSTRAINT idem_policy_backoff_base CHECK (backoff_base >= '0' AND backoff_base <= '366 days' AND date_part('month', backoff_base) = 0 AND date_part('year', backoff_base) = 0),
    backoff_factor double precision NOT NULL DEFAULT 2
        CONSTRAINT idem_policy_backoff_factor CHECK (backoff_factor >= 1 AND backoff_factor <= 1000),
    backoff_cap interval NOT NULL DEFAULT '5 minutes'
        CONSTRAINT idem_policy_backoff_cap CHECK (backoff_cap >= backoff_base AND backoff_cap <= '366 days' AND date_part('month', backoff_cap) = 0 AND date_part('year', backoff_cap) = 0),
    jitter text COLLATE "C" NOT NULL DEFAULT 'full'
        CONSTRAINT idem_policy_jitter CHECK (jitter = ANY (ARRAY['full', 'equal', 'none'])),
    on_lease_expiry text COLLATE "C" NOT NULL DEFAULT 'retry'
        CONSTRAINT idem_policy_on_lease_expiry CHECK (on_lease_expiry = ANY (ARRAY['retry', 'unknown'])),
    store_request boolean NOT NULL DEFAULT false,
    digest_ignore text[] NOT NULL DEFAULT '{}'
        CONSTRAINT idem_policy_digest_ignore CHECK (@extschema@.idem_canonical('null', digest_ignore) IS NOT NULL),
    retryable_codes text[] NOT NULL DEFAULT '{}'
        CONSTRAINT idem_policy_retryable_codes CHECK (array_position(retryable_codes, NULL) IS NULL),
    permanent_codes text[] NOT NULL DEFAULT '{}'
        CONSTRAINT idem_policy_permanent_codes CHECK (array_position(permanent_codes, NULL) IS NULL),
    unknown_codes text[] NOT NULL DEFAULT '{}'
        CONSTRAINT idem_policy_unknown_codes CHECK (array_position(unknown_codes, NULL) IS NULL),
    max_result_size integer NOT NULL DEFAULT 1048576
        CONSTRAINT idem_policy_max_result_size CHECK (max_result_size >= 0 AND max_result_size <= 268435455),
    notify boolean NOT NULL DEFAULT false,
    retention interval
        CONSTRAINT idem_policy_retention CHECK (retention > '0' AND retention <= '3660 days' AND date_part('month', retention) = 0 AND date_part('year', retention) = 0),
    CONSTRAINT idem_policy_retention_place CHECK ((operation = 'default') = (retention IS NOT NULL)),
    CONSTRAINT idem_policy_codes_disjoint CHECK (NOT retryable_codes && permanent_codes AND NOT retryable_codes && unknown_codes AND NOT permanent_codes && unknown_codes)
) USING heap;

COMMENT ON TABLE @extschema@.idem_policy IS 'one row per operation; the row ''default'' serves every other operation';
COMMENT ON COLUMN @extschema@.idem_policy.operation IS 'the operation, the middle part of a three-part key';
COMMENT ON COLUMN @extschema@.idem_policy.lease IS 'how long a claim holds without renewal';
COMMENT ON COLUMN @extschema@.idem_policy.max_attempts IS 'attempts allowed, 1 to 10000, counted by the claim';
COMMENT ON COLUMN @extschema@.idem_policy.max_elapsed IS 'time allowed since the first claim; NULL = no limit';
COMMENT ON COLUMN @extschema@.idem_policy.backoff_base IS 'delay after the first failed attempt';
COMMENT ON COLUMN @extschema@.idem_policy.backoff_factor IS 'growth of the delay per attempt';
COMMENT ON COLUMN @extschema@.idem_policy.backoff_cap IS 'largest delay';
COMMENT ON COLUMN @extschema@.idem_policy.jitter IS 'full: 0 to the delay; equal: half to all of it; none';
COMMENT ON COLUMN @extschema@.idem_policy.on_lease_expiry IS 'retry: the next claim takes over; unknown: nothing runs until idem_resolve';
COMMENT ON COLUMN @extschema@.idem_policy.store_request IS 'keep the request for idem_claim_due';
COMMENT ON COLUMN @extschema@.idem_policy.digest_ignore IS 'JSON Pointers to members that the digest leaves out';
COMMENT ON COLUMN @extschema@.idem_policy.retryable_codes IS 'SQLSTATEs that idem_execute takes as retryable';
COMMENT ON COLUMN @extschema@.idem_policy.permanent_codes IS 'SQLSTATEs that idem_execute takes as permanent';
COMMENT ON COLUMN @extschema@.idem_policy.unknown_codes IS 'SQLSTATEs that idem_execute takes as of unknown outcome';
COMMENT ON COLUMN @extschema@.idem_policy.max_result_size IS 'largest result in bytes (jsonb as stored plus body)';
COMMENT ON COLUMN @extschema@.idem_policy.notify IS 'NOTIFY idempotency on exhaustion, permanent failure and unknown outcome';
COMMENT ON COLUMN @extschema@.idem_policy.retention IS 'row default only: how long finished records are kept at least, from completion';

CREATE FUNCTION @extschema@.idem_policy_guard() RETURNS trigger
    LANGUAGE c AS 'MODULE_PATHNAME';
CREATE FUNCTION @extschema@.idem_policy_changed() RETURNS trigger
    LANGUAGE c AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_policy_guard() IS 'keeps exactly one row ''default'' in idem_policy: it cannot be deleted, and inserting it again replaces it (so that a dump restores)';
COMMENT ON FUNCTION @extschema@.idem_policy_changed() IS 'makes every session forget what it has cached of the table';

CREATE TRIGGER idem_policy_guard BEFORE INSERT OR UPDATE OR DELETE ON @extschema@.idem_policy
    FOR EACH ROW EXECUTE FUNCTION @extschema@.idem_policy_guard();
CREATE TRIGGER idem_policy_guard_truncate BEFORE TRUNCATE ON @extschema@.idem_policy
    FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem_policy_guard();
CREATE TRIGGER idem_ring_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON @extschema@.idem_ring
    FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem_policy_changed();
CREATE TRIGGER idem_policy_changed AFTER INSERT OR UPDATE OR DELETE ON @extschema@.idem_policy
    FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem_policy_changed();

INSERT INTO @extschema@.idem_policy (operation, retention) VALUES ('default', '7 days');

------------------------------------------------------------------------------
-- Audit
------------------------------------------------------------------------------

CREATE TABLE @extschema@.idem_audit (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT idem_audit_pkey PRIMARY KEY,
    at timestamptz NOT NULL,
    action text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    operation text COLLATE "C" NOT NULL,
    session_user_name text NOT NULL,
    current_user_name text NOT NULL,
    reason text NOT NULL,
    old_status text COLLATE "C" NOT NULL,
    new_status text COLLATE "C",
    old_attempts integer NOT NULL,
    new_attempts integer,
    old_token_digest bytea
) USING heap;

CREATE INDEX idem_audit_key ON @extschema@.idem_audit (idempotency_key);

COMMENT ON TABLE @extschema@.idem_audit IS 'actions of operators on records; can only be added to';
COMMENT ON COLUMN @extschema@.idem_audit.id IS 'number of the action';
COMMENT ON COLUMN @extschema@.idem_audit.at IS 'time of the action';
COMMENT ON COLUMN @extschema@.idem_audit.action IS 'retry, resolve, revoke or forget';
COMMENT ON COLUMN @extschema@.idem_audit.idempotency_key IS 'the key acted on';
COMMENT ON COLUMN @extschema@.idem_audit.operation IS 'operation of the record';
COMMENT ON COLUMN @extschema@.idem_audit.session_user_name IS 'role that was logged in';
COMMENT ON COLUMN @extschema@.idem_audit.current_user_name IS 'role that acted';
COMMENT ON COLUMN @extschema@.idem_audit.reason IS 'why, as given by the operator';
COMMENT ON COLUMN @extschema@.idem_audit.old_status IS 'status before, as stored';
COMMENT ON COLUMN @extschema@.idem_audit.new_status IS 'status after; NULL = the record is gone';
COMMENT ON COLUMN @extschema@.idem_audit.old_attempts IS 'attempts before';
COMMENT ON COLUMN @extschema@.idem_audit.new_attempts IS 'attempts after; NULL = the record is gone';
COMMENT ON COLUMN @extschema@.idem_audit.old_token_digest IS 'SHA-256 of the token that was on the record, if any';

CREATE FUNCTION @extschema@.idem_audit_guard() RETURNS trigger
    LANGUAGE c AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_audit_guard() IS 'refuses changes to rows of idem_audit';

CREATE TRIGGER idem_audit_guard BEFORE UPDATE OR DELETE OR TRUNCATE ON @extschema@.idem_audit
    FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem_audit_guard();

SELECT pg_extension_config_dump('@extschema@.idem_audit', '');
SELECT pg_extension_config_dump('@extschema@.idem_audit_id_seq', '');
SELECT pg_extension_config_dump('@extschema@.idem_record_open', '');
SELECT pg_extension_config_dump('@extschema@.idem_record_1', '');
SELECT pg_extension_config_dump('@extschema@.idem_record_2', '');
SELECT pg_extension_config_dump('@extschema@.idem_record_3', '');
SELECT pg_extension_config_dump('@extschema@.idem_record_4', '');
SELECT pg_extension_config_dump('@extschema@.idem_ring', '');
SELECT pg_extension_config_dump('@extschema@.idem_policy', '');

------------------------------------------------------------------------------
-- Claiming and finishing
------------------------------------------------------------------------------

CREATE TYPE @extschema@.idem_claim_result AS (
    outcome text,
    owner_token uuid,
    attempts integer,
    lease_until timestamptz,
    retry_after interval,
    result_json jsonb,
    result_body bytea,
    error_code text,
    error_message text,
    previous text,
    progress jsonb
);
COMMENT ON TYPE @extschema@.idem_claim_result IS 'answer to a claim';
COMMENT ON COLUMN @extschema@.idem_claim_result.outcome IS 'claimed, executed, succeeded, failed, in_progress, retry_later, unknown or conflict';
COMMENT ON COLUMN @extschema@.idem_claim_result.owner_token IS 'claimed only: the token that finishes the key';
COMMENT ON COLUMN @extschema@.idem_claim_result.attempts IS 'attempts started so far';
COMMENT ON COLUMN @extschema@.idem_claim_result.lease_until IS 'claimed and in_progress: end of the lease';
COMMENT ON COLUMN @extschema@.idem_claim_result.retry_after IS 'in_progress and retry_later: when to ask again';
COMMENT ON COLUMN @extschema@.idem_claim_result.result_json IS 'succeeded: the stored result';
COMMENT ON COLUMN @extschema@.idem_claim_result.result_body IS 'succeeded: the stored bytes';
COMMENT ON COLUMN @extschema@.idem_claim_result.error_code IS 'last error code';
COMMENT ON COLUMN @extschema@.idem_claim_result.error_message IS 'last error message';
COMMENT ON COLUMN @extschema@.idem_claim_result.previous IS 'claimed only: none, retryable_failed, lease_expired or retried';
COMMENT ON COLUMN @extschema@.idem_claim_result.progress IS 'claimed only: checkpoints of earlier attempts';

CREATE TYPE @extschema@.idem_fail_result AS (
    status text,
    attempts integer,
    retry_at timestamptz
);
COMMENT ON TYPE @extschema@.idem_fail_result IS 'what idem_fail made of the record';
COMMENT ON COLUMN @extschema@.idem_fail_result.status IS 'retryable_failed, failed or unknown';
COMMENT ON COLUMN @extschema@.idem_fail_result.attempts IS 'attempts started so far';
COMMENT ON COLUMN @extschema@.idem_fail_result.retry_at IS 'retryable_failed only: when the next attempt is due';

CREATE FUNCTION @extschema@.idem_claim(key text, request jsonb DEFAULT NULL, operation text DEFAULT NULL,
        lease interval DEFAULT NULL, wait interval DEFAULT '0', token uuid DEFAULT NULL, digest bytea DEFAULT NULL)
    RETURNS @extschema@.idem_claim_result
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_claim(text, jsonb, text, interval, interval, uuid, bytea) IS 'claims a key for one execution, or tells what became of it';

CREATE FUNCTION @extschema@.idem_complete(key text, token uuid, result jsonb DEFAULT NULL, body bytea DEFAULT NULL)
    RETURNS boolean
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_complete(text, uuid, jsonb, bytea) IS 'stores the result of a claimed key; false if the same token stored the same result before';

CREATE FUNCTION @extschema@.idem_fail(key text, token uuid, kind text, error_message text DEFAULT NULL,
        error_code text DEFAULT NULL, retry_after interval DEFAULT NULL)
    RETURNS @extschema@.idem_fail_result
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_fail(text, uuid, text, text, text, interval) IS 'ends the attempt of a claimed key as retryable, permanent or unknown';

CREATE FUNCTION @extschema@.idem_renew(key text, token uuid, lease interval DEFAULT NULL) RETURNS timestamptz
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_renew(text, uuid, interval) IS 'extends the lease of a claimed key; NULL if it is no longer held';

CREATE FUNCTION @extschema@.idem_release(key text, token uuid) RETURNS boolean
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_release(text, uuid) IS 'gives a claim back as if it had not been made';

CREATE FUNCTION @extschema@.idem_checkpoint(key text, token uuid, step text, value jsonb) RETURNS jsonb
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_checkpoint(text, uuid, text, jsonb) IS 'records the progress of an attempt under the name of a step, renews the lease, and returns all progress';

CREATE FUNCTION @extschema@.idem_status(key text) RETURNS @extschema@.idem_record
    LANGUAGE c STABLE PARALLEL RESTRICTED AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_status(text) IS 'the stored record of a key, as the calling statement sees it; NULL if there is none';

------------------------------------------------------------------------------
-- One call, many keys
------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.idem_execute(key text, request jsonb, handler regprocedure, operation text DEFAULT NULL,
        wait interval DEFAULT '0') RETURNS @extschema@.idem_claim_result
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_execute(text, jsonb, regprocedure, text, interval) IS 'claims a key, runs the handler in a subtransaction, and stores its result or failure';

CREATE FUNCTION @extschema@.idem_once(key text, request jsonb DEFAULT NULL) RETURNS boolean
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_once(text, jsonb) IS 'true the first time for a key, in the transaction of the business write; false after that';

CREATE FUNCTION @extschema@.idem_claim_many(keys text[], requests jsonb[] DEFAULT NULL, operation text DEFAULT NULL,
        lease interval DEFAULT NULL)
    RETURNS TABLE (ordinality bigint, key text, outcome text, owner_token uuid, attempts integer, lease_until timestamptz,
        retry_after interval, result_json jsonb, result_body bytea, error_code text, error_message text,
        previous text, progress jsonb)
    LANGUAGE c VOLATILE PARALLEL UNSAFE ROWS 100 AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_claim_many(text[], jsonb[], text, interval) IS 'idem_claim for each key, answers in input order';

CREATE FUNCTION @extschema@.idem_complete_many(keys text[], tokens uuid[], results jsonb[] DEFAULT NULL)
    RETURNS TABLE (ordinality bigint, key text, completed boolean)
    LANGUAGE c VOLATILE PARALLEL UNSAFE ROWS 100 AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_complete_many(text[], uuid[], jsonb[]) IS 'idem_complete for each key, answers in input order';

CREATE FUNCTION @extschema@.idem_once_many(keys text[])
    RETURNS TABLE (ordinality bigint, key text, first boolean)
    LANGUAGE c VOLATILE PARALLEL UNSAFE ROWS 100 AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_once_many(text[]) IS 'idem_once for each key, answers in input order';

------------------------------------------------------------------------------
-- Recovery
------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.idem_backoff(attempt integer, base interval, factor double precision, cap interval, jitter text)
    RETURNS interval
    LANGUAGE c VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_backoff(integer, interval, double precision, interval, text) IS 'delay after an attempt, as idem_fail takes it';

CREATE FUNCTION @extschema@.idem_claim_due(operation text DEFAULT NULL, max_records integer DEFAULT 1, lease interval DEFAULT NULL)
    RETURNS TABLE (key text, request_json jsonb, outcome text, owner_token uuid, attempts integer, lease_until timestamptz,
        retry_after interval, result_json jsonb, result_body bytea, error_code text, error_message text,
        previous text, progress jsonb)
    LANGUAGE c VOLATILE PARALLEL UNSAFE ROWS 10 AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_claim_due(text, integer, interval) IS 'claims due retries and lapsed claims with their stored requests, oldest due first';

CREATE TYPE @extschema@.idem_reap_result AS (
    expired bigint,
    exhausted bigint,
    skipped bigint,
    purged bigint,
    rotated bigint,
    more boolean
);
COMMENT ON TYPE @extschema@.idem_reap_result IS 'what a call of idem_reap did';
COMMENT ON COLUMN @extschema@.idem_reap_result.expired IS 'lapsed records that became unknown';
COMMENT ON COLUMN @extschema@.idem_reap_result.exhausted IS 'records without attempts or time left that became failed';
COMMENT ON COLUMN @extschema@.idem_reap_result.skipped IS 'records and slices passed over because they were in use or in error';
COMMENT ON COLUMN @extschema@.idem_reap_result.purged IS 'slices of the ring emptied';
COMMENT ON COLUMN @extschema@.idem_reap_result.rotated IS 'slices of the ring opened';
COMMENT ON COLUMN @extschema@.idem_reap_result.more IS 'whether another call has work to do now; false after max_records => 0, which does and looks at nothing';

CREATE FUNCTION @extschema@.idem_reap(max_records integer DEFAULT 1000) RETURNS @extschema@.idem_reap_result
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_reap(integer) IS 'stores what time has decided and turns the ring; for a scheduler';

CREATE FUNCTION @extschema@.idem_open_stats()
    RETURNS TABLE (operation text, processing bigint, expired bigint, retry_waiting bigint, retry_due bigint, unknown bigint,
        exhausted bigint, oldest_processing interval, oldest_expired interval, oldest_due interval, oldest_unknown interval)
    LANGUAGE c VOLATILE PARALLEL RESTRICTED ROWS 10 AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_open_stats() IS 'what is in flight, per operation; see view idem_stats';

CREATE VIEW @extschema@.idem_stats AS
    SELECT operation, processing, expired, retry_waiting, retry_due, unknown, exhausted,
           oldest_processing, oldest_expired, oldest_due, oldest_unknown
    FROM @extschema@.idem_open_stats();
COMMENT ON VIEW @extschema@.idem_stats IS 'what is in flight, per operation; each unfinished record is counted once';
COMMENT ON COLUMN @extschema@.idem_stats.operation IS 'the operation';
COMMENT ON COLUMN @extschema@.idem_stats.processing IS 'claims with a live lease';
COMMENT ON COLUMN @extschema@.idem_stats.expired IS 'claims whose lease is over and that the next claim takes over';
COMMENT ON COLUMN @extschema@.idem_stats.retry_waiting IS 'retries not due yet';
COMMENT ON COLUMN @extschema@.idem_stats.retry_due IS 'retries due';
COMMENT ON COLUMN @extschema@.idem_stats.unknown IS 'records of unknown outcome, stored or lapsed';
COMMENT ON COLUMN @extschema@.idem_stats.exhausted IS 'records without attempts or time left that no claim or reaper has stored as failed yet';
COMMENT ON COLUMN @extschema@.idem_stats.oldest_processing IS 'time since the first claim of the oldest record with a live lease';
COMMENT ON COLUMN @extschema@.idem_stats.oldest_expired IS 'time since the oldest lapsed lease ended';
COMMENT ON COLUMN @extschema@.idem_stats.oldest_due IS 'time since the oldest due retry became due';
COMMENT ON COLUMN @extschema@.idem_stats.oldest_unknown IS 'time since the oldest unknown outcome became so';

------------------------------------------------------------------------------
-- Operators
------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.idem_retry(key text, reason text) RETURNS text
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_retry(text, text) IS 'makes a failed or unknown key claimable now, with its limits counted anew';

CREATE FUNCTION @extschema@.idem_retry_many(operation text, error_code text, reason text, max_records integer DEFAULT 100)
    RETURNS TABLE (old_status text, retried bigint, skipped bigint)
    LANGUAGE c VOLATILE PARALLEL UNSAFE ROWS 3 AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_retry_many(text, text, text, integer) IS 'retries failed and waiting records of an operation, with an error code or (NULL) any; counts per state';

CREATE FUNCTION @extschema@.idem_resolve(key text, outcome text, reason text, result jsonb DEFAULT NULL, body bytea DEFAULT NULL,
        error_code text DEFAULT NULL, error_message text DEFAULT NULL) RETURNS text
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_resolve(text, text, text, jsonb, bytea, text, text) IS 'settles a key of unknown outcome as succeeded or failed';

CREATE FUNCTION @extschema@.idem_revoke(key text, reason text) RETURNS text
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_revoke(text, text) IS 'ends the lease of a claimed key now; its token is dead';

CREATE FUNCTION @extschema@.idem_forget(key text, reason text) RETURNS text
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_forget(text, text) IS 'removes the record of a key that is not being processed: the next claim is its first';

CREATE FUNCTION @extschema@.idem_check()
    RETURNS TABLE (violation text, slice smallint, idempotency_key text, detail text)
    LANGUAGE sql STABLE PARALLEL RESTRICTED ROWS 1
    SET search_path = pg_catalog, pg_temp
    AS $check$
    SELECT 'key in two places', NULL::smallint, r.idempotency_key,
           'slices ' || string_agg(r.slice::text, ', ' ORDER BY r.slice)
        FROM @extschema@.idem_record r GROUP BY r.idempotency_key HAVING count(*) > 1
    UNION ALL
    SELECT 'columns do not fit the status', r.slice, r.idempotency_key, r.status
        FROM @extschema@.idem_record r
        WHERE (r.slice = 0) <> (r.status IN ('processing', 'retryable_failed', 'unknown'))
           OR (r.status = 'processing') <> (r.lease_until IS NOT NULL)
           OR (r.status = 'retryable_failed') <> (r.retry_at IS NOT NULL)
           OR (r.status = 'processing' AND r.owner_token IS NULL)
           OR (r.status IN ('retryable_failed', 'unknown') AND r.owner_token IS NOT NULL)
           OR (r.status <> 'succeeded' AND (r.result_json IS NOT NULL OR r.result_body IS NOT NULL))
           OR r.status NOT IN ('processing', 'retryable_failed', 'unknown', 'succeeded', 'failed')
           OR r.previous NOT IN ('none', 'retryable_failed', 'lease_expired', 'retried')
           OR NOT coalesce(isfinite(r.lease_until), true) OR NOT coalesce(isfinite(r.retry_at), true)
           OR octet_length(r.idempotency_key) < 1 OR octet_length(r.idempotency_key) > 1024
           OR r.limits_from_attempt < 0 OR r.limits_from_attempt > r.attempts
           OR r.owner_token = ANY (r.past_tokens)
    UNION ALL
    SELECT 'ring has not one current slice of four', NULL, NULL,
           string_agg(g.slice || ' ' || g.state, ', ' ORDER BY g.slice)
        FROM @extschema@.idem_ring g
        HAVING count(*) > 0 AND (count(*) <> 4 OR count(*) FILTER (WHERE g.state = 'current') <> 1)
    UNION ALL
    SELECT 'empty slice holds a record', r.slice, r.idempotency_key, r.status
        FROM @extschema@.idem_record r JOIN @extschema@.idem_ring g ON g.slice = r.slice AND g.state = 'empty'
    UNION ALL
    SELECT 'closed slice holds a younger record', r.slice, r.idempotency_key, r.status
        FROM @extschema@.idem_record r JOIN @extschema@.idem_ring g ON g.slice = r.slice AND g.state = 'closed'
        WHERE r.updated_at > g.closed_at
    UNION ALL
    SELECT 'no policy default', NULL, NULL, NULL
        WHERE NOT EXISTS (SELECT FROM @extschema@.idem_policy p WHERE p.operation = 'default')
    $check$;
COMMENT ON FUNCTION @extschema@.idem_check() IS 'reads all records and returns a row for each violated invariant';

CREATE FUNCTION @extschema@.idem_grant(role regrole, level text) RETURNS void
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_grant(regrole, text) IS 'grants what a client, a monitor or an operator needs';

REVOKE ALL ON FUNCTION
    @extschema@.idem_claim(text, jsonb, text, interval, interval, uuid, bytea),
    @extschema@.idem_complete(text, uuid, jsonb, bytea),
    @extschema@.idem_fail(text, uuid, text, text, text, interval),
    @extschema@.idem_renew(text, uuid, interval),
    @extschema@.idem_release(text, uuid),
    @extschema@.idem_checkpoint(text, uuid, text, jsonb),
    @extschema@.idem_status(text),
    @extschema@.idem_execute(text, jsonb, regprocedure, text, interval),
    @extschema@.idem_once(text, jsonb),
    @extschema@.idem_claim_many(text[], jsonb[], text, interval),
    @extschema@.idem_complete_many(text[], uuid[], jsonb[]),
    @extschema@.idem_once_many(text[]),
    @extschema@.idem_backoff(integer, interval, double precision, interval, text),
    @extschema@.idem_claim_due(text, integer, interval),
    @extschema@.idem_reap(integer),
    @extschema@.idem_open_stats(),
    @extschema@.idem_retry(text, text),
    @extschema@.idem_retry_many(text, text, text, integer),
    @extschema@.idem_resolve(text, text, text, jsonb, bytea, text, text),
    @extschema@.idem_revoke(text, text),
    @extschema@.idem_forget(text, text),
    @extschema@.idem_check(),
    @extschema@.idem_grant(regrole, text),
    @extschema@.idem_audit_guard(),
    @extschema@.idem_policy_guard(),
    @extschema@.idem_policy_changed()
    FROM PUBLIC;
