"""The documented state machine, and a search for an order that explains the answers.

Knows README and docs only.  A state is None (no record) or a State.  step() tells
what a call with this answer may make of a state: no successor = the answer is
not allowed there.  Times are those of the extension's clock: a call happened somewhere
between n0 and n1, a lease ends or a retry is due somewhere between lo and hi.
"""

from collections import namedtuple

import plan

# st: P processing, R retryable_failed, U unknown, S succeeded, F failed
# tok: the holder's token, None = one that nobody knows; of a success: that completed it
# lo, hi: end of the lease, due time; for S and F lo = earliest completion
# base: attempts that do not count; past: buried tokens; prog: checkpoints
State = namedtuple('State', 'st att tok lo hi prev base res code msg prog past req')

EXACT = 0.000002


def over(s, o):
    return o.n1 >= s.lo


def running(s, o):
    return o.n0 < s.hi


def limits(s, policy):
    return s.att - s.base >= policy['max']


def standings(s, policy, o):
    """What the record may stand as at the time of the call."""
    if s is None:
        return ('NONE',)
    if s.st == 'P':
        out = ['HELD'] if running(s, o) else []
        if over(s, o):
            out.append('UNKNOWN' if policy['expiry'] == 'unknown' else 'EXHAUSTED' if limits(s, policy) else 'LAPSED')
        return out
    if s.st == 'R':
        if limits(s, policy):
            return ('EXHAUSTED',)
        return (['WAITING'] if running(s, o) else []) + (['DUE'] if over(s, o) else [])
    return ({'U': 'UNKNOWN', 'S': 'SUCCEEDED', 'F': 'FAILED'}[s.st],)


def bury(s):
    return s.past | {s.tok} if s.tok else s.past


def settled(s, standing):
    """Stores what time has decided."""
    if standing == 'UNKNOWN':
        return s if s.st == 'U' else s._replace(st='U', tok=None, past=bury(s), lo=0, hi=0)
    if standing == 'EXHAUSTED':
        return s._replace(st='F', hi=0, code='exhausted', msg=None)
    return s


def before(s, policy, o):
    """The state, and what a reaper may have made of it in the meantime."""
    if s is None:
        return (s,)
    out = [s]
    if s.st in 'PR':
        for standing in standings(s, policy, o):
            if standing in ('UNKNOWN', 'EXHAUSTED'):
                out.append(settled(s, standing))
    for t in tuple(out):
        if t.st in 'SF' and o.n1 - t.lo >= plan.RETENTION:
            out.append(None)
            break
    return out


def first(o, token, lo, hi):
    return State('P', 1, token, lo, hi, 'none', 0, None, None, None, None, frozenset(), o.variant)


def following(s, standing, token, lo, hi):
    prev = 'lease_expired' if standing == 'LAPSED' else 'retried' if s.base > 0 and s.att == s.base else 'retryable_failed'
    return s._replace(st='P', att=s.att + 1, tok=token, lo=lo, hi=hi, prev=prev, past=bury(s))


def succeeded(s, o, token, res):
    return s._replace(st='S', tok=token, lo=o.n0, hi=0, res=res, code=None, msg=None, past=frozenset())


def failed(s, policy, o, kind, code, msg, retry):
    """After a failure; retry = (lo, hi) of the due time."""
    s = s._replace(code=code, msg=msg)
    if kind == 'permanent':
        return s._replace(st='F', lo=o.n0, hi=0)
    if kind == 'unknown':
        return s._replace(st='U', tok=None, past=bury(s), lo=0, hi=0)
    if limits(s, policy):
        return s._replace(st='F', lo=o.n0, hi=0, code='exhausted', msg=None)
    return s._replace(st='R', tok=None, past=bury(s), lo=retry[0], hi=retry[1])


def number(value):
    return None if value is None else float(value)


def merged(progress, step, value):
    return tuple(sorted(dict(progress or (), **{step: value}).items()))


