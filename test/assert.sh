#!/bin/bash
# The suites on PostgreSQL 15 built with assertions, memory checks and valgrind's marks:
#
#	bash test/assert.sh [SUITE...]			default: regress isolation
#	bash test/assert.sh --valgrind [SUITE...]	the server under valgrind
#	bash test/assert.sh --build				only build what is missing
#
# The server is built from Debian's source package, once (6 minutes), into
# /var/cache/idempotency-chroots/assert15.  Ends with "N passed, N failed".
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
CACHE=${IDEM_CHROOTS:-/var/cache/idempotency-chroots}
INST=$CACHE/assert15
. "$ROOT/test/apt.sh"

if [ "$(id -u)" -ne 0 ]; then exec sudo --preserve-env=IDEM_CHROOTS,CI bash "$0" "$@"; fi

# The source package, by a list of sources of our own.
get_source() {
	local mirror
	mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources 2>/dev/null)
	[ -n "$mirror" ] || mirror=$(awk '/^deb / { print $2; exit }' /etc/apt/sources.list)
	mkdir -p "$1/lists/partial" "$1/parts"
	echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" > "$1/sources.list"
	local options=(-o "Dir::Etc::SourceList=$1/sources.list" -o "Dir::Etc::SourceParts=$1/parts" -o "Dir::State::Lists=$1/lists" -o APT::Sandbox::User=root)
	apt-get update -qq "${options[@]}"
	(cd "$1" && apt-get source -qq --download-only "${options[@]}" postgresql-15)
}

# As user postgres, who cannot write to the system's PostgreSQL; from the .orig tarball,
# because Debian's patches fix the folder of the libraries.
build() {
	local dir
	install_packages dpkg-dev gcc make flex bison perl libicu-dev libssl-dev libreadline-dev liblz4-dev \
		libzstd-dev zlib1g-dev pkg-config bzip2 postgresql-common libipc-run-perl
	dir=$(mktemp -d)
	get_source "$dir"
	tar -xf "$dir"/postgresql-15_*.orig.tar.bz2 -C "$dir"
	mkdir -p "$INST.new"
	chmod 755 "$dir"
	chown -R postgres: "$dir" "$INST.new"
	(
		cd "$dir"/postgresql-15.*/
		as() { runuser -u postgres -- nice -n 10 "$@" > "$dir/build.log" 2>&1 || { tail -30 "$dir/build.log" >&2; exit 1; }; }
		as ./configure -q --prefix="$INST.new" --enable-cassert --enable-debug --enable-tap-tests --with-openssl --with-icu --with-lz4 --with-zstd \
			CFLAGS='-O1 -fno-omit-frame-pointer' CPPFLAGS=-DUSE_VALGRIND
		as make -s -j"$(nproc)"
		as make -s install
		as make -s -C contrib/pgcrypto install
		as make -s -C src/test/isolation install
		cp src/tools/valgrind.supp "$INST.new/share/"
	)
	rm -rf "$INST" "$dir"
	mv "$INST.new" "$INST"
}

# These tests make hundreds of thousands of values and calls: too many for valgrind.  For
# keys and digests test/fuzz has the sanitizers; claims and batches are in the specs, too.
[ "${1:-}" != --valgrind ] || { export IDEM_VALGRIND=1 IDEM_SKIP='key digest claim batch'; shift; }
install_packages postgresql-common valgrind		# valgrind: its header, too
mkdir -p "$CACHE"
exec 9> "$CACHE/assert15.lock"
flock 9
[ -x "$INST/bin/postgres" ] || { rm -rf "$INST.new"; build; }
flock -u 9
[ "${1:-}" != --build ] || exit 0

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
chmod 755 "$copy"
cp -a "$INST" "$copy/inst"
export IDEM_INST=$copy/inst
[ $# -gt 0 ] || set -- regress isolation
bash "$ROOT/test/run.sh" "$@"
