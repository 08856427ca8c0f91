#!/bin/bash
# Purging finished records: idem_reap()'s truncation of a slice beside the batched
# DELETE and VACUUM of the same rows; and what reaper, recovery and statistics
# cost with a long history and without.
#
#	test/bench/purge.sh [RECORDS]			default 10000000 (about 10 GB of disk), fsync on
#
# On a server of its own in a temporary folder, removed at exit.  PGVER chooses the major (15).
set -euo pipefail
N=${1:-10000000}
OPEN=1000
. "$(dirname "$0")/../lib.sh"

sql() { as_postgres psql -X -A -t -v ON_ERROR_STOP=1 -d postgres "$@"; }

need_packages
private_copy
build_and_stage
server_start 'fsync = on' 'synchronous_commit = on' 'shared_buffers = 512MB' 'maintenance_work_mem = 256MB' \
	'max_wal_size = 16GB' 'checkpoint_timeout = 1h' 'autovacuum = off' 'jit = off'
sql -q -v open="$OPEN" < "$ROOT/test/bench/purge.sql"

step() { echo "[$(date +%T)] $*" >&2; }
num() { sql -c "$1"; }
lsn() { num 'SELECT pg_current_wal_insert_lsn() - '"'0/0'::pg_lsn"; }
bytes() { num "SELECT pg_total_relation_size('$1')"; }
dead() { num "SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot(), pg_stat_get_dead_tuples('$1'::regclass)" 2>/dev/null | cut -d'|' -f3; }
# Runs SQL; sets ANSWER, SECONDS_ (without connecting) and WAL_
measure() {
	local from=$(lsn) out
	out=$(sql -c '\timing on' -c "$1")
	ANSWER=$(head -1 <<< "$out" | grep -v '^Timing' || sed -n 2p <<< "$out")
	SECONDS_=$(awk '/^Time: / { printf "%.3f", $2 / 1000 }' <<< "$out")
	WAL_=$(($(lsn) - from))
}
# Longest claim and completion of one client, ms, while a command runs.
cat > "$W/claim.sql" <<'SQL'
\set n random(1, 1000000000000)
BEGIN;
SELECT owner_token AS token FROM idem_claim('meanwhile' || :n, '{"amount": 1}') \gset
SELECT idem_complete('meanwhile' || :n, :token);
COMMIT;
SQL
meanwhile() {
	local load
	as_postgres pgbench -n -c 1 -T 6 -M prepared -l --log-prefix="$W/latency" -f "$W/claim.sql" postgres > "$W/meanwhile.log" 2>&1 &
	load=$!
	sleep 2
	"$@"
	wait "$load"
	LONGEST=$(awk '$3 > m { m = $3 } END { printf "%.1f", m / 1000 }' "$W"/latency.*)
}
# Fastest of 1001 calls, ms (a median would show who else uses the machine): reap, claim_due, stats
costs() { num "SELECT concat_ws(' ', cost('SELECT idem_reap()'), cost('SELECT count(*) FROM idem_claim_due(NULL, 10)'), cost('SELECT count(*) FROM idem_stats'))"; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { if (b > 0) printf "%.1f", a / b; else printf "-" }'; }

step "costs with $OPEN open records and no history"
read -r reap0 due0 stats0 <<< "$(costs)"

step "filling $N finished records"
sql -q -c "CALL fill($N)" -c 'VACUUM (FREEZE, ANALYZE) idem_record_1' -c 'CHECKPOINT'
step "costs with $OPEN open records and $N finished ones"
read -r reapn duen statsn <<< "$(costs)"

step "the same rows in a plain table"
sql -q -c 'CREATE TABLE plain (LIKE idem_record)' -c 'INSERT INTO plain SELECT * FROM idem_record_1' \
	-c 'ALTER TABLE plain ADD PRIMARY KEY (idempotency_key)' -c 'CREATE INDEX ON plain (updated_at)' \
	-c 'VACUUM (FREEZE, ANALYZE) plain' -c 'CHECKPOINT'

step "purging by idem_reap()"
t_before=$(bytes idem_record_1)
sql -q -c "UPDATE idem_ring SET closed_at = now() - interval '8 days' WHERE slice = 1"
# The purge gives way to whoever reads the slice at that instant: ask again.
tries=0
purge() {
	while [ "$tries" -lt 100 ]; do
		tries=$((tries + 1))
		measure 'SELECT purged FROM idem_reap()'
		[ "$ANSWER" = 0 ] || return 0
	done
}
meanwhile purge
[ "$ANSWER" = 1 ] || { echo "idem_reap() purged nothing in $tries calls"; exit 1; }
t_time=$SECONDS_ t_wal=$WAL_ t_after=$(bytes idem_record_1) t_dead=$(dead idem_record_1)
left=$(num 'SELECT count(*) FROM idem_record_1')

step "deleting in batches of 10000"
sql -q -c 'CHECKPOINT'
d_before=$(bytes plain)
measure 'CALL delete_in_batches(10000)'
d_time=$SECONDS_ d_wal=$WAL_ d_mid=$(bytes plain) d_dead=$(dead plain)
step "VACUUM"
measure 'VACUUM plain'
v_time=$SECONDS_ v_wal=$WAL_ d_after=$(bytes plain) v_dead=$(dead plain)
check=$(num 'SELECT count(*) FROM idem_check()')

# What the file system alone needs to give back as many bytes.
as_postgres dd if=/dev/zero of="$W/file" bs=1M count=$((t_before / 1048576 + 1)) conv=fsync status=none
began=$(date +%s.%N)
truncate -s 0 "$W/file"
floor=$(awk -v a="$began" -v b="$(date +%s.%N)" 'BEGIN { printf "%.3f", b - a }')

line() { printf '%-34s %14s %14s %14s %10s\n' "$@"; }
echo
echo "$N finished records, $OPEN open ones; $(num 'SHOW server_version'), fsync $(num 'SHOW fsync')"
echo
line '' 'idem_reap()' 'batched DELETE' 'and VACUUM' 'ratio'
line 'seconds' "$t_time" "$d_time" "$v_time" "$(ratio "$(awk -v a="$d_time" -v b="$v_time" 'BEGIN { print a + b }')" "$t_time")"
line 'WAL bytes' "$t_wal" "$d_wal" "$v_wal" "$(ratio $((d_wal + v_wal)) "$t_wal")"
line 'bytes with indexes, before' "$t_before" "$d_before" "$d_mid" ''
line 'bytes with indexes, after' "$t_after" "$d_mid" "$d_after" ''
line 'dead rows after' "$t_dead" "$d_dead" "$v_dead" ''
line 'finished records left' "$left" "$(num 'SELECT count(*) FROM plain')" '' ''
echo
echo "(WAL beside idem_reap() includes that of another client, which claimed and completed meanwhile)"
echo "the file system alone gives back a file of that size in $floor s"
echo "calls of idem_reap() until no claim was looking into the slice: $tries"
echo "longest claim and completion of another client during idem_reap(): $LONGEST ms"
echo
line 'fastest of 1001 calls, ms' 'no history' "$N finished" '' 'ratio'
line 'idem_reap()' "$reap0" "$reapn" '' "$(ratio "$reapn" "$reap0")"
line 'idem_claim_due()' "$due0" "$duen" '' "$(ratio "$duen" "$due0")"
line 'idem_stats' "$stats0" "$statsn" '' "$(ratio "$statsn" "$stats0")"
echo
echo "idem_check() rows: $check"
[ "$check" -eq 0 ] && [ "$left" -eq 0 ] && [ "$t_dead" -eq 0 ]