def progress_of(shown):
    import json
    return None if shown is None else tuple(sorted(json.loads(shown).items()))


def told(s, code, msg):
    """Are these the stored error's code and message?"""
    return code == s.code and (code == 'exhausted' or msg == s.msg)


def within(value, lo, hi):
    return lo - EXACT <= value <= hi + EXACT


# ---- claims ----

def answer_claim(s, policy, o, r, standing):
    """Successors for the row r of a claim's answer that does not execute."""
    outcome, token, att, lease, _, res, body, code, msg, prev, prog = r
    if s is not None and o.variant != s.req and not o.due:
        return [s] if outcome == 'conflict' else []
    att = None if att is None else int(att)
    if outcome == 'claimed':
        end = number(lease)
        if standing == 'NONE' and not o.due:
            t = first(o, token, end, end)
        elif standing in ('LAPSED', 'DUE'):
            t = following(s, standing, token, end, end)
            if token in t.past:
                return []
        elif standing == 'HELD' and o.token is not None and o.token == s.tok:
            same = within(end, s.lo, s.hi) and att == s.att and prev == s.prev and token == s.tok
            return [s] if same and progress_of(prog) == s.prog and told(s, code, msg) else []
        else:
            return []
        length = o.lease or policy['lease']
        good = (att == t.att and prev == t.prev and progress_of(prog) == t.prog and told(t, code, msg) and
                (o.token is None or o.token == token) and within(end - length, o.n0, o.n1))
        return [t] if good else []
    if outcome == 'in_progress':
        held = standing == 'HELD' and (o.token is None or o.token != s.tok)
        return [s] if held and att == s.att and within(number(lease), s.lo, s.hi) else []
    if outcome == 'succeeded':
        return [s] if standing == 'SUCCEEDED' and (res, body) == s.res and att == s.att else []
    if outcome == 'retry_later':
        return [s] if standing == 'WAITING' and att == s.att and told(s, code, msg) else []
    if outcome == 'unknown' and standing == 'UNKNOWN' or outcome == 'failed' and standing in ('FAILED', 'EXHAUSTED'):
        t = settled(s, standing)
        return [t] if att == t.att and told(t, code, msg) else []
    return []


def refused_token(s, o, standing):
    return standing in ('LAPSED', 'DUE') and o.token is not None and (o.token == s.tok or o.token in s.past)


def act_claim(s, policy, o):
    out = []
    if o.row[0] == 'in_progress' and o.doubt:
        return [s]
    for standing in standings(s, policy, o):
        out += answer_claim(s, policy, o, o.row, standing)
    return out


def lost_claim(s, policy, o):
    """The answer never came; a token of ours is known all the same."""
    out = []
    if s is not None and o.variant != s.req:
        return out
    length = o.lease or policy['lease']
    for standing in standings(s, policy, o):
        if standing == 'NONE':
            out.append(first(o, o.token, o.n0 + length, o.n1 + length))
        elif standing in ('LAPSED', 'DUE') and not refused_token(s, o, standing):
            out.append(following(s, standing, o.token, o.n0 + length, o.n1 + length))
        elif standing in ('UNKNOWN', 'EXHAUSTED'):
            out.append(settled(s, standing))
    return out


# ---- executions ----

def begun(s, o, standing):
    """The attempt that the handler runs in, or None."""
    if s is not None and o.variant != s.req:
        return None
    if standing == 'NONE':
        return first(o, None, 0, 0)
    if standing in ('LAPSED', 'DUE'):
        return following(s, standing, None, 0, 0)
    return None


