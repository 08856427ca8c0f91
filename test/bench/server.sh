# server.sh - sourced: builds and starts a server in a temporary folder.
#
#	server_start [LINE...]		further lines for postgresql.conf
#	run_pg COMMAND...			as user postgres where we are root, against the server
#	sql ARGS...					psql, unaligned, rows only
#	stop_job PID				ends a background job of ours
#
# $T is the folder.  All is stopped and removed at exit.

PG_CONFIG=${PG_CONFIG:-$(ls /usr/lib/postgresql/*/bin/pg_config 2>/dev/null | sort -V | tail -1)}
PG_CONFIG=${PG_CONFIG:-pg_config}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
BIN=$("$PG_CONFIG" --bindir)
T=$(mktemp -d "${TMPDIR:-/tmp}/idem-bench.XXXXXX")
chmod 755 "$T"

run_pg() {
	local as=()
	[ "$(id -u)" -eq 0 ] && as=(runuser -u postgres --)
	(cd "$T" && exec "${as[@]}" env HOME="$T" LC_ALL=C PGHOST="$T" PGPORT=5432 PGOPTIONS="${PGOPTIONS:-}" PATH="$BIN:$PATH" "$@")
}

sql() { run_pg psql -X -A -t -v ON_ERROR_STOP=1 -d postgres "$@"; }

# The job is a subshell: end what it runs, then it.
stop_job() {
	local child
	for child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do stop_job "$child"; done
	kill "$1" 2>/dev/null || true
	wait "$1" 2>/dev/null || true
}

server_stop() {
	local status=$? job
	trap - EXIT
	for job in $(jobs -p); do stop_job "$job"; done
	[ -f "$T/data/postmaster.pid" ] && run_pg pg_ctl -D "$T/data" -m immediate -w stop > /dev/null 2>&1
	rm -rf "$T"
	exit $status
}
trap server_stop EXIT
trap 'exit 130' INT TERM

server_start() {
	cp -a "$ROOT/Makefile" "$ROOT/idempotency.control" "$ROOT/src" "$ROOT/sql" "$T/"
	rm -f "$T"/src/*.o "$T"/src/*.bc
	[ "$(id -u)" -eq 0 ] && chown -R postgres: "$T"
	run_pg make -s with_llvm=no PG_CONFIG="$PG_CONFIG"
	run_pg make -s with_llvm=no install DESTDIR="$T/stage" PG_CONFIG="$PG_CONFIG"
	run_pg initdb -D "$T/data" -A trust -E UTF8 --locale=C > /dev/null
	{
		echo "listen_addresses = ''"
		echo "unix_socket_directories = '$T'"
		echo "dynamic_library_path = '$T/stage$("$PG_CONFIG" --pkglibdir):\$libdir'"
		if [ "$("$PG_CONFIG" --version | sed 's/[^0-9]*\([0-9]*\).*/\1/')" -ge 18 ]; then
			echo "extension_control_path = '$T/stage$("$PG_CONFIG" --sharedir):\$system'"
		else
			echo "extension_destdir = '$T/stage'"
		fi
		printf '%s\n' "$@"
	} >> "$T/data/postgresql.conf"
	run_pg pg_ctl -D "$T/data" -l "$T/server.log" -w start > /dev/null || { cat "$T/server.log" >&2; exit 1; }
}
