#!/bin/bash
# Instructions per call, counted by callgrind: they repeat on any machine of one
# kind, however busy, so a change that costs more shows.
#
#	test/bench/budget.sh			prints, and compares with budget.txt: fails above 110 %; ends with "N passed, N failed"
#	test/bench/budget.sh --record	writes budget.txt anew
#
# A single-user server runs the calls N and 2N times in a loop; the difference
# of the totals by N is the cost of one, loop included ("empty" is the loop's).
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
RECORD=${1:-}
N=500

need_packages valgrind
private_copy
build_and_stage
server_start
as_postgres createdb budget
as_postgres psql -X -q -v ON_ERROR_STOP=1 -d budget -c 'SET client_min_messages = warning' \
	-c 'CREATE EXTENSION idempotency CASCADE' \
	-c "CREATE TABLE bare (k text COLLATE \"C\" PRIMARY KEY)" -c "INSERT INTO bare SELECT 'r' || i FROM generate_series(1, 1000) i" \
	-c "SELECT count(*) FROM idem_once_many(ARRAY(SELECT 'r' || i FROM generate_series(1, 1000) i))" \
	-c "UPDATE idem_policy SET lease = '300 days' WHERE operation = 'default'" \
	-c "SELECT count(*) FROM idem_claim_many(ARRAY(SELECT 'p' || i FROM generate_series(1, 1000) i))" -c 'VACUUM (FREEZE, ANALYZE)' > /dev/null
as_postgres pg_ctl -D "$W/data" -m fast -w stop > /dev/null

# Instructions of a single-user run of the statement, with $1 iterations; the key is k<i>.
total() {
	local n=$1 call=$2
	rm -rf "$W/run"
	cp -a "$W/data" "$W/run"
	as_postgres sh -c "echo \"DO 'BEGIN FOR i IN 1..$n LOOP $call END LOOP; END'\" | valgrind --tool=callgrind --callgrind-out-file=/dev/null \
		postgres --single -D '$W/run' -c shared_buffers=16MB -c fsync=off budget" 2>&1 | sed -n 's/.*Collected : \([0-9]*\).*/\1/p'
}

per_call() { local a b; a=$(total "$N" "$2"); b=$(total $((2 * N)) "$2"); printf '%s %d\n' "$1" $(((b - a) / N)); }

{
	per_call empty "PERFORM 1;"
	per_call select "PERFORM k FROM bare WHERE k = ''r'' || (i % 1000 + 1);"
	per_call insert "INSERT INTO bare VALUES (''k'' || i) ON CONFLICT DO NOTHING;"
	per_call replay "PERFORM idem_claim(''r'' || (i % 1000 + 1));"
	per_call in_progress "PERFORM idem_claim(''p'' || (i % 1000 + 1));"
	per_call claim "PERFORM idem_claim(''k'' || i);"
	per_call once "PERFORM idem_once(''k'' || i);"
	per_call claim_complete "PERFORM idem_complete(''k'' || i, (SELECT owner_token FROM idem_claim(''k'' || i)));"
	per_call execute "PERFORM idem_execute(''k'' || i, ''{}'', ''jsonb_pretty(jsonb)'');"
} > "$W/budget.txt"

if [ "$RECORD" = --record ]; then
	cp "$W/budget.txt" "$ROOT/test/bench/budget.txt"
	cat "$W/budget.txt"
	exit
fi
join <(sort "$ROOT/test/bench/budget.txt") <(sort "$W/budget.txt") | awk '
	{ ok = $3 <= $2 * 1.10; bad += !ok; good += ok; printf "%-16s %8d instructions, recorded %8d  %5.2f%s\n", $1, $3, $2, $3 / $2, ok ? "" : "  TOO MANY" }
	END { print good + 0 " passed, " bad + (NR < 9) " failed"; exit bad > 0 || NR < 9 }'
