# Faults in idem_execute and idem_once: sessions killed in the handler and before the
# commit, timeouts, constraints that fail at COMMIT, two-phase commit, many workers at
# the same keys without a unique constraint to save them, and memory.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

my $node = new_node('execute_faults');
my $o = session($node, name => 'observer');

$o->q(<<'SQL');
CREATE TABLE business (key text, attempt int);
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
CREATE FUNCTION work(key text, request jsonb, attempt int) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN INSERT INTO business VALUES (key, attempt); RETURN to_jsonb(attempt); END $$;
CREATE FUNCTION gated(key text, request jsonb, attempt int) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO business VALUES (key, attempt);
	PERFORM pg_advisory_xact_lock_shared(7);
	RETURN to_jsonb(attempt);
END $$;
CREATE FUNCTION deferred(key text, request jsonb, attempt int) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO business VALUES (key, attempt);
	INSERT INTO child VALUES (1);
	RETURN to_jsonb(attempt);
END $$;
SQL

# The number of the extension's locks that are held, by anyone
my $held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid > 2";

sub execute
{
	my ($key, $handler) = @_;
	return "SELECT outcome, attempts FROM idem_execute('$key', '1', '$handler(text,jsonb,int)')";
}

sub rows
{
	my ($key) = @_;
	return $o->q("SELECT count(*) FROM business WHERE key = '$key'");
}

# Starts a session whose handler stands at the gate.
sub in_handler
{
	my ($key, $before) = @_;
	my $s = session($node);
	$s->q($before) if $before;
	$s->start(execute($key, 'gated'));
	wait_lock_wait($o, $s);
	return $s;
}

# A record that is due: the next execution is a later attempt, guarded by its row.
sub make_due
{
	my ($key) = @_;
	my $token = token(1);
	$o->q("SELECT idem_claim('$key', '1', token => '$token')");
	$o->q("SELECT idem_fail('$key', '$token', 'retryable', retry_after => '0')");
	return;
}

for my $kind ('first', 'later')
{
	my $attempt = $kind eq 'first' ? 1 : 2;

	# Killed in the handler
	make_due("handler $kind") if $kind eq 'later';
	close_gate($o, 7);
	my $s = in_handler("handler $kind");
	is_rows($o, "SELECT outcome FROM idem_claim('handler $kind', '1')", 'in_progress', "$kind attempt: in progress while the handler runs");
	$o->q('SELECT pg_terminate_backend(' . $s->pid . ')');
	is($s->finish, '08006', "$kind attempt: terminated in the handler");
	$s->lost;
	wait_until('the backend is gone', sub { $o->q('SELECT count(*) FROM pg_stat_activity WHERE pid = ' . $s->pid) == 0 });
	is($o->q($held), 0, "$kind attempt: no lock is left");
	$o->q('SELECT pg_advisory_unlock(7)');
	is_rows($o, execute("handler $kind", 'work'), "executed|$attempt", "$kind attempt: the next executes, the lost one does not count");
	is(rows("handler $kind"), 1, "$kind attempt: one business row");

	# Killed between handler and commit
	make_due("commit $kind") if $kind eq 'later';
	$s = session($node);
	$s->q('BEGIN');
	is($s->q(execute("commit $kind", 'work')), "executed|$attempt", "$kind attempt: executed, not committed");
	is_rows($o, "SELECT outcome FROM idem_claim('commit $kind', '1')", 'in_progress', "$kind attempt: in progress until the commit");
	$o->q('SELECT pg_terminate_backend(' . $s->pid . ')');
	wait_until('the backend is gone', sub { $o->q('SELECT count(*) FROM pg_stat_activity WHERE pid = ' . $s->pid) == 0 });
	$s->lost;
	is_rows($o, execute("commit $kind", 'work'), "executed|$attempt", "$kind attempt: executed anew");
	is(rows("commit $kind"), 1, "$kind attempt: one business row");

	# statement_timeout in the handler passes through
	make_due("timeout $kind") if $kind eq 'later';
	my $before = $o->q("SELECT r::text FROM idem_record r WHERE idempotency_key = 'timeout $kind'");
	close_gate($o, 7);
	$s = in_handler("timeout $kind", "SET statement_timeout = '300 ms'");
	is($s->finish, '57014', "$kind attempt: statement_timeout passes through");
	is($o->q("SELECT r::text FROM idem_record r WHERE idempotency_key = 'timeout $kind'"), $before, "$kind attempt: nothing is recorded of it");
	is($o->q($held), 0, "$kind attempt: no lock is left");
	$o->q('SELECT pg_advisory_unlock(7)');
	is($s->q(execute("timeout $kind", 'work')), "executed|$attempt", "$kind attempt: the same session executes it");
	is(rows("timeout $kind"), 1, "$kind attempt: one business row");
	$s->quit;

	# lock_timeout in the handler is a failure of the handler: 55P03, retryable
	make_due("lock $kind") if $kind eq 'later';
	close_gate($o, 7);
	$s = in_handler("lock $kind", "SET lock_timeout = '300 ms'");
	is($s->finish, '00000', "$kind attempt: lock_timeout is recorded");
	is($s->{out}, "retry_later|$attempt", "$kind attempt: as retryable");
	is_rows($o, "SELECT status, error_code FROM idem_status('lock $kind')", 'retryable_failed|55P03', "$kind attempt: with its code");
	$o->q('SELECT pg_advisory_unlock(7)');
	is(rows("lock $kind"), 0, "$kind attempt: its writes are undone");
	$s->quit;

	# A deferred constraint fails at COMMIT
	make_due("deferred $kind") if $kind eq 'later';
	$s = session($node);
	$s->q('BEGIN');
	is($s->q(execute("deferred $kind", 'deferred')), "executed|$attempt", "$kind attempt: executed");
	is($s->try('COMMIT'), '23503', "$kind attempt: the COMMIT fails");
	is(rows("deferred $kind"), 0, "$kind attempt: nothing is there");
	is($s->try(execute("deferred $kind", 'deferred')), '23503', "$kind attempt: also without a transaction block");
	is($s->q(execute("deferred $kind", 'work')), "executed|$attempt", "$kind attempt: executed by another handler");
	is(rows("deferred $kind"), 1, "$kind attempt: one business row");
	$s->quit;
}

