# IdemTest - what the TAP tests of the extension share.
#
#	use FindBin;
#	use lib "$FindBin::RealBin/lib";
#	use IdemTest;
#
# Sessions are psql processes behind pipes, written here so that the tests run
# alike with the Perl modules of PostgreSQL 15, 17 and 18.  Nothing in the tests
# sleeps for a fixed time: wait_until() waits for a condition.

package IdemTest;

use strict;
use warnings;

use Exporter 'import';
use IO::Select;
use POSIX ();
use Errno ();
use JSON::PP ();
use Time::HiRes ();

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(new_node session wait_until wait_lock_wait run_workers
  token is_rows close_gate open_gate);

# What ends a test script is shown, not only written to its log.
$SIG{__DIE__} = sub { diag($_[0]) unless $^S; };

# Every wait ends in a failure after this many seconds.
our $timeout = $PostgreSQL::Test::Utils::timeout_default || 180;

# A started server with the extension in database postgres.
#	conf		lines for postgresql.conf
#	streaming	allow standbys
#	extension	0 = do not create the extension
sub new_node
{
	my ($name, %arg) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init(
		extra => [ '--encoding=UTF8', '--locale=C' ],
		($arg{streaming} ? (allows_streaming => 1) : ()));
	$node->append_conf('postgresql.conf', <<'CONF');
log_statement = none
max_connections = 100
shared_buffers = 64MB
max_prepared_transactions = 10
autovacuum = off
CONF
	$node->append_conf('postgresql.conf', $arg{conf}) if defined $arg{conf};
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION idempotency CASCADE')
	  unless defined $arg{extension} && !$arg{extension};
	return $node;
}

# A session of its own.  Named arguments: dbname, user, name.
sub session
{
	return IdemTest::Session->new(@_);
}

# Waits until the code returns true.
sub wait_until
{
	my ($what, $code) = @_;
	my $deadline = Time::HiRes::time() + $timeout;

	while (!$code->())
	{
		die "gave up waiting until $what" if Time::HiRes::time() > $deadline;
		Time::HiRes::usleep(10_000);
	}
	return 1;
}

# Waits until the session of $waiter waits for a heavyweight lock (of a row, a
# transaction or a key).  $observer is another session.
sub wait_lock_wait
{
	my ($observer, $waiter) = @_;

	return wait_until(
		"a session waits for a lock",
		sub {
			$observer->q("SELECT count(*) FROM pg_locks WHERE pid = "
				  . $waiter->pid . " AND NOT granted") > 0;
		});
}

# Runs the code in n processes at once, as code(number); returns what each
# returned, in order.  The code makes its own sessions and must not call Test::More.
# $meanwhile is run here once all have been started.
sub run_workers
{
	my ($n, $code, $meanwhile) = @_;
	my @reader;
	my @result;
	my @pid;
	my @failure;

	for my $i (0 .. $n - 1)
	{
		pipe(my $r, my $w) or die "pipe: $!";
		my $pid = fork();
		die "fork: $!" unless defined $pid;
		if ($pid == 0)
		{
			close $r;
			binmode $w;
			my $value = eval { $code->($i) };
			my $error = $@;
			syswrite $w, JSON::PP->new->utf8->allow_nonref->encode([ $value, "$error" ]);
			POSIX::_exit(0);
		}
		close $w;
		push @reader, $r;
		push @pid, $pid;
	}
	$meanwhile->() if $meanwhile;
	for my $i (0 .. $n - 1)
	{
		my $bytes = '';
		binmode $reader[$i];
		while (1)
		{
			my $read = sysread($reader[$i], $bytes, 65536, length $bytes);
			next if !defined $read && $!{EINTR};    # a worker that ends may signal
			last unless $read;
		}
		waitpid $pid[$i], 0;
		my $status = $?;
		my ($value, $error) = @{ length $bytes ? JSON::PP->new->utf8->decode($bytes) : [ undef, "died with status $status\n" ] };
		push @failure, "worker $i: $error" if $error;
		$result[$i] = $value;
	}
	die join '', @failure if @failure;
	return @result;
}

# A barrier: sessions that run "SELECT pg_advisory_lock_shared(n)" stop there
# until the gate opens.
sub close_gate
{
	my ($session, $number) = @_;
	$session->q("SELECT pg_advisory_lock($number)");
	return;
}

sub open_gate
{
	my ($session, $number, $expected) = @_;
	wait_until(
		"$expected sessions stand at the gate",
		sub {
			$session->q("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
				  . " AND objid = $number AND objsubid = 1 AND NOT granted") >= $expected;
		});
	$session->q("SELECT pg_advisory_unlock($number)");
	return;
}

# A token that can be recognised: the same number gives the same uuid.
sub token
{
	return sprintf '00000000-0000-4000-8000-%012d', shift;
}

