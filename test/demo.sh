#!/bin/bash
# The demo: a small payments service on a throw-away server, fed with a file of
# requests that arrive twice, out of order, at once, changed, and interrupted.
#
#	bash test/demo.sh [--bypass] [--requests N] [--seed N] [--keep]
#
# Installs what it needs, builds, runs, and cleans up.  --bypass does the same
# without asking for the key, and shows what happens then (and fails).
set -euo pipefail
. "$(dirname "$0")/lib.sh"
REQUESTS=6000
SEED=1
BYPASS=()
while [ $# -gt 0 ]; do
	case $1 in
		--bypass) BYPASS=(--bypass) ;;
		--requests) REQUESTS=$2; shift ;;
		--seed) SEED=$2; shift ;;
		--keep) KEEP=1 ;;
		*) echo "unknown option $1" >&2; exit 2 ;;
	esac
	shift
done

need_packages
private_copy
echo "building in $W"
build_and_stage
server_start
as_postgres createdb demo
as_postgres psql -X -q -v ON_ERROR_STOP=1 -d demo -c 'SET client_min_messages = warning' \
	-c 'CREATE EXTENSION idempotency CASCADE' -f test/demo/schema.sql
as_postgres /usr/bin/python3 test/demo/requests.py "$REQUESTS" "$SEED" > "$W/requests.jsonl"
as_postgres /usr/bin/python3 test/demo/pay.py "$W/requests.jsonl" "${BYPASS[@]}"
