# Prepared transactions (C20), crashes after an acknowledged commit (C110), and a
# standby: reading there, refusing there, taking over from there (C27, C111).

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

my $node = new_node('primary', streaming => 1, conf => "lock_timeout = 0\n");
my $s = session($node);

$s->q('CREATE TABLE business (key text NOT NULL)');

sub claim
{
	my ($session, $key, $more) = @_;
	return $session->q("SELECT concat_ws(' ', outcome, attempts, previous) FROM idem_claim('$key', '1'" . (defined $more ? ", $more" : '') . ')');
}

sub token_of
{
	my ($session, $key, $more) = @_;
	return $session->q("SELECT owner_token FROM idem_claim('$key', '1'" . (defined $more ? ", $more" : '') . ')');
}

sub business { my ($session, $key) = @_; return $session->q("SELECT count(*) FROM business WHERE key = '$key'"); }

sub has { my ($session, $name) = @_; return $session->q("SELECT count(*) FROM pg_proc WHERE proname = '$name'") > 0; }

#---------------------------------------------------------------------------
# A claim in a prepared transaction
#---------------------------------------------------------------------------

my %token;
for my $end ('COMMIT', 'ROLLBACK')
{
	my $a = session($node);
	$a->q("BEGIN; INSERT INTO business VALUES ('claim_$end')");
	$token{"claim_$end"} = token_of($a, "claim_$end");
	$a->q("PREPARE TRANSACTION 'claim_$end'");

	# A completion in a prepared transaction; its claim was committed before.
	$token{"done_$end"} = token_of($a, "done_$end");
	$a->q("BEGIN; INSERT INTO business VALUES ('done_$end'); SELECT idem_complete('done_$end', '$token{\"done_$end\"}', '\"ok\"'); PREPARE TRANSACTION 'done_$end'");
	$a->quit;
}

# Many keys in one: no lock piles up in the prepared transaction.
$s->q("BEGIN; SELECT count(idem_claim('bulk' || i)) FROM generate_series(1, 5000) i; PREPARE TRANSACTION 'bulk'");
is($s->q("SELECT count(*) FROM pg_locks WHERE virtualtransaction LIKE '-1/%' AND locktype NOT IN ('relation', 'transactionid')"), '0',
	'no key lock is in a prepared transaction');
cmp_ok($s->q("SELECT count(*) FROM pg_locks WHERE virtualtransaction LIKE '-1/%'"), '<', 60, '... and few locks at all');

sub while_prepared
{
	my ($session, $label) = @_;
	for my $key (sort keys %token)
	{
		is(claim($session, $key), 'in_progress 1', "$label: $key is in progress");
		is(claim($session, $key, "wait => '5 ms'"), 'in_progress 1', "$label: $key, waiting a little");
		is($session->q("SET idempotency.clock_offset = '1 h'; SELECT outcome FROM idem_claim('$key', '1'); RESET idempotency.clock_offset"),
			'in_progress', "$label: $key, whatever its lease says");
		is($session->try("SET lock_timeout = '50ms'; SELECT idem_complete('$key', '$token{$key}', '2')"), '55P03',
			"$label: $key cannot be completed beside it");
		$session->q('RESET lock_timeout');
	}
	is($session->q("SELECT outcome FROM idem_claim('bulk77')"), 'in_progress', "$label: one of many keys");
	is($session->q("SET idempotency.clock_offset = '1 h'; SELECT expired, exhausted FROM idem_reap(); RESET idempotency.clock_offset"),
		'0|0', "$label: the reaper leaves them alone and does not hang")
	  if has($session, 'idem_reap');
	return;
}

while_prepared($s, 'prepared');
$s->quit;
$node->restart;
$s = session($node);
while_prepared($s, 'after a restart');
$s->quit;
$node->stop('immediate');
$node->start;
$s = session($node);
while_prepared($s, 'after a crash');

$s->q("COMMIT PREPARED 'claim_COMMIT'; COMMIT PREPARED 'done_COMMIT'; ROLLBACK PREPARED 'claim_ROLLBACK'; ROLLBACK PREPARED 'done_ROLLBACK'; ROLLBACK PREPARED 'bulk'");