def act_execute(s, policy, o):
    outcome, _, att, _, after, res, _, code, msg, _, _ = o.row
    out = []
    if outcome == 'in_progress' and o.doubt:
        return [s]
    mine = msg is not None and o.x in msg
    kind = plan.MODES[o.mode]
    for standing in standings(s, policy, o):
        t = begun(s, o, standing)
        if outcome == 'executed':
            if t and kind == 'ok' and int(att) == t.att and res == o.x:
                out.append(succeeded(t, o, None, (o.x, None)))
        elif mine:
            if t is None or int(att) != t.att:
                continue
            delay = number(after) or 0
            u = failed(t, policy, o, kind, code, msg, (o.n0 + delay, o.n1 + delay))
            word = {'R': 'retry_later', 'U': 'unknown', 'F': 'failed'}[u.st]
            if word == outcome and told(u, code, msg) and (u.code == 'exhausted' or code == o.mode) and delay <= policy['cap'] + EXACT:
                out.append(u)
        else:
            out += answer_claim(s, policy, o, o.row, standing)
    return out


def lost_execute(s, policy, o):
    out = []
    kind = plan.MODES[o.mode]
    for standing in standings(s, policy, o):
        t = begun(s, o, standing)
        if t and kind == 'ok':
            out.append(succeeded(t, o, None, (o.x, None)))
        elif t and kind != 'pass':
            out.append(failed(t, policy, o, kind, o.mode, 'x' + o.x + 'x', (o.n0, o.n1 + policy['cap'])))
        elif standing in ('UNKNOWN', 'EXHAUSTED') and s.req == o.variant:
            out.append(settled(s, standing))
    return out


def act_once(s, policy, o):
    out = []
    for standing in standings(s, policy, o):
        if o.error == '22023':
            if s is not None and o.variant != s.req:
                out.append(s)
            continue
        if s is not None and o.variant != s.req:
            continue
        if o.error == 'ID003':
            if standing in ('HELD', 'WAITING', 'UNKNOWN', 'FAILED', 'EXHAUSTED'):
                out.append(s)
        elif o.row[0] == 't':
            t = begun(s, o, standing)
            if t:
                out.append(succeeded(t, o, None, (None, None)))
        elif standing == 'SUCCEEDED':
            out.append(s)
    return out


def lost_once(s, policy, o):
    return [succeeded(t, o, None, (None, None)) for t in (begun(s, o, standing) for standing in standings(s, policy, o)) if t]


# ---- the holder ----

def holds(s, o):
    return s is not None and s.st == 'P' and s.tok is not None and s.tok == o.token


def completed_before(s, o):
    return s is not None and s.st == 'S' and s.tok is not None and s.tok == o.token and s.res == o.res


def refused(s, o):
    """ID001 or ID002 of a call whose token does not hold the key."""
    return [s] if o.error == ('ID002' if s is None else 'ID001') else []


def act_complete(s, policy, o):
    if o.error:
        return [] if holds(s, o) or completed_before(s, o) else refused(s, o)
    if o.row[0] == 't':
        return [succeeded(s, o, o.token, o.res)] if holds(s, o) else []
    return [s] if completed_before(s, o) else []


def act_fail(s, policy, o):
    if o.error:
        return [] if holds(s, o) else refused(s, o)
    if not holds(s, o):
        return []
    status, att, at = o.row
    at = number(at)
    t = failed(s, policy, o, o.kind, o.code, o.msg, (at or 0, at or 0))
    if {'R': 'retryable_failed', 'U': 'unknown', 'F': 'failed'}[t.st] != status or int(att) != s.att:
        return []
    if t.st == 'R' and not (within(at, o.n0 + o.after, o.n1 + o.after) if o.after is not None else within(at, o.n0, o.n1 + policy['cap'])):
        return []
    return [t]


def lost_fail(s, policy, o):
    lo, hi = (o.after, o.after) if o.after is not None else (0, policy['cap'])
    return [failed(s, policy, o, o.kind, o.code, o.msg, (o.n0 + lo, o.n1 + hi))] if holds(s, o) else []


def act_renew(s, policy, o):
    if o.row[0] is None:
        return [s] if not holds(s, o) or over(s, o) else []
    end = number(o.row[0])
    if not holds(s, o) or not running(s, o):
        return []
    if o.lease:
        return [s._replace(lo=end, hi=end)] if within(end - o.lease, o.n0, o.n1) else []
    good = within(end, max(s.lo, o.n0 + policy['lease']), max(s.hi, o.n1 + policy['lease']))
    return [s._replace(lo=end, hi=end)] if good else []


