"""Checks the logs and the tables of a round.  Knows the documentation, not the code."""

import bisect
import collections
import json
import time

import model
import plan

MARGIN = 0.002          # between the clocks of client and server
MOST_SHOWN = 5          # violations printed per rule
TOKEN_CALLS = ('complete', 'fail', 'renew', 'release', 'checkpoint')
OPERATOR_CALLS = ('retry', 'retry_many', 'resolve', 'revoke', 'forget')

RULES = collections.OrderedDict([
    ('effects', 'every success has exactly its effect, no effect without success'),
    ('twice', 'at most one success per generation of a key'),
    ('kept', 'a committed success is replayed unchanged'),
    ('tokens', 'no superseded token is accepted'),
    ('attempts', 'attempts only grow within a generation'),
    ('exclusion', 'nobody writes a key while another transaction has it'),
    ('snapshot', 'no claim in REPEATABLE READ is answered from behind its snapshot'),
    ('order', 'some order of the committed calls explains every answer'),
    ('undecided', 'searches that were too wide: less than 1 %'),
    ('durable', 'answered commits survive, what was rolled back does not'),
    ('audit', 'every operator call has its row of audit'),
    ('documented', 'calls end with documented SQLSTATEs, in time'),
    ('idem_check', 'idem_check() is empty, also after crashes'),
    ('server log', 'no PANIC, TRAP or unexpected SQLSTATE'),
    ('clients', 'clients and server work to the end'),
    ('enough', 'enough happened'),
])

ALWAYS = {'57014', '40P01', 'lost'}
SQLSTATES = dict(
    claim={'22023'}, complete={'ID001', 'ID002'}, fail={'ID001', 'ID002'}, release={'ID001', 'ID002'}, checkpoint={'ID001', 'ID002'},
    renew=set(), once={'ID003', '22023'}, once_many={'ID003', '22023'}, complete_many={'ID001', 'ID002'}, claim_many=set(),
    retry={'ID002', 'ID003'}, resolve={'ID002', 'ID003'}, revoke={'ID002', 'ID003'}, forget={'ID002', 'ID003'})
SNAPSHOT_CALLS = ('claim', 'execute', 'once', 'claim_many', 'once_many')
LOGGED = {'ID001', 'ID002', 'ID003', '22023', '40001', '40P01', '57014', '57000', '57P01', '57P02', '57P03', '08006', '08003', '08P01', '00000', '01000'}


