#!/bin/bash
# All tests, on a throw-away server, from a private copy of the tree:
#
#	bash test/run.sh [regress] [isolation] [tap] [demo] [clang]		default: all
#
# Ends with "N passed, N failed": regression tests, isolation specs, TAP tests, and the
# checks of the demo; one for the server's log (no assertion, crash, leak).  A suite that did not run, or ran fewer tests
# than are listed, is a failure.  PGVER chooses the major (15); IDEM_COVERAGE=1 measures
# which lines of src were run.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
SUITES=${*:-regress isolation tap demo clang}

PASSED=0
FAILED=0
count() { PASSED=$((PASSED + $1)); FAILED=$((FAILED + $2)); echo "== $3: $1 passed, $2 failed"; }
wants() { [[ " $SUITES " == *" $1 "* ]]; }
# Names of tests in the Makefile, without those in IDEM_SKIP.
names() {
	local name
	for name in $(sed -n "s/^$1 = *//p" "$ROOT/Makefile"); do
		[[ " ${IDEM_SKIP:-} " == *" $name "* ]] || echo "$name"
	done
}
listed() { names "$1" | wc -l; }

# Tests "ok" in the output of pg_regress: "test x ... ok" (15) or "ok 1 - x" (16 on).
passed_in() { grep -cE '^(test .* \.\.\. ok|ok [0-9]+ )' "$1" || true; }

pg_regress_suite() {
	local name=$1 out="$W/$1.out" want=$2 ok
	shift 2
	as_postgres "$@" > "$out" 2>&1 || true
	ok=$(passed_in "$out")
	grep -E '^(test |ok |not ok )' "$out" || cat "$out"
	[ "$ok" -eq "$want" ] || head -100 "$W"/src/regression.diffs "$W"/src/output_iso/regression.diffs 2>/dev/null || true
	count "$ok" $((want - ok)) "$name"
	rm -f "$W"/src/regression.diffs
}

regress_suite() {
	# shellcheck disable=SC2046
	pg_regress_suite regress "$(listed REGRESS)" "$PGXS_DIR/regress/pg_regress" --inputdir=. --bindir="$BIN" \
		--host="$W" --port=5432 --dbname=contrib_regression $(names REGRESS)
}

isolation_suite() {
	mkdir -p "$W/src/output_iso"
	chown postgres: "$W/src/output_iso"
	# shellcheck disable=SC2046
	pg_regress_suite isolation "$(listed ISOLATION)" "$PGXS_DIR/isolation/pg_isolation_regress" --inputdir=test \
		--outputdir=output_iso --bindir="$BIN" --host="$W" --port=5432 --dbname=isolation_regression \
		--load-extension=pgcrypto --load-extension=idempotency $(names ISOLATION)
}

# Every script must end well and have run tests; single tests are counted.
tap_suite() {
	local out="$W/tap.out" ok=0 bad=0 scripts status=0
	scripts=$(cd "$ROOT" && ls ${IDEM_TAP:-test/t/*.pl})
	# shellcheck disable=SC2086
	as_postgres env TEMP_CONFIG="$W/temp.conf" IDEM_FAILPOINT_CONFIG="$W/failpoints.conf" PG_REGRESS="$PGXS_DIR/regress/pg_regress" TESTDIR="$W/src" PGPORT=65432 \
		PG_TEST_TIMEOUT_DEFAULT=120 IDEM_NO_NODE="${IDEM_NO_NODE:-}" IDEM_NO_POOLER="${IDEM_NO_POOLER:-}" NODE="$(command -v node || true)" \
		prove --timer -I "$PGXS_DIR/perl" $scripts > "$out" 2>&1 || status=$?
	cat "$out"
	ok=$(sed -n 's/^Files=[0-9]*, Tests=\([0-9]*\),.*/\1/p' "$out")
	ok=${ok:-0}
	if [ "$status" -ne 0 ]; then
		bad=$(grep -cE '^test/t/.*Wstat' "$out" || true)
		[ "$bad" -gt 0 ] || bad=1
		tail -n 40 "$W"/src/tmp_check/log/regress_log_* 2>/dev/null | tail -n 200 || true
	fi
	[ "$(grep -cE '^(\[[0-9:]+\] )?test/t/[^ ]+ \.+' "$out")" -ge "$(echo "$scripts" | wc -l)" ] || bad=$((bad + 1))
	count "$ok" "$bad" tap
}

demo_suite() {
	local ok=0 bad=0
	if bash "$ROOT/test/demo.sh" > "$W/demo.out" 2>&1; then ok=$((ok + 1)); else bad=$((bad + 1)); tail -40 "$W/demo.out"; fi
	if bash "$ROOT/test/demo.sh" --bypass > "$W/bypass.out" 2>&1; then
		bad=$((bad + 1)); echo 'the demo without claims shows nothing wrong'; tail -40 "$W/bypass.out"
	elif grep -qi 'double' "$W/bypass.out"; then ok=$((ok + 1))
	else bad=$((bad + 1)); tail -40 "$W/bypass.out"; fi
	tail -40 "$W/demo.out"
	count "$ok" "$bad" demo
}

log_suite() {
	if complaints; then count 0 1 'log of the server'; else count 1 0 'log of the server'; fi
}

# The other compiler has nothing to complain of either.
clang_suite() {
	mkdir "$W/clang"
	cp -a "$W"/src/{Makefile,idempotency.control,src,sql} "$W/clang"
	find "$W/clang" -name '*.o' -delete
	chown -R postgres: "$W/clang"
	if as_postgres make -s -C "$W/clang" with_llvm=no CC=clang COPT='-Werror -Wno-ignored-optimization-argument -Wno-unknown-warning-option -Wno-ignored-attributes' PG_CONFIG="$BIN/pg_config"; then
		count 1 0 clang
	else
		count 0 1 clang
	fi
}

# Lines of src that no test reached (IDEM_COVERAGE=1); printed, not judged.
coverage_report() {
	as_postgres pg_ctl -D "$W/data" -m fast -w stop > /dev/null
	(cd "$W/src" && gcovr -r . --exclude test/ --sort-percentage 2> /dev/null)
}

extra=()
[ -z "${IDEM_COVERAGE:-}" ] || extra+=(gcovr)
# the digests are checked against a real JavaScript engine
if wants clang; then extra+=(clang); fi
if wants tap && [ -z "${IDEM_NO_POOLER:-}" ]; then extra+=(pgbouncer); fi
if wants tap && [ -z "${IDEM_NO_NODE:-}" ] && ! command -v node > /dev/null; then extra+=(nodejs); fi
need_packages "${extra[@]}"
private_copy
cd "$W/src"
build_and_stage -Werror
server_start 'fsync = off'
if wants regress; then regress_suite; fi
if wants isolation; then isolation_suite; fi
if wants tap; then build_failpoints; tap_suite; fi
log_suite
if wants demo; then demo_suite; fi
if wants clang; then clang_suite; fi
[ -z "${IDEM_COVERAGE:-}" ] || coverage_report

echo "$PASSED passed, $FAILED failed"
[ "$FAILED" -eq 0 ] && [ "$PASSED" -gt 0 ]
