"""A client of the chaos run: random operations on the extension, all of them logged.

Log, one JSON object per line:
    c client    x transaction, null = the call is one by itself    i isolation (RC, RR, SR)
    t0, t1      sent, answered         op  what was called           k  key, or keys of a batch
    a           arguments              r   answer: rows of texts     e  SQLSTATE, or "lost"
    back        after "lost": when the session was over for certain
Transactions also log op begin, savepoint, undo (to the savepoint), commit, rollback.
"""

import json
import os
import random
import time
import uuid

import psycopg
from psycopg import pq

import plan

ISOLATION = {'RC': 'READ COMMITTED', 'RR': 'REPEATABLE READ', 'SR': 'SERIALIZABLE'}
CLAIM = ("outcome, owner_token, attempts, extract(epoch FROM lease_until), extract(epoch FROM retry_after), result_json->>'x',"
         " encode(result_body, 'escape'), error_code, error_message, previous, progress::text")
STATUS = ("status, attempts, owner_token, extract(epoch FROM lease_until), extract(epoch FROM retry_at), result_json->>'x',"
          " encode(result_body, 'escape'), error_code, error_message, previous, progress::text")
LOST = ('57P01', '57P02', '57P03', 'lost')


def text(value, kind=''):
    return 'NULL' if value is None else "'%s'%s" % (value, kind)


def connect(name):
    """A libpq connection; retries for a minute, because the server may be restarting."""
    until = time.time() + 60
    while True:
        conn = pq.PGconn.connect(('host=%s port=%s dbname=chaos user=postgres application_name=%s connect_timeout=20' % (
            os.environ['PGHOST'], os.environ['PGPORT'], name)).encode())
        if conn.status == pq.ConnStatus.OK:
            return conn
        conn.finish()
        if time.time() > until:
            raise SystemExit('cannot connect: %s' % name)
        time.sleep(0.02)


def run(conn, sql):
    """Rows and SQLSTATE of a statement."""
    try:
        res = conn.exec_(sql.encode())
    except (MemoryError, psycopg.Error):    # words of psycopg for a connection that is gone
        return None, 'lost'
    if res.status == pq.ExecStatus.TUPLES_OK:
        rows = [[None if v is None else v.decode() for v in (res.get_value(i, j) for j in range(res.nfields))]
                for i in range(res.ntuples)]
        return rows, None
    if res.status == pq.ExecStatus.COMMAND_OK:
        return [], None
    state = res.error_field(pq.DiagnosticField.SQLSTATE)
    return None, state.decode() if state else 'lost'


class Failed(Exception):
    """The call failed; the transaction, if any, is over or must be rolled back."""


