#!/bin/bash
# Does docs/cases.md agree with the tests?  Every case has a test that exists and names the
# case; where the project's list of cases can be read, none is missing.  Ends with
# "N passed, N failed".
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
passed=0
failed=0
no() { failed=$((failed + 1)); echo "not ok - $1"; }

while IFS='|' read -r _ case fault here tests _; do
	case=${case// /}
	bad=
	[ -n "${fault// /}" ] && [ -n "${here// /}" ] || bad="no text"
	files=$(grep -oE '`[^`]+`' <<< "$tests" | tr -d '`')
	[ -n "$files" ] || bad="no test"
	for file in $files; do
		grep -qE "\\b$case\\b" "$file" 2> /dev/null || bad="$file does not name it"
	done
	if [ -n "$bad" ]; then no "$case: $bad"; else passed=$((passed + 1)); fi
done < <(grep -E '^\| C[0-9]+ \|' docs/cases.md)

# Cases that a test names are in the list.
for case in $(grep -rohE '\bC[0-9]{2,3}\b' sql test/specs test/t | sort -u); do
	grep -q "^| $case |" docs/cases.md || no "$case is named by a test and not listed"
done
for case in $(grep -oE '^### C[0-9]+' ../shared/CASES.md 2> /dev/null | cut -c5-); do
	grep -q "^| $case |" docs/cases.md || no "$case is not listed"
done
[ "$passed" -ge 89 ] || no "only $passed cases"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
