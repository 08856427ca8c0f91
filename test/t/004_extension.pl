# The extension as an object of the database: dropped and created beside live
# sessions (C113), in an oddly named schema, under a hostile search_path, while its
# tables are reindexed and rewritten, and what its catalog entries must be.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('extension');
my $a = session($node, name => 'a');
my $b = session($node, name => 'b');

sub claim { my ($s, $key) = @_; return $s->q("SELECT outcome FROM idem_claim('$key', '1')"); }

#---------------------------------------------------------------------------
# What the tables are (C38, C90, C110, C114)
#---------------------------------------------------------------------------

my $members = <<'SQL';
SELECT c.oid, c.relname, c.relkind, c.relpersistence, c.relam
FROM pg_depend d JOIN pg_class c ON c.oid = d.objid JOIN pg_extension e ON e.oid = d.refobjid
WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'idempotency'
SQL

is($a->q("SELECT count(*) > 7 FROM ($members) m WHERE relkind = 'r'"), 't', 'tables belong to the extension');
is($a->q("SELECT string_agg(relname, ' ') FROM ($members) m WHERE relpersistence <> 'p'"), '~', 'every table is logged');
is($a->q("SELECT string_agg(relname, ' ') FROM ($members) m WHERE relkind = 'r' AND relam <> (SELECT oid FROM pg_am WHERE amname = 'heap')"),
	'~', 'every table is a heap');
is($a->q(<<SQL), '~', 'every key and name compared by bytes');
SELECT string_agg(m.relname || '.' || attname, ' ') FROM ($members) m JOIN pg_attribute t ON t.attrelid = m.oid
WHERE attname IN ('idempotency_key', 'operation') AND relkind IN ('r', 'p') AND attcollation <> 'pg_catalog."C"'::regcollation
SQL
is($a->q(<<'SQL'), '~', 'no function of the extension is SECURITY DEFINER');
SELECT string_agg(proname, ' ') FROM pg_proc WHERE proname LIKE 'idem%' AND prosecdef
SQL
is($a->q(<<'SQL'), '~', 'what writes is volatile and parallel unsafe');
SELECT string_agg(proname, ' ') FROM pg_proc
WHERE proname IN ('idem_claim', 'idem_complete', 'idem_fail', 'idem_renew', 'idem_release', 'idem_checkpoint')
	AND (provolatile <> 'v' OR proparallel <> 'u' OR proisstrict)
SQL
is($a->q('SELECT extrelocatable FROM pg_extension WHERE extname = \'idempotency\''), 'f', 'not relocatable');
$a->q('CREATE SCHEMA elsewhere');
is($a->try('ALTER EXTENSION idempotency SET SCHEMA elsewhere'), '0A000', 'SET SCHEMA is refused');

#---------------------------------------------------------------------------
# DROP and CREATE EXTENSION beside a live session
#---------------------------------------------------------------------------