class Client:
    def __init__(self, kind, number, seed, round_, start, until, path, shared, broken):
        self.kind, self.number, self.round = kind, number, round_
        self.name = '%s%d' % (kind, number)
        self.random = random.Random('%s/%s/%s' % (seed, round_, self.name))
        self.start, self.until, self.shared, self.broken = start, until, shared, broken
        self.log = open(path, 'w', buffering=1 << 16)
        self.serial = self.xacts = 0
        self.x = None                   # open transaction
        self.iso = 'RC'
        self.stale = []                 # (key, token) of the past
        self.recent = []
        self.left = []                  # keys of unfinished attempts
        self.conn = connect('chaos-' + self.name)
        self.other = None               # second connection, only when broken

    # ---- calling ----

    def chance(self, p):
        return self.random.random() < p

    def pick(self, *of):
        return of[int(self.random.random() * len(of))]

    def nap(self, most):
        time.sleep(self.random.random() * most)

    def new(self):
        self.serial += 1
        return '%d.%s.%d' % (self.round, self.name, self.serial)

    def token(self):
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    def write(self, op, key, t0, t1, args, rows, state, **more):
        entry = dict(c=self.name, x=self.x, i=self.iso, t0=t0, t1=t1, op=op, k=key, a=args, r=rows, e=state, **more)
        self.log.write(json.dumps(entry, separators=(',', ':')) + '\n')

    def hang_up(self, sql):
        """Sends the statement and does not wait for the answer."""
        try:
            self.conn.send_query(sql.encode())
        except psycopg.Error:
            pass
        time.sleep(self.pick(0, 0.0005, 0.002))
        return None, 'lost'

    def again(self, pid):
        """Connects again, and waits until the old session has left the server."""
        self.conn.finish()
        for _ in range(500):
            self.conn = connect('chaos-' + self.name)
            while True:
                rows, state = run(self.conn, 'SELECT 1 FROM pg_stat_activity WHERE pid = %d' % pid)
                if state is not None:
                    break
                if not rows:
                    return
                time.sleep(0.002)
            if self.conn.status != pq.ConnStatus.OK:
                self.conn.finish()
            else:
                time.sleep(0.01)
        raise SystemExit('session %d does not end' % pid)

    def call(self, op, key, sql, **args):
        pid = self.conn.backend_pid
        t0 = time.time()
        rows, state = self.hang_up(sql) if self.chance(0.02 if op == 'commit' else 0.001) else run(self.conn, sql)
        t1 = time.time()
        if state is None:
            self.write(op, key, t0, t1, args, rows, None)
            return rows
        if state in LOST or self.conn.status != pq.ConnStatus.OK:
            self.again(pid)
            self.write(op, key, t0, t1, args, None, 'lost', back=time.time())
            self.x = None
        else:
            self.write(op, key, t0, t1, args, None, state)
        raise Failed(state)

    def begin(self, iso=None):
        self.iso = iso or self.pick('RC', 'RC', 'RR', 'SR')
        self.xacts += 1
        self.x = '%d.%s.t%d' % (self.round, self.name, self.xacts)
        self.call('begin', None, 'BEGIN ISOLATION LEVEL ' + ISOLATION[self.iso])

    def commit(self):
        # the marker tells what became of it if the answer is lost
        self.call('commit', None, "INSERT INTO marker (x) VALUES ('%s'); COMMIT" % self.x)
        self.x = None

    def rollback(self):
        if self.x is not None:
            self.call('rollback', None, 'ROLLBACK')
            self.x = None

    def savepoint(self):
        self.call('savepoint', None, 'SAVEPOINT s')

    def undo(self):
        self.call('undo', None, 'ROLLBACK TO s')

    def commit_or_not(self, p=0.12):
        if self.chance(p):
            self.rollback()
        else:
            self.commit()

    # ---- keys ----

    def made(self, operation, name):
        return 'c:%s%d:%s' % (operation, self.round, name) if operation != 'default' else 'o-%d-%s' % (self.round, name)

    def key(self):
        dice = self.random.random()
        epoch = int((time.time() - self.start) / 6)
        if dice < 0.15:
            # all clients come to the same new key at once
            front = int((time.time() - self.start) * 12)
            return self.made(('retry', 'few', 'retry', 'doubt', 'default', 'long')[front % 6], 'f%d' % front)
        if dice < 0.35:
            return self.made(self.pick('retry', 'retry', 'few', 'few', 'doubt', 'long', 'default'), 'h%d-%d' % (epoch, self.random.randrange(2)))
        if dice < 0.65:
            return self.made(self.pick('retry', 'retry', 'few', 'doubt', 'long', 'default'), 'w%d-%d' % (epoch, self.random.randrange(30)))
        if dice < 0.75 and self.recent:
            return self.pick(*self.recent)
        if dice < 0.9 and self.left:
            return self.left.pop(0)
        return self.cold()

    def leave(self, key):
        self.left.append(key)
        del self.left[:-40]

    def cold(self):
        return self.made(self.pick('retry', 'few', 'doubt', 'long', 'default'), self.new())

    def plain_key(self):
        """A key that is claimed without a request."""
        if self.chance(0.5):
            return self.made('retry', 'n%d-%d' % ((time.time() - self.start) / 6, self.random.randrange(12)))
        return self.made('retry', 'n' + self.new())

    def done(self, key):
        self.recent.append(key)
        del self.recent[:-12]

    def request(self, key, variant=0, **more):
        if not plan.has_request(key):
            return None
        return json.dumps(dict(more, key=key, **({'other': 1} if variant else {})))

    # ---- functions of the extension ----

    def claim(self, key, variant=0, token=None, lease=None, wait=None):
        sql = 'SELECT %s FROM idem_claim(%s, %s' % (CLAIM, text(key), text(self.request(key, variant), '::jsonb'))
        if lease is not None:
            sql += ", lease => '%s ms'" % lease
        if wait is not None:
            sql += ", wait => '%s ms'" % wait
        if token is not None:
            sql += ", token => '%s'" % token
        rows = self.call('claim', key, sql + ')', variant=variant, token=token, lease=lease and lease / 1000)
        if rows[0][0] != 'claimed':
            return None
        self.remember(key, rows[0][1])
        return rows[0][1]

    def remember(self, key, token):
        self.stale.append((key, token))
        del self.stale[:-60]

    def claim_options(self):
        options = {}
        if self.chance(0.5):
            options['lease'] = self.pick(100, 150, 300, 2000, 20000)
        if self.chance(0.1):
            options['wait'] = self.pick(20, 60, 150)
        if self.chance(0.3):
            options['token'] = self.token()
        if self.chance(0.03):
            options['variant'] = 1
        return options

    def effect(self, key, token=None):
        x = self.new()
        sql = "INSERT INTO effect VALUES ('%s', '%s', %s)" % (key, x, text(token))
        if self.broken == 'completion-in-another-transaction':
            self.other = self.other or connect('other-' + self.name)
            if run(self.other, sql)[1] is not None:
                self.other = None
            self.write('effect', key, time.time(), time.time(), dict(effect=x), [], None)
        else:
            self.call('effect', key, sql, effect=x)
        return x

    def complete(self, key, token, x, body=None):
        rows = self.call('complete', key, "SELECT idem_complete('%s', '%s', %s, %s)" % (
            key, token, text(x and json.dumps({'x': x}), '::jsonb'), text(body, '::bytea')), token=token, res=[x, body])
        return rows[0][0] == 't'

    def fail(self, key, token):
        self.leave(key)
        kind = self.pick('retryable', 'retryable', 'retryable', 'retryable', 'permanent', 'unknown')
        after = self.pick(None, 0, 20, 100) if kind == 'retryable' else None
        message, code = 'x' + self.new() + 'x', self.pick('E1', 'E2')
        sql = "SELECT status, attempts, extract(epoch FROM retry_at) FROM idem_fail('%s', '%s', '%s', '%s', '%s', %s)" % (
            key, token, kind, message, code, 'NULL' if after is None else "'%d ms'" % after)
        self.call('fail', key, sql, token=token, kind=kind, code=code, msg=message, after=after if after is None else after / 1000)

    def renew(self, key, token):
        lease = self.pick(None, 100, 300, 1000)
        self.call('renew', key, "SELECT extract(epoch FROM idem_renew('%s', '%s', %s))" % (
            key, token, 'NULL' if lease is None else "'%d ms'" % lease), token=token, lease=lease and lease / 1000)

    def release(self, key, token):
        self.call('release', key, "SELECT idem_release('%s', '%s')" % (key, token), token=token)

    def checkpoint(self, key, token):
        step, value = 's%d' % self.random.randrange(3), self.random.randrange(1000)
        self.call('checkpoint', key, "SELECT idem_checkpoint('%s', '%s', '%s', '%d')::text" % (key, token, step, value),
                  token=token, step=step, value=value)

    def status(self, key):
        self.call('status', key, "SELECT %s FROM idem_status('%s')" % (STATUS, key))

    # ---- what clients do ----

    def one_transaction(self):
        key = self.key()
        self.begin()
        if self.chance(0.1):
            self.savepoint()
            self.claim(key, **self.claim_options())
            self.undo()
        if self.chance(0.05):
            self.status(key)
        token = self.claim(key, **self.claim_options())
        if token:
            self.hold(key, token)
            if self.chance(0.15):
                self.nap(0.05)
        self.commit_or_not()
        if token:
            self.done(key)

    def tough(self, key):
        """Hot keys take many attempts."""
        return key.split(':')[-1].split('-')[-2:][0][:1] == 'h' if key.startswith('o') else key.split(':')[-1][0] == 'h'

    def hold(self, key, token):
        """Within a transaction: the end of an attempt."""
        if self.chance(0.1):
            self.pick(self.renew, self.checkpoint)(key, token)
        if self.chance(0.7 if self.tough(key) else 0.15):
            # the work fails: its writes go, the failure stays
            self.savepoint()
            self.effect(key, token)
            self.undo()
            self.pick(self.fail, self.fail, self.release)(key, token)
            return
        x = self.effect(key, token)
        body = self.pick(None, None, 'body-' + x)
        self.complete(key, token, x, body)
        if self.chance(0.1):
            self.complete(key, token, x, body)
        if self.chance(0.05):
            self.claim(key)

    def two_transactions(self):
        key = self.key()
        own = self.token() if self.chance(0.4) else None
        options = dict(self.claim_options(), token=own)
        try:
            token = self.claim(key, **options)
        except Failed as failure:
            # a lost answer: the same claim again
            if str(failure) not in LOST or own is None or options.get('variant'):
                raise
            token = self.claim(key, token=own)
        if token and own and self.chance(0.1):
            token = self.claim(key, token=own)
        tough = self.tough(key)
        if not token or self.chance(0.4 if tough else 0.15):
            if token and self.chance(0.7):
                self.leave(key)
            return
        if self.chance(0.25):
            self.pick(self.renew, self.checkpoint)(key, token)
        if self.chance(0.2):
            self.nap(0.25)
        if self.chance(0.5 if tough else 0.2):
            self.fail(key, token)
            return
        if self.chance(0.3 if tough else 0.1):
            self.release(key, token)
            return
        for _ in range(3):
            try:
                self.begin()
                x = self.effect(key, token)
                if self.chance(0.1):
                    self.nap(0.03)
                self.complete(key, token, x, self.pick(None, 'body-' + x))
                if not self.chance(0.1):
                    self.commit()
                    self.done(key)
                    return
                self.rollback()
            except Failed as failure:
                self.rollback()
                if str(failure).startswith('ID'):
                    return

    def replay(self):
        key = self.pick(*self.recent) if self.recent and self.chance(0.5) else self.key()
        token = self.claim(key, variant=1 if self.chance(0.1) else 0)
        if token and self.chance(0.7):
            self.release(key, token)

    def execute(self):
        key = self.key()
        if not plan.has_request(key):
            return
        together = self.chance(0.4)
        if together:
            self.begin()
        x = self.new()
        mode = self.pick(*[] if self.tough(key) else ['ok', 'ok', 'ok', 'ok', 'slow', 'slow'], *plan.MODES)
        sql = "SELECT %s FROM idem_execute('%s', '%s', 'handle(text,jsonb,integer)', wait => '%d ms')" % (
            CLAIM, key, self.request(key, mode=mode, x=x), self.pick(0, 0, 0, 50))
        rows = self.call('execute', key, sql, mode=mode, effect=x)
        if rows[0][0] == 'executed':
            self.done(key)
        if together:
            self.commit_or_not()

    def once(self):
        key = self.plain_key() if self.chance(0.3) else self.key()
        self.begin()
        variant = 1 if self.chance(0.02) else 0
        rows = self.call('once', key, "SELECT idem_once('%s', %s)" % (key, text(self.request(key, variant), '::jsonb')), variant=variant)
        if rows[0][0] == 't':
            self.effect(key)
            self.done(key)
        self.commit_or_not()

    def batch(self):
        self.begin()
        if self.chance(0.4):
            keys = [self.plain_key() for _ in range(self.random.randrange(2, 6))]
            rows = self.call('once_many', keys, "SELECT key, first FROM idem_once_many('{%s}') ORDER BY ordinality" % ','.join(keys))
            for key, first in rows:
                if first == 't':
                    self.effect(key)
            self.commit_or_not()
            return
        keys = [self.key() for _ in range(self.random.randrange(2, 6))]
        if self.chance(0.2):
            keys.append(keys[0])
        requests = ','.join("'%s'::jsonb" % self.request(key) if plan.has_request(key) else 'NULL' for key in keys)
        rows = self.call('claim_many', keys, "SELECT key, %s FROM idem_claim_many('{%s}', ARRAY[%s], lease => '%d ms') ORDER BY ordinality" % (
            CLAIM, ','.join(keys), requests, 1000), lease=1.0)
        got = [(row[0], row[2]) for row in rows if row[1] == 'claimed']
        for key, token in got:
            self.remember(key, token)
        if self.chance(0.4):
            self.commit()
            self.begin()
        self.complete_many(got)
        self.commit_or_not()

    def complete_many(self, got):
        if not got:
            return
        res = [self.effect(key, token) for key, token in got]
        self.call('complete_many', [key for key, _ in got],
                  "SELECT key, completed FROM idem_complete_many('{%s}', '{%s}', ARRAY[%s]) ORDER BY ordinality" % (
                      ','.join(key for key, _ in got), ','.join(token for _, token in got),
                      ','.join("'%s'::jsonb" % json.dumps({'x': x}) for x in res)),
                  token=[token for _, token in got], res=[[x, None] for x in res])

    def recover(self):
        self.begin()
        operation = self.pick("'retry%d'" % self.round, "'long%d'" % self.round, 'NULL')
        rows = self.call('claim_due', None, "SELECT key, %s FROM idem_claim_due(%s, %d, '%d ms')" % (
            CLAIM, operation, self.random.randrange(1, 4), 500), lease=0.5)
        self.commit_or_not(0.1)
        for row in rows:
            key, token = row[0], row[2]
            if plan.round_of(key) != self.round:
                self.call('fail', key, "SELECT status, attempts, extract(epoch FROM retry_at) FROM idem_fail('%s', '%s', 'permanent')" % (key, token),
                          token=token, kind='permanent', code=None, msg=None, after=None)
                continue
            self.remember(key, token)
            if self.chance(0.7):
                self.begin()
                self.hold(key, token)
                self.commit_or_not(0.05)

    def zombie(self):
        """Calls with tokens of the past."""
        if not self.stale:
            return
        key, token = self.pick(*self.stale)
        together = self.chance(0.3)
        if together:
            self.begin()
        what = self.random.randrange(7)
        if what == 0 and together:
            # the result of another, with the wrong token
            row = self.call('status', key, "SELECT %s FROM idem_status('%s')" % (STATUS, key))[0]
            if row[0] == 'succeeded' and self.complete(key, token, row[5], row[6]):
                self.rollback()
                return
        elif what == 1 and together:
            self.complete(key, token, self.effect(key, token))
        elif what < 2:
            self.status(key)
        elif what == 2:
            self.fail(key, token)
        elif what == 3:
            self.renew(key, token)
        elif what == 4:
            self.release(key, token)
        elif what == 5:
            self.checkpoint(key, token)
        elif not together:
            self.claim(key, token=token)
        if together:
            self.commit_or_not(0.3)

    def look(self):
        if self.chance(0.6):
            self.status(self.key())
            return
        # a snapshot from before what the others do meanwhile
        key = self.key()
        self.begin()
        self.status(key)
        self.nap(0.03)
        self.status(key)
        token = self.claim(key)
        if token:
            self.hold(key, token)
        self.commit_or_not()

    # ---- reapers and operators ----

    def reap(self):
        if not self.shared.value:
            time.sleep(0.05)
            return
        self.call('reap', None, 'SELECT * FROM idem_reap(%d)' % self.pick(1000, 1000, 10))
        self.nap(0.2)

    def operate(self):
        self.nap(0.06)
        key = self.key()
        if self.chance(0.7):
            # a record that has something for an operator to do
            rows, state = run(self.conn, "SELECT idempotency_key FROM idem_record_open WHERE operation LIKE '%%%d' AND status = '%s'"
                              " ORDER BY random() LIMIT 1" % (self.round, self.pick('unknown', 'unknown', 'retryable_failed', 'processing')))
            key = rows[0][0] if rows else key
        reason = self.new()
        together = self.chance(0.3)
        if together:
            self.begin()
        what = self.random.randrange(12)
        if what < 4:
            self.call('retry', key, "SELECT idem_retry('%s', '%s')" % (key, reason), reason=reason)
        elif what < 5:
            if not together:
                self.begin('RC')
                together = True
            self.call('retry_many', None, "SELECT * FROM idem_retry_many('%s%d', %s, '%s', 3)" % (
                self.pick('retry', 'few', 'doubt'), self.round, self.pick('NULL', "'exhausted'"), reason), reason=reason)
        elif what < 7:
            if self.chance(0.5):
                self.call('resolve', key, "SELECT idem_resolve('%s', 'succeeded', '%s', '%s')" % (
                    key, reason, json.dumps({'x': 'resolved ' + reason})), reason=reason, res=['resolved ' + reason, None])
            else:
                self.call('resolve', key, "SELECT idem_resolve('%s', 'failed', '%s', error_code => 'R', error_message => '%s')" % (
                    key, reason, reason), reason=reason, res=None, msg=reason)
        elif what < 10:
            self.call('revoke', key, "SELECT idem_revoke('%s', '%s')" % (key, reason), reason=reason)
        else:
            self.call('forget', key, "SELECT idem_forget('%s', '%s')" % (key, reason), reason=reason)
        if together:
            self.commit_or_not(0.2)

    # ---- ----

    def scenarios(self):
        if self.kind == 'reaper':
            return {self.reap: 1}
        if self.kind == 'operator':
            return {self.operate: 1}
        return {self.one_transaction: 30, self.two_transactions: 30, self.replay: 14, self.execute: 12, self.once: 10,
                self.batch: 4, self.recover: 4, self.zombie: 16, self.look: 5, self.reap: 0.2}

    def work(self):
        scenarios = self.scenarios()
        names, weights = list(scenarios), list(scenarios.values())
        while time.time() < self.until:
            self.iso = 'RC'
            try:
                self.random.choices(names, weights)[0]()
            except Failed:
                pass
            try:
                self.rollback()
            except Failed:
                self.x = None
        self.conn.finish()
        self.log.close()


def main(*arguments):
    Client(*arguments).work()
