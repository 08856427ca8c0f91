# Timeouts, cancels and terminations at random moments, in every function: the error
# has the SQLSTATE of what struck and no other, the records are untouched, or changed as
# a whole by a call that was answered (or whose connection was lost), no lock stays, and the
# next claim is answered as it should be.  (C02, C06, C08, C11, C44)
#
# Most calls are far shorter than a timeout can be, so a statement makes the call for
# many keys, and is struck somewhere in one of them.  t/040_failpoints.pl strikes at each step instead.
#
#	IDEM_TIMEOUTS_SEED		repeats the choices of an earlier run (not the moments)
#	IDEM_TIMEOUTS_ROUNDS	rounds per scenario and kind (default 3)

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

my $seed = $ENV{IDEM_TIMEOUTS_SEED} || int(time()) % 1_000_000;
my $rounds = $ENV{IDEM_TIMEOUTS_ROUNDS} || 3;
note "seed $seed";
srand $seed;

my $node = new_node('timeouts', conf => "fsync = off\nsynchronous_commit = off\n");
my $o = session($node, name => 'observer');
my $holder = session($node, name => 'holder');
my $victim;
my $version = $o->q("SELECT current_setting('server_version_num')::int / 10000");

$o->q(<<'SQL');
CREATE TABLE business (key text, attempt integer);
CREATE TABLE gate ();
CREATE TABLE keys AS SELECT 'k' || i AS k, i FROM generate_series(1, 1000) i;
ANALYZE keys;
UPDATE idem_policy SET backoff_base = '1 min', jitter = 'none', max_attempts = 5, store_request = true, lease = '1 h' WHERE operation = 'default';
INSERT INTO idem_policy (operation, on_lease_expiry, max_attempts) VALUES ('doubt', 'unknown', 5), ('one', 'retry', 1);
CREATE FUNCTION work(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO business SELECT key, attempt FROM generate_series(1, (request ->> 'rows')::int);
	PERFORM pg_sleep(coalesce((request ->> 'sleep')::float8, 0));
	IF request ? 'gate' THEN LOCK TABLE gate IN ACCESS SHARE MODE; END IF;
	IF request ? 'raise' THEN RAISE EXCEPTION SQLSTATE 'IDR00'; END IF;
	RETURN jsonb_build_object('attempt', attempt);
EXCEPTION WHEN division_by_zero THEN RETURN NULL;
END $$;
-- every row that a call may change, with the transaction that wrote it
CREATE FUNCTION everything() RETURNS text LANGUAGE sql VOLATILE AS $$
	SELECT md5(concat((SELECT string_agg(concat(tableoid::regclass, ctid, xmin, r), ';' ORDER BY r::text COLLATE "C") FROM idem_record r),
		(SELECT string_agg(concat(xmin, r), ';' ORDER BY slice) FROM idem_ring r),
		(SELECT string_agg(concat(xmin, r), ';' ORDER BY id) FROM idem_audit r),
		(SELECT string_agg(concat(xmin, r), ';' ORDER BY r::text COLLATE "C") FROM business r)))
$$;
-- the same, without what differs from call to call
CREATE FUNCTION summary() RETURNS text LANGUAGE sql VOLATILE AS $$
	SELECT concat_ws(', ', (SELECT string_agg(x, ', ' ORDER BY x) FROM (SELECT concat_ws(' ', count(*), status, attempts, error_code,
			CASE WHEN lease_until > idem_record.updated_at + '2 h' THEN 'renewed' END, result_json, progress) AS x
			FROM idem_record GROUP BY status, attempts, error_code, lease_until > idem_record.updated_at + '2 h', result_json, progress) g),
		(SELECT nullif(count(*), 0) || ' audit' FROM idem_audit), (SELECT nullif(count(*), 0) || ' business' FROM business))
$$;
-- a claim, as the next client makes it
CREATE FUNCTION next_claim(key text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE answer text;
BEGIN
	SELECT outcome INTO answer FROM idem_claim(key, '{}');
	RAISE EXCEPTION SQLSTATE 'P0999';
EXCEPTION WHEN SQLSTATE 'P0999' THEN RETURN answer;
END $$;
SQL

my $t = token(1);
my $late = "SET idempotency.clock_offset = '2 h'";    # leases are over, retries due
my $claims = sub { my ($n, $op) = @_; return "SELECT count(idem_claim(k, '{}', " . ($op ? "'$op'" : 'NULL') . ", token => '$t')) FROM keys WHERE i <= $n" };
my $fails = sub { my ($n, $kind) = @_; return "SELECT count(idem_fail(k, '$t', '$kind', 'no', 'E')) FROM keys WHERE i <= $n" };
my $each = sub { my ($n, $call) = @_; return "SELECT count($call) FROM keys WHERE i <= $n" };
my $execute = sub { my ($request) = @_; return "idem_execute(k, '$request', 'work(text,jsonb,integer)')" };
my $array = sub { my ($n, $what) = @_; return "(SELECT array_agg($what ORDER BY i DESC) FROM keys WHERE i <= $n)" };

# n: keys.  setup: statements before.  call.  after: what it makes of the records.  next: the
# answer to the next claim, before and after.  late: the victim's clock.  hold: what another session does in
# an open transaction, so that the call waits.  lock: how lock_timeout ends the call (55P03 if it waits for a lock).
my @scenarios = (
	{ name => 'claim', n => 300, call => $each->(300, "idem_claim(k, '{}')"), after => '300 processing 1', next => [ 'claimed', 'in_progress' ] },
	{ name => 'claim, replay', n => 300, setup => [ $claims->(300), "SELECT count(idem_complete(k, '$t', '1')) FROM keys WHERE i <= 300" ], call => $each->(300, "idem_claim(k, '{}')"), after => '300 succeeded 1 1', next => [ 'succeeded', 'succeeded' ] },
	{ name => 'claim, taken over', n => 300, setup => [ $claims->(300) ], late => 1, call => $each->(300, "idem_claim(k, '{}')"), after => '300 processing 2', next => [ 'in_progress', 'in_progress' ] },
	{ name => 'claim, due', n => 300, setup => [ $claims->(300), $fails->(300, 'retryable') ], late => 1, call => $each->(300, "idem_claim(k, '{}')"), after => '300 processing 2 E', next => [ 'retry_later', 'in_progress' ] },
	{ name => 'complete', n => 300, setup => [ $claims->(300) ], call => $each->(300, "idem_complete(k, '$t', '7', decode(repeat('00ff', 500), 'hex'))"), after => '300 succeeded 1 7', next => [ 'in_progress', 'succeeded' ] },
	{ name => 'fail, retryable', n => 300, setup => [ $claims->(300) ], call => $fails->(300, 'retryable'), after => '300 retryable_failed 1 E', next => [ 'in_progress', 'retry_later' ] },
	{ name => 'fail, permanent', n => 300, setup => [ $claims->(300) ], call => $fails->(300, 'permanent'), after => '300 failed 1 E', next => [ 'in_progress', 'failed' ] },
	{ name => 'fail, unknown', n => 300, setup => [ $claims->(300) ], call => $fails->(300, 'unknown'), after => '300 unknown 1 E', next => [ 'in_progress', 'unknown' ] },
	{ name => 'renew', n => 300, setup => [ $claims->(300) ], call => $each->(300, "idem_renew(k, '$t', '5 h')"), after => '300 processing 1 renewed', next => [ 'in_progress', 'in_progress' ] },
	{ name => 'release', n => 300, setup => [ $claims->(300) ], call => $each->(300, "idem_release(k, '$t')"), after => '', next => [ 'in_progress', 'claimed' ] },
	{ name => 'checkpoint', n => 300, setup => [ $claims->(300) ], call => $each->(300, "idem_checkpoint(k, '$t', 'sent', '7')"), after => '300 processing 1 {"sent": 7}', next => [ 'in_progress', 'in_progress' ] },
	{ name => 'execute', n => 100, call => $each->(100, $execute->('{"rows": 3}')), after => '100 succeeded 1 {"attempt": 1}, 300 business', next => [ 'claimed', 'conflict' ] },
	{ name => 'execute, works long', n => 1, call => $each->(1, $execute->('{"rows": 20000}')), after => '1 succeeded 1 {"attempt": 1}, 20000 business', next => [ 'claimed', 'conflict' ] },
	{ name => 'execute, sleeps', n => 1, call => $each->(1, $execute->('{"rows": 1, "sleep": 0.03}')), after => '1 succeeded 1 {"attempt": 1}, 1 business', next => [ 'claimed', 'conflict' ] },
	{ name => 'execute, fails', n => 100, call => $each->(100, $execute->('{"rows": 3, "raise": 1}')), after => '100 retryable_failed 1 IDR00', next => [ 'claimed', 'conflict' ] },
	{ name => 'execute, due', n => 100, setup => [ "SELECT count(idem_claim(k, '{\"rows\": 2}', token => '$t')) FROM keys WHERE i <= 100", $fails->(100, 'retryable') ], late => 1, call => $each->(100, $execute->('{"rows": 2}')), after => '100 succeeded 2 {"attempt": 2}, 200 business', next => [ 'conflict', 'conflict' ] },
	{ name => 'once', n => 300, call => $each->(300, "idem_once(k, '{}')"), after => '300 succeeded 1', next => [ 'claimed', 'succeeded' ] },
	{ name => 'claim_many', n => 1000, call => "SELECT count(*) FROM idem_claim_many(" . $array->(1000, 'k') . ')', after => '1000 processing 1', next => [ 'claimed', 'conflict' ] },
	{ name => 'complete_many', n => 1000, setup => [ $claims->(1000) ], call => "SELECT count(*) FROM idem_complete_many(" . $array->(1000, 'k') . ', ' . $array->(1000, "'$t'::uuid") . ')', after => '1000 succeeded 1', next => [ 'in_progress', 'succeeded' ] },
	{ name => 'once_many', n => 1000, call => "SELECT count(*) FROM idem_once_many(" . $array->(1000, 'k') . ')', after => '1000 succeeded 1', next => [ 'claimed', 'conflict' ] },
	{ name => 'claim_due', n => 500, setup => [ $claims->(500), $fails->(500, 'retryable') ], late => 1, call => "SELECT count(*) FROM idem_claim_due(max_records => 1000)", after => '500 processing 2 E', next => [ 'retry_later', 'in_progress' ] },
	{ name => 'reap', n => 600, setup => [ "SELECT count(idem_claim(k, '{}', CASE WHEN i % 2 = 0 THEN 'doubt' ELSE 'one' END)) FROM keys WHERE i <= 600" ], late => 1, committed => 1,
		call => "SELECT expired, exhausted FROM idem_reap(10000)", after => '300 failed 1 exhausted, 300 unknown 1', next => [ 'in_progress', 'failed' ] },
	{ name => 'retry', n => 200, setup => [ $claims->(200), $fails->(200, 'permanent') ], call => $each->(200, "idem_retry(k, 'r')"), after => '200 retryable_failed 1 E, 200 audit', next => [ 'failed', 'claimed' ] },
	{ name => 'retry_many', n => 500, setup => [ $claims->(500), $fails->(500, 'permanent') ], call => "SELECT sum(retried) FROM idem_retry_many('default', NULL, 'r', 1000)", after => '500 retryable_failed 1 E, 500 audit', next => [ 'failed', 'claimed' ] },
	{ name => 'resolve', n => 200, setup => [ $claims->(200), $fails->(200, 'unknown') ], call => $each->(200, "idem_resolve(k, 'succeeded', 'r', '5')"), after => '200 succeeded 1 5, 200 audit', next => [ 'unknown', 'succeeded' ] },
	{ name => 'revoke', n => 200, setup => [ $claims->(200) ], call => $each->(200, "idem_revoke(k, 'r')"), after => '200 processing 1, 200 audit', next => [ 'in_progress', 'claimed' ] },
	{ name => 'forget', n => 200, setup => [ $claims->(200), $fails->(200, 'permanent') ], call => $each->(200, "idem_forget(k, 'r')"), after => '200 audit', next => [ 'failed', 'claimed' ] },

	# waiting
	{ name => 'claim waits for a live claim', n => 1, setup => [ $claims->(1) ], call => "SELECT idem_claim('k1', '{}', wait => '1 min')", next => ['in_progress'], lock => 0 },
	{ name => 'claim waits for an open claim', n => 1, hold => "SELECT idem_claim('k1', '{}')", call => "SELECT idem_claim('k1', '{}', wait => '1 min')", next => ['claimed'], lock => 0 },
	{ name => 'execute waits for a live claim', n => 1, setup => [ $claims->(1) ], call => "SELECT idem_execute('k1', '{}', 'work(text,jsonb,integer)', wait => '1 min')", next => ['in_progress'], lock => 0 },
	(map { +{ name => "$_->[0] waits for a row lock", n => 1, setup => [ $claims->(1) ], hold => "SELECT 1 FROM idem_record WHERE idempotency_key = 'k1' FOR UPDATE", call => "SELECT $_->[1]", next => ['in_progress'] } }
		[ 'complete', "idem_complete('k1', '$t', '1')" ], [ 'fail', "idem_fail('k1', '$t', 'permanent')" ], [ 'renew', "idem_renew('k1', '$t')" ], [ 'release', "idem_release('k1', '$t')" ],
		[ 'checkpoint', "idem_checkpoint('k1', '$t', 's', '1')" ], [ 'complete_many', "idem_complete_many('{k1}', '{$t}')" ], [ 'revoke', "idem_revoke('k1', 'r')" ]),
	(map { +{ name => "$_->[0] waits for a transaction", n => 1, setup => [ $claims->(1), $_->[2] ? $fails->(1, $_->[2]) : () ], hold => $_->[3], call => "SELECT $_->[1]", next => [ $_->[4] ] } }
		[ 'complete', "idem_complete('k1', '$t', '1')", undef, "SELECT idem_renew('k1', '$t')", 'in_progress' ], [ 'fail', "idem_fail('k1', '$t', 'permanent')", undef, "SELECT idem_complete('k1', '$t')", 'in_progress' ],
		[ 'retry', "idem_retry('k1', 'r')", 'unknown', "SELECT idem_resolve('k1', 'failed', 'r')", 'unknown' ], [ 'resolve', "idem_resolve('k1', 'failed', 'r')", 'unknown', "SELECT idem_retry('k1', 'r')", 'unknown' ],
		[ 'revoke', "idem_revoke('k1', 'r')", undef, "SELECT idem_complete('k1', '$t')", 'in_progress' ], [ 'forget', "idem_forget('k1', 'r')", 'unknown', "SELECT idem_resolve('k1', 'failed', 'r')", 'unknown' ]),
	{ name => 'once waits for the first', n => 1, hold => "SELECT idem_once('k1')", call => "SELECT idem_once('k1')", next => ['claimed'] },
	{ name => 'once_many waits for the first', n => 9, hold => "SELECT idem_once('k5')", call => "SELECT count(*) FROM idem_once_many(" . $array->(9, 'k') . ')', next => ['claimed'] },
	{ name => 'once waits for an execution', n => 1, hold => 'LOCK TABLE gate', second => "SELECT idem_execute('k1', '{\"gate\": 1}', 'work(text,jsonb,integer)')", call => "SELECT idem_once('k1')", next => ['claimed'] },
	{ name => 'handler waits for a lock', n => 1, hold => 'LOCK TABLE gate', call => "SELECT outcome, error_code FROM idem_execute('k1', '{\"rows\": 1, \"gate\": 1}', 'work(text,jsonb,integer)')", next => [ 'claimed', 'conflict' ],
		lock => '00000', after => '1 retryable_failed 1 55P03' },
);

#---------------------------------------------------------------------------

sub fresh
{
	my ($sc) = @_;
	# DELETE would leave dead rows, in which moments are lost
	$o->q('TRUNCATE idem_record, idem_ring, business; ALTER TABLE idem_audit DISABLE TRIGGER USER; TRUNCATE idem_audit; ALTER TABLE idem_audit ENABLE TRIGGER USER');
	$o->q("BEGIN; $_; COMMIT") for @{ $sc->{setup} // [] };
	return $o->q('SELECT everything()');
}

sub gone
{
	my ($pid) = @_;
	wait_until("backend $pid is gone", sub { $o->q("SELECT count(*) FROM pg_stat_activity WHERE pid = $pid") == 0 });
	return;
}

sub waits
{
	my ($session) = @_;
	wait_until('it waits', sub {
		$session->done || $o->q('SELECT count(*) FROM pg_stat_activity WHERE pid = ' . $session->pid . " AND state = 'active' AND wait_event_type IN ('Lock', 'Extension')") > 0 });
	return;
}

# SQLSTATE that ended the started call: of the error, or of the end of the connection.
sub ended
{
	my $state = $victim->finish;
	return $state if $state ne '08006';
	return $victim->{err} =~ /(?:ERROR|FATAL|PANIC):\s+(\w{5}):/ ? $1 : $state;
}

my %code = (statement_timeout => '57014', lock_timeout => '55P03', transaction_timeout => '25P04', idle_in_transaction_session_timeout => '25P03',
	idle_session_timeout => '57P05', cancel => '57014', terminate => '57P01');

# Strikes a call; returns the SQLSTATE, and whether what the call did was reported as committed.
sub strike
{
	my ($sc, $kind, $ms) = @_;
	my $block = $kind =~ /^idle_in/ || ($kind !~ /^idle/ && int rand 2);
	my $isolation = $sc->{committed} ? 'READ COMMITTED' : ('READ COMMITTED', 'READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')[ int rand 4 ];
	my $set = ($sc->{late} ? "$late;" : '') . ($kind =~ /timeout/ && $kind !~ /^idle|^transaction/ ? "SET $kind = '$ms ms';" : '');
	my $begin = $block ? "BEGIN ISOLATION LEVEL $isolation;" : '';
	my $pid = $victim->pid;
	# what the call took, by the server's clock
	local $sc->{call} = $sc->{call} =~ s/ FROM /, (extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000)::integer FROM /r if !$sc->{waits};

	$sc->{took} = 0;
	if ($kind =~ /^idle/)
	{
		# that of a session may strike before the call, too
		my $first = $block ? "$set $begin $sc->{call}; SET $kind = 1" : "$set SET $kind = 1; $sc->{call}";
		$victim->start($first);
		my $state = ended();
		my $done = !$block && $victim->{out} =~ /\d/;
		gone($pid);
		$victim->start($block ? 'COMMIT' : 'SELECT 1') if !$victim->{lost};
		my $then = $victim->{lost} ? $state : ended();
		$victim->{lost} = 1;
		return ($state eq '00000' ? $then : $state, $done);
	}
	$victim->q("ROLLBACK; RESET ALL; $set $begin") if "$set$begin" ne '';
	if ($kind eq 'transaction_timeout')
	{
		$victim->start(($block ? "SET LOCAL transaction_timeout = '$ms ms';" : "SET transaction_timeout = '$ms ms';") . $sc->{call});
	}
	else { $victim->start($sc->{call}); }
	if ($kind eq 'cancel' || $kind eq 'terminate')
	{
		waits($victim) if $sc->{hold};
		usleep($ms * 1000);
		$o->q("SELECT pg_${kind}_backend($pid)");
	}
	my $state = ended();
	$sc->{took} = $1 if $state eq '00000' && $victim->{out} =~ /\|(\d+)$/;
	if ($victim->{lost}) { gone($pid); }
	elsif (!$block && $kind eq 'terminate')
	{
		# it was answered before
		gone($pid);
		$victim->try('SELECT 1');
	}
	elsif ($block)
	{
		$victim->start($state eq '00000' ? 'COMMIT' : 'ROLLBACK');
		my $end = ended();
		$state = $end if $state eq '00000';
		gone($pid) if $victim->{lost};
	}
	return ($state, $state eq '00000');
}

my %struck;
my %answered;
my $lost_but_done = 0;
my $total = 0;
my $began = time();

sub round
{
	my ($sc, $kind, $before, $given) = @_;
	my $ms = $given ? $given : $sc->{n} == 1 && !defined $sc->{ms} ? 1 + int rand 10 : 1 + int rand($sc->{ms});
	my $label = "$sc->{name}: $kind ($ms ms)";
	my $second;

	$victim //= session($node, name => 'victim');
	my $pid = $victim->pid;
	$victim->q('ROLLBACK; RESET ALL');
	$holder->q("BEGIN; $sc->{hold}") if $sc->{hold};
	if ($sc->{second})
	{
		$second = session($node);
		$second->start($sc->{second});
		wait_lock_wait($o, $second);
	}
	my ($state, $done) = strike($sc, $kind, $ms);
	my @bad;

	# before the others let go: nothing of the victim stays
	my $locks = $o->q("SELECT string_agg(concat_ws(' ', locktype, mode, relation::regclass), ', ') FROM pg_locks WHERE pid = $pid");
	push @bad, "locks: $locks" if $locks ne '~';
	if ($second)
	{
		$o->q('SELECT pg_cancel_backend(' . $second->pid . ')');
		$second->finish;
		$second->quit;
	}
	$holder->q('ROLLBACK') if $sc->{hold};

	my ($after, $summary, $next, $left, $check) = split /\|/, $o->q(
		"SET lock_timeout = '2 s'; SELECT everything(), summary(), next_claim('k1'), (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' OR mode = 'SIReadLock'), (SELECT count(*) FROM idem_check()); RESET lock_timeout");
	my $lost = $victim->{lost};
	if ($lost)
	{
		$victim->quit;
		undef $victim;
	}
	my $expected = $kind eq 'lock_timeout' && defined $sc->{lock} ? $sc->{lock} : $code{$kind};
	my $untouched = $after eq $before;
	my $whole = defined $sc->{after} && $summary eq $sc->{after};

	push @bad, "SQLSTATE $state" if $state ne '00000' && $state ne $expected;
	# what waits cannot be answered
	push @bad, 'answered' if $state eq '00000' && $sc->{waits} && "$expected" ne '00000';
	push @bad, "error, but the records changed: $summary" if $state ne '00000' && !$lost && !$untouched;
	push @bad, "rolled back, but the records changed: $summary" if $kind =~ /^idle_in/ && !$untouched;
	push @bad, "the records are neither as before nor as after: $summary" if !$untouched && !$whole;
	push @bad, "committed, but the records are: $summary" if $done && !$whole;
	push @bad, "the next claim is told $next" if $next ne $sc->{next}[ $untouched ? 0 : 1 ];
	push @bad, "$left advisory or predicate locks" if $left ne '0';
	push @bad, "idem_check() returns $check rows" if $check ne '0';
	# answered long after its time was up: it may have been put off by others, once
	push @{ $sc->{overran} }, $ms if $kind =~ /^(?:statement|transaction)_timeout/ && $sc->{took} > $ms + 5;
	$lost_but_done++ if !$done && !$untouched;
	$total++;
	if ($state eq '00000') { $answered{ $sc->{name} }++; }
	else
	{
		$struck{ $sc->{name} }++;
		$struck{$kind}++;
	}
	is(join('; ', @bad), '', "$label: $state") or diag("seed $seed");
	return $untouched;
}

for my $sc (@scenarios)
{
	$sc->{waits} = $sc->{hold} || ($sc->{name} =~ /waits/);
	my @kinds = grep { $version >= 17 || $_ ne 'transaction_timeout' } qw(statement_timeout transaction_timeout cancel terminate);
	push @kinds, 'lock_timeout' if $sc->{waits} && !(defined $sc->{lock} && !$sc->{lock});
	push @kinds, qw(idle_in_transaction_session_timeout idle_session_timeout) if !$sc->{waits};
	my $before = fresh($sc);

	if (!$sc->{waits})
	{
		# undisturbed: how long it takes, and that it does what it should
		$victim //= session($node, name => 'victim');
		$victim->q('ROLLBACK; RESET ALL');
		$victim->q($late) if $sc->{late};
		my $start = time();
		$victim->q($sc->{call});
		$sc->{ms} = 1 + int 1000 * (time() - $start);
		is($o->q('SELECT summary()'), $sc->{after}, "$sc->{name}: undisturbed, $sc->{ms} ms");
		is($o->q("SELECT next_claim('k1')"), $sc->{next}[1], '... next claim');
		$before = fresh($sc);
	}
	for my $kind (@kinds)
	{
		# on a slow machine, the later scenarios have fewer rounds
		for (1 .. ($sc->{waits} || $kind =~ /^idle/ || time() > $began + 35 ? 1 : $rounds))
		{
			$before = fresh($sc) unless round($sc, $kind, $before);
		}
	}
	# a timeout that is overrun is overrun again only if the call is deaf to it
	my $overran = shift @{ $sc->{overran} // [] } or next;
	for (1 .. 3)
	{
		$before = fresh($sc) unless round($sc, 'statement_timeout', $before, $overran);
	}
	cmp_ok(scalar @{ $sc->{overran} }, '<', 2, "$sc->{name}: heeds its timeout");
}

#---------------------------------------------------------------------------
# One statement, as docs/execute.md says
#---------------------------------------------------------------------------

{
	$victim //= session($node, name => 'victim');
	$victim->q('ROLLBACK; RESET ALL');
	fresh({});
	$victim->q("SET statement_timeout = '20 ms'");
	is($victim->try("SELECT idem_execute('k1', '{\"rows\": 1, \"sleep\": 60}', 'work(text,jsonb,integer)')"), '57014', 'statement_timeout in the handler passes through');
	is($o->q('SELECT summary()'), '', '... nothing is recorded, no attempt counts');
	$victim->q('RESET statement_timeout');
	is($victim->q("SELECT outcome, attempts FROM idem_execute('k1', '{\"rows\": 1, \"sleep\": 60}'::jsonb - 'sleep', 'work(text,jsonb,integer)')"), 'executed|1', '... and the next call is the first');
	# a timeout that the handler sets for itself is as any other
	$o->q("CREATE FUNCTION hasty(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS \$\$ BEGIN PERFORM pg_sleep(60); RETURN '1'; EXCEPTION WHEN query_canceled THEN RETURN '\"caught\"'; END \$\$");
	$victim->q("SET statement_timeout = '20 ms'");
	is($victim->q("SELECT outcome, result_json FROM idem_execute('k2', '1', 'hasty(jsonb)')"), 'executed|"caught"', 'a handler that catches the cancel succeeds');
	is($o->q("SELECT status, result_json FROM idem_status('k2')"), 'succeeded|"caught"', '... and is stored');
	$victim->q('ROLLBACK; RESET ALL');
	# in a block, the caller can go on after a savepoint
	$victim->q("BEGIN; INSERT INTO business VALUES ('mine', 0); SAVEPOINT s; SET LOCAL statement_timeout = '20 ms'");
	is($victim->try("SELECT idem_execute('k3', '{\"rows\": 1, \"sleep\": 60}', 'work(text,jsonb,integer)')"), '57014', 'cancelled in a savepoint');
	is($o->q("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), '0', '... no key stays locked, though the transaction is open');
	$victim->q('ROLLBACK TO s; SET LOCAL statement_timeout = 0');
	is($o->q("SELECT next_claim('k3')"), 'claimed', '... another session may have it');
	is($victim->q("SELECT outcome FROM idem_execute('k3', '{\"rows\": 1}', 'work(text,jsonb,integer)'); COMMIT"), 'executed', '... or the same transaction');
	is($o->q("SELECT string_agg(key, ' ' ORDER BY key) FROM business WHERE key IN ('mine', 'k3')"), 'k3 mine', '... once');
}

# A run that strikes nothing would prove nothing.
note sprintf '%d rounds in %.1f s; struck: %s; lost without an answer, but committed: %d', $total, time() - $began, join(', ', map { "$_ $struck{$_}" } grep { $struck{$_} } sort keys %code), $lost_but_done;
is(join(', ', grep { !$struck{$_} } map { $_->{name} } @scenarios), '', 'every scenario was struck');
is(join(', ', grep { !$struck{$_} && ($version >= 17 || $_ ne 'transaction_timeout') } sort keys %code), '', 'by every kind somewhere');
is($o->q('SELECT count(*) FROM idem_check()'), '0', 'nothing to complain of');

my $log = slurp_file($node->logfile);
unlike($log, qr/PANIC|TRAP:|terminated by signal|XX000|you don't own a lock/, 'nothing broke in the server');
$_->quit for grep { defined } $o, $holder, $victim;
$node->stop;
done_testing();
