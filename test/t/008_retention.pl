# The ring turns under load, in real time: with a retention of one second, slices are
# closed and truncated while sessions claim, complete and replay.  No success may
# run again before its retention is over, no key be there twice, no call fail.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

my $node = new_node('retention');
my $o = session($node, name => 'observer');

plan skip_all => 'no reaper' if $o->q("SELECT count(*) FROM pg_proc WHERE proname = 'idem_reap'") == 0;

$o->q(<<'SQL');
UPDATE idem_policy SET retention = '1 s', max_attempts = 10000 WHERE operation = 'default';
CREATE TABLE business (key text NOT NULL, at timestamptz NOT NULL, open boolean);
CREATE TABLE outcomes (outcome text);
CREATE SEQUENCE turned;
CREATE PROCEDURE serve(me int) LANGUAGE plpgsql AS $$
DECLARE
	r idem_claim_result;
	k text;
BEGIN
	-- until the ring has turned often enough
	WHILE (SELECT last_value FROM turned) < 9 LOOP
		k := 'key' || (random() * 50)::int;
		SELECT * INTO STRICT r FROM idem_claim(k, '1');
		IF r.outcome = 'claimed' THEN
			IF random() < 0.1 THEN
				PERFORM idem_fail(k, r.owner_token, 'retryable', retry_after => '0');
			ELSE
				INSERT INTO business VALUES (k, clock_timestamp());
				PERFORM idem_complete(k, r.owner_token, to_jsonb(k));
			END IF;
			IF random() < 0.2 THEN ROLLBACK; END IF;
		ELSIF r.outcome = 'succeeded' AND r.result_json <> to_jsonb(k) THEN
			RAISE EXCEPTION 'wrong result';
		ELSIF r.outcome NOT IN ('succeeded', 'in_progress') THEN
			RAISE EXCEPTION 'unexpected outcome %', r.outcome;
		END IF;
		COMMIT;
	END LOOP;
END $$;
SQL

my %sum = (rotated => 0, purged => 0);
my $reap = sub {
	wait_until('the ring has turned six times', sub {
		my ($rotated, $purged) = split /\|/, $o->q('SELECT rotated::int, purged::int FROM idem_reap()');
		$sum{rotated} += $rotated;
		$sum{purged} += $purged;
		return $sum{rotated} >= 6 && $sum{purged} >= 3;
	});
	$o->q("SELECT setval('turned', 9)");
};

my @end = run_workers(5, sub {
	my ($i) = @_;
	my $s = session($node, name => "server $i");
	my $state = $s->try("CALL serve($i)");
	$s->quit;
	return $state eq '00000' ? $state : "$state $s->{err}";
}, $reap);

is_deeply(\@end, [ ('00000') x 5 ], 'no call fails while the ring turns');
note "turned $sum{rotated} times, $sum{purged} purged";
cmp_ok($o->q('SELECT count(*) FROM (SELECT FROM business GROUP BY key HAVING count(*) > 1) d'), '>', 20, 'keys came anew after their retention');
is($o->q(<<'SQL'), '0', 'no success ran again within its retention');
SELECT count(*) FROM (SELECT at - lag(at) OVER (PARTITION BY key ORDER BY at) AS gap FROM business) g WHERE gap < '1 s'
SQL
is($o->q('SELECT count(*) FROM (SELECT FROM idem_record GROUP BY idempotency_key HAVING count(*) > 1) d'), '0', 'no key is there twice');
is($o->q("SELECT count(*) FROM idem_ring WHERE state = 'current'"), '1', 'one slice is current');
is($o->q(<<'SQL'), '0', 'each success that is there was done, each record is in a slice in use');
SELECT count(*) FROM idem_record r LEFT JOIN idem_ring g USING (slice)
WHERE r.status = 'succeeded' AND (g.state IS NOT DISTINCT FROM 'empty' OR NOT EXISTS (SELECT FROM business WHERE key = r.idempotency_key))
SQL

$o->quit;
done_testing();
