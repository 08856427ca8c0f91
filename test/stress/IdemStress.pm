# IdemStress - many processes that use the extension at once, and the history of
# what they were answered.
#
#	IdemStress::setup($node)
#	IdemStress::run_round($node, $dir, $seed, $round, $seconds)	-> names of the log files
#	$history = IdemStress::History->new
#	$history->read(@files), $history->check($session)			-> list of violations
#
# A log file has one JSON object per line and call:
#	c	client			x	its transaction		auto	1 = the call was a transaction by itself
#	t0	sent			t1	answered (seconds)	op		what was called
#	key, tok, exec		st	SQLSTATE			ok		1 = this SQLSTATE is documented for the call
#	ans	columns of the answer, joined by |
#
# The rules of check() use only what is certain from these times: what was
# answered before another call was sent, happened before it.

package IdemStress;

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib", "$FindBin::RealBin/../t/lib";
use IdemTest;
use Time::HiRes qw(time usleep);

# Retention of finished records, seconds.
our $retention = 2;

my @kinds = (('client') x 8, ('recovery') x 2, ('reaper') x 3, ('operator') x 2, 'slow', 'slow', 'ddl', 'snapshot', 'killer');

sub setup
{
	my ($node) = @_;
	my $s = session($node);

	$s->q(<<SQL);
CREATE TABLE business (key text NOT NULL, exec text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE SEQUENCE handled;
UPDATE idem_policy SET retention = '$retention s', lease = '300 ms', max_attempts = 1000, backoff_base = '5 ms', backoff_cap = '50 ms' WHERE operation = 'default';
INSERT INTO idem_policy (operation, lease, max_attempts, backoff_base, backoff_cap, on_lease_expiry, store_request, notify, jitter) VALUES
	('retry', '200 ms', 10000, '1 ms', '20 ms', 'retry', true, false, 'full'),
	('few', '150 ms', 3, '0', '10 ms', 'retry', true, true, 'equal'),
	('doubt', '150 ms', 10000, '1 ms', '20 ms', 'unknown', true, true, 'none');
CREATE FUNCTION handle(key text, request jsonb, attempt integer) RETURNS jsonb LANGUAGE plpgsql AS \$\$
DECLARE
	n text := 'h' || nextval('handled');
	dice float8 := random();
BEGIN
	INSERT INTO business (key, exec) VALUES (key, n);
	IF dice < 0.1 THEN RAISE EXCEPTION 'later' USING ERRCODE = 'IDR00'; END IF;
	IF dice < 0.13 THEN RAISE EXCEPTION 'never' USING ERRCODE = 'IDP00'; END IF;
	IF dice < 0.16 THEN RAISE EXCEPTION 'perhaps' USING ERRCODE = 'IDU00'; END IF;
	IF dice < 0.3 THEN PERFORM pg_sleep(random() * 0.1); END IF;
	RETURN jsonb_build_object('exec', n);
END \$\$;
-- all in one call: claim, work, completion; or idem_once
CREATE FUNCTION rush(key text, exec text, once boolean) RETURNS text LANGUAGE plpgsql AS \$\$
DECLARE
	r idem_claim_result;
BEGIN
	IF once THEN
		IF NOT idem_once(key, jsonb_build_object('key', key)) THEN RETURN 'again'; END IF;
	ELSE
		SELECT * INTO r FROM idem_claim(key, jsonb_build_object('key', key));
		IF r.outcome <> 'claimed' THEN RETURN concat_ws('|', r.outcome, '~', r.attempts, '~', '~', coalesce(r.result_json->>'exec', '~')); END IF;
		PERFORM idem_complete(key, r.owner_token, jsonb_build_object('exec', exec));
	END IF;
	INSERT INTO business (key, exec) VALUES (rush.key, rush.exec);
	RETURN concat_ws('|', 'executed', '~', 1, '~', '~', exec);
END \$\$;
SQL
	return;
}

# One round: all processes for so many seconds.
sub run_round
{
	my ($node, $dir, $seed, $round, $seconds) = @_;
	my @file = map { "$dir/round$round-$_-$kinds[$_].jsonl" } 0 .. $#kinds;

	run_workers(
		scalar @kinds,
		sub {
			my ($i) = @_;
			srand($seed * 100_000 + $round * 100 + $i);
			my $w = IdemStress::Worker->new($node, "r$round.$kinds[$i]$i", $file[$i], time() + $seconds);
			@$w{qw(number round rush)} = ($i, $round, time() + $seconds / 6);
			my $method = "run_$kinds[$i]";
			$w->$method while $w->goes_on;
			$w->finish;
			return 1;
		});
	return @file;
}

package IdemStress::Worker;

use IdemTest;
use Time::HiRes qw(time usleep);

sub new
{
	my ($class, $node, $name, $file, $until) = @_;
	my $self = bless { rushed => 0,
		node => $node, name => $name, until => $until, x => 0, serial => 0,
		stale => [], recent => [] }, $class;

	open $self->{log}, '>', $file or die "$file: $!";
	$self->connect;
	return $self;
}

sub goes_on { return time() < $_[0]->{until}; }

sub finish
{
	my ($self) = @_;
	$self->{session}->quit;
	close $self->{log};
	return;
}

# Its maker may be killed while it connects.
sub connect
{
	my ($self) = @_;
	my $tries = 0;

	$self->{session}->lost if $self->{session};
	until ($self->{session} = eval { session($self->{node}, name => "stress $self->{name}") })
	{
		die "cannot connect: $@" if ++$tries > 50;
		usleep(20_000);
	}
	return;
}

sub chance { return rand() < $_[1]; }
sub pick { my ($self, @of) = @_; return $of[ int rand @of ]; }
sub nap { my ($self, $ms) = @_; usleep(rand($ms) * 1000); return; }

sub iso
{
	my ($self) = @_;
	return $self->pick('READ COMMITTED', 'READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE');
}

my @always = qw(00000 57014 57P01);

# A call; the answer is in {out}.  Named: key, tok, exec; ok = further SQLSTATEs
# that the documentation allows for this very call.
sub call
{
	my ($self, $op, $sql, %arg) = @_;
	my $s = $self->{session};
	my %ok = map { $_ => 1 } @always, split(' ', $arg{ok} // '');
	my $auto = $self->{open} ? 0 : 1;

	$ok{40001} = 1 if $self->{open} && $self->{open} eq 'SERIALIZABLE';
	$self->{x}++ if $auto;
	my $t0 = time();
	my $st = $s->try($sql);
	my $t1 = time();
	my $lost = $s->{lost};
	# the last words of a backend that was killed do not always arrive
	$st = '57P01' if $lost;
	my $ok = $ok{$st} ? 1 : 0;
	$ok = 0 if $s->{err} =~ /passed over an error/;
	$self->{out} = $st eq '00000' ? $s->{out} : '';
	$self->note($op, $t0, $t1, $st, $ok, $auto, ans => $ok ? $self->{out} : "$s->{err} -- $sql", %arg);
	if ($lost)
	{
		$self->{open} = '';
		$self->connect;
	}
	$self->{st} = $st;
	return $st eq '00000';
}

sub note
{
	my ($self, $op, $t0, $t1, $st, $ok, $auto, %arg) = @_;
	my $ans = $arg{ans} // '';

	$ans =~ s/(["\\])/\\$1/g;
	$ans =~ s/[\x00-\x1f]+/ /g;
	printf { $self->{log} }
	  qq({"c":"%s","x":%d,"auto":%d,"t0":%.6f,"t1":%.6f,"op":"%s","key":"%s","tok":"%s","exec":"%s","st":"%s","ok":%d,"ans":"%s"}\n),
	  $self->{name}, $self->{x}, $auto, $t0, $t1, $op, $arg{key} // '', $arg{tok} // '', $arg{exec} // '', $st, $ok, $ans;
	return;
}

sub begin
{
	my ($self, $iso) = @_;
	$self->{x}++;
	$self->{open} = $iso // $self->iso;
	return $self->call('begin', "BEGIN ISOLATION LEVEL $self->{open}", exec => $self->{open});
}

sub commit
{
	my ($self) = @_;
	return 0 unless $self->{open};
	my $done = $self->call('commit', 'COMMIT');
	$self->{open} = '';
	return $done;
}

sub rollback
{
	my ($self) = @_;
	return unless $self->{open};
	$self->call('rollback', 'ROLLBACK');
	$self->{open} = '';
	return;
}

# ---- keys ----

sub hot { my ($self) = @_; return $self->pick(map { "s:retry:h$_" } 1 .. 5) if $self->chance(0.7); return $self->pick('s:few:h1', 's:few:h2', 's:doubt:h1', 'opaque-h1'); }
sub warm { my ($self) = @_; return 's:' . $self->pick(qw(retry retry few doubt)) . ':w' . int(rand 60); }
sub cold { my ($self) = @_; return "s:retry:$self->{name}-" . ++$self->{serial}; }

sub key
{
	my ($self) = @_;
	my $dice = rand();

	return $self->hot if $dice < 0.4;
	return $self->warm if $dice < 0.7;
	if ($dice < 0.85 && @{ $self->{recent} }) { return $self->pick(@{ $self->{recent} }); }
	return $self->cold;
}

# ---- calls of clients ----

my $claim_columns = "outcome, owner_token, attempts, extract(epoch FROM lease_until), previous, result_json->>'exec'";

sub request { my ($key) = @_; return qq('{"key": "$key"}'); }

sub may_40001 { my ($self) = @_; return $self->{open} && $self->{open} ne 'READ COMMITTED' ? '40001' : ''; }

# Returns the token if claimed.
sub claim
{
	my ($self, $key, %arg) = @_;
	my $sql = "SELECT $claim_columns FROM idem_claim('$key', " . ($arg{request} // request($key));

	$sql .= ", lease => '$arg{lease} ms'" if $arg{lease};
	$sql .= ", wait => '$arg{wait} ms'" if $arg{wait};
	$sql .= ", token => '$arg{token}'" if $arg{token};
	$self->call('claim', "$sql)", key => $key, tok => $arg{token}, ok => $self->may_40001 . ' ' . ($arg{ok} // '')) or return;
	my ($outcome, $token) = split /\|/, $self->{out};
	return unless $outcome eq 'claimed';
	push @{ $self->{stale} }, [ $key, $token ];
	shift @{ $self->{stale} } if @{ $self->{stale} } > 100;
	return $token;
}

sub business
{
	my ($self, $key) = @_;
	my $exec = "$self->{name}.$self->{x}." . ++$self->{serial};

	$self->call('business', "INSERT INTO business (key, exec) VALUES ('$key', '$exec')", key => $key, exec => $exec) or return;
	return $exec;
}

# $held = nobody can have taken the key
sub complete
{
	my ($self, $key, $token, $exec, $held) = @_;
	my $result = defined $exec ? qq('{"exec": "$exec"}') : 'NULL';

	return $self->call('complete', "SELECT idem_complete('$key', '$token', $result)",
		key => $key, tok => $token, exec => $exec, ok => $held ? '' : 'ID001 ID002');
}

sub fail
{
	my ($self, $key, $token, $held) = @_;
	my $kind = $self->pick(qw(retryable retryable retryable permanent unknown));
	my $more = $kind eq 'retryable' && $self->chance(0.5) ? ", retry_after => '0'" : '';

	return $self->call('fail', "SELECT status FROM idem_fail('$key', '$token', '$kind', 'because', '08006'$more)",
		key => $key, tok => $token, ok => $held ? '' : 'ID001 ID002');
}

sub release
{
	my ($self, $key, $token, $held) = @_;
	return $self->call('release', "SELECT idem_release('$key', '$token')", key => $key, tok => $token, ok => $held ? '' : 'ID001 ID002');
}

sub renew
{
	my ($self, $key, $token) = @_;
	my $lease = $self->chance(0.5) ? ", '" . int(50 + rand 300) . " ms'" : '';
	return $self->call('renew', "SELECT extract(epoch FROM idem_renew('$key', '$token'$lease))", key => $key, tok => $token);
}

sub checkpoint
{
	my ($self, $key, $token) = @_;
	return $self->call('checkpoint', "SELECT idem_checkpoint('$key', '$token', 'step" . int(rand 3) . "', '" . int(rand 1000) . "')",
		key => $key, tok => $token, ok => 'ID001 ID002');
}

sub done_with
{
	my ($self, $key) = @_;
	push @{ $self->{recent} }, $key;
	shift @{ $self->{recent} } if @{ $self->{recent} } > 12;
	return;
}

# ---- what a client does ----

sub run_client
{
	my ($self) = @_;
	my $dice = rand();

	return $self->rush if time() < $self->{rush};
	return $self->one_transaction if $dice < 0.40;
	return $self->two_transactions if $dice < 0.70;
	return $self->execute if $dice < 0.76;
	return $self->once if $dice < 0.82;
	return $self->zombie if $dice < 0.89;
	return $self->caller_token if $dice < 0.92;
	return $self->batch if $dice < 0.95;
	return $self->two_keys(sort $self->warm, $self->warm) if $dice < 0.97;
	return $self->two_keys($self->pick([ 's:retry:p1', 's:retry:p2' ], [ 's:retry:p2', 's:retry:p1' ])->@*, '40P01') if $dice < 0.985;
	return $self->conflict;
}

# At the beginning of a round all clients run through the same new keys, without
# a pause between the statements: who is behind is faster, so they meet at the front.
sub rush
{
	my ($self) = @_;
	my $t0 = time();
	my @key = map { "rush$self->{round}-" . $self->{rushed}++ } 1 .. 40;
	my $once = $self->{number} % 4 == 3 ? 'true' : 'false';

	$self->call('rush', join(";\n", map { "SELECT rush('$_', '$self->{name}.$_', $once)" } @key), ok => 'ID003') or return;
	my $t1 = time();
	my @answer = split /\n/, $self->{out};
	$self->note('execute', $t0, $t1, '00000', 1, 1, key => $key[$_], ans => $answer[$_]) for 0 .. $#key;
	return;
}

# Claim, work and completion in one transaction.
sub one_transaction
{
	my ($self) = @_;
	my $key = $self->key;
	my $token;
	my $exec;

	$self->begin or return $self->rollback;
	if ($self->chance(0.1))
	{
		# a claim that is rolled back to a savepoint never was
		$self->call('savepoint', 'SAVEPOINT s') or return $self->rollback;
		$self->claim($key);
		return unless $self->{open};
		$self->call('rollback_to', 'ROLLBACK TO s') or return $self->rollback;
	}
	$token = $self->claim($key, $self->chance(0.2) ? (wait => 50) : (), $self->chance(0.3) ? (lease => 40) : ());
	return $self->rollback if $self->{st} ne '00000' || !$self->{open};
	return $self->chance(0.5) ? $self->commit : $self->rollback unless $token;
	if ($self->chance(0.15))
	{
		# the work fails: its writes go, the failure stays
		$self->call('savepoint', 'SAVEPOINT s') or return $self->rollback;
		$self->business($key) or return $self->rollback;
		$self->call('rollback_to', 'ROLLBACK TO s') or return $self->rollback;
		($self->chance(0.8) ? $self->fail($key, $token, 1) : $self->release($key, $token, 1)) or return $self->rollback;
		return $self->commit;
	}
	$exec = $self->business($key) or return $self->rollback;
	$self->nap(20) if $self->chance(0.3);
	if ($self->chance(0.1)) { $self->renew($key, $token) or return $self->rollback; }
	$self->complete($key, $token, $exec, 1) or return $self->rollback;
	if ($self->chance(0.1)) { $self->complete($key, $token, $exec, 1) or return $self->rollback; }
	return $self->rollback if $self->chance(0.1);
	$self->commit && $self->done_with($key);
	return;
}

# The claim is committed first.
sub two_transactions
{
	my ($self) = @_;
	my $key = $self->key;
	my $token = $self->claim($key, $self->chance(0.2) ? (wait => 50) : (), $self->chance(0.5) ? (lease => 20 + int rand 200) : ());
	my $exec;

	return unless $token;
	return if $self->chance(0.08);
	$self->renew($key, $token) if $self->chance(0.2);
	if ($self->chance(0.2)) { $self->checkpoint($key, $token) or return; }
	$self->nap(150) if $self->chance(0.15);
	if ($self->chance(0.15)) { $self->fail($key, $token); return; }
	if ($self->chance(0.08)) { $self->release($key, $token); return; }
	for my $try (1 .. 3)
	{
		$self->begin or return $self->rollback;
		$exec = $self->business($key);
		$self->nap(50) if $self->chance(0.1);
		if ($exec && $self->complete($key, $token, $exec) && !$self->chance(0.15))
		{
			$self->commit && $self->done_with($key);
			return;
		}
		my $over = $self->{st} =~ /^ID/;
		$self->rollback;
		return if $over;
	}
	return;
}

sub execute
{
	my ($self) = @_;
	my $key = $self->key;
	my $together = $self->chance(0.4);

	if ($together) { $self->begin or return $self->rollback; }
	$self->call('execute', "SELECT $claim_columns FROM idem_execute('$key', " . request($key) . ", 'handle(text, jsonb, integer)')",
		key => $key, ok => $self->may_40001) or return $self->rollback;
	$self->done_with($key) if $self->{out} =~ /^executed/;
	return $self->chance(0.8) ? $self->commit : $self->rollback if $together;
	return;
}

sub once
{
	my ($self) = @_;
	my $key = $self->key;
	my $first;

	$self->begin or return $self->rollback;
	$self->call('once', "SELECT idem_once('$key', " . request($key) . ')', key => $key, ok => 'ID003 22023 ' . $self->may_40001)
	  or return $self->rollback;
	$first = $self->{out} eq 't';
	if ($first) { $self->business($key) or return $self->rollback; }
	return $self->rollback if $self->chance(0.1);
	$self->commit && $first && $self->done_with($key);
	return;
}

# Calls with tokens of the past.
sub zombie
{
	my ($self) = @_;
	my $old = $self->pick(@{ $self->{stale} }) or return;
	my ($key, $token) = @$old;
	my $dice = rand();

	return $self->renew($key, $token) if $dice < 0.2;
	return $self->checkpoint($key, $token) if $dice < 0.4;
	return $self->release($key, $token) if $dice < 0.5;
	return $self->fail($key, $token) if $dice < 0.6;
	return $self->claim($key, token => $token, ok => '22023') if $dice < 0.7;
	$self->begin or return $self->rollback;
	my $exec = $self->business($key);
	if ($exec && $self->complete($key, $token, $exec)) { return $self->commit; }
	return $self->rollback;
}

sub caller_token
{
	my ($self) = @_;
	my $key = $self->key;
	my $token = sprintf '%08x-0000-4000-8000-%012x', int rand 2**32, int rand 2**40;
	my $given = $self->claim($key, token => $token) or return;

	$given = $self->claim($key, token => $token, ok => '22023') or return;
	$self->begin or return $self->rollback;
	my $exec = $self->business($key);
	if ($exec && $self->complete($key, $token, $exec)) { $self->commit && $self->done_with($key); return; }
	return $self->rollback;
}

sub batch
{
	my ($self) = @_;
	my %seen;
	my @key = grep { !$seen{$_}++ } map { $self->key } 1 .. 6;
	my $t0 = time();

	$self->call('claim_many', 'SELECT key, outcome, owner_token, attempts, extract(epoch FROM lease_until), previous FROM idem_claim_many(ARRAY['
		  . join(', ', map { "'$_'" } @key) . '], ARRAY[' . join(', ', map { request($_) . '::jsonb' } @key) . "], lease => '300 ms')") or return;
	my @mine = $self->note_claims($t0);
	return unless @mine;
	$self->begin or return $self->rollback;
	my (@keys, @tokens, @results, @execs);
	for my $m (@mine)
	{
		my $exec = $self->business($m->[0]) or return $self->rollback;
		push @keys, "'$m->[0]'";
		push @tokens, "'$m->[1]'";
		push @results, qq('{"exec": "$exec"}'::jsonb);
		push @execs, $exec;
	}
	$t0 = time();
	$self->call('complete_many', 'SELECT completed FROM idem_complete_many(ARRAY[' . join(', ', @keys) . '], ARRAY['
		  . join(', ', @tokens) . ']::uuid[], ARRAY[' . join(', ', @results) . '])', ok => 'ID001 ID002') or return $self->rollback;
	my @answer = split /\n/, $self->{out};
	for my $i (0 .. $#mine)
	{
		$self->note('complete', $t0, time(), '00000', 1, 0, key => $mine[$i][0], tok => $mine[$i][1], exec => $execs[$i], ans => $answer[$i]);
	}
	return $self->rollback if $self->chance(0.15);
	return $self->commit;
}

# Notes each row (key, outcome, token, ...) of the last answer as a claim of its own.
sub note_claims
{
	my ($self, $t0) = @_;
	my $t1 = time();
	my @mine;

	for my $line (split /\n/, $self->{out})
	{
		my ($key, @answer) = split /\|/, $line;
		$self->note('claim', $t0, $t1, '00000', 1, $self->{open} ? 0 : 1, key => $key, ans => join('|', @answer, '~'));
		push @mine, [ $key, $answer[1] ] if $answer[0] eq 'claimed';
	}
	return @mine;
}

# Two keys in one transaction; with a deadlock allowed where the order is free.
sub two_keys
{
	my ($self, $a, $b, $ok) = @_;
	my @done;

	return if $a eq $b;
	$self->begin or return $self->rollback;
	for my $key ($a, $b)
	{
		if ($ok)
		{
			# idem_once waits, as a unique index does
			$self->call('once', "SELECT idem_once('$key', " . request($key) . ')', key => $key, ok => "ID003 22023 $ok " . $self->may_40001)
			  or return $self->rollback;
			if ($self->{out} eq 't') { $self->business($key) or return $self->rollback; }
			$self->nap(10);
			next;
		}
		my $token = $self->claim($key);
		return $self->rollback if $self->{st} ne '00000' || !$self->{open};
		next unless $token;
		my $exec = $self->business($key) or return $self->rollback;
		$self->complete($key, $token, $exec, 1) or return $self->rollback;
		push @done, $key;
	}
	if ($self->commit) { $self->done_with($_) for @done; }
	return;
}

sub conflict
{
	my ($self) = @_;
	my $key = $self->key;
	my $token = $self->claim($key, request => q('{"other": true}')) or return;
	$self->release($key, $token);
	return;
}

# ---- the others ----

sub run_recovery
{
	my ($self) = @_;
	my $t0 = time();

	$self->call('claim_due', 'SELECT key, outcome, owner_token, attempts, extract(epoch FROM lease_until), previous FROM idem_claim_due('
		  . $self->pick('NULL', "'retry'", "'few'") . ', ' . (1 + int rand 3) . ')') or return;
	my @mine = $self->note_claims($t0);
	$self->nap(20) unless @mine;
	for my $m (@mine)
	{
		my ($key, $token) = @$m;
		next if $self->chance(0.05);
		if ($self->chance(0.2)) { $self->fail($key, $token); next; }
		if (!$self->begin) { $self->rollback; next; }
		my $exec = $self->business($key);
		if ($exec && $self->complete($key, $token, $exec) && !$self->chance(0.1)) { $self->commit; }
		else { $self->rollback; }
	}
	return;
}

sub run_reaper
{
	my ($self) = @_;
	my $sql = 'SELECT expired, exhausted, skipped, purged, rotated, more FROM idem_reap(' . (1 + int rand 50) . ')';

	if ($self->chance(0.15))
	{
		$self->begin('READ COMMITTED') or return $self->rollback;
		$self->call('reap', $sql) or return $self->rollback;
		$self->nap(60);
		$self->chance(0.5) ? $self->commit : $self->rollback;
	}
	else { $self->call('reap', $sql); }
	$self->nap(100);
	return;
}

sub run_operator
{
	my ($self) = @_;
	my ($status, $sql) = @{ $self->pick(
			[ "'failed', 'unknown', 'retryable_failed', 'succeeded'", 'idem_retry(%s, %s)' ],
			[ "'failed', 'unknown'", 'idem_retry(%s, %s)' ],
			[ "'unknown', 'processing'", q(idem_resolve(%s, 'succeeded', %s, '{"exec": "resolved"}')) ],
			[ "'unknown'", q(idem_resolve(%s, 'failed', %s)) ],
			[ "'processing', 'processing', 'succeeded'", 'idem_revoke(%s, %s)' ],
			[ "'succeeded', 'failed', 'unknown', 'retryable_failed'", 'idem_forget(%s, %s)' ]) };
	my ($op) = $sql =~ /idem_(\w+)/;
	my $together = $self->chance(0.3);

	$self->nap(40);
	if ($self->chance(0.1))
	{
		$self->call('retry_many', q(SELECT sum(retried), sum(skipped) FROM idem_retry_many(') . $self->pick(qw(retry few)) . q(', NULL, 'stress', 20)));
		return;
	}
	my $key = $self->hot;
	if ($self->chance(0.7))
	{
		$self->call('look', "SELECT idempotency_key FROM idem_record WHERE status IN ($status) ORDER BY random() LIMIT 1") or return;
		$key = $self->{out} or return;
	}
	if ($together) { $self->begin or return $self->rollback; }
	$self->call($op, 'SELECT ' . sprintf($sql, "'$key'", "'stress'"), key => $key, ok => 'ID002 ID003') or return $self->rollback;
	return unless $together;
	$self->nap(50);
	return $self->chance(0.6) ? $self->commit : $self->rollback;
}

sub run_ddl
{
	my ($self) = @_;
	my $t = 'idem_record_' . $self->pick(qw(open open 1 2 3 4));
	my $sql = $self->pick(
		"VACUUM $t", "VACUUM $t", "ANALYZE $t", 'VACUUM idem_ring', "VACUUM FREEZE $t",
		"REINDEX INDEX CONCURRENTLY ${t}_pkey",
		"REINDEX TABLE CONCURRENTLY $t",
		"CREATE INDEX ${t}_extra ON $t (updated_at)",
		"CREATE INDEX ${t}_part ON $t ((upper(idempotency_key))) WHERE status = 'succeeded'",
		"CREATE INDEX CONCURRENTLY ${t}_extra ON $t (attempts)",
		"DROP INDEX ${t}_extra", "DROP INDEX ${t}_part", "DROP INDEX CONCURRENTLY ${t}_extra",
		'SELECT count(*) FROM idem_stats', 'CHECKPOINT');

	$self->call('ddl', $sql, ok => '42P07 42704');
	# what a cancelled REINDEX leaves
	if ($self->call('look', q(SELECT 'DROP INDEX ' || indexrelid::regclass FROM pg_index WHERE NOT indisvalid AND indexrelid::regclass::text ~ '_cc(new|old)' LIMIT 1))
		&& $self->{out} && $self->chance(0.3))
	{
		$self->call('ddl', $self->{out}, ok => '42704 2BP01');
	}
	$self->nap(150);
	return;
}

# An old snapshot, with or without locks on the slices, that claims in the end.
sub run_snapshot
{
	my ($self) = @_;
	my $key = $self->hot;

	$self->nap(500);
	$self->begin('REPEATABLE READ') or return $self->rollback;
	$self->call('look', $self->chance(0.3) ? 'SELECT count(*) FROM idem_record' : 'SELECT 1') or return $self->rollback;
	usleep(1_000_000 * (0.3 + rand(1.2 * $IdemStress::retention)));
	my $token = $self->claim($key);
	return $self->rollback if $self->{st} ne '00000' || !$self->{open};
	if ($token)
	{
		my $exec = $self->business($key) or return $self->rollback;
		$self->complete($key, $token, $exec, 1) or return $self->rollback;
	}
	return $self->commit;
}

# Transactions that are open longer than the slice they add to is current.  The
# retention of their records begins with the commit: until then every claim must
# find them.
sub run_slow
{
	my ($self) = @_;
	my $r = $IdemStress::retention;
	my @key = map { $self->cold } 1 .. 5;
	my $current;
	my $committed;

	if ($self->{until} - time() < 2.2 * $r) { usleep(100_000); return; }
	$self->begin('READ COMMITTED') or return $self->rollback;
	for my $key (@key)
	{
		my $token = $self->claim($key, lease => 10_000) or return $self->rollback;
		my $exec = $self->business($key) or return $self->rollback;
		$self->complete($key, $token, $exec, 1) or return $self->rollback;
		$self->call('look', "SELECT slice FROM idem_record WHERE idempotency_key = '$key'") or return $self->rollback;
		$current = $self->{out};
	}
	while (time() < $self->{until})
	{
		$self->call('look', "SELECT state FROM idem_ring WHERE slice = $current") or return $self->rollback;
		last if $self->{out} ne 'current' && $self->{out} ne '';
		usleep(20_000);
	}
	usleep(250_000 * $r);
	$self->commit or return;
	$committed = time();
	while (time() < $committed + 0.95 * $r && time() < $self->{until})
	{
		my $key = $self->pick(@key);
		my $token = $self->claim($key);
		if ($token) { $self->release($key, $token); return; }
		usleep(20_000);
	}
	return;
}

sub run_killer
{
	my ($self) = @_;
	my $what = $self->chance(0.7) ? 'pg_cancel_backend' : 'pg_terminate_backend';
	my $where = $self->chance(0.5) ? "AND state = 'active'" : '';

	$self->nap(150);
	$self->call('kill', "SELECT $what(pid) FROM (SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'stress %'"
		  . " AND application_name NOT LIKE '%.slow%' AND pid <> pg_backend_pid() $where ORDER BY random() LIMIT 1) s");
	return;
}

package IdemStress::History;

use Time::HiRes qw(time);

sub new
{
	my ($class) = @_;
	return bless { writes => {}, claims => {}, execs => {}, replays => [], bad => [], count => {}, committed => {} }, $class;
}

my $line_re = qr/^\{"c":"([^"]*)","x":(\d+),"auto":(\d),"t0":([\d.]+),"t1":([\d.]+),"op":"(\w+)","key":"([^"]*)","tok":"([^"]*)","exec":"([^"]*)","st":"(\w+)","ok":(\d),"ans":"(.*)"\}$/;

# Does the answer say that the call wrote the key's record?
sub wrote
{
	my ($e) = @_;
	return 0 if $e->{st} ne '00000' || $e->{key} eq '';
	return $e->{ans} =~ /^claimed\|/ if $e->{op} eq 'claim';
	return $e->{ans} =~ /^executed\|/ if $e->{op} eq 'execute';
	return $e->{ans} eq 't' if $e->{op} eq 'complete' || $e->{op} eq 'once';
	return $e->{ans} ne '~' if $e->{op} eq 'renew';
	return $e->{op} =~ /^(?:fail|release|checkpoint|retry|resolve|revoke|forget)$/ ? 1 : 0;
}

sub read
{
	my ($self, @file) = @_;

	for my $file (@file)
	{
		my ($x, @events) = ('');
		open my $fh, '<', $file or die "$file: $!";
		while (my $line = <$fh>)
		{
			chomp $line;
			my %e;
			(@e{qw(c x auto t0 t1 op key tok exec st ok ans)} = $line =~ $line_re) or die "$file: strange line $line";
			push @{ $self->{bad} }, "error not documented for $e{op}: $e{st} key $e{key} $e{ans}" unless $e{ok};
			my ($word) = $e{op} eq 'claim' || $e{op} eq 'execute' ? $e{ans} =~ /^(\w*)/ : '';
			$self->{count}{ $e{st} ne '00000' ? "$e{op} $e{st}" : $word ? "$e{op} $word" : $e{op} }++;
			$self->{count}{"previous $1"}++ if $e{op} eq 'claim' && $e{ans} =~ /^claimed\|[^|]*\|[^|]*\|[^|]*\|(\w+)/;
			if ($e{op} eq 'reap' && $e{st} eq '00000')
			{
				my @n = split /\|/, $e{ans};
				$self->{count}{"reap: $_"} += shift @n for qw(expired exhausted skipped purged rotated);
			}
			if ($x ne $e{x}) { $self->transaction(@events); @events = (); $x = $e{x}; }
			push @events, \%e;
		}
		$self->transaction(@events);
	}
	return;
}

# Takes in the events of one transaction: which writes stand, and between which
# times they were held uncommitted for certain.
sub transaction
{
	my ($self, @events) = @_;
	return unless @events;
	my $last = $events[-1];
	my $alive = 0;
	my ($fate, $sent, $answered) = ('aborted', 0, 0);
	my %undone;
	my $savepoint;
	my $failed = 0;
	my $snapshot;				# answered after the snapshot of the transaction was taken

	for my $i (0 .. $#events)
	{
		my $e = $events[$i];
		$failed = 1 if $e->{st} ne '00000';
		my $alive_then = $alive;
		$alive = $e->{t1} if $e->{st} eq '00000' && $e->{op} ne 'commit' && $e->{op} ne 'rollback';
		$savepoint = $i if $e->{op} eq 'savepoint';
		$e->{snapshot} = $snapshot;
		$snapshot //= $e->{t1} if $events[0]{exec} =~ /REPEATABLE|SERIALIZABLE/ && $e->{op} !~ /^(?:begin|savepoint|rollback_to)$/ && $e->{st} eq '00000';
		if ($e->{op} eq 'rollback_to' && $e->{st} eq '00000')
		{
			$undone{$_} = $failed ? $alive_then : $e->{t0} for $savepoint .. $i;
			$failed = 0;
		}
		if ($e->{op} =~ /^(?:commit|rollback)$/ && $e->{st} eq '00000')
		{
			$alive = $e->{t0} unless $failed;
			($fate, $sent, $answered) = ('committed', $e->{t0}, $e->{t1}) if $e->{op} eq 'commit' && !$failed;
		}
		($fate, $sent, $answered) = ('doubt', $e->{t0}, $e->{t1}) if $e->{op} eq 'commit' && $e->{st} =~ /^57/;
	}
	for my $i (0 .. $#events)
	{
		my $e = $events[$i];
		if ($e->{auto})
		{
			my $lost = $e->{st} =~ /^57/;
			@$e{qw(fate sent answered until)} = ($lost ? 'doubt' : $e->{st} eq '00000' ? 'committed' : 'aborted', $e->{t0}, $e->{t1}, $e->{t1});
		}
		else { @$e{qw(fate sent answered until)} = ($undone{$i} ? 'aborted' : $fate, $sent, $answered, $undone{$i} // $alive); }
		$self->event($e);
	}
	return;
}

sub event
{
	my ($self, $e) = @_;

	if ($e->{op} eq 'claim' && $e->{st} eq '00000')
	{
		my ($outcome, $token, undef, $lease, undef, $exec) = split /\|/, $e->{ans};
		if ($outcome eq 'claimed')
		{
			$e->{tok} = $token;
			$e->{lease} = $lease;
			push @{ $self->{claims}{ $e->{key} } }, $e;
		}
		push @{ $self->{replays} }, [ $e, $exec ] if $outcome eq 'succeeded';
	}
	if ($e->{op} eq 'execute' && $e->{st} eq '00000')
	{
		my ($outcome, undef, undef, undef, undef, $exec) = split /\|/, $e->{ans};
		$self->{execs}{$exec} = $e if $outcome eq 'executed';
		push @{ $self->{replays} }, [ $e, $exec ] if $outcome eq 'succeeded';
	}
	$self->{execs}{ $e->{exec} } = $e if $e->{op} eq 'business' && $e->{st} eq '00000';
	push @{ $self->{ends}{ $e->{key} } }, $e if $e->{op} =~ /^(?:complete|fail|release|renew|revoke|forget|resolve|retry|execute|once)$/;
	push @{ $self->{writes}{ $e->{key} } }, $e if wrote($e);
	return;
}

sub show
{
	my ($e) = @_;
	return sprintf '%s#%d %s [%.6f %.6f] %s tok %s %s', @$e{qw(c x op t0 t1 fate)}, $e->{tok} || '-', $e->{ans};
}

# Two transactions never hold an uncommitted write of the same key at once.
sub check_writes
{
	my ($self) = @_;
	my @out;

	for my $key (keys %{ $self->{writes} })
	{
		my @w = sort { $a->{t0} <=> $b->{t0} } @{ $self->{writes}{$key} };
		for my $i (0 .. $#w)
		{
			my $held = $w[$i];
			next if $held->{auto};
			for my $j (0 .. $#w)
			{
				my $other = $w[$j];
				last if $other->{t0} > $held->{until};
				next unless $other->{t0} > $held->{t1} && $other->{t1} < $held->{until};
				next if $other->{c} eq $held->{c} && $other->{x} == $held->{x};
				push @out, "write in between: key $key: " . show($held) . ' until ' . $held->{until} . ' / ' . show($other);
			}
		}
	}
	return @out;
}

# No call is accepted with a token after another claim of the key was committed,
# and no claim is given while another one's lease runs.
sub check_tokens
{
	my ($self) = @_;
	my @out;

	for my $key (keys %{ $self->{claims} })
	{
		my @claims = sort { $a->{t0} <=> $b->{t0} } @{ $self->{claims}{$key} };
		for my $w (@{ $self->{writes}{$key} })
		{
			next unless $w->{op} =~ /^(?:complete|fail|release|renew|checkpoint)$/;
			# after the key was forgotten or purged, an old token may claim it again
			my ($own) = grep { $_->{tok} eq $w->{tok} && $_->{t0} < $w->{t0} } reverse @claims;
			next unless $own;
			for my $c (@claims)
			{
				last if $c->{t0} > $w->{t0};
				next if $c->{tok} eq $w->{tok} || $c->{fate} ne 'committed' || $c->{t0} < $own->{t1} || $c->{answered} > $w->{t0};
				push @out, "superseded token accepted: key $key: " . show($own) . ' / ' . show($c) . ' / ' . show($w);
				last;
			}
		}
		for my $i (1 .. $#claims)
		{
			my ($c, $d) = @claims[ $i - 1, $i ];
			next if $c->{fate} ne 'committed' || $c->{tok} eq $d->{tok} || $d->{t0} < $c->{answered} || $d->{t1} >= $c->{lease};
			next if grep { $_->{t1} > $c->{t0} && $_->{t0} < $d->{t1} && ($_->{st} eq '00000' || $_->{st} =~ /^57/) } @{ $self->{ends}{$key} };
			push @out, "claimed in spite of a lease: key $key: " . show($c) . ' / ' . show($d);
		}
	}
	return @out;
}

# What the tables say.
sub load
{
	my ($self, $s) = @_;
	my %t = (business => {}, forgets => {}, records => {});
	my $rows = sub { return map { [ split /\|/ ] } split /\n/, $s->q($_[0]); };

	$t{before} = time();
	push @{ $t{business}{ $_->[0] } }, { exec => $_->[1], at => $_->[2] }
	  for $rows->('SELECT key, exec, extract(epoch FROM at) FROM business ORDER BY key, at');
	push @{ $t{forgets}{ $_->[0] } }, $_->[1]
	  for $rows->("SELECT idempotency_key, extract(epoch FROM at) FROM idem_audit WHERE action = 'forget'");
	$t{records}{ $_->[0] } = $_
	  for $rows->("SELECT idempotency_key, status, result_json->>'exec' FROM idem_record");
	$t{after} = time();
	return \%t;
}

sub forgotten_between
{
	my ($t, $key, $from, $to) = @_;
	return grep { $_ >= $from - 0.000002 && $_ <= $to } @{ $t->{forgets}{$key} };
}

# A key runs again only after its success was forgotten or its retention is over.
sub check_business
{
	my ($self, $t) = @_;
	my @out;
	my $committed = $self->{committed};

	for my $key (keys %{ $t->{business} })
	{
		my @rows = @{ $t->{business}{$key} };
		for my $i (0 .. $#rows)
		{
			my $e = $self->{execs}{ $rows[$i]{exec} };
			$committed->{ $rows[$i]{exec} } = 1;
			$rows[$i]{sent} = $e && $e->{op} eq 'business' && $e->{sent} ? $e->{sent} : $rows[$i]{at};
			next if $i == 0;
			my ($a, $b) = @rows[ $i - 1, $i ];
			next if $b->{at} - $a->{sent} >= $IdemStress::retention;
			next if forgotten_between($t, $key, $a->{at}, $b->{at});
			push @out, sprintf 'executed twice: key %s: %s at %.6f, committed after %.6f; %s at %.6f', $key, $a->{exec}, $a->{at}, $a->{sent}, $b->{exec}, $b->{at};
		}
		# claims given while a success is retained
		for my $c (@{ $self->{claims}{$key} })
		{
			for my $a (@rows)
			{
				my $e = $self->{execs}{ $a->{exec} } or next;
				next unless $e->{fate} eq 'committed' && $c->{t0} > $e->{answered} && $c->{t1} - $a->{sent} < $IdemStress::retention;
				next if forgotten_between($t, $key, $a->{at}, $c->{t1});
				push @out, "claimed in spite of a retained success: key $key: $a->{exec} / " . show($c);
			}
		}
		# still there
		my $last = $rows[-1];
		next if $t->{after} - $last->{sent} >= $IdemStress::retention || forgotten_between($t, $key, $last->{at}, $t->{after});
		my $record = $t->{records}{$key};
		push @out, "success lost: key $key: $last->{exec}, record " . ($record ? join '|', map { $_ // '~' } @$record : 'none')
		  unless $record && $record->[1] eq 'succeeded' && ($record->[2] eq '~' || $record->[2] eq $last->{exec});
	}
	for my $exec (keys %{ $self->{execs} })
	{
		my $e = $self->{execs}{$exec};
		push @out, "acknowledged execution has no business row: " . show($e) if $e->{fate} eq 'committed' && !$committed->{$exec};
		push @out, "execution that was rolled back has a business row: " . show($e) if $e->{fate} eq 'aborted' && $committed->{$exec};
	}
	for my $r (@{ $self->{replays} })
	{
		my ($claim, $exec) = @$r;
		next if $exec eq '~' || $exec eq 'resolved';
		my $e = $self->{execs}{$exec};
		next if $e && $e->{c} eq $claim->{c} && $e->{x} == $claim->{x};
		push @out, "replay of what never was committed: $exec: " . show($claim) unless $committed->{$exec};
		push @out, "replay before the commit: $exec: " . show($claim) if $e && $e->{op} eq 'business' && $e->{sent} && $claim->{t1} < $e->{sent};
		push @out, "replay from behind the snapshot: $exec: " . show($claim)
		  if $e && $e->{op} eq 'business' && $e->{sent} && $claim->{snapshot} && $e->{sent} > $claim->{snapshot};
	}
	return @out;
}

# All rules, with nobody else connected.  The history may then be forgotten up to here.
sub check
{
	my ($self, $s) = @_;
	my $t = $self->load($s);
	my @out = @{ $self->{bad} };

	$self->{bad} = [];
	push @out, map { "idem_check: $_" } split /\n/, $s->q('SELECT * FROM idem_check()');
	push @out, map { "two partitions: $_" } split /\n/, $s->q(
		'SELECT idempotency_key, count(*), array_agg(tableoid::regclass) FROM idem_record GROUP BY 1 HAVING count(*) > 1');
	# the same without any index
	push @out, map { "two rows in the heap: $_" } split /\n/, $s->q(
		'SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off;'
		  . ' SELECT idempotency_key, count(*) FROM idem_record GROUP BY 1 HAVING count(*) > 1; RESET ALL');
	push @out, $self->check_writes, $self->check_tokens, $self->check_business($t);
	$self->forget_old($s, $t);
	return @out;
}

# Events of a round cannot meet those of the next one except through the tables,
# and business rows cannot clash once they are far older than the retention.
sub forget_old
{
	my ($self, $s, $t) = @_;
	my $border = $t->{before} - 10 * $IdemStress::retention;

	$self->{replays} = [];
	$self->{$_} = {} for qw(writes claims ends);
	$s->q("DELETE FROM business WHERE at < to_timestamp($border)");
	for my $exec (keys %{ $self->{execs} })
	{
		delete $self->{execs}{$exec} if $self->{execs}{$exec}{t1} < $border;
	}
	return;
}

sub counts { return $_[0]->{count}; }

1;
