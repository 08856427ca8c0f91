# Every function of the extension with hostile arguments, made from the catalog: each
# argument NULL, by position and by name, all of them NULL, and each argument with what its type
# has of edges, for keys in every state.  A function or an argument that is added later is covered;
# one of a type that is not listed here fails the test.
#
# Each call runs in a subtransaction.  It must answer, or fail with a documented SQLSTATE;
# the session goes on, nothing stays locked, and the tables stay in order.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

# README "Errors" and docs/: by whatever function.
my %documented = map { $_ => 1 } qw(00000 ID001 ID002 ID003 22004 22023 54000 54001 42501 25006 25000 40001 0A000);
# ... and by these only.
my %documented_for = (
	idem_execute => [qw(42883 42P13)],     # no such handler, or none that can be one
	idem_grant => [qw(42704)],             # no such role
);
# A call may answer NULL as a whole.
my %may_be_null = map { $_ => 1 } qw(idem_renew idem_status idem_key_parts);

# ---- values -----------------------------------------------------------------

# Valid values by function.argument or by argument; KEY and TOKEN are those of the state.
my %good = (
	key => "'KEY'", keys => "ARRAY['KEY']", token => "'TOKEN'", tokens => "ARRAY['TOKEN']::uuid[]",
	'idem_claim.token' => 'NULL', digest => 'NULL',
	operation => "'op'", tenant => "'t'", business_id => "'b'", step => "'s'", value => "'1'",
	request => q('{"a": 1}'), requests => q(ARRAY['{"a": 1}']::jsonb[]), result => q('{"r": 1}'), results => q(ARRAY['{"r": 1}']::jsonb[]),
	body => q('\x00ff'), ignore => q('{/a}'), secret => "'secret'",
	lease => "'10 s'", wait => "'0'", retry_after => "'1 s'", kind => "'retryable'",
	error_code => "'E'", error_message => "'m'", reason => "'because'", outcome => "'succeeded'",
	handler => "'handler(jsonb)'", max_records => '10',
	attempt => '1', base => "'1 s'", factor => '2', cap => "'1 min'", jitter => "'none'",
	role => "'hostile_client'", level => "'client'",
	# outcome "succeeded" goes without an error
	'idem_resolve.error_code' => 'NULL', 'idem_resolve.error_message' => 'NULL',);

# Valid values of a type, for an argument of another name.
my %good_of_type = (
	text => "'x'", jsonb => "'{}'", uuid => 'gen_random_uuid()', bytea => "'x'", interval => "'1 s'", integer => '1',
	'double precision' => '1', boolean => 'true', bigint => '1', 'timestamp with time zone' => 'now()',
	regprocedure => "'handler(jsonb)'", regrole => "'hostile_client'",);

my @numbers = ('0', '-1', '1', '2', '10000', '10001', '100000', '100001');

