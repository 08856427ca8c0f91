# Through a real pooler in transaction mode, many clients on three server connections:
# a claim wanders between backends and leaves no lock there (C11), settings that one client
# leaves behind change no other client's keys (C12), duplicates do not use up the pool (C08),
# and kills of clients, of server connections, of the server and of the pooler leave one
# effect per key (C06, C44, C47).
#
# Needs pgbouncer.  Without it this fails, unless IDEM_NO_POOLER is set.
#
#	IDEM_POOLER_SEED		repeats the choices of an earlier run

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my ($program) = grep { -x } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin';
if (!$program)
{
	plan skip_all => 'no pgbouncer, and IDEM_NO_POOLER is set' if $ENV{IDEM_NO_POOLER};
	die "pgbouncer is not installed; IDEM_NO_POOLER=1 skips this";
}

my ($major, $minor) = (run_command([ $program, '--version' ]))[0] =~ /(\d+)\.(\d+)/ or die "no version of $program";
my $seed = $ENV{IDEM_POOLER_SEED} || int(time()) % 1_000_000;
note "seed $seed, $program $major.$minor";
srand $seed;

my $pool_size = 3;
my $node = new_node('pooler', conf => "fsync = off\n");
my $o = session($node, name => 'observer');

$o->q(<<'SQL');
CREATE TABLE business (key text NOT NULL, who text);
CREATE FUNCTION work(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO public.business VALUES (key, 'execute');
	PERFORM pg_sleep(coalesce((request ->> 'sleep')::float8, 0));
	RETURN jsonb_build_object('key', key);
END $$;
CREATE ROLE app;
SELECT idem_grant('app', 'client');
GRANT app TO postgres;
-- no claim lapses here
UPDATE idem_policy SET lease = '1 h' WHERE operation = 'default';
SQL

#---------------------------------------------------------------------------
# Poolers.  Each has a pool of its own and a socket of its own; no TCP.
#---------------------------------------------------------------------------

package Pooler
{
	my @all;
	my $maker = $$;

	sub new
	{
		my ($class, $name, @more) = @_;
		my $dir = PostgreSQL::Test::Utils::tempdir_short();
		my $log = "${PostgreSQL::Test::Utils::log_path}/041_pgbouncer_$name.log";
		my $host = $node->host;
		my $port = $node->port;

		PostgreSQL::Test::Utils::append_to_file("$dir/ini", join "\n", "[databases]",
			"postgres = host=$host port=$port dbname=postgres user=postgres application_name=pool-$name",
			"[pgbouncer]", "listen_addr =", "listen_port = 6432", "unix_socket_dir = $dir", "logfile = $log", "auth_type = any",
			"pool_mode = transaction", "default_pool_size = $pool_size", "reserve_pool_size = 0", "max_client_conn = 200",
			"server_round_robin = 1", "server_login_retry = 0.1", "server_idle_timeout = 0", "server_lifetime = 36000", @more, '');
		my $self = bless { dir => $dir, name => $name }, $class;
		push @all, $self;
		return $self->start;
	}

	sub start
	{
		my ($self) = @_;
		my $pid = fork();
		die "fork: $!" unless defined $pid;
		if ($pid == 0)
		{
			open STDOUT, '>', "$self->{dir}/out";
			open STDERR, '>&', \*STDOUT;
			exec $program, '-q', "$self->{dir}/ini" or POSIX::_exit(127);
		}
		$self->{pid} = $pid;
		IdemTest::wait_until("pooler $self->{name} listens", sub {
			die "pooler $self->{name} ended: " . PostgreSQL::Test::Utils::slurp_file("$self->{dir}/out") if waitpid($pid, POSIX::WNOHANG()) == $pid;
			return -S "$self->{dir}/.s.PGSQL.6432"; });
		return $self;
	}

	sub connstr { my ($self, $db) = @_; return "host=$self->{dir} port=6432 user=postgres dbname=$db"; }
	sub admin { my ($self) = @_; return $self->{admin} //= IdemTest::session(Pooler::Admin->of($self)); }
	sub client { my ($self, $name) = @_; return IdemTest::session($self, name => $name // 'client'); }

	# Clients that wait for a server connection.
	sub waiting
	{
		my ($self) = @_;
		my ($out) = PostgreSQL::Test::Utils::run_command([ 'psql', '-XAtq', '-d', $self->connstr('pgbouncer'), '-c', 'SHOW POOLS' ]);
		my ($line) = grep { /^postgres\|/ } split /\n/, $out;
		my @column = split /\|/, $line // die "no pool: $out";
		return $column[3];
	}

	sub kill
	{
		my ($self) = @_;
		my $pid = delete $self->{pid} or return;
		CORE::kill('KILL', $pid);
		waitpid $pid, 0;
		unlink "$self->{dir}/.s.PGSQL.6432";
		return;
	}

	END { if ($$ == $maker) { local $?; $_->kill for @all; } }
}

# Server connections of the pooler, and the locks they hold while no client has a transaction.
sub backends
{
	my ($pool) = @_;
	return split /\n/, $o->q("SELECT pid FROM pg_stat_activity WHERE datname = 'postgres' AND pid <> pg_backend_pid() ORDER BY 1");
}

sub locks_left { return $o->q("SELECT count(*) FROM pg_locks WHERE pid <> pg_backend_pid() AND (locktype = 'advisory' OR locktype = 'transactionid' OR relation::regclass::text LIKE 'idem%')"); }

sub record
{
	my ($key) = @_;
	return $o->q("SELECT concat_ws(' ', status, attempts, owner_token) FROM idem_record WHERE idempotency_key = '$key'");
}

sub business { my ($key) = @_; return $o->q("SELECT count(*) FROM business WHERE key = '$key'"); }

# Opens all server connections of the pool, by as many transactions at once.
sub fill
{
	my ($pool) = @_;
	my @client = map { $pool->client } 1 .. $pool_size;
	my %pid;
	$_->q('BEGIN') for @client;
	$pid{ $_->q('SELECT pg_backend_pid()') } = 1 for @client;
	$_->q('COMMIT') for @client;
	$_->quit for @client;
	return sort keys %pid;
}

my $plain = Pooler->new('plain');

#---------------------------------------------------------------------------
# C11: claim, renew and complete on three server connections
#---------------------------------------------------------------------------

for my $pool ($plain, Pooler->new('discards', 'server_reset_query = DISCARD ALL', 'server_reset_query_always = 1'))
{
	my $with = $pool->{name};
	my @pid = fill($pool);
	is(scalar @pid, $pool_size, "C11, pooler that $with: $pool_size server connections");
	my ($a, $b) = ($pool->client, $pool->client);
	# All server connections are taken but the one that a call shall go to.
	my @holder = map { $pool->client } @pid;
	my @held = map { $_->q('BEGIN; SELECT pg_backend_pid()') } @holder;
	my $on = 0;
	my $leak = '';
	my $wrong = '';
	my $call = sub {
		my ($client, $sql, $state) = @_;
		$on = ($on + 1) % @holder;
		$holder[$on]->q('COMMIT');
		my $got = $client->try($sql);
		die "$sql: $got $client->{err}" if $got ne ($state // '00000');
		my $out = $client->{out};
		$client->try('ROLLBACK') if $got ne '00000';
		$leak .= "$sql\n" if locks_left() ne '0';
		my $pid = $holder[$on]->q('BEGIN; SELECT pg_backend_pid()');
		$wrong .= "$sql: $pid\n" if $pid != $held[$on];
		return $out;
	};

	for my $i (1 .. 4)
	{
		my $k = "wander_${with}_$i";
		my ($p1, $t) = split /\|/, $call->($a, "SELECT pg_backend_pid(), owner_token FROM idem_claim('$k', '{\"a\": $i}')");
		my ($p2, $renewed) = split /\|/, $call->($a, "SELECT pg_backend_pid(), idem_renew('$k', '$t') IS NOT NULL");
		my ($p3, $completed) = split /\|/, $call->($a, "SELECT pg_backend_pid(), idem_complete('$k', '$t', '$i')");
		is(scalar keys %{ { map { $_ => 1 } $p1, $p2, $p3 } }, 3, "C11: claim on $p1, renewal on $p2, completion on $p3");
		is("$renewed $completed", 't t', '... work');
		is($call->($b, "SELECT outcome, result_json FROM idem_claim('$k', '{\"a\": $i}')"), "succeeded|$i", '... replayed to another client');
		# transactions that roll back, and that fail inside a call
		$t = $call->($b, "SELECT owner_token FROM idem_claim('$k.2')");
		$call->($a, "BEGIN; SELECT idem_renew('$k.2', '$t', '5 min'); ROLLBACK");
		$call->($a, "BEGIN; SELECT idem_claim('$k.3', lease => '0')", '22023');
		$call->($b, "BEGIN; SELECT idem_complete('$k.2', '" . token(1) . "')", 'ID001');
		$call->($a, "BEGIN; SELECT idem_execute('$k.4', '{}', 'work(text,jsonb,integer)'); ROLLBACK");
		$call->($b, "BEGIN; SELECT idem_once('$k.4'); ROLLBACK");
		$call->($a, "BEGIN; SELECT idem_execute('$k.4', '{\"sleep\": \"no number\"}', 'work(text,jsonb,integer)'); ROLLBACK");
		$call->($b, "BEGIN; SAVEPOINT s; SELECT idem_claim_many(ARRAY['$k.5', '$k.6']); ROLLBACK TO s; COMMIT");
		$call->($b, 'DISCARD ALL');
		is($call->($a, "SELECT idem_complete('$k.2', '$t')"), 't', '... a claim survives what the others did between');
	}
	$_->q('COMMIT') for @holder;
	$_->quit for @holder;
	is($wrong, '', '... each call on the server connection meant for it');
	is($leak, '', '... no lock outlives a transaction');
	is_deeply([ fill($pool) ], \@pid, '... and no server connection was replaced');
	$_->quit for $a, $b;
	$pool->kill if $pool != $plain;
}
wait_until('the second pooler is gone', sub { backends($plain) <= $pool_size });

#---------------------------------------------------------------------------
# C12: settings that another client left on the server connection
#---------------------------------------------------------------------------

{
	my $request = q('{"when": "2026-03-29T02:30:00", "n": 12345678901234567890.10, "f": 1e-7, "i": "1 day", "b": "\\\\x00ff", "s": "I\u0131i\u0130\u00e4"}');
	my $key = q(public.idem_key('t%:ä', 'op', '1.50'));
	my $facts = "SELECT $key, encode(public.idem_digest($request), 'hex'), public.idem_canonical($request), public.idem_downstream_key($key, 's')";
	my $want = $o->q($facts);
	my $leaker = $plain->client('leaker');
	my $victim = $plain->client('victim');

	$o->q("SELECT idem_complete($key, owner_token, '{\"n\": 1.10}', '\\x00ff') FROM idem_claim($key, $request)");
	$o->q("SELECT idem_claim('c12', '1', lease => '1 day')");
	for my $setting (
		"search_path = pg_temp", "search_path = 'no such schema'", "IntervalStyle = iso_8601", "bytea_output = escape", "extra_float_digits = -15",
		"lc_numeric = 'C.UTF-8'", "lc_messages = 'C.UTF-8'", "lc_time = 'C.UTF-8'", "lc_monetary = 'C.UTF-8'", "xmlbinary = hex", "jit = on", "default_transaction_isolation = serializable", "enable_indexscan = off",
		"transform_null_equals = on", "row_security = off", "check_function_bodies = off")
	{
		my ($name, $value) = $setting =~ /^(\S+) = (.*)$/;
		my $leaked = 0;
		my $same = 0;
		$leaker->q("SET $setting") for 1 .. $pool_size;
		for (1 .. $pool_size)
		{
			(my $bare = $value) =~ tr/'//d;
			my $shown = $victim->q("BEGIN; SHOW $name");
			$leaked++ if $shown =~ tr/"//dr eq $bare;
			$same++ if $victim->q($facts) eq $want
				&& $victim->q("SELECT outcome, result_body = '\\x00ff'::bytea FROM public.idem_claim($key, $request)") eq 'succeeded|t'
				&& $victim->q("SELECT outcome, extract(epoch FROM retry_after) BETWEEN 0 AND 1 FROM public.idem_claim('c12', '1')") eq 'in_progress|t'
				&& $victim->q("SELECT outcome FROM public.idem_claim('c12', '2')") eq 'conflict';
			$victim->q('COMMIT');
		}
		# some settings are kept apart by newer poolers
		my $expected = $name eq 'IntervalStyle' && ($major > 1 || $minor >= 20) ? 0 : $pool_size;
		is("$leaked $same", "$expected $pool_size", "C12: $setting of another client is there on all connections, and changes nothing");
		# a key claimed under it is the same key without it
		my $k = "leak $setting" =~ tr/'//dr;
		my $hash = sub { return $o->q("SELECT encode(request_hash, 'hex'), lease_until - updated_at FROM idem_record WHERE idempotency_key = '$k'") };
		$victim->q("SELECT public.idem_claim('$k', $request, lease => '1 day 1 second')");
		is($hash->(), (split /\|/, $want)[1] . '|1 day 00:00:01', '... nor what is stored');
		$leaker->q("RESET $name") for 1 .. $pool_size;
	}

	# What the pooler itself carries over from client to client.
	$leaker->q("SET timezone = 'Asia/Tokyo'; SET DateStyle = 'SQL, DMY'; SET client_encoding = 'LATIN1'");
	$victim->q("SET timezone = 'America/New_York'");
	for my $client ($leaker, $victim, $leaker, $victim)
	{
		is($client->q("SELECT extract(epoch FROM lease_until - updated_at)::int FROM idem_status('c12')"), '86400', 'C40: clients in other zones and encodings see the same lease');
		is($client->q("SELECT outcome FROM idem_claim(idem_key('t%:' || chr(228), 'op', '1.50'), '1')"), 'conflict', 'C12: ... and find the same key');
		is($client->q("SELECT extract(epoch FROM idem_renew('zoned', owner_token, '200 days') - clock_timestamp()) BETWEEN 17279990 AND 17280000 FROM idem_claim('zoned', token => '" . token(40) . "')"), 't',
			'... a day has 24 hours in each');
	}

	# An identity set for a transaction only
	$leaker->q("BEGIN; SET LOCAL ROLE app; SELECT idem_claim('role_1'); COMMIT");
	$leaker->q("BEGIN; SET LOCAL ROLE app; SELECT idem_claim('role_2'); ROLLBACK");
	$victim->q("SELECT idem_claim('role_3_$_')") for 1 .. $pool_size;
	is($o->q("SELECT string_agg(idempotency_key || ' ' || owner, ', ' ORDER BY idempotency_key) FROM idem_record WHERE idempotency_key LIKE 'role%'"),
		join(', ', 'role_1 app', map { "role_3_$_ postgres" } 1 .. $pool_size), 'C12: a role set in a transaction ends with it');
	is(locks_left(), '0', '... no locks');
	$_->quit for $leaker, $victim;
}

#---------------------------------------------------------------------------
# C08: duplicates and the pool
#---------------------------------------------------------------------------

{
	my $holder = $plain->client('holder');
	my @duplicate = map { $plain->client("duplicate $_") } 1 .. 10;
	my $other = $plain->client('other');

	for my $how (
		[ 'claim', "SELECT idem_claim('hot1')", "SELECT outcome FROM idem_claim('hot1')" ],
		[ 'execute', "SELECT idem_execute('hot2', '{}', 'work(text,jsonb,integer)')", "SELECT outcome FROM idem_execute('hot2', '{}', 'work(text,jsonb,integer)')" ],
		[ 'batch', "SELECT idem_claim_many('{hot3,hot4}')", "SELECT string_agg(DISTINCT outcome, ' ') FROM idem_claim_many('{hot4,hot3}')" ])
	{
		my ($name, $hold, $ask) = @$how;
		$holder->q("BEGIN; $hold");
		# with one connection of three taken, and another left for them
		$other->q('BEGIN; SELECT 1');
		$_->start($ask) for @duplicate;
		is(join(' ', map { $_->finish . $_->{out} } @duplicate), join(' ', ('00000in_progress') x 10), "C08: $name held in an open transaction: ten duplicates are answered over the one connection left");
		$other->q('COMMIT');
		is($other->q("SELECT count(*) FROM generate_series(1, 100) i, idem_claim('unrelated_${name}_' || i) WHERE outcome = 'claimed'"), '100', '... other keys go on');
		$holder->q('ROLLBACK');
	}

	# While an execution runs, its duplicates never stand in the way of it or of others.
	$holder->start("SELECT outcome FROM idem_execute('hot5', '{\"sleep\": 30}', 'work(text,jsonb,integer)')");
	wait_until('the handler sleeps', sub { $o->q("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == 1 });
	$_->start("SELECT outcome FROM idem_execute('hot5', '{\"sleep\": 30}', 'work(text,jsonb,integer)')") for @duplicate;
	is(join(' ', map { $_->finish . $_->{out} } @duplicate), join(' ', ('00000in_progress') x 10), 'C08: duplicates of a running execution are answered at once');
	is($o->q("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"), '1', '... while it runs');
	$o->q("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'");
	is($holder->finish, '57014', '... which can be cancelled');
	is(record('hot5') . business('hot5'), '0', '... and leaves nothing');

	# Those that ask to wait hold a server connection each: they fill the pool, and end.
	my $t = $holder->q("SELECT owner_token FROM idem_claim('hot6')");
	$_->start("SELECT outcome FROM idem_claim('hot6', wait => '1 min')") for @duplicate;
	wait_until('the waiters have the pool', sub {
		$o->q("SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%wait => ''1 min%' AND wait_event_type = 'Extension' AND state = 'active'") == $pool_size });
	is($plain->waiting, 10 - $pool_size, "C08: waiters take a connection each, the rest waits for one");
	$holder->start("SELECT idem_complete('hot6', '$t', '6')");
	wait_until('the holder stands in the queue, too', sub { $plain->waiting == 11 - $pool_size });
	ok(!$holder->done, '... the holder, too: the waiting form is for connections of one\'s own');
	is(locks_left(), '0', '... though no waiter holds a lock');
	# one by one is cancelled until the holder's turn has come
	wait_until('the holder completes', sub {
		$o->q("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE query LIKE '%wait => ''1 min%' AND state = 'active'") unless $holder->done;
		return $holder->done; });
	is($holder->finish . $holder->{out}, '00000t', '... its turn comes');
	like(join(' ', map { $_->finish . $_->{out} } @duplicate), qr/^(?:(?:57014|00000succeeded) ?){10}$/, '... every waiter has ended, cancelled or with the result');

	# A bounded wait frees the pool by itself.
	$t = $holder->q("SELECT owner_token FROM idem_claim('hot7')");
	$_->start("SELECT outcome FROM idem_claim('hot7', wait => '200 ms')") for @duplicate;
	wait_until('the waiters have the pool', sub { $plain->waiting > 0 });
	is($holder->q("SELECT idem_complete('hot7', '$t', '7')"), 't', 'C08: with a bounded wait the holder completes by itself');
	like(join(' ', map { $_->finish . $_->{out} } @duplicate), qr/^(?:00000(?:in_progress|succeeded) ?){10}$/, '... and every waiter is answered');

	# idem_once waits for the transaction that was first, which has its own connection
	$holder->q("BEGIN; SELECT idem_once('hot8')");
	$_->start("SET LOCAL lock_timeout = '50 ms'\\; SELECT idem_once('hot8')") for @duplicate;
	like(join(' ', map { $_->finish } @duplicate), qr/^(?:55P03 ?){10}$/, 'C08: idem_once, lock_timeout frees the connection');
	$holder->q('COMMIT');
	is(locks_left(), '0', '... no locks');
	$_->quit for $holder, $other, @duplicate;
}

#---------------------------------------------------------------------------
# 30 clients, the same keys, three connections
#---------------------------------------------------------------------------

# Works on a key until it is done; reconnects when the connection is lost.  Returns the result seen.
sub settle
{
	my ($pool, $client, $who, $key, $form) = @_;
	my $own = sprintf '%08x-0000-4000-8000-%012x', $who + 1, unpack('%32C*', $key) * 65536 + $who;
	my $again = 0;
	my $do = sub {
		my ($sql) = @_;
		return [ '08006', '' ] unless $$client;
		my $state = $$client->try($sql);
		my $out = $$client->{out};
		if ($state =~ /^(?:08006|08P01|57P01|57P03|57P02)$/)
		{
			$$client->quit;
			undef $$client;
		}
		elsif ($state ne '00000') { $$client->try('ROLLBACK'); }
		return [ $state, $out ];
	};

	for (my $end = time() + $IdemTest::timeout; time() < $end; $again++)
	{
		$$client //= eval { $pool->client("worker $who") };
		my $got;
		if ($form eq 'claim')
		{
			$got = $do->("SELECT outcome, result_json FROM idem_claim('$key', '{}', token => '$own')");
			next if $got->[0] ne '00000';
			if ($got->[1] =~ /^claimed/)
			{
				$got = $do->("BEGIN; INSERT INTO business VALUES ('$key', '$who')");
				next if $got->[0] ne '00000';
				$do->("SELECT idem_complete('$key', '$own', '{\"key\": \"$key\"}')")->[0] eq '00000' and $do->('COMMIT');
				next;
			}
		}
		elsif ($form eq 'execute')
		{
			$got = $do->("SELECT outcome, result_json FROM idem_execute('$key', '{}', 'work(text,jsonb,integer)')");
			next if $got->[0] ne '00000' || $got->[1] =~ /^executed/;
		}
		elsif ($form eq 'once')
		{
			$got = $do->("BEGIN; WITH f AS MATERIALIZED (SELECT idem_once('$key') AS first), i AS (INSERT INTO business SELECT '$key', '$who' FROM f WHERE first RETURNING 1) SELECT first FROM f");
			next if $got->[0] ne '00000';
			$do->('COMMIT')->[0] eq '00000' or next;
			$got = [ '00000', 'succeeded|{"key": "' . $key . '"}' ];
		}
		elsif ($form eq 'once_many')
		{
			my @keys = sort { rand() <=> 0.5 } map { "$key.$_" } 1 .. 5;
			my $array = "'{" . join(',', @keys) . "}'";
			$got = $do->("BEGIN; WITH f AS MATERIALIZED (SELECT * FROM idem_once_many($array)), i AS (INSERT INTO business SELECT key, '$who' FROM f WHERE first RETURNING 1) SELECT count(*) FROM f");
			next if $got->[0] ne '00000';
			$do->('COMMIT')->[0] eq '00000' or next;
			$got = [ '00000', 'succeeded|{"key": "' . $key . '"}' ];
		}
		else
		{
			# claim and complete in batches, in another order each
			my @keys = sort { rand() <=> 0.5 } map { "$key.$_" } 1 .. 5;
			my $array = "'{" . join(',', @keys) . "}'";
			$got = $do->("BEGIN; CREATE TEMP TABLE mine ON COMMIT DROP AS SELECT key, outcome, owner_token FROM idem_claim_many($array); INSERT INTO business SELECT key, '$who' FROM mine WHERE outcome = 'claimed';"
				. " SELECT count(*) FROM (SELECT array_agg(key) AS k, array_agg(owner_token) AS t FROM mine WHERE outcome = 'claimed') m, idem_complete_many(m.k, m.t, NULL) WHERE m.k IS NOT NULL; SELECT count(*) FROM mine WHERE outcome = 'succeeded'");
			next if $got->[0] ne '00000';
			$do->('COMMIT')->[0] eq '00000' or next;
			next unless $got->[1] =~ /\n5$/;
			$got = [ '00000', 'succeeded|{"key": "' . $key . '"}' ];
		}
		return $got->[1] =~ s/^succeeded\|//r if $got->[1] =~ /^succeeded/;
	}
	die "gave up on $key ($form)";
}

my @forms = qw(claim execute once once_many claim_many);

sub crowd
{
	my ($pool, $round, $clients, $keys, $meanwhile) = @_;
	my @answers = run_workers($clients, sub {
		my ($who) = @_;
		srand $seed + 1000 * $who + length $round;
		my $client;
		my %got;
		for my $n (sort { rand() <=> 0.5 } 1 .. $keys)
		{
			my $form = $forms[ $n % @forms ];
			$got{"$round$n"} = settle($pool, \$client, $who, "$round$n", $form);
		}
		$client->quit if $client;
		return \%got;
	}, $meanwhile);

	is(join('; ', grep { defined } map { my $got = $_; map { $got->{$_} eq "{\"key\": \"$_\"}" ? undef : "$_: $got->{$_}" } sort keys %$got } @answers), '', "$round: all $clients clients got the result of every key");
	is(scalar(map { keys %$_ } @answers), $clients * $keys, '... each for every key');
	my $want = 0;
	$want += $forms[ $_ % @forms ] =~ /many/ ? 5 : 1 for 1 .. $keys;
	is($o->q("SELECT count(*), count(DISTINCT key) FROM business WHERE key LIKE '$round%'"), "$want|$want", '... every key took effect once');
	is($o->q("SELECT count(*) FROM idem_record WHERE idempotency_key LIKE '$round%' AND status = 'succeeded'"), $want, '... and is stored as succeeded');
	is(locks_left(), '0', '... no locks are left');
	is($o->q('SELECT count(*) FROM idem_check()'), '0', '... nothing to complain of');
	return;
}

{
	my $began = time();
	crowd($plain, 'crowd', 30, 20);
	is_deeply([ scalar backends($plain) ], [$pool_size], "C08: it took $pool_size server connections");
	is($plain->waiting, '0', '... and nobody waits');
	note sprintf '%.1f s', time() - $began;
}

#---------------------------------------------------------------------------
# Clients that go away
#---------------------------------------------------------------------------

sub drop_client
{
	my ($client) = @_;
	kill 'KILL', $client->{child};
	$client->quit;
	return;
}

for my $where ('after the claim', 'in the transaction', 'in the aborted transaction', 'while waiting', 'in the handler')
{
	my $client = $plain->client('goes away');
	my $next = $plain->client('next');
	(my $key = "gone $where") =~ tr/ /_/;
	my $t = token(7);

	$client->q("SELECT idem_claim('$key', token => '$t')") if $where ne 'in the handler';
	if ($where =~ /transaction/)
	{
		$client->q("BEGIN; INSERT INTO business VALUES ('$key')");
		$client->q("SELECT idem_complete('$key', '$t', '1')");
		$client->try('SELECT 1/0') if $where =~ /aborted/;
	}
	elsif ($where eq 'while waiting')
	{
		$client->start("SELECT idem_claim('$key', wait => '1 min')");
		wait_until('it waits', sub { $o->q("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Extension' AND query LIKE '%$key%'") == 1 });
	}
	elsif ($where eq 'in the handler')
	{
		$client->start("SELECT idem_execute('$key', '{\"sleep\": 3600}', 'work(text,jsonb,integer)')");
		wait_until('the handler sleeps', sub { $o->q("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == 1 });
	}
	my $pid = $where =~ /in the transaction/ ? $client->q('SELECT pg_backend_pid()') : 0;
	drop_client($client);
	# The pooler closes the server connection; a backend in a statement would notice when it answers.
	wait_until('its transaction is over', sub {
		$o->q("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND state = 'active' AND query LIKE '%$key%'");
		return $o->q("SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND (pid = $pid OR state <> 'idle') AND backend_type = 'client backend'") == 0; });
	is(business($key), 0, "a client goes away $where: no business row");
	is(locks_left(), '0', '... no lock');
	if ($where eq 'in the handler')
	{
		is(record($key), '', '... no record, no attempt');
		is($next->q("SELECT outcome, attempts FROM idem_execute('$key', '{}', 'work(text,jsonb,integer)')"), 'executed|1', '... the next one executes');
	}
	else
	{
		is(record($key), "processing 1 $t", '... the claim stands (C44)');
		is($next->q("SELECT outcome FROM idem_claim('$key')"), 'in_progress', '... for all others');
		is($next->q("SELECT outcome, attempts FROM idem_claim('$key', token => '$t')"), 'claimed|1', '... who has the token has it again (C06)');
		is($next->q("BEGIN; INSERT INTO business VALUES ('$key'); SELECT idem_complete('$key', '$t', '2'); COMMIT"), 't', '... and completes');
	}
	is(business($key), 1, '... one effect');
	$next->quit;
}

#---------------------------------------------------------------------------
# Server connections and the server are killed under the clients
#---------------------------------------------------------------------------

# A claim left behind is held by the token of a client that goes on; nobody waits for a lease.
{
	my $kills = 0;
	# all three are killed in front of their business write, and more at random after that
	$o->q('BEGIN; LOCK TABLE business IN SHARE MODE');
	crowd($plain, 'kills', 12, 20, sub {
		my $effects = sub { return $o->q("SELECT count(*) FROM business WHERE key LIKE 'kills%'") };
		my $done = 0;
		wait_until('all are at work', sub { $o->q("SELECT count(DISTINCT pid) FROM pg_locks WHERE relation = 'business'::regclass AND NOT granted") == $pool_size });
		$kills += $o->q("SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE relation = 'business'::regclass AND NOT granted");
		$o->q('COMMIT');
		for (1 .. 8)
		{
			$done = $effects->();
			last if $done == 52;
			# one at work, if there is
			$kills++ if $o->q("SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY state = 'idle', random() LIMIT 1) p") eq 't';
			wait_until('work goes on', sub { my $now = $effects->(); $now > $done || $now == 52 });
		}
	});
	cmp_ok($kills, '>=', 3, "... with $kills server connections killed");
}

for my $mode ('fast', 'immediate')
{
	crowd($plain, "server_$mode", 8, 10, sub {
		wait_until('work has begun', sub { $o->q("SELECT count(*) FROM business WHERE key LIKE 'server_$mode%'") > 0 });
		$o->quit;
		$node->restart if $mode eq 'fast';
		if ($mode eq 'immediate') { $node->stop('immediate'); $node->start; }
		$o = session($node, name => 'observer');
	});
}

#---------------------------------------------------------------------------
# The pooler itself is killed
#---------------------------------------------------------------------------

{
	my @client = map { $plain->client("open $_") } 1 .. $pool_size;
	for my $i (0 .. $#client)
	{
		my $t = token($i);
		$client[$i]->q("SELECT idem_claim('open$i', token => '$t')");
	}
	for my $i (0 .. $#client)
	{
		my $t = token($i);
		$client[$i]->q("BEGIN; INSERT INTO business VALUES ('open$i'); SELECT idem_complete('open$i', '$t', '$i')");
	}
	$plain->kill;
	is(join(' ', map { $_->try('COMMIT') } @client), join(' ', ('08006') x $pool_size), 'the pooler is killed with transactions open');
	$_->quit for @client;
	wait_until('the server has noticed', sub { backends($plain) == 0 });
	is(join(' ', map { business("open$_") } 0 .. $#client), '0 0 0', '... no effect');
	is(locks_left(), '0', '... no lock');
	$plain->start;
	my $next = $plain->client('next');
	is(join(' ', map { my $t = token($_); $next->q("BEGIN; INSERT INTO business VALUES ('open$_'); SELECT idem_complete('open$_', '$t', '$_'); COMMIT") } 0 .. $#client), 't t t', '... over a new one, the holders complete');
	$next->quit;
}
is($o->q('SELECT count(*), count(DISTINCT key) FROM business') =~ /^(\d+)\|\1$/ ? 1 : 0, 1, 'no key took effect twice, in all that');
is($o->q('SELECT count(*) FROM idem_check()'), '0', 'nothing to complain of');

unlike(slurp_file($node->logfile), qr/PANIC|TRAP:|terminated by signal|deadlock detected|23505|duplicate key/, 'no crash, no deadlock, no unique violation in the log of the server');
$o->quit;
$node->stop;
done_testing();
