#!/usr/bin/python3
"""A worker whose operation has an effect outside the database: it charges a card.

  worker.py --url http://127.0.0.1:PORT --recipe deduplicated|undeduplicated KEY AMOUNT

Works on the key until its fate is known, prints the answers to its tries as a line of
JSON, and returns 0 if the last is final.  docs/external-effects.md shows the parts between "doc" marks.  The
connection is libpq's: PGHOST, PGPORT, PGUSER, PGDATABASE.

The tests name one of the steps in IDEM_DIE_AT or IDEM_STOP_AT: there the process kills
itself, or stops until it gets SIGCONT.
"""
import argparse
import http.client
import json
import os
import signal
import sys
import time
import urllib.parse

import psycopg
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

STEPS = ('after-claim', 'after-checkpoint', 'before-send', 'after-call-before-record', 'after-record',
         'before-commit', 'after-commit', 'before-fail')
FINAL = ('succeeded', 'failed', 'unknown', 'conflict')
OVER = FINAL + ('lost', 'disconnected')


def at(step):
    """A place where the process may die or be held up."""
    assert step in STEPS
    if os.environ.get('IDEM_DIE_AT') == step:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get('IDEM_STOP_AT') == step:
        os.kill(os.getpid(), signal.SIGSTOP)


def one(conn, sql, args):
    return conn.execute(sql, args).fetchone()


# doc: begin downstream
class NotDone(Exception):
    """Certain: the service did nothing."""


class Declined(Exception):
    """Certain: the service refuses, and would again."""


class InDoubt(Exception):
    """It may have happened or not."""


class Downstream:
    """The payment service, as seen from here."""

    NO_ANSWER = (OSError, http.client.HTTPException, ValueError)

    def __init__(self, url, timeout):
        self.address = urllib.parse.urlsplit(url).netloc
        self.timeout = timeout

    def connection(self):
        return http.client.HTTPConnection(self.address, timeout=self.timeout)

    @staticmethod
    def read(connection):
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def charge(self, key, request, deadline):
        """Charges.  Returns the charge, or raises which of the three it is."""
        connection = self.connection()
        try:
            connection.connect()
        except OSError as e:
            raise NotDone('not reachable') from e
        time_left = deadline - time.monotonic()
        if time_left <= 0:
            raise NotDone('no time left to send')       # held up: the lease may be over
        at('before-send')
        connection.sock.settimeout(min(self.timeout, time_left))
        try:
            connection.request('POST', '/charges', json.dumps(request), {'Idempotency-Key': str(key)})
            status, body = self.read(connection)
        except self.NO_ANSWER as e:
            raise InDoubt('no answer') from e           # a time-out is not a failure
        if status in (200, 201):
            return body
        if status == 402:
            raise Declined(body['error'])
        if status == 503:                               # documented: before any work
            raise NotDone(body['error'])
        raise InDoubt(f'answer {status}')               # anything else proves nothing

    def find(self, key, request):
        """The charge that was made under the key; None if there is none now."""
        connection = self.connection()
        try:
            connection.request('GET', f'/charges?key={key}')
            status, body = self.read(connection)
        except self.NO_ANSWER as e:
            raise InDoubt('no answer to the query') from e
        if status == 404:
            return None
        if status != 200 or len(body['answers']) != 1:
            raise InDoubt(f'query does not tell: {status}')
        found = body['answers'][0]
        if 'error' in found:
            raise Declined(found['error'])
        if any(found[field] != request[field] for field in request):
            raise InDoubt('another charge stands under the key')
        return found
# doc: end downstream


# doc: begin progress
def in_doubt(progress):
    """Was something sent of which no answer is on record?"""
    sending, sent = progress.get('sending'), progress.get('sent')
    return sending is not None and (sent is None or sent['attempt'] != sending['attempt'])


def charge_on_record(progress):
    """The charge that an attempt got, recorded, and could not complete."""
    return progress.get('sent', {}).get('charge')
# doc: end progress


# doc: begin steps
def claim_key(conn, key, request):
    with conn.transaction():
        return one(conn, "SELECT outcome, owner_token AS token, attempts, previous,"
                         " coalesce(progress, '{}') AS progress, extract(epoch FROM retry_after)::float8 AS retry_after"
                         " FROM idem_claim(%s, %s)", [key, Jsonb(request)])


def checkpoint(conn, key, token, step, value):
    """Committed at once.  Returns until when (of time.monotonic) the key is ours."""
    before = time.monotonic()
    with conn.transaction():
        conn.execute('SELECT idem_checkpoint(%s, %s, %s, %s)', [key, token, step, Jsonb(value)])
        seconds = one(conn, 'SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 AS lease'
                            ' FROM idem_status(%s)', [key]).lease
    return before + seconds


def send(conn, downstream, key, claim, downstream_key, request):
    """Charges, with a checkpoint before and after."""
    deadline = checkpoint(conn, key, claim.token, 'sending', {'attempt': claim.attempts, 'request': request})
    at('after-checkpoint')
    try:
        charge = downstream.charge(downstream_key, request, deadline)
    except NotDone as e:
        checkpoint(conn, key, claim.token, 'sent', {'attempt': claim.attempts, 'not_done': str(e)})
        raise
    at('after-call-before-record')
    checkpoint(conn, key, claim.token, 'sent', {'attempt': claim.attempts, 'charge': charge})
    at('after-record')
    return charge


