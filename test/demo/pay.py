#!/usr/bin/python3
"""The demo's service: takes the requests of a file, from several connections at once.

  pay.py requests.jsonl [--workers 8] [--bypass]

Each worker does with each delivery what a careful client does: it asks again until
it has a final answer.  At the end the books are checked against the input file.
With --bypass the same deliveries are executed without asking for the key.
"""
import argparse
import collections
import json
import queue
import sys
import threading
import time

import psycopg
from psycopg.types.json import Jsonb

STATS = collections.Counter()
LOCK = threading.Lock()


def count(what, n=1):
    with LOCK:
        STATS[what] += n


class Died(Exception):
    """The executor is gone: its connection is cut, nothing more is said."""


class Worker(threading.Thread):
    def __init__(self, jobs, bypass):
        super().__init__(daemon=True)
        self.jobs, self.bypass = jobs, bypass
        self.conn = None
        self.error = None

    def connect(self):
        if self.conn is None or self.conn.closed:
            self.conn = psycopg.connect(dbname='demo', autocommit=True, application_name='demo worker')
        return self.conn

    def die(self):
        """What a crash looks like from the server: the connection ends."""
        self.conn.close()
        count('executors lost')
        raise Died()

    def run(self):
        try:
            while True:
                self.deliver(self.jobs.get_nowait())
        except queue.Empty:
            pass
        except Exception as e:          # a bug in the demo must not look like a success
            self.error = e
            raise

    def deliver(self, job):
        """One delivery, repeated like a client does until the answer is final."""
        fate = job['fate']
        for attempt in range(200):
            try:
                answer = self.bypassed(job, fate) if self.bypass else self.handle(job, fate)
            except Died:
                count('retries by clients')
                fate = 'ok'
                continue
            except psycopg.Error as e:
                if e.sqlstate not in ('40001', '40P01', 'ID001'):
                    raise
                count(f'errors {e.sqlstate}, rolled back')
                continue
            outcome, wait = answer
            if fate == 'answer lost' and outcome in ('executed', 'succeeded'):
                count('answers lost')
                count('retries by clients')
                fate = 'ok'
                continue
            fate = 'ok' if fate == 'transient error' else fate
            if outcome in ('in_progress', 'retry_later'):
                count(outcome)
                time.sleep(min(wait, 0.2))
                continue
            count(outcome)
            count('deliveries answered')
            return
        raise RuntimeError(f"no final answer for {job['key']}")

    def bypassed(self, job, fate):
        """No key asked: every delivery, and every repeated try, runs the business logic."""
        conn = self.connect()
        try:
            with conn.transaction():
                conn.execute('SELECT charge(%s)', [Jsonb(job['request'])])
                if fate == 'dies before commit':
                    self.die()
        except psycopg.Error as e:
            if e.sqlstate == 'IDP00':
                return 'failed', 0
            raise
        if fate == 'dies after claim':
            self.die()
        return 'executed', 0

    def handle(self, job, fate):
        if job['form'] == 'two transactions' or fate in ('dies after claim', 'transient error'):
            return self.two_transactions(job, fate)
        conn = self.connect()
        sql = {'stored function': 'SELECT * FROM pay(%s, %s)',
               'idem_execute': "SELECT * FROM idem_execute(%s, %s, 'charge(jsonb)')"}[job['form']]
        with conn.transaction():
            row = self.one(conn, sql, [job['key'], Jsonb(job['request'])])
            if fate == 'dies before commit' and row.outcome == 'executed':
                self.die()
        return row.outcome, wait_of(row)

    def two_transactions(self, job, fate):
        """Claim first, committed: attempts are counted and a crash is recovered from."""
        conn = self.connect()
        row = self.one(conn, 'SELECT * FROM idem_claim(%s, %s)', [job['key'], Jsonb(job['request'])])
        if row.outcome != 'claimed':
            return row.outcome, wait_of(row)
        if row.previous == 'lease_expired':
            count('take-overs after a lost executor')
        if fate == 'dies after claim':
            self.die()
        if fate == 'transient error':
            conn.execute("SELECT idem_fail(%s, %s, 'retryable', 'downstream busy', 'BUSY')", [job['key'], row.owner_token])
            count('transient failures recorded')
            return 'retry_later', 0.1
        try:
            with conn.transaction():
                result = conn.execute('SELECT charge(%s)', [Jsonb(job['request'])]).fetchone()[0]
                conn.execute('SELECT idem_complete(%s, %s, %s)', [job['key'], row.owner_token, Jsonb(result)])
                if fate == 'dies before commit':
                    self.die()
        except psycopg.Error as e:
            if e.sqlstate != 'IDP00':
                raise
            conn.execute("SELECT idem_fail(%s, %s, 'permanent', %s, 'IDP00')", [job['key'], row.owner_token, 'insufficient funds'])
            return 'failed', 0
        return 'executed', 0

    @staticmethod
    def one(conn, sql, args):
        return conn.cursor(row_factory=psycopg.rows.namedtuple_row).execute(sql, args).fetchone()


