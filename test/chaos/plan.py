"""What client and checker of the chaos run both know: policies, keys, requests."""

RETENTION = 5.0

# operation: lease, max_attempts, backoff_base, backoff_cap (seconds), on_lease_expiry
POLICIES = {
    'retry': dict(lease=0.2, max=1000, base=0.005, cap=0.05, expiry='retry'),
    'few': dict(lease=0.15, max=2, base=0.0, cap=0.01, expiry='retry'),
    'doubt': dict(lease=0.15, max=1000, base=0.005, cap=0.05, expiry='unknown'),
    'long': dict(lease=30.0, max=1000, base=0.1, cap=0.3, expiry='retry'),
    'default': dict(lease=0.3, max=1000, base=0.005, cap=0.05, expiry='retry'),
}

# How the handler of idem_execute ends, by mode of the request.
MODES = {
    'ok': 'ok', 'slow': 'ok',
    'IDR00': 'retryable', '08006': 'retryable', '53200': 'retryable', 'CR001': 'retryable',
    'IDP00': 'permanent', '22012': 'permanent', 'CP001': 'permanent',
    'IDU00': 'unknown', 'CU001': 'unknown',
    '40001': 'pass', '57000': 'pass',
}


def policy_of(key):
    """Keys are c:OPERATION+round:NAME, or opaque: o-round-NAME."""
    if key.startswith('c:'):
        return POLICIES[key.split(':')[1].rstrip('0123456789')]
    return POLICIES['default']


def round_of(key):
    if key.startswith('c:'):
        operation = key.split(':')[1]
        return int(operation[len(operation.rstrip('0123456789')):])
    return int(key.split('-')[1])


def has_request(key):
    """Keys of idem_once_many are claimed without a request."""
    return not key.split(':')[-1].startswith('n')


SETUP = """
CREATE EXTENSION idempotency CASCADE;
CREATE TABLE effect (key text NOT NULL, x text NOT NULL, token text);
CREATE TABLE marker (x text NOT NULL, xid xid8 NOT NULL DEFAULT pg_current_xact_id());
UPDATE idem_policy SET retention = '%(retention)s s', lease = '%(lease)s s', max_attempts = %(max)s,
    backoff_base = '%(base)s s', backoff_cap = '%(cap)s s', digest_ignore = '{/mode,/x}',
    retryable_codes = '{CR001}', permanent_codes = '{CP001}', unknown_codes = '{CU001}' WHERE operation = 'default';
CREATE FUNCTION handle(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO effect (key, x) VALUES (key, request->>'x');
    IF request->>'mode' = 'slow' THEN PERFORM pg_sleep(random() * 0.1); END IF;
    IF request->>'mode' NOT IN ('ok', 'slow') THEN
        RAISE EXCEPTION '%%', 'x' || (request->>'x') || 'x' USING ERRCODE = request->>'mode';
    END IF;
    RETURN jsonb_build_object('x', request->>'x');
END $$;
""" % dict(POLICIES['default'], retention=RETENTION)


def round_setup(number):
    """Operations of a round have names of their own, so that rounds do not meet."""
    rows = []
    for name, p in POLICIES.items():
        if name != 'default':
            rows.append("('%s%d', '%s s', %d, '%s s', '%s s', '%s', %s, %s, '{/mode,/x}', '{CR001}', '{CP001}', '{CU001}')" % (
                name, number, p['lease'], p['max'], p['base'], p['cap'], p['expiry'],
                name != 'few', name in ('few', 'doubt')))
    return ("INSERT INTO idem_policy (operation, lease, max_attempts, backoff_base, backoff_cap, on_lease_expiry,"
            " store_request, notify, digest_ignore, retryable_codes, permanent_codes, unknown_codes) VALUES " + ', '.join(rows))
