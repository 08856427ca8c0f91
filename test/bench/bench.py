#!/usr/bin/python3
"""Benchmark of the extension against its rivals, in alternating rounds on one server.

Started by run.sh, which gives PGHOST, PGPORT and a server with fsync on.
Figures are medians of rounds; what counts is the ratio within one run.
"""
import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile

SCRIPTS = {
    # name: pgbench script
    'select': "\\set i random(1, 100000)\nSELECT idempotency_key FROM bare WHERE idempotency_key = 'r' || :i;",
    'replay': "\\set i random(1, 100000)\nSELECT (idem_claim('r' || :i)).outcome;",
    'pl_replay': "\\set i random(1, 100000)\nSELECT (pl_claim('r' || :i, '{}')).outcome;",
    'in_progress': "\\set i random(1, 1000)\nSELECT (idem_claim('p' || :i)).outcome;",
    'pl_in_progress': "\\set i random(1, 1000)\nSELECT (pl_claim('p' || :i, '{}')).outcome;",
    'conflict': "\\set i random(1, 100000)\nSELECT (idem_claim('r' || :i, '{\"a\": 1}')).outcome;",
    'pl_conflict': "\\set i random(1, 100000)\nSELECT (pl_claim('r' || :i, '{\"a\": 1}')).outcome;",
    'hot': "SELECT (idem_claim('r1')).outcome;",
    'select_hot': "SELECT idempotency_key FROM bare WHERE idempotency_key = 'r1';",
    'insert': "INSERT INTO bare VALUES ('k' || gen_random_uuid()) ON CONFLICT DO NOTHING;",
    'once': "SELECT idem_once('k' || gen_random_uuid());",
    'business': "INSERT INTO business_alone (key, amount) VALUES ('k' || gen_random_uuid(), 1);",
    'execute': "SELECT (idem_execute('k' || gen_random_uuid(), '{\"k\": \"x\"}', 'pay(jsonb)')).outcome;",
    'two_tx': """SELECT 'k' || gen_random_uuid() AS k \\gset
SELECT owner_token AS t FROM idem_claim(:k, '{"k": "x"}') \\gset
BEGIN;
INSERT INTO business (key, amount) VALUES (:k, 1);
SELECT idem_complete(:k, :t, '{"ok": true}');
COMMIT;""",
    'one_tx': """SELECT 'k' || gen_random_uuid() AS k \\gset
BEGIN;
SELECT owner_token AS t FROM idem_claim(:k, '{"k": "x"}') \\gset
INSERT INTO business (key, amount) VALUES (:k, 1);
SELECT idem_complete(:k, :t, '{"ok": true}');
COMMIT;""",
    'two_calls': """SELECT 'k' || gen_random_uuid() AS k \\gset
SELECT owner_token AS t FROM idem_claim(:k, '{"k": "x"}') \\gset
SELECT idem_complete(:k, :t, '{"ok": true}');""",
    'seed_two_calls': """SELECT 'k' || gen_random_uuid() AS k, gen_random_uuid() AS t \\gset
BEGIN;
INSERT INTO task_idempotency (idempotency_key, request_hash, status, owner_token, lease_until, attempts)
  VALUES (:k, encode(sha256('{"k": "x"}'), 'hex'), 'processing', :t, now() + interval '30 s', 1) ON CONFLICT DO NOTHING;
SELECT request_hash, status, result_json, owner_token, lease_until, attempts FROM task_idempotency
  WHERE idempotency_key = :k FOR UPDATE;
COMMIT;
BEGIN;
SELECT status, owner_token FROM task_idempotency WHERE idempotency_key = :k FOR UPDATE;
UPDATE task_idempotency SET status = 'succeeded', result_json = '{"ok": true}', owner_token = NULL, lease_until = NULL,
  updated_at = now() WHERE idempotency_key = :k AND owner_token = :t;
COMMIT;""",
    'seed_two_tx': """SELECT 'k' || gen_random_uuid() AS k, gen_random_uuid() AS t \\gset
BEGIN;
INSERT INTO task_idempotency (idempotency_key, request_hash, status, owner_token, lease_until, attempts)
  VALUES (:k, encode(sha256('{"k": "x"}'), 'hex'), 'processing', :t, now() + interval '30 s', 1) ON CONFLICT DO NOTHING;
SELECT request_hash, status, result_json, owner_token, lease_until, attempts FROM task_idempotency
  WHERE idempotency_key = :k FOR UPDATE;
COMMIT;
BEGIN;
SELECT status, owner_token FROM task_idempotency WHERE idempotency_key = :k FOR UPDATE;
INSERT INTO business (key, amount) VALUES (:k, 1);
UPDATE task_idempotency SET status = 'succeeded', result_json = '{"ok": true}', owner_token = NULL, lease_until = NULL,
  updated_at = now() WHERE idempotency_key = :k AND owner_token = :t;
COMMIT;""",
    'seed_one_tx': """SELECT 'k' || gen_random_uuid() AS k, gen_random_uuid() AS t \\gset
BEGIN;
INSERT INTO task_idempotency (idempotency_key, request_hash, status, owner_token, lease_until, attempts)
  VALUES (:k, encode(sha256('{"k": "x"}'), 'hex'), 'processing', :t, now() + interval '30 s', 1) ON CONFLICT DO NOTHING;
SELECT request_hash, status, result_json, owner_token, lease_until, attempts FROM task_idempotency
  WHERE idempotency_key = :k FOR UPDATE;
INSERT INTO business (key, amount) VALUES (:k, 1);
UPDATE task_idempotency SET status = 'succeeded', result_json = '{"ok": true}', owner_token = NULL, lease_until = NULL,
  updated_at = now() WHERE idempotency_key = :k AND owner_token = :t;
COMMIT;""",
    'pl_two_tx': """SELECT 'k' || gen_random_uuid() AS k \\gset
SELECT owner_token AS t FROM pl_claim(:k, '{"k": "x"}') \\gset
BEGIN;
INSERT INTO business (key, amount) VALUES (:k, 1);
SELECT pl_complete(:k, :t, '{"ok": true}');
COMMIT;""",
}
for n in (1, 10, 100, 1000):
    SCRIPTS[f'once_{n}'] = f"SELECT count(*) FROM idem_once_many(ARRAY(SELECT 'k' || gen_random_uuid() FROM generate_series(1, {n})));"
    SCRIPTS[f'claim_{n}'] = f"SELECT count(*) FROM idem_claim_many(ARRAY(SELECT 'k' || gen_random_uuid() FROM generate_series(1, {n})));"
    SCRIPTS[f'insert_{n}'] = f"INSERT INTO bare SELECT 'k' || gen_random_uuid() FROM generate_series(1, {n}) ON CONFLICT DO NOTHING;"

