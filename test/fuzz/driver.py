"""driver.py -- targets of run.sh that need a server:

	python3 driver.py server|calls|smith SECONDS SEED

The environment names the server (PGHOST, PGPORT, PGUSER).  Exit status 1 if
something is wrong; the last line says what was done.
"""
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import psycopg

MODE, SECONDS, SEED = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
failures = []


def fail(text):
    print('FAILED:', text[:2000])
    failures.append(text)
    if len(failures) > 20:
        finish('gave up')


def finish(summary):
    print(summary)
    sys.stdout.flush()
    os._exit(1 if failures else 0)


def connect(dbname, **options):
    return psycopg.connect(dbname=dbname, autocommit=True, **options)


def new_database(name):
    with connect('postgres') as c:
        c.execute(f'DROP DATABASE IF EXISTS {name}')
        c.execute(f'CREATE DATABASE {name}')
    c = connect(name)
    c.execute('CREATE EXTENSION idempotency CASCADE')
    return c


def nothing(c, what, sql):
    """The query must find no row."""
    rows = c.execute(sql + ' LIMIT 3').fetchall()
    if rows:
        fail(f'{what}: {rows!r}')


# ---- server: documents, pointers, keys --------------------------------------

# What the canonical text is made of, read off RFC 8785 and independent of the C code.

def layout(negative, digits, point):
    """ECMA-262, Number::toString, of 0.DIGITS * 10^point."""
    digits = digits.lstrip('0')
    digits = digits.rstrip('0')
    if not digits:
        return '0'
    k, n = len(digits), point
    if k <= n <= 21:
        text = digits + '0' * (n - k)
    elif 0 < n <= 21:
        text = digits[:n] + '.' + digits[n:]
    elif -6 < n <= 0:
        text = '0.' + '0' * -n + digits
    else:
        text = digits[0] + ('.' + digits[1:] if k > 1 else '') + 'e%+d' % (n - 1)
    return ('-' if negative else '') + text


class Number:
    def __init__(self, r):
        n = r.choice([1, 2, 3, 5, 16, 17, 40, r.randint(57, 72), 400])
        self.digits = str(r.randint(1, 9)) + ''.join(r.choice('0000123456789') for _ in range(n - 2)) + (
            str(r.randint(1, 9)) if n > 1 else '')
        self.point = r.choice([0, 1, 2, 5, 20, 21, 22, -5, -6, -7, 300, -300, 131072, -15000, r.randint(-40, 60)])
        self.negative = r.random() < 0.3

    def canonical(self):
        return layout(self.negative, self.digits, self.point)

    def spelling(self, r):
        zeros = '0' * r.choice([0, 0, 1, 3])
        whole = self.digits[0] if r.random() < 0.5 else self.digits
        rest = (self.digits[len(whole):] + zeros)
        return ('-' if self.negative else '') + whole + ('.' + rest if rest else '') + 'e%d' % (self.point - len(whole))


ALPHABETS = ['abc', '01', '/~', '"\\', '\b\t\n\f\r\x01\x1f\x7f', '\u00e4\u0301\u20ac\u2028', '\ud7ff\ue000\ufb33\ufffd\uffff',
             '\U00010000\U0001f600\U0010ffff']


def random_string(r):
    if r.random() < 0.02:
        return r.choice('ab\u20ac') * r.choice([126, 127, 128, 2000, 9000])
    return ''.join(r.choice(r.choice(ALPHABETS)) for _ in range(r.choice([0, 1, 1, 2, 3, 6])))


def random_value(r, depth=0):
    kind = r.randint(0, 9)
    if depth > 5:
        kind = r.randint(0, 5)
    if kind < 3:
        return r.choice([None, True, False]) if kind == 0 else random_string(r)
    if kind < 6:
        return Number(r) if r.random() < 0.8 else r.randint(-10**20, 10**20)
    n = r.choice([0, 1, 1, 3]) if depth > 1 or r.random() < 0.9 else r.choice([31, 32, 33, 64, 65, 130])
    if depth == 0:
        n = r.choice([0, 2, 8, 20, 31, 32, 33, 64, 130])
    if kind < 8:
        return [random_value(r, depth + 1) for _ in range(n)]
    return {random_string(r): random_value(r, depth + 1) for _ in range(n)}


