-- psql -v key=... -v charge=... -v amount=... -v reason=... -f by_hand.sql
-- doc: begin by_hand
BEGIN;
SELECT idem_resolve(:'key', 'succeeded', :'reason', jsonb_build_object('id', :'charge', 'amount', :amount));
INSERT INTO payment (idempotency_key, charge_id, amount) VALUES (:'key', :'charge', :amount);
COMMIT;
-- doc: end by_hand
