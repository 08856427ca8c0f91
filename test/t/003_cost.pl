# What a call may not cost: no WAL and no transaction id for answers, no lock that
# outlives a call, no memory that stays, no index entries for heartbeats.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

# Quiet: nothing but our session writes WAL.
my $node = new_node('cost', conf => <<'CONF');
bgwriter_lru_maxpages = 0
checkpoint_timeout = 1d
max_wal_size = 10GB
max_locks_per_transaction = 64
CONF
my $s = session($node);
my $o = session($node, name => 'observer');

my %answer = (
	succeeded   => [ 'w_succeeded', q('{"amount": 1}') ],
	failed      => [ 'w_failed', q('{"amount": 1}') ],
	in_progress => [ 'w_held', q('{"amount": 1}') ],
	conflict    => [ 'w_succeeded', q('{"amount": 2}') ],
	'conflict ' => [ 'w_held', q('{"amount": 2}') ],
	retry_later => [ 'w_waiting', q('{"amount": 1}') ],
	unknown     => [ 'w_unknown', q('{"amount": 1}') ]);

sub hold
{
	my ($key, $more) = @_;
	return $s->q("SELECT owner_token FROM idem_claim('$key', '{\"amount\": 1}'" . (defined $more ? ", $more" : '') . ')');
}

my %token = map { $_ => hold("w_$_", "lease => '1 h'") } qw(succeeded failed held waiting unknown);
$s->q("SELECT idem_complete('w_succeeded', '$token{succeeded}', '{\"id\": 1}')");
$s->q("SELECT idem_fail('w_failed', '$token{failed}', 'permanent', 'no')");
$s->q("SELECT idem_fail('w_waiting', '$token{waiting}', 'retryable', 'later', retry_after => '1 h')");
$s->q("SELECT idem_fail('w_unknown', '$token{unknown}', 'unknown', 'maybe')");

#---------------------------------------------------------------------------
# No WAL, no transaction id
#---------------------------------------------------------------------------

# Hint bits and pruning are done once; after that an answer costs nothing.
sub settle
{
	my $ask = sub { for my $a (values %answer) { $s->q("SELECT idem_claim('$a->[0]', $a->[1])") for 1 .. 2; } };
	$ask->();
	$s->q('SELECT count(*) FROM idem_record');
	$s->q('VACUUM idem_record_open, idem_record_1');
	$s->q('VACUUM pg_proc, pg_type, pg_class, pg_attribute, pg_depend, pg_statistic, pg_index');
	$s->q('CHECKPOINT');
	$ask->();
	return;
}
settle();

# Runs the SQL in a transaction; bytes of WAL, and whether it took an xid.
sub wal_of
{
	my ($sql) = @_;
	$s->q(<<SQL);
BEGIN;
SELECT pg_current_wal_insert_lsn() AS before \\gset
$sql;
SELECT pg_current_wal_insert_lsn() - :'before'::pg_lsn AS bytes, coalesce(pg_current_xact_id_if_assigned()::text, 'none') AS xid \\gset
COMMIT;
SELECT :bytes || ' bytes, xid ' || :'xid'
SQL
	$s->{out} =~ s/.*\n//s;
	return $s->{out};
}

unlike(wal_of("SELECT idem_claim('w_new', '1')"), qr/^0 bytes|xid none/, 'a claim is seen to write WAL (the measure works)');
settle();
for my $name (sort keys %answer)
{
	my ($key, $request) = @{ $answer{$name} };
	(my $outcome = $name) =~ s/ //;
	is($s->q("SELECT outcome FROM idem_claim('$key', $request)"), $outcome, "$outcome of $key");
	is(wal_of("SELECT count(*) FROM generate_series(1, 100) i, LATERAL idem_claim('$key' || left(i::text, 0), $request)"),
		'0 bytes, xid none', '... a hundred times without WAL or transaction id');
}
is(wal_of("SELECT idem_claim('w_held', '{\"amount\": 1}', token => '$token{held}')"), '0 bytes, xid none', 'the same claim given again: none');
is(wal_of("SELECT idem_status('w_succeeded')"), '0 bytes, xid none', 'idem_status: none');
is(wal_of("SELECT idem_complete('w_succeeded', '$token{succeeded}', '{\"id\": 1}')"), '0 bytes, xid none', 'completion repeated: none');
is(wal_of("SELECT idem_renew('w_held', '" . token(9) . "')"), '0 bytes, xid none', 'renewal refused: none');

# A replay in a read-write transaction that does nothing else leaves no trace at all.
is($s->q("BEGIN; SELECT outcome FROM idem_claim('w_succeeded', '{\"amount\": 1}'); SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'transactionid'; COMMIT"),
	"succeeded\n0", 'a replay holds no transaction id');

#---------------------------------------------------------------------------
# A replay waits for nobody
#---------------------------------------------------------------------------

