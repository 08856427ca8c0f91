#!/bin/bash
# Runs in the chroot of test/upgrade.sh, as root.
set -euo pipefail
W=/tmp/upgrade
OLD=/usr/lib/postgresql/15/bin
NEW=/usr/lib/postgresql/17/bin
PASSED=0
FAILED=0
mkdir "$W"
cp -a /tree "$W/tree"
chown -R postgres: "$W"
cd "$W"

as() { runuser -u postgres -- env HOME="$W" PGHOST="$W" PGDATABASE=postgres PGUSER=postgres "$@"; }
ok() { PASSED=$((PASSED + 1)); echo "ok - $1"; }
no() { FAILED=$((FAILED + 1)); echo "not ok - $1"; }
query() { as "$NEW/psql" -X -A -t -q -v ON_ERROR_STOP=1 "$@"; }

# check NAME COMMAND...
check() {
	local name=$1
	shift
	if "$@" > "$W/out" 2>&1; then ok "$name"; else no "$name"; tail -20 "$W/out"; fi
}

build() {
	rm -rf "$W/build"
	cp -a "$W/tree" "$W/build"
	make -s -C "$W/build" with_llvm=no COPT=-Werror PG_CONFIG="$1/pg_config"
	make -s -C "$W/build" with_llvm=no install PG_CONFIG="$1/pg_config"
}

# new_cluster BIN DIRECTORY
new_cluster() {
	as "$1/initdb" -D "$2" -A trust -E UTF8 --locale=C.UTF-8 > /dev/null
	printf "listen_addresses = ''\nunix_socket_directories = '%s'\nfsync = off\n" "$W" >> "$2/postgresql.conf"
}

start() { as "$1/pg_ctl" -D "$2" -l "$W/log" -w start > /dev/null; }
stop() { as "$1/pg_ctl" -D "$2" -m fast -w stop > /dev/null; }
contents() { query -f "$W/tree/test/upgrade/contents.sql"; }

# What must hold in the new server: the same contents, and work that goes on.
verify() {
	contents > "$W/$1.txt" 2>&1
	[ "$1" != 'by dump' ] || sed -i '/^index|.*operation_updated_at\|^index|.*dba_index/d' "$W/before.txt"    # pg_dump leaves out indexes on tables of extensions
	check "$1: everything is as it was" diff "$W/before.txt" "$W/$1.txt"
	query -f "$W/tree/test/upgrade/after.sql" > "$W/after.txt" 2>&1 || no "$1: queries failed: $(tail -3 "$W/after.txt")"
	while IFS='|' read -r result name; do
		case $result in
			t) ok "$1: $name" ;;
			f | '~') no "$1: $name" ;;
		esac
	done < "$W/after.txt"
	if grep -q '^t|the last' "$W/after.txt"; then ok "$1: all was asked"; else no "$1: not all was asked"; fi
}

build "$OLD"
build "$NEW"
new_cluster "$OLD" "$W/old"
start "$OLD" "$W/old"
query -f "$W/tree/test/upgrade/states.sql" > /dev/null
contents > "$W/before.txt"
check 'records in every state' test "$(grep -c '^record|' "$W/before.txt")" -ge 16
check 'more than one slice' test "$(grep -o '^record|idem_record_[1-4]' "$W/before.txt" | sort -u | wc -l)" -ge 2
as "$NEW/pg_dumpall" -U postgres > "$W/dump.sql"
stop "$OLD" "$W/old"
cp -a "$W/old" "$W/linked"

upgrade() {
	as bash -c "cd '$W' && '$NEW/pg_upgrade' -b '$OLD' -B '$NEW' -d '$1' -D '$2' -s '$W' $3"
}

new_cluster "$NEW" "$W/new"
check 'pg_upgrade by copies' upgrade "$W/old" "$W/new" ''
start "$NEW" "$W/new"
verify 'by copies'
stop "$NEW" "$W/new"

new_cluster "$NEW" "$W/new_linked"
check 'pg_upgrade by links' upgrade "$W/linked" "$W/new_linked" --link
start "$NEW" "$W/new_linked"
verify 'by links'
stop "$NEW" "$W/new_linked"

new_cluster "$NEW" "$W/restored"
start "$NEW" "$W/restored"
check 'restore of the dump' bash -c "runuser -u postgres -- env PGHOST='$W' '$NEW/psql' -X -q -d postgres -f '$W/dump.sql' 2>&1 | (! grep ERROR | grep -v 'role \"postgres\" already exists')"
verify 'by dump'
stop "$NEW" "$W/restored"

echo "$PASSED passed, $FAILED failed"
[ "$FAILED" -eq 0 ]
