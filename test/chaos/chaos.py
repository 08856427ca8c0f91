"""The chaos run: clients, mayhem, and a check of everything after each round.

    /usr/bin/python3 chaos.py --data DIR --server-log FILE [--seconds 60] [--seed N]
                              [--clients 8] [--log DIR] [--broken NAME]

Runs as the user of the server (it kills backends and restarts); PGHOST and PGPORT
say where the server is.  A round takes 30 seconds at most; then all clients stop, the
checker reads logs and tables, and the next round has new keys.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import checker
import client
import plan

ROUND = 30.0
ENOUGH_BAD = 200        # violations that end the run


class Mayhem:
    def __init__(self, options, shared):
        self.options, self.shared = options, shared
        self.random = random.Random('%s/mayhem' % options.seed)
        self.counts = dict(kills=0, immediate=0, fast=0, terminated=0, cancelled=0, offsets=0)
        self.offset = -4.0
        self.offsets = []               # (from, until, lowest, highest); see set_offset
        self.complaints = []            # idem_check() after a restart
        self.conn = client.connect('mayhem')

    def query(self, sql):
        """Rows; once more on a new connection if the server went away."""
        for _ in range(100):
            rows, state = client.run(self.conn, sql)
            if state is None:
                return rows
            if self.conn.status == client.pq.ConnStatus.OK and state not in client.LOST:
                raise SystemExit('%s: %s' % (state, sql))
            self.conn.finish()
            self.conn = client.connect('mayhem')
        raise SystemExit('server does not stay up')

    def set_offset(self, offset):
        """Moves the extension's clock forward.  Reapers rest meanwhile: a slice
        that is closed by an old clock must not hold a record of the new one."""
        self.shared.value = 0
        time.sleep(0.4)
        while self.query("SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT * FROM idem_reap%'"):
            time.sleep(0.02)
        before, old = time.time(), self.offset
        self.query("LOAD 'idempotency'")
        self.query("ALTER SYSTEM SET idempotency.clock_offset = %s" % offset)
        self.query('SELECT pg_reload_conf()')
        while True:
            probe = client.connect('mayhem')
            value = client.run(probe, 'SHOW idempotency.clock_offset')[0]
            probe.finish()
            if value and seconds(value[0][0]) == offset:
                break
            time.sleep(0.01)
        time.sleep(0.4)
        self.offset = offset
        self.offsets.append((before, time.time(), old, offset))
        self.shared.value = 1
        self.counts['offsets'] += 1

    def victim(self):
        rows = self.query("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'chaos-%' AND backend_type = 'client backend'"
                          " ORDER BY pid")
        return int(self.random.choice(rows)[0]) if rows else None

    def restart(self, mode):
        subprocess.run(['pg_ctl', '-D', self.options.data, '-m', mode, '-t', '120', '-w', 'restart',
                        '-l', self.options.server_log] + self.options.pg_ctl, check=True, stdout=subprocess.DEVNULL)

    def crash(self):
        what = self.random.choice(['kills', 'kills', 'immediate', 'fast'])
        if what == 'kills':
            pid = self.victim()
            if pid is None:
                return
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            if not self.wait_for_recovery():
                return
        else:
            self.restart(what)
        self.counts[what] += 1
        self.look()

    def wait_for_recovery(self):
        """Our own connection dies with the others; false if the victim had ended by itself."""
        until = time.time() + 5
        while client.run(self.conn, 'SELECT 1')[1] is None:
            if time.time() > until:
                return False
            time.sleep(0.01)
        self.query('SELECT 1')
        return True

    def look(self):
        for row in self.query('SELECT * FROM idem_check()'):
            self.complaints.append('after a restart: ' + ' | '.join(str(v) for v in row))

    def disturb(self):
        pid = self.victim()
        if pid is None:
            return
        what = 'cancelled' if self.random.random() < 0.6 else 'terminated'
        self.query('SELECT %s(%d)' % ('pg_cancel_backend' if what == 'cancelled' else 'pg_terminate_backend', pid))
        self.counts[what] += 1

    def run(self, until):
        next_crash = time.time() + 2 + 4 * self.random.random()
        next_offset = time.time() + 1 + 5 * self.random.random()
        while time.time() < until:
            if time.time() > next_crash and until - time.time() > 3:
                self.crash()
                next_crash = time.time() + 4 + 6 * self.random.random()
            elif time.time() > next_offset and until - time.time() > 2:
                self.set_offset(round(self.offset + self.random.choice([0.2, 0.5, 1.5]), 3))
                next_offset = time.time() + 4 + 4 * self.random.random()
            else:
                self.disturb()
            time.sleep(min(0.3 * self.random.random(), max(0, until - time.time())))


def seconds(shown):
    for unit, factor in (('min', 60), ('ms', 0.001), ('us', 1e-6), ('s', 1), ('h', 3600), ('d', 86400)):
        if shown.endswith(unit):
            return round(float(shown[:-len(unit)]) * factor, 6)
    return float(shown)


def run_round(options, mayhem, number, until, totals):
    mayhem.query(plan.round_setup(number))
    start = time.time()
    work = []
    paths = []
    kinds = [('client', i) for i in range(options.clients)] + [('reaper', 0), ('operator', 0)]
    for kind, i in kinds:
        path = os.path.join(options.log, 'round%d-%s%d.jsonl' % (number, kind, i))
        paths.append(path)
        work.append(multiprocessing.Process(target=client.main, args=(
            kind, i, options.seed, number, start, until, path, mayhem.shared, options.broken)))
    for process in work:
        process.start()
    try:
        mayhem.run(until)
    finally:
        for process in work:
            process.join(90)
            if process.exitcode != 0:
                totals.violation('clients', '%s ended with %s' % (process.name, process.exitcode))
                process.kill()
    # nobody of the round is left in the server
    while mayhem.query("SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'chaos-%'"):
        time.sleep(0.05)
    known = totals.failed
    checker.Round(number, paths, mayhem, totals).check()
    for path in paths:
        if not options.keep and totals.failed == known:
            os.unlink(path)
    mayhem.query('TRUNCATE effect, marker')
    del mayhem.offsets[:-1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--seconds', type=float, default=60)
    parser.add_argument('--seed', default=None)
    parser.add_argument('--clients', type=int, default=8)
    parser.add_argument('--log')
    parser.add_argument('--broken', default='')
    parser.add_argument('--data', required=True)
    parser.add_argument('--server-log', required=True)
    parser.add_argument('--pg-ctl', nargs='*', default=[])
    options = parser.parse_args()
    options.seed = options.seed or str(random.SystemRandom().randrange(10**6))
    options.keep = options.log is not None
    options.log = options.log or tempfile.mkdtemp()
    os.makedirs(options.log, exist_ok=True)
    print('seed %s, logs%s in %s' % (options.seed, '' if options.keep else ' of rounds with violations', options.log), flush=True)

    shared = multiprocessing.Value('i', 1, lock=False)
    mayhem = Mayhem(options, shared)
    mayhem.query(plan.SETUP)
    began = time.time()
    totals = checker.Totals(began)
    mayhem.set_offset(mayhem.offset)
    mayhem.offsets = []
    number = 0
    busy = 0.0
    while busy < options.seconds - 1 and totals.failed < (1 if options.broken else ENOUGH_BAD):
        number += 1
        length = min(ROUND, options.seconds - busy)
        if options.broken:
            length = min(length, 8)
        try:
            run_round(options, mayhem, number, time.time() + length, totals)
        except (SystemExit, subprocess.CalledProcessError) as problem:
            totals.violation('clients', str(problem))
            busy += length
            break
        busy += length
        print('round %d: %s' % (number, totals.line()), flush=True)
    totals.server_log(options.server_log)
    status = totals.report(options, mayhem, busy)
    if not os.listdir(options.log):
        os.rmdir(options.log)
    sys.exit(status)


if __name__ == '__main__':
    main()
