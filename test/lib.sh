# lib.sh - sourced by the runner scripts: packages, a private copy, a throw-away server.
#
#	need_packages			installs what is missing, with apt
#	private_copy			copies the tree to $W/src, owned by user postgres
#	build_and_stage [CFLAGS]	builds there and installs into $W/stage
#	build_failpoints		builds once more with failure points, settings in $W/failpoints.conf
#	server_start [LINE...]	starts a server on a socket in $W, further lines for postgresql.conf
#	as_postgres COMMAND...	runs in $W/src with PGHOST, PGPORT, PATH set for it
#
# Everything lives in $W and is stopped and removed at exit; the system's PostgreSQL is
# not touched.  PGVER chooses the major; IDEM_INST, instead, a PostgreSQL of one's own that
# may be installed into (test/assert.sh); IDEM_VALGRIND=1 runs its server under valgrind.
# Needs root, or sudo without a password.

PGVER=${PGVER:-15}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BIN=${IDEM_INST:-/usr/lib/postgresql/$PGVER}/bin
PGXS_DIR=/usr/lib/postgresql/$PGVER/lib/pgxs/src/test
[ -z "${IDEM_INST:-}" ] || PGXS_DIR=$("$BIN/pg_config" --pgxs | sed 's:/makefiles/pgxs.mk$:/test:')
export LC_ALL=C.UTF-8
. "$ROOT/test/apt.sh"

if [ "$(id -u)" -ne 0 ]; then
	exec sudo --preserve-env=PGVER,IDEM_INST,IDEM_VALGRIND,IDEM_COVERAGE,IDEM_SKIP,IDEM_NO_POOLER,IDEM_NO_NODE,IDEM_NO_APT,CI bash "$0" "$@"
fi

need_packages() {
	install_packages "postgresql-$PGVER" "postgresql-server-dev-$PGVER" gcc make libipc-run-perl python3 python3-psycopg procps "$@"
}

cleanup() {
	local status=$?
	trap - EXIT
	if [ -f "$W/data/postmaster.pid" ]; then as_postgres pg_ctl -D "$W/data" -m immediate -w stop > /dev/null 2>&1 || true; fi
	if [ -n "${KEEP:-}" ]; then echo "kept: $W" >&2; else rm -rf "$W"; fi
	exit $status
}

private_copy() {
	W=$(mktemp -d "${TMPDIR:-/tmp}/idem.XXXXXX")
	trap cleanup EXIT
	trap 'exit 130' INT TERM
	chmod 755 "$W"
	mkdir "$W/src"
	(cd "$ROOT" && tar -cf - --exclude=./.git --exclude='*.o' --exclude='*.so' --exclude='*.bc' --exclude=./tmp_check .) | tar -xf - -C "$W/src"
	chown -R postgres: "$W"
}

as_postgres() {
	(cd "$W/src" && exec runuser -u postgres -- env HOME="$W" PGHOST="$W" PGPORT=5432 PGUSER=postgres \
		PATH="$BIN:$PATH" PG_CONFIG="$BIN/pg_config" "$@")
}

build_and_stage() {
	as_postgres make -s with_llvm=no COPT="${1:-}${IDEM_COVERAGE:+ --coverage -O0}" ${CC:+CC="$CC"} PG_CONFIG="$BIN/pg_config"
	if [ -n "${IDEM_INST:-}" ]; then
		as_postgres make -s with_llvm=no install PG_CONFIG="$BIN/pg_config"
		: > "$W/temp.conf"
		return
	fi
	as_postgres make -s with_llvm=no install DESTDIR="$W/stage" PG_CONFIG="$BIN/pg_config"
	{
		echo "dynamic_library_path = '$W/stage$("$BIN/pg_config" --pkglibdir):\$libdir'"
		if [ "$PGVER" -ge 18 ]; then
			echo "extension_control_path = '$W/stage$("$BIN/pg_config" --sharedir):\$system'"
		else
			echo "extension_destdir = '$W/stage'"
		fi
	} > "$W/temp.conf"
}

# A second build with failure points, in $W/failpoints; its settings are $W/failpoints.conf.
build_failpoints() {
	mkdir "$W/failpoints"
	cp -a "$W"/src/{Makefile,idempotency.control,src,sql} "$W/failpoints"
	find "$W/failpoints" -name '*.o' -delete
	chown -R postgres: "$W/failpoints"
	as_postgres make -s -C "$W/failpoints" with_llvm=no IDEM_FAILPOINTS=1 PG_CONFIG="$BIN/pg_config"
	as_postgres make -s -C "$W/failpoints" with_llvm=no IDEM_FAILPOINTS=1 install DESTDIR="$W/failpoints/stage" PG_CONFIG="$BIN/pg_config"
	sed "s:$W/stage:$W/failpoints/stage:" "$W/temp.conf" > "$W/failpoints.conf"
}

valgrind_command() {
	[ -n "${IDEM_VALGRIND:-}" ] || return 0
	echo "valgrind --quiet --trace-children=yes --leak-check=no --suppressions=$IDEM_INST/share/valgrind.supp" \
		"--error-markers=VALGRINDERROR-BEGIN,VALGRINDERROR-END --log-file=$W/valgrind.%p.log"
}

# What no test may leave in the log of the server (and of valgrind); true if it is there.
complaints() {
	grep -hE 'TRAP:|PANIC:|terminated by signal|WARNING:.*(detected write past|problem in alloc|refcount leak|reference leak|leaked)' "$W/server.log" && return
	[ -n "${IDEM_VALGRIND:-}" ] && cat "$W"/valgrind.*.log | grep -A 30 VALGRINDERROR-BEGIN | head -100
}

server_start() {
	as_postgres initdb -D "$W/data" -A trust -E UTF8 --locale=C.UTF-8 > /dev/null
	{
		cat "$W/temp.conf"
		echo "listen_addresses = ''"
		echo "unix_socket_directories = '$W'"
		echo "max_connections = 100"
		printf '%s\n' "$@"
	} >> "$W/data/postgresql.conf"
	printf '#!/bin/sh\nexec %s %s/postgres "$@"\n' "$(valgrind_command)" "$BIN" > "$W/postgres"
	chmod 755 "$W/postgres"
	as_postgres pg_ctl -D "$W/data" -l "$W/server.log" -p "$W/postgres" -t 120 -w start > /dev/null || { cat "$W/server.log" >&2; exit 1; }
}
