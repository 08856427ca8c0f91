/*
 * The claim protocol for one key: who may claim, execute, complete, fail, retry, and
 * what each of them sees.  docs/model.md maps the steps to the code.
 *
 * Rows are versions with the transaction that wrote and the one that deleted them.  A
 * probe of one partition is one step, with a dirty snapshot: it sees rows of
 * transactions in progress.  Between two steps anything may happen: other sessions
 * commit, abort, or are killed.  A lease may lapse whenever somebody looks at it.
 *
 *	CLIENTS		claim, then complete or fail, in one transaction or two; or idem_once
 *	EXECUTORS	idem_execute of a new key: guard and key lock, no row before the end
 *	OPERATORS	idem_retry of a failed record: from the ring to the open partition
 *
 * Broken on purpose: NOLOCK, NOLOCKFINISH, NOLOCKRETRY, NOFENCE, KEEPTOKEN, GUARDEARLY,
 * GUARDONLY, DELETEDABSENT, WAITLOCKED, RINGFIRST.
 */
#ifndef CLIENTS
#define CLIENTS 2
#endif
#ifndef EXECUTORS
#define EXECUTORS 0
#endif
#ifndef OPERATORS
#define OPERATORS 0
#endif
#ifndef TRIES
#define TRIES 2
#endif
#define V 8						/* versions per partition */
#define NX 12					/* transactions */
#define INPROG 1
#define COMMITTED 2
#define ABORTED 3
#define SUCCESS 1
#define FAILURE 2

byte st[NX]; byte nx = 1;
byte oxmin[V], oxmax[V], otok[V]; byte on;
byte oclaim[V]; byte claims;		/* which claim a version is of: what the code does not know */
byte rxmin[V], rxmax[V], rkind[V]; byte rn;
byte lock;						/* key lock: 0 free, else _pid + 1 */
byte guard;						/* guard, exclusive: 0 free, else _pid + 1 */
byte shared;					/* guard, shared: how many */
byte effects;					/* committed executions */
byte tok = 1;
byte i, live;					/* scratch of d_steps */

#define gone(x)		(x != 0 && st[x] == COMMITTED)
#define open_(x)	(x != 0 && st[x] == INPROG)

inline begin_x(x) { d_step { x = nx; nx++; assert(nx <= NX); st[x] = INPROG } }
inline abort_x(x) { st[x] = ABORTED }

/* One place: of all committed versions of the key at most one is not deleted. */
inline commit_x(x, effect) { d_step {
	st[x] = COMMITTED; effects = effects + effect; live = 0; i = 0;
	do :: i < on -> if :: st[oxmin[i]] == COMMITTED && !gone(oxmax[i]) -> live++ :: else fi; i++ :: else -> break od;
	i = 0;
	do :: i < rn -> if :: st[rxmin[i]] == COMMITTED && !gone(rxmax[i]) -> live++ :: else fi; i++ :: else -> break od;
	i = 0;
	assert(live <= 1); assert(effects <= 1) } }

/* 0 absent, 1 committed, 2 in doubt (w is its transaction), 3 my own */
inline probe_open(me, res, idx, w) { d_step {
	res = 0; i = 0;
	do
	:: i < on ->
		if
		:: st[oxmin[i]] == ABORTED || gone(oxmax[i]) || oxmax[i] == me -> skip
#ifdef DELETEDABSENT
		:: !(st[oxmin[i]] == ABORTED || gone(oxmax[i]) || oxmax[i] == me) && open_(oxmax[i]) -> skip
#else
		:: !(st[oxmin[i]] == ABORTED || gone(oxmax[i]) || oxmax[i] == me) && open_(oxmax[i]) -> res = 2; w = oxmax[i]; break
#endif
		:: else ->
			if
			:: oxmin[i] == me -> res = 3; idx = i; break
			:: oxmin[i] != me && st[oxmin[i]] == INPROG -> res = 2; w = oxmin[i]; break
			:: else -> res = 1; idx = i; break
			fi
		fi;
		i++
	:: else -> break
	od;
	i = 0 } }

/* the same; kind is the ending of a row found */
inline probe_ring(me, res, idx, w, kind) { d_step {
	res = 0; i = 0;
	do
	:: i < rn ->
		if
		:: st[rxmin[i]] == ABORTED || gone(rxmax[i]) || rxmax[i] == me -> skip
		:: !(st[rxmin[i]] == ABORTED || gone(rxmax[i]) || rxmax[i] == me) && open_(rxmax[i]) -> res = 2; w = rxmax[i]; break
		:: else ->
			idx = i; kind = rkind[i];
			if
			:: rxmin[i] == me -> res = 3
			:: rxmin[i] != me && st[rxmin[i]] == INPROG -> res = 2; w = rxmin[i]
			:: else -> res = 1
			fi;
			break
		fi;
		i++
	:: else -> break
	od;
	i = 0 } }

#ifdef RINGFIRST
#define PROBE	probe_ring(x, rr, ridx, w, kind); probe_open(x, ro, idx, w)
#else
#define PROBE	probe_open(x, ro, idx, w); if :: ro == 0 -> probe_ring(x, rr, ridx, w, kind) :: else -> rr = 0 fi
#endif

inline put_open(me, t) { d_step { oxmin[on] = me; oxmax[on] = 0; otok[on] = t; claims++; oclaim[on] = claims; on++; assert(on < V) } }
inline put_ring(me, k) { d_step { rxmin[rn] = me; rxmax[rn] = 0; rkind[rn] = k; rn++; assert(rn < V) } }

#ifdef NOLOCK
#define TRY_LOCK	atomic { got = true }
#define WAIT_LOCK	skip
#define UNLOCK		skip
#else
#define TRY_LOCK	atomic { if :: lock == 0 -> lock = _pid + 1; got = true :: else -> got = false fi }
#define WAIT_LOCK	atomic { lock == 0 -> lock = _pid + 1 }
#define UNLOCK		d_step { if :: lock == _pid + 1 -> lock = 0 :: else fi }
#endif

