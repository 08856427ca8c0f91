# The matrix: every state of a record x every call x every kind of token.
#
# The expectations are written from the design (states, functions, SQLSTATEs), not
# from the code.  A cell says what the call answers, or its SQLSTATE, and what
# the record is afterwards; "=" means untouched: the row version (ctid, xmin,
# xmax) and all columns are compared byte for byte.  (C57, C100)
#
# Four tokens: "past" served an earlier attempt, "right" is that of the current
# or last attempt, "foreign" was never used for the key, and "new" stands for any
# other.  A call in which the token does not matter has the kind "-".

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

my $node = new_node('matrix');
my $s    = session($node);

my %token = (past => token(1), right => token(2), foreign => token(3));
my %kind_of = map { $token{$_} => $_ } keys %token;

my $request = q('{"amount": 1}');
my $result  = q('{"receipt": 7}');

$s->q(<<'SQL');
INSERT INTO idem_policy (operation, max_attempts, max_elapsed, on_lease_expiry, backoff_base, backoff_factor, jitter)
VALUES ('m_retry', 5, NULL, 'retry', '1 s', 2, 'none'),
       ('m_two', 2, NULL, 'retry', '1 s', 2, 'none'),
       ('m_late', 5, '20 s', 'retry', '1 s', 2, 'none'),
       ('m_unknown', 5, NULL, 'unknown', '1 s', 2, 'none'),
       ('m_unknown_two', 2, NULL, 'unknown', '1 s', 2, 'none'),
       ('m_lowered', 5, NULL, 'retry', '1 s', 2, 'none');
SQL

sub has_function
{
	return $s->q("SELECT count(*) FROM pg_proc WHERE proname = '$_[0]'") > 0;
}

#---------------------------------------------------------------------------
# States: [operation, seconds that the clock is ahead when the call comes, steps]
#---------------------------------------------------------------------------

sub claim_by { my ($k, $op, $t) = @_; return "idem_claim('$k', $request, '$op', token => '$token{$t}')"; }
sub fail_by { my ($k, $t, $how) = @_; return "idem_fail('$k', '$token{$t}', $how)"; }

# Attempt 1 failed retryably, attempt 2 is by "right".
sub second_attempt
{
	my ($k, $op) = @_;
	return (claim_by($k, $op, 'past'), fail_by($k, 'past', q('retryable', 'first', 'E0', '0')),
		claim_by($k, $op, 'right'));
}

# Attempt 1 lapsed, attempt 2 is by "right".
sub taken_over
{
	my ($k, $op) = @_;
	return (claim_by($k, $op, 'past'), '+40', claim_by($k, $op, 'right'));
}

