# The batch forms answer as the single forms do, and leave the same records: every state x
# every argument, each cell asked of twin keys, one by the single form and one by the batch form,
# then all cells of a form in one batch; then random batches against the single form
# called key by key.  (C19, C100)
#
# Compared are all columns of the answer and of the stored row.  Tokens and times differ
# from twin to twin; of them it is compared whether they are there, which of the known tokens it
# is, and the distance of times to updated_at.  "Untouched" is compared by ctid, xmin and xmax.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

my $node = new_node('batch');
my $s = session($node);
my $hour = 3600;    # the clock when the states are made, seconds ahead
my ($past, $right, $foreign) = (token(1), token(2), token(3));
my $request = q('{"amount": 1}');

$s->q(<<'SQL');
INSERT INTO idem_policy (operation, max_attempts, max_elapsed, on_lease_expiry, backoff_base, jitter, max_result_size, store_request) VALUES
	('plain', 5, NULL, 'retry', '1 s', 'none', 100, true),
	('two', 2, NULL, 'retry', '1 s', 'none', 100, false),
	('late', 5, '20 s', 'retry', '1 s', 'none', 100, false),
	('doubtful', 5, NULL, 'unknown', '1 s', 'none', 100, false);
CREATE ROLE stranger;
SELECT idem_grant('stranger', 'client');
-- Who makes and asks: not a superuser, who may use every record.
CREATE ROLE worker;
SELECT idem_grant('worker', 'client');
SELECT idem_grant('worker', 'operator');

