#!/bin/bash
# Size after many turns of the ring under load, an old snapshot open all the time:
# the whole of idem_record against the records that are retained.
#
#	test/bench/rotation.sh [TURNS]			default 20 full turns of the four slices
#
# Builds the extension into a temporary folder, starts a server of its own there,
# and cleans up.  PG_CONFIG chooses the server.
set -euo pipefail
TURNS=${1:-20}
. "$(dirname "$0")/server.sh"

server_start
sql -q <<'SQL'
CREATE EXTENSION idempotency CASCADE;
-- a slice is current for half of this
UPDATE idem_policy SET retention = '1 s' WHERE operation = 'default';
SQL
cat > "$T/load.sql" <<'SQL'
\set n random(1, 1000000000)
SELECT owner_token AS token FROM idem_claim('turn' || :n, '{"amount": 1}') \gset
SELECT idem_complete('turn' || :n, :token, '{"charge": "ch_00000000", "status": "paid"}');
SQL

run_pg psql -X -q -d postgres >/dev/null <<'SQL' &
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT 1;
SELECT pg_sleep(86400);
SQL
SNAPSHOT=$!
run_pg pgbench -n -c 4 -j 2 -T 86400 -M prepared -f "$T/load.sql" postgres > "$T/load.log" 2>&1 &
LOAD=$!

slices=$((TURNS * 4)) purged=0 rotated=0 peak=0 began=$(date +%s)
size() { sql -c "SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits WHERE inhparent = 'idem_record'::regclass"; }
echo "turning the ring $TURNS times, 4 clients claiming and completing, one old snapshot open"
printf '%8s %8s %8s %12s %14s %14s\n' seconds rotated purged records bytes 'open bytes'
while [ "$purged" -lt "$slices" ]; do
	IFS='|' read -r p r < <(sql -c 'SELECT purged, rotated FROM idem_reap()')
	purged=$((purged + p)) rotated=$((rotated + r))
	if [ "$p" -gt 0 ] && [ $((purged % 8)) -eq 0 ]; then
		printf '%8d %8d %8d %12s %14s %14s\n' $(($(date +%s) - began)) $rotated $purged \
			"$(sql -c 'SELECT count(*) FROM idem_record')" "$(size)" \
			"$(sql -c "SELECT pg_total_relation_size('idem_record_open')")"
	fi
	kill -0 $LOAD 2>/dev/null || { echo "the load ended early:"; tail -5 "$T/load.log"; exit 1; }
	sleep 0.1
done
stop_job "$LOAD"

sql <<'SQL'
\t off
\echo
\echo -- size against what the retained records need (the same rows written anew)
CREATE TABLE retained (LIKE idem_record);
INSERT INTO retained SELECT * FROM idem_record;
ALTER TABLE retained ADD PRIMARY KEY (idempotency_key);
SELECT (SELECT count(*) FROM retained) AS records,
       pg_size_pretty(pg_total_relation_size('retained')) AS needed,
       pg_size_pretty(total) AS "idem_record",
       pg_size_pretty(total - open) AS "its ring",
       pg_size_pretty(open) AS "its open partition",
       round(total::numeric / pg_total_relation_size('retained'), 2) AS ratio,
       round((total - open)::numeric / pg_total_relation_size('retained'), 2) AS "ratio of the ring"
FROM (SELECT sum(pg_total_relation_size(inhrelid)) AS total, pg_total_relation_size('idem_record_open') AS open
      FROM pg_inherits WHERE inhparent = 'idem_record'::regclass) s;
SQL
violations=$(sql -c 'SELECT count(*) FROM idem_check()')
snapshot=$(sql -c "SELECT count(*) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND query LIKE '%pg_sleep(86400)%' AND pid <> pg_backend_pid()")
sql -c "SELECT count(*) || ' dead rows in the open partition that the old snapshot keeps' FROM (SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'idem_record_open' AND n_dead_tup > 0) s" >/dev/null
stop_job "$SNAPSHOT"
echo "full turns: $((purged / 4)), slices emptied: $purged, opened: $rotated; old snapshot held: $snapshot; idem_check() rows: $violations"
[ "$violations" -eq 0 ] && [ "$snapshot" -eq 1 ]
