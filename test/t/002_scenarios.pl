# The six verification scenarios that the project was founded on, with real
# sessions.  Each checks the record and the business table, which has no unique
# constraint that could hide a second execution.
#
#	1. concurrent claims		2. concurrent other parameters	3. duplicates after completion
#	4. executor killed			5. fault between effect and state	6. retry limit, permanent error

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;
use Time::HiRes qw(usleep);

my $node = new_node('scenarios', conf => "restart_after_crash = on\n");
my $o    = session($node, name => 'observer');

$o->q(<<'SQL');
CREATE TABLE business (key text NOT NULL, worker int NOT NULL, amount int NOT NULL);
CREATE SEQUENCE seen_in_progress;
INSERT INTO idem_policy (operation, lease, jitter, backoff_base, max_attempts) VALUES ('pay', '30 s', 'none', '1 s', 3);
SQL

sub business { my ($key) = @_; return $o->q("SELECT count(*) FROM business WHERE key = '$key'"); }

sub record
{
	my ($key) = @_;
	return $o->q("SELECT concat_ws(' ', status, attempts) FROM idem_record WHERE idempotency_key = '$key'");
}

sub image
{
	my ($key) = @_;
	return $o->q("SELECT tableoid::regclass, ctid, xmin, xmax, r::text FROM idem_record r WHERE idempotency_key = '$key'");
}

# In another session: outcome, attempts, previous of a claim.
sub claim
{
	my ($s, $key, $more) = @_;
	return $s->q("SELECT concat_ws(' ', outcome, attempts, previous) FROM idem_claim('$key', '{\"amount\": 100}', 'pay'"
		  . (defined $more ? ", $more" : '') . ')');
}

sub token_of
{
	my ($s, $key, $more) = @_;
	my $token = $s->q("SELECT owner_token FROM idem_claim('$key', '{\"amount\": 100}', 'pay'"
		  . (defined $more ? ", $more" : '') . ')');
	die "not claimed" if $token eq '~';
	return $token;
}

#---------------------------------------------------------------------------
# A client as a service has it: retries on 40001, asks again on in_progress, runs
# the work when it has claimed.  Returns what it saw.
#	hold	= number of others that must have been told in_progress before it completes
#	apart	= the claim is committed before the work
#	old		= the snapshot is older than the claim
#---------------------------------------------------------------------------

sub work
{
	my ($s, $saw, $token, %arg) = @_;
	my ($key, $i) = @arg{qw(key worker)};

	if ($arg{apart})
	{
		my $state = $s->try('COMMIT');
		return $state if $state ne '00000';
		$saw->{claimed}++;
		$s->q("BEGIN ISOLATION LEVEL $arg{isolation}");
	}
	$s->q("INSERT INTO business VALUES ('$key', $i, $arg{amount})");
	wait_until('the others have been told',
		sub { $s->q('SELECT last_value FROM seen_in_progress') > $arg{hold} })
	  if $arg{hold};
	my $state = $s->try("SELECT idem_complete('$key', '$token', '{\"by\": $i}')");
	$state = $s->try('COMMIT') if $state eq '00000';
	return $state if $state ne '00000';
	$saw->{claimed}++ unless $arg{apart};
	$saw->{executed}++;
	return $state;
}

# One transaction: claim, and what follows.
sub ask
{
	my ($s, $saw, %arg) = @_;

	$s->q("BEGIN ISOLATION LEVEL $arg{isolation}" . ($arg{old} ? '; SELECT count(*) FROM business' : ''));
	my $state = $s->try('SELECT outcome, owner_token, result_json FROM '
		  . "idem_claim('$arg{key}', '{\"amount\": $arg{amount}}', 'pay')");
	return $state if $state ne '00000';
	die "not one row: $s->{out}" if $s->{out} !~ /\A[a-z_]+\|[^\n]*\z/;

	my ($outcome, $token, $result) = split /\|/, $s->{out};
	return work($s, $saw, $token, %arg) if $outcome eq 'claimed';
	$state = $s->try('COMMIT');
	return $state if $state ne '00000';
	if ($outcome eq 'in_progress')
	{
		$s->q("SELECT nextval('seen_in_progress')") unless $saw->{in_progress}++;
		usleep(10_000);
	}
	else
	{
		@$saw{qw(final result)} = ($outcome, $result);
	}
	return $state;
}