def wait_of(row):
    return row.retry_after.total_seconds() if row.retry_after is not None else 0


def progress(threads, total, started):
    while any(t.is_alive() for t in threads):
        time.sleep(1)
        with LOCK:
            s = dict(STATS)
        print(f"  {time.time() - started:4.0f} s  {s.get('deliveries answered', 0):6} of {total} deliveries answered, "
              f"{s.get('executed', 0)} executed, {s.get('succeeded', 0)} replayed, {s.get('conflict', 0)} refused, "
              f"{s.get('executors lost', 0)} executors lost", flush=True)


def line(what, value, note=''):
    print(f'  {what:44} {value:>12}   {note}')


def reconcile(conn, jobs, bypass):
    """Compares the books with the input.  Knows the file and the business tables only."""
    asked = collections.defaultdict(set)
    rich = {}
    for job in jobs:
        r = job['request']
        asked[r['payment']].add(round(r['amount'] * 100))
        rich[r['payment']] = r['account'] <= 50
    charged = collections.defaultdict(list)
    for payment, amount in conn.execute('SELECT payment, amount FROM charges'):
        charged[payment].append(round(amount * 100))
    moved = conn.execute("SELECT 50 * 1000000 + 5 - sum(balance) FROM accounts").fetchone()[0]
    # One charge per payment that can be paid; which amount, where a key came with two, the first one decided.
    payable = [p for p in asked if rich[p]]
    expected_low = sum(min(asked[p]) for p in payable) / 100
    expected_high = sum(max(asked[p]) for p in payable) / 100
    once = sum(charged[p][0] for p in payable if charged[p]) / 100
    doubles = sum(len(c) - 1 for c in charged.values() if len(c) > 1)
    wrong = sum(1 for p, c in charged.items() for a in c if a not in asked[p] or not rich[p])
    missing = sum(1 for p in payable if not charged[p])

    print('\nreconciliation')
    line('deliveries in the file', len(jobs))
    line('different payments', len(asked), f'{len(payable)} of them can be paid')
    line('executed', STATS['executed'])
    line('replayed from the record', STATS['succeeded'])
    line('refused: same key, other request', STATS['conflict'])
    line('failed for good (insufficient funds)', STATS['failed'])
    line('told "in progress"', STATS['in_progress'])
    line('told "later"', STATS['retry_later'])
    line('executors lost', STATS['executors lost'], f"{STATS['take-overs after a lost executor']} taken over after the lease")
    line('answers lost after commit', STATS['answers lost'])
    line('payments charged twice or more', doubles)
    line('payments not charged', missing)
    line('charges nobody asked for', wrong)
    line('money expected, each payment once', f'{once:.2f}', f'between {expected_low:.2f} and {expected_high:.2f} by the file')
    line('money moved', f'{moved:.2f}')
    good = doubles == 0 and missing == 0 and wrong == 0 and abs(float(moved) - once) < 0.005 \
        and expected_low <= once <= expected_high
    if not bypass:
        bad = conn.execute('SELECT count(*) FROM idem_check()').fetchone()[0]
        line('violations found by idem_check()', bad)
        good = good and bad == 0
    return good


