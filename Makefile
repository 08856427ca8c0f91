# PGXS build of the extension "idempotency".
#
#   make && make install            build and install into the server of PG_CONFIG
#   make installcheck               pg_regress, isolation and TAP suites
#   make installcheck TAP_TESTS=    the same without TAP (as root, or without IPC::Run)

EXTENSION = idempotency
MODULE_big = idempotency
OBJS = \
	src/access.o \
	src/arguments.o \
	src/audit.o \
	src/backoff.o \
	src/batch.o \
	src/canonical.o \
	src/catalog.o \
	src/change.o \
	src/claim.o \
	src/digest.o \
	src/due.o \
	src/execute.o \
	src/finish.o \
	src/idempotency.o \
	src/key.o \
	src/keylock.o \
	src/notify.o \
	src/number.o \
	src/once.o \
	src/operator.o \
	src/pointer.o \
	src/policy.o \
	src/policy_cache.o \
	src/reap.o \
	src/record.o \
	src/ring.o \
	src/state.o \
	src/stats.o \
	src/status.o \
	src/store.o \
	src/subxact.o

PGFILEDESC = "idempotency - at most one business effect per key"
DATA = sql/idempotency--1.0.sql

REGRESS = setup key digest claim finish policy access recovery onecall execute once batch handlers handler_edges cases
REGRESS_OPTS = --inputdir=. --encoding=UTF8
ISOLATION = claim-snapshot claim-race claim-wait claim-token finish-wait take-over row-locks deadlock serializable clock policy notify operator execute-once execute-others execute-row execute-wait execute-start once-wait batch-order execute-guard extension
ISOLATION_OPTS = --inputdir=test --load-extension=pgcrypto --load-extension=idempotency
TAP_TESTS = 1
PROVE_TESTS = test/t/*.pl

PG_CFLAGS = -std=gnu11 -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare -Wno-missing-field-initializers

# A test build: places where it can be made to fail (src/failpoint.c).
ifdef IDEM_FAILPOINTS
OBJS += src/failpoint.o
PG_CFLAGS += -DIDEM_FAILPOINTS
endif

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)
