# Dump and restore (C112): records in all states, policies, ring and audit come
# through; a replay works, a live lease still counts, nothing is there twice.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('dump', extension => 0);
my $s = session($node);
my $dir = $node->basedir;

$s->q(<<'SQL');
CREATE ROLE "Odd Client" LOGIN;
CREATE SCHEMA "Idem Potency";
CREATE EXTENSION pgcrypto;
CREATE EXTENSION idempotency SCHEMA "Idem Potency";
SET search_path = "Idem Potency", public;
SELECT idem_grant('"Odd Client"', 'client');
UPDATE idem_policy SET lease = '1 h', max_attempts = 3, retention = '10 days', backoff_factor = 3 WHERE operation = 'default';
INSERT INTO idem_policy (operation, on_lease_expiry, digest_ignore, retryable_codes, store_request, jitter)
VALUES ('wire', 'unknown', '{/trace,"/a b"}', '{55P03,"E\"quoted"}', true, 'none');
SQL

# Data that a dump must carry byte for byte.
my $request = q('{"a": 1, "s": "tab\t, quote\" back\\\\ and \u00e4"}');
my $odd_key = q('odd: key \ with ''quotes'' % and ) . "\t tab'";

sub claim
{
	my ($session, $key, $more) = @_;
	return $session->q("SELECT owner_token FROM idem_claim($key, $request" . (defined $more ? ", $more" : '') . ')');
}

my %token;
my @keys = map { "'$_'" } qw(live succeeded nulls failed waiting due unknown exhausted wired later);
for my $key (@keys, $odd_key)
{
	$token{$key} = claim($s, $key, $key eq "'wired'" ? "'wire'" : undef);
}
$s->q("SELECT idem_checkpoint('live', '$token{q('live')}', 'sent', '{\"ref\": \"x\"}')");
$s->q("SELECT idem_complete('succeeded', '$token{q('succeeded')}', '{\"id\": 1, \"n\": 1.50}', '\\x0001ff5c0a')");
$s->q("SELECT idem_complete('nulls', '$token{q('nulls')}', 'null')");
$s->q("SELECT idem_complete($odd_key, '$token{$odd_key}')");
$s->q("SELECT idem_fail('failed', '$token{q('failed')}', 'permanent', E'line one\\nline two\\\\', 'P1')");
$s->q("SELECT idem_fail('waiting', '$token{q('waiting')}', 'retryable', 'later', 'R1', '2 h')");
$s->q("SELECT idem_fail('due', '$token{q('due')}', 'retryable', 'now', 'R2', '0')");
$s->q("SELECT idem_fail('unknown', '$token{q('unknown')}', 'unknown')");
for (1 .. 3)
{
	my $t = $_ == 1 ? $token{q('exhausted')} : claim($s, q('exhausted'));
	$s->q("SELECT idem_fail('exhausted', '$t', 'retryable', 'again', 'R3', '0')");
}

# Records of another role.
my $client = session($node, user => 'Odd Client');
$client->q('SET search_path = "Idem Potency", public');
my $client_token = claim($client, q('client'));

# Turned ring, audit.
my $with_reaper = $s->q("SELECT count(*) FROM pg_proc WHERE proname = 'idem_reap'");
my $with_audit  = $s->q("SELECT count(*) FROM pg_proc WHERE proname = 'idem_retry'");
if ($with_audit)
{
	$token{q('retried')} = claim($s, q('retried'));
	$s->q("SELECT idem_fail('retried', '$token{q('retried')}', 'permanent'); SELECT idem_retry('retried', 'a ''reason''')");
	push @keys, q('retried');
}
if ($with_reaper)
{
	# only the ring may turn: nothing lapses in this time but what is due
	$s->q("SELECT idem_renew('live', '$token{q('live')}', '30 days'), idem_renew('later', '$token{q('later')}', '30 days'), idem_renew('wired', '$token{q('wired')}', '30 days')");
	$client->q("SELECT idem_renew('client', '$client_token', '30 days')");
	$s->q("SELECT idem_reap(); SET idempotency.clock_offset = '6d'; SELECT idem_reap(); RESET idempotency.clock_offset");
}
$s->q("SELECT idem_complete('later', '$token{q('later')}', '{\"slice\": 2}')");
is($s->q('SELECT count(DISTINCT slice) FROM idem_record WHERE slice > 0'), 2, 'finished records in two slices') if $with_reaper;

#---------------------------------------------------------------------------

# Everything of the extension's tables as text.
sub content
{
	my ($session) = @_;
	my $text = '';
	for my $table (split /\n/, $session->q(q(SELECT relname FROM pg_class WHERE relname ~ '^idem_(record_(open|\d)|policy|ring|audit)$' AND relkind = 'r' ORDER BY 1)))
	{
		$text .= "$table\n" . $session->q(qq(SELECT r::text FROM "Idem Potency".$table r ORDER BY r::text COLLATE "C")) . "\n";
	}
	return $text;
}

sub dump_text
{
	my ($db, @options) = @_;
	my $file = "$dir/$db.again.sql";
	$node->command_ok([ 'pg_dump', @options, '-d', $node->connstr($db), '-f', $file ], "pg_dump of $db");
	my $text = slurp_file($file);
	$text =~ s/^\\(un)?restrict .*\n//mg;
	return $text;
}

# What a restored database must do with the records.
sub works
{
	my ($db, $label) = @_;
	my $r = session($node, dbname => $db);
	my $answer = sub { my ($key) = @_; return $r->q("SELECT concat_ws(' ', outcome, attempts, result_json, result_body, error_code) FROM idem_claim($key, $request)") };

	is(content($r), content($s), "$label: every row is the same");
	$r->q('SET search_path = "Idem Potency", public');
	is($answer->(q('succeeded')), 'succeeded 1 {"n": 1.50, "id": 1} \x0001ff5c0a', "$label: replay");
	is($answer->(q('nulls')), 'succeeded 1 null', "$label: replay of a JSON null");
	is($answer->($odd_key), 'succeeded 1', "$label: replay of a key with odd characters");
	is($answer->(q('later')), 'succeeded 1 {"slice": 2}', "$label: replay from the second slice");
	is($answer->(q('failed')), 'failed 1 P1', "$label: stored failure");
	is($answer->(q('exhausted')), 'failed 3 exhausted', "$label: used up");
	is($answer->(q('live')), 'in_progress 1', "$label: a live lease counts");
	is($answer->(q('wired')), 'in_progress 1', "$label: ... of another operation too");
	is($answer->(q('waiting')), 'retry_later 1 R1', "$label: not due");
	is($answer->(q('unknown')), 'unknown 1', "$label: unknown");
	is($r->q(q(SELECT outcome FROM idem_claim('succeeded', '2'))), 'conflict', "$label: other request");
	is($r->q(qq(SELECT outcome, attempts, previous FROM idem_claim('due', $request))), 'claimed|2|retryable_failed', "$label: due");
	is($r->try("SELECT idem_complete('due', '$token{q('due')}')"), 'ID001', "$label: an old token stays dead");
	is($r->q(qq(SELECT outcome, previous FROM idem_claim('retried', $request))), 'claimed|retried', "$label: retried by an operator") if $with_audit;
	is($r->q("SELECT idem_complete('live', '$token{q('live')}', '7')"), 't', "$label: the holder can complete");
	is($r->q("SELECT slice FROM idem_record WHERE idempotency_key = 'live'"), $s->q("SELECT slice FROM idem_record WHERE idempotency_key = 'later'"),
		"$label: ... into the current slice");
	is($r->q("SELECT lease_until - updated_at FROM idem_status('due')"), '01:00:00', "$label: the changed default policy rules");
	is($r->q("SELECT count(*) FROM idem_policy WHERE operation = 'default'"), '1', "$label: one default policy");
	is($r->q('SELECT count(*) FROM (SELECT FROM idem_record GROUP BY idempotency_key HAVING count(*) > 1) d'), '0', "$label: no key twice");
	is($r->q("SELECT owner FROM idem_record WHERE idempotency_key = 'client'"), '"Odd Client"', "$label: owner kept");
	if ($with_audit)
	{
		my $last = $r->q('SELECT max(id) FROM idem_audit');
		$r->q("SELECT idem_retry('unknown', 'after restore')");
		is($r->q("SELECT count(*) FROM idem_audit WHERE id > $last"), '1', "$label: audit numbers go on");
	}
	my $c = session($node, dbname => $db, user => 'Odd Client');
	is($c->q(qq(SELECT outcome FROM "Idem Potency".idem_claim('client', $request))), 'in_progress', "$label: its owner may use it");
	is($c->try(qq(SELECT "Idem Potency".idem_claim('succeeded', $request))), '42501', "$label: others' records it may not");
	$_->quit for $r, $c;
	return;
}

# Whole database, as a script.
$node->command_ok([ 'pg_dump', '-d', $node->connstr('postgres'), '-f', "$dir/whole.sql" ], 'pg_dump as a script');
$node->safe_psql('postgres', 'CREATE DATABASE whole');
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('whole'), '-f', "$dir/whole.sql" ], 'restored by psql');
is(dump_text('whole'), dump_text('postgres'), 'a dump of the restored database is the same dump');
works('whole', 'script');