sub client
{
	my (%arg) = @_;
	my $s   = session($node, name => "client $arg{worker}");
	my %saw = (claimed => 0, executed => 0, in_progress => 0, serialization => 0);
	my $deadline = time + $IdemTest::timeout;

	$s->q('SELECT pg_advisory_lock_shared(1)');
	while (!defined $saw{final})
	{
		die 'no final answer' if time > $deadline;
		my $state = ask($s, \%saw, %arg);
		next if $state eq '00000';
		die "unexpected $state: $s->{err}" if $state ne '40001';
		$saw{serialization}++;
		$s->q('ROLLBACK');
	}
	$s->quit;
	return \%saw;
}

# Runs n clients from behind a gate; amount is code(number).
sub clients
{
	my ($n, %arg) = @_;

	$o->q("SELECT setval('seen_in_progress', 1)");
	close_gate($o, 1);
	return run_workers($n,
		sub { my ($i) = @_; return client(%arg, worker => $i, amount => $arg{amount}->($i)) },
		sub { open_gate($o, 1, $n) });
}

sub total
{
	my ($what, @saw) = @_;
	my $sum = 0;
	$sum += $_->{$what} for @saw;
	return $sum;
}

#---------------------------------------------------------------------------
# 1. Concurrent claims of one key with the same parameters (C13)
#---------------------------------------------------------------------------

my $run = 0;

sub same_parameters
{
	my ($label, $n, %arg) = @_;
	my $key = 'same' . ++$run;
	my @saw = clients($n, key => $key, amount => sub { 100 }, %arg);
	my $by  = $o->q("SELECT min(worker) FROM business WHERE key = '$key'");

	is(business($key), 1, "$label: one business row");
	is(total('executed', @saw), 1, "$label: one client executed");
	is(total('claimed', @saw), 1, "$label: one committed claim");
	is(scalar(grep { $_->{final} eq 'succeeded' && $_->{result} eq "{\"by\": $by}" } @saw),
		$n, "$label: every client ends with the same result");
	is(record($key), 'succeeded 1', "$label: one attempt");
	is(scalar(grep { $_->{in_progress} > 0 || $_->{executed} } @saw), $n, "$label: all others were told in_progress")
	  if $arg{hold};
	note "$label: " . total('serialization', @saw) . " serialization failures";
	return;
}

for my $isolation ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
{
	same_parameters("$isolation, one transaction", 32, isolation => $isolation, hold => 31);
	same_parameters("$isolation, claim committed first", 32, isolation => $isolation, hold => 31, apart => 1, old => 1);
	same_parameters("$isolation, race to the end", 32, isolation => $isolation);
}

#---------------------------------------------------------------------------
# 2. Concurrent claims of one key with different parameters (C124)
#---------------------------------------------------------------------------

for my $isolation ('READ COMMITTED', 'SERIALIZABLE')
{
	my $key = 'other' . ++$run;
	my @saw = clients(16, key => $key, isolation => $isolation, amount => sub { $_[0] % 2 ? 100 : 200 });
	my $won = $o->q("SELECT min(amount) FROM business WHERE key = '$key'");

	is(business($key), 1, "$isolation, two requests: one business row");
	is(scalar(grep { $saw[$_]{final} eq ((($_ % 2 ? 100 : 200) == $won) ? 'succeeded' : 'conflict') } 0 .. 15),
		16, "... its request gets the result, the other one conflict");
	is(total('executed', @saw), 1, '... one client executed');
	is(record($key), 'succeeded 1', '... one attempt');
	my $image = image($key);
	is($o->q("SELECT outcome FROM idem_claim('$key', '{\"amount\": " . (300 - $won) . "}')"), 'conflict', '... and later');
	is(image($key), $image, '... digest and result untouched');
}

