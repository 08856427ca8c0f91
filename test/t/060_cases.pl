# Faults of other systems that show only with many rows, large rows, or an old snapshot:
# clean-up that is unbounded or overlaps (C74), stored results that bloat (C107), monitoring
# that reads the history (C108), dead rows behind an old snapshot (C105).
#
#	IDEM_CASES_ROWS		finished records (default 200000; 2000000 takes some minutes)

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

my $rows = $ENV{IDEM_CASES_ROWS} || 200_000;
my $node = new_node('cases', conf => "fsync = off\nmax_wal_size = 4GB\n");
my $s = session($node);

# Reads of the partitions so far: by sequence and by index, of the ring and of the open one.
sub reads
{
	my ($what) = @_;
	$s->q('SELECT pg_stat_force_next_flush()');
	return $s->q("SELECT sum($what) FROM pg_stat_user_tables WHERE relname ~ '^idem_record_[1-4]\$'");
}

$s->q("UPDATE idem_policy SET retention = '1 h', store_request = true WHERE operation = 'default'");
$s->q("INSERT INTO idem_record_1 (slice, idempotency_key, operation, owner, request_hash, status, attempts, first_claimed_at, updated_at, previous, limits_from_attempt, limits_from)
	SELECT 1, 'f' || i, 'default', 'postgres', '', 'succeeded', 1, now(), now(), 'none', 0, now() FROM generate_series(1, $rows) i");
$s->q("SELECT count(*) FROM idem_claim_many(ARRAY(SELECT 'p' || i FROM generate_series(1, 100) i))");
$s->q("SELECT count(*) FROM idem_claim_many(ARRAY(SELECT 'lapsed' || i FROM generate_series(1, 5) i), lease => '1 us')");
$s->q('VACUUM ANALYZE');

# C108
my ($by_sequence, $by_index) = (reads('seq_tup_read'), reads('idx_scan'));
is($s->q('SELECT processing, expired FROM idem_stats'), '100|5', 'C108: what is in flight is counted');
is($s->q('SELECT count(*) FROM idem_claim_due(max_records => 2)'), 2, 'C108: and found');
is($s->q('SELECT skipped FROM idem_reap()'), 0, 'C74: a reaper with nothing due');
is(reads('seq_tup_read') - $by_sequence, 0, "C108, C74: without reading one of the $rows finished rows");

# C74: several reapers and clients; the history goes at once, by nobody's row-by-row work.
$s->q("SET idempotency.clock_offset = '31 min'");
$s->q('SELECT idem_reap()') for 1 .. 2;
$s->q("SET idempotency.clock_offset = '2 h'");
my $before = $s->q('SELECT pg_current_wal_insert_lsn()');
my @answers = run_workers(
	6,
	sub {
		my ($i) = @_;
		my $w = session($node, name => "cases $i");
		$w->q("SET statement_timeout = '10 s'; SET idempotency.clock_offset = '2 h'");
		if ($i < 4)
		{
			my $sum = 0;
			$sum += $w->q('SELECT purged FROM idem_reap(1000)') for 1 .. 10;
			return $sum;
		}
		my $claimed = 0;
		$claimed += $w->q("SELECT count(*) FROM idem_claim('c$i.$_') WHERE outcome = 'claimed'") for 1 .. 200;
		return $claimed;
	});
is($answers[0] + $answers[1] + $answers[2] + $answers[3], 1, 'C74: four reapers purge the slice once');
is("$answers[4] $answers[5]", '200 200', 'C74: clients go on');
is($s->q('SELECT count(*) FROM idem_record_1'), 0, 'C74: nothing is left of it');
cmp_ok($s->q("SELECT pg_current_wal_insert_lsn() - '$before'"), '<', 5_000_000, 'C74: without writing the rows to the WAL');
$s->q('RESET idempotency.clock_offset');

# C107: large results
my $toast = "(SELECT sum(pg_relation_size(reltoastrelid)) FROM pg_class WHERE relname ~ '^idem_record_(open|[1-4])\$')";
$s->q('TRUNCATE idem_record, idem_ring');
$s->q("CREATE FUNCTION noise(n integer) RETURNS bytea LANGUAGE sql AS \$\$ SELECT decode(string_agg(md5(random()::text), ''), 'hex') FROM generate_series(1, n / 16) \$\$");
$s->q("SELECT count(idem_complete('large' || i, (SELECT owner_token FROM idem_claim('large' || i)), NULL, noise(50000))) FROM generate_series(1, 200) i");
$s->q("SELECT idem_complete('huge', (SELECT owner_token FROM idem_claim('huge')), NULL, noise(1000000))");
my $size = $s->q("SELECT $toast");
cmp_ok($size, '>', 10_000_000, 'C107: results are in TOAST');
cmp_ok($size, '<', 14_000_000, 'C107: once');
my @lengths = run_workers(8, sub { session($node)->q("SELECT length(result_body) FROM generate_series(1, 20), idem_claim('huge') GROUP BY 1"); });
is(join(' ', @lengths), join(' ', (1_000_000) x 8), 'C107: a large result is replayed to many');
is($s->q("SELECT $toast"), $size, 'C107: replays write nothing');
my $t = token(1);
$s->q("SELECT idem_claim('working', token => '$t'), idem_checkpoint('working', '$t', 's', to_jsonb(encode(noise(100000), 'hex')))");
$size = $s->q("SELECT $toast");
$s->q("SELECT count(idem_renew('working', '$t')) FROM generate_series(1, 100)");
is($s->q("SELECT $toast"), $size, 'C107: a renewal does not write the progress again');
is($s->try("SELECT idem_complete('working', '$t', NULL, noise(2000000))"), '54000', 'C107: there is a limit');
$s->q('SELECT idem_reap()');
for my $hours (1, 2, 4, 6, 8)
{
	$s->q("SET idempotency.clock_offset = '$hours h'");
	$s->q('SELECT idem_reap()') for 1 .. 2;
}
is($s->q("SELECT count(*) FROM idem_record WHERE slice > 0"), 0, 'C107: purged');
cmp_ok($s->q("SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relname ~ '^idem_record_[1-4]\$'"), '<', 500_000, 'C107: and the space is free');
$s->q('RESET idempotency.clock_offset');

# C105: an old snapshot keeps dead rows; what a duplicate costs does not grow with them
my $old = session($node);
$old->q('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
my $pages = sub {
	my ($n) = @_;
	my $count = sub {
		$s->q('SELECT pg_stat_force_next_flush()');
		return $s->q("SELECT sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit) FROM pg_statio_user_tables WHERE relname LIKE 'idem\\_record\\_%'");
	};
	my $first = $count->();
	$s->q("SELECT count(*) FROM generate_series(1, $n), idem_claim('hot')");
	return ($count->() - $first) / $n;
};
$s->q("SELECT idem_complete('hot', (SELECT owner_token FROM idem_claim('hot')))");
my $first = $pages->(200);
for my $i (1 .. 20)
{
	$s->q("SELECT count(idem_complete('churn' || i, (SELECT owner_token FROM idem_claim('churn' || i)))) FROM generate_series($i * 100, $i * 100 + 99) i");
}
my $last = $pages->(200);
cmp_ok($last, '<=', $first + 2, sprintf 'C105: pages read by a replay before and after 2000 keys came and went: %.1f, %.1f', $first, $last);
$old->q('COMMIT');
is($s->q('SELECT count(*) FROM idem_check()'), 0, 'nothing to complain of');

done_testing();