# (what, ours, rival, goal, clients, which is compared: 'speed' = ours/rival tps, 'cost' = rival/ours tps)
ROWS = [
    ('replay / bare SELECT by primary key', 'replay', 'select', 0.95, None, 'speed'),
    ('replay / PL/pgSQL of the same contract', 'replay', 'pl_replay', 2.0, None, 'speed'),
    ('in progress / PL/pgSQL', 'in_progress', 'pl_in_progress', None, None, 'speed'),
    ('conflict / PL/pgSQL', 'conflict', 'pl_conflict', None, None, 'speed'),
    ('idem_once / INSERT ... ON CONFLICT DO NOTHING', 'once', 'insert', 0.9, None, 'speed'),
    ('idem_execute with one INSERT / the INSERT alone', 'execute', 'business', 0.75, None, 'speed'),
    ("idem_execute / seed's SQL by hand, two transactions", 'execute', 'seed_two_tx', 3.0, None, 'speed'),
    ("claim + complete as two calls / seed's SQL by hand, two transactions", 'two_calls', 'seed_two_calls', 1.5, None, 'speed'),
    ("claim, INSERT + complete, two transactions / seed's SQL", 'two_tx', 'seed_two_tx', None, None, 'speed'),
    ("claim, INSERT, complete, one transaction / seed's SQL", 'one_tx', 'seed_one_tx', None, None, 'speed'),
    ('claim, INSERT + complete, two transactions / PL/pgSQL', 'two_tx', 'pl_two_tx', None, None, 'speed'),
    ('idem_once_many of 1, cost per key / INSERT', 'once_1', 'insert_1', None, None, 'cost'),
    ('idem_once_many of 10, cost per key / multi-row INSERT', 'once_10', 'insert_10', None, None, 'cost'),
    ('idem_once_many of 100, cost per key / multi-row INSERT', 'once_100', 'insert_100', None, None, 'cost'),
    ('idem_once_many of 1000, cost per key / multi-row INSERT', 'once_1000', 'insert_1000', 1.5, None, 'cost'),
    ('idem_claim_many of 1000, cost per key / multi-row INSERT', 'claim_1000', 'insert_1000', 1.5, None, 'cost'),
    ('hot key, 64 sessions / SELECT of one row, 64 sessions', 'hot', 'select_hot', None, 64, 'speed'),
]


def psql(sql, db='bench'):
    out = subprocess.run(['psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', db, '-c', sql], check=True, capture_output=True, text=True)
    return out.stdout.strip()


