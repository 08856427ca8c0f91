#!/bin/bash
# The benchmark: the extension beside its rivals on a throw-away server with
# fsync on, in alternating rounds.
#
#	test/bench/run.sh [--seconds 4] [--rounds 5] [--clients 4] [--sizes 100000,1000000,10000000] [--only growth]
#
# Prints a table; data and plots go to $OUT, by default bench-results in the current
# folder.  The growth curve to 10^7 records takes several minutes and 10 GB of
# disk; --sizes '' leaves it out.
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
OUT=$(realpath -m "${OUT:-bench-results}")

need_packages gnuplot-nox
private_copy
build_and_stage
server_start 'fsync = on' 'shared_buffers = 1GB' 'max_wal_size = 8GB' 'checkpoint_timeout = 1h' 'jit = off'
as_postgres createdb bench
as_postgres psql -X -q -v ON_ERROR_STOP=1 -d bench -c 'SET client_min_messages = warning' \
	-c 'CREATE EXTENSION idempotency CASCADE' -f test/bench/rivals.sql > /dev/null
as_postgres /usr/bin/python3 test/bench/bench.py --out "$W/out" "$@"
mkdir -p "$OUT"
cp "$W"/out/* "$OUT"/