for my $how ('FOR UPDATE', 'FOR KEY SHARE')
{
	$o->q("BEGIN; SELECT 1 FROM idem_record WHERE idempotency_key = 'w_succeeded' $how");
	is($s->q("SET lock_timeout = '10s'; SELECT outcome FROM idem_claim('w_succeeded', '{\"amount\": 1}')"), 'succeeded',
		"replay beside a session that holds the record $how");
	$o->q('ROLLBACK');
}
$o->q("BEGIN; SELECT 1 FROM idem_record WHERE idempotency_key = 'w_held' FOR UPDATE");
is($s->q("SELECT outcome FROM idem_claim('w_held', '{\"amount\": 1}')"), 'in_progress', 'in_progress beside a row lock');
$o->q('ROLLBACK');
$o->q("BEGIN; LOCK TABLE idem_record_1 IN SHARE UPDATE EXCLUSIVE MODE");
is($s->q("SELECT outcome FROM idem_claim('w_succeeded', '{\"amount\": 1}')"), 'succeeded', 'replay beside VACUUM\'s lock');
$o->q('ROLLBACK');

# The same 64-bit lock tag space is used by applications: no collision.
$o->q('SELECT pg_advisory_lock(k) FROM (SELECT hashtextextended(\'w_succeeded\', 0) AS k) x');
is($s->q("SELECT outcome FROM idem_claim('w_held', '{\"amount\": 1}')"), 'in_progress', 'advisory locks of an application do not matter');
$o->q('SELECT pg_advisory_unlock_all()');
$s->q('RESET lock_timeout');

#---------------------------------------------------------------------------
# Locks after each call (C11), and 50,000 claims in one transaction (C10)
#---------------------------------------------------------------------------

# Locks of our session beside those on relations and its own transaction.
my $odd_locks = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype NOT IN ('relation', 'virtualxid', 'transactionid')";

{
	my $t = token(20);
	my @calls = (
		"idem_claim('l1', '1', token => '$t')", "idem_claim('l1', '1', token => '$t')", "idem_claim('l1', '1')", "idem_claim('l1', '2')",
		"idem_renew('l1', '$t')", "idem_checkpoint('l1', '$t', 's', '1')", "idem_status('l1')",
		"idem_complete('l1', '$t', '1')", "idem_complete('l1', '$t', '1')", "idem_claim('l1', '1')",
		"idem_claim('l2', '1', token => '$t')", "idem_release('l2', '$t')",
		"idem_claim('l3', '1', token => '$t')", "idem_fail('l3', '$t', 'retryable')",
		"idem_claim('l4', '1', token => '$t')", "idem_fail('l4', '$t', 'permanent')",
		"idem_claim('l5', '1', wait => '5 ms')", "idem_claim('l5', '1', wait => '5 ms')");
	$s->q('BEGIN');
	is(join(' ', map { $s->q("SELECT $_"); $s->q($odd_locks) } @calls), join(' ', ('0') x @calls),
		'no key lock is left by any call, inside the transaction');
	$s->q('COMMIT');
	is($s->q('SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype <> \'virtualxid\' AND NOT (locktype = \'relation\' AND relation = \'pg_locks\'::regclass)'),
		'0', 'nothing after the transaction');

	# errors inside the calls
	for my $bad ("idem_complete('l5', '$t')", "idem_claim('l5', '1', lease => '0')", "idem_fail('absent', '$t', 'permanent')", "idem_checkpoint('l5', '$t', 's', '1')")
	{
		$s->try("BEGIN; SAVEPOINT a; SELECT $bad");
		is($s->q("ROLLBACK TO a; $odd_locks; COMMIT"), '0', "no lock is left by an error in $bad");
	}
}

{
	my $n = 50_000;
	$s->q('BEGIN');
	is($s->q("SELECT count(*) FROM generate_series(1, $n) i, LATERAL idem_claim('many' || i, '1') c WHERE c.outcome = 'claimed'"),
		$n, 'C10: 50,000 claims in one transaction');
	is($s->q($odd_locks), '0', '... no key lock stays');
	cmp_ok($s->q('SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()'), '<', 40, '... the number of locks is small');
	is($o->try("CREATE TABLE ddl (a int); ALTER TABLE ddl ADD b int; DROP TABLE ddl"), '00000', '... others can do DDL');
	is($o->q("SELECT outcome FROM idem_claim('elsewhere', '1')"), 'claimed', '... and claim');
	is($o->q("SELECT outcome FROM idem_claim('many7', '1')"), 'in_progress', '... and see these as in progress');
	is($s->q("SELECT count(*) FILTER (WHERE idem_complete('many' || i, (idem_status('many' || i)).owner_token, to_jsonb(i))) FROM generate_series(1, 1000) i"),
		1000, '... completing some of them');
	is($s->q($odd_locks), '0', '... no key lock stays');
	$s->q('ROLLBACK');
	is($o->q("SELECT outcome FROM idem_claim('many7', '1')"), 'claimed', '... after the rollback they are free');
}

#---------------------------------------------------------------------------
# Memory: flat over 100,000 calls
#---------------------------------------------------------------------------

$s->q(<<'SQL');
CREATE FUNCTION held_memory() RETURNS bigint LANGUAGE sql AS
	$$ SELECT sum(total_bytes)::bigint FROM pg_backend_memory_contexts $$;