def tps(directory, name, clients, seconds, env=None):
    path = os.path.join(directory, name + '.sql')
    with open(path, 'w') as f:
        f.write(SCRIPTS[name] + '\n')
    out = subprocess.run(['pgbench', '-n', '-M', 'prepared', '-f', path, '-c', str(clients), '-j', '2', '-T', str(seconds), 'bench'],
                         capture_output=True, text=True, env={**os.environ, **(env or {})})
    m = re.search(r'^tps = ([0-9.]+)', out.stdout, re.M)
    if out.returncode != 0 or not m:
        sys.exit(f'{name}: {out.stdout}{out.stderr}')
    return float(m.group(1))


def compare(directory, ours, rival, clients, seconds, rounds, env=None):
    """Alternating rounds; medians of both and the ratio's median and spread."""
    a, b = [], []
    for i in range(rounds):
        order = [(ours, a), (rival, b)]
        for name, results in order if i % 2 == 0 else reversed(order):
            results.append(tps(directory, name, clients, seconds, env))
    ratios = [x / y for x, y in zip(a, b)]
    return statistics.median(a), statistics.median(b), statistics.median(ratios), min(ratios), max(ratios)


def per_operation(sql_template, n, counter):
    """Runs the statement n times in one session; the counter's growth per time."""
    before = counter()
    psql(f"DO $do$ BEGIN FOR i IN 1..{n} LOOP {sql_template} END LOOP; END $do$")
    return (counter() - before) / n


