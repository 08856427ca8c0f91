#!/bin/bash
# Test of the checker: broken builds must be caught, each within 60 s of chaos.
#
#	bash test/chaos/broken.sh [NAME...]		default: all
#
# A name is a patch in test/chaos/broken/, or completion-in-another-transaction,
# which breaks the clients.  Ends with "N passed, N failed".
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)

if [ $# -eq 0 ]; then
	set -- completion-in-another-transaction
	for file in "$HERE"/broken/*.patch; do
		name=${file##*/}
		set -- "$@" "${name%.patch}"
	done
fi
out=$(mktemp)
logs=$(mktemp -d)
trap 'rm -rf "$out" "$logs"' EXIT
passed=0
failed=0
for name in "$@"; do
	status=0
	bash "$HERE/run.sh" --seconds 60 --seed "${IDEM_SEED:-1}" --log "$logs" --broken "$name" > "$out" 2>&1 || status=$?
	rules=$(sed -n 's/^not ok - \([^:]*\):.* (\([0-9]*\), first after \([0-9]*\) s)$/\3 s by \1 (\2),/p' "$out" | sort -n | tr '\n' ' ')
	if [ "$status" -eq 1 ] && [ -n "$rules" ] && grep -qE '^[0-9]+ passed, [1-9][0-9]* failed$' "$out"; then
		passed=$((passed + 1))
		echo "$name: caught after ${rules%, }"
	else
		failed=$((failed + 1))
		echo "$name: MISSED (status $status)"
		tail -20 "$out" | cut -c1-300
	fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