my @states = (
	[ absent => 'm_retry', 0, sub { my $k = shift; (claim_by($k, 'm_retry', 'right'), "idem_release('$k', '$token{right}')") } ],
	[ live_first    => 'm_retry', 0,  sub { claim_by($_[0], 'm_retry', 'right') } ],
	[ live_retry    => 'm_retry', 0,  sub { second_attempt($_[0], 'm_retry') } ],
	[ live_takeover => 'm_retry', 40, sub { taken_over($_[0], 'm_retry') } ],
	[ lapsed_first    => 'm_retry', 40, sub { claim_by($_[0], 'm_retry', 'right') } ],
	[ lapsed_retry    => 'm_retry', 40, sub { second_attempt($_[0], 'm_retry') } ],
	[ lapsed_takeover => 'm_retry', 80, sub { taken_over($_[0], 'm_retry') } ],
	[ lapsed_used_up => 'm_two',  40, sub { second_attempt($_[0], 'm_two') } ],
	[ lapsed_late    => 'm_late', 40, sub { second_attempt($_[0], 'm_late') } ],
	[ lapsed_unknown => 'm_unknown', 40, sub { second_attempt($_[0], 'm_unknown') } ],
	[ lapsed_unknown_used_up => 'm_unknown_two', 40, sub { second_attempt($_[0], 'm_unknown_two') } ],
	[ retryable_waiting => 'm_retry', 0, sub { (second_attempt($_[0], 'm_retry'), fail_by($_[0], 'right', q('retryable', 'm', 'E1', '1 h'))) } ],
	[ retryable_due => 'm_retry', 40, sub { (second_attempt($_[0], 'm_retry'), fail_by($_[0], 'right', q('retryable', 'm', 'E1', '10 s'))) } ],
	[ lowered_waiting => 'm_lowered', 0, sub { (second_attempt($_[0], 'm_lowered'), fail_by($_[0], 'right', q('retryable', 'm', 'E1', '1 h'))) } ],
	[ lowered_due => 'm_lowered', 40, sub { (second_attempt($_[0], 'm_lowered'), fail_by($_[0], 'right', q('retryable', 'm', 'E1', '10 s'))) } ],
	[ unknown   => 'm_retry', 0, sub { (second_attempt($_[0], 'm_retry'), fail_by($_[0], 'right', q('unknown', 'm', 'E1'))) } ],
	[ succeeded => 'm_retry', 0, sub { (second_attempt($_[0], 'm_retry'), "idem_complete('$_[0]', '$token{right}', $result)") } ],
	[ failed    => 'm_retry', 0, sub { (second_attempt($_[0], 'm_retry'), fail_by($_[0], 'right', q('permanent', 'm', 'E1'))) } ],
	[ exhausted => 'm_two',   0, sub { (second_attempt($_[0], 'm_two'), fail_by($_[0], 'right', q('retryable', 'm', 'E1'))) } ],
	[ exhausted_by_lapse => 'm_two', 40, sub { (second_attempt($_[0], 'm_two'), '+40', claim_by($_[0], 'm_two', 'foreign')) } ],
);

if (has_function('idem_retry'))
{
	push @states,
	  [ live_retried => 'm_retry', 0,
		sub { my $k = shift; (claim_by($k, 'm_retry', 'past'), fail_by($k, 'past', q('permanent', 'm', 'E1')),
			  "idem_retry('$k', 'test')", claim_by($k, 'm_retry', 'right')) } ];
}

my @live         = qw(live_first live_retry live_takeover live_retried);
my @lapsed_plain = qw(lapsed_first lapsed_retry lapsed_takeover);
my @lapsed_over  = qw(lapsed_used_up lapsed_late);
my @lapsed_doubt = qw(lapsed_unknown lapsed_unknown_used_up);
my @held         = (@live, @lapsed_plain, @lapsed_over, @lapsed_doubt);
my @lowered      = qw(lowered_waiting lowered_due);
my @finished     = qw(succeeded failed exhausted exhausted_by_lapse);
my @all          = map { $_->[0] } @states;

# attempts so far; the kinds of attempt that "previous" names
my %attempts = map { $_ => 2 } @all;
$attempts{$_} = 1 for qw(live_first lapsed_first);
my %previous = map { $_ => 'retryable_failed' } @all;
$previous{$_} = 'none' for qw(live_first lapsed_first);
$previous{$_} = 'lease_expired' for qw(live_takeover lapsed_takeover);
$previous{live_retried} = 'retried';

#---------------------------------------------------------------------------
# Calls: [name, [kinds of token], SQL that returns one text]
#---------------------------------------------------------------------------

my $claim_columns = <<'SQL';
concat_ws(' ', outcome, coalesce(attempts::text, '-'), coalesce(previous, '-'), coalesce(owner_token::text, 'no-token'),
	result_json, CASE WHEN outcome = 'failed' THEN error_code END)
SQL
my $fail_columns = "concat_ws(' ', status, attempts)";

sub claim_call
{
	my ($arguments) = @_;
	return sub { my ($k, $op, $t) = @_; my $a = $arguments; $a =~ s/TOKEN/'$t'/ if defined $t; $a =~ s/OP/'$op'/;
		"SELECT $claim_columns FROM idem_claim('$k', $a)" };
}

