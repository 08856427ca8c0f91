-- What test/bench/purge.sh needs: open records, and functions to fill, delete and time.
\set QUIET on
SET client_min_messages = warning;
CREATE EXTENSION idempotency CASCADE;

-- of 1000 open records: 500 held, 250 waiting for their next attempt, 250 unknown
UPDATE idem_policy SET store_request = true WHERE operation = 'default';
CREATE TABLE held AS
	SELECT n, key, (idem_claim(key, '{"amount": 1}', lease => '1 day')).owner_token AS token
	FROM (SELECT n, 'tenant-7:charge:open-' || n AS key FROM generate_series(1, :open) n) s;
DO $$
DECLARE
	h held;
BEGIN
	FOR h IN SELECT * FROM held WHERE n % 2 = 0
	LOOP
		IF h.n % 4 = 0 THEN
			PERFORM idem_fail(h.key, h.token, 'retryable', 'later', retry_after => '1 day');
		ELSE
			PERFORM idem_fail(h.key, h.token, 'unknown', 'perhaps');
		END IF;
	END LOOP;
END $$;
DROP TABLE held;
VACUUM idem_record_open;
-- the first call makes the ring's rows
SELECT rotated AS first_turn FROM idem_reap() \gset

-- n succeeded records in slice 1, which is then closed, slice 2 being current.  As
-- the owner of the tables may: no function of the extension fills a slice like this.
CREATE PROCEDURE fill(n bigint) LANGUAGE plpgsql AS $$
BEGIN
	FOR part IN 0 .. (n - 1) / 500000
	LOOP
		INSERT INTO idem_record_1 (slice, idempotency_key, operation, owner, request_hash, status, attempts,
			owner_token, first_claimed_at, updated_at, result_json, previous, limits_from_attempt, limits_from)
		SELECT 1, 'tenant-7:charge:order-' || lpad(i::text, 10, '0'), 'charge', current_user::regrole,
			'\x01'::bytea || sha256(int8send(i)), 'succeeded', 1, gen_random_uuid(), now(), now(),
			jsonb_build_object('charge', 'ch_' || i, 'status', 'paid'), 'none', 0, now()
		FROM generate_series(part * 500000 + 1, least((part + 1) * 500000, n)) i;
		COMMIT;
	END LOOP;
	UPDATE idem_ring SET state = 'closed', closed_at = clock_timestamp() WHERE slice = 1;
	UPDATE idem_ring SET state = 'current', opened_at = clock_timestamp() WHERE slice = 2;
END $$;

CREATE PROCEDURE delete_in_batches(size integer) LANGUAGE plpgsql AS $$
DECLARE
	deleted bigint;
	border timestamptz := now();
BEGIN
	LOOP
		DELETE FROM plain WHERE ctid = ANY (ARRAY(SELECT ctid FROM plain WHERE updated_at < border ORDER BY updated_at LIMIT size));
		GET DIAGNOSTICS deleted = ROW_COUNT;
		COMMIT;
		EXIT WHEN deleted = 0;
	END LOOP;
END $$;

-- fastest of 1001 runs, in milliseconds
CREATE FUNCTION cost(query text) RETURNS numeric LANGUAGE plpgsql AS $$
DECLARE
	t timestamptz;
	took numeric[];
BEGIN
	FOR i IN 1 .. 1001
	LOOP
		t := clock_timestamp();
		EXECUTE query;
		took := took || extract(epoch FROM clock_timestamp() - t) * 1000;
	END LOOP;
	RETURN (SELECT round(min(x), 3) FROM unnest(took) x);
END $$;
