#!/bin/bash
# The suites on another supported PostgreSQL, in a Debian chroot of its own:
#
#	bash test/matrix.sh 17			(trixie)
#	bash test/matrix.sh 18			(forky)
#	bash test/matrix.sh 17 --build	only builds the chroot
#
# The chroot is built from the mirror that this system uses, kept in
# /var/cache/idempotency-chroots, and used in namespaces of its own, so that no
# mount and no server outlives the test.  Ends with "N passed, N failed".
set -euo pipefail
MAJOR=$1
shift
SUITES=${*:-regress isolation tap}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
CACHE=${IDEM_CHROOTS:-/var/cache/idempotency-chroots}
DIR=$CACHE/pg$MAJOR
. "$ROOT/test/apt.sh"
declare -A SUITE_OF=([17]=trixie [18]=forky)

if [ "$(id -u)" -ne 0 ]; then exec sudo --preserve-env=IDEM_CHROOTS,CI bash "$0" "$MAJOR" "$@"; fi

build_chroot() {
	local mirror
	install_packages mmdebstrap
	mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources 2>/dev/null)
	[ -n "$mirror" ] || mirror=$(awk '/^deb / { print $2; exit }' /etc/apt/sources.list)
	rm -rf "$DIR.new"
	mkdir -p "$CACHE"
	# server-dev without its clang and llvm: half the size
	mmdebstrap --quiet --variant=minbase --skip=cleanup/apt --aptopt='Acquire::Check-Valid-Until "false"' \
		--include="make,gcc,libc6-dev,libipc-run-perl,procps,python3-psycopg,postgresql-$MAJOR,libpq-dev,libssl-dev,libxml2-dev,zlib1g-dev,liblz4-dev,libzstd-dev" \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
		--dpkgopt='path-exclude=/usr/share/locale/*' \
		--customize-hook="chroot \"\$1\" sh -c 'cd /tmp && apt-get download -q postgresql-server-dev-$MAJOR && dpkg --force-depends -i postgresql-server-dev-${MAJOR}_*.deb && rm -f postgresql-server-dev-${MAJOR}_*.deb && rm -rf /var/cache/apt/archives/*.deb /var/lib/apt/lists/*'" \
		"${SUITE_OF[$MAJOR]}" "$DIR.new" "$mirror" > "$CACHE/pg$MAJOR.log" 2>&1 || { tail -20 "$CACHE/pg$MAJOR.log" >&2; return 1; }
	mv "$DIR.new" "$DIR"
}

mkdir -p "$CACHE"
exec 9> "$CACHE/pg$MAJOR.lock"
flock 9
[ -x "$DIR/usr/lib/postgresql/$MAJOR/bin/postgres" ] || { rm -rf "$DIR"; build_chroot; }
flock -u 9
[ "$SUITES" != --build ] || exit 0
rm -rf "$DIR/tree"
mkdir "$DIR/tree"
(cd "$ROOT" && tar -cf - --exclude=./.git --exclude='*.o' --exclude='*.so' --exclude='*.bc' .) | tar -xf - -C "$DIR/tree"

exec unshare --mount --pid --fork --kill-child bash -c '
	mount -t proc proc "$1/proc" && mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm" && mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
	exec chroot "$1" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb PGVER="$2" IDEM_NO_APT=1 IDEM_NO_NODE=1 IDEM_NO_POOLER=1 IDEM_TAP="${IDEM_TAP:-}" bash /tree/test/run.sh $3
' matrix "$DIR" "$MAJOR" "$SUITES"
