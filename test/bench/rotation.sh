#!/bin/bash
# Size after many turns of the ring under load: the whole of idem_record against
# the records that are retained.  Once without and once with an old snapshot that is
# open all the time.
#
#	test/bench/rotation.sh [TURNS]			default 20 full turns of the four slices, each
#
# The snapshot keeps VACUUM from the dead rows of the open partition (a claim
# and its completion leave one), so that partition grows while it is held; the ring
# does not.
#
# On a server of its own in a temporary folder, removed at exit.  PGVER chooses the major (15).
set -euo pipefail
TURNS=${1:-20}
. "$(dirname "$0")/../lib.sh"

sql() { as_postgres psql -X -A -t -v ON_ERROR_STOP=1 -d postgres "$@"; }

# Ends a background job of ours: first what it runs, then it.
stop_job() {
	local child
	for child in $(cat "/proc/$1/task/$1/children" 2> /dev/null); do stop_job "$child"; done
	kill "$1" 2> /dev/null || true
	wait "$1" 2> /dev/null || true
}

need_packages
private_copy
build_and_stage
server_start 'autovacuum_naptime = 1s' 'synchronous_commit = off'
sql -q <<'SQL'
SET client_min_messages = warning;
CREATE EXTENSION idempotency CASCADE;
-- a slice is current for half of this
UPDATE idem_policy SET retention = '1 s' WHERE operation = 'default';
SQL
cat > "$W/load.sql" <<'SQL'
\set n random(1, 1000000000000)
SELECT owner_token AS token FROM idem_claim('turn' || :n, '{"amount": 1}') \gset
SELECT idem_complete('turn' || :n, :token, '{"charge": "ch_00000000", "status": "paid"}');
SQL

number() { sql -c "$1"; }
RING="FROM pg_inherits WHERE inhparent = 'idem_record'::regclass AND inhrelid <> 'idem_record_open'::regclass"

start_load() {
	as_postgres pgbench -n -c 4 -j 2 -T 86400 -M prepared -f "$W/load.sql" postgres > "$W/load.log" 2>&1 &
	LOAD=$!
}

start_snapshot() {
	as_postgres psql -X -q -d postgres > "$W/snapshot.log" 2>&1 <<-'SQL' &
		BEGIN ISOLATION LEVEL REPEATABLE READ;
		SELECT 'old snapshot', pg_sleep(86400);
	SQL
	SNAPSHOT=$!
}

turn() {
	local purged=0 rotated=0 began=$(date +%s) p r
	while [ "$purged" -lt $((TURNS * 4)) ]; do
		IFS='|' read -r p r < <(sql -c 'SELECT purged, rotated FROM idem_reap()')
		purged=$((purged + p)) rotated=$((rotated + r))
		kill -0 "$LOAD" 2> /dev/null || { echo "the load ended early:"; tail -5 "$W/load.log"; exit 1; }
		sleep 0.1
	done
	TURNED="slices emptied $purged, opened $rotated, in $(($(date +%s) - began)) s"
}

# Bytes of the ring, of the open partition, and of the retained records written anew.
line='%-28s %9s %12s %12s %12s %8s %8s\n'
report() {
	local records ring open needed
	ring=$(number "SELECT sum(pg_total_relation_size(inhrelid)) $RING")
	open=$(number "SELECT pg_total_relation_size('idem_record_open')")
	sql -q -c 'CREATE TABLE anew (LIKE idem_record)' -c 'INSERT INTO anew SELECT * FROM idem_record' -c 'ALTER TABLE anew ADD PRIMARY KEY (idempotency_key)'
	records=$(number 'SELECT count(*) FROM anew')
	needed=$(number "SELECT pg_total_relation_size('anew')")
	sql -q -c 'DROP TABLE anew'
	RATIO=$(awk -v a="$ring" -v n="$needed" 'BEGIN { printf "%.2f", a / n }')
	printf "$line" "$1" "$records" "$needed" "$ring" "$open" "$RATIO" "$(awk -v a=$((ring + open)) -v n="$needed" 'BEGIN { printf "%.2f", a / n }')"
}

claimed() { number "SELECT pg_stat_get_tuples_inserted('idem_record_open'::regclass)"; }

echo "$TURNS full turns of the ring, twice, under 4 clients that claim and complete; retention 1 s"
start_load
turn
plain_turned=$TURNED
stop_job "$LOAD"
printf "$line" '' records 'bytes needed' 'ring' 'open part' 'ring/n' 'all/n'
report 'no snapshot'
plain=$RATIO
before=$(number "SELECT pg_total_relation_size('idem_record_open')")

claims=$(claimed)
start_snapshot
start_load
turn
stop_job "$LOAD"
report 'old snapshot held'
held=$RATIO
claims=$(($(claimed) - claims))
alive=$(number "SELECT count(*) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND query LIKE 'SELECT ''old snapshot''%'")
open=$(number "SELECT pg_total_relation_size('idem_record_open')")
stop_job "$SNAPSHOT"
number "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'SELECT ''old snapshot''%'" > /dev/null
# its session may take a moment to end
for i in 1 2 3 4 5 6 7 8 9 10; do
	[ "$(number "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT ''old snapshot''%'")" = 0 ] && break
	sleep 0.1
done
sql -q -c 'VACUUM idem_record_open'
report 'snapshot gone, VACUUM'
violations=$(number 'SELECT count(*) FROM idem_check()')
echo
echo "without snapshot: $plain_turned; with: $TURNED, $claims claims, open partition grew by $((open - before)) bytes"
echo "snapshot was still open at the end: $alive; idem_check() rows: $violations"
# The smallest size of five partitions with their indexes weighs on few records.
[ "$violations" -eq 0 ] && [ "$alive" -eq 1 ] && awk -v a="$plain" -v b="$held" 'BEGIN { exit !(a < 4 && b < 4) }'
