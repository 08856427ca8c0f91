# An effect outside the database: workers charge cards at a payment service.
#
# test/clients/downstream.py is the service, worker.py and reconcile.py are the two
# recipes of docs/external-effects.md; the code shown there is compared with them.
# Workers are killed at every step in turn, requests and answers are lost or
# late, processes are held up, and at the end both books are read: the records
# here and the service's journal.  (C46, C47, C55, C56, C60)

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use HTTP::Tiny;
use IdemTest;
use JSON::PP ();
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;

my $python  = '/usr/bin/python3';
my $clients = "$FindBin::RealBin/../clients";
my $docs    = "$FindBin::RealBin/../../docs/external-effects.md";
my $dir     = PostgreSQL::Test::Utils::tempdir();
my $json    = JSON::PP->new->utf8->allow_nonref->canonical;

if (system("$python -c 'import psycopg'") != 0)
{
	fail('psycopg is here (package python3-psycopg)');
	done_testing();
	exit;
}
delete @ENV{qw(http_proxy HTTP_PROXY all_proxy ALL_PROXY)};
my $http = HTTP::Tiny->new(timeout => 60);

#---------------------------------------------------------------------------
# The code in the document is the code that is tested
#---------------------------------------------------------------------------

{
	my %region;
	for my $file (qw(worker.py reconcile.py setup.sql by_hand.sql))
	{
		my $text = slurp_file("$clients/$file");
		while ($text =~ /^(?:#|--) doc: begin (\w+)\n(.*?)^(?:#|--) doc: end \g1\n/gms)
		{
			$region{"$file $1"} = $2;
		}
	}
	my %shown;
	my $text = slurp_file($docs);
	while ($text =~ /^(?:<!-- test\/clients\/(\S+ \w+) -->\n)?```(?:python|sql)\n(.*?)^```$/gms)
	{
		my ($name, $code) = ($1 // 'code without a source', $2);
		is($code, $region{$name}, "external-effects.md shows $name");
		$shown{$name} = 1;
	}
	is(join(', ', sort keys %shown), join(', ', sort keys %region), 'external-effects.md shows all of the recipes');
}

#---------------------------------------------------------------------------
# Processes
#---------------------------------------------------------------------------

my $node = new_node('external', conf => "fsync = off\n");
my $o = session($node, name => 'observer');
$o->q("\\i $clients/setup.sql");
$o->q("UPDATE idem_policy SET backoff_base = '10 ms', backoff_cap = '50 ms', jitter = 'none'");

my %running;    # by process id
my $serial = 0;

END
{
	my $status = $?;
	kill 'KILL', keys %running;
	waitpid $_, 0 for keys %running;
	$? = $status;
}

# Starts a Python program; its standard input ends when we do.
sub launch
{
	my ($env, @command) = @_;
	my $output = sprintf '%s/%03d', $dir, ++$serial;

	append_to_file("$output.$_", '') for qw(out err);
	pipe(my $reader, my $writer) or die "pipe: $!";
	my $pid = fork() // die "fork: $!";
	if ($pid == 0)
	{
		%running = ();
		$ENV{$_} = $env->{$_} for keys %$env;
		open(STDIN, '<&', $reader) or POSIX::_exit(126);
		open(STDOUT, '>>', "$output.out") or POSIX::_exit(126);
		open(STDERR, '>>', "$output.err") or POSIX::_exit(126);
		exec { $python } $python, @command or POSIX::_exit(127);
	}
	close $reader;
	$running{$pid} = 1;
	return { pid => $pid, stdin => $writer, output => $output };
}

# Waits for its end: its standard output.  {status} is as in waitpid.
sub await
{
	my ($process) = @_;

	wait_until("process $process->{pid} has ended", sub { waitpid($process->{pid}, POSIX::WNOHANG()) == $process->{pid} });
	$process->{status} = $?;
	delete $running{ $process->{pid} };
	my $err = slurp_file("$process->{output}.err");
	note($err) if $err ne '';
	return slurp_file("$process->{output}.out");
}

sub await_stop
{
	my ($process) = @_;

	wait_until("process $process->{pid} has stopped", sub { slurp_file("/proc/$process->{pid}/stat") =~ /\) T / });
	return;
}

sub go_on { my ($process) = @_; kill 'CONT', $process->{pid}; return; }

# A payment service.  With a journal it goes on where another one ended.
sub service
{
	my ($mode, $journal) = @_;
	my $self = { mode => $mode, journal => $journal // "$dir/$mode.journal" };

	$self->{process} = launch({}, "$clients/downstream.py", '--mode', $mode, '--journal', $self->{journal});
	wait_until('the service listens', sub { slurp_file("$self->{process}{output}.out") =~ /^port (\d+)$/ && ($self->{port} = $1) });
	$self->{url} = "http://127.0.0.1:$self->{port}";
	return $self;
}

# Kill -9, and a new one on the same journal.
sub kill_service
{
	my ($service) = @_;

	kill 'KILL', $service->{process}{pid};
	await($service->{process});
	return;
}

sub restart_service
{
	my ($service) = @_;

	%$service = %{ service($service->{mode}, $service->{journal}) };
	return;
}

sub call
{
	my ($service, $method, $path, $body, $key) = @_;
	my $answer = $http->request($method, "$service->{url}$path",
		{ headers => { defined $key ? ('Idempotency-Key' => $key) : () }, (defined $body ? (content => $json->encode($body)) : ()) });

	return ($answer->{status}, eval { $json->decode($answer->{content}) });
}

sub faults { my ($service, %faults) = @_; call($service, 'POST', '/faults', \%faults); return; }
sub state { my ($service) = @_; return (call($service, 'GET', '/state'))[1]; }
sub wait_idle { my ($service) = @_; return wait_until('the service has done its work', sub { state($service)->{in_work} == 0 }); }

my %recipe = (deduplicates => 'deduplicated', reference => 'undeduplicated', blind => 'undeduplicated');

# A worker on a key.  Arguments: die or stop = a step, timeout, patience in seconds.
sub worker
{
	my ($service, $key, %arg) = @_;

	return launch(
		{   PGHOST => $node->host, PGPORT => $node->port, PGDATABASE => 'postgres', PGUSER => 'worker',
			IDEM_DIE_AT => $arg{die} // '', IDEM_STOP_AT => $arg{stop} // '' },
		"$clients/worker.py", '--url', $service->{url}, '--recipe', $recipe{ $service->{mode} },
		'--timeout', $arg{timeout} // 20, '--patience', $arg{patience} // 60, $key, 100);
}

# What it was told, one after the other.
sub told { my ($process) = @_; my $out = await($process); return $out eq '' ? '' : join ' ', @{ $json->decode($out) }; }

sub work { return told(worker(@_)); }

sub start_reconcile
{
	my ($service, $operation, @arg) = @_;

	return launch({ PGHOST => $node->host, PGPORT => $node->port, PGDATABASE => 'postgres', PGUSER => 'reconciler' },
		"$clients/reconcile.py", '--url', $service->{url}, '--operation', $operation, @arg);
}

# What it did, by key.
sub reconcile
{
	my $process = start_reconcile(@_);
	my $out = await($process);

	die "reconcile failed: " . slurp_file("$process->{output}.err") if $process->{status};
	return { map { /^(\S+) (.*)$/ ? ($1 => $2) : () } split /\n/, $out };
}

#---------------------------------------------------------------------------
# Both books
#---------------------------------------------------------------------------

sub journal
{
	my ($service) = @_;
	return map { $json->decode($_) } split /\n/, slurp_file($service->{journal});
}

sub downstream_key { my ($key) = @_; return $o->q("SELECT idem_downstream_key('$key', 'charge')"); }

sub charges
{
	my ($service, $key) = @_;
	my $id = downstream_key($key);
	return grep { $_->{key} eq $id && $_->{what} eq 'charge' } journal($service);
}

# "status, payments here, charges there, requests sent"
sub books
{
	my ($service, $key) = @_;
	my $status = $o->q("SELECT status FROM idem_record WHERE idempotency_key = '$key'");
	my $payments = $o->q("SELECT count(*) FROM payment WHERE idempotency_key = '$key'");
	my $charges = () = charges($service, $key);
	my $posts = state($service)->{posts}{ downstream_key($key) } // 0;
	return "$status, $payments paid, $charges charged, $posts sent";
}

sub record
{
	my ($key) = @_;
	return $o->q("SELECT concat_ws(' ', attempts, previous, error_code, error_message) FROM idem_record WHERE idempotency_key = '$key'");
}

sub audits { my ($key) = @_; return $o->q("SELECT count(*) FROM idem_audit WHERE idempotency_key = '$key'"); }

my @STEPS = qw(after-claim after-checkpoint before-send after-call-before-record after-record before-commit after-commit);

my $dedup     = service('deduplicates');
my $reference = service('reference');
my $blind     = service('blind');
my @CONTROL;    # references that are charged twice on purpose

#---------------------------------------------------------------------------
# The service is what it says
#---------------------------------------------------------------------------

{
	my %body = (amount => 5, currency => 'EUR');

	my @first = call($dedup, 'POST', '/charges', \%body, 'c1');
	my @again = call($dedup, 'POST', '/charges', \%body, 'c1');
	is($first[0], 201, 'the service charges');
	is_deeply(\@again, \@first, 'a repeated key gets the first answer');
	is((call($dedup, 'POST', '/charges', { %body, amount => 6 }, 'c1'))[0], 422, 'a key with another body is refused');
	is_deeply([ call($dedup, 'GET', '/charges?key=c1') ], [ 200, { answers => [ $first[1] ] } ], 'a query tells the charge');
	is((call($dedup, 'GET', '/charges?key=c2'))[0], 404, 'a query tells that there is none');
	is(scalar(grep { $_->{key} eq 'c1' } journal($dedup)), 1, 'charged once');

	faults($dedup, drop_answer => 1);
	is((call($dedup, 'POST', '/charges', \%body, 'c3'))[0], 599, 'the answer is dropped');
	kill_service($dedup);
	{
		open my $torn, '>>', $dedup->{journal} or die $!;
		print $torn '{"what": "cha';
		close $torn;
	}
	restart_service($dedup);
	is((call($dedup, 'GET', '/charges?key=c3'))[0], 200, 'the charge outlives the service');
	is((call($dedup, 'POST', '/charges', \%body, 'c4'))[1]{id}, 'ch_3', 'half a line is cut off');

	for my $service ($reference, $blind)
	{
		call($service, 'POST', '/charges', \%body, 'c1') for 1 .. 2;
		is(scalar(grep { $_->{key} eq 'c1' } journal($service)), 2, "$service->{mode}: a repeated request charges again");
	}
	is(scalar(@{ (call($reference, 'GET', '/charges?key=c1'))[1]{answers} }), 2, 'reference: a query tells both');
	is((call($blind, 'GET', '/charges?key=c1'))[0], 501, 'blind: cannot be asked');
	push @CONTROL, 'c1';
}

#---------------------------------------------------------------------------
# A service that deduplicates: a death at every step, another worker goes on
#---------------------------------------------------------------------------

{
	$o->q("UPDATE idem_policy SET lease = '3 s' WHERE operation IN ('charge', 'transfer')");
	my %first = map { $_ => worker($dedup, "t:charge:$_", die => $_) } @STEPS;
	told($_) for values %first;
	is($first{$_}{status} & 127, 9, "worker was killed $_") for @STEPS;
	my %second = map { $_ => worker($dedup, "t:charge:$_") } @STEPS;
	for my $step (@STEPS)
	{
		my $told = told($second{$step});
		like($told, $step eq 'after-commit' ? qr/^succeeded$/ : qr/^(in_progress )?succeeded$/, "killed $step: another worker goes on");
		is(books($dedup, "t:charge:$step"), 'succeeded, 1 paid, 1 charged, 1 sent', "killed $step: one charge, one payment");
		is(record("t:charge:$step"), $step eq 'after-commit' ? '1 none' : '2 lease_expired', "killed $step: attempts");
	}
}

# the same key, dying at each step in turn
{
	$o->q("INSERT INTO idem_policy (operation, lease, backoff_base, max_attempts) VALUES ('brief', '300 ms', '10 ms', 100)");
	for my $step (qw(after-claim after-checkpoint before-send after-call-before-record before-commit before-commit))
	{
		told(worker($dedup, 't:brief:chain', die => $step));
	}
	is($o->q("SELECT status, attempts >= 6 FROM idem_record WHERE idempotency_key = 't:brief:chain'"), 'processing|t', 'a key whose workers die');
	my $told;
	do { $told = work($dedup, 't:brief:chain') } while ($told =~ /lost$/);    # slow machine, short lease
	like($told, qr/succeeded$/, 'and one that does not');
	is(books($dedup, 't:brief:chain'), 'succeeded, 1 paid, 1 charged, 1 sent', 'one charge, one payment in the end');
}

#---------------------------------------------------------------------------
# A service that does not: doubt ends as unknown, and reconciliation settles it
#---------------------------------------------------------------------------

{
	my @keys = (@STEPS, 'again');
	my %die = map { $_ => $_ } @STEPS;
	$die{again} = 'after-checkpoint';

	my %first = map { $_ => worker($reference, "t:transfer:$_", die => $die{$_}) } @keys;
	told($_) for values %first;
	is($first{$_}{status} & 127, 9, "worker was killed $_") for @keys;
	my %second = map { $_ => worker($reference, "t:transfer:$_") } @keys;
	my %charged = map { $_ => /^after-(call|record|commit)|before-commit/ ? 1 : 0 } @keys;
	for my $key (@keys)
	{
		my $told = told($second{$key});
		if ($key eq 'after-commit')
		{
			is($told, 'succeeded', "killed $key: nothing is in doubt");
			next;
		}
		like($told, qr/^(in_progress )?unknown$/, "killed $key: nobody goes on");
		is(books($reference, "t:transfer:$key"), "unknown, 0 paid, $charged{$key} charged, $charged{$key} sent", "killed $key: nothing is repeated");
	}

	my $first = reconcile($reference, 'transfer');
	is_deeply($first, {
			't:transfer:after-claim' => 'to be retried: nothing was sent',
			't:transfer:after-checkpoint' => 'left: too early to take it for absent',
			't:transfer:before-send' => 'left: too early to take it for absent',
			't:transfer:after-call-before-record' => 'succeeded: charge found at the service',
			't:transfer:after-record' => 'succeeded: charge is on record',
			't:transfer:before-commit' => 'succeeded: charge is on record',
			't:transfer:again' => 'left: too early to take it for absent' },
		'reconciliation settles what is certain');
	is(work($reference, 't:transfer:after-claim'), 'succeeded', 'what was not sent is done now');
	is(work($reference, 't:transfer:again'), 'unknown', 'what is left stays unknown');
	$o->q("SELECT idem_resolve('t:transfer:before-send', 'failed', 'settled by hand', error_code => 'not_charged')");
	is_deeply(reconcile($reference, 'transfer', '--settle-after', 0), {
			't:transfer:after-checkpoint' => 'failed: no charge at the service',
			't:transfer:again' => 'failed: no charge at the service' },
		'what cannot arrive any more is settled as failed');
	$o->q("SELECT idem_forget('t:transfer:again', 'made anew below')");

	is(books($reference, "t:transfer:$_"), 'succeeded, 1 paid, 1 charged, 1 sent', "killed $_: one charge, one payment")
	  for grep { $charged{$_} || $_ eq 'after-claim' } @STEPS;
	is(books($reference, "t:transfer:$_"), 'failed, 0 paid, 0 charged, 0 sent', "killed $_: no charge, no payment") for qw(after-checkpoint before-send);
	is(work($reference, 't:transfer:after-checkpoint'), 'failed', 'a failure is final');
	is(audits("t:transfer:$_"), $_ eq 'after-commit' ? 0 : 1, "killed $_: audited") for @STEPS;
	is_deeply(reconcile($reference, 'transfer'), {}, 'nothing is left to settle');

	# settled as "do it again"
	told(worker($reference, 't:transfer:again', die => 'after-checkpoint'));
	like(work($reference, 't:transfer:again'), qr/unknown$/, 'in doubt again');
	is_deeply(reconcile($reference, 'transfer', '--settle-after', 0, '--when-absent', 'retry'),
		{ 't:transfer:again' => 'to be retried: no charge at the service' }, 'an absent charge can be retried');
	is(work($reference, 't:transfer:again'), 'succeeded', 'the retry charges');
	is(books($reference, 't:transfer:again'), 'succeeded, 1 paid, 1 charged, 1 sent', 'once');
	is(record('t:transfer:again'), '2 retried', 'after an operator retry');
}

# The policy was forgotten: the worker itself does not repeat what is in doubt.
{
	my %step = (doubt => 'after-checkpoint', done => 'after-call-before-record');
	$o->q("INSERT INTO idem_policy (operation, lease) VALUES ('forgotten', '3 s')");
	my %first = map { $_ => worker($reference, "t:forgotten:$_", die => $step{$_}) } keys %step;
	told($_) for values %first;
	my %second = map { $_ => worker($reference, "t:forgotten:$_") } keys %step;
	like(told($second{doubt}), qr/unknown$/, 'policy retry, no deduplication: in doubt');
	is(books($reference, 't:forgotten:doubt'), 'unknown, 0 paid, 0 charged, 0 sent', 'nothing is repeated');
	like(told($second{done}), qr/succeeded$/, 'policy retry, no deduplication: found by the query');
	is(books($reference, 't:forgotten:done'), 'succeeded, 1 paid, 1 charged, 1 sent', 'nothing is repeated');
}

# A service that cannot be asked: a person settles.
{
	$o->q("INSERT INTO idem_policy (operation, lease, on_lease_expiry) VALUES ('payout', '3 s', 'unknown')");
	my %step = (sent => 'after-call-before-record', unsent => 'after-claim', maybe => 'after-checkpoint');
	my @keys = sort keys %step;
	my %first = map { $_ => worker($blind, "b:payout:$_", die => $step{$_}) } @keys;
	told($_) for values %first;
	my %second = map { $_ => worker($blind, "b:payout:$_") } @keys;
	like(told($second{$_}), qr/unknown$/, "blind, $_: unknown") for @keys;
	is_deeply(reconcile($blind, 'payout', '--settle-after', 0), {
			'b:payout:unsent' => 'to be retried: nothing was sent',
			'b:payout:sent' => 'left: query does not tell: 501',
			'b:payout:maybe' => 'left: query does not tell: 501' },
		'blind: what was sent is left to a person');
	is(work($blind, 'b:payout:unsent'), 'succeeded', 'blind: what was not sent is done');

	my ($charge) = charges($blind, 'b:payout:sent');
	my @by_hand = ($node->installed_command('psql'), '-X', '-q', '-o', "$dir/by_hand.out", '-v', 'ON_ERROR_STOP=1', '-v', 'key=b:payout:sent', '-v', "charge=$charge->{id}",
		'-v', 'amount=100', '-v', 'reason=bank statement 12, line 4', '-f', "$clients/by_hand.sql", '-d', $node->connstr('postgres') . ' user=reconciler');
	is(system(@by_hand), 0, 'blind: settled by hand');
	my ($out, $err) = run_command(\@by_hand);
	like($err, qr/is not of unknown outcome/, 'blind: and not a second time');
	is(books($blind, 'b:payout:sent'), 'succeeded, 1 paid, 1 charged, 1 sent', 'blind: one charge, one payment');
	is($o->q("SELECT action, session_user_name, reason FROM idem_audit WHERE idempotency_key = 'b:payout:sent'"),
		'resolve|reconciler|bank statement 12, line 4', 'blind: who settled it, and why');
	is(work($blind, 'b:payout:maybe'), 'unknown', 'blind: the rest stays unknown');
	is(books($blind, 'b:payout:maybe'), 'unknown, 0 paid, 0 charged, 0 sent', 'blind: and is not repeated');
}

#---------------------------------------------------------------------------
# Faults of the service: no answer is not a failure
#---------------------------------------------------------------------------

$o->q("UPDATE idem_policy SET lease = '30 s' WHERE operation IN ('charge', 'transfer', 'payout')");

# What a worker is told, both books, and the record, after faults.
sub fault
{
	my ($service, $operation, $name, $faults, $arg, $told, $books, $record) = @_;
	my $key = "f:$operation:$name";
	my $title = "$service->{mode}, $name";

	faults($service, %$faults);
	like(work($service, $key, %$arg), $told, "$title: told");
	faults($service);
	wait_idle($service);
	is(books($service, $key), $books, "$title: books");
	is(record($key), $record, "$title: record") if defined $record;
	return $key;
}

my $once = 'succeeded, 1 paid, 1 charged, 1 sent';
my $short = { timeout => 1 };

for my $case ([ $dedup, 'charge' ], [ $reference, 'transfer' ])
{
	fault(@$case, 'unavailable', { unavailable => 2 }, {}, qr/^retryable_failed( retry_later retryable_failed)?( retry_later)? succeeded$/,
		'succeeded, 1 paid, 1 charged, 3 sent', '3 retryable_failed');
	my $key = fault(@$case, 'declined', { declined => 1 }, {}, qr/^failed$/, 'failed, 0 paid, 0 charged, 1 sent', '1 none Declined card_declined');
	is(work($case->[0], $key), 'failed', 'a refusal is answered from the record');
	is(books($case->[0], $key), 'failed, 0 paid, 0 charged, 1 sent', 'and not tried again');
	fault(@$case, 'drop_answer', { drop_answer => 1 }, {}, qr/^succeeded$/, $once, '1 none');
	fault(@$case, 'slow_after', { slow_after => 1 }, $short, qr/^succeeded$/, $once, '1 none');
	fault(@$case, 'broken', { broken => 1 }, {}, qr/^succeeded$/, $once, '1 none');

	# dead between what the service said and the record of it: it had said that nothing was done
	faults($case->[0], unavailable => 1);
	told(worker($case->[0], "f:$case->[1]:died", die => 'before-fail'));
	$o->q("SELECT idem_revoke('f:$case->[1]:died', 'worker is dead')");
}
is(work($dedup, 'f:charge:died'), 'succeeded', 'deduplicates, dead before the failure was recorded: another goes on');
is(work($reference, 'f:transfer:died'), 'unknown', 'reference, dead before the failure was recorded: unknown');
is_deeply(reconcile($reference, 'transfer'), { 'f:transfer:died' => 'to be retried: nothing was sent' }, 'but not in doubt');
is(work($reference, 'f:transfer:died'), 'succeeded', 'done now');
is(books($dedup, 'f:charge:died'), 'succeeded, 1 paid, 1 charged, 2 sent', 'one charge, one payment');
is(books($reference, 'f:transfer:died'), 'succeeded, 1 paid, 1 charged, 2 sent', 'one charge, one payment');

# The request is late, not lost.  Where the service deduplicates it may be repeated,
# where it does not, "not found" proves nothing yet.
fault($dedup, 'charge', 'slow_before', { slow_before => 1 }, $short, qr/^retryable_failed( retry_later)? succeeded$/,
	'succeeded, 1 paid, 1 charged, 2 sent', '2 retryable_failed');
{
	my $key = 'f:transfer:slow_before';
	faults($reference, slow_before => 1);
	is(work($reference, $key, %$short), 'unknown', 'reference, slow_before: unknown');
	is(reconcile($reference, 'transfer')->{$key}, 'left: too early to take it for absent', 'reference, slow_before: not found, and not absent');
	faults($reference);
	wait_idle($reference);
	is(books($reference, $key), 'unknown, 0 paid, 1 charged, 1 sent', 'reference, slow_before: it came late');
	is(reconcile($reference, 'transfer')->{$key}, 'succeeded: charge found at the service', 'reference, slow_before: found');
	is(books($reference, $key), $once, 'reference, slow_before: one charge, one payment');
}

# No answer, and the query is not answered either; then the service is killed.
for my $case ([ $dedup, 'charge' ], [ $reference, 'transfer' ])
{
	my ($service, $operation) = @$case;
	my $key = fault(@$case, 'silent', { drop_answer => 1, lookup_down => 1 }, {}, qr/^unknown$/,
		'unknown, 0 paid, 1 charged, 1 sent', '1 none InDoubt query does not tell: 503');
	kill_service($service);
	is(reconcile($service, $operation)->{$key}, 'left: no answer to the query', "$service->{mode}, service is down: left");
	is(work($service, $key), 'unknown', "$service->{mode}, service is down: unknown");
	like(work($service, "f:$operation:down", patience => 0.5), qr/^retryable_failed/, "$service->{mode}, service is down: nothing was done, and it is known");
	restart_service($service);
	is(reconcile($service, $operation)->{$key}, 'succeeded: charge found at the service', "$service->{mode}, service is back: settled");
	is(books($service, $key), 'succeeded, 1 paid, 1 charged, 0 sent', "$service->{mode}, service is back: one charge, one payment");
	is(audits($key), 1, "$service->{mode}, service is back: audited");
	$o->q("SELECT idem_retry('f:$operation:down', 'service is back')");
	is(work($service, "f:$operation:down"), 'succeeded', "$service->{mode}, service is back: done");
	is(books($service, "f:$operation:down"), $once, "$service->{mode}: once");
}
{
	my $key = fault($dedup, 'charge', 'silent_refusal', { declined => 1, drop_answer => 1, lookup_down => 1 }, {}, qr/^unknown$/, 'unknown, 0 paid, 0 charged, 1 sent');
	is(reconcile($dedup, 'charge')->{$key}, 'failed: declined by the service', 'a refusal that was not heard is found');
	is(work($dedup, $key), 'failed', 'and is final');
	is($o->q("SELECT error_code FROM idem_claim('$key', '{\"amount\": 100, \"currency\": \"EUR\"}')"), 'card_declined', 'with its reason');
}
fault($dedup, 'charge', 'unheard_refusal', { declined => 1, drop_answer => 1 }, {}, qr/^failed$/, 'failed, 0 paid, 0 charged, 1 sent', '1 none Declined card_declined');
fault($blind, 'payout', 'drop_answer', { drop_answer => 1 }, {}, qr/^unknown$/, 'unknown, 0 paid, 1 charged, 1 sent');

# Another charge stands under the key: not ours to take for an answer.
for my $case ([ $dedup, 'charge', 'unknown, 0 paid, 1 charged, 1 sent' ], [ $reference, 'transfer', 'unknown, 0 paid, 2 charged, 1 sent' ])
{
	my ($service, $operation, $books) = @$case;
	my $key = "f:$operation:foreign";
	call($service, 'POST', '/charges', { amount => 7, currency => 'EUR' }, downstream_key($key));
	kill_service($service);
	restart_service($service);
	faults($service, drop_answer => 1);
	is(work($service, $key), 'unknown', "$service->{mode}, another charge under the key: in doubt");
	is(books($service, $key), $books, "$service->{mode}, another charge under the key: books");
	like(reconcile($service, $operation, '--settle-after', 0)->{$key}, qr/^left: /, "$service->{mode}, another charge under the key: for a person");
	push @CONTROL, downstream_key($key);
}

#---------------------------------------------------------------------------
# Attempts used up while in doubt
#---------------------------------------------------------------------------

{
	$o->q("INSERT INTO idem_policy (operation, lease, max_attempts) VALUES ('frail', '3 s', 1)");
	my %step = (charged => 'after-call-before-record', recorded => 'after-record', doubt => 'after-checkpoint', unsent => 'after-claim');
	my %first = map { $_ => worker($dedup, "e:frail:$_", die => $step{$_}) } keys %step;
	told($_) for values %first;
	wait_until('all are exhausted', sub { $o->q('SELECT exhausted FROM idem_reap()'); $o->q("SELECT count(*) FROM idem_record WHERE error_code = 'exhausted'") == 4 });
	$o->q("UPDATE idem_policy SET lease = '30 s' WHERE operation = 'frail'");
	my $slow = fault($dedup, 'frail', 'slow_before', { slow_before => 1 }, $short, qr/^failed$/, 'failed, 0 paid, 1 charged, 1 sent');
	is(work($dedup, 'e:frail:charged'), 'failed', 'exhausted on its only attempt, though it had charged');
	is_deeply(reconcile($dedup, 'frail', '--exhausted'), { map { ($_ => 'to be retried: exhausted while in doubt') } qw(e:frail:charged e:frail:doubt e:frail:recorded), $slow },
		'what was exhausted in doubt is to be retried');
	is(work($dedup, "e:frail:$_"), 'succeeded', "$_: the retry asks first") for qw(charged doubt recorded);
	is(books($dedup, "e:frail:$_"), $once, "$_: one charge, one payment") for qw(charged doubt recorded);
	is(work($dedup, $slow), 'succeeded', 'late: the retry asks first');
	is(books($dedup, $slow), $once, 'late: one charge, one payment');
	is(books($dedup, 'e:frail:unsent'), 'failed, 0 paid, 0 charged, 0 sent', 'without doubt exhausted is failed');
}

#---------------------------------------------------------------------------
# Held up, not dead: a process that wakes up late
#---------------------------------------------------------------------------

{
	$o->q("UPDATE idem_policy SET lease = '3 s' WHERE operation IN ('charge', 'transfer')");
	my %stop = (
		(map { ("h:charge:$_" => $_) } qw(after-checkpoint before-send after-call-before-record)),
		'h:transfer:before-time-check' => 'after-checkpoint', 'h:transfer:while-sending' => 'before-send',
		'h:charge:committing' => 'before-commit', 'h:transfer:committing' => 'before-commit');
	my $service_of = sub { $_[0] =~ /charge/ ? $dedup : $reference };
	my %late = map { $_ => worker($service_of->($_), $_, stop => $stop{$_}) } keys %stop;
	await_stop($_) for values %late;

	for my $step (qw(after-checkpoint before-send after-call-before-record))
	{
		my $key = "h:charge:$step";
		like(work($dedup, $key), qr/succeeded$/, "deduplicates, held up $step: another goes on");
		go_on($late{$key});
		is(told($late{$key}), 'lost', "deduplicates, held up $step: the late one has lost the key");
		is(books($dedup, $key), 'succeeded, 1 paid, 1 charged, ' . ($step eq 'before-send' ? 2 : 1) . ' sent', "deduplicates, held up $step: one charge, one payment");
	}

	# between the look at the clock and the first byte: why reconciliation does not believe at once
	my $key = 'h:transfer:while-sending';
	like(work($reference, $key), qr/unknown$/, 'reference, held up while sending: unknown');
	is(reconcile($reference, 'transfer')->{$key}, 'left: too early to take it for absent', 'reference, held up while sending: left');
	go_on($late{$key});
	is(told($late{$key}), 'lost', 'reference, held up while sending: sent late, and lost the key');
	is(books($reference, $key), 'unknown, 0 paid, 1 charged, 1 sent', 'reference, held up while sending: charged');
	is(reconcile($reference, 'transfer')->{$key}, 'succeeded: charge found at the service', 'reference, held up while sending: found');
	is(books($reference, $key), $once, 'reference, held up while sending: one charge, one payment');

	$key = 'h:transfer:before-time-check';
	like(work($reference, $key), qr/unknown$/, 'reference, held up before sending: unknown');
	is(reconcile($reference, 'transfer', '--settle-after', 0)->{$key}, 'failed: no charge at the service', 'reference, held up before sending: settled');
	go_on($late{$key});
	is(told($late{$key}), 'lost', 'reference, held up before sending: does not send late');
	is(books($reference, $key), 'failed, 0 paid, 0 charged, 0 sent', 'reference, held up before sending: no charge');

	# the lease is over, but the completion is under way: nobody takes over
	for my $key (qw(h:charge:committing h:transfer:committing))
	{
		my $service = $service_of->($key);
		is($o->q("SELECT lease_until < clock_timestamp() FROM idem_record WHERE idempotency_key = '$key'"), 't', "$service->{mode}, held up before COMMIT: the lease is over");
		is(work($service, $key, patience => 0), 'in_progress', "$service->{mode}, held up before COMMIT: in progress");
		my $other = worker($service, $key);
		go_on($late{$key});
		is(told($late{$key}), 'succeeded', "$service->{mode}, held up before COMMIT: commits");
		like(told($other), qr/^(in_progress )?succeeded$/, "$service->{mode}, held up before COMMIT: the other gets the result");
		is(books($service, $key), $once, "$service->{mode}, held up before COMMIT: one charge, one payment");
	}
}

# The database server crashes between the completion and COMMIT.
{
	my @late = map { worker($_->[0], "h:$_->[1]:crash", stop => 'before-commit') } [ $dedup, 'charge' ], [ $reference, 'transfer' ];
	await_stop($_) for @late;
	$o->quit;
	$node->stop('immediate');
	$node->start;
	$o = session($node, name => 'observer');
	go_on($_) for @late;
	is(told($_), 'disconnected', 'server crashed before COMMIT: the worker cannot tell') for @late;
	like(work($dedup, 'h:charge:crash'), qr/^(in_progress )?succeeded$/, 'deduplicates, server crashed: another goes on');
	like(work($reference, 'h:transfer:crash'), qr/^(in_progress )?unknown$/, 'reference, server crashed: unknown');
	is(reconcile($reference, 'transfer')->{'h:transfer:crash'}, 'succeeded: charge is on record', 'reference, server crashed: settled');
	is(books($dedup, 'h:charge:crash'), $once, 'deduplicates, server crashed: one charge, one payment');
	is(books($reference, 'h:transfer:crash'), $once, 'reference, server crashed: one charge, one payment');
}

#---------------------------------------------------------------------------
# Many at once
#---------------------------------------------------------------------------

$o->q("UPDATE idem_policy SET lease = '60 s' WHERE operation IN ('charge', 'transfer', 'payout')");
for my $case ([ $dedup, 'charge' ], [ $reference, 'transfer' ])
{
	my ($service, $operation) = @$case;
	my @told = map { told($_) } map { worker($service, "m:$operation:same") } 1 .. 6;
	is(scalar(grep { /^(in_progress )?succeeded$/ } @told), 6, "$service->{mode}: six workers on one key get one result");
	is(books($service, "m:$operation:same"), $once, "$service->{mode}: one charge, one payment");
}
{
	my @keys = map { "m:transfer:$_" } 1 .. 8;
	faults($reference, drop_answer => 8, lookup_down => 8);
	told($_) for map { worker($reference, $_) } @keys;
	faults($reference);
	my @run = map { start_reconcile($reference, 'transfer') } 1 .. 3;
	my @out = map { await($_) } @run;
	is(join(' ', map { $_->{status} } @run), '0 0 0', 'three reconciliations at once');
	is(scalar(() = join('', @out) =~ /^m:\S+ succeeded: /mg), 8, 'each key is settled by one of them');
	is(join("\n", map { books($reference, $_) } @keys), join("\n", ($once) x 8), 'one charge, one payment each');
	is($o->q("SELECT count(*) FROM idem_audit WHERE idempotency_key LIKE 'm:%'"), 8, 'one audit row each');
}

#---------------------------------------------------------------------------
# The whole of both books
#---------------------------------------------------------------------------

{
	my %count;
	for my $service ($dedup, $reference, $blind)
	{
		$count{"$service->{mode} $_->{key}"}++ for grep { $_->{what} eq 'charge' } journal($service);
	}
	my $control = join '|', map { quotemeta } @CONTROL;
	my @twice = grep { $count{$_} > 1 && !/ (?:$control)$/ } keys %count;
	is("@twice", '', 'no card was charged twice');
	cmp_ok(scalar(keys %count), '>', 50, 'many were charged');
	is($o->q('SELECT idempotency_key FROM payment GROUP BY 1 HAVING count(*) > 1'), '', 'no payment was booked twice');
	is($o->q("SELECT idempotency_key FROM idem_record r FULL JOIN payment p USING (idempotency_key)
		WHERE (r.status = 'succeeded') IS DISTINCT FROM (p.id IS NOT NULL)
		   OR p.charge_id IS DISTINCT FROM r.result_json->>'id'"), '', 'a payment stands if and only if its key succeeded, with the same charge');
	my %journal = map { ("$_->{key} $_->{id}" => 1) } map { journal($_) } $dedup, $reference, $blind;
	my @unbacked = grep { !$journal{$_} } split /\n/, $o->q("SELECT idem_downstream_key(idempotency_key, 'charge') || ' ' || charge_id FROM payment");
	is("@unbacked", '', 'each payment is backed by a charge');
	is($o->q('SELECT * FROM idem_check()'), '', 'idem_check() finds nothing');
}

$o->quit;
$node->stop;
done_testing();