is(claim($s, 'claim_COMMIT'), 'in_progress 1', 'COMMIT PREPARED of a claim: the lease holds');
is($s->q("SELECT idem_complete('claim_COMMIT', '$token{claim_COMMIT}', '1')"), 't', '... its token completes');
is(business($s, 'claim_COMMIT'), 1, '... its work is there');
is(claim($s, 'claim_ROLLBACK'), 'claimed 1 none', 'ROLLBACK PREPARED of a claim: the key is new');
is($s->try("SELECT idem_complete('claim_ROLLBACK', '$token{claim_ROLLBACK}', '1')"), 'ID001', '... the rolled back token is dead');
is(business($s, 'claim_ROLLBACK'), 0, '... its work is gone');
is($s->q("SELECT outcome, result_json FROM idem_claim('done_COMMIT', '1')"), 'succeeded|"ok"', 'COMMIT PREPARED of a completion: replay');
is(business($s, 'done_COMMIT'), 1, '... its work is there');
is(claim($s, 'done_ROLLBACK'), 'in_progress 1', 'ROLLBACK PREPARED of a completion: the claim stands');
is(business($s, 'done_ROLLBACK'), 0, '... its work is gone');
is($s->q("SELECT idem_complete('done_ROLLBACK', '$token{done_ROLLBACK}', '1')"), 't', '... its token completes');
is($s->q("SELECT outcome FROM idem_claim('bulk77')"), 'claimed', 'ROLLBACK PREPARED of many: free');

#---------------------------------------------------------------------------
# Crash of the server after an acknowledged commit, and before one (C110, C46)
#---------------------------------------------------------------------------

my $acknowledged = token_of($s, 'acknowledged');
$s->q("BEGIN; INSERT INTO business VALUES ('acknowledged'); SELECT idem_complete('acknowledged', '$acknowledged', '{\"id\": 9}', '\\xff'); COMMIT");
my $claimed = token_of($s, 'claimed');
my $c = session($node);
my $between = token_of($c, 'between');
$c->q("BEGIN; INSERT INTO business VALUES ('between'); SELECT idem_complete('between', '$between', '1')");
$s->q("SELECT idem_renew('claimed', '$claimed', '1 h')");
$s->q('SELECT idem_fail(\'failed\', \'' . token_of($s, 'failed') . '\', \'permanent\', \'no\')');
$node->stop('immediate');
$_->quit for $s, $c;
$node->start;
$s = session($node);

is($s->q("SELECT outcome, result_json, result_body FROM idem_claim('acknowledged', '1')"), 'succeeded|{"id": 9}|\xff', 'crash after COMMIT: replay');
is(business($s, 'acknowledged'), 1, '... with its work');
is(claim($s, 'failed'), 'failed 1', '... a stored failure too');
is(claim($s, 'claimed'), 'in_progress 1', '... a renewed lease holds');
is(claim($s, 'between'), 'in_progress 1', 'crash before COMMIT: the claim stands');
is(business($s, 'between'), 0, '... without its work');
is($s->q("BEGIN; INSERT INTO business VALUES ('between'); SELECT idem_complete('between', '$between', '2'); COMMIT"), 't', '... it can be done again');
is(business($s, 'between'), 1, '... once');

#---------------------------------------------------------------------------
# Standby
#---------------------------------------------------------------------------

$node->backup('b');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'b', has_streaming => 1);
$standby->start;

my %state = (
	succeeded => sub { "SELECT idem_complete('s_succeeded', '$_[0]', '\"r\"')" },
	failed    => sub { "SELECT idem_fail('s_failed', '$_[0]', 'permanent', 'no', 'P1')" },
	retryable_failed => sub { "SELECT idem_fail('s_retryable_failed', '$_[0]', 'retryable', 'later', retry_after => '1 h')" },
	unknown    => sub { "SELECT idem_fail('s_unknown', '$_[0]', 'unknown')" },
	processing => sub { "SELECT idem_renew('s_processing', '$_[0]', '1 h')" });
my %held;
for my $status (sort keys %state)
{
	$held{$status} = token_of($s, "s_$status");
	$s->q($state{$status}->($held{$status}));
}
$node->wait_for_catchup($standby, 'replay', $node->lsn('insert'));

