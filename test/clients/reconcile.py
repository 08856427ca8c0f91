#!/usr/bin/python3
"""Settles payments of unknown outcome by asking the payment service.

  reconcile.py --url http://127.0.0.1:PORT --operation NAME [--settle-after SECONDS]
               [--when-absent fail|retry] [--exhausted]

Prints a line for each key that it looked at.  Runs as a role of level operator
that may write payments, from cron; any number of runs may overlap.
"""
import argparse
import sys

import psycopg
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from worker import Declined, Downstream, InDoubt, book, charge_on_record, in_doubt, one


# doc: begin reconcile
def resolve_succeeded(conn, key, reason, charge):
    with conn.transaction():                # the business write belongs to it
        one(conn, 'SELECT idem_resolve(%s, %s, %s, %s)', [key, 'succeeded', reason, Jsonb(charge)])
        book(conn, key, charge)
    return 'succeeded: ' + reason


def resolve_failed(conn, key, reason, code):
    one(conn, 'SELECT idem_resolve(%s, %s, %s, error_code => %s, error_message => %s)',
        [key, 'failed', reason, code, reason])
    return 'failed: ' + reason


def retry(conn, key, reason):
    one(conn, 'SELECT idem_retry(%s, %s)', [key, reason])
    return 'to be retried: ' + reason


def settle(conn, downstream, record, settle_after, when_absent):
    """Does what is certain about one record of unknown outcome; tells what it did."""
    key, progress = record.idempotency_key, record.progress
    charge = charge_on_record(progress)
    if charge is not None:
        return resolve_succeeded(conn, key, 'charge is on record', charge)
    if not in_doubt(progress):              # and its token can record no checkpoint any more
        return retry(conn, key, 'nothing was sent')
    try:
        charge = downstream.find(record.downstream_key, progress['sending']['request'])
    except Declined as e:
        return resolve_failed(conn, key, 'declined by the service', str(e))
    except InDoubt as e:
        return f'left: {e}'                 # for a person
    if charge is not None:
        return resolve_succeeded(conn, key, 'charge found at the service', charge)
    if record.age < settle_after:           # a request under way could still arrive
        return 'left: too early to take it for absent'
    if when_absent == 'retry':
        return retry(conn, key, 'no charge at the service')
    return resolve_failed(conn, key, 'no charge at the service', 'not_charged')


def reconcile(conn, downstream, operation, settle_after, when_absent):
    conn.execute('SELECT idem_reap()')      # claims that lapsed into unknown are stored as such
    records = conn.execute("SELECT idempotency_key, coalesce(progress, '{}') AS progress,"
                           " idem_downstream_key(idempotency_key, 'charge') AS downstream_key,"
                           " extract(epoch FROM clock_timestamp() - updated_at)::float8 AS age"
                           " FROM idem_record WHERE slice = 0 AND status = 'unknown' AND operation = %s"
                           " ORDER BY updated_at", [operation]).fetchall()
    for record in records:
        try:
            yield record.idempotency_key, settle(conn, downstream, record, settle_after, when_absent)
        except psycopg.Error as e:
            if e.sqlstate not in ('ID002', 'ID003'):
                raise
            yield record.idempotency_key, 'left: settled by somebody else'
# doc: end reconcile


# doc: begin exhausted
def retry_exhausted(conn, operation):
    """Attempts are used up, and the last of them may have charged: one more, which asks first."""
    records = conn.execute("SELECT idempotency_key, progress FROM idem_record WHERE status = 'failed'"
                           " AND error_code = 'exhausted' AND operation = %s AND progress IS NOT NULL",
                           [operation]).fetchall()
    for record in records:
        if in_doubt(record.progress) or charge_on_record(record.progress):
            yield record.idempotency_key, retry(conn, record.idempotency_key, 'exhausted while in doubt')
# doc: end exhausted


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--url', required=True)
    parser.add_argument('--operation', required=True)
    parser.add_argument('--timeout', type=float, default=10)
    parser.add_argument('--settle-after', type=float, default=3600,
                        help='seconds after which a request that was sent cannot arrive any more')
    parser.add_argument('--when-absent', choices=['fail', 'retry'], default='fail')
    parser.add_argument('--exhausted', action='store_true',
                        help='for a service that deduplicates: retry keys that were exhausted in doubt')
    args = parser.parse_args()

    with psycopg.connect(autocommit=True, row_factory=namedtuple_row) as conn:
        for key, what in reconcile(conn, Downstream(args.url, args.timeout), args.operation,
                                   args.settle_after, args.when_absent):
            print(f'{key} {what}')
        if args.exhausted:
            for key, what in retry_exhausted(conn, args.operation):
                print(f'{key} {what}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