def wal(sql, n=3000):
    def position():
        return int(psql("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))
    per_operation(sql, n, position)          # full-page images of this checkpoint go here
    return per_operation(sql, n, position)


WAL_ROWS = [
    ('replay', "PERFORM idem_claim('r1');"),
    ('conflict', "PERFORM idem_claim('r1', '1');"),
    ('in progress', "PERFORM idem_claim('p1');"),
    ('idem_once', "PERFORM idem_once('k' || gen_random_uuid());"),
    ('idem_execute (handler without writes)', "PERFORM idem_execute('k' || gen_random_uuid(), '{}', 'jsonb_pretty(jsonb)');"),
    ('claim + complete', "DECLARE k text := 'k' || gen_random_uuid(); BEGIN PERFORM idem_complete(k, (SELECT owner_token FROM idem_claim(k, '{}')), '{}'); END;"),
    ('INSERT of the finished row', "INSERT INTO finished (slice, idempotency_key, operation, owner, request_hash, status, attempts, owner_token,"
     " first_claimed_at, updated_at, result_json, previous, limits_from_attempt, limits_from) VALUES (1, 'k' || gen_random_uuid(), 'default', 'pg_monitor',"
     " '\\x01015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862', 'succeeded', 1, gen_random_uuid(), now(), now(), '{}', 'none', 0, now());"),
]


def fill(n):
    """Adds finished records to slice 1 up to n, the fast way, as owner of the tables."""
    have = int(psql("SELECT count(*) FROM idem_record_1 WHERE idempotency_key LIKE 'f%'"))
    psql("INSERT INTO idem_record_1 (slice, idempotency_key, operation, owner, request_hash, status, attempts, first_claimed_at, updated_at,"
         " previous, limits_from_attempt, limits_from) SELECT 1, 'f' || md5(i::text), 'default', current_user::regrole, '', 'succeeded', 1, now(), now(),"
         f" 'none', 0, now() FROM generate_series({have + 1}, {n}) i")
    psql('VACUUM ANALYZE idem_record_1')
    psql('CHECKPOINT')


def growth(directory, sizes, seconds, rounds):
    SCRIPTS['grown_replay'] = "\\set i random(1, 100000)\nSELECT (idem_claim('f' || md5((:i)::text))).outcome;"
    SCRIPTS['grown_claim'] = "SELECT (idem_claim('k' || gen_random_uuid())).outcome;"
    result = []
    for n in sizes:
        fill(n)
        r = statistics.median(tps(directory, 'grown_replay', 4, seconds) for _ in range(rounds))
        c = statistics.median(tps(directory, 'grown_claim', 4, seconds, {'PGOPTIONS': '-c synchronous_commit=off'}) for _ in range(rounds))

        def blocks():
            psql('SELECT pg_stat_force_next_flush()')
            return int(psql("SELECT sum(idx_blks_hit + idx_blks_read) FROM pg_statio_user_tables WHERE relname LIKE 'idem_record_%'"))
        pages = per_operation("PERFORM idem_claim('k' || gen_random_uuid());", 2000, blocks)
        result.append((n, r, c, pages))
        print(f'  {n:>12,}  {r:>10.0f}  {c:>10.0f}  {pages:>8.1f}', flush=True)
    return result


def plot(directory, rows, curve):
    with open(os.path.join(directory, 'ratios.dat'), 'w') as f:
        for what, ratio, low, high, goal in rows:
            f.write(f'"{what}" {ratio:.3f} {low:.3f} {high:.3f} {goal if goal else "NaN"}\n')
    with open(os.path.join(directory, 'growth.dat'), 'w') as f:
        for row in curve:
            f.write(' '.join(str(x) for x in row) + '\n')
    commands = f"""
set terminal pngcairo size 1400,900 font ",10"
set output '{directory}/ratios.png'
set title 'ratio to the rival (bars: spread of rounds, crosses: goal)'
set yrange [-1:{len(rows)}]; set logscale x; set grid x; set key off; set lmargin 60
plot '{directory}/ratios.dat' using 2:0:3:4:ytic(1) with xerrorbars pt 7 lw 2, '' using 5:0 with points pt 2 ps 2
"""
    if not rows:
        commands = ''
    if curve:
        commands += f"""
reset; set terminal pngcairo size 900,600; set output '{directory}/growth.png'
set title 'calls per second, 4 clients'; set logscale x; set xlabel 'finished records'; set yrange [0:*]; set grid
plot '{directory}/growth.dat' using 1:2 with linespoints title 'replay', '' using 1:3 with linespoints title 'claim of a new key'
"""
    subprocess.run(['gnuplot'], input=commands, text=True, check=False)


def main():
    p = argparse.ArgumentParser()
    p.add_argument('--seconds', type=float, default=4)
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--clients', type=int, default=4)
    p.add_argument('--sizes', default='100000,1000000,10000000')
    p.add_argument('--out', default='bench-results')
    p.add_argument('--only', default='', help="rows with these words only; 'growth': the growth curve only")
    a = p.parse_args()
    os.makedirs(a.out, exist_ok=True)
    seconds = max(1, round(a.seconds))
    table = []
    missed = 0
    with tempfile.TemporaryDirectory() as d:
        for sync in ('on', 'off'):
            env = {'PGOPTIONS': f'-c synchronous_commit={sync}'}
            print(f'\nsynchronous_commit = {sync}, {a.clients} clients, {a.rounds} rounds of {seconds} s\n')
            print(f"{'':68} {'ours/s':>9} {'rival/s':>9} {'ratio':>7} {'spread':>13}  goal")
            for what, ours, rival, goal, clients, kind in ROWS:
                if a.only and a.only not in what:
                    continue
                x, y, ratio, low, high = compare(d, ours, rival, clients or a.clients, seconds, a.rounds, env)
                if kind == 'cost':
                    ratio, low, high = 1 / ratio, 1 / high, 1 / low
                ok = goal is None or (ratio <= goal if kind == 'cost' else ratio >= goal)
                missed += not ok
                sign = '' if goal is None else (f"<= {goal}" if kind == 'cost' else f">= {goal}") + ('' if ok else '  MISSED')
                print(f'{what:68} {x:9.0f} {y:9.0f} {ratio:7.2f} {low:6.2f}-{high:5.2f}  {sign}', flush=True)
                if sync == 'on':
                    table.append((what, ratio, low, high, goal))
        if not a.only:
            print('\nhot key, replay: 64 sessions against one per core')
            many = statistics.median(tps(d, 'hot', 64, seconds) for _ in range(a.rounds))
            few = statistics.median(tps(d, 'hot', os.cpu_count(), seconds) for _ in range(a.rounds))
            print(f'  {many:.0f}/s against {few:.0f}/s: {many / few:.2f}  (>= 1: no loss)')
            print('\nWAL bytes per operation')
            sizes = {what: wal(sql) for what, sql in WAL_ROWS}
            for what, size in sizes.items():
                print(f'  {what:45} {size:8.0f}')
            print(f"  idem_execute / INSERT of the finished row: {sizes['idem_execute (handler without writes)'] / sizes['INSERT of the finished row']:.2f}  (goal <= 1.3)")
        curve = []
        if a.sizes and a.only in ('', 'growth'):
            print('\ngrowth: finished records, replays/s, new claims/s (synchronous_commit off), index pages per claim')
            curve = growth(d, [int(s) for s in a.sizes.split(',')], seconds, a.rounds)
            if len(curve) > 1:
                print(f'  cost of a new claim at {curve[-1][0]:,} against {curve[0][0]:,}: {curve[0][2] / curve[-1][2]:.2f}  (goal <= 1.15 at 10^7 against 10^5)')
        plot(a.out, table, curve)
    print(f'\n{missed} goals missed; data and plots in {a.out}')


main()