def spell_string(r, s):
    text = json.dumps(s, ensure_ascii=r.random() < 0.5)
    return text.replace('/', '\\/') if r.random() < 0.2 else text


def spell(r, v):
    """JSON text of a value, in one of many ways."""
    space = lambda: r.choice(['', '', ' ', '\n\t', '\r'])
    if isinstance(v, Number):
        return v.spelling(r)
    if isinstance(v, str):
        return spell_string(r, v)
    if isinstance(v, list):
        return '[' + space() + (space() + ',' + space()).join(spell(r, e) for e in v) + space() + ']'
    if isinstance(v, dict):
        members = list(v.items())
        r.shuffle(members)
        parts = []
        for name, e in members:
            if r.random() < 0.03:
                parts.append(spell_string(r, name) + ':0')      # replaced by what follows
            parts.append(spell_string(r, name) + space() + ':' + space() + spell(r, e))
        return '{' + space() + (space() + ',' + space()).join(parts) + space() + '}'
    return json.dumps(v)


def escape(name):
    return str(name).replace('~', '~0').replace('/', '~1')


SHORT = {'"': '\\"', '\\': '\\\\', '\b': '\\b', '\t': '\\t', '\n': '\\n', '\f': '\\f', '\r': '\\r'}


def canonical_string(s):
    return '"' + ''.join(SHORT.get(c) or ('\\u%04x' % ord(c) if c < ' ' else c) for c in s) + '"'


def canonical(v, ignore=frozenset(), at=''):
    if isinstance(v, Number):
        return v.canonical()
    if isinstance(v, str):
        return canonical_string(v)
    if isinstance(v, bool) or v is None:
        return json.dumps(v)
    if isinstance(v, int):
        return layout(v < 0, str(abs(v)), len(str(abs(v))))
    if isinstance(v, list):
        steps = [(f'{at}/{i}', e, '') for i, e in enumerate(v)]
    else:
        names = sorted(v, key=lambda s: s.encode('utf-16-be'))
        steps = [(f'{at}/{escape(n)}', v[n], canonical_string(n) + ':') for n in names]
    body = ','.join(name + canonical(e, ignore, p) for p, e, name in steps if p not in ignore)
    return '[' + body + ']' if isinstance(v, list) else '{' + body + '}'


def places(v, at='', path=()):
    """All places of a document: JSON Pointer, and path for the operator #-."""
    if isinstance(v, (list, dict)):
        for k, e in enumerate(v) if isinstance(v, list) else v.items():
            here, steps = f'{at}/{escape(k)}', path + (str(k),)
            yield here, list(steps)
            yield from places(e, here, steps)


def changed(r, v):
    """The value with one thing in it changed."""
    if isinstance(v, list):
        if v and r.random() < 0.8:
            i = r.randrange(len(v))
            return v[:i] + [changed(r, v[i])] + v[i + 1:]
        return v + [0]
    if isinstance(v, dict):
        if v and r.random() < 0.8:
            name = r.choice(list(v))
            return {**v, name: changed(r, v[name])}
        name = 'new'
        while name in v:
            name += '!'
        return {**v, name: 0}
    if isinstance(v, Number):
        other = Number(random.Random(0))
        other.negative, other.digits, other.point = v.negative, v.digits[:-1] + ('1' if v.digits[-1] != '1' else '2'), v.point
        return other
    if isinstance(v, str):
        return v + '\u00e9'
    if isinstance(v, bool):
        return None
    return True if v is None else v + 1


