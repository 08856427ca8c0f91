# Canonical texts, digests and downstream keys against JavaScript.
#
# test/digest/generate.js makes random rows and what is expected of them, from
# JavaScript's own String(), JSON.stringify() and sort() and from node's crypto;
# here they are loaded and compared in SQL.  (C91, C92, C93, C94, C96, C99)
#
#	IDEM_NODE_SEED		seed, to repeat a run; the default never changes
#	IDEM_NODE_NUMBERS	how many numbers, at least a million by default
#	IDEM_NO_NODE		skip the whole file

use strict;
use warnings;
use File::Spec;
use FindBin;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

plan skip_all => 'IDEM_NO_NODE is set' if $ENV{IDEM_NO_NODE};

my $seed    = $ENV{IDEM_NODE_SEED}    || 8785;
my $numbers = $ENV{IDEM_NODE_NUMBERS} || 1_500_000;
my $documents = 40_000;
my $keys      = 20_000;
my $generate  = "$FindBin::RealBin/../digest/generate.js";
my $dir       = File::Spec->rel2abs(PostgreSQL::Test::Utils::tempdir());

sub node_runs
{
	my ($version, $error);

	return eval { IPC::Run::run([ 'node', '--version' ], '>', \$version, '2>', \$error) };
}

if (!node_runs())
{
	fail('Node.js is here (set IDEM_NO_NODE to do without)');
	done_testing();
	exit;
}
note("seed $seed, node " . `node --version`);

# Lines of output of the generator.
sub from_node
{
	my @command = ('node', $generate, @_);
	my ($out, $error);

	IPC::Run::run(\@command, '>', \$out, '2>', \$error) or die "@command: $error";
	return split /\n/, $out;
}

my $server = PostgreSQL::Test::Cluster->new('digest_node');
$server->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$server->append_conf('postgresql.conf', "log_statement = none\nautovacuum = off\nfsync = off\n");
$server->start;
$server->safe_psql('postgres', 'CREATE EXTENSION idempotency CASCADE');

# Makes a table of what the generator prints.
sub load
{
	my ($mode, $count, $columns) = @_;
	my @command = ('node', $generate, $mode, $seed, $count);
	my $error;

	IPC::Run::run(\@command, '>', "$dir/$mode", '2>', \$error) or die "@command: $error";
	$server->safe_psql('postgres', "CREATE UNLOGGED TABLE $mode ($columns);
		COPY $mode FROM '$dir/$mode'");
	unlink "$dir/$mode";
	is($server->safe_psql('postgres', "SELECT count(*) FROM $mode"), $count, "$count $mode");
	return;
}

# The query must find nothing; it shows a few rows of what it finds.
sub nothing
{
	my ($name, $sql) = @_;

	is($server->safe_psql('postgres', "$sql LIMIT 5"), '', $name);
	return;
}

# Numbers: the text that JavaScript prints, whatever way the value was written.
load('numbers', $numbers, 'spelling text, js text');
nothing('numbers as JavaScript prints them',
	'SELECT spelling, js, idem_canonical(spelling::jsonb) FROM numbers
	 WHERE idem_canonical(spelling::jsonb) IS DISTINCT FROM js');
is($server->safe_psql('postgres', 'SELECT count(DISTINCT js) > count(*) * 0.6 FROM numbers'),
	't', 'most numbers are different ones');

# Documents
load('documents', $documents, 'doc jsonb, pointers jsonb, canonical text, digest text, keyed text');
my $ignore = 'ARRAY(SELECT jsonb_array_elements_text(pointers))';
nothing('canonical texts',
	"SELECT doc, pointers, canonical FROM documents
	 WHERE idem_canonical(doc, $ignore) IS DISTINCT FROM canonical");
nothing('digests',
	"SELECT doc, pointers FROM documents
	 WHERE encode(idem_digest(doc, $ignore), 'hex') IS DISTINCT FROM digest");
nothing('keyed digests',
	"SELECT doc, pointers FROM documents
	 WHERE encode(idem_keyed_digest(doc, 'a secret of the test', $ignore), 'hex') IS DISTINCT FROM keyed");
nothing('the canonical text of a canonical text is the same',
	'SELECT canonical FROM documents WHERE idem_canonical(canonical::jsonb) IS DISTINCT FROM canonical');
nothing('the canonical text is the same value',
	'SELECT doc FROM documents WHERE idem_canonical(doc)::jsonb IS DISTINCT FROM doc');
is($server->safe_psql('postgres', 'SELECT count(DISTINCT canonical) = count(DISTINCT digest) FROM documents'),
	't', 'different texts have different digests');
is($server->safe_psql('postgres', 'SELECT count(*) > 1000 FROM documents WHERE idem_canonical(doc) <> canonical'),
	't', 'many pointers lead somewhere');

# Downstream keys
load('keys', $keys, 'key text, step text, uuid uuid');
nothing('downstream keys',
	'SELECT key, step, uuid FROM keys WHERE idem_downstream_key(key, step) IS DISTINCT FROM uuid');

# The same characters have the same digest in every server encoding (C91).  The
# last pair of names sorts by UTF-16 code units in neither UTF-8 nor the
# encoding itself.
my %sample = (
	UTF8 => "{\"\xc3\xa9\": \"\xc3\xbc\", \"z\": [\"\xc3\xa9\\n\", 1.0], \"\xe4\xb8\xad\": 1, \"\xf0\x9f\x98\x80\": 2, \"\xef\xbf\xbd\": 3}",
	LATIN1 => "{\"\xc3\xa9\": \"\xc3\xbc\", \"z\": [\"\xc3\xa9\\n\", 1.0], \"~\": 1}",
	EUC_CN => "{\"\xe4\xb8\xad\": \"\xe6\x96\x87\", \"z\": [1.0], \"\xe6\x96\x87\": 2}",
	EUC_JIS_2004 => "{\"\xef\xbc\x81\": 1, \"\xf0\xa0\x80\x8b\": 2, \"\xe3\x81\x82\": 3}",
	SQL_ASCII => "{\"\xc3\xa9\": \"\xc3\xbc\", \"z\": [1.0]}",);

foreach my $encoding (sort keys %sample)
{
	my $db = lc "enc_$encoding";
	my $doc = $sample{$encoding};
	my ($canonical, $digest) = from_node('one', $doc);
	my ($uuid) = from_node('downstream', $doc, 'step');
	# in SQL_ASCII the bytes are the client's
	my $client = $encoding eq 'SQL_ASCII' ? 'SQL_ASCII' : 'UTF8';

	$server->safe_psql('postgres', "CREATE DATABASE $db ENCODING '$encoding' LOCALE 'C' TEMPLATE template0");
	$server->safe_psql($db, 'CREATE EXTENSION idempotency CASCADE');
	is($server->safe_psql($db, "SET client_encoding = '$client';
		SELECT encode(idem_digest('$doc'), 'hex'), idem_downstream_key('$doc', 'step')"),
		"$digest|$uuid", "digest and downstream key in $encoding");
	is($server->safe_psql($db, "SET client_encoding = '$client'; SELECT idem_canonical('$doc')"),
		$canonical, "canonical text in $encoding");
	is($server->safe_psql($db, "SET client_encoding = '$client';
		SELECT idem_canonical('$doc', ARRAY['/' || max(k)]) = idem_canonical('$doc'::jsonb - max(k))
		FROM jsonb_object_keys('$doc') k"),
		't', "pointer in $encoding");
}

$server->stop;
done_testing();