my $r = session($standby);
for my $status (sort keys %state)
{
	is($r->q("SELECT status, attempts FROM idem_status('s_$status')"), "$status|1", "standby: status of $status");
	is($r->try("SELECT idem_claim('s_$status', '1')"), '25006', "standby: no claim of $status");
}
is($r->q("SELECT result_json FROM idem_status('s_succeeded')"), '"r"', 'standby: the result can be read');
is($r->q("SELECT idem_status('nothing') IS NULL"), 't', 'standby: absent key');
is($r->try("SELECT idem_claim('s_new', '1')"), '25006', 'standby: no claim of a new key');
my $t = $held{processing};
my @refused = ("idem_complete('s_processing', '$t')", "idem_complete('s_succeeded', '$held{succeeded}', '\"r\"')", "idem_fail('s_processing', '$t', 'permanent')", "idem_renew('s_processing', '$t')",
	"idem_release('s_processing', '$t')", "idem_checkpoint('s_processing', '$t', 's', '1')");
push @refused, "idem_reap()" if has($s, 'idem_reap');
push @refused, "idem_retry('s_failed', 'r')", "idem_revoke('s_processing', 'r')", "idem_forget('s_failed', 'r')", "idem_resolve('s_unknown', 'failed', 'r')" if has($s, 'idem_retry');
push @refused, "idem_once('s_new')" if has($s, 'idem_once');
push @refused, "idem_claim_many('{s_new}')" if has($s, 'idem_claim_many');
push @refused, "idem_claim_due()" if has($s, 'idem_claim_due');
is($r->try("SELECT $_"), '25006', "standby: $_ is refused") for @refused;

# The primary refuses in a read-only transaction just so.
for my $call ("idem_claim('s_succeeded', '1')", "idem_claim('s_new', '1')", @refused)
{
	is($s->try("BEGIN READ ONLY; SELECT $call"), '25006', "read-only transaction: $call is refused");
	$s->try('ROLLBACK');
}

# What is not committed there is not seen here.
$s->q('BEGIN');
my $open = token_of($s, 's_open');
is($r->q("SELECT idem_status('s_open') IS NULL"), 't', 'standby: an uncommitted claim is not there');
$s->q('COMMIT');

# Lost with the primary: a claim and a success that never got here.
$standby->stop;
my $lost = token_of($s, 's_lost');
$s->q("SELECT idem_complete('s_lost', '$lost', '1')");
my $taken = token_of($s, 's_taken');
$s->quit;
$r->quit;
$node->stop('immediate');
$standby->start;
$r = session($standby);
is($r->try("SELECT idem_claim('s_succeeded', '1')"), '25006', 'before the promotion: refused');
$standby->promote;
$standby->poll_query_until('postgres', 'SELECT NOT pg_is_in_recovery()');

is($r->q("SELECT outcome, result_json FROM idem_claim('s_succeeded', '1')"), 'succeeded|"r"', 'promoted: replay, in a session from before');
is(claim($r, 's_failed'), 'failed 1', 'promoted: stored failure');
is(claim($r, 's_retryable_failed'), 'retry_later 1', 'promoted: not due');
is(claim($r, 's_unknown'), 'unknown 1', 'promoted: unknown');
is(claim($r, 's_processing'), 'in_progress 1', 'promoted: a lease holds');
is($r->q("SELECT idem_complete('s_processing', '$held{processing}', '1')"), 't', 'promoted: its token completes');
is($r->q("SELECT outcome, result_json FROM idem_claim('acknowledged', '1')"), 'succeeded|{"id": 9}', 'promoted: older successes too');
my $again = token_of($r, 's_taken');
isnt($again, $taken, 'promoted: a claim that was lost is given anew, under another token');
is($r->try("SELECT idem_complete('s_taken', '$taken', '1')"), 'ID001', '... the lost token is refused');
is($r->q("SELECT idem_complete('s_taken', '$again', '1')"), 't', '... the new one works');
is($r->try("SELECT idem_complete('s_lost', '$lost', '1')"), 'ID002', 'promoted: a success that was lost is not there');
is($r->q('SELECT count(*) FROM (SELECT FROM idem_record GROUP BY idempotency_key HAVING count(*) > 1) d'), '0', 'promoted: no key twice');

$r->quit;
done_testing();