#---------------------------------------------------------------------------
# 3. Duplicates after completion (C54, C70)
#---------------------------------------------------------------------------

{
	my $token = token_of($o, 'dup');
	$o->q("BEGIN; INSERT INTO business VALUES ('dup', 1, 100); SELECT idem_complete('dup', '$token', '{\"id\": 5}', '\\x0001'); COMMIT");
	my $image = image('dup');
	my @got = run_workers(8, sub {
		my $s = session($node);
		my %n;
		$n{ $s->q("SELECT outcome, owner_token, attempts, result_json, result_body, error_code FROM idem_claim('dup', '{\"amount\": 100}', 'pay')") }++
		  for 1 .. 50;
		$s->quit;
		return \%n;
	});
	is_deeply(\@got, [ ({ 'succeeded|~|1|{"id": 5}|\\x0001|~' => 50 }) x 8 ], '400 duplicates get the stored result');
	is(image('dup'), $image, '... the record is untouched');
	is(business('dup'), 1, '... one business row');
	is($o->q("SELECT idem_complete('dup', '$token', '{\"id\": 5}', '\\x0001')"), 'f', 'repeated completion is no error');
	is($o->try("SELECT idem_complete('dup', '$token', '{\"id\": 6}', '\\x0001')"), 'ID001', 'completion with another result is refused');
	is($o->try("SELECT idem_fail('dup', '$token', 'permanent')"), 'ID001', 'failure after success is refused');
	is(image('dup'), $image, '... the record is untouched');
}

#---------------------------------------------------------------------------
# 4. The executor dies after its claim (C34, C45, C56, C60)
#---------------------------------------------------------------------------

# A session that works under a lost claim; nothing of it may stay.
sub old_token_is_refused
{
	my ($key, $token, $label) = @_;
	my $s = session($node);
	my $image = image($key);
	my $rows  = business($key);

	$s->q("BEGIN; INSERT INTO business VALUES ('$key', 99, 100)");
	is($s->try("SELECT idem_complete('$key', '$token', '{\"by\": \"old\"}')"), 'ID001', "$label: old token cannot complete");
	$s->try('COMMIT');
	is($s->try("SELECT idem_fail('$key', '$token', 'permanent', 'late')"), 'ID001', "$label: old token cannot fail");
	is($s->try("SELECT idem_release('$key', '$token')"), 'ID001', "$label: old token cannot release");
	is($s->try("SELECT idem_checkpoint('$key', '$token', 's', '1')"), 'ID001', "$label: old token cannot checkpoint");
	is($s->q("SELECT idem_renew('$key', '$token')"), '~', "$label: old token cannot renew");
	is(image($key), $image, "$label: the record is untouched");
	is(business($key), $rows, "$label: no business row of the old executor");
	$s->quit;
	return;
}

sub wait_gone
{
	my ($pid) = @_;
	return wait_until('the backend is gone', sub { $o->q("SELECT count(*) FROM pg_stat_activity WHERE pid = $pid") == 0 });
}

# The connection of the observer ends with the server's crash.
sub wait_restart
{
	wait_until('the crash is noticed', sub { $o->try('SELECT 1') ne '00000' });
	$o->quit;
	wait_until('the server is up again', sub { eval { $o = session($node, name => 'observer'); 1 } });
	return;
}