def book(conn, key, charge):
    """The business write that goes with a charge."""
    conn.execute('INSERT INTO payment (idempotency_key, charge_id, amount) VALUES (%s, %s, %s)',
                 [key, charge['id'], charge['amount']])


def complete(conn, key, claim, charge):
    with conn.transaction():
        book(conn, key, charge)
        conn.execute('SELECT idem_complete(%s, %s, %s)', [key, claim.token, Jsonb(charge)])
        at('before-commit')
    at('after-commit')
    return 'succeeded'


def fail(conn, key, claim, kind, error):
    at('before-fail')
    with conn.transaction():
        return one(conn, 'SELECT status FROM idem_fail(%s, %s, %s, %s, %s)',
                   [key, claim.token, kind, str(error), type(error).__name__]).status
# doc: end steps


# doc: begin deduplicated
def charge_deduplicated(conn, downstream, key, request):
    """For a service that answers a repeated key with its first answer."""
    claim = claim_key(conn, key, request)
    if claim.outcome != 'claimed':
        return claim
    at('after-claim')
    downstream_key = one(conn, "SELECT idem_downstream_key(%s, 'charge') AS id", [key]).id
    try:
        charge = charge_on_record(claim.progress)
        if charge is None and (claim.previous == 'lease_expired' or in_doubt(claim.progress)):
            charge = downstream.find(downstream_key, request)       # before repeating
        if charge is None:
            try:
                charge = send(conn, downstream, key, claim, downstream_key, request)
            except InDoubt as e:
                charge = downstream.find(downstream_key, request)
                if charge is None:          # it may still arrive: the repeat bears the same key
                    return fail(conn, key, claim, 'retryable', e)
    except NotDone as e:
        return fail(conn, key, claim, 'retryable', e)
    except Declined as e:
        return fail(conn, key, claim, 'permanent', e)
    except InDoubt as e:
        return fail(conn, key, claim, 'unknown', e)
    return complete(conn, key, claim, charge)
# doc: end deduplicated


# doc: begin undeduplicated
def charge_undeduplicated(conn, downstream, key, request):
    """For a service that charges again whenever it is asked again."""
    claim = claim_key(conn, key, request)
    if claim.outcome != 'claimed':
        return claim
    at('after-claim')
    downstream_key = one(conn, "SELECT idem_downstream_key(%s, 'charge') AS id", [key]).id
    try:
        charge = charge_on_record(claim.progress)
        if charge is None and in_doubt(claim.progress) and claim.previous != 'retried':
            charge = downstream.find(downstream_key, request)
            if charge is None:              # it may still arrive: nothing may be sent again
                raise InDoubt('nothing found under the key yet')
        if charge is None:
            try:
                charge = send(conn, downstream, key, claim, downstream_key, request)
            except InDoubt as e:
                charge = downstream.find(downstream_key, request)
                if charge is None:
                    raise e
    except NotDone as e:
        return fail(conn, key, claim, 'retryable', e)
    except Declined as e:
        return fail(conn, key, claim, 'permanent', e)
    except InDoubt as e:
        return fail(conn, key, claim, 'unknown', e)
    return complete(conn, key, claim, charge)
# doc: end undeduplicated


RECIPES = {'deduplicated': charge_deduplicated, 'undeduplicated': charge_undeduplicated}


def attempt(recipe, conn, downstream, key, request):
    """One try: its outcome, and how long to wait before the next."""
    try:
        answer = recipe(conn, downstream, key, request)
    except psycopg.Error as e:
        if conn.broken:
            return 'disconnected', 0        # even a COMMIT may have taken effect: the next claim tells
        if e.sqlstate != 'ID001':
            raise
        return 'lost', 0                    # the key is in other hands
    if isinstance(answer, str):
        return answer, 0.01
    return answer.outcome, min(answer.retry_after or 0, 0.1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--url', required=True)
    parser.add_argument('--recipe', choices=RECIPES, required=True)
    parser.add_argument('--timeout', type=float, default=10, help='seconds to wait for the service')
    parser.add_argument('--patience', type=float, default=60, help='seconds to wait for a final answer')
    parser.add_argument('key')
    parser.add_argument('amount', type=int)
    args = parser.parse_args()

    downstream = Downstream(args.url, args.timeout)
    request = {'amount': args.amount, 'currency': 'EUR'}
    give_up = time.monotonic() + args.patience
    outcomes = []
    with psycopg.connect(autocommit=True, row_factory=namedtuple_row) as conn:
        while True:
            outcome, wait = attempt(RECIPES[args.recipe], conn, downstream, args.key, request)
            if outcome not in outcomes[-1:]:
                outcomes.append(outcome)
            if outcome in OVER or time.monotonic() > give_up:
                break
            time.sleep(wait)
    print(json.dumps(outcomes))
    return 0 if outcomes[-1] in FINAL else 1


if __name__ == '__main__':
    sys.exit(main())