CREATE FUNCTION calls(loops int, prefix text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	t uuid;
	r idem_claim_result;
BEGIN
	FOR i IN 1 .. loops LOOP
		SELECT owner_token INTO t FROM idem_claim(prefix || i, '{"a": [1, 2, "three"]}');
		PERFORM idem_renew(prefix || i, t);
		SELECT * INTO r FROM idem_claim(prefix || i, '{"a": [1, 2, "three"]}');
		PERFORM outcome FROM idem_claim(prefix || i, '{"a": 2}');
		PERFORM idem_complete(prefix || i, t, '{"result": "of some length, so that it shows"}', '\x00010203');
		SELECT * INTO r FROM idem_claim(prefix || i, '{"a": [1, 2, "three"]}');
	END LOOP;
END $$;
SQL

# Fills what a session keeps for good, then measures the growth over more calls.
sub growth
{
	my ($sql_of) = @_;
	$s->q($sql_of->(1));
	$s->q($sql_of->(2));
	my $before = $s->q('SELECT held_memory()');
	$s->q($sql_of->(3));
	return $s->q('SELECT held_memory()') - $before;
}

# The peak inside one statement: what is allocated while the last of many calls runs.
my $round = 0;
cmp_ok(growth(sub { $round++; "DO 'BEGIN PERFORM calls(17000, ''do${round}_''); END'" }), '<', 100_000,
	'memory is flat over 102,000 calls in a DO block');
cmp_ok(growth(sub { $round++; "SELECT count(*) FROM generate_series(1, 100000) i, LATERAL idem_claim('w_succeeded' || left(i::text, 0), '{\"amount\": 1}') c" }), '<', 100_000,
	'... over 100,000 replays in one SELECT');

# Within one statement: the last row sees no more memory than an early one.
sub growth_within
{
	my ($label, $call, $n) = @_;
	my ($early, $late) = split /\|/, $s->q(<<SQL);
SELECT max(m) FILTER (WHERE i = 2000), max(m) FILTER (WHERE i = $n)
FROM (SELECT i, $call AS answer, CASE WHEN i IN (2000, $n) THEN held_memory() END AS m FROM generate_series(1, $n) i OFFSET 0) x
SQL
	cmp_ok($late - $early, '<', 300_000, "memory is flat within one SELECT of $label");
	return;
}

# (each in its own transaction: rows of the same one would cost combo command ids)
growth_within('claims', "idem_claim('sel' || i, '{\"amount\": 1}', token => 'aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa')", 20_000);
growth_within('renewals', "idem_renew('sel' || i, 'aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa')", 20_000);
growth_within('conflicts', "idem_claim('sel' || i, '{\"amount\": 2}')", 20_000);
growth_within('answers in_progress', "idem_claim('sel' || i, '{\"amount\": 1}')", 20_000);
growth_within('completions', "idem_complete('sel' || i, 'aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa', '{\"r\": 1}')", 20_000);
growth_within('replays', "idem_claim('sel' || i, '{\"amount\": 1}')", 20_000);
growth_within('reads', "idem_status('sel' || i)", 20_000);
growth_within('waiting claims', "idem_claim('w_succeeded' || left(i::text, 0), '{\"amount\": 1}', wait => '1 ms')", 20_000);

# The same from a prepared statement, call by call.
$s->q(q(PREPARE replay(text) AS SELECT outcome FROM idem_claim($1, '{"amount": 1}')));
my $many = join "\n", map { "EXECUTE replay('w_succeeded');" } 1 .. 5000;
$s->q($many);
my $before = $s->q('SELECT held_memory()');
$s->q($many) for 1 .. 4;
cmp_ok($s->q('SELECT held_memory()') - $before, '<', 50_000, 'memory is flat over 20,000 executions of a prepared claim');

#---------------------------------------------------------------------------
# Heartbeats are HOT (C106)
#---------------------------------------------------------------------------

{
	my $t = 'bbbbbbbb-bbbb-4bbb-8bbb-bbbbbbbbbbbb';
	my $h = session($node);
	$h->q("SELECT idem_claim('beat' || i, '1', token => '$t') FROM generate_series(1, 100) i");
	$h->q('VACUUM idem_record_open');
	my $size = $h->q("SELECT pg_relation_size('idem_record_open_pkey')");
	my $counts = sub {
		$h->q('SELECT pg_stat_force_next_flush()');
		return split /\|/, $h->q("SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'idem_record_open'");
	};
	my ($updated0, $hot0) = $counts->();
	$h->q("SELECT count(idem_renew('beat' || i, '$t')) FROM generate_series(1, 100) i") for 1 .. 100;
	my ($updated, $hot) = $counts->();
	$updated -= $updated0;
	$hot -= $hot0;
	is($updated, 10_000, '10,000 heartbeats update 10,000 times');
	cmp_ok($hot, '>', 9_000, "... $hot of them HOT");
	is($h->q("SELECT pg_relation_size('idem_record_open_pkey')"), $size, '... and the index does not grow');
	$h->quit;
}

$_->quit for $s, $o;
done_testing();