# Whole database, as an archive, restored in parallel.
$node->command_ok([ 'pg_dump', '-Fc', '-d', $node->connstr('postgres'), '-f', "$dir/whole.dump" ], 'pg_dump as an archive');
$node->safe_psql('postgres', 'CREATE DATABASE parallel');
$node->command_ok([ 'pg_restore', '-e', '-j', 2, '-d', $node->connstr('parallel'), "$dir/whole.dump" ], 'restored by pg_restore -j 2');
works('parallel', 'archive');

# Structure only: a new extension, no records.
$node->command_ok([ 'pg_dump', '--schema-only', '-d', $node->connstr('postgres'), '-f', "$dir/schema.sql" ], 'pg_dump --schema-only');
$node->safe_psql('postgres', 'CREATE DATABASE structure');
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('structure'), '-f', "$dir/schema.sql" ], 'restored by psql');
{
	my $r = session($node, dbname => 'structure');
	$r->q('SET search_path = "Idem Potency", public');
	is($r->q('SELECT count(*) FROM idem_record'), '0', 'structure only: no records');
	is($r->q('SELECT operation, max_attempts FROM idem_policy'), 'default|5', '... the default policy as installed');
	is($r->q(qq(SELECT outcome FROM idem_claim('succeeded', $request))), 'claimed', '... keys are new');
	$r->q('TRUNCATE idem_record');
	$r->quit;
}

# Data only, into that new extension.
$node->command_ok([ 'pg_dump', '--data-only', '-d', $node->connstr('postgres'), '-f', "$dir/data.sql" ], 'pg_dump --data-only');
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('structure'), '-f', "$dir/data.sql" ], 'restored by psql');
works('structure', 'data only');

# The source has not noticed.
is($s->q(q(SELECT status FROM idem_status('live'))), 'processing', 'the dumped database goes on by itself');

$_->quit for $s, $client;
done_testing();