class Totals:
    def __init__(self, began):
        self.began = began
        self.bad = collections.OrderedDict((rule, []) for rule in RULES)
        self.when = {}
        self.counts = collections.Counter()
        self.failed = 0

    def violation(self, rule, message):
        self.bad[rule].append(message)
        if rule not in self.when:
            self.when[rule] = time.time() - self.began
            print('violation of "%s": %s' % (rule, message), flush=True)
        self.failed += 1

    def line(self):
        c = self.counts
        return '%d operations in %d transactions on %d keys, %d undecided, %d violations; checked in %.1f s' % (
            c['operations'], c['transactions'], c['keys'], c['undecided'], self.failed, c['checking'])

    def server_log(self, path):
        for line in open(path, errors='replace'):
            words = line.split()
            if 'PANIC:' in line or 'TRAP:' in line or 'passed over an error' in line:
                self.violation('server log', line.strip())
            elif len(words) > 5 and words[5] in ('ERROR:', 'FATAL:') and words[4] not in LOGGED:
                self.violation('server log', line.strip())
            elif 'terminated by signal' in line and 'signal 9' not in line:
                self.violation('server log', line.strip())

    def enough(self, mayhem, seconds):
        c, m = self.counts, mayhem.counts
        wanted = [('operations', c['operations'], 150), ('transactions', c['transactions'], 60), ('keys', c['keys'], 10),
                  ('claimed', c['claim claimed'], 10), ('replays', c['claim succeeded'], 2), ('executed', c['execute executed'], 1),
                  ('take-overs', c['previous lease_expired'], 0.5), ('retries', c['previous retryable_failed'], 0.5),
                  ('refused tokens', c['complete ID001'] + c['fail ID001'] + c['release ID001'], 0.5), ('unknown', c['claim unknown'], 0.1),
                  ('lost answers', c['lost'], 0.2), ('crashes and restarts', m['kills'] + m['immediate'] + m['fast'], 1 / 30),
                  ('terminated', m['terminated'], 0.2), ('cancelled', m['cancelled'], 0.2), ('purged slices', c['purged'], 1 / 30),
                  ('lapses stored', c['lapses'], 0.05), ('forgotten', c['forget ok'], 0.1), ('retried', c['retry ok'], 0.1),
                  ('resolved', c['resolve ok'], 0.02), ('revoked', c['revoke ok'], 0.1)]
        for name, found, per_second in wanted:
            least = int(per_second * seconds)
            if found < least:
                self.violation('enough', '%s: %d, at least %d expected' % (name, found, least))

    def report(self, options, mayhem, seconds):
        c, m = self.counts, mayhem.counts
        if not options.broken:
            self.enough(mayhem, seconds)
        if c['keys'] and c['undecided'] >= 0.01 * c['keys']:
            self.violation('undecided', '%d of %d keys' % (c['undecided'], c['keys']))
        print('seed %s, %.0f s, %d operations (%.0f per second), %d transactions, %d keys' % (
            options.seed, seconds, c['operations'], c['operations'] / seconds, c['transactions'], c['keys']))
        print('%d killed, %d immediate and %d fast restarts, %d terminated, %d cancelled, %d clock changes' % (
            m['kills'], m['immediate'], m['fast'], m['terminated'], m['cancelled'], m['offsets']))
        print('%d answers lost, %d commits in doubt (%d were committed), %d slices purged, %d rotations, %d lapses stored' % (
            c['lost'], c['doubtful'], c['doubtful committed'], c['purged'], c['rotated'], c['lapses']))
        print('answers: ' + ', '.join('%s %d' % item for item in sorted(c.items()) if ' ' in item[0] and item[0] != 'doubtful committed'))
        for rule, bad in self.bad.items():
            print('%s - %s: %s%s' % ('not ok' if bad else 'ok', rule, RULES[rule],
                                     ' (%d, first after %.0f s)' % (len(bad), self.when[rule]) if bad else ''))
            for message in bad[:MOST_SHOWN]:
                print('    ' + message.replace('\n', '\n    '))
        print('%d undecided of %d keys, %d violations' % (c['undecided'], c['keys'], self.failed))
        wrong = sum(1 for bad in self.bad.values() if bad)
        print('%d passed, %d failed' % (len(RULES) - wrong, wrong))
        return 1 if wrong else 0


class Call:
    """A call on one key."""
    __slots__ = ('op', 'key', 'xact', 't0', 't1', 'n0', 'n1', 'error', 'lost', 'row', 'token', 'variant', 'lease', 'due', 'doubt', 'res',
                 'x', 'mode', 'kind', 'code', 'msg', 'after', 'step', 'value', 'reason', 'undone', 'snapshot')

    def __init__(self, entry, key, xact, ext):
        a = entry['a']
        self.op, self.key, self.xact = entry['op'], key, xact
        self.t0, self.t1 = entry['t0'], entry['t1']
        self.lost = entry['e'] == 'lost'
        if self.lost:
            self.t1 = entry['back']
        self.n0, self.n1 = ext(self.t0, self.t1)
        self.error = entry['e']
        self.row = entry['r'][0] if entry['r'] else None
        for name in ('token', 'lease', 'res', 'mode', 'kind', 'code', 'msg', 'after', 'step', 'value', 'reason'):
            setattr(self, name, a.get(name))
        if self.res is not None:
            self.res = tuple(self.res)
        self.x = a.get('effect')
        self.variant = a.get('variant', 0) if plan.has_request(key) else 0
        self.due = self.doubt = self.undone = False

    def part(self, op, row, **more):
        """One key's part of a batch."""
        self.op, self.row = op, row
        for name, value in more.items():
            setattr(self, name, value)
        return self

    def writes(self):
        """Did it certainly write the record?  (A claim repeated with its own token did not.)"""
        if self.error or self.row is None:
            return False
        if self.op in ('claim', 'execute'):
            mine = self.op == 'execute' and self.row[8] is not None and self.x in self.row[8]
            return self.row[0] in ('claimed', 'executed') or mine
        if self.op in ('complete', 'once'):
            return self.row[0] == 't'
        if self.op == 'renew':
            return self.row[0] is not None
        return self.op != 'status'

    def may_write(self):
        if self.op == 'status':
            return False
        if self.error:
            return self.lost or self.error in model.NOTHING
        if self.op == 'execute':
            return True             # it guards the key while it looks
        return self.writes() or self.op == 'claim' and self.row[0] in ('unknown', 'failed')

    def show(self, zero):
        args = ' '.join('%s=%s' % (name, getattr(self, name)) for name in (
            'token', 'variant', 'lease', 'res', 'x', 'mode', 'kind', 'after', 'reason') if getattr(self, name))
        answer = self.error or '|'.join('~' if v is None else v for v in self.row or ['-'])
        return '[%.4f %.4f] %s %s(%s) -> %s%s%s' % (self.t0 - zero, self.t1 - zero, self.xact.name, self.op, args, answer,
                                                   ' undone' if self.undone else '', ' (doubt)' if self.doubt else '')


