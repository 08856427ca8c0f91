/*
 * The ring of finished records: inserters, and turners that open, drain, close and
 * truncate slices.  docs/model.md maps the steps to the code.
 *
 * A turner's changes become visible with its commit.  An inserter may have remembered
 * a current slice that is no longer current; it asks again under its lock.  The
 * clock ticks at any time.
 *
 * Broken on purpose: NORECHECK, NOSHARE, NOEXCLUSIVE, FROMOPENING, NORETENTION, NORINGLOCK.
 */
#define S 3						/* slices */
#ifndef INSERTERS
#define INSERTERS 2
#endif
#ifndef TURNERS
#define TURNERS 2
#endif
#ifndef TURNS
#define TURNS 2					/* of each turner */
#endif
#define RETENTION 2
#define TICKS 3
#define EMPTY 0
#define CURRENT 1
#define DRAINING 2
#define CLOSED 3

byte now;
byte state[S], opened[S], closed[S];
byte writers[S];				/* RowExclusiveLock */
byte exclusive[S];				/* AccessExclusiveLock: 0 free, else _pid + 1 */
byte rows[S];					/* committed */
byte inflight[S];				/* written, not committed */
byte newest[S];					/* time of the last commit into it */
byte ringlock;
byte currents;					/* scratch */

inline current_slice(c) { d_step { c = 0; do :: state[c] == CURRENT -> break :: else -> c++; assert(c < S) od } }

proctype inserter()
{
	byte c, d;

	current_slice(c);											/* remembered */
again:
	atomic { exclusive[c] == 0 -> writers[c]++ };				/* lock, which accepts invalidations */
	current_slice(d);
#ifndef NORECHECK
	if :: d != c -> writers[c]--; c = d; goto again :: else fi;
#endif
	inflight[c]++;
	if
	:: d_step { inflight[c]--; rows[c]++; newest[c] = now; writers[c]-- }
	:: d_step { inflight[c]--; writers[c]-- }
	fi
}

proctype turner()
{
	byte t, c, truncated, s2[S], o2[S], c2[S];
	bool was_draining[S];

	do
	:: t < TURNS ->
		t++;
#ifndef NORINGLOCK
		atomic { if :: ringlock == 0 -> ringlock = _pid + 1 :: else -> goto next fi };
#endif
		truncated = S;
		d_step { c = 0; do :: c < S -> s2[c] = state[c]; o2[c] = opened[c]; c2[c] = closed[c]; was_draining[c] = (state[c] == DRAINING); c++ :: else -> break od };
		/* purge: closed for the whole retention, and the slice to itself */
		c = 0;
		do
		:: c < S ->
#ifdef FROMOPENING
			if :: s2[c] == CLOSED && now - o2[c] >= RETENTION ->
#else
#ifdef NORETENTION
			if :: s2[c] == CLOSED ->
#else
			if :: s2[c] == CLOSED && now - c2[c] >= RETENTION ->
#endif
#endif
#ifdef NOEXCLUSIVE
				truncated = c; s2[c] = EMPTY; break
#else
				atomic { if :: writers[c] == 0 && exclusive[c] == 0 -> exclusive[c] = _pid + 1; truncated = c; s2[c] = EMPTY :: else fi };
				break
#endif
			:: else -> c++
			fi
		:: else -> break
		od;
		/* close: who writes to it has gone */
		c = 0;
		do
		:: c < S ->
			if
			:: was_draining[c] ->
#ifdef NOSHARE
				s2[c] = CLOSED; c2[c] = now
#else
				if :: writers[c] == 0 -> s2[c] = CLOSED; c2[c] = now :: else fi
#endif
			:: else
			fi;
			c++
		:: else -> break
		od;
		/* advance: the next slice is empty, also after this transaction's purge */
		current_slice(c);
		if
		:: s2[(c + 1) % S] == EMPTY -> s2[c] = DRAINING; s2[(c + 1) % S] = CURRENT; o2[(c + 1) % S] = now
		:: else
		fi;
		if
		:: d_step {												/* commit */
				c = 0; currents = 0;
				do :: c < S -> state[c] = s2[c]; opened[c] = o2[c]; closed[c] = c2[c]; currents = currents + (s2[c] == CURRENT); c++ :: else -> break od;
				assert(currents == 1); currents = 0;
				if
				:: truncated < S ->
					assert(inflight[truncated] == 0);			/* nobody's row is cut off */
					assert(rows[truncated] == 0 || now - newest[truncated] >= RETENTION);	/* kept long enough */
					rows[truncated] = 0; newest[truncated] = 0;
					if :: exclusive[truncated] == _pid + 1 -> exclusive[truncated] = 0 :: else fi
				:: else
				fi;
				ringlock = 0
			}
		:: d_step {												/* abort: nothing changed */
				if :: truncated < S && exclusive[truncated] == _pid + 1 -> exclusive[truncated] = 0 :: else fi;
				ringlock = 0
			}
		fi;
next:	skip
	:: else -> break
	od
}

proctype clock() { do :: now < TICKS -> now++ :: else -> break od }

init
{
	byte k = 0;

	atomic {
		state[0] = CURRENT;
		run clock();
		do :: k < INSERTERS -> run inserter(); k++ :: else -> break od; k = 0;
		do :: k < TURNERS -> run turner(); k++ :: else -> break od
	}
}