# Compares what a query returns, as text, rows by newline and columns by '|'.
sub is_rows
{
	my ($session, $sql, $expected, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return is($session->q($sql), $expected, $name);
}

package IdemTest::Session;

use strict;
use warnings;

use IO::Select;
use IPC::Open3 ();
use Symbol     ();
use Time::HiRes ();

my $serial = 0;

sub new
{
	my ($class, $node, %arg) = @_;
	my $connstr = $node->connstr($arg{dbname} || 'postgres');
	my @cmd = (
		$node->can('installed_command') ? $node->installed_command('psql') : 'psql',
		qw(-X -A -t -q -v VERBOSITY=verbose -P null=~ -F |),
		'-d', $connstr . ($arg{user} ? " user='$arg{user}'" : '') . ($arg{options} ? " options='$arg{options}'" : ''),
		'-f', '-');
	my $self = bless { node => $node, maker => $$, buffer => '', errors => '' }, $class;

	local $ENV{PGAPPNAME} = $arg{name} || 'idemtest';
	local $ENV{PGCLIENTENCODING} = 'UTF8';
	$SIG{PIPE} = 'IGNORE';
	$self->{stderr} = Symbol::gensym();
	$self->{child} = IPC::Open3::open3($self->{stdin}, $self->{stdout}, $self->{stderr}, @cmd);
	binmode $self->{$_} for qw(stdin stdout stderr);
	$self->{select} = IO::Select->new($self->{stdout}, $self->{stderr});
	$self->{pid} = $self->q('SELECT pg_backend_pid()');
	return $self;
}

# Process id of the backend.
sub pid { return $_[0]->{pid}; }

# Starts a query (or several, with ; between) without waiting for it.
sub start
{
	my ($self, $sql) = @_;
	my $banner = '=== idemtest ' . ++$serial . ' ===';

	die "a query is running" if defined $self->{banner};
	$self->{banner} = $banner;
	$self->{sql} = $sql;
	$self->{buffer} = $self->{errors} = '';
	$sql =~ s/\s*\z//;
	$sql .= ';' unless $sql =~ /;\z/ || $sql =~ /\\g(?:set|exec)?\s*\w*\z/;
	syswrite $self->{stdin}, "$sql\n\\echo '$banner'\n\\warn '$banner'\n";
	return;
}

# Reads what is there; true once the query is over or the connection lost.
sub _pump
{
	my ($self, $seconds) = @_;

	return 1 unless defined $self->{banner};
	for my $handle ($self->{select}->can_read($seconds))
	{
		my $into = $handle == $self->{stdout} ? 'buffer' : 'errors';
		my $got = sysread $handle, $self->{$into}, 65536, length $self->{$into};
		next if !defined $got && $!{EINTR};
		$self->{select}->remove($handle) unless $got;
	}
	if ($self->{select}->count == 0)
	{
		$self->{lost} = 1;
		return 1;
	}
	my $banner = quotemeta $self->{banner};
	return $self->{buffer} =~ /^$banner\n/m && $self->{errors} =~ /^$banner\n/m;
}

# Has the started query ended?
sub done
{
	my ($self) = @_;
	1 while !(my $over = $self->_pump(0)) && $self->{select}->can_read(0);
	return $self->_pump(0);
}

# Waits for the started query; returns the SQLSTATE of its first error, 00000 for
# none, 08006 if the connection is lost.  Output is in {out}, messages in {err}.
sub finish
{
	my ($self) = @_;
	my $deadline = Time::HiRes::time() + $IdemTest::timeout;

	while (!$self->_pump(1))
	{
		die "gave up waiting for: $self->{sql}" if Time::HiRes::time() > $deadline;
	}
	my $banner = quotemeta($self->{banner} // '');
	$self->{buffer} =~ s/^$banner\n//m if length $banner;
	$self->{errors} =~ s/^$banner\n//m if length $banner;
	undef $self->{banner};
	($self->{out} = $self->{buffer}) =~ s/\n\z//;
	$self->{err} = $self->{errors};
	return $1 if $self->{err} =~ /(?:ERROR|FATAL|PANIC):\s+(\w{5}):/ && !$self->{lost};
	return '08006' if $self->{lost};
	return '00000';
}

# Runs a query; returns the SQLSTATE as finish() does.
sub try
{
	my ($self, $sql) = @_;
	$self->start($sql);
	return $self->finish;
}

# Runs a query that must succeed; returns its output.
sub q
{
	my ($self, $sql) = @_;
	my $state = $self->try($sql);
	die "query failed ($state): $sql\n$self->{err}" if $state ne '00000';
	return $self->{out};
}

# Ends the session as a client does that goes away.
sub quit
{
	my ($self) = @_;

	return unless $self->{child};
	syswrite $self->{stdin}, "\\q\n" if $self->{stdin};
	close $self->{stdin};
	close $self->{stdout};
	close $self->{stderr};
	waitpid $self->{child}, 0;
	delete $self->{child};
	return;
}

# After the server has ended the connection: reap the client.
sub lost
{
	my ($self) = @_;
	return $self->quit;
}

sub DESTROY
{
	my ($self) = @_;
	local $?;
	$self->quit if $self->{child} && $self->{maker} == $$;
	return;
}

1;