$a->q(<<'SQL');
PREPARE ask AS SELECT outcome FROM idem_claim('prepared', '1');
CREATE FUNCTION ask(k text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	r idem_claim_result;
BEGIN
	SELECT * INTO r FROM idem_claim(k, '1');
	IF r.outcome = 'claimed' THEN
		PERFORM idem_complete(k, r.owner_token, '"done"');
	END IF;
	RETURN r.outcome;
END $$;
SQL

# All ways that our session has of calling; "new" on fresh tables.
sub all_ways
{
	my ($label) = @_;
	is(claim($a, 'direct'), 'claimed', "$label: direct call");
	is($a->q("SELECT idem_complete('direct', (idem_status('direct')).owner_token, '1')"), 't', "$label: completion");
	is(claim($a, 'direct'), 'succeeded', "$label: replay");
	is($a->q('EXECUTE ask'), 'claimed', "$label: prepared statement");
	is($a->q("SELECT ask('plpgsql')"), 'claimed', "$label: PL/pgSQL");
	is($a->q("SELECT ask('plpgsql')"), 'succeeded', "$label: PL/pgSQL again");
	is($b->q('SELECT count(*) FROM idem_record'), '3', "$label: three records in the tables of now");
	return;
}

all_ways('before');
for my $round (1 .. 2)
{
	$b->q('DROP EXTENSION idempotency CASCADE; CREATE EXTENSION idempotency');
	all_ways("recreated $round");
}

$b->q('DROP EXTENSION idempotency CASCADE');
is($a->try("SELECT idem_claim('direct', '1')"), '42883', 'dropped: direct call says so');
is($a->try('EXECUTE ask'), '42883', 'dropped: prepared statement says so');
like($a->try("SELECT ask('plpgsql')"), qr/^42(883|704|P01)$/, 'dropped: PL/pgSQL says so');
is($a->q('SELECT 1'), '1', 'dropped: the session lives');

# Created and rolled back by our own session.
$a->q('BEGIN; CREATE EXTENSION idempotency');
is(claim($a, 'direct'), 'claimed', 'created in this transaction: works');
$a->q('ROLLBACK');
is($a->try("SELECT idem_claim('direct', '1')"), '42883', 'created and rolled back: not there');
$a->q('BEGIN; SAVEPOINT x; CREATE EXTENSION idempotency');
is(claim($a, 'direct'), 'claimed', 'created in a savepoint: works');
$a->q('ROLLBACK TO x; CREATE EXTENSION idempotency');
is(claim($a, 'direct'), 'claimed', 'rolled back and created anew in the same transaction: works');
$a->q('COMMIT');
$b->q('TRUNCATE idem_record');
all_ways('created after a rollback');

# Dropped and rolled back.
$a->q('BEGIN; DROP EXTENSION idempotency CASCADE');
is($a->try("SELECT idem_claim('direct', '1')"), '42883', 'dropped in this transaction: says so');
$a->try('ROLLBACK');
is(claim($a, 'direct'), 'succeeded', 'drop rolled back: the record is there');

# A claim in progress holds DROP EXTENSION off; it does not break.
$a->q('BEGIN');
is(claim($a, 'holding'), 'claimed', 'a claim in an open transaction');
is($b->try("SET lock_timeout = '100ms'; DROP EXTENSION idempotency CASCADE"), '55P03', '... keeps DROP EXTENSION waiting');
$a->q('COMMIT');
$b->q('RESET lock_timeout');

# A replay does not hold it off in the same way after its transaction, nor fail.
is(claim($a, 'direct'), 'succeeded', 'replay');
$b->q('DROP EXTENSION idempotency CASCADE; CREATE EXTENSION idempotency');
is(claim($a, 'direct'), 'claimed', '... and after recreation a new key');

# A table that is not what it should be is a clean error.
$b->q('ALTER TABLE idem_record_open RENAME TO hidden');
is($a->try("SELECT idem_claim('direct', '1')"), '42P01', 'record table renamed: says so');
$b->q('ALTER TABLE hidden RENAME TO idem_record_open');
is(claim($a, 'direct'), 'in_progress', '... and named back: works');
$b->q('ALTER TABLE idem_record_1 DROP CONSTRAINT idem_record_1_pkey');
is($a->try("SELECT idem_claim('direct2', '1')"), '55000', 'primary key of a slice dropped: says so');
$b->q('ALTER TABLE idem_record_1 ADD CONSTRAINT idem_record_1_pkey PRIMARY KEY (idempotency_key)');
is(claim($a, 'direct2'), 'claimed', '... and restored: works');
$b->q('ALTER TABLE idem_record ADD note text');
is(claim($a, 'direct3'), 'claimed', 'a column added by the DBA does not matter');
is($a->q("SELECT idem_complete('direct3', (idem_status('direct3')).owner_token, '1')"), 't', '... nor to completion');

#---------------------------------------------------------------------------
# Settings at creation, another schema
#---------------------------------------------------------------------------

$b->q(<<'SQL');
DROP EXTENSION idempotency CASCADE;
CREATE ACCESS METHOD other TYPE TABLE HANDLER heap_tableam_handler;
CREATE SCHEMA "Idem Potency";
SET default_table_access_method = other;
CREATE EXTENSION idempotency SCHEMA "Idem Potency";
RESET default_table_access_method;
SQL
is($b->q("SELECT string_agg(relname, ' ') FROM ($members) m WHERE relkind = 'r' AND relam <> (SELECT oid FROM pg_am WHERE amname = 'heap')"),
	'~', 'default_table_access_method does not change where the records are');

# Every function, called with qualified names only; usable under any search_path.
# Operators in the tests are qualified too: they must not be the hostile ones.
sub every_call
{
	my ($s, $schema, $prefix) = @_;
	my $t = token(5);
	my @calls = (
		"idem_claim('${prefix}1', '{\"a\": 1}', 'default', '10 s', '0', '$t')", "idem_claim('${prefix}1', '{\"a\": 1}')",
		"idem_claim('${prefix}1', '{\"a\": 2}')", "idem_renew('${prefix}1', '$t', '20 s')", "idem_renew('${prefix}1', '$t')",
		"idem_checkpoint('${prefix}1', '$t', 's', '{\"x\": 1}')", "idem_checkpoint('${prefix}1', '$t', 's2', '2')",
		"idem_status('${prefix}1')", "idem_complete('${prefix}1', '$t', '{\"r\": 1}', '\\x00')",
		"idem_complete('${prefix}1', '$t', '{\"r\": 1}', '\\x00')", "idem_claim('${prefix}1', '{\"a\": 1}')",
		"idem_claim('${prefix}2', token => '$t')", "idem_fail('${prefix}2', '$t', 'retryable', 'm', 'c', '0')",
		"idem_claim('${prefix}2')", "idem_claim('${prefix}3', token => '$t')", "idem_fail('${prefix}3', '$t', 'permanent', 'm')",
		"idem_claim('${prefix}3')", "idem_claim('${prefix}4', token => '$t')", "idem_fail('${prefix}4', '$t', 'unknown')", "idem_claim('${prefix}4')",
		"idem_claim('${prefix}5', token => '$t')", "idem_release('${prefix}5', '$t')", "idem_claim('${prefix}6', wait => '1 ms')",
		"idem_key('t', 'o', 'b')", "idem_key_parts('t:o:b')", "idem_downstream_key('k', 's')", "idem_canonical('{\"b\": 1, \"a\": [1.0]}')",
		"idem_digest('{\"b\": 1}')", "idem_digest('{\"b\": 1, \"c\": 2}', '{/c}')", "idem_keyed_digest('{\"b\": 1}', '\\x01')",
		"idem_grant('client_role', 'client')", "idem_grant('client_role', 'monitor')", "idem_grant('client_role', 'operator')");
	my %optional = (
		idem_backoff  => ["idem_backoff(3, '1 s', 2, '1 min', 'full')"],
		idem_once     => ["idem_once('${prefix}7', '1')"],
		idem_execute  => ["idem_execute('${prefix}8', '1', 'elsewhere.handler(pg_catalog.jsonb)')"],
		idem_claim_many => ["idem_claim_many('{${prefix}9}')"],
		idem_once_many => ["idem_once_many('{${prefix}10}')"],
		idem_claim_due => ["idem_claim_due()"],
		idem_complete_many => [ "idem_claim('${prefix}11', token => '$t')", "idem_complete_many('{${prefix}11}', '{$t}')" ],
		idem_retry_many => ["idem_retry_many('default', 'c', 'test')"],
		idem_stats => ["count(*) FROM $schema.idem_stats"],
		idem_health => ["count(*) FROM $schema.idem_health"],
		idem_reap     => ["idem_reap()"],
		idem_retry    => ["idem_retry('${prefix}3', 'test')"],
		idem_resolve  => ["idem_resolve('${prefix}4', 'failed', reason => 'test')"],
		idem_revoke   => ["idem_revoke('${prefix}6', 'test')"],
		idem_forget   => ["idem_forget('${prefix}1', 'test')"]);
	for my $name (sort keys %optional)
	{
		push @calls, @{ $optional{$name} }
		  if $b->q("SELECT pg_catalog.count(*) FROM pg_catalog.pg_proc WHERE proname OPERATOR(pg_catalog.=) '$name'") > 0
		  || $b->q("SELECT pg_catalog.count(*) FROM pg_catalog.pg_class WHERE relname OPERATOR(pg_catalog.=) '$name' AND relkind OPERATOR(pg_catalog.=) 'v'") > 0;
	}
	return grep { $_ } map { $s->try(/^count/ ? "SELECT pg_catalog.$_" : "SELECT $schema.$_") eq '00000' ? '' : "$_: $s->{err}" } @calls;
}

$b->q(<<'SQL');
CREATE ROLE client_role;
CREATE ROLE mallory LOGIN;
CREATE SCHEMA evil AUTHORIZATION mallory;
CREATE FUNCTION elsewhere.handler(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
SQL
is_deeply([ every_call($b, '"Idem Potency"', 'odd') ], [], 'every function works in a schema with an odd name, off the search_path');
$b->q(q(UPDATE "Idem Potency".idem_policy SET max_attempts = 4 WHERE operation = 'default'));

#---------------------------------------------------------------------------
# A hostile search_path (C12, C83): an ordinary role has put operators, functions,
# types and tables of the same names before pg_catalog.  None may be reached.
#---------------------------------------------------------------------------

my $m = session($node, user => 'mallory');
my $types = '(' . join(', ', map { "'$_'::regtype" } qw(text bytea uuid int2 int4 int8 float8 bool timestamptz interval jsonb oid
	regrole name text[] uuid[] anyarray anycompatiblearray anyelement anycompatible numeric "char" regclass regproc regprocedure)) . ')';
# (what a version does not allow to create is left out; the counts below tell)
$m->try(<<SQL);
SET search_path = pg_catalog;
CREATE FUNCTION evil.strike() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION \$\$captured by a trigger\$\$; END';
SELECT format('CREATE FUNCTION evil.%I(%s) RETURNS %s LANGUAGE plpgsql AS \$f\$ BEGIN RAISE EXCEPTION ''captured by %I''; END \$f\$;',
	proname, pg_get_function_identity_arguments(oid), pg_get_function_result(oid), proname)
FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f' AND NOT proretset AND provariadic = 0 AND proargmodes IS NULL
	AND prorettype IN $types AND NOT EXISTS (SELECT FROM unnest(proargtypes::oid[]) t WHERE t NOT IN $types) \\gexec
SELECT format('CREATE FUNCTION evil.%I(%s%s) RETURNS %s LANGUAGE plpgsql AS \$f\$ BEGIN RAISE EXCEPTION ''captured by operator''; END \$f\$;',
	'op' || oid, CASE WHEN oprleft <> 0 THEN oprleft::regtype || ', ' END, oprright::regtype, oprresult::regtype),
	format('CREATE OPERATOR evil.%s (FUNCTION = evil.%I%s, RIGHTARG = %s);',
	oprname, 'op' || oid, CASE WHEN oprleft <> 0 THEN ', LEFTARG = ' || oprleft::regtype END, oprright::regtype)
FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprright IN $types AND (oprleft IN $types OR oprleft = 0) AND oprresult IN $types \\gexec
SELECT format('CREATE TABLE evil.%I (a int);', n) FROM unnest('{pg_class,pg_proc,pg_namespace,pg_extension,idem_record,idem_record_open,idem_record_1,idem_record_2,idem_record_3,idem_record_4,idem_policy,idem_ring,idem_audit}'::text[]) n \\gexec
SELECT format('CREATE DOMAIN evil.%s AS int;', n) FROM unnest('{regrole,uuid,jsonb,bytea,regprocedure}'::text[]) n \\gexec
SQL
cmp_ok($b->q("SELECT count(*) FROM pg_proc WHERE pronamespace = 'evil'::regnamespace"), '>', 800, 'the trap is set: functions');
cmp_ok($b->q("SELECT count(*) FROM pg_operator WHERE oprnamespace = 'evil'::regnamespace"), '>', 250, '... and operators');
$m->q(q(SELECT pg_catalog.format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA evil TO PUBLIC; GRANT USAGE ON SCHEMA evil TO PUBLIC') \gexec));

my $hostile = 'SET search_path = evil, pg_temp, pg_catalog, public';
my $v = session($node, name => 'victim');
$v->q(<<'SQL');
CREATE TEMP TABLE idem_policy (a int);
CREATE TEMP TABLE idem_record (a int);
CREATE TEMP TABLE idem_record_open (a int);
CREATE TEMP TABLE idem_record_1 (a int);
CREATE TEMP TABLE idem_ring (a int);
CREATE TEMP TABLE idem_audit (a int);
CREATE TEMP TABLE pg_class (a int);
CREATE TEMP TABLE pg_proc (a int);
SQL
$v->q($hostile);
is($v->try('SELECT 1 + 1'), 'P0001', '... it bites whoever does not qualify');
is_deeply([ every_call($v, '"Idem Potency"', 'evil') ], [], 'every function works under a hostile search_path');

# The triggers and constraints of the policy table.
is($v->try(q(INSERT INTO "Idem Potency".idem_policy (operation, lease, digest_ignore) VALUES ('evil', '1 min', '{/a}'))), '00000', 'policies can be inserted');
is($v->try(q(UPDATE "Idem Potency".idem_policy SET max_attempts = 7)), '00000', '... updated');
is($v->try(q(INSERT INTO "Idem Potency".idem_policy (operation, retention) VALUES ('default', '9 days'))), '00000', '... the default row replaced');
is($v->try(q(DELETE FROM "Idem Potency".idem_policy)) ne 'P0001', 1, '... and deleted, or not, without a trap');
is($b->q(q(SELECT retention FROM "Idem Potency".idem_policy WHERE operation = 'default')), '9 days', '... it is there');

# Created under it.
is($v->try('DROP EXTENSION idempotency CASCADE'), '00000', 'dropped under a hostile search_path');
is($v->try('CREATE EXTENSION idempotency SCHEMA "Idem Potency"'), '00000', 'created under a hostile search_path') or diag $v->{err};
is_deeply([ every_call($v, '"Idem Potency"', 'again') ], [], '... and every function works');
is_deeply([ every_call($b, '"Idem Potency"', 'sober') ], [], '... in other sessions too');
$_->quit for $m, $v;
$b->q('DROP EXTENSION idempotency CASCADE; CREATE EXTENSION idempotency; DROP SCHEMA evil CASCADE');

#---------------------------------------------------------------------------
# The tables are reindexed, rewritten and indexed anew under load
#---------------------------------------------------------------------------

$b->q(<<'SQL');
CREATE TABLE business (key text NOT NULL);
CREATE SEQUENCE done_calls;
CREATE FUNCTION step(k text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	r idem_claim_result;
BEGIN
	SELECT * INTO r FROM idem_claim(k, '1');
	PERFORM nextval('done_calls');
	IF r.outcome = 'claimed' THEN
		IF random() < 0.2 THEN
			PERFORM idem_fail(k, r.owner_token, 'retryable', retry_after => '0');
			RETURN;
		END IF;
		PERFORM idem_renew(k, r.owner_token);
		INSERT INTO business VALUES (k);
		PERFORM idem_complete(k, r.owner_token, to_jsonb(k));
	ELSIF r.outcome = 'succeeded' AND r.result_json <> to_jsonb(k) THEN
		RAISE EXCEPTION 'wrong result for %', k;
	END IF;
END $$;
UPDATE idem_policy SET max_attempts = 10000;
SQL
my $script = $node->basedir . '/load.sql';
append_to_file($script, "\\set k random(1, 100000000)\n\\set h random(1, 300)\n"
	  . "SELECT step('once' || :k);\nSELECT step('hot' || :h);\nSELECT step('often' || (:k % 20000));\n");

my $clients = 4;
my $log = $node->basedir . '/load.log';
my $load = fork();
die unless defined $load;
if ($load == 0)
{
	open STDOUT, '>', $log;
	open STDERR, '>&', \*STDOUT;
	my $pgbench = $node->can('installed_command') ? $node->installed_command('pgbench') : 'pgbench';
	exec($pgbench, '-n', '-c', $clients, '-j', 1, '-T', 600, '-M', 'prepared', '-f', $script, $node->connstr('postgres'))
	  or POSIX::_exit(1);
}

# Each step runs while calls go on: it waits for some before and after.
sub under_load
{
	my ($sql) = @_;
	my $at = $b->q('SELECT last_value FROM done_calls');
	wait_until('calls go on', sub { $b->q('SELECT last_value FROM done_calls') > $at + 500 });
	return is($b->try($sql), '00000', "under load: $sql") || diag $b->{err};
}

for my $partition (qw(idem_record_open idem_record_1))
{
	under_load("REINDEX INDEX CONCURRENTLY ${partition}_pkey") for 1 .. 3;
	under_load("VACUUM FULL $partition");
	under_load("CREATE INDEX CONCURRENTLY ${partition}_dba ON $partition (updated_at, status)");
	under_load("REINDEX TABLE CONCURRENTLY $partition");
	under_load("VACUUM $partition");
	under_load("CLUSTER $partition USING ${partition}_pkey");
}
under_load('CREATE INDEX CONCURRENTLY idem_record_open_partial ON idem_record_open (lease_until) WHERE status = \'processing\'');
under_load('ANALYZE idem_record');
under_load('ALTER TABLE idem_record_open SET (fillfactor = 50)');
under_load('SELECT 1');
is(kill(0, $load), 1, 'the load is still on');
kill 'INT', $load;
waitpid $load, 0;
my $output = slurp_file($log);
unlike($output, qr/ERROR|FATAL|aborted|wrong result/, 'no call failed under it') or diag $output;

is($b->q('SELECT count(*) FROM (SELECT key FROM business GROUP BY key HAVING count(*) > 1) d'), '0', '... nothing was done twice');
is($b->q('SELECT count(*) FROM (SELECT FROM idem_record GROUP BY idempotency_key HAVING count(*) > 1) d'), '0', '... no key is there twice');
is($b->q(<<'SQL'), '0', '... records and business rows agree');
SELECT count(*) FROM business b FULL JOIN (SELECT * FROM idem_record WHERE status = 'succeeded') r ON r.idempotency_key = b.key
WHERE b.key IS NULL OR r.status IS NULL
SQL
note $b->q('SELECT count(*) || \' business rows\' FROM business');

SKIP:
{
	skip 'amcheck is not installed', 1
	  if $b->q("SELECT count(*) FROM pg_available_extensions WHERE name = 'amcheck'") == 0;
	$b->q('CREATE EXTENSION amcheck');
	is($b->try(<<'SQL'), '00000', 'amcheck: every row is in every index of the tables') or diag $b->{err};
SELECT bt_index_parent_check(indexrelid, true) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
WHERE c.relname LIKE 'idem_record\_%' AND c.relkind = 'r' AND indpred IS NULL
SQL
}

# The partial index holds what it should.
is($b->q(<<'SQL'), 't', 'the partial index of a DBA is kept up');
SELECT set_config('enable_seqscan', 'off', false) IS NOT NULL AND set_config('enable_bitmapscan', 'off', false) IS NOT NULL
SQL
is($b->q("SELECT count(*) FROM idem_record_open WHERE status = 'processing' AND lease_until > '-infinity'"),
	$a->q("SET enable_indexscan = off; SET enable_bitmapscan = off; SET enable_indexonlyscan = off; SELECT count(*) FROM idem_record_open WHERE status = 'processing' AND lease_until > '-infinity'"),
	'... counted by index and by table');

$_->quit for $a, $b;
done_testing();
