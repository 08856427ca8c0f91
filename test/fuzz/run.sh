#!/bin/bash
# Fuzzing, in a private copy and on a throw-away server:
#
#	bash test/fuzz/run.sh [--seconds N] [--big] [TARGET...]		default: all
#
#	number pointer key document argument	libFuzzer on the C code, over shim.c
#	server		random documents, pointers and keys in a server whose library is built
#			with sanitizers, against JavaScript and by properties
#	calls		random calls of all functions from several sessions, same server
#	smith		sqlsmith, as superuser and as client, same server
#
# Each target runs for N seconds (10; with --big 300).  FUZZ_SEED repeats a run of server
# and calls; libFuzzer keeps the input that failed in $FUZZ_OUT (a folder in
# the temporary folder): run it again with the target's program and KEEP=1.
# Ends with "N passed, N failed", one check per target.
set -euo pipefail
. "$(dirname "$0")/../lib.sh"

ALL='number pointer key document argument server calls smith'
SECONDS_EACH=10
TARGETS=
while [ $# -gt 0 ]; do
	case $1 in
		--seconds) SECONDS_EACH=$2; shift ;;
		--big) SECONDS_EACH=300 ;;
		*) [[ " $ALL " == *" $1 "* ]] || { echo "unknown target: $1" >&2; exit 2; }
			TARGETS="$TARGETS $1" ;;
	esac
	shift
done
TARGETS=${TARGETS:-$ALL}
SEED=${FUZZ_SEED:-$(date +%s)}
OUT=${FUZZ_OUT:-${TMPDIR:-/tmp}/idem-fuzz.$$}

PASSED=0
FAILED=0
result() { if [ "$1" -eq 0 ]; then PASSED=$((PASSED + 1)); echo "ok - $2"; else FAILED=$((FAILED + 1)); echo "not ok - $2"; fi; }
wants() { [[ " $TARGETS " == *" $1 "* ]]; }
wants_server() { wants server || wants calls || wants smith; }

# ---- libFuzzer ----

FLAGS="-g -O1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer
	-fwrapv -fno-strict-aliasing -Wno-ignored-attributes"
SOURCES='key canonical pointer number digest arguments policy'

build_targets() {
	local name t
	CLANG=$(command -v clang || command -v clang-14)
	mkdir -p "$W/fuzz"
	FLAGS="$FLAGS -I$W/src/test/fuzz -I$W/src/src -I$("$BIN/pg_config" --includedir-server)"
	for name in $SOURCES; do
		# shellcheck disable=SC2086
		"$CLANG" $FLAGS -fsanitize=fuzzer-no-link -c "$W/src/src/$name.c" -o "$W/fuzz/src_$name.o"
	done
	# shellcheck disable=SC2086
	"$CLANG" $FLAGS -c "$W/src/test/fuzz/shim.c" -o "$W/fuzz/shim.o"
	for t in number pointer key document argument; do
		# shellcheck disable=SC2086
		if wants $t; then "$CLANG" $FLAGS -fsanitize=fuzzer "$W/src/test/fuzz/$t.c" "$W"/fuzz/shim.o "$W"/fuzz/src_*.o -lm -o "$W/fuzz/$t"; fi
	done
}

# From nothing, and, where there are seeds, for half of the time from them: they are large
# and slow.  A run that ends early, or does next to nothing, is a failure.
fuzz_target() {
	local t=$1 status=0 runs=0 n rate time=$SECONDS_EACH seeds="$W/src/test/fuzz/corpus/$1" from log
	local sets=("$W/fuzz/corpus.$t")
	if [ -d "$seeds" ]; then sets+=("$seeds"); time=$(((SECONDS_EACH + 1) / 2)); fi
	mkdir -p "$W/fuzz/corpus.$t" "$OUT"
	for from in "${sets[@]}"; do
		log="$W/fuzz/$t.log"
		ASAN_OPTIONS=detect_leaks=0 "$W/fuzz/$t" -max_total_time="$time" -max_len=3000 -timeout=10 -rss_limit_mb=1500 \
			-print_final_stats=1 -artifact_prefix="$OUT/$t-" "$from" > "$log" 2>&1 || status=$?
		n=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
		runs=$((runs + ${n:-0}))
		if [ "$status" -ne 0 ]; then
			grep -E 'CHECK FAILED|ERROR: |runtime error|SUMMARY|Test unit|    #[0-9] .*(src/src|test/fuzz)/' "$log" | head -30
			grep '^Base64' "$log" || true
			break
		fi
		if [ "${n:-0}" -lt 100 ]; then status=1; tail -5 "$log"; fi
	done
	rate=$((runs / SECONDS_EACH))
	result "$status" "$t: $runs runs, $rate per second"
}