my @tokens = qw(right past foreign);
my @calls = (
	[ claim            => ['-'], claim_call($request) ],
	[ claim_named      => ['-'], claim_call("$request, OP") ],
	[ claim_token      => \@tokens, claim_call("$request, token => TOKEN") ],
	[ claim_other      => ['-'], claim_call(q('{"amount": 2}')) ],
	[ claim_other_with_token => \@tokens, claim_call(q('{"amount": 2}', token => TOKEN)) ],
	[ claim_no_request => ['-'], claim_call('NULL') ],
	[ claim_null_json  => ['-'], claim_call(q('null'::jsonb)) ],
	[ claim_other_operation => ['-'], claim_call("$request, 'something_else'") ],
	[ complete       => \@tokens, sub { "SELECT idem_complete('$_[0]', '$_[2]', $result)::text" } ],
	[ complete_other => \@tokens, sub { "SELECT idem_complete('$_[0]', '$_[2]', '{\"receipt\": 8}')::text" } ],
	[ complete_bytes => \@tokens, sub { "SELECT idem_complete('$_[0]', '$_[2]', $result, '\\x00')::text" } ],
	[ fail_retryable => \@tokens, sub { "SELECT $fail_columns FROM idem_fail('$_[0]', '$_[2]', 'retryable', 'msg', 'E9')" } ],
	[ fail_permanent => \@tokens, sub { "SELECT $fail_columns FROM idem_fail('$_[0]', '$_[2]', 'permanent', 'msg', 'E9')" } ],
	[ fail_unknown   => \@tokens, sub { "SELECT $fail_columns FROM idem_fail('$_[0]', '$_[2]', 'unknown', 'msg', 'E9')" } ],
	[ renew      => \@tokens, sub { "SELECT CASE WHEN r IS NULL THEN 'null' ELSE 'time' END FROM idem_renew('$_[0]', '$_[2]', '1 min') r" } ],
	[ release    => \@tokens, sub { "SELECT idem_release('$_[0]', '$_[2]')::text" } ],
	[ checkpoint => \@tokens, sub { "SELECT idem_checkpoint('$_[0]', '$_[2]', 'sent', '[1]')::text" } ],
	[ status     => ['-'], sub { "SELECT coalesce((idem_status('$_[0]')).status, 'null')" } ],
);

my %operator_call = (
	idem_retry   => [ op_retry   => ['-'], sub { "SELECT 'done' FROM idem_retry('$_[0]', reason => 'test')" } ],
	idem_revoke  => [ op_revoke  => ['-'], sub { "SELECT 'done' FROM idem_revoke('$_[0]', reason => 'test')" } ],
	idem_forget  => [ op_forget  => ['-'], sub { "SELECT 'done' FROM idem_forget('$_[0]', reason => 'test')" } ],
	idem_reap    => [ reap       => ['-'], sub { "SELECT 'done' FROM idem_reap()" } ]);
for my $function (sort keys %operator_call)
{
	push @calls, $operator_call{$function} if has_function($function);
}
push @calls,
  [ op_resolve_succeeded => ['-'], sub { "SELECT 'done' FROM idem_resolve('$_[0]', 'succeeded', reason => 'test', result => $result)" } ],
  [ op_resolve_failed => ['-'], sub { "SELECT 'done' FROM idem_resolve('$_[0]', 'failed', reason => 'test')" } ]
  if has_function('idem_resolve');

#---------------------------------------------------------------------------
# Expectations: $expect{call}{kind}{state} = [answer, record afterwards]
#
# Afterwards: "=" untouched, "absent", or
#	processing ATTEMPTS PREVIOUS TOKEN for LEASE
#	retryable_failed ATTEMPTS in DELAY CODE
#	unknown ATTEMPTS
#	failed ATTEMPTS TOKEN CODE
#	succeeded ATTEMPTS TOKEN RESULT
#---------------------------------------------------------------------------

my %expect;

# The same for many calls, kinds of token, and states; the values may be code.
sub expect
{
	my ($calls, $kinds, $states, $answer, $after) = @_;
	for my $call (ref $calls ? @$calls : $calls)
	{
		for my $kind (ref $kinds ? @$kinds : $kinds)
		{
			for my $state (ref $states ? @$states : $states)
			{
				$expect{$call}{$kind}{$state} =
				  [ map { ref $_ ? $_->($state, $kind) : $_ } $answer, $after ];
			}
		}
	}
	return;
}

