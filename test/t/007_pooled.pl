# Sessions as services and poolers have them: a claim wanders between backends (C11),
# settings differ (C12, C40), clients wait, time out, are cancelled or cut off (C08,
# C44), commits fail (C47, C48), heartbeats come from elsewhere (C43), old attempts
# wake up late (C14, C15, C35).

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

my $node = new_node('pooled');
my $o = session($node, name => 'observer');

$o->q('CREATE TABLE business (key text NOT NULL, CONSTRAINT once UNIQUE (key) DEFERRABLE INITIALLY DEFERRED)');
$o->q("CREATE TABLE parent (id int PRIMARY KEY)");

sub claim
{
	my ($s, $key, $more) = @_;
	return $s->q("SELECT concat_ws(' ', outcome, attempts, previous) FROM idem_claim('$key', '{\"a\": 1}'" . (defined $more ? ", $more" : '') . ')');
}

sub token_of
{
	my ($s, $key, $more) = @_;
	my $token = $s->q("SELECT owner_token FROM idem_claim('$key', '{\"a\": 1}'" . (defined $more ? ", $more" : '') . ')');
	die "not claimed" if $token eq '~';
	return $token;
}

sub record
{
	my ($key) = @_;
	return $o->q("SELECT concat_ws(' ', status, attempts, owner_token) FROM idem_record WHERE idempotency_key = '$key'");
}

sub image
{
	my ($key) = @_;
	return $o->q("SELECT tableoid::regclass, ctid, xmin, xmax, r::text FROM idem_record r WHERE idempotency_key = '$key'");
}

sub business { my ($key) = @_; return $o->q("SELECT count(*) FROM business WHERE key = '$key'"); }

# Locks that a session holds or waits for, beside its virtual transaction.
sub locks_of
{
	my ($s) = @_;
	return $o->q("SELECT string_agg(locktype || ' ' || mode, ', ') FROM pg_locks WHERE pid = " . $s->pid . " AND locktype <> 'virtualxid'");
}

sub clock { my ($s, $seconds) = @_; $s->q("SET idempotency.clock_offset = '${seconds}s'"); return; }

#---------------------------------------------------------------------------
# C11: nothing depends on the backend
#---------------------------------------------------------------------------