# Hostile values; what begins with ! takes long: given for two states only, and not kept.
my %hostile = (
	text => [
		"''", "' '", q(E'\t\n'), "'%'", "':'", "'a:b:c:d'", "'default'", q(E'\x01\x7f'), q(E'\u00e9\U0001F600\uFFFF\uE000'),
		(map { "repeat('x', $_)" } 127, 128, 129, 256, 257, 1023, 1024, 1025, 8192, 8193, 65536),
		"repeat(U&'\\00e9', 512)", "repeat(U&'\\00e9', 513)", "repeat(':', 1024)", "repeat('%', 400)",
		"'succeeded'", "'failed'", "'unknown'", "'permanent'", "'exhausted'", "'full'", "'operator'",
		"(SELECT short FROM stored)", "!repeat('x', 1048576)", "!(SELECT long FROM stored)",
	],
	jsonb => [
		"'null'", "'{}'", "'[]'", "'[[]]'", q('""'), q('0'), q('-0.0'), q('{"": {"": []}}'), q('"\u0001\ud83d\ude00"'),
		"'1e100000'", "'-1e-16000'", "(repeat('9', 131072))::jsonb", "('0.' || repeat('9', 16383))::jsonb",
		"(SELECT short_json FROM stored)", "!(SELECT long_json FROM stored)", "!to_jsonb(repeat('x', 1048576))",
		"(repeat('[', 1000) || repeat(']', 1000))::jsonb",
		q[(repeat('{"a":', 1000) || '1' || repeat('}', 1000))::jsonb],
		"!(SELECT deep FROM stored)",
		"!(SELECT jsonb_agg(g) FROM generate_series(1, 100000) g)",
		"!(SELECT jsonb_object_agg('k' || g, g) FROM generate_series(1, 10000) g)",
	],
	uuid => [
		"'00000000-0000-0000-0000-000000000000'", "'ffffffff-ffff-ffff-ffff-ffffffffffff'",
		map { "'" . token($_) . "'" } 1 .. 4, 99
	],
	bytea => [
		"''", q('\x00'), q('\xff'), q('\xc3'), q('\xfffe00'), q('\x01'), q('\x81'), "sha256('x')", q('\x01'::bytea || sha256('x')),
		"decode(repeat('01', 128), 'hex')", "decode(repeat('01', 129), 'hex')", "(SELECT short_bytes FROM stored)",
		"!decode(repeat('ff', 1048576), 'hex')", "!(SELECT long_bytes FROM stored)", "!decode(repeat('ff', 1048577), 'hex')",
	],
	interval => [
		"'0'", "'1 us'", "'-1 us'", "'-1 day'", "'1 day'", "'1 month'", "'1 month -30 days'", "'-1 month'", "'1 year'", "'366 days'",
		"'366 days 1 us'", "'-366 days'", "'178000000 years'", "'-178000000 years'", "make_interval(days => 2147483647)",
		"make_interval(days => -2147483647 - 1)", "'2562047788:00:54.775807'", "'-2562047788:00:54.775807'",
		"'106751992 days -2562047788:00:54'", "'-106751992 days 2562047788:00:54'", "'2147483647 days 2562047788:00:54.775807'",
	],
	integer => [ @numbers, '-2147483648', '2147483647' ],
	bigint => [ @numbers, '-9223372036854775808', '9223372036854775807' ],
	'double precision' => [
		"'NaN'", "'Infinity'", "'-Infinity'", '0', "'-0'", '-1', '0.999999999', '1', '1000', '1000.1', '1e308', '5e-324', '-1e308'
	],
	boolean => [ 'true', 'false' ],
	'timestamp with time zone' => [ "'infinity'", "'-infinity'", "'epoch'", "'4714-11-24 BC'", "'294276-12-31'" ],
	regprocedure => [],     # from the catalog, below
	regrole => [ '0::oid', '4294967295::oid', "'pg_monitor'", "'postgres'", "'hostile_dropped'" ],);

# Arrays: shapes, and one element of everything that the type has.
sub hostile_array
{
	my ($type, $good) = @_;

	my $element = $good =~ /^ARRAY\[(.*?)\]/ ? $1 : $good_of_type{$type};
	return (
		"'{}'", 'ARRAY[NULL]', "ARRAY[$element, NULL]", "ARRAY[NULL, $element]", "ARRAY[[$element, $element], [$element, $element]]",
		"ARRAY[[$element]]", "('[5:6]=' || ARRAY[$element, $element]::$type\[]::text)", "('[-1:-1]=' || ARRAY[$element]::$type\[]::text)",
		"ARRAY[$element, $element, $element]", "array_fill($element\::$type, ARRAY[1000])",
		"array_fill($element\::$type, ARRAY[1], ARRAY[2147483646])",
		"!array_fill($element\::$type, ARRAY[100000])",
		(map { /^(!?)(.*)/s; "$1ARRAY[$2]" } @{ $hostile{$type} }));
}

# ---- the server, and keys in every state ------------------------------------

my $node = new_node('hostile', conf => "statement_timeout = '30s'\nlock_timeout = '20s'\nrestart_after_crash = on\n");
my $s;

sub connect_again
{
	my ($dbname) = @_;
	$s = session($node, dbname => $dbname, name => 'hostile');
	$s->q("SET client_min_messages = error; SET max_stack_depth = '1MB'");
	return;
}

