#!/bin/bash
# The benchmark: the extension beside its rivals on a throw-away server with
# fsync on, in alternating rounds.
#
#	test/bench/run.sh [--seconds 4] [--rounds 5] [--clients 4] [--sizes 100000,1000000,10000000]
#
# Prints a table; data and plots (gnuplot, if it is there) go to $OUT, by default
# bench-results in the current folder.  The growth curve to 10^7 records takes
# several minutes and 10 GB of disk; --sizes '' leaves it out.
set -euo pipefail
OUT=${OUT:-bench-results}
. "$(dirname "$0")/server.sh"

server_start 'fsync = on' 'shared_buffers = 1GB' 'max_wal_size = 8GB' 'checkpoint_timeout = 1h' \
	'max_connections = 120' 'jit = off'
sql -q -c 'CREATE DATABASE bench'
run_pg psql -X -q -v ON_ERROR_STOP=1 -d bench -c 'SET client_min_messages = warning' \
	-c 'CREATE EXTENSION idempotency CASCADE' -f - < "$ROOT/test/bench/rivals.sql" > /dev/null
cp "$ROOT/test/bench/bench.py" "$T/"
run_pg /usr/bin/python3 "$T/bench.py" --out "$T/out" "$@"
mkdir -p "$OUT"
cp "$T"/out/* "$OUT"/
