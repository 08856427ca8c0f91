# Everything at once: claiming clients, recovery workers, reapers, operators,
# rotation and truncation, old snapshots, DDL and kills, over hot and cold keys.
# After every round nobody is connected, and the tables and the history of all
# answers are checked against the rules in test/stress/IdemStress.pm.
#
#	IDEM_STRESS_SECONDS		how long in all (default 25)
#	IDEM_STRESS_ROUND		how long a round is (default 6)
#	IDEM_STRESS_SEED		repeats the choices of an earlier run
#	IDEM_STRESS_LOG			folder for the logs, kept (default: a temporary one)

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib", "$FindBin::RealBin/../stress";
use IdemTest;
use IdemStress;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $seconds = $ENV{IDEM_STRESS_SECONDS} || 25;
my $length  = $ENV{IDEM_STRESS_ROUND}   || 6;
my $seed    = $ENV{IDEM_STRESS_SEED}    || int(time()) % 1_000_000;
my $dir     = $ENV{IDEM_STRESS_LOG}     || PostgreSQL::Test::Utils::tempdir();

note "seed $seed";
my $node = new_node('stress', conf => <<'CONF');
autovacuum = on
autovacuum_naptime = 1s
max_connections = 60
fsync = off
restart_after_crash = off
log_min_messages = warning
log_error_verbosity = verbose
CONF
IdemStress::setup($node);

my $history = IdemStress::History->new;
my $end = time() + $seconds;
my $began = time();
my $broken = 0;

for (my $round = 1; $round == 1 || time() < $end; $round++)
{
	my $left = $end - time();
	my @files = IdemStress::run_round($node, $dir, $seed, $round, $left < $length ? ($left > 1 ? $left : 1) : $length);
	my $s = session($node);

	wait_until('all clients are gone',
		sub { $s->q("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'stress %'") == 0; });
	$history->read(@files);
	my @violations = $history->check($s);
	my $n = @violations;
	splice @violations, 20 if $n > 20;
	is($n, 0, sprintf 'round %d (seed %d, %.0f s): no rule is broken', $round, $seed, time() - $began)
	  or diag(join "\n", @violations);
	$broken = $n;
	last if $n;
}

my $n = $history->counts;
note join "\n", map { "$_: $n->{$_}" } sort keys %$n;

# A run in which nothing happens would prove nothing.
my %least = (
	'claim claimed' => 200, 'claim succeeded' => 50, 'claim in_progress' => 20, 'complete' => 100,
	'previous lease_expired' => 3, 'previous retryable_failed' => 5, 'reap: rotated' => 3, 'reap: purged' => 1, 'kill' => 5);
for my $what ($broken ? () : sort keys %least)
{
	cmp_ok($n->{$what} // 0, '>=', $least{$what}, "enough of: $what");
}

my $log = PostgreSQL::Test::Utils::slurp_file($node->logfile);
unlike($log, qr/PANIC|TRAP:|terminated by signal|could not open file|invalid page/, 'nothing broke in the server');
my @errors = grep { !/ID00[123]|IDR00|IDP00|IDU00|40001|40P01|57014|57P01|22023|42P07|42704|2BP01|57P03/ } $log =~ /^.*(?:ERROR|FATAL|PANIC):.*$/mg;
is(join("\n", @errors[ 0 .. ($#errors < 9 ? $#errors : 9) ]), '', 'no other error in the log of the server');

done_testing();