my %token = (held => token(1), lapsed => token(2), done => token(3), failed => token(4), unknown => token(5), waiting => token(6),
	due => token(7), new => token(8));

sub prepare
{
	my ($dbname) = @_;
	connect_again($dbname);
	$s->q(<<'SQL');
CREATE FUNCTION handler(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION handler3(text, jsonb, int) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
CREATE FUNCTION handler_strict(jsonb) RETURNS jsonb LANGUAGE sql STRICT AS 'SELECT $1';
CREATE FUNCTION handler_null(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
CREATE FUNCTION handler_fails(jsonb) RETURNS jsonb LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END';
CREATE FUNCTION handler_no_json(jsonb) RETURNS text LANGUAGE sql AS 'SELECT ''{''';
CREATE FUNCTION handler_big(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(repeat(''x'', 2000000))';
CREATE FUNCTION handler_record(jsonb) RETURNS record LANGUAGE sql AS 'SELECT 1, 2';
CREATE FUNCTION handler_set(jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION handler_out(jsonb, OUT a int, OUT b int) LANGUAGE sql AS 'SELECT 1, 2';
CREATE FUNCTION handler_variadic(VARIADIC jsonb[]) RETURNS jsonb LANGUAGE sql AS 'SELECT $1[1]';
CREATE FUNCTION handler_default(jsonb, int DEFAULT 1) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
CREATE DOMAIN never AS jsonb CHECK (VALUE IS NULL);
CREATE FUNCTION handler_domain(jsonb) RETURNS never LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE FUNCTION handler_broken(jsonb) RETURNS never LANGUAGE plpgsql AS 'BEGIN RETURN $1; END';
CREATE PROCEDURE handler_procedure(jsonb) LANGUAGE sql AS 'SELECT 1';
CREATE AGGREGATE handler_aggregate(jsonb) (sfunc = jsonb_concat, stype = jsonb);
CREATE FUNCTION handler_nested(jsonb) RETURNS jsonb LANGUAGE plpgsql AS
	$$BEGIN RETURN to_jsonb(idem_once('nested')); END$$;

INSERT INTO idem_policy (operation, store_request, max_attempts, on_lease_expiry) VALUES ('op', true, 100, 'retry'),
	('u', true, 100, 'unknown');

CREATE TABLE stored (short text, long text, short_json jsonb, long_json jsonb, deep jsonb, short_bytes bytea, long_bytes bytea);
ALTER TABLE stored ALTER long SET STORAGE EXTERNAL;
INSERT INTO stored SELECT 'x', repeat('long', 300000), '{"a": 1}', (SELECT jsonb_agg(md5(g::text)) FROM generate_series(1, 5000) g),
	NULL, 'x', decode(repeat('ff00', 300000), 'hex');
-- the deepest document that the server itself reads and writes
DO $$
DECLARE
	text text;
BEGIN
	FOR i IN REVERSE 80 .. 10 LOOP
		BEGIN
			UPDATE stored SET deep = (repeat('[', i * 100) || repeat(']', i * 100))::jsonb;
			text := (SELECT deep::text FROM stored);
			EXIT;
		EXCEPTION WHEN statement_too_complex THEN
		END;
	END LOOP;
END $$;

-- One call in a subtransaction, which is undone or kept: SQLSTATE, rows, rows without an answer.
CREATE FUNCTION attempt(call text, undo boolean, OUT state text, OUT message text, OUT rows bigint, OUT nulls bigint)
LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		EXECUTE call INTO rows, nulls;
		state := '00000';
		IF undo THEN
			RAISE EXCEPTION USING ERRCODE = 'ZZUND';
		END IF;
	EXCEPTION WHEN OTHERS THEN
		IF SQLSTATE <> 'ZZUND' THEN
			state := SQLSTATE;
			message := SQLERRM;
		END IF;
	END;
END $$;
CREATE TABLE calls (n serial, function text, what text, call text, valid boolean, heavy boolean);
SQL
	foreach my $state (sort keys %token)
	{
		next if $state eq 'new';
		my ($t, $key) = ($token{$state}, "t:op:$state");
		$s->q("SET idempotency.clock_offset = '-1h'") if $state eq 'lapsed' || $state eq 'due';
		my $operation = $state eq 'held' ? ", lease => '1 day'" : '';
		$s->q(qq(SELECT idem_claim('$key', '{"a": 1}', token => '$t'$operation)));
		$s->q(qq(SELECT idem_complete('$key', '$t', '{"r": 1}'))) if $state eq 'done';
		$s->q("SELECT idem_fail('$key', '$t', 'permanent', 'm', 'E')") if $state eq 'failed';
		$s->q("SELECT idem_fail('$key', '$t', 'unknown', 'm', 'E')") if $state eq 'unknown';
		$s->q("SELECT idem_fail('$key', '$t', 'retryable', 'm', 'E', '1 day')") if $state eq 'waiting';
		$s->q("SELECT idem_fail('$key', '$t', 'retryable', 'm', 'E', '0')") if $state eq 'due';
		$s->q("RESET idempotency.clock_offset");
	}
	is($s->q('SELECT count(*) FROM idem_record'), 7, "$dbname: keys in every state");
	return;
}

# ---- calls, from the catalog ------------------------------------------------

# The functions of the extension: name, arguments as [name, type], what stands for "no answer".
sub functions
{
	my @result;

	foreach (split /\n/, $s->q(<<'SQL'))
SELECT p.proname, p.prorettype::regtype,
	(SELECT string_agg(p.proargnames[i] || '=' || format_type(p.proargtypes[i - 1], NULL), ';' ORDER BY i)
	 FROM generate_series(1, p.pronargs) i),
	(SELECT min(c) FROM unnest(coalesce(p.proargnames[p.pronargs + 1:], '{}') || ARRAY(SELECT attname::text FROM pg_attribute
		JOIN pg_type t ON t.typrelid = attrelid WHERE t.oid = p.prorettype)) c WHERE c IN ('outcome', 'completed', 'first')),
	p.pronargs
FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
	AND d.refclassid = 'pg_extension'::regclass
	JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'idempotency'
WHERE p.prokind = 'f' ORDER BY p.proname
SQL
	{
		my ($name, $type, $arguments, $column, $count) = split /\|/;
		my @arguments = $arguments eq '~' ? () : map { [ split /=/ ] } split /;/, $arguments;
		is(scalar @arguments, $count, "every argument of $name has a name") if @arguments != $count;
		push @result, { name => $name, type => $type, arguments => \@arguments,
			null => $column ne '~' ? "r.$column IS NULL" : 'r IS NULL' };
	}
	return @result;
}

my %unknown_type;

sub good_value
{
	my ($function, $argument) = @_;
	my ($name, $type) = @$argument;

	(my $element = $type) =~ s/\[\]$//;
	my $value = $good{"$function->{name}.$name"} // $good{$name}
	  // ($element ne $type && $good_of_type{$element} ? "ARRAY[$good_of_type{$element}]" : $good_of_type{$type});
	$unknown_type{$type} = 1 unless defined $value && $hostile{$element};
	return $value // 'NULL';
}

sub hostile_values
{
	my ($function, $argument) = @_;
	my $type = $argument->[1];

	return hostile_array($1, good_value($function, $argument)) if $type =~ /^(.*)\[\]$/ && $hostile{$1};
	return @{ $hostile{$type} || [] };
}

# The text of a call with some arguments replaced.  A new key is new to every call.
my $new_keys = 0;

sub call_text
{
	my ($function, $state, $values, $by_name) = @_;
	my $key = "t:op:$state" . ($state eq 'new' ? ++$new_keys : '');
	my @list;

	foreach my $i (0 .. $#{ $function->{arguments} })
	{
		my ($name, $type) = @{ $function->{arguments}[$i] };
		my $value = $values->{$i} // good_value($function, $function->{arguments}[$i]);
		$value =~ s/KEY/$key/g;
		$value =~ s/TOKEN/$token{$state}/g;
		push @list, ($by_name ? "$name => " : '') . "($value)::$type";
	}
	my $call = "$function->{name}(" . join(', ', @list) . ')';
	return "SELECT count(*), count(*) FILTER (WHERE r IS NULL) FROM (SELECT $call AS r OFFSET 0) x"
	  if $function->{type} eq 'trigger';
	return "SELECT count(*), count(*) FILTER (WHERE $function->{null}) FROM $call AS r";
}

my @buffer;

sub add_call
{
	my ($function, $what, $call, $valid, $heavy) = @_;
	push @buffer, sprintf '($q$%s$q$, $q$%s$q$, $q$%s$q$, %s, %s)', $function->{name}, $what, $call,
	  $valid ? 'true' : 'false', $heavy ? 'true' : 'false';
	flush_calls() if @buffer >= 500;
	return;
}

sub flush_calls
{
	$s->q('INSERT INTO calls (function, what, call, valid, heavy) VALUES ' . join(', ', @buffer)) if @buffer;
	@buffer = ();
	return;
}

sub make_calls
{
	my ($function) = @_;
	my @arguments = @{ $function->{arguments} };
	my %all_null = map { $_ => 'NULL' } 0 .. $#arguments;
	my $first = 1;

	# the states matter only to functions that are given a key
	my @states = grep { $_ eq 'new' || grep { $_->[0] =~ /^keys?$/ } @arguments } sort keys %token;
	foreach my $state (@states)
	{
		my $add = sub {
			my ($what, $values, $by_name, $heavy) = @_;
			add_call($function, "$state: $what", call_text($function, $state, $values, $by_name), !%$values, $heavy);
		};

		$add->('valid', {}, 0);
		next unless @arguments;
		$add->('valid by name', {}, 1);
		$add->('all NULL', \%all_null, 0);
		$add->('all NULL by name', \%all_null, 1);
		foreach my $i (0 .. $#arguments)
		{
			my $name = $arguments[$i][0];
			$add->("$name NULL", { $i => 'NULL' }, 0);
			$add->("$name NULL by name", { $i => 'NULL' }, 1);
			foreach my $value (hostile_values($function, $arguments[$i]))
			{
				my $heavy = ($value =~ s/^!//);
				# a wait that is allowed, where there is nothing to wait for
				my $waits = $name eq 'wait' && $value =~ /^'(1 day|366 days)'$/;
				next if $waits && $state ne 'new' && $state ne 'done';
				next if $heavy && $state ne 'new' && $state ne 'held';
				$add->("$name = " . substr($value, 0, 60), { $i => $value }, 0, $heavy || $waits);
			}
		}
		# arrays that fit each other
		my @arrays = grep { $arguments[$_][1] =~ /\[\]$/ } 0 .. $#arguments;
		next if @arrays < 2;
		my @shapes = map { [ hostile_values($function, $arguments[$_]) ] } @arrays;
		foreach my $shape (0 .. 11)
		{
			my %values = map { $arrays[$_] => $shapes[$_][$shape] } 0 .. $#arrays;
			my $heavy = grep { /^!/ } values %values;
			s/^!// for values %values;
			$add->("all arrays like $values{$arrays[0]}", \%values, 0, $heavy) if !$heavy || $state eq 'new';
		}
	}
	flush_calls();
	return;
}

# ---- running them -----------------------------------------------------------

# Runs calls, in one transaction; returns number|SQLSTATE|rows|rows without an answer for each, and
# before the end of the transaction the locks of keys that it still has.  If the backend dies, finds
# the call that kills it.
sub run_calls
{
	my ($dbname, $where, $undo) = @_;
	my $sql = "SELECT n || '|' || state || '|' || coalesce(rows::text, '') || '|' || coalesce(nulls::text, '')
		FROM calls, attempt(call, $undo) WHERE $where ORDER BY n";

	my $locks = "SELECT 'lock|' || locktype FROM pg_locks WHERE pid = pg_backend_pid()
		AND locktype NOT IN ('relation', 'virtualxid', 'transactionid', 'object')";

	my $state = $s->try("BEGIN; $sql; $locks; COMMIT");
	return $s->{out} if $state eq '00000';
	return undef unless $state eq '08006';
	wait_until('the server is back', sub { eval { $node->safe_psql($dbname, 'SELECT 1') } });
	connect_again($dbname);
	foreach my $n (split /\n/, $s->q("SELECT n FROM calls WHERE $where ORDER BY n"))
	{
		next if $s->try("SELECT attempt(call, $undo) FROM calls WHERE n = $n") ne '08006';
		wait_until('the server is back', sub { eval { $node->safe_psql($dbname, 'SELECT 1') } });
		connect_again($dbname);
		diag('THE BACKEND DIES: ' . $s->q("SELECT call FROM calls WHERE n = $n"));
		last;
	}
	return undef;
}

my %seen;
my $ran = 0;

# Compares what calls gave with what they may give.
sub check_calls
{
	my ($dbname, $function, $undo) = @_;
	my $name = $function->{name};
	my $where = "function = '$name'" . ($undo eq 'true' ? '' : ' AND NOT heavy');
	my %allowed = (%documented, map { $_ => 1 } @{ $documented_for{$name} || [] });
	my @wrong;
	my $valid = 0;
	my $locks = 0;

	%allowed = ('39P01' => 1) if $function->{type} eq 'trigger';
	my $out = run_calls($dbname, $where, $undo);
	if (!defined $out)
	{
		fail("$dbname: $name survives");
		diag(substr $s->{err}, 0, 500);
		return;
	}
	my %valid = map { $_ => 1 } split /\n/, $s->q("SELECT n FROM calls WHERE $where AND valid");
	foreach (split /\n/, $out)
	{
		my ($n, $state, $rows, $nulls) = split /\|/, $_, -1;
		if ($n eq 'lock')
		{
			$locks++;
			next;
		}
		$ran++;
		$seen{$state}++;
		$valid++ if $valid{$n} && $state eq '00000';
		push @wrong, "$n gave $state" unless $allowed{$state};
		push @wrong, "$n answered NULL $nulls times in $rows rows"
		  if $state eq '00000' && $nulls && !$may_be_null{$name};
	}
	is(scalar @wrong, 0, "$dbname: $name, undo = $undo: documented answers only");
	foreach (splice @wrong, 0, 5)
	{
		/^(\d+)/;
		diag("$_: " . $s->q("SELECT what || ', ' || (attempt(call, true)).message || ', ' || left(call, 400) FROM calls WHERE n = $1"));
	}
	is($locks, 0, "$dbname: $name, undo = $undo: no key is locked after the call");
	# a call that can never succeed tests nothing but its first check
	ok($valid > 0 || $function->{type} eq 'trigger', "$dbname: $name: a valid call succeeds in some state") if $undo eq 'true';
	return;
}

sub check_order
{
	my ($dbname, $when) = @_;
	my $observer = session($node, dbname => $dbname, name => 'observer');

	is_rows($observer, 'SELECT * FROM idem_check()', '', "$dbname: idem_check() finds nothing $when");
	is_rows($observer, 'SELECT locktype, mode FROM pg_locks WHERE pid = ' . $s->pid, '', "$dbname: no lock is left $when");
	is_rows($observer, "SELECT state FROM pg_stat_activity WHERE pid = " . $s->pid, 'idle', "$dbname: no transaction is open $when");
	$observer->quit;
	return;
}

# ---- everything, in UTF-8 ---------------------------------------------------

$node->safe_psql('postgres', 'CREATE ROLE hostile_client; CREATE ROLE hostile_dropped');
prepare('postgres');
is($s->try(q(SELECT '"\u0000"'::jsonb)), '22P05', 'jsonb has no zero character');
is($s->try(q(SELECT '"\ud800"'::jsonb)), '22P02', 'jsonb has no lone surrogate');
isnt($s->try(q(SELECT convert_from('\xff', 'UTF8'))), '00000', 'text has no invalid UTF-8');

push @{ $hostile{interval} }, "'infinity'", "'-infinity'" if $s->q('SHOW server_version_num') >= 170000;
# functions of all kinds, and all that look like a handler to the catalog but ours, which are called one by one
$hostile{regprocedure} = [
	'0::oid', '4294967295::oid', '1::oid',
	map { "$_\::oid" } split /\n/, $s->q(<<'SQL') ];
SELECT DISTINCT oid FROM (
	SELECT oid FROM pg_proc WHERE proname ~ '^handler' OR (pg_get_function_identity_arguments(oid) IN ('jsonb', 'text, jsonb, integer'))
	UNION ALL SELECT min(oid::int)::oid FROM pg_proc GROUP BY prokind, proretset, proisstrict
	UNION ALL SELECT min(oid::int)::oid FROM pg_proc WHERE prorettype::regtype::text IN
		('trigger', 'internal', 'cstring', 'void', 'record', 'anyelement', 'event_trigger', 'index_am_handler') GROUP BY prorettype
) x
SQL

my @functions = functions();
cmp_ok(scalar @functions, '>=', 29, 'functions of the extension');
make_calls($_) foreach @functions;
is(join(', ', sort keys %unknown_type), '', 'values are known for the type of every argument');
cmp_ok($s->q('SELECT count(*) FROM calls'), '>', 5000, 'calls');
$node->safe_psql('postgres', 'DROP ROLE hostile_dropped');
$s->q("UPDATE calls SET call = replace(call, '(''hostile_dropped'')', '(4294967294::oid)')");

# what cannot be a handler is refused before anything is claimed
foreach my $handler (qw(handler_set handler_aggregate handler_procedure handler_record handler_out handler_variadic handler_default))
{
	is($s->try("SELECT idem_execute('t:op:handlers', '{}', (SELECT oid FROM pg_proc WHERE proname = '$handler'))"),
		'42P13', "$handler is no handler");
}

check_calls('postgres', $_, 'true') foreach @functions;
check_order('postgres', 'after calls that are undone');
is($s->q('SELECT count(*) FROM idem_record'), 7, 'they left no record');
is($s->q('SELECT count(*) FROM idem_audit'), 0, 'they left no audit');

# Errors do not make the session grow.
my $used = "SELECT sum(used_bytes) FROM pg_backend_memory_contexts";
my $failing = "SELECT count(*) FROM calls, attempt(call, true) WHERE what LIKE '%NULL%' AND function <> 'idem_grant'";
$s->q($failing);
my $before = $s->q($used);
$s->q($failing) for 1 .. 3;
cmp_ok($s->q($used) - $before, '<', 100_000, 'memory of the session after failing calls');

check_calls('postgres', $_, 'false') foreach @functions;
check_order('postgres', 'after calls that are kept');
cmp_ok($s->q('SELECT count(*) FROM idem_record'), '>', 150, 'they left records');
$s->q('SELECT idem_reap(100000)');
check_order('postgres', 'after the reaper');

foreach my $state (qw(22004 22023 54000 ID001 ID002 ID003 42P13 42883 54001))
{
	cmp_ok($seen{$state} // 0, '>', 0, "$state was met");
}
note("$ran calls: " . join(', ', map { "$_ $seen{$_}" } sort keys %seen));
$s->quit;

# ---- bytes that are no text, in a database without an encoding ---------------

$node->safe_psql('postgres', "CREATE DATABASE bytes ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0");
$node->safe_psql('bytes', 'CREATE EXTENSION idempotency CASCADE');
my @bytes = (q(E'\xff'), q(E'\xc3'), q(E'\xed\xa0\x80'), q(E'\xf8\x88\x80\x80\x80'), q(repeat(E'\xc3', 1024)), q(repeat(E'\xff', 8193)));
%hostile = map { $_ => [] } keys %hostile;
$hostile{text} = [@bytes];
$hostile{jsonb} = [ map { "to_jsonb($_\::text)" } @bytes ];
push @{ $hostile{jsonb} }, map { "jsonb_build_object($_, 1, 'a', 2)" } @bytes;
prepare('bytes');
@functions = functions();
make_calls($_) foreach @functions;
$s->q('DELETE FROM calls WHERE heavy');
check_calls('bytes', $_, 'true') foreach @functions;
check_calls('bytes', $_, 'false') foreach @functions;
check_order('bytes', 'after calls that are kept');
$s->quit;

unlike(slurp_file($node->logfile), qr/PANIC:|TRAP:|terminated by signal|leaked|XX000/, 'nothing in the log');
$node->stop;
done_testing();
