#!/bin/bash
# Chaos run: random clients, crashes and restarts, and a checker that knows the
# documented state machine only.
#
#	bash test/chaos/run.sh [--seconds 60] [--seed N] [--clients 8] [--log DIR] [--broken NAME]
#
# --broken NAME applies test/chaos/broken/NAME.patch before the build, if there is one
# (test/chaos/broken.sh).  --log keeps the logs of all rounds; otherwise those of rounds
# with violations stay.  Needs nothing but Debian's packages.  Ends with "N passed, N failed"; status 1 on a violation.
set -euo pipefail
. "$(dirname "$0")/../lib.sh"

broken=
arguments=()
while [ $# -gt 0 ]; do
	case $1 in
		--log)
			mkdir -p "$2"
			chown postgres: "$2"
			arguments+=(--log "$(realpath "$2")") ;;
		--broken) broken=$2; arguments+=(--broken "$2") ;;
		*) arguments+=("$1" "$2") ;;
	esac
	shift 2
done

need_packages
private_copy
cd "$W/src"
if [ -n "$broken" ] && [ -f "test/chaos/broken/$broken.patch" ]; then
	as_postgres patch -s -p1 -i "test/chaos/broken/$broken.patch"
fi
build_and_stage
server_start 'fsync = off' 'shared_buffers = 64MB' 'deadlock_timeout = 200ms' 'restart_after_crash = on' 'statement_timeout = 20s' \
	'max_wal_size = 256MB' "log_line_prefix = '%m [%p] %e '" 'log_min_error_statement = panic' 'log_checkpoints = off'
as_postgres createdb chaos
as_postgres nice -n "${IDEM_NICE:-5}" /usr/bin/python3 -B test/chaos/chaos.py --data "$W/data" --server-log "$W/server.log" "${arguments[@]}"