def lost_renew(s, policy, o):
    if not holds(s, o) or not running(s, o):
        return []
    if o.lease:
        return [s._replace(lo=o.n0 + o.lease, hi=o.n1 + o.lease)]
    return [s._replace(lo=max(s.lo, o.n0 + policy['lease']), hi=max(s.hi, o.n1 + policy['lease']))]


def act_release(s, policy, o):
    if o.error:
        return [] if holds(s, o) else refused(s, o)
    return lost_release(s, policy, o)


def lost_release(s, policy, o):
    if not holds(s, o):
        return []
    if s.prev == 'none':
        return [None]
    if s.prev == 'lease_expired':
        return [s._replace(att=s.att - 1, tok=None, lo=o.n0, hi=o.n1)]
    return [s._replace(st='R', att=s.att - 1, tok=None, lo=o.n0, hi=o.n1)]


def act_checkpoint(s, policy, o):
    if o.error:
        if holds(s, o):
            return [s] if o.error == 'ID001' and over(s, o) else []
        return refused(s, o)
    return [t for t in lost_checkpoint(s, policy, o) if t.prog == progress_of(o.row[0])]


def lost_checkpoint(s, policy, o):
    if not holds(s, o) or not running(s, o):
        return []
    return [s._replace(prog=merged(s.prog, o.step, o.value), lo=max(s.lo, o.n0 + policy['lease']), hi=max(s.hi, o.n1 + policy['lease']))]


def act_status(s, policy, o):
    status, att, token, lease, retry, res, body, code, msg, prev, prog = o.row
    if s is None:
        return [s] if status is None else []
    names = dict(P='processing', R='retryable_failed', U='unknown', S='succeeded', F='failed')
    good = names[s.st] == status and int(att) == s.att and told(s, code, msg)
    if s.st == 'P':
        good = good and within(number(lease), s.lo, s.hi) and prev == s.prev and progress_of(prog) == s.prog
        good = good and (s.tok is None or token == s.tok)
    if s.st == 'R':
        good = good and within(number(retry), s.lo, s.hi)
    if s.st == 'S':
        good = good and (res, body) == s.res and (s.tok is None or token == s.tok)
    return [s] if good else []


# ---- operators ----

def act_operator(s, policy, o, change):
    """change(standing) gives a list with the successor, or None where it is ID003."""
    error = None if o.lost else o.error
    if s is None:
        return [s] if error == 'ID002' else []
    out = []
    for standing in standings(s, policy, o):
        t = change(standing)
        if error:
            out += [s] if t is None and o.error == 'ID003' else []
        elif t is not None:
            out += t
    return out


def act_retry(s, policy, o):
    def change(standing):
        again = standing == 'DUE' and s.base > 0 and s.att == s.base
        if standing in ('HELD', 'LAPSED', 'SUCCEEDED') or again:
            return None
        tok = bury(s) if s.st in 'PF' else s.past
        return [s._replace(st='R', tok=None, past=tok, base=s.att, lo=o.n0, hi=o.n1)]
    return act_operator(s, policy, o, change)


def act_resolve(s, policy, o):
    def change(standing):
        if standing != 'UNKNOWN':
            return None
        if o.res:
            return [succeeded(s, o, None, o.res)]
        return [s._replace(st='F', tok=None, past=bury(s), lo=o.n0, hi=0, code='R', msg=o.msg)]
    return act_operator(s, policy, o, change)


def act_revoke(s, policy, o):
    def change(standing):
        return [s._replace(tok=None, past=bury(s), lo=o.n0, hi=o.n1)] if s.st == 'P' else None
    return act_operator(s, policy, o, change)


def act_forget(s, policy, o):
    def change(standing):
        return None if standing in ('HELD', 'LAPSED') else [None]
    return act_operator(s, policy, o, change)