for my $how ('terminated', 'killed')
{
	my $key = "exec_$how";
	my $a = session($node, name => 'executor');
	my $token = token_of($a, $key);
	my $pid = $a->pid;

	$a->q("BEGIN; INSERT INTO business VALUES ('$key', 1, 100)");
	if ($how eq 'terminated')
	{
		$o->q("SELECT pg_terminate_backend($pid)");
		wait_gone($pid);
	}
	else
	{
		kill 'KILL', $pid;
		wait_until('the executor notices', sub { $a->try('SELECT 1') ne '00000' });
		wait_restart();
	}
	$a->quit;
	is(business($key), 0, "executor $how: its work is gone");
	is(record($key), 'processing 1', '... its claim stands');

	my $b = session($node, name => 'second');
	is(claim($b, $key), 'in_progress 1', '... and holds while the lease lasts');
	$b->q("SET idempotency.clock_offset = '40s'");
	my $second = token_of($b, $key);
	isnt($second, $token, '... after the lease another executor gets a new token');
	is($o->q("SELECT attempts, previous FROM idem_record WHERE idempotency_key = '$key'"), '2|lease_expired', '... as the second attempt');
	old_token_is_refused($key, $token, "executor $how");

	$b->q("BEGIN; INSERT INTO business VALUES ('$key', 2, 100)");
	is($b->q("SELECT idem_complete('$key', '$second', '{\"by\": 2}')"), 't', '... the new executor completes');
	$b->q('COMMIT');
	old_token_is_refused($key, $token, "executor $how, completed");
	is(business($key), 1, '... one business row');
	is(claim($o, $key), 'succeeded 2', '... and the result is there for all');
	$b->quit;
}

# The executor lives, but was too slow: what it did comes to nothing.
{
	my $a = session($node);
	my $b = session($node);
	my $token = token_of($a, 'slow');
	$a->q("BEGIN; INSERT INTO business VALUES ('slow', 1, 100)");
	$b->q("SET idempotency.clock_offset = '40s'");
	my $second = token_of($b, 'slow');
	is($a->try("SELECT idem_complete('slow', '$token', '1')"), 'ID001', 'slow executor: refused');
	$a->try('COMMIT');
	is($b->q("SELECT idem_complete('slow', '$second', '2')"), 't', '... the other one completes');
	is(business('slow'), 0, '... no business row by a lost claim');

	# the other way round: completed after the lapse, before anyone took over
	$token = token_of($a, 'late');
	$a->q("SET idempotency.clock_offset = '40s'");
	$a->q("BEGIN; INSERT INTO business VALUES ('late', 1, 100)");
	is($a->q("SELECT idem_complete('late', '$token', '1')"), 't', 'late executor: accepted before a takeover');
	is(claim($b, 'late'), 'in_progress 1', '... and from then on nobody takes over');
	$a->q('COMMIT');
	is(claim($b, 'late'), 'succeeded 1', '... but gets the result');
	is(business('late'), 1, '... one business row');
	$_->quit for $a, $b;
}

#---------------------------------------------------------------------------
# 5. Fault between the effect and the state (C06, C07, C46)
#---------------------------------------------------------------------------

for my $how ('terminated', 'killed')
{
	my $key = "mid_$how";
	my $a = session($node);
	my $token = token_of($a, $key);
	my $pid = $a->pid;

	$a->q("BEGIN; INSERT INTO business VALUES ('$key', 1, 100); SELECT idem_complete('$key', '$token', '1')");
	is(claim($o, $key), 'in_progress 1', "$how before COMMIT: completion is provisional until then");
	if ($how eq 'terminated')
	{
		$o->q("SELECT pg_terminate_backend($pid)");
		wait_gone($pid);
	}
	else
	{
		kill 'KILL', $pid;
		wait_until('the executor notices', sub { $a->try('SELECT 1') ne '00000' });
		wait_restart();
	}
	$a->quit;
	is(business($key) . ' ' . record($key), '0 processing 1', '... neither effect nor success');
	my $b = session($node);
	$b->q("BEGIN; INSERT INTO business VALUES ('$key', 2, 100)");
	is($b->q("SELECT idem_complete('$key', '$token', '2')"), 't', '... the holder can do it again from elsewhere');
	$b->q('COMMIT');
	is(business($key) . ' ' . record($key), '1 succeeded 1', '... effect and success together');
	$b->quit;
}

