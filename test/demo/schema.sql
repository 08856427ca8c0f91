-- A small payments service.  There is no unique constraint on charges on purpose:
-- only the idempotency key keeps a payment from being charged twice.

CREATE TABLE accounts (
    id integer PRIMARY KEY,
    balance numeric(12, 2) NOT NULL CHECK (balance >= 0)
);

CREATE TABLE charges (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    payment text NOT NULL,
    account integer NOT NULL REFERENCES accounts,
    amount numeric(12, 2) NOT NULL
);

-- Accounts 1 to 50 have plenty; 51 to 55 have next to nothing.
INSERT INTO accounts SELECT i, CASE WHEN i <= 50 THEN 1000000 ELSE 1 END FROM generate_series(1, 55) i;

-- The business logic.  It knows nothing of keys; its error says "never again".
CREATE FUNCTION charge(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    charge_id bigint;
BEGIN
    UPDATE accounts SET balance = balance - (request->>'amount')::numeric
        WHERE id = (request->>'account')::integer AND balance >= (request->>'amount')::numeric;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'insufficient funds' USING ERRCODE = 'IDP00';
    END IF;
    INSERT INTO charges (payment, account, amount)
        VALUES (request->>'payment', (request->>'account')::integer, (request->>'amount')::numeric)
        RETURNING id INTO charge_id;
    RETURN jsonb_build_object('charge', charge_id, 'amount', request->'amount');
END $$;

-- The same wrapped by hand, for callers that want one call in their own
-- transaction: claim, business writes, completion.
CREATE FUNCTION pay(key text, request jsonb) RETURNS idem_claim_result LANGUAGE plpgsql AS $$
DECLARE
    answer idem_claim_result;
BEGIN
    SELECT * INTO answer FROM idem_claim(key, request);
    IF answer.outcome <> 'claimed' THEN
        RETURN answer;
    END IF;
    BEGIN
        answer.result_json := charge(request);
        PERFORM idem_complete(key, answer.owner_token, answer.result_json);
        answer.outcome := 'executed';
    EXCEPTION WHEN SQLSTATE 'IDP00' THEN
        PERFORM idem_fail(key, answer.owner_token, 'permanent', SQLERRM, SQLSTATE);
        answer.outcome := 'failed';
        answer.error_code := SQLSTATE;
        answer.error_message := SQLERRM;
    END;
    RETURN answer;
END $$;

-- Short leases and delays, so that recovery can be watched.
UPDATE idem_policy SET lease = '1 s', max_attempts = 20, backoff_base = '100 ms', backoff_cap = '500 ms'
    WHERE operation = 'default';
INSERT INTO idem_policy (operation, max_attempts, backoff_base, backoff_factor, jitter, on_lease_expiry, notify)
    VALUES ('ship', 3, '200 ms', 2, 'none', 'unknown', true);
