#!/bin/bash
# pg_upgrade from PostgreSQL 15 to 17, and a dump of 15 restored in 17:
#
#	bash test/upgrade.sh
#
# Both servers live in a Debian chroot: that of test/matrix.sh 17 with this system's 15
# copied into it.  It is kept in /var/cache/idempotency-chroots.  Records in every
# state must come over unchanged and go on.  Ends with "N passed, N failed".
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
CACHE=${IDEM_CHROOTS:-/var/cache/idempotency-chroots}
DIR=$CACHE/pg15-17
OLD=/usr/lib/postgresql/15
. "$ROOT/test/apt.sh"

if [ "$(id -u)" -ne 0 ]; then exec sudo --preserve-env=IDEM_CHROOTS,CI bash "$0" "$@"; fi

# The 15 of this system, with the libraries that the chroot has no version of.
build_chroot() {
	local part lib
	install_packages postgresql-15 postgresql-server-dev-15
	bash "$ROOT/test/matrix.sh" 17 --build
	rm -rf "$DIR.new"
	cp -al "$CACHE/pg17" "$DIR.new"
	rm -rf "$DIR.new/tree"
	for part in usr/lib/postgresql/15 usr/share/postgresql/15 usr/include/postgresql/15; do
		mkdir -p "$DIR.new/${part%/*}"
		cp -a "/$part" "$DIR.new/$part"
	done
	for lib in $(ldd "$OLD"/bin/{postgres,psql,pg_dump} "$OLD/lib/pgcrypto.so" | awk '$3 ~ "^/" { print $3 }' | sort -u); do
		[ -e "$DIR.new/usr$lib" ] || [ -e "$DIR.new/usr${lib#/usr}" ] || cp -L "$lib" "$DIR.new/usr/lib/$(basename "$(dirname "$lib")")/"
	done
	mv "$DIR.new" "$DIR"
}

[ -x "$DIR/usr/lib/postgresql/15/bin/postgres" ] || build_chroot
rm -rf "$DIR/tree"
mkdir "$DIR/tree"
(cd "$ROOT" && tar -cf - --exclude=./.git --exclude='*.o' --exclude='*.so' --exclude='*.bc' .) | tar -xf - -C "$DIR/tree"

exec unshare --mount --pid --fork --kill-child bash -c '
	mount -t proc proc "$1/proc" && mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm" && mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
	exec chroot "$1" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb LC_ALL=C.UTF-8 bash /tree/test/upgrade/inside.sh
' upgrade "$DIR"