{
	# The answer to COMMIT is lost: the client is gone before it reads it.
	my $a = session($node);
	my $token = token_of($a, 'lostcommit');
	my $pid = $a->pid;
	$a->q("BEGIN; INSERT INTO business VALUES ('lostcommit', 1, 100); SELECT idem_complete('lostcommit', '$token', '{\"id\": 1}')");
	$a->start('COMMIT');
	wait_until('COMMIT has been carried out',
		sub { $o->q("SELECT count(*) FROM business WHERE key = 'lostcommit'") == 1 });
	kill 'KILL', $a->{child};
	$a->quit;
	my $b = session($node);
	is($b->q("SELECT outcome, result_json FROM idem_claim('lostcommit', '{\"amount\": 100}', 'pay')"), 'succeeded|{"id": 1}',
		'answer to COMMIT lost: the next claim gets the result');
	is($b->q("SELECT idem_complete('lostcommit', '$token', '{\"id\": 1}')"), 'f', '... and the completion may be repeated');
	is(business('lostcommit'), 1, '... one business row');

	# The answer to the claim is lost; the client's own token brings it back.
	$token = token(77);
	is(claim($b, 'lostclaim', "token => '$token'"), 'claimed 1 none', 'own token: claimed');
	my $c = session($node);
	is(claim($c, 'lostclaim', "token => '$token'"), 'claimed 1 none', '... the same claim again from another connection');
	is(claim($c, 'lostclaim'), 'in_progress 1', '... not without the token');
	is($c->q("SELECT outcome FROM idem_claim('lostclaim', '{\"amount\": 1}', token => '$token')"), 'conflict', '... nor for another request');
	$c->q("SET idempotency.clock_offset = '40s'");
	is($c->try("SELECT idem_claim('lostclaim', '{\"amount\": 100}', token => '$token')"), '22023', '... nor as a new attempt');
	is(claim($c, 'lostclaim'), 'claimed 2 lease_expired', '... after the takeover');
	is(claim($b, 'lostclaim', "token => '$token'"), 'in_progress 2', '... it is dead');
	$_->quit for $b, $c;
}

{
	# An effect outside: what happened is unknown, nothing runs anew by itself.
	$o->q("INSERT INTO idem_policy (operation, on_lease_expiry) VALUES ('wire', 'unknown')");
	my $a = session($node);
	my $token = $a->q(q(SELECT owner_token FROM idem_claim('wire1', '{"amount": 100}', 'wire')));
	$a->q("SELECT idem_checkpoint('wire1', '$token', 'sent', '{\"ref\": \"x1\"}')");
	$o->q('SELECT pg_terminate_backend(' . $a->pid . ')');
	wait_gone($a->pid);
	$a->quit;
	my $b = session($node);
	$b->q("SET idempotency.clock_offset = '40s'");
	is($b->q(q(SELECT outcome, owner_token FROM idem_claim('wire1', '{"amount": 100}', 'wire'))), 'unknown|~', 'outside effect: unknown after the lease');
	is($b->q(q(SELECT outcome FROM idem_claim('wire1', '{"amount": 100}', 'wire'))), 'unknown', '... and it stays so');
	is($b->q(q(SELECT status, progress FROM idem_status('wire1'))), 'unknown|{"sent": {"ref": "x1"}}', '... with what was recorded before');
	is($b->try("SELECT idem_complete('wire1', '$token', '1')"), 'ID001', '... the old executor is refused');

	# Where the next attempt may run, it is told so, and what the first one recorded.
	$token = token_of($b, 'outside');
	$b->q("SELECT idem_checkpoint('outside', '$token', 'sent', '{\"ref\": \"x2\"}')");
	$b->q("SET idempotency.clock_offset = '100s'");
	is($b->q(q(SELECT outcome, previous, progress FROM idem_claim('outside', '{"amount": 100}', 'pay'))),
		'claimed|lease_expired|{"sent": {"ref": "x2"}}', 'a takeover receives the checkpoints');
	$b->quit;
}

#---------------------------------------------------------------------------
# 6. Temporary errors up to the limit, and a permanent one (C55, C61, C64)
#---------------------------------------------------------------------------