CREATE FUNCTION echo(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';

-- One answer, comparable.
CREATE FUNCTION shown(answer jsonb, updated timestamptz) RETURNS jsonb LANGUAGE sql STABLE AS $$
	SELECT (answer - '{owner_token,lease_until,retry_after,key,ordinality}'::text[]) ||
		jsonb_build_object('token', answer->>'owner_token' IS NOT NULL,
			'lease', CASE WHEN answer->>'outcome' = 'claimed' THEN to_jsonb((answer->>'lease_until')::timestamptz - updated)
				ELSE to_jsonb(answer->>'lease_until' IS NOT NULL) END,
			'retry', CASE WHEN answer->>'outcome' = 'in_progress' THEN answer->'retry_after'
				ELSE to_jsonb(answer->>'retry_after' IS NOT NULL) END)
$$;
CREATE FUNCTION known(t uuid) RETURNS text LANGUAGE sql IMMUTABLE AS $$
	SELECT CASE WHEN t IS NULL THEN 'none' WHEN t::text LIKE '00000000-0000-4000-8000-%' THEN t::text ELSE 'new' END
$$;
-- The stored row, comparable.
CREATE FUNCTION left_behind(key text) RETURNS jsonb LANGUAGE sql VOLATILE SECURITY DEFINER AS $$
	SELECT coalesce(jsonb_agg((to_jsonb(r) - '{idempotency_key,owner_token,past_tokens,lease_until,retry_at,first_claimed_at,updated_at,limits_from}'::text[]) ||
		jsonb_build_object('tableoid', r.tableoid::regclass, 'token', known(r.owner_token),
			'past', (SELECT jsonb_agg(known(t) ORDER BY n) FROM unnest(r.past_tokens) WITH ORDINALITY u (t, n)),
			'lease', r.lease_until - r.updated_at, 'retry', r.retry_at - r.updated_at,
			'first', r.first_claimed_at = r.updated_at, 'limits', r.limits_from = r.first_claimed_at)), '[]')
	FROM idem_record r WHERE r.idempotency_key = $1
$$;
CREATE FUNCTION version(key text) RETURNS text LANGUAGE sql VOLATILE SECURITY DEFINER AS $$
	SELECT coalesce(string_agg(concat_ws('|', r.tableoid, r.ctid, r.xmin, r.xmax), ','), 'none') FROM idem_record r WHERE r.idempotency_key = $1
$$;
CREATE FUNCTION updated(key text) RETURNS timestamptz LANGUAGE sql VOLATILE SECURITY DEFINER AS $$
	SELECT r.updated_at FROM idem_record r WHERE r.idempotency_key = $1
$$;
-- Asks, and tells answer or SQLSTATE, the row, and whether it was touched.
CREATE FUNCTION asked(key text, query text, OUT answer text, OUT stored jsonb, OUT untouched boolean) LANGUAGE plpgsql AS $$
DECLARE
	before text := version(key);
	raw jsonb;
BEGIN
	BEGIN
		EXECUTE query INTO raw;
		answer := CASE WHEN raw ? 'outcome' THEN shown(raw, updated(key))
			ELSE raw - '{key,ordinality}'::text[] END;
	EXCEPTION WHEN OTHERS THEN
		answer := SQLSTATE || ' ' || SQLERRM;
	END;
	stored := left_behind(key);
	untouched := version(key) = before;
END $$;
SQL

sub clock { my ($seconds) = @_; $s->q("RESET ROLE; SET idempotency.clock_offset = '$seconds s'; SET ROLE worker"); return; }

#---------------------------------------------------------------------------
# States: name, operation, seconds ahead when asked, statements (%k = key)
#---------------------------------------------------------------------------

sub claim { my ($t, $more) = @_; return "SELECT idem_claim('%k', %r, '%o', token => '$t'" . ($more ? ", $more" : '') . ')'; }
sub failed { my ($t, $more) = @_; return "SELECT idem_fail('%k', '$t', $more)"; }

my @second = (claim($past), failed($past, q('retryable', 'first', 'E0', '0')), claim($right));
my @states = (
	[ new => 'plain', 0 ],
	[ live => 'plain', 0, claim($right) ],
	[ live_second => 'plain', 0, @second ],
	[ live_progress => 'plain', 0, claim($right), "SELECT idem_checkpoint('%k', '$right', 'sent', '1')" ],
	[ expired => 'plain', 100, claim($right) ],
	[ expired_second => 'plain', 100, @second ],
	[ expired_unknown => 'doubtful', 100, claim($right) ],
	[ expired_used_up => 'two', 100, @second ],
	[ expired_late => 'late', 100, claim($right) ],
	[ succeeded => 'plain', 0, claim($right), "SELECT idem_complete('%k', '$right', '{\"done\": true}')" ],
	[ succeeded_body => 'plain', 0, @second, "SELECT idem_complete('%k', '$right', NULL, '\\x00ff')" ],
	[ succeeded_json_null => 'plain', 0, claim($right), "SELECT idem_complete('%k', '$right', 'null')" ],
	[ failed => 'plain', 0, claim($right), failed($right, q('permanent', 'no', 'E1')) ],
	[ retry_due => 'plain', 100, claim($right), failed($right, q('retryable', 'later', 'E1', '10 s')) ],
	[ retry_waiting => 'plain', 0, claim($right), failed($right, q('retryable', 'later', 'E1', '1 h')) ],
	[ retry_late => 'late', 100, claim($right), failed($right, q('retryable', 'later', 'E1', '1 s')) ],
	[ exhausted => 'two', 0, @second, failed($right, q('retryable', 'again', 'E2')) ],
	[ unknown => 'plain', 0, claim($right), failed($right, q('unknown', 'maybe', 'E3')) ],
	[ resolved => 'plain', 0, claim($right), failed($right, q('unknown', 'maybe', 'E3')), "SELECT idem_resolve('%k', 'succeeded', 'test', '7')" ],
	[ retried => 'plain', 0, claim($right), failed($right, q('permanent', 'no', 'E1')), "SELECT idem_retry('%k', 'test')" ],
	[ revoked => 'plain', 0, claim($right), "SELECT idem_revoke('%k', 'test')" ],
	[ released => 'plain', 0, claim($right), "SELECT idem_release('%k', '$right')" ],
	[ forgotten => 'plain', 0, claim($right), failed($right, q('permanent')), "SELECT idem_forget('%k', 'test')" ],
	[ once => 'plain', 0, "SELECT idem_once('%k', %r)" ],
	[ executed => 'plain', 0, "SELECT idem_execute('%k', %r, 'echo(jsonb)', '%o')" ],
	[ stranger => 'plain', 0, 'SET ROLE stranger', claim($right), 'SET ROLE worker' ],
	[ stranger_done => 'plain', 0, 'SET ROLE stranger', claim($right), "SELECT idem_complete('%k', '$right', '1')", 'SET ROLE worker' ],
	[ purged => 'plain', 0 ]);

sub sql_of
{
	my ($text, $key, $req, $operation) = @_;
	$text =~ s/%k/$key/g;
	$text =~ s/%r/$req/g;
	$text =~ s/%o/$operation/g;
	return $text;
}

# Makes the records of both twins, and of the batch of all.
sub make
{
	my ($cell, $req) = @_;
	for my $state (@states)
	{
		my ($name, $operation, undef, @steps) = @$state;
		for my $twin ('s', 'b', 'all')
		{
			$s->q(sql_of($_, "$twin/$cell/$name", $req, $operation)) for @steps;
		}
	}
	return;
}

#---------------------------------------------------------------------------
# Cells: name, request the records are made with, single form, batch form of
# one key, batch form of all keys (arrays k, and what goes with it)
#---------------------------------------------------------------------------

sub claim_cell
{
	my ($name, $req, $operation, $lease) = @_;
	my $more = (defined $operation ? ", '$operation'" : ', NULL') . (defined $lease ? ", '$lease'::interval" : ', NULL');
	return [ "claim $name", $request,
		"SELECT to_jsonb(c) FROM idem_claim('%k', $req$more) c",
		"SELECT to_jsonb(c) FROM idem_claim_many(ARRAY['%k'], ARRAY[$req\::jsonb]$more) c",
		"SELECT c.key, to_jsonb(c) AS answer, c.ordinality FROM idem_claim_many(k, array_fill($req\::jsonb, ARRAY[cardinality(k)])$more) c" ];
}

sub complete_cell
{
	my ($name, $t, $result) = @_;
	return [ "complete $name", $request,
		"SELECT jsonb_build_object('completed', idem_complete('%k', '$t', $result))",
		"SELECT to_jsonb(c) FROM idem_complete_many(ARRAY['%k'], ARRAY['$t'::uuid], ARRAY[$result\::jsonb]) c",
		"SELECT c.key, to_jsonb(c) AS answer, c.ordinality FROM idem_complete_many(k, array_fill('$t'::uuid, ARRAY[cardinality(k)]), array_fill($result\::jsonb, ARRAY[cardinality(k)])) c" ];
}

sub once_cell
{
	my ($name, $req) = @_;
	return [ "once $name", $req,
		"SELECT jsonb_build_object('first', idem_once('%k'))",
		"SELECT to_jsonb(c) FROM idem_once_many(ARRAY['%k']) c",
		"SELECT c.key, to_jsonb(c) AS answer, c.ordinality FROM idem_once_many(k) c" ];
}

my @cells = (
	claim_cell('same request', $request),
	claim_cell('other request', q('{"amount": 2}')),
	claim_cell('no request', 'NULL'),
	claim_cell('equal request', q('{"amount": 1.00}')),
	claim_cell('operation named', $request, 'plain'),
	claim_cell('other operation', $request, 'three'),
	claim_cell('lease', $request, undef, '7 s'),
	complete_cell('right', $right, q('{"done": true}')),
	complete_cell('other result', $right, q('[1, 2]')),
	complete_cell('no result', $right, 'NULL'),
	complete_cell('json null', $right, q('null')),
	complete_cell('too large', $right, q(to_jsonb(repeat('x', 200)))),
	complete_cell('past token', $past, q('{"done": true}')),
	complete_cell('foreign token', $foreign, q('{"done": true}')),
	once_cell('no request', 'NULL'),
	once_cell('with request', $request));

#---------------------------------------------------------------------------
# Keys whose records were purged: a turn of the ring before anything else
#---------------------------------------------------------------------------

$s->q("UPDATE idem_policy SET retention = '1 min' WHERE operation = 'default'");
for my $cell (@cells)
{
	$s->q("SELECT idem_once('$_/$cell->[0]/purged', $request)") for 's', 'b', 'all';
}
my $purged = 0;
for my $minute (1 .. 6)
{
	clock($minute * 60);
	$purged += $s->q('RESET ROLE; SELECT purged FROM idem_reap()');
}
cmp_ok($purged, '>=', 1, 'the ring was turned');
$s->q('RESET ROLE');
is_rows($s, 'SELECT count(*) FROM idem_record', '0', 'records were purged');
$s->q("UPDATE idem_policy SET retention = '7 days' WHERE operation = 'default'");

#---------------------------------------------------------------------------
# Every cell
#---------------------------------------------------------------------------

my $compared = 0;
my %seen;
for my $cell (@cells)
{
	my ($name, $req, $single, $batch, $all) = @$cell;
	my %answer;
	my @together;

	clock($hour);
	make($name, $req);
	for my $state (@states)
	{
		my ($what, $operation, $ahead) = @$state;
		clock($hour + $ahead);
		my @asked = map
		{
			my $key = "$_->[0]/$name/$what";
			my $query = sql_of($_->[1], $key, $req, $operation);
			$s->q("SELECT to_jsonb(a) FROM asked('$key', \$query\$$query\$query\$) a");
		} ([ s => $single ], [ b => $batch ]);
		is($asked[1], $asked[0], "$name, $what");
		$answer{$what} = $asked[0];
		$seen{$1}++ if $asked[0] =~ /\\"(?:outcome|completed|first)\\": (\\"\w+\\"|true|false)/;
		$seen{$1}++ if $asked[0] =~ /"answer": "(\w{5}) /;
		$compared++;
		push @together, [ $what, $ahead ] unless $asked[0] =~ /"answer": "\w{5} /;
	}

	# All that raise nothing, in one batch per clock, in an order that is not that of the keys.
	my %at;
	push @{ $at{ $_->[1] } }, $_->[0] for @together;
	for my $ahead (sort { $a <=> $b } keys %at)
	{
		my @names = sort { reverse($a) cmp reverse($b) } @{ $at{$ahead} };
		my $keys = join ', ', map { "'all/$name/$_'" } @names;
		clock($hour + $ahead);
		$s->q("CREATE TEMP TABLE before AS SELECT k, version(k) FROM unnest(ARRAY[$keys]) k");
		$s->q("CREATE TEMP TABLE answers AS WITH keys (k) AS (SELECT ARRAY[$keys]) SELECT a.* FROM keys, LATERAL ($all) a");
		is($s->q('SELECT string_agg(key, $$, $$ ORDER BY ordinality) FROM answers'), join(', ', map { "all/$name/$_" } @names),
			"$name, together at $ahead s: answers in the order of the input");
		my @differ;
		for my $what (@names)
		{
			my $key = "all/$name/$what";
			my $got = $s->q(<<"SQL");
SELECT to_jsonb(x) FROM (SELECT CASE WHEN a.answer ? 'outcome' THEN shown(a.answer, updated(a.key))
		ELSE a.answer - '{key,ordinality}'::text[] END::text AS answer,
	left_behind(a.key) AS stored, version(a.key) = b.version AS untouched
	FROM answers a JOIN before b ON b.k = a.key WHERE a.key = '$key') x
SQL
			push @differ, "$what: $got instead of $answer{$what}" if $got ne $answer{$what};
		}
		is_deeply(\@differ, [], "$name, together at $ahead s: as the single form, for " . @names . ' states');
		$s->q('DROP TABLE before, answers');
	}
}
is($compared, @cells * @states, "$compared cells were compared");
for my $must (qw(claimed in_progress succeeded failed retry_later unknown conflict))
{
	ok($seen{"\\\"$must\\\""}, "... among them answers '$must'");
}
ok($seen{$_}, "... and $_") for qw(true false 42501 ID001 ID002 ID003 54000 22023);

#---------------------------------------------------------------------------
# Records that this very transaction has written, and those of a later snapshot
#---------------------------------------------------------------------------

clock($hour);
for my $level ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
{
	for my $cell (grep { $_->[0] =~ /^(claim same|complete right|once no)/ } @cells)
	{
		my ($name, $req, $single, $batch) = @$cell;
		my %got;
		for my $form ([ s => $single ], [ b => $batch ])
		{
			for my $state (grep { $_->[2] == 0 && $_->[0] !~ /stranger|purged/ } @states)
			{
				my ($what, $operation, undef, @steps) = @$state;
				my $key = "$form->[0]/own $level/$name/$what";
				$s->q("BEGIN ISOLATION LEVEL $level");
				$s->q(sql_of($_, $key, $req, $operation)) for @steps;
				my $query = sql_of($form->[1], $key, $req, $operation);
				$got{ $form->[0] }{$what} = $s->q("SELECT jsonb_build_object('answer', answer, 'stored', stored) FROM asked('$key', \$query\$$query\$query\$)");
				$s->q('ROLLBACK');
			}
		}
		is_deeply($got{b}, $got{s}, "$name, records of the same transaction, $level");
	}
	next if $level eq 'READ COMMITTED';
	my $o = session($node);
	$o->q('SET ROLE worker');
	for my $cell (grep { $_->[0] =~ /^(claim same|once no)/ } @cells)
	{
		my ($name, $req, $single, $batch) = @$cell;
		for my $form ([ single => $single ], [ batch => $batch ])
		{
			my $key = "late $level/$name/$form->[0]";
			$s->q("BEGIN ISOLATION LEVEL $level; SELECT 1");
			$o->q("SELECT idem_once('$key', $req)");
			is($s->try(sql_of($form->[1], $key, $req, 'plain')), '40001', "$name, $form->[0], committed after the snapshot, $level");
			$s->q('ROLLBACK');
		}
	}
	$o->quit;
}

#---------------------------------------------------------------------------
# Random batches against the single form, key by key in the order of the bytes, and
# of the input where keys are equal
#---------------------------------------------------------------------------

$s->q('RESET ROLE');
$s->q(<<'SQL');
CREATE TABLE claimed (twin text, round int, n bigint, key text, answer jsonb, token uuid);
CREATE FUNCTION one_by_one(keys text[], requests jsonb[]) RETURNS TABLE (n bigint, key text, c idem_claim_result) LANGUAGE plpgsql AS $$
BEGIN
	FOR n, key IN SELECT u.o, u.k FROM unnest(keys) WITH ORDINALITY u (k, o) ORDER BY u.k COLLATE "C", u.o LOOP
		c := idem_claim('s/' || key, requests[n]);
		RETURN NEXT;
	END LOOP;
END $$;
CREATE FUNCTION same_claims(round int) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := ARRAY(SELECT 'r' || (random() * 30)::int || CASE WHEN random() < 0.3 THEN 'é' ELSE '' END FROM generate_series(1, (random() * 40)::int));
	requests jsonb[] := ARRAY(SELECT CASE WHEN random() < 0.1 THEN NULL ELSE to_jsonb((random() * 1.2)::int) END FROM unnest(keys));
BEGIN
	INSERT INTO claimed SELECT 's', round, o.n, o.key, shown(to_jsonb(o.c), updated('s/' || o.key)), (o.c).owner_token
		FROM one_by_one(keys, requests) o;
	INSERT INTO claimed SELECT 'b', round, b.ordinality, substr(b.key, 3), shown(to_jsonb(b), updated(b.key)), b.owner_token
		FROM idem_claim_many(ARRAY(SELECT 'b/' || k FROM unnest(keys) WITH ORDINALITY u (k, o) ORDER BY o), requests) b;
	-- settle some of them, the twins alike
	PERFORM CASE WHEN kind < 0.4 THEN (SELECT count(*) FROM idem_complete_many(ARRAY['s/' || c.key, 'b/' || c.key], ARRAY[c.s, c.b], ARRAY[to_jsonb(round), to_jsonb(round)]))
		WHEN kind < 0.6 THEN (SELECT count(idem_fail(t || '/' || c.key, CASE t WHEN 's' THEN c.s ELSE c.b END, 'retryable', retry_after => '0')) FROM unnest('{s,b}'::text[]) t)
		WHEN kind < 0.7 THEN (SELECT count(idem_fail(t || '/' || c.key, CASE t WHEN 's' THEN c.s ELSE c.b END, 'permanent')) FROM unnest('{s,b}'::text[]) t) END
		FROM (SELECT s.key, s.token AS s, b.token AS b, random() AS kind FROM claimed s JOIN claimed b USING (round, n)
			WHERE s.round = same_claims.round AND s.twin = 's' AND b.twin = 'b' AND s.token IS NOT NULL AND b.token IS NOT NULL) c;
	RETURN (SELECT count(*) FROM claimed s FULL JOIN claimed b ON b.twin = 'b' AND b.round = s.round AND b.n = s.n
		WHERE s.twin = 's' AND s.round = same_claims.round AND (b.key, b.answer) IS DISTINCT FROM (s.key, s.answer));
END $$;
SQL
my $differ = 0;
for my $round (1 .. 100)
{
	clock($hour + 8 * $round);    # leases of 30 s end well between two rounds
	$differ += $s->q("RESET ROLE; SELECT same_claims($round)");
}
is($differ, 0, 'random batches of claims: no answer differs')
  or diag $s->q("SELECT * FROM claimed s FULL JOIN claimed b ON b.twin = 'b' AND b.round = s.round AND b.n = s.n WHERE s.twin = 's' AND (b.key, b.answer) IS DISTINCT FROM (s.key, s.answer)");
is_rows($s, "SELECT count(DISTINCT answer->>'outcome') FROM claimed", '5', '... claimed, in_progress, succeeded, failed and conflict were among them');
is_rows($s, "SELECT count(*) FILTER (WHERE twin = 's') = count(*) FILTER (WHERE twin = 'b') FROM claimed", 't', '... and as many of the one as of the other');
is_rows($s, <<'SQL', '0', 'random batches of claims: no record differs');
SELECT count(*) FROM (SELECT substr(idempotency_key, 3) AS key, left_behind(idempotency_key) AS row FROM idem_record WHERE idempotency_key LIKE 's/r%') s
FULL JOIN (SELECT substr(idempotency_key, 3) AS key, left_behind(idempotency_key) AS row FROM idem_record WHERE idempotency_key LIKE 'b/r%') b USING (key)
WHERE s.row IS DISTINCT FROM b.row
SQL
is_rows($s, 'SELECT count(*) FROM idem_check()', '0', 'the table keeps its rules');

#---------------------------------------------------------------------------
# Batches of two sessions with the same keys in opposite order, in a loop, with a reaper
#---------------------------------------------------------------------------

$s->q('RESET idempotency.clock_offset');
$s->q('CREATE TABLE firsts (key text)');
my @end = run_workers(4, sub {
	my ($i) = @_;
	my $w = session($node, name => "worker $i");
	my $order = $i % 2 ? 'DESC' : 'ASC';
	my %count;
	$w->q("SET deadlock_timeout = '100 ms'");
	for my $round (1 .. 60)
	{
		my $keys = "ARRAY(SELECT format('round %s key %s', $round, g) FROM generate_series(1, 40) g ORDER BY g $order)";
		my $state = $i == 3 ? $w->try('SELECT idem_reap()')
		  : $w->try("BEGIN; INSERT INTO firsts SELECT key FROM idem_once_many($keys) WHERE first; " . ($round % 5 == $i ? 'ROLLBACK' : 'COMMIT'));
		$count{$state}++;
		$w->try('ROLLBACK') if $state ne '00000';
	}
	$w->quit;
	return \%count;
});
is_deeply(\@end, [ ({ '00000' => 60 }) x 4 ], 'reversed batches of idem_once_many never deadlock');
is_rows($s, 'SELECT count(*), count(DISTINCT key) FROM firsts', '2400|2400', '... and each key has one first');

$s->q("SELECT count(*) FROM idem_claim_many(ARRAY(SELECT 'c' || g FROM generate_series(1, 200) g))");
$s->q('CREATE TABLE held AS SELECT idempotency_key AS key, owner_token AS token FROM idem_record WHERE idempotency_key ~ $$^c[0-9]+$$');
@end = run_workers(3, sub {
	my ($i) = @_;
	my $w = session($node, name => "worker $i");
	my %count;
	for my $round (1 .. 20)
	{
		my $order = ('key', 'key DESC', 'md5(key)')[$i];
		my $state = $w->try("BEGIN; SELECT count(*) FROM idem_complete_many(ARRAY(SELECT key FROM held ORDER BY $order), ARRAY(SELECT token FROM held ORDER BY $order)); " .
			($round < 20 ? 'ROLLBACK' : 'COMMIT'));
		$count{$state}++;
		$w->try('ROLLBACK') if $state ne '00000';
	}
	$w->quit;
	return \%count;
});
is_deeply(\@end, [ ({ '00000' => 20 }) x 3 ], 'batches of idem_complete_many in three orders never deadlock');
is_rows($s, q(SELECT count(*) FROM idem_record WHERE idempotency_key ~ '^c[0-9]+$' AND status = 'succeeded'), '200', '... and all are completed');

$s->quit;
done_testing();
