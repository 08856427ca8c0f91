-- What the clients need: policies, the business table, and roles.  For psql, by a superuser.
-- doc: begin policies
-- The service answers a repeated key with its first answer: a lapsed claim is taken over.
INSERT INTO idem_policy (operation, lease, on_lease_expiry, max_attempts, notify)
    VALUES ('charge', '30 s', 'retry', 8, true);
-- The service would charge again: after a lapse nothing runs until the outcome is known.
INSERT INTO idem_policy (operation, lease, on_lease_expiry, max_attempts, notify)
    VALUES ('transfer', '30 s', 'unknown', 8, true);
-- doc: end policies

-- No unique key: a second payment for a key shall be seen by the tests.
CREATE TABLE payment (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    idempotency_key text NOT NULL,
    charge_id text NOT NULL,
    amount integer NOT NULL
);
CREATE ROLE worker LOGIN;
CREATE ROLE reconciler LOGIN;
SELECT idem_grant('worker', 'client');
SELECT idem_grant('reconciler', 'operator');
GRANT INSERT ON payment TO worker, reconciler;