{
	my $s = session($node);
	$o->q("UPDATE idem_policy SET notify = true WHERE operation = 'pay'");
	my $listener = session($node, name => 'listener');
	$listener->q('LISTEN idempotency');
	my @delay = ('00:00:01', '00:00:02');
	my $ahead = 0;
	for my $attempt (1 .. 3)
	{
		my $token = token_of($s, 'limit');
		$s->q("BEGIN; SAVEPOINT work; INSERT INTO business VALUES ('limit', $attempt, 100); ROLLBACK TO work");
		my $failed = $s->q("SELECT status, attempts FROM idem_fail('limit', '$token', 'retryable', 'downstream is busy', '55P03')");
		$s->q('COMMIT');
		if ($attempt < 3)
		{
			is($failed, "retryable_failed|$attempt", "attempt $attempt fails for now");
			is($o->q("SELECT retry_at - updated_at, error_code, error_message FROM idem_record WHERE idempotency_key = 'limit'"),
				"$delay[$attempt - 1]|55P03|downstream is busy", '... next one after the backoff');
			is(claim($s, 'limit'), "retry_later $attempt", '... not before');
			$ahead += 10;
			$s->q("SET idempotency.clock_offset = '${ahead}s'");
		}
		else
		{
			is($failed, 'failed|3', 'the last attempt uses the key up');
		}
	}
	is($s->q(q(SELECT outcome, attempts, error_code FROM idem_claim('limit', '{"amount": 100}', 'pay'))), 'failed|3|exhausted', '... nobody runs it again');
	like($o->q(q(SELECT error_message FROM idem_record WHERE idempotency_key = 'limit')), qr/downstream is busy/, '... the last error is kept');
	is(business('limit'), 0, '... no business row');
	like($listener->q('SELECT 1'), qr/notification "idempotency" with payload ".*exhausted.*limit/, '... and listeners are told');

	my $token = token_of($s, 'permanent');
	$s->q("SELECT idem_fail('permanent', '$token', 'permanent', 'card declined', 'P4020')");
	my $image = image('permanent');
	$s->q("SET idempotency.clock_offset = '100000s'");
	is($s->q(q(SELECT outcome, attempts, error_code, error_message FROM idem_claim('permanent', '{"amount": 100}', 'pay'))),
		'failed|1|P4020|card declined', 'permanent error: answered from the record');
	is(image('permanent'), $image, '... which stays as it is');
	like($listener->q('SELECT 1'), qr/notification "idempotency" with payload ".*failed.*permanent/, '... listeners are told');
	is(business('permanent'), 0, '... no business row');
	$s->q("SET idempotency.clock_offset = '0'");

	# Nobody calls idem_fail: attempts are counted by the claim (C60).
	for my $attempt (1 .. 3)
	{
		$s->q("SET idempotency.clock_offset = '" . 40 * $attempt . "s'");
		is(claim($s, 'crashing'), "claimed $attempt " . ($attempt == 1 ? 'none' : 'lease_expired'), "executor vanishes, attempt $attempt");
	}
	$s->q("SET idempotency.clock_offset = '160s'");
	is($s->q(q(SELECT outcome, error_code FROM idem_claim('crashing', '{"amount": 100}', 'pay'))), 'failed|exhausted', '... and no fourth');
	is(record('crashing'), 'failed 3', '... attempts are what was started');

	# Answers that give no claim use up no attempt (C62).
	$token = token_of($s, 'patient');
	claim($s, 'patient') for 1 .. 50;
	$s->q(q(SELECT idem_claim('patient', '{"amount": 5}'))) for 1 .. 50;
	$s->q("SELECT idem_fail('patient', '$token', 'retryable', retry_after => '1 h')");
	claim($s, 'patient') for 1 .. 50;
	is(record('patient'), 'retryable_failed 1', 'in_progress, conflict and retry_later use up no attempt');
	$_->quit for $s, $listener;
}

#---------------------------------------------------------------------------
# C04: rounds of concurrent claims; each winner completes or rolls back at random
#---------------------------------------------------------------------------

{
	my ($n, $rounds) = (16, 300);

	$o->q(<<'SQL');
CREATE SEQUENCE barrier MINVALUE 0;
SELECT setval('barrier', 0, false);
CREATE TABLE answers (key text, worker int, outcome text, attempts int, committed boolean);

-- passed by all when n sessions are there, again and again
CREATE PROCEDURE meet(n int) LANGUAGE plpgsql AS $$
DECLARE
	mine bigint := nextval('barrier');
	target bigint := (mine / n + 1) * n;
	there bigint;
BEGIN
	LOOP
		SELECT last_value + is_called::int INTO there FROM barrier;
		EXIT WHEN there >= target;
		PERFORM pg_sleep(0.0005);
	END LOOP;
END $$;

CREATE PROCEDURE rounds(me int, n int, rounds int) LANGUAGE plpgsql AS $$
DECLARE
	r idem_claim_result;
	keep boolean;
BEGIN
	FOR i IN 1 .. rounds LOOP
		CALL meet(n);
		COMMIT;
		SELECT * INTO STRICT r FROM idem_claim('round' || i, '1');
		keep := r.outcome <> 'claimed' OR random() < 0.5;
		IF r.outcome = 'claimed' AND keep THEN
			INSERT INTO business VALUES ('round' || i, me, 0);
			PERFORM idem_complete('round' || i, r.owner_token, to_jsonb(me));
		END IF;
		IF keep THEN COMMIT; ELSE ROLLBACK; END IF;
		INSERT INTO answers VALUES ('round' || i, me, r.outcome, r.attempts, keep);
		COMMIT;
	END LOOP;
END $$;
SQL
	my @state = run_workers($n, sub {
		my ($i) = @_;
		my $s = session($node);
		my $state = $s->try("CALL rounds($i, $n, $rounds)");
		$s->quit;
		return $state . ($state eq '00000' ? '' : $s->{err});
	});
	is_deeply(\@state, [ ('00000') x $n ], "C04: $rounds rounds of $n sessions without an error");
	is($o->q('SELECT count(*) FROM answers'), $n * $rounds, '... each call one row');
	is($o->q("SELECT count(*) FROM answers WHERE outcome IS NULL OR outcome NOT IN ('claimed', 'in_progress', 'succeeded')"),
		0, '... each a proper answer');
	is($o->q("SELECT count(*) FROM (SELECT FROM answers WHERE outcome = 'claimed' AND committed GROUP BY key HAVING count(*) > 1) d"),
		0, '... never two committed claims of a key');
	is($o->q("SELECT count(*) FROM answers WHERE outcome = 'claimed' AND attempts <> 1"), 0, '... each first attempt is attempt 1');
	is($o->q(<<'SQL'), 0, '... records, claims and business rows agree');
SELECT count(*) FROM
	(SELECT key FROM answers WHERE outcome = 'claimed' AND committed) c
	FULL JOIN (SELECT key, count(*) FROM business WHERE key LIKE 'round%' GROUP BY key) b USING (key)
	FULL JOIN (SELECT idempotency_key AS key, status, attempts FROM idem_record WHERE idempotency_key LIKE 'round%') r USING (key)
	WHERE b.count IS DISTINCT FROM 1 OR r.status IS DISTINCT FROM 'succeeded' OR r.attempts IS DISTINCT FROM 1
SQL
	is($o->q("SELECT count(*) FROM answers a WHERE outcome = 'succeeded' AND NOT EXISTS (SELECT FROM business b WHERE b.key = a.key)"),
		0, '... nobody was shown a success that did not stay');
	note $o->q("SELECT outcome, committed, count(*) FROM answers GROUP BY 1, 2 ORDER BY 1, 2");
}

is($o->q("SELECT count(*) FROM (SELECT FROM idem_record GROUP BY idempotency_key HAVING count(*) > 1) d"), 0, 'no key twice');
is($o->q("SELECT count(*) FROM (SELECT FROM business GROUP BY key HAVING count(*) > 1) d"), 0, 'no business effect twice');

$o->quit;
done_testing();
