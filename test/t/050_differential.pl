# The extension against a reference: the contract once more in plain PL/pgSQL (test/reference/reference.sql),
# both asked the same random things.  test/reference/driver.sql makes the calls and compares answers and records.
#
#	IDEM_DIFF_CALLS=300000 IDEM_DIFF_SEED=7 IDEM_TAP=test/t/050_differential.pl bash test/run.sh tap
#
# A seed is drawn if none is given, and printed.  The same seed gives the same calls on the same major of PostgreSQL.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

my $calls = $ENV{IDEM_DIFF_CALLS} || 20_000;
my $seed = $ENV{IDEM_DIFF_SEED} || int(rand(1_000_000)) + 1;
my $chunk = 4000;

# What must have been met, as function, outcome and least number in the default number of calls.
my $covered = <<'COVERED';
claim claimed 600
claim in_progress 60
claim succeeded 150
claim failed 150
claim unknown 20
claim conflict 100
claim retry_later 15
claim 22004 1
claim 22023 50
claim 42501 50
claim 54000 2
complete true 180
complete false 5
complete ID001 100
complete ID002 10
complete 22004 5
complete 42501 15
complete 54000 10
fail retryable_failed 150
fail failed 80
fail unknown 60
fail ID001 100
fail ID002 10
fail 22004 8
fail 22023 30
renew time 30
renew null 50
renew 22023 1
release true 120
release ID001 50
release ID002 5
checkpoint rows 30
checkpoint ID001 20
checkpoint 22004 3
checkpoint 22023 2
status processing 30
status succeeded 20
status failed 15
status unknown 5
status retryable_failed 3
status rows 20
execute executed 150
execute succeeded 150
execute failed 200
execute retry_later 40
execute unknown 20
execute in_progress 30
execute conflict 50
execute 42P13 10
execute 42883 2
execute 40001 3
execute 57014 5
execute XX000 5
execute ID001 3
once true 150
once false 50
once ID003 100
once 22023 30
claim_many claimed 120
claim_many in_progress 8
claim_many 22023 5
complete_many rows 60
complete_many ID001 50
once_many rows 120
once_many ID003 1
claim_due claimed 200
claim_due rows 50
reap rows 250
reap 22023 1
retry retryable_failed 200
retry ID003 100
retry ID002 10
retry 42501 8
retry_many rows 200
resolve succeeded 60
resolve failed 60
resolve ID003 50
resolve 22023 15
revoke processing 100
revoke ID003 50
forget forgotten 80
forget ID003 30
COVERED

my $node = new_node('differential');
my $s = session($node);

$s->q("\\i test/reference/$_") for qw(reference.sql driver.sql);
note "IDEM_DIFF_SEED=$seed IDEM_DIFF_CALLS=$calls";
$s->q('SELECT setseed(' . (($seed * 7919) % 1_000_003) / 1_000_003 . ')');

my $state = '00000';
for (my $left = $calls; $left > 0 && $state eq '00000'; $left -= $chunk)
{
	$state = $s->try('CALL ref.run(' . ($left < $chunk ? $left : $chunk) . ')');
	last if $state ne '00000';
	$s->q('VACUUM ANALYZE idem_record, idem_policy, ref.record, ref.history');
}
is($state, '00000', "extension and reference agree, IDEM_DIFF_SEED=$seed")
  or diag($s->{err}), done_testing(), exit 1;

my ($made, $undone, $keys) = split /\|/,
  $s->q('SELECT count(*), count(*) FILTER (WHERE undone), (SELECT count(DISTINCT k) FROM ref.history, unnest(keys) k) FROM ref.history');
note "$made calls, $undone of them undone, $keys keys";
cmp_ok($made, '>=', $calls, 'calls made');
cmp_ok($undone, '>=', $made / 20, 'calls undone');

my %seen = map { my ($f, $o, $n) = split /\|/; ("$f $o" => $n) }
  split /\n/, $s->q('SELECT function, outcome, count(*) FROM ref.history GROUP BY 1, 2 ORDER BY 1, 2');
note join ', ', map { "$_: $seen{$_}" } sort keys %seen;
for (split /\n/, $covered)
{
	my ($what, $least) = /^(\w+ \w+) (\d+)$/ or die $_;
	$least = int($least * $calls / 20_000);
	cmp_ok($seen{$what} // 0, '>=', $least, "$what");
}

# What no outcome shows.
my %also = map { split /\|/ } split /\n/, $s->q(<<'SQL');
SELECT 'previous ' || p, count(h) FROM unnest('{none,retryable_failed,lease_expired,retried}'::text[]) p
	LEFT JOIN ref.history h ON h.outcome = 'claimed' AND h.answer LIKE format('%%"previous": "%s"%%', p) GROUP BY p
UNION ALL SELECT 'exhausted', count(*) FROM ref.history WHERE answer LIKE '%"exhausted"%'
UNION ALL SELECT 'progress', count(*) FROM ref.history WHERE outcome = 'claimed' AND answer LIKE '%"progress": {%'
UNION ALL SELECT 'settled by a reap', count(*) FROM ref.history WHERE function = 'reap' AND answer ~ '"(expired|exhausted)": [1-9]'
UNION ALL SELECT 'purges', count(*) FROM ref.history WHERE function = 'reap' AND answer ~ '"purged": [1-9]'
UNION ALL SELECT 'retried by retry_many', count(*) FROM ref.history WHERE function = 'retry_many' AND answer ~ '"retried": [1-9]'
UNION ALL SELECT 'work of handlers', count(*) FROM ref.work WHERE side = 'idem_'
UNION ALL SELECT 'audit', count(*) FROM ref.audit
SQL
my %least = ('settled by a reap' => 20, purges => 2, 'retried by retry_many' => 20, progress => 20);
note join ', ', map { "$_: $also{$_}" } sort keys %also;
cmp_ok($also{$_}, '>=', int(($least{$_} // 50) * $calls / 20_000), $_) for sort keys %also;

done_testing();
