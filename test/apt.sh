# apt.sh - sourced: install_packages NAME... installs what is missing of Debian packages;
# several scripts may do so at once.  IDEM_NO_APT=1 leaves everything as it is.

have() { [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$1" 2>/dev/null)" = 'ii ' ]; }

# A new postgresql-15 would make and start a cluster of its own: tell it not to.
keep_from_making_clusters() {
	local conf=/etc/postgresql-common/createcluster.conf
	have postgresql-15 && return
	mkdir -p "${conf%/*}"
	[ -e "$conf" ] || echo 'create_main_cluster = false' > "$conf"
	grep -q '^create_main_cluster' "$conf" || echo 'create_main_cluster = false' >> "$conf"
}

# Nor is a new pgbouncer started: for the time of the installation.  In a subshell.
keep_from_starting_services() {
	[ ! -e /usr/sbin/policy-rc.d ] || return 0
	trap 'rm -f /usr/sbin/policy-rc.d' EXIT
	printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
	chmod 755 /usr/sbin/policy-rc.d
}

install_packages() {
	local missing=() p
	for p in "$@"; do
		have "$p" || missing+=("$p")
	done
	if [ ${#missing[@]} -eq 0 ] || [ -n "${IDEM_NO_APT:-}" ]; then return; fi
	echo "installing ${missing[*]}" >&2
	(
		flock 8
		keep_from_making_clusters
		keep_from_starting_services
		export DEBIAN_FRONTEND=noninteractive
		apt-get update -qq >&2
		apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
	) 8> /run/lock/idempotency-apt.lock
}