def own_documents(c, r, count):
    rows = []
    for _ in range(count):
        v = random_value(r)
        ignore = []
        below = list(places(v))
        one, steps = r.choice(below) if below else ('/x', ['x'])
        if below:
            ignore = [p for p, _ in r.sample(below, min(len(below), r.choice([0, 1, 3, 40])))]
        ignore += r.sample(['/', '/-', '/00', '/a', '/0/0', '//'], r.choice([0, 1, 3]))
        hostile = ignore + r.sample(ignore, len(ignore) // 2)
        r.shuffle(hostile)
        rows.append((spell(r, v), spell(r, v), spell(r, changed(r, v)), ignore, hostile, one, steps,
                     canonical(v), canonical(v, frozenset(ignore)), isinstance(v, (list, dict))))
    c.execute('TRUNCATE own')
    with c.cursor() as cur:
        with cur.copy('COPY own FROM STDIN') as copy:
            for row in rows:
                copy.write_row(row)
    nothing(c, 'canonical text', 'SELECT a, expected FROM own WHERE idem_canonical(a) IS DISTINCT FROM expected')
    nothing(c, 'spelling and order of members', 'SELECT a, b FROM own WHERE idem_digest(a) IS DISTINCT FROM idem_digest(b)')
    nothing(c, 'another document has another digest', 'SELECT a, other FROM own WHERE idem_digest(a) = idem_digest(other)')
    nothing(c, 'what is ignored', 'SELECT a, ignore, without FROM own WHERE idem_canonical(a, ignore) IS DISTINCT FROM without')
    nothing(c, 'order of pointers', 'SELECT a, ignore FROM own WHERE idem_digest(b, hostile) IS DISTINCT FROM idem_digest(a, ignore)')
    nothing(c, 'ignored and removed are the same',
            'SELECT a, one FROM own WHERE container AND idem_canonical(a, ARRAY[one]) IS DISTINCT FROM idem_canonical(a #- steps)')
    nothing(c, 'twice is once', 'SELECT a FROM own WHERE idem_canonical(idem_canonical(a)::jsonb) IS DISTINCT FROM idem_canonical(a)')
    nothing(c, 'same value', 'SELECT a FROM own WHERE idem_canonical(a)::jsonb IS DISTINCT FROM a')
    nothing(c, 'digest of the text', """SELECT a FROM own WHERE idem_digest(a, ignore) IS DISTINCT FROM
        '\\x01'::bytea || sha256(convert_to(idem_canonical(a, ignore), 'UTF8'))""")
    nothing(c, 'keyed digest of the text', """SELECT a FROM own WHERE idem_keyed_digest(a, 's', ignore) IS DISTINCT FROM
        '\\x81'::bytea || hmac(convert_to(idem_canonical(a, ignore), 'UTF8'), 's', 'sha256')""")
    return count


def node_documents(c, r, count):
    """From test/digest/generate.js: expected texts and digests made by JavaScript."""
    out = subprocess.run(['node', ROOT + '/test/digest/generate.js', 'documents', str(r.randint(1, 2**31 - 1)), str(count)],
                         check=True, stdout=subprocess.PIPE).stdout
    c.execute('TRUNCATE documents')
    with c.cursor() as cur:
        with cur.copy('COPY documents FROM STDIN') as copy:
            copy.write(out)
    ignore = 'ARRAY(SELECT jsonb_array_elements_text(pointers))'
    nothing(c, 'canonical text of JavaScript',
            f'SELECT doc, pointers, canonical FROM documents WHERE idem_canonical(doc, {ignore}) IS DISTINCT FROM canonical')
    nothing(c, 'digest of JavaScript',
            f"SELECT doc, pointers FROM documents WHERE encode(idem_digest(doc, {ignore}), 'hex') IS DISTINCT FROM digest")
    return count


def random_keys(c, r, count):
    part = lambda: ''.join(r.choice(['%', ':', '%25', '%3A', '%3a', '2', '5', '3', 'A', 'a', '\u00e9']) for _ in range(r.randint(1, 4)))
    rows = [[part() for _ in range(3)] + [part() + r.choice(['', ':']) + part() + ':' + part()] for _ in range(count)]
    rows += [[part() * r.choice([1, 300, 340, 341]) for _ in range(3)] + [part() * 256] for _ in range(count // 20)]
    c.execute('TRUNCATE keys')
    with c.cursor() as cur:
        with cur.copy('COPY keys FROM STDIN') as copy:
            for row in rows:
                copy.write_row(row)
    c.execute("""DELETE FROM keys WHERE octet_length(replace(replace(t || ':' || o || ':' || b, '%', '%25'), ':', '%3A')) > 1000
        OR octet_length(opaque) > 1024""")
    nothing(c, 'parts of a key', """SELECT t, o, b FROM keys, idem_key(t, o, b) k, idem_key_parts(k) p
        WHERE (p.tenant, p.operation, p.business_id) IS DISTINCT FROM (t, o, b)""")
    nothing(c, 'key of the parts', """SELECT opaque FROM keys, idem_key_parts(opaque) p
        WHERE p.tenant IS NOT NULL AND idem_key(p.tenant, p.operation, p.business_id) IS DISTINCT FROM opaque""")
    nothing(c, 'unlike parts, unlike keys', """SELECT 1 FROM keys
        HAVING count(DISTINCT (t, o, b)) <> count(DISTINCT idem_key(t, o, b))""")
    nothing(c, 'downstream keys', """SELECT t, o FROM keys WHERE octet_length(o) <= 256 AND idem_downstream_key(t, o) IS DISTINCT FROM (
        SELECT encode(set_byte(set_byte(h, 6, get_byte(h, 6) & 15 | 128), 8, get_byte(h, 8) & 63 | 128), 'hex')::uuid
        FROM substr(sha256(int4send(octet_length(t)) || convert_to(t, 'UTF8') || int4send(octet_length(o)) || convert_to(o, 'UTF8')), 1, 16) h)""")
    return len(rows)


def nesting(c, r):
    """Deep documents have a text or raise 54001; the session goes on."""
    depth = r.choice([100, 1000, 3000, 6000])
    opening, closing = r.choice([('[', ']'), ('{"a":', '}')])
    text = opening * depth + '1' + closing * depth
    try:
        rows = c.execute("SELECT idem_canonical(%s::text::jsonb)", (text,)).fetchall()
        if rows != [(text,)]:
            fail(f'nesting of {depth}')
    except psycopg.Error as e:
        if e.sqlstate != '54001':
            fail(f'nesting of {depth}: {e.sqlstate} {e}')


def server():
    r = random.Random(SEED)
    c = new_database('fuzz')
    c.execute("""CREATE UNLOGGED TABLE documents (doc jsonb, pointers jsonb, canonical text, digest text, keyed text);
        CREATE UNLOGGED TABLE own (a jsonb, b jsonb, other jsonb, ignore text[], hostile text[], one text, steps text[],
            expected text, without text, container boolean);
        CREATE UNLOGGED TABLE keys (t text, o text, b text, opaque text)""")
    n = dict.fromkeys(('node', 'own', 'keys'), 0)
    rounds = 0
    end = time.monotonic() + SECONDS
    while rounds == 0 or time.monotonic() < end:
        n['node'] += node_documents(c, r, 2000)
        n['own'] += own_documents(c, r, 150)
        n['keys'] += random_keys(c, r, 1000)
        nesting(c, r)
        rounds += 1
    finish(f"{n['node']} documents from JavaScript, {n['own']} own, {n['keys']} keys, {int(sum(n.values()) / SECONDS)} per second")



# ---- calls: anything, from several sessions, kept or rolled back ---------------

# README "Errors" and docs/, and what sessions do to each other.
DOCUMENTED = {'ID001', 'ID002', 'ID003', '22004', '22023', '54000', '54001', '42501', '25006', '25000', '40001', '0A000',
              '42883', '42P13', '42704', '55000', '40P01', '55P03', '57014', '25P02'}

FUNCTIONS = """SELECT p.proname, p.proargnames[1:p.pronargs], ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) t), p.proretset
    FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
    JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND e.oid = d.refobjid AND e.extname = 'idempotency'
    WHERE p.prorettype <> 'trigger'::regtype AND p.prokind = 'f' ORDER BY 1"""

KEYS = [f't:op{i % 3}:{i}' for i in range(9)] + ['opaque', 'x' * 1024, '%:']
POOL = {
    'text': KEYS + ['', ' ', 'because', 'retryable', 'permanent', 'unknown', 'succeeded', 'failed', 'op0', 'op1', 'default', 'none',
                    'full', 'client', '\u00e9' * 4097, 'x' * 1025],
    'jsonb': ['null', '{}', '{"a": 1}', '{"b": [1, 2.50, "x"]}', '[]', '"s"', '1e1000', '[' * 200 + ']' * 200],
    'bytea': [b'', b'\x00', b'\xff' * 128, b'\x01' + b'x' * 32, b'x' * 129],
    'interval': ['0', '1 ms', '10 s', '1 day', '-1 s', '1 month', '400 days', '178000000 years'],
    'integer': [0, 1, 2, 10, -1, 2147483647, -2147483648],
    'double precision': [1.0, 2.0, 0.0, 1e308, float('nan'), float('inf')],
    'regprocedure': ['ok(jsonb)', 'ok3(text,jsonb,integer)', 'fails(jsonb)', 'nested(jsonb)', 'sum(integer)', '0', 'jsonb_array_elements(jsonb)'],
    'regrole': ['pg_monitor', 'idem_fuzz_client', '0'],
}
BY_NAME = {
    'key': KEYS, 'keys': KEYS, 'operation': [None, None, 'op0', 'op1', 'other'], 'wait': [None, '0', '1 ms', '20 ms'],
    'lease': [None, '1 ms', '10 s', '1 day'], 'kind': ['retryable', 'permanent', 'unknown'], 'reason': ['because'],
    'outcome': ['succeeded', 'failed'], 'step': ['s', 't'], 'max_records': [1, 5, 100], 'digest': [None, None, b'\x01' + b'x' * 32],
    'request': ['{"a": 1}', '{"a": 1}', None, '{"a": 2}'], 'requests': ['{"a": 1}', None], 'level': ['client', 'monitor', 'operator'],
    'handler': ['ok(jsonb)', 'ok3(text,jsonb,integer)', 'fails(jsonb)', 'nested(jsonb)'],
    'error_code': [None, None, None, 'E'], 'error_message': [None, None, None, 'm'], 'retry_after': [None, '0', '1 ms'],
}


def value_for(r, name, of_type, tokens, size):
    """A value that makes sense most of the time."""
    element = of_type.removesuffix('[]')
    if element != of_type:
        n = size if r.random() < 0.9 else r.choice([0, 1, 2, 3, 5])
        return [value_for(r, name, element, tokens, size) for _ in range(n)] if r.random() < 0.97 else None
    if r.random() < 0.04:
        return None
    if element == 'uuid':
        return r.choice(list(tokens) or [None]) if r.random() < 0.9 else '00000000-0000-4000-8000-%012d' % r.randint(0, 3)
    if name in BY_NAME and r.random() < 0.9:
        return r.choice(BY_NAME[name])
    if element not in POOL:
        fail(f'no values for type {element}')
        return None
    return r.choice(POOL[element])


def worker(number, end, counts, functions, role):
    r = random.Random(SEED * 1000 + number)
    tokens = {}         # token: key, of the last claims
    c = connect('fuzz')
    c.execute("SET statement_timeout = '5s'; SET lock_timeout = '300ms'; SET deadlock_timeout = '50ms'")
    if role:
        c.execute(f'SET ROLE {role}')

    def run(sql, args=None):
        try:
            cur = c.execute(sql, args)
            return '00000', cur.fetchall() if cur.description else []
        except psycopg.Error as e:
            return e.sqlstate or '08006', str(e)

    while time.monotonic() < end and not failures:
        block = r.random() < 0.5
        if block:
            run('BEGIN ISOLATION LEVEL ' + r.choice(['READ COMMITTED', 'READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE'])
                + r.choice(['', '', '', '', ' READ ONLY']))
        for _ in range(r.randint(1, 6) if block else 1):
            name, arguments, types, _ = r.choice(functions)
            if name == 'idem_grant' and r.random() < 0.9:
                continue
            size = r.choice([0, 1, 1, 2, 3, 5])
            values = [value_for(r, a, t, tokens, size) for a, t in zip(arguments, types)]
            # most of the time the key that the token is of
            if arguments[1:2] == ['token'] and values[1] in tokens and r.random() < 0.9:
                values[0] = tokens[values[1]]
            if arguments[1:2] == ['tokens'] and values[1] and r.random() < 0.9:
                values[0] = [tokens.get(t, 'k') for t in values[1]]
            call = f"SELECT * FROM {name}({', '.join('%s::' + t for t in types)})"
            if block:
                run('SAVEPOINT s')
            state, rows = run(call, values)
            counts[name, state] = counts.get((name, state), 0) + 1
            if state != '00000':
                # two GRANTs at once on one object: the server's own message
                known = name == 'idem_grant' and state == 'XX000' and 'tuple concurrently updated' in rows
                if state not in DOCUMENTED and not known:
                    fail(f'{state} from {call} {values!r}: {rows}')
                if state == '08006':
                    return
                if block:
                    run('ROLLBACK TO s' if r.random() < 0.95 else 'ROLLBACK')
            else:
                for row in rows:
                    for v in row:
                        if getattr(v, 'hex', None) and hasattr(v, 'version') and arguments and arguments[0] == 'key':
                            tokens[str(v)] = values[0]
                while len(tokens) > 20:
                    del tokens[next(iter(tokens))]
                if block and r.random() < 0.1:
                    run('ROLLBACK TO s')
            if block and r.random() < 0.02:
                break
        if block:
            if r.random() < 0.03:
                gid = f'g{number}'
                if run(f"PREPARE TRANSACTION '{gid}'")[0] == '00000':
                    run(f"{r.choice(['COMMIT', 'ROLLBACK'])} PREPARED '{gid}'")
            run(r.choice(['COMMIT', 'COMMIT', 'COMMIT', 'ROLLBACK']))
    run('ROLLBACK')
    # predicate locks of a serializable transaction outlive it
    locks = run("SELECT locktype, mode, classid, objid, objsubid FROM pg_locks"
                " WHERE pid = pg_backend_pid() AND locktype NOT IN ('relation', 'virtualxid')"
                " AND mode <> 'SIReadLock'")[1]
    if locks:
        fail(f'locks left: {locks!r}')
    c.close()


SETUP = """
    DO $$ BEGIN CREATE ROLE idem_fuzz_client LOGIN; EXCEPTION WHEN duplicate_object THEN END $$;
    CREATE FUNCTION ok(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
    CREATE FUNCTION ok3(text, jsonb, integer) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
    CREATE FUNCTION fails(jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION 'no' USING ERRCODE = (ARRAY['IDR00', 'IDP00', 'IDU00', '08000', '22012'])[1 + random() * 4]; END $$;
    CREATE FUNCTION nested(jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN
        RETURN (SELECT to_jsonb(outcome) FROM idem_execute('t:op1:' || (random() * 8)::int, $1, 'ok(jsonb)')); END $$;
    INSERT INTO idem_policy (operation, lease, max_attempts, on_lease_expiry, store_request, backoff_base) VALUES
        ('op0', '10 ms', 3, 'retry', true, '1 ms'), ('op1', '1 s', 100, 'unknown', true, '0'),
        ('op2', '1 min', 5, 'retry', false, '1 s');
    UPDATE idem_policy SET retention = '2 s' WHERE operation = 'default';
"""


def calls():
    c = new_database('fuzz')
    c.execute(SETUP)
    c.execute("SELECT idem_grant('idem_fuzz_client', 'client')")
    functions = c.execute(FUNCTIONS).fetchall()
    postmaster = c.execute('SELECT pg_postmaster_start_time()').fetchone()
    counts = {}
    end = time.monotonic() + SECONDS
    threads = [threading.Thread(target=worker, args=(i, end, counts, functions, 'idem_fuzz_client' if i == 3 else None)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    try:
        c = connect('fuzz')
        nothing(c, 'idem_check()', 'SELECT * FROM idem_check()')
        if c.execute('SELECT pg_postmaster_start_time()').fetchone() != postmaster:
            fail('the server has been restarted')
    except psycopg.Error as e:
        fail(f'after all: {e}')
    total = sum(counts.values())
    by_state = {}
    for (name, state), n in counts.items():
        by_state[state] = by_state.get(state, 0) + n
    for name, *_ in functions:
        if total > 20000 and not any(f == name and s == '00000' for f, s in counts):
            fail(f'{name} never succeeded')
    print('   ', ', '.join(f'{s} {n}' for s, n in sorted(by_state.items())))
    finish(f'{total} calls of {len(functions)} functions, {int(total / SECONDS)} per second')


# ---- smith: sqlsmith over a catalog that shows it little but our functions ------

SMITH = """
    CREATE SCHEMA smith;
    -- sqlsmith asks for pg_proc without a schema: with pg_catalog last in its search_path it
    -- sees this one, our functions and a few that combine them; it queries no view of this schema
    CREATE VIEW information_schema.pg_proc AS SELECT p.* FROM pg_catalog.pg_proc p
        WHERE p.oid IN (SELECT d.objid FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
                WHERE d.classid = 'pg_catalog.pg_proc'::regclass AND d.deptype = 'e' AND e.extname = 'idempotency')
            OR (p.pronamespace = 'pg_catalog'::regnamespace AND p.proname IN
                ('count', 'max', 'jsonb_agg', 'to_jsonb', 'array_agg', 'md5', 'upper', 'gen_random_uuid', 'random', 'now',
                 'row_number', 'lag', 'generate_series', 'decode', 'make_interval', 'jsonb_build_object', 'int4pl', 'timestamptz_mi'));
    -- no operators of types that our functions do not take: most queries would fail on them
    SET allow_system_table_mods = on;
    UPDATE pg_catalog.pg_operator SET oprresult = 0 WHERE ARRAY[oprleft, oprright] && ARRAY(SELECT oid FROM pg_type WHERE typname IN
        ('anyrange', 'anymultirange', 'anyenum', 'point', 'lseg', 'path', 'box', 'polygon', 'line', 'circle', 'inet', 'macaddr',
         'macaddr8', 'money', 'bit', 'varbit', 'tsvector', 'tsquery', 'pg_lsn', 'xid', 'xid8', 'cid', 'tid', 'aclitem', 'pg_snapshot',
         'txid_snapshot', 'bpchar', 'time', 'timetz', 'date', 'record', 'anycompatiblearray'));
    RESET allow_system_table_mods;
    CREATE TABLE smith.material (key text, request jsonb, operation text, token uuid, span interval, digest bytea, number integer,
        factor double precision, handler regprocedure, role regrole, keys text[], tokens uuid[], requests jsonb[]);
    INSERT INTO smith.material SELECT 't:op' || g % 3 || ':' || g, jsonb_build_object('a', g % 3),
        (ARRAY['op0', 'op1', 'default', 'succeeded', 'failed', 'retryable', 'unknown', 'client', 'full', ''])[1 + g % 10],
        ('00000000-0000-4000-8000-' || lpad((g % 20)::text, 12, '0'))::uuid,
        (ARRAY['0', '1 s', '1 ms', '1 day', '-1 s', '1 month'])[1 + g % 6]::interval,
        (ARRAY['', 'x', 'yy'])[1 + g % 3]::bytea, g - 3, g,
        (ARRAY['ok(jsonb)', 'ok3(text,jsonb,integer)', 'fails(jsonb)'])[1 + g % 3]::regprocedure, 'idem_fuzz_client'::regrole,
        ARRAY['t:op1:' || g, 'k' || g], ARRAY[gen_random_uuid()], ARRAY['{}'::jsonb, NULL]
        FROM generate_series(1, 40) g;
    INSERT INTO smith.material (key) VALUES (NULL), (''), (repeat('x', 1025));
    SELECT idem_claim(key, request, token => token, lease => '1 day') FROM (SELECT DISTINCT ON (key) key, request, token
        FROM smith.material WHERE number BETWEEN 0 AND 17) m;
    SELECT idem_complete(key, token, request) FROM smith.material WHERE number IN (0, 1, 2);
    SELECT idem_fail(key, token, (ARRAY['retryable', 'permanent', 'unknown'])[1 + number % 3]) FROM smith.material WHERE number BETWEEN 3 AND 8;
    GRANT SELECT ON information_schema.pg_proc TO idem_fuzz_client;
    GRANT USAGE ON SCHEMA smith TO idem_fuzz_client;
    GRANT ALL ON ALL TABLES IN SCHEMA smith TO idem_fuzz_client;
"""

# Errors of the server itself that random queries bring about.
KNOWN = re.compile('could not find|unrecognized node type|cache lookup failed for')


def smith():
    log = os.path.join(os.environ['PGHOST'], 'server.log')
    start = os.path.getsize(log)
    c = new_database('smith')
    c.execute(SETUP)
    c.execute("SELECT idem_grant('idem_fuzz_client', 'client')")
    c.execute(SMITH)
    postmaster = c.execute('SELECT pg_postmaster_start_time()').fetchone()
    queries = 0
    for user in (os.environ['PGUSER'], 'idem_fuzz_client'):
        c.execute(f"ALTER ROLE {user} IN DATABASE smith SET search_path = information_schema, smith, public, pg_catalog")
        c.execute(f"ALTER ROLE {user} IN DATABASE smith SET statement_timeout = '2s'")
        c.execute(f"ALTER ROLE {user} IN DATABASE smith SET lock_timeout = '1s'")
        target = f"host={os.environ['PGHOST']} port={os.environ['PGPORT']} dbname=smith user={user}"
        p = subprocess.Popen(['sqlsmith', '--target=' + target, '--exclude-catalog', '--verbose', f'--seed={SEED % 2**31}'],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        timer = threading.Timer(SECONDS, p.send_signal, [signal.SIGINT])
        timer.start()
        out = p.communicate()[0].decode(errors='replace')
        timer.cancel()
        n = [int(m) for m in re.findall(r'queries: (\d+)', out)]
        queries += max(n, default=0)
        if not n:
            fail(f'sqlsmith as {user} did not run: {out[-500:]}')
    c = connect('smith')
    if c.execute('SELECT pg_postmaster_start_time()').fetchone() != postmaster:
        fail('the server has been restarted')
    nothing(c, 'idem_check()', 'SELECT * FROM idem_check()')
    returned = dict(c.execute("SELECT funcname, calls FROM pg_stat_user_functions WHERE funcname LIKE 'idem%'").fetchall())

    # errors, by where they come from: log_error_verbosity is verbose
    ours = {f for f in os.listdir(ROOT + '/src') if f.endswith('.c')}
    errors = {}
    with open(log, encoding='utf-8', errors='replace') as f:
        f.seek(start)
        text = f.read()
    for m in re.finditer(r'^(\w{5}) \S* ?\d+ ERROR:  (\w{5}): (.*)\n(?:(?!\w{5} \S* ?\d+ ERROR).*\n)*?.*LOCATION:  (\w+), ([\w.]+):\d+', text, re.M):
        where = m[5] if m[5] in ours else 'server'
        if where != 'server':
            errors[m[2], m[3], where] = errors.get((m[2], m[3], where), 0) + 1
        if m[2].startswith('XX') and (where != 'server' or not KNOWN.search(m[3])):
            fail(f'{m[2]}: {m[3]} at {m[4]}, {m[5]}')
        if where != 'server' and m[2] not in DOCUMENTED:
            fail(f'undocumented {m[2]}: {m[3]}')
    for (state, message, where), n in sorted(errors.items(), key=lambda e: -e[1]):
        print(f'    {n} x {state} {message} ({where})')
    total = sum(returned.values()) + sum(errors.values())
    print('    returned: ' + ', '.join(f'{k} {v}' for k, v in sorted(returned.items())))
    if total < 20:
        fail('sqlsmith hardly ever called the extension')
    finish(f'{queries} queries, {sum(returned.values())} calls returned, {sum(errors.values())} raised, {len(errors)} messages')


if MODE == 'server':
    server()
elif MODE == 'calls':
    calls()
elif MODE == 'smith':
    smith()
finish('no such target')
