# Every function is stopped at every step: by an error, a cancel, a terminate and kill -9
# of its backend, and by being held there while another session asks.  What is left must be
# what was there before, no lock stays, and the same call made again does its work.  (C02, C05,
# C07, C20)
#
# Needs a build with failure points (make IDEM_FAILPOINTS=1); test/run.sh makes it and
# gives the settings that find it in IDEM_FAILPOINT_CONFIG.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

plan skip_all => 'no build with failure points (IDEM_FAILPOINT_CONFIG)' unless $ENV{IDEM_FAILPOINT_CONFIG};
$ENV{TEMP_CONFIG} = $ENV{IDEM_FAILPOINT_CONFIG};

my $node = new_node('failpoints', conf => "fsync = off\nrestart_after_crash = on\nshared_buffers = 16MB\n");
my $s = session($node);

$s->q(<<'SQL');
CREATE TABLE business (key text, attempt integer);
CREATE FUNCTION work(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO business VALUES (key, attempt);
	IF request ? 'raise' THEN RAISE EXCEPTION SQLSTATE 'IDR00'; END IF;
	RETURN jsonb_build_object('attempt', attempt);
END $$;
UPDATE idem_policy SET retention = '1 h', backoff_base = '1 min', jitter = 'none', max_attempts = 5, store_request = true WHERE operation = 'default';
INSERT INTO idem_policy (operation, on_lease_expiry, max_attempts) VALUES ('doubt', 'unknown', 5), ('one', 'retry', 1);
-- everything that a call may change
CREATE FUNCTION everything() RETURNS text LANGUAGE sql VOLATILE AS $$
	SELECT md5(concat((SELECT string_agg(r::text, ';' ORDER BY r::text COLLATE "C") FROM idem_record r),
		(SELECT string_agg(r::text, ';' ORDER BY slice) FROM idem_ring r),
		(SELECT string_agg(r::text, ';' ORDER BY r::text COLLATE "C") FROM idem_audit r),
		(SELECT string_agg(r::text, ';' ORDER BY r::text COLLATE "C") FROM business r)))
$$;
SQL

my $t = token(1);
my $claim = "SELECT idem_claim('k', '{}', token => '$t')";
my $late = "SET idempotency.clock_offset = '100 s'";     # leases are over, retries due
my $retry_in = sub { "SELECT idem_fail('k', '$t', 'retryable', 'no', 'E', '$_[0]')" };
my $fill = "SELECT count(*) FROM generate_series(1, 3) i, idem_once('f' || i)";

# name, statements that make the state, the call, its answer, further setting for the session
my @scenarios = (
	[ 'claim, new', [], "SELECT outcome FROM idem_claim('k', '{}')", 'claimed' ],
	[ 'claim, taken over', [$claim], "SELECT outcome, attempts, previous FROM idem_claim('k', '{}')", 'claimed|2|lease_expired', $late ],
	[ 'claim, due', [ $claim, $retry_in->('1 s') ], "SELECT outcome, attempts, previous FROM idem_claim('k', '{}')", 'claimed|2|retryable_failed', $late ],
	[ 'claim, held', [$claim], "SELECT outcome, attempts FROM idem_claim('k', '{}')", 'in_progress|1' ],
	[ 'claim, done', [ $claim, "SELECT idem_complete('k', '$t', '1')" ], "SELECT outcome, result_json FROM idem_claim('k', '{}')", 'succeeded|1' ],
	[ 'claim, lapsed in doubt', ["SELECT idem_claim('k', '{}', 'doubt')"], "SELECT outcome FROM idem_claim('k', '{}')", 'unknown', $late ],
	[ 'claim, used up', ["SELECT idem_claim('k', '{}', 'one')"], "SELECT outcome, error_code FROM idem_claim('k', '{}')", 'failed|exhausted', $late ],
	[ 'complete', [$claim], "SELECT idem_complete('k', '$t', '{\"r\": 1}')", 't' ],
	[ 'complete, large', [$claim], "SELECT idem_complete('k', '$t', jsonb_build_array(repeat(md5('1'), 500)), decode(repeat('00ff01', 9000), 'hex'))", 't' ],
	[ 'fail, retryable', [$claim], "SELECT status FROM idem_fail('k', '$t', 'retryable')", 'retryable_failed' ],
	[ 'fail, permanent', [$claim], "SELECT status FROM idem_fail('k', '$t', 'permanent')", 'failed' ],
	[ 'fail, unknown', [$claim], "SELECT status FROM idem_fail('k', '$t', 'unknown')", 'unknown' ],
	[ 'renew', [$claim], "SELECT idem_renew('k', '$t', '1 h') IS NOT NULL", 't' ],
	[ 'release, first', [$claim], "SELECT idem_release('k', '$t')", 't' ],
	[ 'release, second', [ "SELECT idem_claim('k', '{}')", $late, $claim ], "SELECT idem_release('k', '$t')", 't', $late ],
	[ 'checkpoint', [$claim], "SELECT idem_checkpoint('k', '$t', 'sent', '7')", '{"sent": 7}' ],
	[ 'execute, new', [], "SELECT outcome, result_json FROM idem_execute('k', '{}', 'work(text,jsonb,integer)')", 'executed|{"attempt": 1}' ],
	[ 'execute, new, fails', [], "SELECT outcome, error_code FROM idem_execute('k', '{\"raise\": 1}', 'work(text,jsonb,integer)')", 'retry_later|IDR00' ],
	[ 'execute, due', [ $claim, $retry_in->('1 s') ], "SELECT outcome, result_json FROM idem_execute('k', '{}', 'work(text,jsonb,integer)')", 'executed|{"attempt": 2}', $late ],
	[ 'execute, due, fails', [ "SELECT idem_claim('k', '{\"raise\": 1}', token => '$t')", $retry_in->('1 s') ],
		"SELECT outcome, attempts FROM idem_execute('k', '{\"raise\": 1}', 'work(text,jsonb,integer)')", 'retry_later|2', $late ],
	[ 'once, new', [], "SELECT idem_once('k')", 't' ],
	[ 'once, due', [ "SELECT idem_claim('k', token => '$t')", $retry_in->('1 s') ], "SELECT idem_once('k')", 't', $late ],
	[ 'claim_many', [ "SELECT idem_once('k1')", "SELECT idem_claim('k2')" ], "SELECT string_agg(outcome, ',' ORDER BY ordinality) FROM idem_claim_many('{k3,k2,k1,k}')", 'claimed,in_progress,succeeded,claimed' ],
	[ 'complete_many', [ "SELECT idem_claim(k, token => '$t') FROM unnest('{k,k1,k2}'::text[]) k" ],
		"SELECT count(*) FROM idem_complete_many('{k,k1,k2}', ARRAY['$t', '$t', '$t']::uuid[])", '3' ],
	[ 'once_many', ["SELECT idem_once('k1')"], "SELECT count(*) FROM idem_once_many('{k2,k1,k}')", '3' ],
	[ 'claim_due', [ $claim, $retry_in->('1 s') ], "SELECT key, attempts FROM idem_claim_due()", 'k|2', $late ],
	[ 'reap, lapses', [ "SELECT idem_claim('k', '{}', 'doubt')", "SELECT idem_claim('k1', '{}', 'one')", "SELECT idem_claim('k2', '{}', 'one')" ],
		"SELECT expired, exhausted FROM idem_reap()", '1|2', $late ],
	[ 'reap, turn', [ $fill, 'SELECT idem_reap()' ], "SELECT rotated FROM idem_reap()", '1', "SET idempotency.clock_offset = '40 min'" ],
	[ 'reap, purge', [ $fill, 'SELECT idem_reap()', "SET idempotency.clock_offset = '40 min'", 'SELECT idem_reap()', 'SELECT idem_reap()', "SET idempotency.clock_offset = '40 min'" ],
		"SELECT purged FROM idem_reap()", '1', "SET idempotency.clock_offset = '3 h'" ],
	[ 'retry, failed', [ $claim, "SELECT idem_fail('k', '$t', 'permanent')" ], "SELECT idem_retry('k', 'test')", 'retryable_failed' ],
	[ 'retry, waiting', [ $claim, $retry_in->('1 h') ], "SELECT idem_retry('k', 'test')", 'retryable_failed' ],
	[ 'retry_many', [ $claim, "SELECT idem_fail('k', '$t', 'permanent')" ], "SELECT sum(retried) FROM idem_retry_many('default', NULL, 'test') r", '1' ],
	[ 'resolve, succeeded', [ $claim, "SELECT idem_fail('k', '$t', 'unknown')" ], "SELECT idem_resolve('k', 'succeeded', 'test', '1')", 'succeeded' ],
	[ 'resolve, failed', [ $claim, "SELECT idem_fail('k', '$t', 'unknown')" ], "SELECT idem_resolve('k', 'failed', 'test')", 'failed' ],
	[ 'revoke', [$claim], "SELECT idem_revoke('k', 'test')", 'processing' ],
	[ 'forget, open', [ $claim, $retry_in->('1 h') ], "SELECT idem_forget('k', 'test')", '.*' ],
	[ 'forget, done', [ $claim, "SELECT idem_complete('k', '$t')" ], "SELECT idem_forget('k', 'test')", '.*' ],
);

my %reached;
my %killed;
my %done = (error => 0, cancel => 0, terminate => 0, kill => 0, wait => 0);
my $asker = session($node);

# Errors at these places are recorded as a failure, or passed over by the reaper.
my %survived = map { $_ => 1 } qw(handler-begins handler-ended);

sub fresh
{
	my ($scenario) = @_;
	my (undef, $before, undef, undef, $setting) = @$scenario;

	$s->q('RESET idempotency.clock_offset; TRUNCATE idem_record, idem_ring, business; ALTER TABLE idem_audit DISABLE TRIGGER USER; TRUNCATE idem_audit; ALTER TABLE idem_audit ENABLE TRIGGER USER');
	$s->q($_) for @$before;
	$s->q('RESET idempotency.clock_offset');
	return $setting ? "$setting;" : '';
}

# [name, how often] of each point that the call passes.
sub points
{
	my ($call, $setting) = @_;
	my %count;
	my @order;

	$s->q("$setting BEGIN; SET LOCAL idempotency.failpoint = 'trace'; $call; ROLLBACK");
	for my $name ($s->{err} =~ /failpoint (\S+)/g)
	{
		push @order, $name unless $count{$name}++;
		$reached{$name} = 1;
	}
	return map { [ $_, $count{$_} ] } @order;
}

sub locks_left
{
	my ($observer) = @_;
	return $observer->q("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid > 2");
}

# Stops a call at a point, in a transaction by itself; nothing may be left of it.
sub stop
{
	my ($scenario, $action, $name, $nth, $setting) = @_;
	my ($what, undef, $call) = @$scenario;
	my $label = "$what: $action at $name ($nth)";
	my $before = $s->q('SELECT everything()');
	my $victim = session($node);
	my $pid = $victim->pid;
	my %expected = (error => 'IDFP0', cancel => '57014', terminate => '57P01|08006', kill => '08006');

	$victim->q("$setting SET idempotency.failpoint = '$action $name $nth'");
	my $state = $victim->try($action eq 'error' ? "BEGIN; $call" : $call);
	if ($action eq 'error' && $state eq '00000' && ($survived{$name} || $what =~ /^reap/))
	{
		$victim->q('ROLLBACK');
		pass("$label: survived");
	}
	else
	{
		like($state, qr/^(?:$expected{$action})$/, "$label: " . substr($call, 7, 30)) or diag($victim->{err});
		$victim->try('ROLLBACK') if $action eq 'error';
	}
	$victim->quit;
	if ($action eq 'kill')
	{
		wait_until('the crash is noticed', sub { $s->try('SELECT 1') ne '00000' });
		wait_until('the server is back', sub { eval { $s = session($node); $asker = session($node); 1 } });
	}
	wait_until('the backend is gone', sub { $s->q("SELECT count(*) FROM pg_stat_activity WHERE pid = $pid") == 0; });
	is($s->q('SELECT everything()'), $before, "$label: nothing is left");
	is(locks_left($s), 0, "$label: no lock is left");
	$done{$action}++;
	return;
}

# Stops it in a savepoint; after going back to that the same transaction can make the call.
sub stop_in_savepoint
{
	my ($scenario, $name, $setting) = @_;
	my ($what, undef, $call, $answer) = @$scenario;
	my $before = $s->q('SELECT everything()');

	$s->q("$setting BEGIN; INSERT INTO business VALUES ('mine', 0); SAVEPOINT s");
	$s->try("SET LOCAL idempotency.failpoint = 'error $name 1'; $call");
	$s->q('ROLLBACK TO s');
	like($s->q($call), qr/^$answer$/, "$what: after an error at $name, back to the savepoint, again");
	$s->q('ROLLBACK; RESET idempotency.clock_offset');
	is($s->q('SELECT everything()'), $before, "$what: rolled back");
	return;
}

# Holds the call at a point while another session claims: it is told what was, or that
# it is in progress, or has to wait.
sub hold
{
	my ($scenario, $name, $nth, $setting) = @_;
	my ($what, undef, $call, $answer) = @$scenario;
	my $ask = "$setting SET lock_timeout = '50 ms'; BEGIN; SELECT outcome FROM idem_claim('k', '{}')";
	my $first = $asker->try($ask) eq '00000' ? $asker->{out} : '';

	$asker->q('ROLLBACK');
	my $victim = session($node);
	$s->q('SELECT pg_advisory_lock(480)');
	$victim->q("$setting BEGIN; SET idempotency.failpoint = 'wait $name $nth'");
	$victim->start($call);
	wait_lock_wait($s, $victim);
	my $state = $asker->try($ask);
	my $told = $asker->{out};
	ok($state eq '55P03' || ($state eq '00000' && ($told eq 'in_progress' || ($told eq $first && $first ne 'claimed') || $what =~ /^reap, (?:turn|purge)/)),
		"$what: held at $name ($nth), another session is told $state $told");
	$asker->q('ROLLBACK');
	$s->q('SELECT pg_advisory_unlock(480)');
	is($victim->finish, '00000', "$what: goes on after $name ($nth)") or diag($victim->{err});
	like($victim->{out}, qr/^$answer$/, "$what: with its answer");
	$victim->q('ROLLBACK');
	$victim->quit;
	$done{wait}++;
	return;
}

for my $scenario (@scenarios)
{
	my ($what, undef, $call, $answer) = @$scenario;
	my $setting = fresh($scenario);
	my @points = points($call, $setting);

	$s->q('RESET idempotency.clock_offset');
	for my $point (@points)
	{
		my ($name, $times) = @$point;
		stop($scenario, 'error', $name, $_, $setting) for 1 .. ($times > 6 ? 6 : $times);
		stop($scenario, $_, $name, $times, $setting) for qw(cancel terminate);
		stop_in_savepoint($scenario, $name, $setting);
		hold($scenario, $name, $times, $setting);
	}
	# kill -9 takes a second each: at one point of a scenario, one that was not killed yet
	if (@points)
	{
		my ($point) = ((grep { !$killed{ $_->[0] } } @points), $points[-1]);
		$killed{ $point->[0] } = 1;
		stop($scenario, 'kill', $point->[0], $point->[1], $setting);
	}
	$s->q($setting) if $setting;
	like($s->q($call), qr/^$answer$/, "$what: the call does its work after all that");
	$s->q('RESET idempotency.clock_offset');
	is($s->q('SELECT count(*) FROM idem_check()'), 0, "$what: nothing to complain of");
}

# Every kind of point is killed at least once.
for my $name (grep { !$killed{$_} } sort keys %reached)
{
	my ($scenario) = grep {
		my $setting = fresh($_);
		my $found = grep { $_->[0] eq $name } points($_->[2], $setting);
		$s->q('RESET idempotency.clock_offset');
		$found;
	} @scenarios;
	stop($scenario, 'kill', $name, 1, fresh($scenario));
}

# Two more that are reached only where another session stands in the way.
for my $case ([ 'transaction-awaited', "BEGIN; $claim" ], [ 'row-lock-awaited', "BEGIN; SELECT 1 FROM idem_record WHERE idempotency_key = 'k' FOR UPDATE" ])
{
	my ($name, $other) = @$case;
	for my $action (qw(error cancel terminate kill))
	{
		fresh([ '', $name eq 'row-lock-awaited' ? [$claim] : [] ]);
		my $holder = session($node);
		$holder->q($other);
		stop([ "complete beside another transaction", [], "SELECT idem_complete('k', '$t')" ], $action, $name, 1, '');
		$holder->try('ROLLBACK');
		$holder->quit;
	}
	$reached{$name} = 1;
}

# No point is left out.
my %named;
for my $file (glob "$ENV{TESTDIR}/src/*.c")
{
	my $text = PostgreSQL::Test::Utils::slurp_file($file);
	$named{$_} = 1 for $text =~ /^\s+IDEM_FAILPOINT\("([^"]+)"\)/mg;
}
is(join(' ', sort keys %reached), join(' ', sort keys %named), 'every failure point in the source was reached');
note join ', ', map { "$_: $done{$_}" } sort keys %done;
cmp_ok($done{kill}, '>=', scalar keys %named, 'kills');

done_testing();