{
	my @backend = map { session($node, name => "backend $_") } 1 .. 3;
	my $turn = 0;
	my $next = sub { return $backend[ $turn++ % 3 ]; };
	my $leak = '';
	my $call = sub {
		my ($sql, $state) = @_;
		my $s = $next->();
		my $got = $s->try($sql);
		die "$sql: $got $s->{err}" if $got ne ($state // '00000');
		my $out = $s->{out};
		$s->try('ROLLBACK') if $got ne '00000';
		$leak .= "$sql: " . locks_of($s) . "\n" if locks_of($s) ne '~';
		$s->q('DISCARD ALL');
		return $out;
	};

	for my $i (1 .. 4)
	{
		my $t = $call->("SELECT owner_token FROM idem_claim('pool$i', '1')");
		$call->("SELECT idem_renew('pool$i', '$t')");
		$call->("BEGIN; SELECT idem_renew('pool$i', '$t', '5 min'); ROLLBACK");
		$call->("BEGIN; SELECT idem_claim('pool$i', '1', lease => '0')", '22023');
		$call->("SELECT idem_checkpoint('pool$i', '$t', 's', '1')");
		$call->("BEGIN; SELECT idem_complete('pool$i', '" . token(1) . "')", 'ID001');
		$call->("BEGIN; SELECT idem_complete('pool$i', '$t', '1'); ROLLBACK");
		is($call->("SELECT idem_complete('pool$i', '$t', '1')"), 't', "C11: claim, renew and complete on three backends, round $i");
		is($call->("SELECT outcome FROM idem_claim('pool$i', '1')"), 'succeeded', '... and replay on another');
	}
	is($leak, '', '... no lock outlives a commit, a rollback or an error');
	is($o->q("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), '0', '... none anywhere');
	$_->quit for @backend;
}

#---------------------------------------------------------------------------
# C12, C40: settings of the session do not matter
#---------------------------------------------------------------------------

{
	my $a = session($node);
	my $request = q('{"when": "2026-03-29T02:30:00", "n": 12345678901234567890.10, "f": 1e-7, "s": "I\u0131i\u0130"}');
	$a->q("SELECT idem_complete('settings', owner_token, '{\"n\": 1.10}', '\\x00ff') FROM idem_claim('settings', $request)");
	$a->q("SET timezone = 'Asia/Tokyo'; SELECT idem_claim('zone', '1', lease => '1 day')");
	is($a->q("SELECT extract(epoch FROM lease_until - updated_at)::int FROM idem_status('zone')"), 86400, 'C40: a lease of a day is 24 hours');
	for my $setting (
		"timezone = 'America/New_York'", "timezone = 'Europe/Berlin'", "DateStyle = 'SQL, DMY'", "IntervalStyle = 'iso_8601'", "extra_float_digits = -15",
		"bytea_output = 'escape'", "lc_numeric = 'C'", "search_path = public, pg_catalog", "default_transaction_isolation = 'serializable'", "standard_conforming_strings = on",
		"xmlbinary = 'hex'", "client_encoding = 'LATIN1'", "role = NONE", "enable_indexscan = off", "work_mem = '64kB'", "jit = on")
	{
		$a->q("SET $setting");
		is($a->q("SELECT outcome, result_body = '\\x00ff'::bytea FROM idem_claim('settings', $request)"), 'succeeded|t', "C12: the same key and request with $setting");
		is($a->q("SELECT outcome, extract(epoch FROM retry_after) BETWEEN 0 AND 1 FROM idem_claim('zone', '1')"), 'in_progress|t', '... and a lease');
		$a->q('RESET ALL');
	}
	# a change of zone inside daylight saving, for the interval of a renewal
	$a->q("SET timezone = 'Europe/Berlin'");
	my $t = token_of($a, 'dst');
	$a->q("SELECT idem_renew('dst', '$t', '200 days')");
	is($a->q("SELECT extract(epoch FROM lease_until - updated_at)::int FROM idem_status('dst')"), 200 * 86400, 'days of a lease have 24 hours');
	$a->quit;
}

#---------------------------------------------------------------------------
# C08: duplicates of a key whose holder sits in an open transaction
#---------------------------------------------------------------------------

{
	my $a = session($node, name => 'idle holder');
	$a->q('BEGIN');
	my $t = token_of($a, 'idle');
	my @waiter = map { session($node, name => "waiter $_") } 1 .. 6;

	is(claim($waiter[0], 'idle'), 'in_progress 1', 'C08: a duplicate is answered at once');
	is($waiter[1]->q("SET lock_timeout = '100ms'; SELECT outcome FROM idem_claim('idle', '{\"a\": 1}')"), 'in_progress', '... under lock_timeout too');
	is($waiter[2]->try("SET statement_timeout = '100ms'; SELECT idem_claim('idle', '{\"a\": 1}', wait => '1 h')"), '57014', '... one that waits ends with its statement_timeout');
	is($waiter[3]->q("SELECT outcome FROM idem_claim('idle', '{\"a\": 1}', wait => '50 ms')"), 'in_progress', '... or with its own time');

	$_->start("SELECT outcome FROM idem_claim('idle', '{\"a\": 1}', wait => '1 h')") for @waiter[ 4, 5 ];
	is(wait_until('waiters nap and hold nothing, not even a lock on a table', sub {
		$o->q("SELECT count(*) FROM pg_stat_activity a WHERE application_name IN ('waiter 5', 'waiter 6') AND wait_event_type = 'Extension'"
			. " AND NOT EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND locktype <> 'virtualxid')") == 2 }), 1, '... those that wait hold no lock');
	is($o->q("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'waiter%' AND (backend_xid IS NOT NULL)"), '0', '... nor a transaction id');
	is($o->q("SELECT count(*) FROM generate_series(1, 100) i, LATERAL idem_claim('unrelated' || i, '1') c WHERE c.outcome = 'claimed'"), '100', '... other keys go on');
	$o->q('SELECT pg_cancel_backend(' . $waiter[4]->pid . ')');
	is($waiter[4]->finish, '57014', '... a waiter can be cancelled');
	is(locks_of($waiter[4]), '~', '... and leaves no lock');
	is($waiter[4]->q('SELECT 1'), '1', '... and lives');
	$a->q('ROLLBACK');
	is($waiter[5]->finish . ' ' . $waiter[5]->{out}, '00000 claimed', '... after the rollback the one that waits has it');
	is(record('idle') =~ /^processing 1 / && record('idle') !~ /$t/ ? 1 : 0, 1, '... as the first attempt, under its own token');

	# the same with a holder that completes
	$t = token_of($a, 'idle2');
	$a->q("BEGIN; SELECT idem_complete('idle2', '$t', '\"r\"')");
	$waiter[5]->start("SELECT outcome, result_json FROM idem_claim('idle2', '{\"a\": 1}', wait => '1 h')");
	wait_until('it waits', sub { $o->q("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'waiter 6' AND wait_event_type = 'Extension'") == 1 });
	$a->q('COMMIT');
	is($waiter[5]->finish . ' ' . $waiter[5]->{out}, '00000 succeeded|"r"', '... after the completion it gets the result');
	$_->quit for $a, @waiter;
}

#---------------------------------------------------------------------------
# C44: the server cuts off a transaction that idles
#---------------------------------------------------------------------------

{
	my $a = session($node);
	my $t = token_of($a, 'cut');
	my $pid = $a->pid;
	$a->q("BEGIN; INSERT INTO business VALUES ('cut'); SELECT idem_complete('cut', '$t', '1'); SET idle_in_transaction_session_timeout = '20ms'");
	wait_until('the server has cut it off', sub { $o->q("SELECT count(*) FROM pg_stat_activity WHERE pid = $pid") == 0 });
	isnt($a->try('COMMIT'), '00000', 'C44: the connection is gone');
	$a->quit;
	is(business('cut'), 0, '... no business row');
	is(record('cut'), "processing 1 $t", '... the claim stands');
	my $b = session($node);
	is($b->q("BEGIN; INSERT INTO business VALUES ('cut'); SELECT idem_complete('cut', '$t', '2'); COMMIT"), 't', '... a new connection does it with the same token');
	is(business('cut'), 1, '... once');

	$t = token_of($b, 'cut2');
	clock($b, 40);
	my $t2 = token_of($b, 'cut2');
	is($o->try("SELECT idem_complete('cut2', '$t', '1')"), 'ID001', '... after a takeover it is refused');
	$b->quit;
}

#---------------------------------------------------------------------------
# C48: COMMIT fails after the completion
#---------------------------------------------------------------------------

{
	my $a = session($node);
	$o->q("INSERT INTO business VALUES ('taken')");
	my $t = token_of($a, 'deferred');
	is($a->q("BEGIN; INSERT INTO business VALUES ('taken'); SELECT idem_complete('deferred', '$t', '1')"), 't', 'C48: completed');
	is($a->try('COMMIT'), '23505', '... but COMMIT fails');
	is(record('deferred'), "processing 1 $t", '... the claim stands');
	is(claim($o, 'deferred'), 'in_progress 1', '... nothing is replayed');
	is($a->q("BEGIN; INSERT INTO business VALUES ('deferred'); SELECT idem_complete('deferred', '$t', '2'); COMMIT"), 't', '... corrected, with the same token');
	is(claim($o, 'deferred'), 'succeeded 1', '... replay');

	$t = token_of($a, 'deferred2');
	$a->q("BEGIN; INSERT INTO business VALUES ('taken'); SELECT idem_complete('deferred2', '$t', '1')");
	$a->try('COMMIT');
	is($a->q("SELECT status FROM idem_fail('deferred2', '$t', 'permanent', 'commit failed', '23505')"), 'failed', '... or recorded as failed');
	is(business('taken'), 1, '... no second row');
	$a->quit;
}

#---------------------------------------------------------------------------
# C47: the failed work aborts the transaction that would record the failure
#---------------------------------------------------------------------------

{
	my $a = session($node);
	my $t = token_of($a, 'aborted');
	$a->q('BEGIN');
	is($a->try('INSERT INTO business VALUES (NULL)'), '23502', 'C47: the work fails');
	is($a->try("SELECT idem_fail('aborted', '$t', 'retryable', 'e')"), '25P02', '... the failure cannot be recorded in it');
	$a->try('COMMIT');
	is(record('aborted'), "processing 1 $t", '... the claim stands');
	$a->q('BEGIN; SAVEPOINT w');
	$a->try('INSERT INTO business VALUES (NULL)');
	is($a->q("ROLLBACK TO w; SELECT status FROM idem_fail('aborted', '$t', 'retryable', 'e'); COMMIT"), 'retryable_failed', '... after ROLLBACK TO it can');
	like(record('aborted'), qr/^retryable_failed 1/, '... and stays');

	$t = token_of($a, 'aborted2');
	$a->q("BEGIN; SAVEPOINT c; SELECT idem_complete('aborted2', '$t', '1'); ROLLBACK TO c");
	is($a->q("SELECT idem_complete('aborted2', '$t', '2'); COMMIT"), 't', 'a completion undone by a savepoint can be done anew');
	is($a->q("SELECT result_json FROM idem_claim('aborted2', '{\"a\": 1}')"), '2', '... and counts');

	for (1 .. 10)
	{
		$a->q('BEGIN');
		claim($a, 'onetx');
		$a->try('INSERT INTO business VALUES (NULL)');
		$a->try('ROLLBACK');
	}
	is($o->q("SELECT count(*) FROM idem_record WHERE idempotency_key = 'onetx'"), '0', 'claim and work in one transaction: rolled back, no trace');
	is(claim($a, 'onetx'), 'claimed 1 none', '... and no attempt is counted');
	$a->quit;
}

#---------------------------------------------------------------------------
# C43: renewed inside the open business transaction
#---------------------------------------------------------------------------

for my $end ('COMMIT', 'ROLLBACK', 'terminated')
{
	my ($a, $b) = (session($node), session($node));
	my $key = "inside_$end";
	my $t = token_of($a, $key);
	$a->q("BEGIN; SELECT idem_renew('$key', '$t', '10 min')");
	clock($b, 60);
	is(claim($b, $key), 'in_progress 1', "C43 $end: in progress while the renewal is open, though the lease is over");
	if ($end eq 'terminated')
	{
		my $pid = $a->pid;
		$o->q("SELECT pg_terminate_backend($pid)");
		wait_until('it is gone', sub { $o->q("SELECT count(*) FROM pg_stat_activity WHERE pid = $pid") == 0 });
	}
	else { $a->q($end); }
	if ($end eq 'COMMIT')
	{
		is(claim($b, $key), 'in_progress 1', '... renewed');
		is($a->q("SELECT idem_complete('$key', '$t', '1')"), 't', '... and the holder completes');
	}
	else
	{
		is(claim($b, $key), 'claimed 2 lease_expired', '... not renewed: taken over');
		is($o->try("SELECT idem_complete('$key', '$t', '1')"), 'ID001', '... and the holder is refused');
	}
	$_->quit for $a, $b;
}

# A heartbeat from a second connection, in every isolation level of the business transaction.
for my $isolation ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
{
	my ($a, $beat) = (session($node), session($node));
	(my $key = lc $isolation) =~ tr/ /_/;
	my $t = token_of($a, $key);
	$a->q("BEGIN ISOLATION LEVEL $isolation; INSERT INTO business VALUES ('$key')");
	$beat->q("SELECT idem_renew('$key', '$t', '1 min')") for 1 .. 3;
	is($a->q("SELECT idem_complete('$key', '$t', '1')"), 't', "$isolation: completes although its heartbeat wrote the row meanwhile");
	is($a->try('COMMIT'), '00000', '... and commits');
	is(business($key), 1, '... one business row');
	$_->quit for $a, $beat;
}

#---------------------------------------------------------------------------
# C30, C64: decisions use the time of the call, not that of the transaction
#---------------------------------------------------------------------------

{
	my ($a, $b) = (session($node), session($node));
	$a->q('BEGIN');
	$a->q('SELECT now()');
	my $old = token_of($b, 'frozen', "lease => '10 ms'");
	wait_until('the lease is over', sub { $o->q("SELECT clock_timestamp() > (idem_status('frozen')).lease_until") eq 't' });
	is(claim($a, 'frozen'), 'claimed 2 lease_expired', 'C30: a lease that ended after the transaction began has ended');
	is($a->q("SELECT r.lease_until - '30 s'::interval > now() AND r.updated_at > now() FROM idem_status('frozen') r"), 't', '... the new one starts now');
	my $t = $a->q("SELECT owner_token FROM idem_status('frozen')");
	is($a->q("SELECT retry_at > now() + '1 h' FROM idem_fail('frozen', '$t', 'retryable', retry_after => '1 h')"), 't', 'C64: a retry is due so long after the failure');
	$a->q('COMMIT');
	$_->quit for $a, $b;
}

#---------------------------------------------------------------------------
# C01: a snapshot older than the deciding row gives 40001, and nothing else
#---------------------------------------------------------------------------

for my $isolation ('REPEATABLE READ', 'SERIALIZABLE')
{
	my ($a, $b) = (session($node), session($node));
	(my $p = lc $isolation) =~ tr/ /_/;
	my %do = (
		claimed   => sub { token_of($a, $_[0]) },
		completed => sub { $a->q("SELECT idem_complete('$_[0]', '" . token_of($a, $_[0]) . "', '1')") },
		failed    => sub { $a->q("SELECT idem_fail('$_[0]', '" . token_of($a, $_[0]) . "', 'permanent')") });
	my %then = (claimed => 'in_progress 1', completed => 'succeeded 1', failed => 'failed 1');
	for my $what (sort keys %do)
	{
		my $key = "${p}_$what";
		$b->q("BEGIN ISOLATION LEVEL $isolation; SELECT count(*) FROM business");
		$do{$what}->($key);
		is($b->try("SELECT idem_claim('$key', '{\"a\": 1}')"), '40001', "C01: $isolation, $what after the snapshot");
		$b->try('ROLLBACK');
		is(claim($b, $key), $then{$what}, '... and in a new transaction the answer');
	}
	# older than the snapshot, but changed after it
	token_of($a, "${p}_taken");
	my $t = token_of($a, "${p}_done");
	$b->q("BEGIN ISOLATION LEVEL $isolation; SELECT count(*) FROM business");
	clock($a, 40);
	token_of($a, "${p}_taken");
	clock($a, 0);
	is($b->try("SELECT idem_claim('${p}_taken', '{\"a\": 1}')"), '40001', "C01: $isolation, taken over after the snapshot");
	$b->try('ROLLBACK');
	$b->q("BEGIN ISOLATION LEVEL $isolation; SELECT count(*) FROM business");
	$a->q("SELECT idem_complete('${p}_done', '$t', '1')");
	is($b->try("SELECT idem_claim('${p}_done', '{\"a\": 1}')"), '40001', "C01: $isolation, completed after the snapshot");
	$b->try('ROLLBACK');
	# gone after it
	$t = token_of($a, "${p}_gone");
	$b->q("BEGIN ISOLATION LEVEL $isolation; SELECT count(*) FROM business");
	$a->q("SELECT idem_release('${p}_gone', '$t')");
	is($b->try("SELECT idem_claim('${p}_gone', '{\"a\": 1}')"), '40001', "C01: $isolation, released after the snapshot");
	$b->try('ROLLBACK');
	$_->quit for $a, $b;
}

# C28: other keys do not fail each other
{
	my ($a, $b) = (session($node), session($node));
	for my $round (1 .. 5)
	{
		$_->q('BEGIN ISOLATION LEVEL SERIALIZABLE') for $a, $b;
		for my $s ($a, $b)
		{
			my $key = 'ser' . ($s == $a ? 'a' : 'b') . $round;
			$s->q("SELECT idem_complete('$key', owner_token, '1') FROM idem_claim('$key', '1')");
		}
		is($o->q("SELECT count(*) FROM pg_locks WHERE mode = 'SIReadLock' AND locktype = 'relation' AND relation::regclass::text LIKE 'idem_record%'"), '0',
			'C28: no predicate lock on a whole table') if $round == 1;
		is($a->try('COMMIT') . ' ' . $b->try('COMMIT'), '00000 00000', "C28: two keys in SERIALIZABLE, round $round");
	}
	$_->quit for $a, $b;
}

#---------------------------------------------------------------------------
# Policies: a change counts from its commit on, in sessions that have cached the old
# one; in its own transaction at once, and not after a rollback.
#---------------------------------------------------------------------------

{
	my ($a, $b) = (session($node), session($node));
	my $n = 0;
	my $lease = sub {
		my ($s) = @_;
		my $key = 'policy' . ++$n;
		$s->q("SELECT idem_claim('$key', '1', 'leased')");
		return $s->q("SELECT lease_until - updated_at FROM idem_status('$key')");
	};
	is($lease->($_), '00:00:30', 'an operation without a policy of its own') for $a, $b;
	$a->q("BEGIN; INSERT INTO idem_policy (operation, lease) VALUES ('leased', '60 s')");
	is($lease->($a), '00:01:00', '... with one, in the transaction that made it');
	is($lease->($b), '00:00:30', '... not yet in another');
	$a->q('ROLLBACK');
	is($lease->($a), '00:00:30', '... nor after its rollback');
	$a->q("BEGIN; SAVEPOINT x; INSERT INTO idem_policy (operation, lease) VALUES ('leased', '70 s')");
	is($lease->($a), '00:01:10', '... nor from a savepoint');
	$a->q('ROLLBACK TO x');
	is($lease->($a), '00:00:30', '... that was rolled back');
	$a->q("COMMIT; INSERT INTO idem_policy (operation, lease) VALUES ('leased', '80 s')");
	is($lease->($_), '00:01:20', '... from the commit on everywhere') for $a, $b;
	$b->q('BEGIN');
	$a->q("UPDATE idem_policy SET lease = '90 s' WHERE operation = 'leased'");
	is($lease->($b), '00:01:30', '... also in an open transaction');
	$b->q('COMMIT');
	$b->q('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM business');
	$a->q("UPDATE idem_policy SET lease = '100 s' WHERE operation = 'leased'");
	is($lease->($b), '00:01:40', '... of any isolation level');
	$b->q('COMMIT');
	$a->q("DELETE FROM idem_policy WHERE operation = 'leased'");
	is($lease->($_), '00:00:30', '... deleted: the default again') for $a, $b;
	isnt($a->try("DELETE FROM idem_policy WHERE operation = 'default'"), '00000', 'the default policy stays');
	isnt($a->try('TRUNCATE idem_policy'), '00000', '... also from TRUNCATE');
	$_->quit for $a, $b;
}

#---------------------------------------------------------------------------
# C71: the reaper beside an uncommitted renewal or completion
#---------------------------------------------------------------------------

if ($o->q("SELECT count(*) FROM pg_proc WHERE proname = 'idem_reap'") > 0)
{
	my ($a, $r) = (session($node), session($node));
	$o->q("INSERT INTO idem_policy (operation, on_lease_expiry) VALUES ('wire', 'unknown')");
	for my $call ('renew', 'complete', 'fail')
	{
		my $t = $a->q("SELECT owner_token FROM idem_claim('reaped_$call', '1', 'wire')");
		my $do = { renew => "idem_renew('reaped_$call', '$t', '1 d')", complete => "idem_complete('reaped_$call', '$t', '1')", fail => "idem_fail('reaped_$call', '$t', 'permanent')" }->{$call};
		$a->q("BEGIN; SELECT $do");
		clock($r, 60);
		$r->q("SET lock_timeout = '5s'; SELECT idem_reap()");
		$a->q('COMMIT');
		$r->q('SELECT idem_reap()');
		is($o->q("SELECT status FROM idem_status('reaped_$call')"), { renew => 'processing', complete => 'succeeded', fail => 'failed' }->{$call},
			"C71: an uncommitted $call is left alone by the reaper");
	}
	$_->quit for $a, $r;
}

#---------------------------------------------------------------------------
# C14, C15, C35: an old attempt after a whole cycle
#---------------------------------------------------------------------------

sub refused
{
	my ($s, $key, $t, $label) = @_;
	my $image = image($key);
	my @got = map { $s->try("SELECT $_") } "idem_complete('$key', '$t', '1')", "idem_fail('$key', '$t', 'permanent')", "idem_release('$key', '$t')", "idem_checkpoint('$key', '$t', 's', '1')";
	is("@got", 'ID001 ID001 ID001 ID001', "$label: refused");
	is($s->q("SELECT idem_renew('$key', '$t')"), '~', "$label: no renewal");
	is(image($key), $image, "$label: record untouched");
	return;
}

{
	my ($a, $b, $c) = map { session($node) } 1 .. 3;
	my $t1 = token_of($a, 'aba');
	clock($b, 40);
	my $t2 = token_of($b, 'aba');
	$b->q("SELECT idem_fail('aba', '$t2', 'retryable', retry_after => '0')");
	clock($c, 41);
	my $t3 = token_of($c, 'aba');
	refused($a, 'aba', $t1, 'C14: first token while the third attempt runs');
	refused($b, 'aba', $t2, 'C14: second token');
	is($c->q("SELECT idem_renew('aba', '$t3', '1 h') IS NOT NULL"), 't', '... the third one renews');
	refused($a, 'aba', $t1, 'C35: late heartbeat');
	is($c->q("SELECT idem_complete('aba', '$t3', '1')"), 't', '... and completes');
	refused($a, 'aba', $t1, 'C14: first token after completion');

	# the key is deleted and made anew
	clock($_, 0) for $a, $b, $c;
	$t1 = token_of($a, 'anew');
	if ($o->q("SELECT count(*) FROM pg_proc WHERE proname = 'idem_forget'") > 0)
	{
		$a->q("SELECT idem_complete('anew', '$t1', '1')");
		$o->q("SELECT idem_forget('anew', 'test')");
	}
	else { $a->q("SELECT idem_release('anew', '$t1')"); }
	$t2 = token_of($c, 'anew');
	refused($a, 'anew', $t1, 'C14: token from before the key was deleted');
	is($c->q("SELECT idem_complete('anew', '$t2', '1')"), 't', '... the new one works');

	# one session with two attempts
	$t1 = token_of($a, 'twice');
	clock($a, 40);
	$t2 = token_of($a, 'twice');
	isnt($t1, $t2, 'C15: a session has another token for another attempt');
	refused($a, 'twice', $t1, 'C15: its first token');
	is($a->q("SELECT idem_complete('twice', '$t2', '1')"), 't', '... the second works');
	$_->quit for $a, $b, $c;
}

# Tokens of backends forked from one postmaster are all different.
{
	my @list = map { split /\n/ } run_workers(8, sub {
		my $s = session($node);
		$s->q("SELECT setseed(0.5)");
		return $s->q("SELECT owner_token FROM generate_series(1, 500) i, LATERAL idem_claim('tok$_[0]_' || i, '1')");
	});
	my %seen = map { $_ => 1 } @list;
	is(scalar(@list) . ' ' . scalar(keys %seen), '4000 4000', 'C14: 4000 tokens of 8 backends, all different');
	is(scalar(grep { /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/ } @list), 4000, '... version 4');
}

$o->quit;
done_testing();