# ---- a server with a sanitized library ----

# Debian 12 hangs when libasan is loaded without being the first to start.
sanitized_server() {
	local asan ubsan
	build_and_stage '-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g'
	server_start 'fsync = off' 'track_functions = all' "log_line_prefix = '%e %u %p '" 'log_error_verbosity = verbose' \
		'max_prepared_transactions = 5' 'log_statement = none'
	asan=$(gcc -print-file-name=libasan.so)
	ubsan=$(gcc -print-file-name=libubsan.so)
	echo 'extern void __asan_init(void); __attribute__((constructor)) static void early(void) { __asan_init(); }' > "$W/early.c"
	gcc -shared -fPIC -o "$W/early.so" "$W/early.c" -Wl,-z,initfirst -Wl,--no-as-needed "$asan"
	as_postgres pg_ctl -D "$W/data" -w stop > /dev/null
	as_postgres env LD_PRELOAD="$asan $ubsan $W/early.so" UBSAN_OPTIONS=print_stacktrace=1 \
		ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=0 \
		pg_ctl -D "$W/data" -l "$W/server.log" -w start > /dev/null
}

CRASH='ERROR: AddressSanitizer|runtime error:|terminated by signal|PANIC:|TRAP:|server process .* exited'

# Runs a target on the server; whatever it says itself, a crash is a failure.
server_target() {
	local name=$1 status=0 from
	shift
	from=$(wc -l < "$W/server.log")
	"$@" || status=$?
	# the report of a crash comes after the end of the connection
	if grep -qE '08006|closed the connection' "$W/$name.out"; then
		for _ in $(seq 100); do
			tail -n +$((from + 1)) "$W/server.log" | grep -q 'terminated by signal' && break
			sleep 0.2
		done
	fi
	tail -n +$((from + 1)) "$W/server.log" > "$W/log.$name"
	if grep -qE "$CRASH" "$W/log.$name"; then
		status=1
		grep -E -A 12 "$CRASH" "$W/log.$name" | head -60
	fi
	result "$status" "$name: $(tail -n 1 "$W/$name.out")"
}

# Output goes to $W/NAME.out; the last line sums up.
driver() {
	local name=$1
	as_postgres /usr/bin/python3 test/fuzz/driver.py "$name" "$SECONDS_EACH" "$SEED" > "$W/$name.out" 2>&1 || { cat "$W/$name.out"; return 1; }
	sed '$d' "$W/$name.out"
}

need=(clang libclang-rt-dev)
if wants smith; then need+=(sqlsmith); fi
if wants server && ! command -v node > /dev/null; then need+=(nodejs); fi
need_packages "${need[@]}"
private_copy
echo "seed $SEED, failing inputs go to $OUT"
if [[ " $TARGETS " =~ \ (number|pointer|key|document|argument)\  ]]; then
	build_targets
	for t in number pointer key document argument; do if wants $t; then fuzz_target $t; fi; done
fi
if wants_server; then
	sanitized_server
	for t in server calls smith; do if wants $t; then server_target $t driver $t; fi; done
fi

rmdir "$OUT" 2>/dev/null || true
echo "$PASSED passed, $FAILED failed"
[ "$FAILED" -eq 0 ] && [ "$PASSED" -gt 0 ]
