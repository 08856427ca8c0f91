/*-------------------------------------------------------------------------
 *
 * notify.c
 *	  NOTIFY for endings that a person should hear of.
 *
 * Only where the policy says "notify", and never on the success path: sending
 * serialises commits.  The payload tells which key and why, without request,
 * result or error text.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "commands/async.h"
#include "lib/stringinfo.h"
#include "utils/builtins.h"
#include "utils/json.h"

#include "idempotency.h"

#define IDEM_CHANNEL	"idempotency"

/* NOTIFY takes payloads of less than 8000 bytes. */
#define MAX_PAYLOAD_BYTES	7900

static const char *const event_names[] = {
	[IDEM_EVENT_EXHAUSTED] = "exhausted",
	[IDEM_EVENT_FAILED] = "failed",
	[IDEM_EVENT_UNKNOWN] = "unknown"
};

static void
add_member(StringInfo buf, const char *name, const text *value)
{
	appendStringInfo(buf, ",\"%s\":", name);
	escape_json(buf, text_to_cstring(value));
}

/*
 * Sends {"event", "key", "operation", "attempts"} at commit.  A payload that NOTIFY
 * cannot carry goes without the operation; a key always fits.
 */
void
idem_notify(IdemEvent event, const IdemRecord *rec)
{
	StringInfoData buf;

	initStringInfo(&buf);
	appendStringInfo(&buf, "{\"event\":\"%s\",\"attempts\":%d", event_names[event], rec->attempts);
	add_member(&buf, "key", rec->key);
	if (buf.len + 6 * VARSIZE_ANY_EXHDR(rec->operation) < MAX_PAYLOAD_BYTES)
		add_member(&buf, "operation", rec->operation);
	appendStringInfoChar(&buf, '}');
	Async_Notify(IDEM_CHANNEL, buf.data);
}