ACT = dict(claim=act_claim, execute=act_execute, once=act_once, complete=act_complete, fail=act_fail, renew=act_renew,
           release=act_release, checkpoint=act_checkpoint, status=act_status, retry=act_retry, resolve=act_resolve,
           revoke=act_revoke, forget=act_forget)
LOST = dict(claim=lost_claim, execute=lost_execute, once=lost_once, fail=lost_fail, renew=lost_renew, release=lost_release,
            checkpoint=lost_checkpoint, status=lambda s, policy, o: [],
            complete=lambda s, policy, o: [succeeded(s, o, o.token, o.res)] if holds(s, o) else [])

# Errors that a call may end with wherever the record stands: it did nothing.
NOTHING = ('57014', '40P01', '40001', '57000')


def step(s, policy, o):
    """All successors of the state s for the call o."""
    out = []
    for b in before(s, policy, o):
        if o.lost:
            found = (LOST.get(o.op) or ACT[o.op])(b, policy, o)
        elif o.error and (o.error in NOTHING or o.op in ('execute', 'renew', 'status')):
            found = [b]
        elif o.op == 'claim' and o.error:
            found = [b] if o.error == '22023' and any(refused_token(b, o, st) for st in standings(b, policy, o)) else []
        else:
            found = ACT[o.op](b, policy, o)
        for t in found:
            if t not in out:
                out.append(t)
    return out


# ---- the search ----

class Node:
    """What takes effect at one moment between a and b: a call, or the calls of
    one transaction on the key.  stays: its effects do; optional: perhaps it never happened."""

    def __init__(self, items, a, b, stays, optional=False):
        self.items, self.a, self.b, self.stays, self.optional = items, a, b, stays, optional
        self.cache = {}

    def run(self, s, policy):
        found = self.cache.get(s)
        if found is None:
            found = self.cache[s] = self.find(s, policy)
        return found

    def find(self, s, policy):
        """items: calls, 'save' and 'undo'."""
        paths = {(s, None)}
        for item in self.items:
            if item == 'save':
                paths = {(t, (t,)) for t, _ in paths}
            elif item == 'undo':
                paths = {(mark[0], mark) if mark else (s, None) for _, mark in paths}
            else:
                paths = {(u, mark) for t, mark in paths for u in step(t, policy, item)}
        if not self.stays:
            return [s] if paths else []
        return list({t for t, _ in paths})


def search(nodes, policy, most=20000, work_most=1000000):
    """None if some order explains all answers; else the node that none explains.
    Raises TooWide.  Just-in-time linearisation: after each answer, the set of
    (state, calls in the air that have taken effect already)."""
    moments = sorted([(n.a, 0, i) for i, n in enumerate(nodes)] + [(n.b, 1, i) for i, n in enumerate(nodes)])
    air = set()
    world = {(None, frozenset())}
    steps = 0

    def idle(i, s):
        """A call that changes nothing here may as well have happened."""
        return not nodes[i].optional and nodes[i].run(s, policy) == [s]

    def with_idle(s, done):
        more = [i for i in air if i not in done and idle(i, s)]
        return s, done.union(more) if more else done

    for _, kind, i in moments:
        node = nodes[i]
        if kind == 0:
            air.add(i)
            world = {(s, done | {i}) if idle(i, s) else (s, done) for s, done in world}
            continue
        ends = set()
        seen = set(world)
        work = list(world)
        while work:
            s, done = work.pop()
            steps += len(air)
            if i in done:
                ends.add((s, done - {i}))
                continue
            if node.optional:
                ends.add((s, done))
            for j in air:
                if j in done:
                    continue
                for t in nodes[j].run(s, policy):
                    after = with_idle(t, done | {j})
                    if after not in seen:
                        seen.add(after)
                        work.append(after)
            if len(seen) > most or steps > work_most:
                raise TooWide()
        air.discard(i)
        if not ends:
            return node, world
        world = ends
    return None


class TooWide(Exception):
    pass
