-- driver.sql - random calls of the extension and of the reference, compared call by call.
--
--	CALL ref.run(calls);		after setseed() and reference.sql; again to go on
--
-- Every call is made as a text: "claim('k', ...)" is run as idem_claim('k', ...) and then as
-- ref.claim('k', ...) with the same clock, ref.now, which idempotency.clock_offset gives
-- to the extension.  It stands during a call, and goes on between calls by whole seconds.  All intervals and
-- policies have fractions of a second, so that nothing becomes due within the moment that a
-- call takes; one that took longer is undone and made again.
--
-- Compared are the answer or SQLSTATE and the records of the keys; every so often all records,
-- the audit, and what handlers wrote.  Times may differ by the duration of a call; then the reference
-- takes over those of the extension, so that orders by time are the same.
-- Calls are undone at random, one, several or a whole transaction.  A difference ends the run with the
-- history of the key.

CREATE TABLE ref.history (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz, role text, keys text[], call text, function text, outcome text, answer text, undone boolean NOT NULL DEFAULT false
);

-- What handlers did, for whom.
CREATE TABLE ref.work (side text, key text, attempt integer, at timestamptz, compared boolean NOT NULL DEFAULT false);

CREATE ROLE ref_a_client;
CREATE ROLE ref_b_client;
CREATE ROLE ref_c_client;       -- a member of a
CREATE ROLE ref_d_operator;
CREATE ROLE ref_e_nobody;
GRANT ref_a_client TO ref_c_client;
SELECT idem_grant('ref_a_client', 'client'), idem_grant('ref_b_client', 'client'), idem_grant('ref_c_client', 'client'), idem_grant('ref_d_operator', 'operator');
GRANT USAGE ON SCHEMA ref TO PUBLIC;
GRANT INSERT ON ref.work TO PUBLIC;

UPDATE idem_policy SET lease = '30.5 s', backoff_base = '1.3 s', backoff_cap = '60.5 s', jitter = 'none', retention = '3 h' WHERE operation = 'default';
INSERT INTO idem_policy (operation, lease, max_attempts, max_elapsed, backoff_base, backoff_factor, backoff_cap, jitter, on_lease_expiry,
        store_request, digest_ignore, max_result_size, notify, retryable_codes, permanent_codes, unknown_codes) VALUES
    ('two', '20.5 s', 2, NULL, '1.3 s', 2, '60.5 s', 'none', 'retry', true, '{}', 1000, false, '{}', '{}', '{}'),
    ('one', '20.5 s', 1, NULL, '1.3 s', 2, '60.5 s', 'none', 'retry', false, '{}', 1000, true, '{}', '{}', '{}'),
    ('late', '20.5 s', 8, '70.25 s', '5.4 s', 3, '366 days', 'none', 'retry', true, '{}', 1000, false, '{}', '{}', '{}'),
    ('doubt', '20.5 s', 4, NULL, '2.6 s', 1, '60.5 s', 'none', 'unknown', true, '{}', 1000, true, '{}', '{}', '{}'),
    ('doubt_late', '20.5 s', 2, '50.25 s', '2.6 s', 2, '60.5 s', 'none', 'unknown', false, '{}', 1000, false, '{}', '{}', '{}'),
    ('ignore', '20.5 s', 5, NULL, '1.3 s', 1.4, '3.3 s', 'none', 'retry', true, '{/trace,/deep/x}', 1000, false, '{}', '{}', '{}'),
    ('small', '20.5 s', 5, NULL, '0', 2, '0', 'none', 'retry', false, '{}', 20, false, '{}', '{}', '{}'),
    ('full', '20.5 s', 50, NULL, '0.4 s', 1, '0.4 s', 'full', 'retry', true, '{}', 1000, false, '{}', '{}', '{}'),
    ('equal', '20.5 s', 50, NULL, '0.6 s', 1, '0.6 s', 'equal', 'retry', false, '{}', 1000, false, '{}', '{}', '{}'),
    ('codes', '20.5 s', 5, NULL, '1.3 s', 2, '60.5 s', 'none', 'retry', false, '{}', 1000, true, '{22012,40001}', '{08006,IDR00}', '{P0001,53100}'),
    ('vary', '20.5 s', 5, NULL, '1.3 s', 2, '60.5 s', 'none', 'retry', true, '{}', 1000, false, '{}', '{}', '{}');

------------------------------------------------------------------------------
-- Handlers: they do what the setting ref.handler says
------------------------------------------------------------------------------