my $next = sub { my ($st) = @_; return ($attempts{$st} // 0) + 1; };
my $n    = sub { my ($st) = @_; return $attempts{$st}; };

# ---- claims without a token of their own, and with a token ----

for my $call (qw(claim claim_named claim_token))
{
	my @kinds = $call eq 'claim_token' ? @tokens : ('-');
	my $given = sub { my ($st, $kind) = @_; return $kind eq '-' ? 'new' : $kind; };

	expect($call, \@kinds, 'absent',
		sub { "claimed 1 none " . $given->(@_) }, sub { "processing 1 none " . $given->(@_) . " for 00:00:30" });
	expect($call, \@kinds, \@live, sub { "in_progress " . $n->(@_) . " - no-token" }, '=');
	expect($call, \@kinds, \@lapsed_plain,
		sub { "claimed " . $next->(@_) . " lease_expired " . $given->(@_) },
		sub { "processing " . $next->(@_) . " lease_expired " . $given->(@_) . " for 00:00:30" });
	expect($call, \@kinds, [ @lapsed_over, @lowered ], 'failed 2 - no-token exhausted',
		sub { 'failed 2 ' . ($_[0] =~ /^lapsed/ ? 'right' : 'no-token') . ' exhausted' });
	expect($call, \@kinds, \@lapsed_doubt, 'unknown 2 - no-token', 'unknown 2');
	expect($call, \@kinds, 'retryable_waiting', 'retry_later 2 - no-token', '=');
	expect($call, \@kinds, 'retryable_due',
		sub { 'claimed 3 retryable_failed ' . $given->(@_) },
		sub { 'processing 3 retryable_failed ' . $given->(@_) . ' for 00:00:30' });
	expect($call, \@kinds, 'unknown', 'unknown 2 - no-token', '=');
	expect($call, \@kinds, 'succeeded', 'succeeded 2 - no-token {"receipt": 7}', '=');
	expect($call, \@kinds, 'failed', 'failed 2 - no-token E1', '=');
	expect($call, \@kinds, [qw(exhausted exhausted_by_lapse)], 'failed 2 - no-token exhausted', '=');
}

# The holder's own token gets the same claim again (C06).  A token of an earlier
# attempt is never given out again.
expect('claim_token', 'right', \@live, sub { "claimed " . $n->(@_) . " $previous{$_[0]} right" }, '=');
expect('claim_token', 'right', [ @lapsed_plain, 'retryable_due' ], '22023', '=');
expect('claim_token', 'past', [ qw(lapsed_retry lapsed_takeover retryable_due) ], '22023', '=');

# Another request: conflict, before anything else (C100).
expect('claim_other', '-', \@all, 'conflict - - no-token', '=');
expect('claim_other_with_token', \@tokens, \@all, 'conflict - - no-token', '=');
expect([qw(claim_no_request claim_null_json claim_other_operation)], '-', \@all, 'conflict - - no-token', '=');
expect([qw(claim_other claim_no_request claim_null_json claim_other_operation)], '-', 'absent',
	'claimed 1 none new', 'processing 1 none new for 00:00:30');
expect('claim_other_with_token', \@tokens, 'absent',
	sub { "claimed 1 none $_[1]" }, sub { "processing 1 none $_[1] for 00:00:30" });

# ---- finishing calls ----

my @finishing = qw(complete complete_other complete_bytes fail_retryable fail_permanent fail_unknown release checkpoint);

expect(\@finishing, \@tokens, \@all, 'ID001', '=');
expect(\@finishing, \@tokens, 'absent', 'ID002', '=');
expect('renew', \@tokens, \@all, 'null', '=');

# A lapse alone does not take the key from its holder.
expect('complete', 'right', \@held, 'true', sub { 'succeeded ' . $n->(@_) . ' right {"receipt": 7}' });
expect('complete_other', 'right', \@held, 'true', sub { 'succeeded ' . $n->(@_) . ' right {"receipt": 8}' });
expect('complete_bytes', 'right', \@held, 'true', sub { 'succeeded ' . $n->(@_) . ' right {"receipt": 7}' });
expect('complete', 'right', 'succeeded', 'false', '=');

my %backoff = (1 => '00:00:01', 2 => '00:00:02');
expect('fail_retryable', 'right', \@held,
	sub { 'retryable_failed ' . $n->(@_) }, sub { 'retryable_failed ' . $n->(@_) . ' in ' . $backoff{ $n->(@_) } . ' E9' });
expect('fail_retryable', 'right', 'live_retried', 'retryable_failed 2', 'retryable_failed 2 in 00:00:01 E9');
expect('fail_retryable', 'right', [ @lapsed_over, 'lapsed_unknown_used_up' ], 'failed 2', 'failed 2 right exhausted');
expect('fail_permanent', 'right', \@held, sub { 'failed ' . $n->(@_) }, sub { 'failed ' . $n->(@_) . ' right E9' });
expect('fail_unknown', 'right', \@held, sub { 'unknown ' . $n->(@_) }, sub { 'unknown ' . $n->(@_) });

my $again_for = sub { my ($st) = @_; return "processing " . $n->($st) . " $previous{$st} right for "; };
expect('renew', 'right', \@live, 'time', sub { $again_for->(@_) . '00:01:00' });
expect('checkpoint', 'right', \@live, '{"sent": [1]}', sub { $again_for->(@_) . '00:00:30' });

expect('release', 'right', [qw(live_first lapsed_first)], 'true', 'absent');
expect('release', 'right', [qw(live_takeover lapsed_takeover)], 'true', 'processing 1 lease_expired new for 00:00:00');
expect('release', 'right', [ grep { $previous{$_} =~ /^retr/ } @held ], 'true', 'retryable_failed 1 in 00:00:00 any');

# ---- reading ----

expect('status', '-', \@held, 'processing', '=');
expect('status', '-', [ qw(retryable_waiting retryable_due), @lowered ], 'retryable_failed', '=');
expect('status', '-', 'unknown', 'unknown', '=');
expect('status', '-', 'succeeded', 'succeeded', '=');
expect('status', '-', [qw(failed exhausted exhausted_by_lapse)], 'failed', '=');
expect('status', '-', 'absent', 'null', '=');

# ---- operators and the reaper act on what time has made of the record, whether or
# not it has been stored; "?" = left open: either ID003 and untouched, or done ----

my @operating = qw(op_retry op_resolve_succeeded op_resolve_failed op_revoke op_forget);
expect(\@operating, '-', \@all, 'ID003', '=');
expect(\@operating, '-', 'absent', 'ID002', '=');
expect('op_retry', '-', [ qw(unknown failed exhausted exhausted_by_lapse retryable_waiting retryable_due), @lowered ],
	'done', sub { 'retryable_failed ' . $n->(@_) . ' in 00:00:00 any' });
expect('op_retry', '-', [ @lapsed_over, @lapsed_doubt ], 'done', 'retryable_failed 2 in 00:00:00 any');
expect('op_resolve_succeeded', '-', 'unknown', 'done', 'succeeded 2 no-token {"receipt": 7}');
expect('op_resolve_failed', '-', 'unknown', 'done', 'failed 2 no-token any');
expect('op_resolve_succeeded', '-', \@lapsed_doubt, 'done', 'succeeded 2 no-token {"receipt": 7}');
expect('op_resolve_failed', '-', \@lapsed_doubt, 'done', 'failed 2 no-token any');
expect('op_revoke', '-', \@live, 'done', 'dead right');
expect('op_revoke', '-', \@lapsed_plain, 'done', 'dead right');
expect('op_revoke', '-', [ @lapsed_over, @lapsed_doubt ], '?', '?');
expect('op_forget', '-', [ qw(retryable_waiting retryable_due unknown), @lowered, @finished ], 'done', 'absent');
expect('op_forget', '-', [ @lapsed_over, @lapsed_doubt ], 'done', 'absent');

expect('reap', '-', \@all, 'done', '=');
expect('reap', '-', \@lapsed_over, 'done', 'failed 2 right exhausted');
expect('reap', '-', \@lapsed_doubt, 'done', 'unknown 2');
expect('reap', '-', \@lowered, 'done', 'failed 2 no-token exhausted');

#---------------------------------------------------------------------------
# Running a cell
#---------------------------------------------------------------------------

my $clock = 0;

sub set_clock
{
	my ($seconds) = @_;
	return if $seconds == $clock;
	$s->q("SET idempotency.clock_offset = '${seconds}s'");
	$clock = $seconds;
	return;
}

# The reaper acts on every record: it gets one only.
$s->q('CREATE TABLE aside AS SELECT * FROM idem_record');
sub put_aside
{
	$s->q('INSERT INTO aside SELECT * FROM idem_record; TRUNCATE idem_record');
	return;
}

sub set_up
{
	my ($state, $key) = @_;
	my ($name, $op, $ahead, $steps) = @$state;

	set_clock(0);
	$s->q("UPDATE idem_policy SET max_attempts = 5 WHERE operation = 'm_lowered'") if $op eq 'm_lowered';
	for my $step ($steps->($key))
	{
		if ($step =~ /^\+(\d+)$/) { set_clock($1); }
		else { $s->q("SELECT $step"); }
	}
	$s->q("UPDATE idem_policy SET max_attempts = 2 WHERE operation = 'm_lowered'") if $op eq 'm_lowered';
	set_clock($ahead);
	return;
}

# The row with its version; what a refused call may not touch.
sub image
{
	my ($key) = @_;
	return $s->q("SELECT tableoid::regclass, ctid, xmin, xmax, r::text FROM idem_record r WHERE idempotency_key = '$key'");
}

# What no call may ever change.
sub birth
{
	my ($key) = @_;
	return $s->q("SELECT operation, owner, request_hash, first_claimed_at FROM idem_record WHERE idempotency_key = '$key'");
}

sub named_token
{
	my ($text) = @_;
	$text =~ s/([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22})/$kind_of{$1} \/\/ 'new'/e;
	return $text;
}

sub after
{
	my ($key) = @_;
	my $row = $s->q(<<SQL);
SELECT CASE status
	WHEN 'processing' THEN concat_ws(' ', status, attempts, previous, owner_token, 'for', lease_until - updated_at)
	WHEN 'retryable_failed' THEN concat_ws(' ', status, attempts, 'in', retry_at - updated_at, error_code)
	WHEN 'unknown' THEN concat_ws(' ', status, attempts)
	WHEN 'failed' THEN concat_ws(' ', status, attempts, coalesce(owner_token::text, 'no-token'), error_code)
	ELSE concat_ws(' ', status, attempts, coalesce(owner_token::text, 'no-token'), result_json) END
FROM idem_record WHERE idempotency_key = '$key'
SQL
	return $row eq '' ? 'absent' : named_token($row);
}

my $cell = 0;
my $open_cells = 0;

sub run_cell
{
	my ($state, $call, $kind) = @_;
	my ($sname, $op) = @$state;
	my ($cname, undef, $sql) = @$call;
	my $key = 'm' . ++$cell;
	my $want = $expect{$cname}{$kind}{$sname} or return fail("no expectation for $sname x $cname x $kind");
	my ($answer, $then) = @$want;
	my $label = "$sname: $cname" . ($kind eq '-' ? '' : " by $kind token");

	put_aside() if $cname eq 'reap';
	set_up($state, $key);
	my $before = image($key);
	my $born = birth($key);
	my $got = $s->try($sql->($key, $op, $token{$kind}));
	$got = named_token($s->{out}) if $got eq '00000';
	my $image = image($key);
	my $now = $image eq $before ? '=' : after($key);

	if ($answer eq '?')
	{
		$open_cells++;
		return ok($now ne '=' || $got =~ /^(ID003|done)$/, "$label (open: $got, $now)");
	}
	if ($then eq 'dead right')
	{
		# revoked: whatever the row is, the token is dead
		is($got, $answer, $label);
		return is($s->try("SELECT idem_complete('$key', '$token{right}')"), 'ID001', "$label: token is dead");
	}
	$now =~ s/ in 00:00:00 \S+$/ in 00:00:00 any/ if $then =~ / any$/;
	$now =~ s/^(failed \d+ \S+) \S+$/$1 any/ if $then =~ /^failed .* any$/;
	is("$got -> $now", "$answer -> $then", $label);

	# A change leaves the identity of the record alone, and old tokens dead.
	return if $now eq '=' || $now eq 'absent' || $before eq '';
	is(birth($key), $born, "$label: identity kept");
	my @dead = $now =~ /^processing \d+ \S+ right/ ? qw(past foreign) : @tokens;
	@dead = grep { $now !~ /^processing \d+ \S+ $_ / } @dead;
	is(join(' ', map { $s->q("SELECT idem_renew('$key', '$token{$_}') IS NULL") } @dead),
		join(' ', ('t') x @dead), "$label: other tokens are dead");
	return;
}

for my $state (@states)
{
	for my $call (@calls)
	{
		run_cell($state, $call, $_) for @{ $call->[1] };
	}
}
set_clock(0);
note "$cell cells, $open_cells of them left open by the design";

#---------------------------------------------------------------------------
# What the storage code wrote fits the table's own rules (it does not check
# them itself), and each key is there once.
#---------------------------------------------------------------------------

put_aside();
is($s->try('CREATE TABLE checked (LIKE idem_record INCLUDING CONSTRAINTS); INSERT INTO checked SELECT * FROM aside'),
	'00000', 'every row fits the constraints of the table') or diag $s->{err};
is($s->q('SELECT count(*) FROM aside WHERE slice = 0') > 100, 1, '... open ones');
is($s->q('SELECT count(*) FROM aside WHERE slice = 1') > 100, 1, '... and finished ones');
is($s->q("SELECT count(*) FROM (SELECT FROM aside GROUP BY idempotency_key HAVING count(*) > 1) d"), '0', 'no key twice');

#---------------------------------------------------------------------------
# After a release the next claim tells what stood before the released one.
#---------------------------------------------------------------------------

sub after_release
{
	my ($steps, $seconds) = @_;
	my $key = 'r' . ++$cell;
	my @state = ('', 'm_retry', $seconds, $steps);
	set_up(\@state, $key);
	$s->q("SELECT idem_release('$key', '$token{right}')");
	my $got = $s->q("SELECT concat_ws(' ', outcome, attempts, previous) FROM idem_claim('$key', $request)");
	set_clock(0);
	return $got;
}

is(after_release(sub { claim_by($_[0], 'm_retry', 'right') }, 0), 'claimed 1 none', 'first attempt released: new again');
is(after_release(sub { second_attempt($_[0], 'm_retry') }, 0), 'claimed 2 retryable_failed', 'retry released: due');
is(after_release(sub { taken_over($_[0], 'm_retry') }, 40), 'claimed 2 lease_expired', 'takeover released: lapsed again');

# Malformed calls change nothing either.
$s->q('SELECT ' . claim_by('bad', 'm_retry', 'right'));
my $image = image('bad');
for my $bad (
	[ '22004', "idem_complete('bad', NULL)" ],
	[ '22004', "idem_complete(NULL, '$token{right}')" ],
	[ '22004', "idem_fail('bad', '$token{right}', NULL)" ],
	[ '22023', "idem_fail('bad', '$token{right}', 'Retryable')" ],
	[ '22023', "idem_fail('bad', '$token{right}', 'permanent', retry_after => '1 s')" ],
	[ '22023', "idem_renew('bad', '$token{right}', '0')" ],
	[ '22023', "idem_renew('bad', '$token{right}', '-1 s')" ],
	[ '22023', "idem_renew('bad', '$token{right}', '1 month')" ],
	[ '22004', "idem_checkpoint('bad', '$token{right}', NULL, '1')" ],
	[ '22004', "idem_claim(NULL, $request)" ],
	[ '22023', "idem_claim('bad', $request, lease => '-1 s')" ],
	[ '22023', "idem_claim('bad', $request, lease => '0')" ])
{
	is($s->try("SELECT $bad->[1]"), $bad->[0], "$bad->[1] is $bad->[0]");
}
is(image('bad'), $image, 'bad arguments change nothing');

$s->quit;
done_testing();