# Two-phase commit
for my $end ('COMMIT', 'ROLLBACK')
{
	my $s = session($node);
	my $committed = $end eq 'COMMIT';

	$s->q('BEGIN');
	$s->q(execute("2pc $end", 'work'));
	$s->q("SELECT idem_once('2pc once $end'); INSERT INTO business VALUES ('2pc once $end', 1)");
	is($s->try("PREPARE TRANSACTION 'p'"), '00000', "$end PREPARED: prepared");
	$s->quit;
	is_rows($o, execute("2pc $end", 'work'), 'in_progress|1', "$end PREPARED: execute is told in progress");
	is_rows($o, "SELECT outcome FROM idem_claim('2pc once $end')", 'in_progress', "$end PREPARED: claim, too");
	my $w = session($node);
	$w->start("SELECT idem_once('2pc once $end')");
	wait_lock_wait($o, $w);
	$o->q("$end PREPARED 'p'");
	is($w->finish, '00000', "$end PREPARED: idem_once has waited");
	is($w->{out}, $committed ? 'f' : 't', "$end PREPARED: and is told its end");
	$w->quit;
	is_rows($o, execute("2pc $end", 'work'), $committed ? 'succeeded|1' : 'executed|1', "$end PREPARED: execute");
	is(rows("2pc $end"), 1, "$end PREPARED: one business row");
}
is($o->q($held), 0, 'no lock is left');

# 12 workers, the same 100 keys by execution and 100 by once, rollbacks and failures among them
$o->q(<<'SQL');
CREATE TABLE hammered (key text, how text);
UPDATE idem_policy SET max_attempts = 1000, backoff_base = '0', backoff_cap = '0' WHERE operation = 'default';
CREATE FUNCTION hammer(key text, request jsonb, attempt int) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO hammered VALUES (key, 'execute');
	IF random() < 0.2 THEN RAISE EXCEPTION SQLSTATE 'IDR00'; END IF;
	RETURN to_jsonb(key);
END $$;
CREATE PROCEDURE serve() LANGUAGE plpgsql AS $$
DECLARE
	r idem_claim_result;
	n int;
	k text;
BEGIN
	FOR round IN 1 .. 4 LOOP
		FOR n IN SELECT g FROM generate_series(1, 100) g ORDER BY random() LOOP
			LOOP
				SELECT * INTO STRICT r FROM idem_execute('e' || n, '1', 'hammer(text,jsonb,int)');
				IF r.outcome IN ('executed', 'succeeded') AND r.result_json <> to_jsonb('e' || n) THEN RAISE EXCEPTION 'wrong result'; END IF;
				IF r.outcome NOT IN ('executed', 'succeeded', 'in_progress', 'retry_later') THEN RAISE EXCEPTION 'unexpected outcome %', r.outcome; END IF;
				IF r.outcome = 'executed' AND random() < 0.2 THEN ROLLBACK; CONTINUE; END IF;
				COMMIT;
				EXIT WHEN r.outcome IN ('executed', 'succeeded');
			END LOOP;
			IF idem_once('o' || n) THEN INSERT INTO hammered VALUES ('o' || n, 'once'); END IF;
			IF random() < 0.2 THEN ROLLBACK; ELSE COMMIT; END IF;
			-- a key that both forms meet
			BEGIN
				IF n % 2 = 0 THEN
					PERFORM idem_execute('m' || n, NULL, 'hammer(text,jsonb,int)');
				ELSIF idem_once('m' || n) THEN
					INSERT INTO hammered VALUES ('m' || n, 'once');
				END IF;
				IF n % 3 = 0 AND idem_once('m' || n) THEN
					INSERT INTO hammered VALUES ('m' || n, 'once');
				END IF;
			EXCEPTION WHEN SQLSTATE 'ID003' THEN NULL;
			END;
			COMMIT;
		END LOOP;
	END LOOP;
	-- what was rolled back last, all are done in the end
	FOR n IN 1 .. 100 LOOP
		IF idem_once('o' || n) THEN INSERT INTO hammered VALUES ('o' || n, 'once'); END IF;
		COMMIT;
	END LOOP;