/* A killed session: its transaction is aborted, its locks are released. */
#define DIE			atomic { st[x] = ABORTED; UNLOCK; if :: guard == _pid + 1 -> guard = 0 :: else fi; goto done }

/* Claim, then complete or fail. */
proctype client()
{
	byte x, ro, rr, idx, ridx, w, kind, mine, claim, ending;
	bool got, claimed, once;
	byte tries = 0;

retry:
	tries++;
	if :: tries > TRIES -> goto done :: else fi;
	begin_x(x);
	claimed = false;
	if :: once = true :: once = false fi;
	TRY_LOCK;
	PROBE;
	if
	:: !got && !(ro == 2 || rr != 0) ->
		/* the answer needs the lock: wait for it if only a short call holds it */
		atomic { if :: guard == 0 -> shared++ :: else -> abort_x(x); goto retry fi };
		WAIT_LOCK;
		shared--;
		got = true;
		PROBE
	:: else
	fi;
	if
	:: ro == 2 || rr != 0 -> skip									/* in progress, or replay */
	:: ro == 0 && rr == 0 && !once -> d_step { mine = tok; tok++; claimed = true }; atomic { put_open(x, mine); claim = claims }
	:: ro == 0 && rr == 0 && once -> put_ring(x, SUCCESS)
	:: ro == 1 ->
		if
		:: skip														/* held */
		:: d_step { oxmax[idx] = x; claimed = true;				/* lapsed: taken over */
#ifdef KEEPTOKEN
				mine = otok[idx];
#else
				mine = tok; tok++
#endif
			}; atomic { put_open(x, mine); claim = claims }
		fi
	:: else -> skip
	fi;
	if :: got -> UNLOCK :: else fi;
	if
	:: once && ro == 0 && rr == 0 -> if :: commit_x(x, 1); goto done :: abort_x(x); goto retry fi
	:: else
	fi;
	if :: !claimed -> abort_x(x); goto done :: else fi;
	if
	:: abort_x(x); goto retry										/* killed before the commit */
	:: commit_x(x, 0); if :: goto done :: begin_x(x) fi				/* two transactions; may die between */
	:: skip															/* one transaction */
	fi;

again:
#ifndef NOLOCKFINISH
	WAIT_LOCK;
#endif
	probe_open(x, ro, idx, w);
	if
	:: ro == 2 ->
#ifndef WAITLOCKED
#ifndef NOLOCKFINISH
		UNLOCK;
#endif
#endif
		assert(lock != _pid + 1);									/* nobody waits with the key lock held */
		(st[w] != INPROG) -> goto again
#ifdef NOFENCE
	:: ro == 1 || ro == 3 ->
#else
	:: (ro == 1 || ro == 3) && otok[idx] == mine ->
#endif
		if :: ending = SUCCESS :: ending = FAILURE fi;
		oxmax[idx] = x;
		put_ring(x, ending);
#ifndef NOLOCKFINISH
		UNLOCK;
#endif
		if
		:: assert(oclaim[idx] == claim); commit_x(x, (ending == SUCCESS -> 1 : 0))	/* not superseded */
		:: abort_x(x)
		fi
	:: else ->														/* lost: the business transaction rolls back */
#ifndef NOLOCKFINISH
		UNLOCK;
#endif
		abort_x(x)
	fi;
done:	skip
}

/* idem_execute of a key without a record: the guard is the claim. */
proctype executor()
{
	byte x, ro, rr, idx, ridx, w, kind, ending;

	begin_x(x);
	atomic { if :: guard == 0 && shared == 0 -> guard = _pid + 1 :: else -> abort_x(x); goto done fi };
#ifndef GUARDONLY
	if :: WAIT_LOCK :: DIE fi;
#endif
	PROBE;
	if
	:: ro != 0 || rr != 0 -> UNLOCK; guard = 0; abort_x(x)			/* the ordinary way, as a client */
	:: else ->
		if :: ending = SUCCESS :: ending = FAILURE fi;				/* the handler runs */
#ifdef GUARDEARLY
		UNLOCK; guard = 0;
#endif
		if :: skip :: DIE fi;
		put_ring(x, ending);
		UNLOCK;
		guard = 0;
		if
		:: commit_x(x, (ending == SUCCESS -> 1 : 0))
		:: abort_x(x)
		fi
	fi;
done:	skip
}

/* idem_retry of a failed record: ring to open, lapsed, held by no token. */
proctype operator()
{
	byte x, ro, rr, idx, ridx, w, kind;

	begin_x(x);
again:
#ifndef NOLOCKRETRY
	WAIT_LOCK;
#endif
	PROBE;
	if
	:: ro == 2 || rr == 2 ->
#ifndef NOLOCKRETRY
		UNLOCK;
#endif
		assert(lock != _pid + 1);
		(st[w] != INPROG) -> goto again
	:: ro == 0 && rr == 1 && kind == FAILURE ->
		rxmax[ridx] = x;
		put_open(x, 0);
		UNLOCK;
		if :: commit_x(x, 0) :: abort_x(x) fi
	:: else -> UNLOCK; abort_x(x)
	fi
}

init
{
	byte k = 0;

	atomic {
		do :: k < CLIENTS -> run client(); k++ :: else -> break od; k = 0;
		do :: k < EXECUTORS -> run executor(); k++ :: else -> break od; k = 0;
		do :: k < OPERATORS -> run operator(); k++ :: else -> break od
	};
	(_nr_pr == 1) -> assert(effects <= 1 && lock == 0 && guard == 0 && shared == 0)
}