def life_of_a_key():
    """A failure, its retries with growing delays, exhaustion, the operator; and an unknown outcome."""
    listener = psycopg.connect(dbname='demo', autocommit=True)
    seen = []
    listener.add_notify_handler(lambda n: seen.append(n.payload))
    listener.execute('LISTEN idempotency')
    conn = psycopg.connect(dbname='demo', autocommit=True)
    row_of = lambda sql, *args: Worker.one(conn, sql, args)
    key = 'tenant-1:ship:parcel-9'
    print(f'\nthe life of a key: {key} (policy "ship": 3 attempts, delay 200 ms, doubling)')
    while True:
        a = row_of('SELECT * FROM idem_claim(%s)', key)
        if a.outcome == 'retry_later':
            print(f'  claim: retry_later, in {a.retry_after.total_seconds() * 1000:.0f} ms')
            time.sleep(a.retry_after.total_seconds() + 0.005)
            continue
        if a.outcome != 'claimed':
            print(f'  claim: {a.outcome}, {a.error_code}: {a.error_message}')
            break
        f = row_of("SELECT * FROM idem_fail(%s, %s, 'retryable', 'carrier is down', 'E503')", key, a.owner_token)
        print(f'  attempt {a.attempts} (previous: {a.previous}) fails: {f.status}')
    assert a.outcome == 'failed' and a.error_code == 'exhausted'
    print('  operator:', row_of("SELECT idem_retry(%s, 'carrier is back, ticket 4711')", key).idem_retry)
    a = row_of('SELECT * FROM idem_claim(%s)', key)
    print(f'  attempt {a.attempts} (previous: {a.previous}) asks the carrier, and no answer comes back')
    row_of("SELECT idem_fail(%s, %s, 'unknown', 'no answer from the carrier')", key, a.owner_token)
    print('  claim:', row_of('SELECT * FROM idem_claim(%s)', key).outcome, '- nothing runs it again before a person has looked')
    row_of("SELECT idem_resolve(%s, 'succeeded', 'carrier confirms by phone', '{\"tracking\": \"XY-1\"}')", key)
    a = row_of('SELECT * FROM idem_claim(%s)', key)
    print('  resolved; claim:', a.outcome, json.dumps(a.result_json))
    print('  audit:')
    for r in conn.execute('SELECT action, session_user_name, old_status, new_status, old_attempts, reason FROM idem_audit ORDER BY id'):
        print('    {:8} by {}: {} -> {}, after {} attempts: {}'.format(*r))
    print('  notifications that a monitoring program received:')
    for _ in range(100):                 # they come with the next answer of the server
        listener.execute('SELECT 1')
        if len(seen) >= 2:
            break
        time.sleep(0.05)
    for payload in seen:
        print('   ', payload)
    return a.outcome == 'succeeded' and len(seen) == 2


def main():
    p = argparse.ArgumentParser()
    p.add_argument('file')
    p.add_argument('--workers', type=int, default=8)
    p.add_argument('--bypass', action='store_true')
    a = p.parse_args()
    with open(a.file) as f:
        jobs = [json.loads(text) for text in f]
    print(f"{len(jobs)} deliveries of payment requests, {a.workers} connections at once"
          + (', WITHOUT asking for the key' if a.bypass else ''))
    todo = queue.Queue()
    for job in jobs:
        todo.put(job)
    threads = [Worker(todo, a.bypass) for _ in range(a.workers)]
    started = time.time()
    for t in threads:
        t.start()
    progress(threads, len(jobs), started)
    failed = [t.error for t in threads if t.error]
    conn = psycopg.connect(dbname='demo', autocommit=True)
    good = reconcile(conn, jobs, a.bypass) and not failed
    if not a.bypass:
        good = life_of_a_key() and good
    print('\nthe books balance: every payment was charged once inside this database' if good
          else '\nDOUBLE CHARGES: the books do not balance' if not failed else f'\nfailed: {failed}')
    sys.exit(0 if good else 1)


main()
