#!/bin/bash
# The models, checked exhaustively for small bounds:
#
#	bash test/model/run.sh			two minutes
#	bash test/model/run.sh --big	larger bounds; needs 12 GB
#
# Each line is a configuration: what it is expected to do, states, depth, time.  A
# search that was cut short is a failure, and so is a broken variant that holds.
# Ends with "N passed, N failed".
set -uo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
if [ "$(id -u)" -ne 0 ]; then exec sudo bash "$0" "$@"; fi
. "$HERE/../apt.sh"
install_packages spin gcc libc6-dev
W=$(mktemp -d)
trap 'rm -rf "$W"' EXIT
cd "$W" || exit 1
MEMORY=2500
passed=0
failed=0

# check MODEL holds|fails NAME [-D...]
check() {
	local model=$1 expected=$2 name=$3 verdict states depth began=$SECONDS
	shift 3
	rm -f pan* ./*.trail
	if ! { spin -a "$@" "$HERE/$model.pml" && gcc -O2 -w -DSAFETY -DCOLLAPSE -DMEMLIM=$MEMORY -DVECTORSZ=2048 -o pan pan.c; } > build.log 2>&1; then
		cat build.log
		verdict=unbuilt
	else
		./pan -m2000000 > out 2>&1
		states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' out)
		depth=$(sed -n 's/.*depth reached \([0-9]*\).*/\1/p' out)
		if grep -qE 'errors: [1-9]' out; then
			verdict=fails
		elif grep -q 'errors: 0' out && ! grep -qE 'max search depth too small|out of memory|Search not completed' out; then
			verdict=holds
		else
			verdict='cut short'
		fi
	fi
	printf '%-10s %-40s %-10s expected %-6s %10s states, depth %s, %d s\n' "$model" "$name" "$verdict" "$expected" "${states:-?}" "${depth:-?}" $((SECONDS - began))
	if [ "$verdict" = "$expected" ]; then passed=$((passed + 1)); else failed=$((failed + 1)); grep -E 'assertion violated|invalid end' out 2> /dev/null; fi
}

check protocol holds '2 clients' -DCLIENTS=2
check protocol holds '2 clients, executor' -DCLIENTS=2 -DEXECUTORS=1 -DTRIES=1
check protocol holds '1 client, 2 executors' -DCLIENTS=1 -DEXECUTORS=2
check protocol holds '2 clients, operator' -DCLIENTS=2 -DOPERATORS=1 -DTRIES=1
check protocol holds 'client, executor, operator' -DCLIENTS=1 -DEXECUTORS=1 -DOPERATORS=1
check protocol fails 'no key lock' -DCLIENTS=2 -DEXECUTORS=1 -DNOLOCK
check protocol fails 'no key lock to finish' -DCLIENTS=2 -DNOLOCKFINISH
check protocol fails 'no key lock for operators' -DCLIENTS=2 -DOPERATORS=1 -DNOLOCKRETRY
check protocol fails 'token not checked' -DCLIENTS=2 -DNOFENCE
check protocol fails 'take-over keeps the token' -DCLIENTS=2 -DKEEPTOKEN
check protocol fails 'guard ends before the row is written' -DCLIENTS=1 -DEXECUTORS=2 -DGUARDEARLY
check protocol fails 'guard without the key lock' -DCLIENTS=1 -DEXECUTORS=1 -DGUARDONLY
check protocol fails 'a deletion in progress taken as done' -DCLIENTS=2 -DDELETEDABSENT
check protocol fails 'waiting with the key lock held' -DCLIENTS=2 -DWAITLOCKED
check ring holds '1 inserter, 2 turners' -DINSERTERS=1
check ring holds '2 inserters, 1 turner' -DTURNERS=1 -DTURNS=4
check ring fails 'current slice not asked again' -DNORECHECK -DTURNERS=1 -DTURNS=4
check ring fails 'closed without waiting for writers' -DNOSHARE -DTURNERS=1 -DTURNS=4
check ring fails 'truncated without a lock, and not asked again' -DNOEXCLUSIVE -DNORECHECK -DTURNERS=1 -DTURNS=4
check ring fails 'retention from the opening' -DFROMOPENING -DTURNERS=1 -DTURNS=4
check ring fails 'no retention' -DNORETENTION -DTURNERS=1 -DTURNS=4
check ring fails 'turners without the ring lock' -DINSERTERS=1 -DNORINGLOCK
if [ "${1:-}" = --big ]; then
	MEMORY=12000
	check protocol holds '3 clients' -DCLIENTS=3
	check protocol holds '2 clients, executor, operator' -DCLIENTS=2 -DEXECUTORS=1 -DOPERATORS=1
	check ring holds '2 inserters, 2 turners'
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