class Xact:
    """A transaction: its calls, what became of it and when (c0 COMMIT sent, c1 answered)."""

    def __init__(self, name, iso):
        self.name, self.iso = name, iso
        self.calls = []             # Call, 'save', 'undo'
        self.effects = []           # [key, x, undone]
        self.fate = 'aborted'
        self.c0 = self.c1 = self.alive = 0
        self.snapshot = None        # when the first statement was sent
        self.fixed = None           # when it was answered: the snapshot is older
        self.blind = None           # since when it may have written keys that no log names
        self.auto = False

    def show(self, zero):
        return '%s %s [%.4f %.4f]' % (self.name, self.fate, self.c0 - zero, self.c1 - zero)


class Round:
    def __init__(self, number, paths, mayhem, totals):
        self.number, self.paths, self.mayhem, self.totals = number, paths, mayhem, totals
        self.keys = collections.defaultdict(list)       # calls by key
        self.holds = collections.defaultdict(list)      # (from, until, xact) by key
        self.anywhere = []                              # the same for calls on unknown keys
        self.xacts = []
        self.query = mayhem.query

    def bad(self, rule, message):
        self.totals.violation(rule, 'round %d: %s' % (self.number, message))

    def ext(self, t0, t1):
        """Bounds of the extension's clock between two moments of ours."""
        phases = self.mayhem.offsets
        lo = hi = phases[0][2] if phases else self.mayhem.offset
        for begins, ends, _, new in phases:
            if t0 >= ends:
                lo = new
            if t1 >= begins:
                hi = new
        return t0 + lo - MARGIN, t1 + hi + MARGIN

    # ---- reading ----

    def load(self):
        self.effects = collections.defaultdict(list)
        for key, x, token in self.query('SELECT key, x, token FROM effect'):
            self.effects[x].append((key, token))
        self.markers = {x: status for x, status in self.query('SELECT x, pg_xact_status(xid) FROM marker')}
        self.audit = collections.defaultdict(list)
        for reason, key, action in self.query(
                "SELECT reason, idempotency_key, action FROM idem_audit WHERE reason LIKE '%d.%%' ORDER BY id" % self.number):
            self.audit[reason].append((key, action))
        for path in self.paths:
            xact = None
            for line in open(path):
                entry = json.loads(line)
                if entry['x'] is None:
                    xact = Xact(entry['c'], entry['i'])
                    xact.auto = True
                    self.take(xact, entry)
                    self.end(xact, entry)
                    continue
                if xact is None or xact.auto or xact.name != entry['x']:
                    xact = Xact(entry['x'], entry['i'])
                self.take(xact, entry)
                if entry['op'] in ('commit', 'rollback') or entry['e'] == 'lost':
                    self.end(xact, entry)
                    xact = None

    def take(self, xact, entry):
        op, count = entry['op'], self.totals.counts
        if op not in ('begin', 'savepoint', 'undo', 'effect', 'commit', 'rollback'):
            count['operations'] += 1
        if entry['e'] is None and op not in ('commit', 'rollback'):
            xact.alive = entry['t0']    # it may have been killed before the answer was read
        if entry['e'] == 'lost':
            count['lost'] += 1
        self.count(entry)
        self.documented(xact, entry)
        if xact.snapshot is None and op not in ('begin', 'savepoint'):
            xact.snapshot, xact.fixed = entry['t0'], entry['t1']
        if xact.blind is None and (op in ('reap', 'retry_many') or op == 'claim_due' and entry['e']):
            xact.blind = entry['t0']
        if op == 'savepoint' and not entry['e']:
            xact.calls.append('save')
            xact.effects.append('save')
        elif op == 'undo' and not entry['e']:
            self.undo(xact)
        elif op == 'effect' and not entry['e']:
            xact.effects.append([entry['k'], entry['a']['effect'], False])
        if op in ('begin', 'savepoint', 'undo', 'effect', 'commit', 'rollback'):
            return
        for call in self.calls_of(xact, entry):
            call.snapshot = xact.snapshot
            xact.calls.append(call)
            if op == 'execute' and not entry['e'] and call.writes() and call.row[0] == 'executed':
                xact.effects.append([call.key, call.x, False])

    def undo(self, xact):
        for calls in (xact.calls, xact.effects):
            start = len(calls) - 1 - calls[::-1].index('save')
            for item in calls[start:]:
                if isinstance(item, Call):
                    item.undone = True
                elif isinstance(item, list):
                    item[2] = True
        xact.calls.append('undo')

    def calls_of(self, xact, entry):
        """The calls on single keys that an entry of the log stands for."""
        op, rows = entry['op'], entry['r']
        make = lambda key: Call(entry, key, xact, self.ext)
        if op == 'claim_many':
            return [make(row[0]).part('claim', row[1:]) for row in rows or ()]
        if op == 'claim_due':
            return [make(row[0]).part('claim', row[1:], due=True) for row in rows or () if plan.round_of(row[0]) == self.number]
        if op == 'once_many':
            return [make(row[0]).part('once', row[1:]) for row in rows or ()]
        if op == 'complete_many':
            given = {key: (token, tuple(res)) for key, token, res in zip(entry['k'], entry['a']['token'], entry['a']['res'])}
            return [make(row[0]).part('complete', row[1:], token=given[row[0]][0], res=given[row[0]][1]) for row in rows or ()]
        if op == 'retry_many':
            return [make(key).part('retry', ['retryable_failed']) for key, _ in self.audit.get(entry['a']['reason'], ())] if rows is not None else []
        if op == 'reap' or plan.round_of(entry['k']) != self.number:
            return []
        return [make(entry['k'])]

    def count(self, entry):
        op, rows, count = entry['op'], entry['r'], self.totals.counts
        if entry['e']:
            count['%s %s' % (op, entry['e'])] += 1
        elif op == 'reap':
            count['lapses'] += int(rows[0][0]) + int(rows[0][1])
            count['purged'] += int(rows[0][3])
            count['rotated'] += int(rows[0][4])
        elif op in ('claim', 'execute'):
            count['%s %s' % (op, rows[0][0])] += 1
            if rows[0][9]:
                count['previous ' + rows[0][9]] += 1
        elif op in ('claim_many', 'claim_due'):
            for row in rows:
                count['%s %s' % (op, row[1])] += 1
        elif op in ('complete', 'once'):
            count['%s %s' % (op, rows[0][0])] += 1
        elif op in OPERATOR_CALLS + TOKEN_CALLS:
            count[op + ' ok'] += 1

    def documented(self, xact, entry):
        op, error = entry['op'], entry['e']
        if error is None or error in ALWAYS:
            if error != 'lost' and entry['t1'] - entry['t0'] > 15:
                self.bad('documented', '%s of %s took %.1f s' % (op, entry['k'], entry['t1'] - entry['t0']))
            return
        good = error in SQLSTATES.get(op, ())
        if op == 'execute' and error == entry['a']['mode'] and plan.MODES[error] == 'pass':
            good = True
        if error == '40001':
            good = good or xact.iso == 'SR' or xact.iso == 'RR' and op in SNAPSHOT_CALLS
        if error == '22023' and op == 'claim' and not entry['a'].get('token'):
            good = False
        if not good:
            self.bad('documented', '%s in %s of key %s ended with %s: %s' % (op, xact.iso, entry['k'], error, entry['a']))

    def end(self, xact, entry):
        """The fate of the transaction."""
        count = self.totals.counts
        count['transactions'] += 1
        lost = entry['e'] == 'lost'
        xact.c0, xact.c1 = entry['t0'], entry['t1']
        if lost:
            xact.c1 = entry['back']
        if xact.auto:
            xact.fate = 'committed' if entry['e'] is None else 'doubtful' if lost else 'aborted'
            self.auto_in_doubt(xact)
        elif entry['op'] == 'commit':
            there = self.markers.get(xact.name)
            if entry['e'] is None:
                xact.fate = 'committed'
                if there != 'committed':
                    self.bad('durable', 'commit of %s was answered, its marker is gone' % xact.name)
            elif lost:
                count['doubtful'] += 1
                count['doubtful committed'] += there is not None
                xact.fate = 'committed' if there else 'aborted'
            if not lost and entry['e'] and there:
                self.bad('durable', 'commit of %s ended with %s, its marker is there' % (xact.name, entry['e']))
        elif self.markers.get(xact.name):
            self.bad('durable', '%s was rolled back, its marker is there' % xact.name)
        self.xacts.append(xact)
        for call in xact.calls:
            if isinstance(call, Call):
                self.keys[call.key].append(call)
                if call.may_write():
                    self.holds[call.key].append((call.t0, max(call.t1, xact.c1), xact))
        if xact.blind is not None and (xact.auto or xact.fate != 'committed'):
            self.anywhere.append((xact.blind, xact.c1, xact))

    def auto_in_doubt(self, xact):
        """Some lost calls left a trace."""
        if xact.fate != 'doubtful' or not xact.calls:
            return
        call = xact.calls[0]
        trace = call.reason in self.audit if call.op in OPERATOR_CALLS else call.x in self.effects if call.op == 'execute' else None
        if call.op == 'execute' and plan.MODES[call.mode] != 'ok' and not trace:
            return
        if trace is not None:
            xact.fate = 'committed' if trace else 'aborted'
            if trace and call.op == 'execute':
                xact.effects.append([call.key, call.x, False])

    # ---- rules ----

    def check(self):
        began = time.time()
        self.load()
        for complaint in self.mayhem.complaints:
            self.bad('idem_check', complaint)
        self.mayhem.complaints = []
        for row in self.query('SELECT * FROM idem_check()'):
            self.bad('idem_check', ' | '.join(str(v) for v in row))
        self.mark_doubt()
        self.check_effects()
        self.check_audit()
        final = self.final_calls()
        for key, calls in self.keys.items():
            calls.sort(key=lambda call: call.t0)
            self.check_key(key, calls)
            self.check_order(key, calls, final)
        self.totals.counts['keys'] += len(self.keys)
        self.totals.counts['checking'] += time.time() - began

    def mark_doubt(self):
        """May the call have met the uncommitted write of another transaction?"""
        self.anywhere.sort(key=lambda hold: hold[0])
        everywhere = [(a, b) for a, b, _ in self.anywhere]
        for key, calls in self.keys.items():
            holds = self.holds[key]
            for call in calls:
                if call.row is None or call.row[0] != 'in_progress':
                    continue
                call.doubt = any(a <= call.t1 and b >= call.t0 and x is not call.xact for a, b, x in holds) or \
                    any(a <= call.t1 and b >= call.t0 for a, b in everywhere)

    def check_effects(self):
        expected = {}
        for xact in self.xacts:
            succeeded = collections.Counter()
            for call in xact.calls:
                if isinstance(call, Call) and call.writes() and not call.undone:
                    if call.op == 'complete' or call.op == 'once' or call.op == 'execute' and call.row[0] == 'executed':
                        succeeded[call.key] += 1
                        if call.op == 'complete' and xact.fate == 'committed' and call.res[0] not in self.effects:
                            self.bad('effects', 'success without effect: %s' % call.show(self.totals.began))
                if isinstance(call, Call) and call.lost and call.op == 'execute' and xact.fate == 'committed':
                    succeeded[call.key] += 1
            for effect in xact.effects:
                if effect == 'save':
                    continue
                key, x, undone = effect
                stays = xact.fate == 'committed' and not undone
                if stays:
                    expected[x] = key
                    if not succeeded[key]:
                        self.bad('effects', 'committed effect %s of %s without success in %s' % (x, key, xact.name))
                found = len(self.effects.get(x, ()))
                if found != (1 if stays else 0) and xact.fate != 'doubtful':
                    self.bad('effects', 'effect %s of %s stands %d times, %s' % (x, key, found, xact.show(self.totals.began)))
        for x in self.effects:
            if x not in expected:
                self.bad('effects', 'effect %s of %s without a committed success' % (x, self.effects[x][0][0]))

    def check_audit(self):
        seen = set()
        for xact in self.xacts:
            for call in xact.calls:
                if not isinstance(call, Call) or call.reason is None or call.undone:
                    continue
                rows = [key for key, _ in self.audit.get(call.reason, ()) if key == call.key]
                stands = xact.fate == 'committed' and not (call.error and not call.lost)
                if stands:
                    seen.add(call.reason)
                if len(rows) != (1 if stands else 0):
                    self.bad('audit', '%d rows for %s, %s' % (len(rows), call.show(self.totals.began), xact.fate))
        for reason in self.audit:
            if reason not in seen:
                self.bad('audit', 'row without a committed call: %s %s' % (reason, self.audit[reason]))

    def final_calls(self):
        """What the tables say at the end, as if somebody had asked for each key."""
        now = time.time()
        out = {}
        rows = self.query("SELECT idempotency_key, status, attempts, owner_token, extract(epoch FROM lease_until), extract(epoch FROM retry_at),"
                          " result_json->>'x', encode(result_body, 'escape'), error_code, error_message, previous, progress::text FROM idem_record")
        after = time.time()
        rows = {row[0]: row[1:] for row in rows}
        xact = Xact('tables', 'RC')
        for key in self.keys:
            entry = dict(op='status', t0=now, t1=after, e=None, a={}, r=[rows.get(key, [None] * 11)])
            out[key] = Call(entry, key, xact, self.ext)
        return out

    def stands(self, call):
        return call.xact.fate == 'committed' and not call.undone

    def check_key(self, key, calls):
        show = lambda *items: '; '.join(item.show(self.totals.began) for item in items)
        forgets = [c for c in calls if c.op == 'forget' and (not c.error or c.lost)]
        forgotten = lambda a, b: any(f.t0 < b and max(f.t1, f.xact.c1) > a for f in forgets)
        wins = sorted((c for c in calls if self.stands(c) and c.writes() and
                       (c.op == 'once' or c.op == 'complete' or c.op == 'execute' and c.row[0] == 'executed')), key=lambda c: c.xact.c0)
        for a, b in zip(wins, wins[1:]):
            if b.n1 - a.n0 < plan.RETENTION and not forgotten(a.t0, b.xact.c1):
                self.bad('twice', 'key %s: %s' % (key, show(a, a.xact, b, b.xact)))
        starts = [c.t0 for c in calls]
        for a in wins:
            for c in calls[bisect.bisect_right(starts, a.xact.c1):]:
                if c.n1 - a.n0 >= plan.RETENTION or forgotten(a.t0, c.t1):
                    break
                if c.error or c.op not in ('claim', 'execute', 'once') or c.variant != a.variant and c.row[0] == 'conflict':
                    continue
                x = a.res[0] if a.op == 'complete' else a.x
                if c.op == 'once' and c.row[0] == 'f' or c.row[0] == 'conflict' and c.variant != 0 or c.row[0] == 'succeeded' and c.row[5] == x:
                    continue
                if c.row[0] == 'conflict' and a.variant == 0 and a.op == 'complete':
                    continue        # the claim was one of the other request; the search knows
                self.bad('kept', 'key %s: %s' % (key, show(a, a.xact, c)))
                break
        self.check_snapshots(key, calls, wins, show)
        self.check_tokens(key, calls, show, forgotten)
        self.check_exclusion(key, calls, show)

    def check_snapshots(self, key, calls, wins, show):
        for c in calls:
            if c.xact.iso == 'RC' or c.xact.auto or c.error or c.op not in ('claim', 'execute') or c.row[0] != 'succeeded':
                continue
            for a in wins:
                if a.op != 'once' and a.xact is not c.xact and a.xact.c0 > c.xact.fixed and c.row[5] == (a.res[0] if a.op == 'complete' else a.x):
                    self.bad('snapshot', 'key %s: %s; %s' % (key, show(a, a.xact), show(c, c.xact)))

    def check_tokens(self, key, calls, show, forgotten):
        claims = [c for c in calls if c.op == 'claim' and not c.error and c.row[0] == 'claimed']
        given = {}
        for c in claims:
            given.setdefault(c.row[1], []).append(c)
        enders = [c for c in calls if self.stands(c) and c.writes() and
                  (c.op in ('fail', 'release', 'complete', 'revoke', 'retry', 'resolve', 'forget', 'once') or c.op == 'execute' or
                   c.op == 'claim' and c.token is None)]
        for use in calls:
            if use.op not in TOKEN_CALLS or not use.writes():
                continue
            own = [c for c in given.get(use.token, ()) if c.t0 < use.t0]
            if not own:
                self.bad('tokens', 'key %s: token that was never given: %s' % (key, show(use)))
                continue
            last = max(c.t1 for c in own)
            for e in enders:
                if e.t0 > last and e.xact.c1 < use.t0 and not (e.op == 'claim' and e.row[1] == use.token):
                    self.bad('tokens', 'key %s: %s; %s; %s' % (key, show(own[-1]), show(e), show(use)))
                    break
        # attempts
        loose = [c for c in calls if c.op == 'release' and (not c.error or c.lost) or c.lost and c.op in ('claim', 'forget')]
        firm = sorted((c for c in claims if self.stands(c)), key=lambda c: c.t0)
        for a, b in zip(firm, firm[1:]):
            if a.row[1] == b.row[1] or b.t0 < a.xact.c1 or b.n1 - a.n0 >= plan.RETENTION or forgotten(a.t0, b.t1):
                continue
            if any(c.t0 < b.t1 and max(c.t1, c.xact.c1) > a.t0 for c in loose):
                continue
            if int(b.row[2]) <= int(a.row[2]):
                self.bad('attempts', 'key %s: %s' % (key, show(a, b)))

    def check_exclusion(self, key, calls, show):
        writes = [c for c in calls if c.writes() and not (c.op == 'claim' and c.token)]
        for i, held in enumerate(writes):
            if held.xact.auto or held.undone:
                continue
            until = held.xact.c0 if held.xact.fate == 'committed' else held.xact.alive
            for c in writes[i + 1:]:
                if c.t0 > until:
                    break
                if c.t0 > held.t1 and c.t1 < until and c.xact is not held.xact:
                    self.bad('exclusion', 'key %s: %s; %s' % (key, show(held, held.xact), show(c)))

    # ---- order ----

    def nodes(self, calls):
        out = []
        for xact in {id(c.xact): c.xact for c in calls}.values():
            out += self.nodes_of(xact, calls[0].key)
        return out

    def nodes_of(self, xact, key):
        mine = [c for c in xact.calls if not isinstance(c, Call) or c.key == key]
        if xact.auto:
            call = mine[0]
            if call.lost and xact.fate == 'aborted':
                return []
            return [model.Node([call], call.t0, call.t1, xact.fate != 'aborted', optional=xact.fate == 'doubtful')]
        out, block, first = [], None, None
        for item in mine:
            if item == 'save':
                if block:
                    block.append(item)
            elif item == 'undo':
                if block and 'save' in block:
                    block.append(item)
                elif block:
                    out.append(model.Node(block, first.t0, first.t1, False))
                    block = None
            elif item.lost:
                continue
            elif block:
                block.append(item)
            elif item.writes():
                block, first = [item], item
            else:
                a = item.snapshot if item.op == 'status' and xact.iso != 'RC' else item.t0
                out.append(model.Node([item], a, item.t1, False))
        if block and xact.fate == 'committed':
            out.append(model.Node(block, xact.c0, xact.c1, True))
        elif block:
            out.append(model.Node(block, first.t0, first.t1, False))
        return out

    def check_order(self, key, calls, final):
        nodes = self.nodes(calls)
        end = final[key]
        nodes.append(model.Node([end], end.t0, end.t1, False))
        try:
            found = model.search(nodes, plan.policy_of(key))
        except model.TooWide:
            self.totals.counts['undecided'] += 1
            return
        if found is None:
            return
        node, world = found
        zero = self.totals.began
        lines = ['key %s: nothing explains %s' % (key, '; '.join(c if isinstance(c, str) else c.show(zero) for c in node.items))]
        lines += ['  stands as %s' % (state,) for state in list({state for state, _ in world})[:3]]
        near = sorted((n for n in nodes if n.a <= node.b), key=lambda n: n.a)[-14:]
        for n in near:
            lines.append('  {%.4f %.4f}%s %s' % (n.a - zero, n.b - zero, ' optional' if n.optional else '' if n.stays else ' no effect',
                                                '; '.join(c if isinstance(c, str) else c.show(zero) for c in n.items)))
        self.bad('order', '\n'.join(lines))