END $$;
SQL
my @end = run_workers(12, sub {
	my ($i) = @_;
	my $s = session($node, name => "worker $i");
	my $state = $s->try('CALL serve()');
	$s->quit;
	return $state eq '00000' ? $state : "$state $s->{err}";
});
is_deeply(\@end, [ ('00000') x 12 ], 'no call fails');
is_rows($o, "SELECT left(key, 1), count(*), count(DISTINCT key) FROM hammered WHERE key !~ '^m' GROUP BY 1 ORDER BY 1", "e|100|100\no|100|100", 'one business row per key');
is_rows($o, "SELECT count(*) FROM (SELECT FROM hammered GROUP BY key HAVING count(*) > 1) d", '0', 'none has two, by either form');
is_rows($o, <<'SQL', '0', 'each success that is recorded is there, and the other way round');
SELECT count(*) FROM (SELECT idempotency_key AS key FROM idem_record WHERE idempotency_key ~ '^[eom][0-9]+$' AND status = 'succeeded') r
FULL JOIN hammered h USING (key) WHERE r.key IS NULL OR h.key IS NULL
SQL
is_rows($o, 'SELECT count(*) FROM idem_check()', '0', 'the table keeps its rules');
is($o->q($held), 0, 'no lock is left');

# Memory over 20,000 calls in one transaction and one statement each: flat
my $m = session($node);
$m->q(<<'SQL');
CREATE FUNCTION broken(key text, request jsonb, attempt int) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'permanent'; END $$;
CREATE PROCEDURE many(what text, prefix text, n int) LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. n LOOP
		CASE what
			WHEN 'execute' THEN PERFORM idem_execute(prefix || i, '{"a": [1, 2]}', 'work(text,jsonb,int)');
			WHEN 'failure' THEN PERFORM idem_execute(prefix || i, '{"a": [1, 2]}', 'broken(text,jsonb,int)');
			WHEN 'once' THEN PERFORM idem_once(prefix || i, '{"a": [1, 2]}');
		END CASE;
		COMMIT;
	END LOOP;
END $$;
SQL
my $used = 'SELECT sum(used_bytes) FROM pg_backend_memory_contexts';
for my $what ('execute', 'failure', 'once')
{
	$m->q("CALL many('$what', '$what warm ', 1000)");
	my $before = $m->q($used);
	$m->q("CALL many('$what', '$what ', 20000)");
	my $after = $m->q($used);
	cmp_ok($after - $before, '<', 200_000, "$what: memory is flat over 20,000 calls") or note "$before -> $after";
	$m->q("CALL many('$what', '$what ', 20000)");
	cmp_ok($m->q($used) - $after, '<', 200_000, "$what: and over 20,000 replays");
}
# ... and within one statement
for my $call (
	"idem_execute('execute ' || n, '{\"a\": [1, 2]}', 'work(text,jsonb,int)')",
	"idem_execute('stmt ' || n, '{\"a\": [1, 2]}', 'work(text,jsonb,int)')",
	"idem_once('stmt once ' || n)")
{
	my $peak = "SELECT max(m), min(m) FROM (SELECT n, CASE WHEN n % 4000 = 0 THEN (SELECT sum(used_bytes) FROM pg_backend_memory_contexts WHERE n > 0) END AS m, $call AS c FROM generate_series(1, 20000) n OFFSET 0) s WHERE c::text IS NOT NULL";
	my ($max, $min) = split /\|/, $m->q($peak);
	cmp_ok($max - $min, '<', 1_000_000, "memory grows little within a statement of 20,000 calls: $call") or note "$min .. $max";
}
is_rows($o, "SELECT count(*) FROM idem_record WHERE idempotency_key LIKE 'stmt %'", '40000', 'and each was done');
$m->quit;

$o->quit;
done_testing();