CREATE FUNCTION ref.do_work(key text, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    task text := current_setting('ref.handler');
BEGIN
    INSERT INTO ref.work (side, key, attempt, at) VALUES (current_setting('ref.side'), key, attempt, current_setting('ref.now')::timestamptz);
    IF task ~ '^raise' THEN
        RAISE EXCEPTION USING ERRCODE = right(task, 5), MESSAGE = repeat('ü', length(key) * 60) || ' went wrong';
    END IF;
    RETURN CASE task WHEN 'null' THEN NULL WHEN 'json null' THEN 'null' WHEN 'big' THEN to_jsonb(repeat('x', 2000))
        ELSE jsonb_build_object('attempt', attempt) END;
END $$;
CREATE FUNCTION ref.handler(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE sql AS $$ SELECT ref.do_work(key, attempt) $$;
CREATE FUNCTION ref.handler_1(request jsonb) RETURNS json LANGUAGE plpgsql AS $$ BEGIN RETURN ref.do_work('?', 0); END $$;
CREATE FUNCTION ref.handler_void(request jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM ref.do_work('?', 0); END $$;
CREATE FUNCTION ref.handler_text(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
    BEGIN RETURN CASE current_setting('ref.handler') WHEN 'not json' THEN 'not json' ELSE ref.do_work('?', 0)::text END; END $$;
CREATE FUNCTION ref.handler_strict(request jsonb) RETURNS jsonb STRICT LANGUAGE plpgsql AS $$ BEGIN RETURN ref.do_work('?', 0); END $$;
CREATE FUNCTION ref.handler_set(request jsonb) RETURNS SETOF jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE FUNCTION ref.handler_int(request jsonb) RETURNS point LANGUAGE sql AS $$ SELECT point(1, 2) $$;
CREATE FUNCTION ref.handler_two(a text, b text) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;

------------------------------------------------------------------------------
-- Random arguments, as SQL text
------------------------------------------------------------------------------

CREATE FUNCTION ref.roll(n integer) RETURNS integer LANGUAGE sql VOLATILE AS $$ SELECT floor(random() * n)::integer $$;
CREATE FUNCTION ref.pick(VARIADIC words text[]) RETURNS text LANGUAGE sql VOLATILE AS $$ SELECT words[1 + ref.roll(cardinality(words))] $$;
CREATE FUNCTION ref.chance(percent numeric) RETURNS boolean LANGUAGE sql VOLATILE AS $$ SELECT random() * 100 < percent $$;

-- Time for a bad argument?  At most one in a call: which of several is named is open.
CREATE FUNCTION ref.spoil(percent numeric) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('ref.spoiled') = 'yes' OR NOT ref.chance(percent) THEN
        RETURN false;
    END IF;
    PERFORM set_config('ref.spoiled', 'yes', false);
    RETURN true;
END $$;

CREATE FUNCTION ref.random_key() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    operation text;
BEGIN
    IF ref.chance(35) THEN          -- once more the key of the last call
        RETURN current_setting('ref.last');
    ELSIF ref.chance(8) THEN
        RETURN ref.pick('opaque', 'a:b', 'a::b', 'a:default:b', 'default', 'Ünï:two:☃', ' ', 'A', 'a', 'x:' || 'two' || ':%253A%25', 'a:b%3Ac:d',
            repeat('k', 1024), repeat('ü', 512), 't:one:' || repeat('l', 1018), E'new\nline', 'q''uote\"');
    END IF;
    operation := ref.pick('two', 'one', 'late', 'doubt', 'doubt_late', 'ignore', 'small', 'full', 'equal', 'codes', 'vary', 'nope');
    IF ref.chance(70) THEN
        RETURN 'hot:' || operation || ':' || ref.roll(3);
    ELSIF ref.chance(40) THEN
        RETURN 'warm:' || operation || ':' || ref.roll(20);
    END IF;
    RETURN 'cold:' || operation || ':' || ref.roll(10000);
END $$;

CREATE FUNCTION ref.key_text(key text) RETURNS text LANGUAGE sql AS $$
    SELECT CASE WHEN NOT ref.spoil(1) THEN quote_literal(key)
        ELSE ref.pick('NULL', '''''', 'repeat(''k'', 1025)', 'repeat(''ü'', 513)') END
$$;

CREATE FUNCTION ref.new_token() RETURNS uuid LANGUAGE sql AS $$
    SELECT format('00000000-0000-4%s-8000-%s', to_char(ref.roll(1000), 'FM000'), to_char(floor(random() * 1e12), 'FM000000000000'))::uuid $$;

-- A token for a call of the holder: mostly the right one, if there is one.
CREATE FUNCTION ref.holders_token(key text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    r ref.record := ref.get(key);
    n integer := ref.roll(100);
BEGIN
    IF n < 82 AND r.owner_token IS NOT NULL THEN
        RETURN quote_literal(r.owner_token);
    ELSIF n < 92 AND r.past_tokens IS NOT NULL THEN
        RETURN quote_literal(r.past_tokens[1 + ref.roll(cardinality(r.past_tokens))]);
    ELSIF ref.spoil(5) THEN
        RETURN 'NULL';
    END IF;
    RETURN quote_literal(ref.new_token());
END $$;

CREATE FUNCTION ref.claimers_token(key text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    n integer := ref.roll(100);
BEGIN
    RETURN CASE WHEN n < 60 THEN quote_literal(ref.new_token()) WHEN n < 85 THEN 'NULL' ELSE ref.holders_token(key) END;
END $$;

-- The key's usual request, in one of its layouts, or another one.
CREATE FUNCTION ref.request(key text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    kind integer := CASE WHEN ref.chance(95) THEN abs(hashtext(key)::bigint) % 4 ELSE ref.roll(7) END;
BEGIN
    RETURN CASE kind
        WHEN 0 THEN ref.pick('''{"a": 1, "b": [1, 2]}''', '''{"b": [1.0, 2], "a": 1e0}''')
        WHEN 1 THEN 'NULL'
        WHEN 2 THEN '''null'''
        WHEN 3 THEN ref.pick('''{"amount": 100.00, "deep": {"x": 1, "y": 2}}''', '''{"deep": {"y": 2, "x": 1}, "amount": 1e2}''',
            CASE WHEN key ~ ':ignore:' OR ref.chance(1) THEN '''{"deep": {"y": 2, "x": 3}, "trace": "t", "amount": 100}'''
                ELSE '''{"amount": 100, "deep": {"x": 1, "y": 2}}''' END)
        WHEN 4 THEN '''{"a": 1, "b": [2, 1]}'''
        WHEN 5 THEN '''{}'''
        ELSE '''{"amount": 100.01}''' END;
END $$;

CREATE FUNCTION ref.lease_text() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RETURN CASE WHEN ref.chance(60) THEN 'NULL'
        WHEN NOT ref.spoil(4) THEN quote_literal(ref.pick('1.5 s', '5.5 s', '30.5 s', '10 min 0.5 s', '1 day 0.5 s', '365 days 23:59:59.5'))
        ELSE quote_literal(ref.pick('0', '-1 s', '1 month', '1 year', '366 days 0.5 s', '1 day -25 hours', '1 month -30 days', '-1 day', '178000000 days',
            CASE WHEN current_setting('server_version_num')::integer >= 170000 THEN 'infinity' ELSE '-1 us' END)) END;
END $$;

CREATE FUNCTION ref.operation_text(key text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RETURN CASE WHEN ref.chance(80) THEN 'NULL'
        WHEN ref.chance(80) THEN quote_nullable(coalesce((ref.get(key)).operation, ref.pick('two', 'doubt', 'nope', 'Ünï')))
        WHEN NOT ref.spoil(20) THEN quote_literal(ref.pick('two', 'one', 'vary', 'default', 'nope', 'Ünï'))
        ELSE ref.pick('''''', 'repeat(''o'', 1024)', 'repeat(''o'', 1025)') END;
END $$;

CREATE FUNCTION ref.result_text() RETURNS text LANGUAGE sql AS $$
    SELECT CASE WHEN ref.chance(5) THEN ref.pick('to_jsonb(repeat(''r'', 10000))', 'to_jsonb(repeat(''r'', 12))', 'to_jsonb(repeat(''r'', 13))', 'to_jsonb(repeat(''r'', 988))',
            'to_jsonb(repeat(''r'', 992))', 'to_jsonb(repeat(''r'', 993))')
        ELSE ref.pick('NULL', '''null''', '''1''', '''1.0''', '''{"r": 1}''', '''[]''') END
$$;
CREATE FUNCTION ref.body_text() RETURNS text LANGUAGE sql AS $$
    SELECT CASE WHEN ref.chance(70) THEN 'NULL' ELSE ref.pick('''\x''', '''\x00''', '''\x01ff''', 'decode(repeat(''ab'', 20), ''hex'')', 'decode(repeat(''ab'', 1000), ''hex'')', 'decode(repeat(''ab'', 1001), ''hex'')') END
$$;
CREATE FUNCTION ref.message_text() RETURNS text LANGUAGE sql AS $$
    SELECT CASE WHEN ref.chance(4) THEN ref.pick('repeat(''m'', 8192)', 'repeat(''m'', 8193)', 'repeat(''m'', 8191) || ''ü''', 'repeat(''☃'', 9000)')
        ELSE ref.pick('NULL', '''''', '''no answer''', '''größer''') END
$$;
CREATE FUNCTION ref.code_text() RETURNS text LANGUAGE sql AS $$
    SELECT CASE WHEN ref.spoil(3) THEN ref.pick('repeat(''c'', 128)', 'repeat(''c'', 129)', 'repeat(''ü'', 65)') ELSE ref.pick('NULL', '''''', '''E1''', '''E2''', '''exhausted''') END
$$;
CREATE FUNCTION ref.reason_text() RETURNS text LANGUAGE sql AS $$
    SELECT CASE WHEN NOT ref.spoil(3) THEN '''looked''' ELSE ref.pick('NULL', '''''', 'E'' \t\n''', 'repeat(''r'', 8192)', 'repeat(''r'', 8193)') END
$$;

-- One to six keys, some of them twice.
CREATE FUNCTION ref.random_keys(first text) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    keys text[] := ARRAY[first];
BEGIN
    FOR i IN 1 .. ref.roll(6) LOOP
        keys := keys || CASE WHEN ref.chance(15) THEN keys[1 + ref.roll(cardinality(keys))]
            WHEN ref.chance(60) THEN 'cold:' || ref.pick('two', 'late', 'ignore', 'nope', 'doubt') || ':' || ref.roll(10000) ELSE ref.random_key() END;
    END LOOP;
    RETURN keys;
END $$;
CREATE FUNCTION ref.array_text(items text[], type text) RETURNS text LANGUAGE sql AS
    $$ SELECT CASE WHEN ref.spoil(0.5) THEN 'NULL' WHEN ref.spoil(0.5) THEN '''{}''' ELSE format('ARRAY[%s]::%s', array_to_string(items, ', '), type) END $$;

-- Some record in a state: the one that was changed last, or a random one.
CREATE FUNCTION ref.record_in(state text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    IF ref.chance(60) THEN
        RETURN (SELECT idempotency_key FROM ref.record WHERE status = state ORDER BY updated_at DESC, idempotency_key LIMIT 1);
    END IF;
    RETURN (SELECT idempotency_key FROM ref.record WHERE status = state AND idempotency_key > ref.pick('', 'cold:', 'cold:n', 'hot:', 'hot:n', 'warm:') || ref.pick('d', 'l', 't') ORDER BY idempotency_key LIMIT 1);
END $$;

CREATE TYPE ref.step AS (role text, keys text[], function text, call text);

-- Keys whose records any call of this function may change: NULL = all.
CREATE FUNCTION ref.random_step() RETURNS ref.step LANGUAGE plpgsql AS $$
DECLARE
    s ref.step;
    key text := ref.random_key();
    k text;
    t text;
    keys text[];
    i integer;
    kind text := ref.pick('retryable', 'retryable', 'permanent', 'unknown');
BEGIN
    IF ref.chance(5) THEN           -- the very same call again
        RETURN current_setting('ref.again')::ref.step;
    END IF;
    PERFORM set_config('ref.spoiled', 'no', false);
    s.function := ref.pick(VARIADIC string_to_array('claim claim claim claim claim claim claim complete complete complete fail fail fail fail renew release release checkpoint status'
        || ' execute execute execute execute once once claim_many claim_many complete_many once_many claim_due claim_due reap retry retry retry_many resolve resolve revoke forget', ' '));
    IF s.function IN ('complete', 'fail', 'renew', 'release', 'checkpoint', 'revoke') AND ref.chance(60) THEN
        key := coalesce(ref.record_in('processing'), key);
    ELSIF (s.function = 'resolve' AND ref.chance(40)) OR (s.function IN ('claim', 'execute', 'status', 'retry', 'forget') AND ref.chance(5)) THEN
        key := coalesce(ref.record_in('unknown'), key);
    ELSIF s.function = 'execute' AND ref.chance(12) THEN
        key := 'cold:codes:' || ref.roll(10000);
    ELSIF s.function = 'retry' AND ref.chance(50) THEN
        key := coalesce(ref.record_in(ref.pick('failed', 'unknown', 'retryable_failed')), key);
    END IF;
    k := ref.key_text(key);
    t := ref.holders_token(key);
    s.keys := ARRAY[key];
    s.role := CASE WHEN s.function IN ('reap', 'retry', 'retry_many', 'resolve', 'revoke', 'forget')
        THEN CASE WHEN ref.chance(94) THEN 'ref_d_operator' ELSE ref.pick('ref_a_client', 'ref_e_nobody', 'postgres') END
        ELSE CASE WHEN ref.chance(5) THEN ref.pick('ref_b_client', 'ref_d_operator', 'ref_e_nobody', 'postgres', 'ref_a_client', 'ref_c_client')
            WHEN ref.chance(90) THEN coalesce((ref.get(key)).owner::text, CASE WHEN key ~ '[8b]$' THEN 'ref_b_client' ELSE 'ref_a_client' END)
            ELSE ref.pick('ref_a_client', 'ref_c_client') END END;
    PERFORM set_config('ref.last', key, false);
    CASE s.function
        WHEN 'claim' THEN
            s.call := format('claim(%s, %s, %s, %s, %s, %s, %s)', k, ref.request(key), ref.operation_text(key), ref.lease_text(),
                CASE WHEN NOT ref.spoil(3) THEN '''0''' ELSE ref.pick('''1 ms''', 'NULL', '''-1 s''', '''1 month''', '''367 days''') END,
                ref.claimers_token(key),
                CASE WHEN NOT ref.spoil(4) THEN 'NULL' ELSE ref.pick('idem_digest(' || replace(ref.request(key), 'NULL', '''{}''') || ')', '''\x''', '''\x01''',
                    'decode(repeat(''ab'', 128), ''hex'')', 'decode(repeat(''ab'', 129), ''hex'')') END);
        WHEN 'complete' THEN
            s.call := format('complete(%s, %s, %s, %s)', k, t, ref.result_text(), ref.body_text());
        WHEN 'fail' THEN
            s.call := format('fail(%s, %s, %s, %s, %s, %s)', k, t,
                CASE WHEN NOT ref.spoil(2) THEN quote_literal(kind) ELSE ref.pick('NULL', '''''', '''Retryable''') END,
                ref.message_text(), ref.code_text(),
                CASE WHEN kind = 'retryable' AND ref.chance(30) THEN quote_literal(ref.pick('0', '2.5 s', '40.5 s', '1 day 0.5 s', '366 days', '3660 days'))
                    WHEN ref.spoil(5) THEN quote_literal(ref.pick('0', '2.5 s', '3660 days 0.5 s', '-1 s', '1 month')) ELSE 'NULL' END);
        WHEN 'renew' THEN
            s.call := format('renew(%s, %s, %s)', k, t, ref.lease_text());
        WHEN 'release' THEN
            s.call := format('release(%s, %s)', k, t);
        WHEN 'checkpoint' THEN
            s.call := format('checkpoint(%s, %s, %s, %s)', k, t,
                CASE WHEN NOT ref.spoil(5) THEN quote_literal(ref.pick('sending', 'sent', 'ü')) ELSE ref.pick('NULL', '''''', 'repeat(''s'', 256)', 'repeat(''s'', 257)') END,
                CASE WHEN ref.chance(0.3) THEN 'to_jsonb(repeat(''p'', 1048577))' ELSE ref.pick('''1''', '''null''', '''{"attempt": 1}''', '''"text"''', '''[[]]''', CASE WHEN ref.spoil(10) THEN 'NULL' ELSE '''2.0''' END) END);
        WHEN 'status' THEN
            s.call := format('status(%s)', k);
        WHEN 'execute' THEN
            s.call := format('execute(%s, %s, %s, %s, %s)', k, ref.request(key),
                CASE WHEN ref.chance(80) THEN '''ref.handler(text,jsonb,integer)''' WHEN NOT ref.spoil(25) THEN quote_literal('ref.handler_' || ref.pick('1', 'void', 'text', 'strict') || '(jsonb)')
                    ELSE ref.pick('NULL', '0', '''ref.handler_set(jsonb)''', '''ref.handler_int(jsonb)''', '''ref.handler_two(text,text)''', '''max(integer)''') END,
                ref.operation_text(key), CASE WHEN NOT ref.spoil(3) THEN '''0''' ELSE ref.pick('''1 ms''', 'NULL', '''-1 s''', '''1 month''') END);
            PERFORM set_config('ref.handler', CASE WHEN ref.chance(45) THEN 'ok'
                WHEN key ~ ':codes:' THEN 'raise ' || ref.pick('22012', '40001', '08006', 'IDR00', 'P0001', '53100') ELSE ref.pick('null', 'json null', 'big', 'not json', 'raise IDR00', 'raise IDR00', 'raise IDP00',
                'raise IDU00', 'raise 08006', 'raise 53100', 'raise 55P03', 'raise 58030', 'raise 22012', 'raise P0001', 'raise P0004', 'raise 40001', 'raise 57014', 'raise XX000', 'raise ID001',
                'raise ID003', 'raise ID009') END, false);
        WHEN 'once' THEN
            s.call := format('once(%s, %s)', k, ref.request(key));
        WHEN 'claim_many' THEN
            keys := ref.random_keys(key);
            s.keys := keys;
            s.call := format('claim_many(%s, %s, %s, %s)',
                CASE WHEN ref.spoil(0.5) THEN '''{{a,b}}''' ELSE ref.array_text(ARRAY(SELECT ref.key_text(x) FROM unnest(keys) x), 'text[]') END,
                CASE WHEN ref.chance(30) THEN 'NULL' WHEN ref.spoil(1) THEN '''{1,2,3,4,5,6,7}''' ELSE ref.array_text(ARRAY(SELECT ref.request(x) FROM unnest(keys) x), 'jsonb[]') END,
                CASE WHEN ref.chance(90) THEN 'NULL' ELSE ref.operation_text(key) END, ref.lease_text());
        WHEN 'complete_many' THEN
            -- held ones, so that it succeeds now and then
            s.keys := ARRAY(SELECT idempotency_key FROM ref.record r WHERE r.status = 'processing' AND r.given AND r.idempotency_key > ref.pick('', 'cold:', 'hot:', 'warm:')
                AND ref.is_owner_for('ref_a_client', r.owner) ORDER BY idempotency_key LIMIT 1 + ref.roll(4)) || CASE WHEN ref.chance(30) THEN ARRAY[key] ELSE '{}' END;
            s.call := format('complete_many(%s, %s, %s)', ref.array_text(ARRAY(SELECT ref.key_text(x) FROM unnest(s.keys) x), 'text[]'),
                ref.array_text(ARRAY(SELECT ref.holders_token(x) FROM unnest(s.keys) x), 'uuid[]'),
                CASE WHEN ref.chance(50) THEN 'NULL' ELSE ref.array_text(ARRAY(SELECT ref.pick('NULL', '''null''', '''1''', '''{"r": 1}''') FROM unnest(s.keys)), 'jsonb[]') END);
        WHEN 'once_many' THEN
            s.keys := ARRAY(SELECT CASE WHEN ref.chance(80) THEN 'once:two:' || ref.roll(300) ELSE x END FROM unnest(ref.random_keys(key)) x);
            s.call := format('once_many(%s)', ref.array_text(ARRAY(SELECT ref.key_text(x) FROM unnest(s.keys) x), 'text[]'));
        WHEN 'claim_due' THEN
            s.keys := NULL;
            s.call := format('claim_due(%s, %s, %s)', CASE WHEN ref.chance(40) THEN 'NULL' ELSE quote_literal(ref.pick('two', 'late', 'doubt', 'ignore', 'full', 'vary', 'nope', '')) END,
                CASE WHEN NOT ref.spoil(3) THEN ref.pick('0', '1', '2', '5', '100') ELSE ref.pick('NULL', '-1', '10000', '10001') END, ref.lease_text());
        WHEN 'reap' THEN
            s.keys := NULL;
            s.call := format('reap(%s)', CASE WHEN NOT ref.spoil(5) THEN ref.pick('0', '1', '2', '5', '1000', '1000') ELSE ref.pick('NULL', '-1', '1000000', '1000001') END);
        WHEN 'retry' THEN
            s.call := format('retry(%s, %s)', k, ref.reason_text());
        WHEN 'retry_many' THEN
            s.keys := NULL;
            s.call := format('retry_many(%s, %s, %s, %s)', CASE WHEN NOT ref.spoil(3) THEN quote_literal(ref.pick('two', 'one', 'late', 'codes', 'small', 'nope', 'default')) ELSE 'NULL' END,
                ref.pick('NULL', '''exhausted''', '''E1''', '''IDP00'''), ref.reason_text(),
                CASE WHEN NOT ref.spoil(3) THEN ref.pick('0', '1', '2', '5', '20') ELSE ref.pick('NULL', '-1', '100000', '100001') END);
        WHEN 'resolve' THEN
            i := ref.roll(100);
            i := CASE WHEN i NOT IN (48, 49, 60, 61) OR ref.spoil(50) THEN i ELSE 47 END;
            s.call := format('resolve(%s, %s, %s, %s, %s, %s, %s)', k, CASE WHEN i < 50 THEN '''succeeded''' WHEN NOT ref.spoil(6) THEN '''failed''' ELSE ref.pick('NULL', '''unknown''') END, ref.reason_text(),
                CASE WHEN i < 48 OR i = 60 THEN ref.result_text() ELSE 'NULL' END, CASE WHEN i < 48 OR i = 61 THEN ref.body_text() ELSE 'NULL' END,
                CASE WHEN i > 62 OR i = 49 THEN ref.code_text() ELSE 'NULL' END, CASE WHEN i > 70 OR i = 48 THEN ref.message_text() ELSE 'NULL' END);
        WHEN 'revoke' THEN
            s.call := format('revoke(%s, %s)', k, ref.reason_text());
        WHEN 'forget' THEN
            s.call := format('forget(%s, %s)', k, ref.reason_text());
    END CASE;
    PERFORM set_config('ref.again', s::text, false);
    RETURN s;
END $$;

CREATE FUNCTION ref.is_owner_for(role text, owner regrole) RETURNS boolean LANGUAGE sql STABLE AS $$ SELECT pg_has_role(role, owner::oid, 'USAGE') $$;

------------------------------------------------------------------------------
-- One side of a call
------------------------------------------------------------------------------

-- Rows of the answer as a jsonb array, or {"sqlstate", "message"}.
CREATE FUNCTION ref.ask(side text, s ref.step) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    answer jsonb;
    state text;
    message text;
    -- jsonb cannot tell SQL NULL from JSON null
    nulls text := CASE WHEN s.function IN ('claim', 'execute', 'claim_many', 'claim_due', 'status')
        THEN ' || jsonb_build_object(''no result'', t.result_json IS NULL)' ELSE '' END
        || CASE WHEN s.function IN ('claim_due', 'status') THEN ' || jsonb_build_object(''no request'', t.request_json IS NULL)' ELSE '' END;
BEGIN
    PERFORM set_config('ref.side', side, false);
    IF side = 'idem_' THEN
        PERFORM set_config('role', s.role, true);
    END IF;
    EXECUTE format('SELECT coalesce(jsonb_agg(to_jsonb(t)%s), ''[]'') FROM %s%s t', nulls, side, s.call) INTO answer;
    PERFORM set_config('role', 'none', true);
    RETURN CASE s.function WHEN 'status' THEN answer #- '{0,slice}' #- '{0,given}' ELSE answer END;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
    GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT;
    RETURN jsonb_build_object('sqlstate', state, 'message', message);
END $$;

------------------------------------------------------------------------------
-- Comparing
------------------------------------------------------------------------------

-- Times that are the same but for the duration of a call.
CREATE FUNCTION ref.near(a timestamptz, b timestamptz) RETURNS boolean LANGUAGE sql STABLE AS
    $$ SELECT coalesce(abs(extract(epoch FROM a - b)) < current_setting('ref.slack')::numeric, a IS NULL AND b IS NULL) $$;

CREATE FUNCTION ref.same_answer(a jsonb, b jsonb, out what text) LANGUAGE plpgsql AS $$
DECLARE
    n integer;
    name text;
    x jsonb;
    y jsonb;
BEGIN
    IF jsonb_typeof(a) = 'object' OR jsonb_typeof(b) = 'object' THEN
        what := CASE WHEN a ->> 'sqlstate' IS DISTINCT FROM b ->> 'sqlstate' THEN 'SQLSTATE' END;
        RETURN;
    END IF;
    IF jsonb_array_length(a) <> jsonb_array_length(b) THEN
        what := 'number of rows';
        RETURN;
    END IF;
    FOR n IN 0 .. jsonb_array_length(a) - 1 LOOP
        x := a -> n;
        y := b -> n;
        CONTINUE WHEN x = y;
        IF jsonb_typeof(x) = 'object' AND jsonb_typeof(y) = 'object' THEN
            FOREACH name IN ARRAY ARRAY['lease_until', 'retry_at', 'updated_at', 'first_claimed_at', 'limits_from'] LOOP
                IF x ? name AND NOT ref.near((x ->> name)::timestamptz, (y ->> name)::timestamptz) THEN
                    what := name;
                    RETURN;
                END IF;
                x := x - name;
                y := y - name;
            END LOOP;
            IF x ? 'retry_after' AND NOT coalesce(abs(extract(epoch FROM (x ->> 'retry_after')::interval - (y ->> 'retry_after')::interval)) < current_setting('ref.slack')::numeric,
                    x -> 'retry_after' = y -> 'retry_after') THEN
                what := 'retry_after';
                RETURN;
            END IF;
            x := x - 'retry_after';
            y := y - 'retry_after';
            IF x <> y THEN
                SELECT string_agg(e.key, ', ') INTO what FROM jsonb_each(x) e WHERE y -> e.key IS DISTINCT FROM e.value;
                what := coalesce(what, 'columns');
                RETURN;
            END IF;
        ELSIF jsonb_typeof(x) = 'string' AND jsonb_typeof(y) = 'string' AND (x #>> '{}') ~ '^\d{4,}-\d\d-\d\dT' THEN
            IF NOT ref.near((x #>> '{}')::timestamptz, (y #>> '{}')::timestamptz) THEN
                what := 'time';
                RETURN;
            END IF;
        ELSE
            what := 'value';
            RETURN;
        END IF;
    END LOOP;
END $$;

-- The first record that is different, of some keys or of all.  Two functions of one text: each with a plan of its own.
DO $do$
DECLARE
    compare text := $$
        SELECT coalesce(e.idempotency_key, r.idempotency_key)
        FROM (SELECT * FROM idem_record %1$s) e FULL JOIN (SELECT * FROM ref.record %1$s) r ON r.idempotency_key = e.idempotency_key
        WHERE e.idempotency_key IS NULL OR r.idempotency_key IS NULL
            OR (e.slice = 0) <> (r.status IN ('processing', 'retryable_failed', 'unknown'))
            OR (e.operation, e.owner, e.request_hash, e.status, e.attempts, e.owner_token, e.result_json, e.result_body, e.error_code COLLATE "C",
                    e.error_message COLLATE "C", e.request_json, e.progress, e.previous, e.past_tokens, e.limits_from_attempt)
                IS DISTINCT FROM
                (r.operation, r.owner, r.request_hash, r.status, r.attempts, r.owner_token, r.result_json, r.result_body, r.error_code COLLATE "C",
                    r.error_message COLLATE "C", r.request_json, r.progress, r.previous, r.past_tokens, r.limits_from_attempt)
            OR NOT (ref.near(e.lease_until, r.lease_until) AND ref.near(e.retry_at, r.retry_at) AND ref.near(e.first_claimed_at, r.first_claimed_at)
                AND ref.near(e.updated_at, r.updated_at) AND ref.near(e.limits_from, r.limits_from))
        LIMIT 1 $$;
    adopt text := $$
        UPDATE ref.record r SET lease_until = e.lease_until, retry_at = e.retry_at, first_claimed_at = e.first_claimed_at, updated_at = e.updated_at, limits_from = e.limits_from
        FROM (SELECT * FROM idem_record %1$s) e
        WHERE e.idempotency_key = r.idempotency_key AND (e.lease_until, e.retry_at, e.first_claimed_at, e.updated_at, e.limits_from)
            IS DISTINCT FROM (r.lease_until, r.retry_at, r.first_claimed_at, r.updated_at, r.limits_from) $$;
    only_keys text := ' AND r.idempotency_key = ANY (keys)';
    of_keys text := 'WHERE idempotency_key = ANY (keys)';
BEGIN
    EXECUTE format('CREATE FUNCTION ref.different_record(keys text[]) RETURNS text LANGUAGE plpgsql AS $f$ BEGIN IF keys IS NULL THEN RETURN (%s); END IF; RETURN (%s); END $f$',
        format(compare, ''), format(compare, of_keys));
    EXECUTE format('CREATE FUNCTION ref.adopt_times(keys text[]) RETURNS void LANGUAGE plpgsql AS $f$ BEGIN IF keys IS NULL THEN %s; ELSE %s; END IF; END $f$',
        format(adopt, ''), format(adopt, of_keys) || only_keys);
END $do$;

-- Audit and work since the last comparison, and what idem_check finds.  Between transactions only.
CREATE FUNCTION ref.different_traces() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    e_last bigint := current_setting('ref.e_last')::bigint;
    r_last bigint := current_setting('ref.r_last')::bigint;
BEGIN
    IF EXISTS (
        SELECT FROM (SELECT row_number() OVER (ORDER BY id) n, * FROM idem_audit WHERE id > e_last) e
            FULL JOIN (SELECT row_number() OVER (ORDER BY id) n, * FROM ref.audit WHERE id > r_last) r USING (n)
        WHERE (e.action, e.idempotency_key, e.operation, e.current_user_name, e.reason, e.old_status, e.new_status, e.old_attempts, e.new_attempts, e.old_token_digest)
            IS DISTINCT FROM (r.action, r.idempotency_key, r.operation, r.current_user_name, r.reason, r.old_status, r.new_status, r.old_attempts, r.new_attempts, r.old_token_digest)
            OR abs(extract(epoch FROM e.at - r.at)) > 5) THEN
        RETURN 'audit';
    ELSIF EXISTS (SELECT FROM ref.work WHERE NOT compared GROUP BY key, attempt, at HAVING count(*) FILTER (WHERE side = 'idem_') <> count(*) FILTER (WHERE side = 'ref.')) THEN
        RETURN 'work';
    -- this one after a step of the clock back too
    ELSIF EXISTS (SELECT FROM idem_check() WHERE violation <> 'closed slice holds a younger record') THEN
        RETURN 'idem_check';
    END IF;
    UPDATE ref.work SET compared = true WHERE NOT compared;
    PERFORM set_config('ref.e_last', (SELECT coalesce(max(id), 0) FROM idem_audit)::text, false),
        set_config('ref.r_last', (SELECT coalesce(max(id), 0) FROM ref.audit)::text, false);
    RETURN NULL;
END $$;

CREATE FUNCTION ref.report(what text, s ref.step, a jsonb, b jsonb, key text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    h ref.history;
    known text[] := coalesce(ARRAY[key], s.keys);
BEGIN
    RAISE NOTICE 'DIFFERENCE in % of % as %', what, s.call, s.role;
    RAISE NOTICE 'after % calls, handler: %, now: %', (SELECT count(*) FROM ref.history), current_setting('ref.handler'), ref.now();
    RAISE NOTICE 'extension answers %', left(a::text, 4000);
    RAISE NOTICE 'reference answers %', left(b::text, 4000);
    FOR h IN SELECT * FROM (SELECT * FROM ref.history WHERE keys && known OR keys IS NULL ORDER BY id DESC LIMIT 60) l ORDER BY id LOOP
        CONTINUE WHEN h.keys IS NULL AND NOT coalesce(h.answer LIKE '%' || key || '%', false);
        RAISE NOTICE '% % %: % -> %', h.at, h.role, CASE WHEN h.undone THEN 'undone' ELSE '' END, h.call, left(h.answer, 600);
    END LOOP;
    RAISE NOTICE 'record of the extension %', (SELECT left(jsonb_agg(to_jsonb(r))::text, 4000) FROM idem_record r WHERE r.idempotency_key = ANY (known));
    RAISE NOTICE 'record of the reference %', (SELECT left(jsonb_agg(to_jsonb(r))::text, 4000) FROM ref.record r WHERE r.idempotency_key = ANY (known));
    RAISE NOTICE 'idem_check: %', (SELECT left(jsonb_agg(c)::text, 2000) FROM idem_check() c);
    RAISE NOTICE 'ring: %', (SELECT jsonb_agg(g) FROM idem_ring g);
    RAISE EXCEPTION 'extension and reference differ in %', what;
END $$;

------------------------------------------------------------------------------
-- Steps
------------------------------------------------------------------------------

-- Sets the clock of the extension to ref.now.
CREATE FUNCTION ref.set_clock() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('idempotency.clock_offset', extract(epoch FROM ref.now() - clock_timestamp())::text, false);
END $$;

CREATE FUNCTION ref.pass_time() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    jump interval := '1 s';
BEGIN
    IF ref.chance(5) THEN
        jump := ref.pick('2 s', '5 s', '5 s', '10 s', '10 s', '30 s', '60 s', '300 s');
    ELSIF ref.chance(0.4) THEN
        jump := '1 hour';
    ELSIF ref.chance(0.3) THEN
        -- back, but never to an instant that was before: what is due at once would be due or not
        jump := (CASE WHEN extract(milliseconds FROM ref.now()) % 1000 < 100 THEN 0.05 ELSE -0.1 END - 20) * interval '1 s';
    ELSIF ref.chance(0.1) THEN
        jump := '3 days';
    END IF;
    PERFORM set_config('ref.now', (ref.now() + jump)::text, false);
END $$;

-- The extension's answer, given within the moment for which time stands.  If that cannot be had, on a
-- busy machine, times may differ by as much more.
CREATE FUNCTION ref.ask_extension(s ref.step, out answer jsonb) LANGUAGE plpgsql AS $$
DECLARE
    begun timestamptz;
    took numeric;
BEGIN
    FOR i IN 1 .. 20 LOOP
        BEGIN
            PERFORM ref.set_clock();
            begun := clock_timestamp();
            answer := ref.ask('idem_', s);
            took := extract(epoch FROM clock_timestamp() - begun);
            IF took > 0.03 AND i < 20 THEN
                RAISE EXCEPTION USING ERRCODE = 'ZZ001';
            END IF;
            PERFORM set_config('ref.slack', greatest(0.06, took + 0.06)::text, false);
            RETURN;
        EXCEPTION WHEN SQLSTATE 'ZZ001' THEN
            NULL;
        END;
    END LOOP;
END $$;

-- One call of both.  Ends in an error if they differ.
CREATE FUNCTION ref.step() RETURNS ref.history LANGUAGE plpgsql AS $$
DECLARE
    s ref.step;
    h ref.history;
    a jsonb;
    b jsonb;
    what text;
    key text;
BEGIN
    PERFORM ref.pass_time();
    IF ref.chance(0.5) THEN
        UPDATE idem_policy SET max_attempts = 1 + ref.roll(6), on_lease_expiry = ref.pick('retry', 'retry', 'unknown'), store_request = ref.chance(50),
            max_elapsed = CASE WHEN ref.chance(30) THEN interval '100.25 s' END WHERE operation = 'vary';
    END IF;
    s := ref.random_step();
    a := ref.ask_extension(s);
    PERFORM set_config('ref.hint', a::text, false), set_config('ref.role', s.role, false);
    b := ref.ask('ref.', s);
    h.at := ref.now();
    h.role := s.role;
    h.keys := s.keys;
    h.call := s.call || CASE s.function WHEN 'execute' THEN ' with ' || current_setting('ref.handler') ELSE '' END;
    h.function := s.function;
    h.outcome := coalesce(a ->> 'sqlstate', a -> 0 ->> 'outcome', a -> 0 ->> 'status', CASE jsonb_typeof(a -> 0) WHEN 'boolean' THEN a ->> 0 WHEN 'null' THEN 'null' WHEN 'string' THEN
        CASE s.function WHEN 'renew' THEN 'time' ELSE a ->> 0 END ELSE 'rows' END, 'no rows');
    h.answer := left(a::text, 1000);
    h.undone := false;
    what := ref.same_answer(a, b);
    IF what IS NOT NULL THEN
        PERFORM ref.report(what, s, a, b, NULL);
    END IF;
    -- a refused call may not have touched anything: its keys tell
    key := ref.different_record(s.keys);
    IF key IS NOT NULL THEN
        PERFORM ref.report('record ' || left(key, 100), s, a, b, key);
    END IF;
    IF jsonb_typeof(a) = 'array' THEN
        PERFORM ref.adopt_times(s.keys);
    END IF;
    RETURN h;
END $$;

CREATE FUNCTION ref.remember(steps ref.history[], was_undone boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ref.history (at, role, keys, call, function, outcome, answer, undone)
        SELECT h.at, h.role, h.keys, h.call, h.function, h.outcome, h.answer, was_undone OR h.undone FROM unnest(steps) h;
END $$;

-- Some calls, kept or undone together.
CREATE FUNCTION ref.steps(n integer, undo boolean) RETURNS ref.history[] LANGUAGE plpgsql AS $$
DECLARE
    done ref.history[] := '{}';
    h ref.history;
    keys text[];
    key text;
BEGIN
    BEGIN
        FOR i IN 1 .. n LOOP
            h := ref.step();
            h.undone := undo;
            done := done || h;
            PERFORM ref.remember(ARRAY[h], false);
        END LOOP;
        IF undo THEN
            RAISE EXCEPTION USING ERRCODE = 'ZZ002';
        END IF;
    EXCEPTION WHEN SQLSTATE 'ZZ002' THEN
        PERFORM ref.remember(done, true);
        SELECT array_agg(k) INTO keys FROM unnest(done) d, unnest(d.keys) k;
        key := ref.different_record(keys);
        IF key IS NOT NULL THEN
            PERFORM ref.report('record after undoing', NULL, NULL, NULL, key);
        END IF;
    END;
    RETURN done;
END $$;

CREATE PROCEDURE ref.run(calls integer) LANGUAGE plpgsql AS $$
DECLARE
    made integer := 0;
    checked integer := 0;
    steps ref.history[];
    key text;
    undo boolean;
BEGIN
    PERFORM set_config('ref.now', coalesce(current_setting('ref.now', true), '2031-03-29 12:00:00+00'), false),
        set_config('ref.handler', 'ok', false), set_config('ref.slack', '0.06', false), set_config('ref.e_last', coalesce(current_setting('ref.e_last', true), '0'), false),
        set_config('ref.r_last', coalesce(current_setting('ref.r_last', true), '0'), false), set_config('ref.hint', '[]', false), set_config('ref.last', 'a', false), set_config('ref.spoiled', 'no', false),
        set_config('ref.again', (ROW('ref_a_client', ARRAY['a'], 'status', 'status(''a'')')::ref.step)::text, false), set_config('ref.role', 'postgres', false),
        set_config('TimeZone', 'Europe/Berlin', false),     -- its clocks change two days later
        set_config('plan_cache_mode', 'force_generic_plan', false), set_config('jit', 'off', false);      -- much faster
    WHILE made < calls LOOP
        COMMIT;
        undo := ref.chance(5);
        steps := '{}';
        FOR i IN 1 .. 10 LOOP
            steps := steps || CASE WHEN ref.chance(15) THEN ref.steps(1 + ref.roll(5), true) ELSE ref.steps(1 + ref.roll(5), false) END;
        END LOOP;
        made := made + cardinality(steps);
        IF undo THEN
            ROLLBACK;
            PERFORM ref.remember(steps, true);
        END IF;
        COMMIT;
        IF undo OR made - checked > 500 OR made >= calls THEN
            checked := made;
            key := coalesce(ref.different_record(NULL), ref.different_traces());
            IF key IS NOT NULL THEN
                PERFORM ref.report('all records or traces: ' || key, NULL, NULL, NULL, key);
            END IF;
        END IF;
    END LOOP;
END $$;
