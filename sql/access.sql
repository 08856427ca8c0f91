--
-- Who may do what, and what the catalog says
--
\set VERBOSITY sqlstate
\set T1 '''00000000-0000-4000-8000-000000000001'''
\set T2 '''00000000-0000-4000-8000-000000000002'''

-- What belongs to the extension.
CREATE VIEW member_function AS
    SELECT p.* FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
        JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND e.extname = 'idempotency';
CREATE VIEW member_relation AS
    SELECT c.* FROM pg_class c JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e'
        JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND e.extname = 'idempotency'
    UNION
    SELECT c.* FROM pg_class c JOIN pg_type t ON t.typrelid = c.oid AND c.relkind = 'c'
        JOIN pg_depend d ON d.classid = 'pg_type'::regclass AND d.objid = t.oid AND d.deptype = 'e'
        JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND e.extname = 'idempotency'
    UNION
    SELECT c.* FROM pg_class c JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype IN ('a', 'i') AND c.relkind = 'S'
    WHERE d.refobjid = 'idem_audit'::regclass;
GRANT SELECT ON member_function, member_relation, states TO PUBLIC;
SELECT count(*) > 20 AS functions FROM member_function;
SELECT relkind, count(*) >= CASE relkind WHEN 'r' THEN 8 ELSE 1 END AS there FROM member_relation GROUP BY relkind ORDER BY relkind;

--
-- Catalog.  Each query lists violations.
--
-- comments on every function, type, relation and column, and on the extension
SELECT oid::regprocedure AS no_comment FROM member_function WHERE obj_description(oid, 'pg_proc') IS NULL;
SELECT oid::regclass AS no_comment, relkind FROM member_relation
    WHERE NOT relispartition AND relkind IN ('r', 'p', 'v', 'm', 'f') AND obj_description(oid, 'pg_class') IS NULL;
SELECT reltype::regtype AS no_comment FROM member_relation WHERE relkind = 'c' AND obj_description(reltype, 'pg_type') IS NULL;
SELECT c.oid::regclass AS no_comment, a.attname FROM member_relation c JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE NOT c.relispartition AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'c') AND a.attnum > 0 AND NOT a.attisdropped AND col_description(c.oid, a.attnum) IS NULL;
SELECT extname FROM pg_extension WHERE extname = 'idempotency' AND obj_description(oid, 'pg_extension') IS NULL;
-- functions: names, no STRICT (C24), no SECURITY DEFINER, nothing set but a locked search_path
SELECT oid::regprocedure FROM member_function WHERE proname !~ '^idem_' OR proisstrict OR prosecdef OR prokind <> 'f' OR proleakproof;
SELECT p.oid::regprocedure FROM member_function p JOIN pg_language l ON l.oid = p.prolang
    WHERE l.lanname NOT IN ('c', 'sql') OR (l.lanname = 'c' AND p.proconfig IS NOT NULL)
       OR (l.lanname = 'sql' AND p.proconfig::text NOT LIKE '%search_path=pg_catalog, pg_temp%') OR (l.lanname = 'sql' AND p.proconfig IS NULL);
-- volatility and parallel safety go together; the writers are unsafe everywhere (C25)
SELECT oid::regprocedure, provolatile, proparallel FROM member_function
    WHERE prorettype <> 'trigger'::regtype AND (provolatile, proparallel) NOT IN (('i', 's'), ('s', 'r'), ('v', 'u'), ('v', 'r'), ('v', 's'));
SELECT proname, provolatile, proparallel FROM member_function
    WHERE proname IN ('idem_claim', 'idem_complete', 'idem_fail', 'idem_renew', 'idem_release', 'idem_checkpoint', 'idem_execute', 'idem_once', 'idem_claim_many',
        'idem_complete_many', 'idem_once_many', 'idem_claim_due', 'idem_reap', 'idem_retry', 'idem_resolve', 'idem_revoke', 'idem_forget', 'idem_grant')
      AND (provolatile, proparallel) <> ('v', 'u');
SELECT proname, provolatile, proparallel FROM member_function
    WHERE proname IN ('idem_key', 'idem_key_parts', 'idem_downstream_key', 'idem_canonical', 'idem_digest', 'idem_keyed_digest') AND (provolatile, proparallel) <> ('i', 's');
SELECT proname, provolatile, proparallel FROM member_function WHERE proname IN ('idem_status', 'idem_backoff', 'idem_check') ORDER BY proname;
-- keys and operations compare by bytes, in tables and indexes, whatever the database's collation (C90)
SELECT c.oid::regclass, a.attname FROM member_relation c JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE c.relkind IN ('r', 'p') AND a.attname IN ('idempotency_key', 'operation', 'status') AND a.attcollation <> 'pg_catalog."C"'::regcollation;
SELECT i.indexrelid::regclass FROM pg_index i JOIN member_relation c ON c.oid = i.indrelid, unnest(i.indcollation) coll WHERE coll NOT IN (0, 'pg_catalog."C"'::regcollation);
-- logged, heap (C110)
SELECT oid::regclass FROM member_relation WHERE relpersistence <> 'p';
SELECT i.indexrelid::regclass FROM pg_index i JOIN member_relation t ON t.oid = i.indrelid JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relpersistence <> 'p';
SELECT c.oid::regclass FROM member_relation c JOIN pg_am a ON a.oid = c.relam WHERE c.relkind = 'r' AND a.amname <> 'heap';
-- a primary key on the key alone in every partition
SELECT c.oid::regclass FROM member_relation c WHERE c.relispartition AND NOT EXISTS (
    SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indnatts = 1 AND a.attname = 'idempotency_key');
-- a dump has the rows of every table, and the sequences (C112)
SELECT c.oid::regclass FROM member_relation c WHERE c.relkind IN ('r', 'S') AND NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'idempotency' AND c.oid = ANY (extconfig));
-- no row security, no rules but those of views, no triggers but the guards
SELECT oid::regclass FROM member_relation WHERE relrowsecurity OR relforcerowsecurity;
SELECT tgrelid::regclass, tgname FROM pg_trigger t JOIN member_relation c ON c.oid = tgrelid WHERE NOT tgisinternal AND c.relname LIKE 'idem_record%';
-- the extension cannot be moved
SELECT extrelocatable FROM pg_extension WHERE extname = 'idempotency';

--
-- Privileges.
--
SET client_min_messages = error;
DROP ROLE IF EXISTS regress_idem_nobody, regress_idem_client, regress_idem_other, regress_idem_member, regress_idem_monitor, regress_idem_operator, regress_idem_gone, "regress idem ""odd"" ' role";
RESET client_min_messages;
CREATE ROLE regress_idem_nobody;
CREATE ROLE regress_idem_client;
CREATE ROLE regress_idem_other;
CREATE ROLE regress_idem_member IN ROLE regress_idem_client;
CREATE ROLE regress_idem_monitor;
CREATE ROLE regress_idem_operator;
CREATE ROLE "regress idem ""odd"" ' role";
SELECT idem_grant('regress_idem_client', 'client'), idem_grant('regress_idem_other', 'client'), idem_grant('regress_idem_member', 'client'),
       idem_grant('regress_idem_monitor', 'monitor'), idem_grant('regress_idem_operator', 'operator'), idem_grant('"regress idem ""odd"" '' role"', 'client');
-- again changes nothing; nonsense is refused
SELECT relacl AS before FROM pg_class WHERE relname = 'idem_record' \gset
SELECT idem_grant('regress_idem_operator', 'operator');
SELECT relacl = :'before' AS same FROM pg_class WHERE relname = 'idem_record';
SELECT call, tried('SELECT ' || call) FROM unnest(ARRAY[$$idem_grant('regress_idem_client', 'admin')$$, $$idem_grant('regress_idem_client', 'Client')$$, $$idem_grant('regress_idem_client', NULL)$$,
    $$idem_grant(NULL, 'client')$$, $$idem_grant('no_such_role', 'client')$$]) call;

-- PUBLIC may call the immutable helpers, and nothing else; every role may call those
SELECT oid::regprocedure, provolatile FROM member_function WHERE has_function_privilege('regress_idem_nobody', oid, 'EXECUTE') <> (provolatile = 'i');
SELECT proname FROM member_function WHERE has_function_privilege('regress_idem_nobody', oid, 'EXECUTE') ORDER BY proname;
-- nobody but the owner may write a table, or read one without a level
SELECT c.oid::regclass, r.rolname, privilege FROM member_relation c, pg_roles r, unnest('{INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) privilege
    WHERE c.relkind IN ('r', 'p', 'v') AND r.rolname LIKE 'regress_idem%'
      AND (has_table_privilege(r.oid, c.oid, privilege)
           OR CASE WHEN privilege IN ('INSERT', 'UPDATE', 'REFERENCES') THEN has_any_column_privilege(r.oid, c.oid, privilege) END);
SELECT c.oid::regclass, r.rolname FROM member_relation c, pg_roles r
    WHERE c.relkind IN ('r', 'p', 'v') AND r.rolname IN ('regress_idem_nobody', 'regress_idem_client') AND has_any_column_privilege(r.oid, c.oid, 'SELECT');
SELECT c.oid::regclass, r.rolname FROM member_relation c, pg_roles r WHERE c.relkind = 'S' AND r.rolname LIKE 'regress_idem%' AND has_sequence_privilege(r.oid, c.oid, 'USAGE, SELECT, UPDATE');
-- levels: a monitor calls no writer and reads no record; only operators act on others' records; nobody but the owner grants
SELECT oid::regprocedure FROM member_function WHERE has_function_privilege('regress_idem_monitor', oid, 'EXECUTE') AND proparallel = 'u';
SELECT c.oid::regclass FROM member_relation c WHERE c.relname ~ '^idem_(record|audit)' AND c.relkind IN ('r', 'p') AND has_any_column_privilege('regress_idem_monitor', c.oid, 'SELECT');
SELECT oid::regprocedure FROM member_function WHERE proname IN ('idem_retry', 'idem_retry_many', 'idem_resolve', 'idem_revoke', 'idem_forget', 'idem_reap', 'idem_check')
    AND (has_function_privilege('regress_idem_client', oid, 'EXECUTE') OR NOT has_function_privilege('regress_idem_operator', oid, 'EXECUTE'));
SELECT r.rolname FROM pg_roles r WHERE r.rolname LIKE 'regress_idem%' AND has_function_privilege(r.oid, 'idem_grant(regrole, text)', 'EXECUTE');
-- each function has a level that can call it
SELECT oid::regprocedure FROM member_function WHERE prorettype <> 'trigger'::regtype AND proname <> 'idem_grant' AND NOT has_function_privilege('regress_idem_client', oid, 'EXECUTE')
    AND NOT has_function_privilege('regress_idem_monitor', oid, 'EXECUTE') AND NOT has_function_privilege('regress_idem_operator', oid, 'EXECUTE');
SELECT proname FROM member_function WHERE provolatile <> 'i' AND has_function_privilege('regress_idem_client', oid, 'EXECUTE') ORDER BY proname;

-- the calls themselves: as an ordinary role each function of a level is refused
SET ROLE regress_idem_nobody;
SELECT f.oid::regprocedure, answer FROM member_function f,
    tried((SELECT format('SELECT (%s(%s))::text', f.proname, string_agg('NULL::' || format_type(t, NULL), ', ' ORDER BY n))
           FROM unnest(f.proargtypes::oid[]) WITH ORDINALITY a (t, n))) answer
    WHERE provolatile <> 'i' AND prorettype <> 'trigger'::regtype AND answer <> '42501';
SELECT outcome FROM idem_claim('as nobody');
SELECT idem_key('t', 'op', '1'), idem_digest('{}') IS NOT NULL AS digest;
SET idempotency.clock_offset = '1 s';
SELECT tried($$INSERT INTO idem_policy (operation) VALUES ('x')$$), tried($$DELETE FROM idem_audit$$), tried($$SELECT count(*) FROM idem_record$$);
RESET ROLE;

--
-- A record belongs to the role that first claimed it.
--
SET ROLE regress_idem_client;
SET idempotency.clock_offset = '1 s';
SELECT outcome FROM idem_claim('own', '{"a": 1}', token => :T1);
SELECT idem_checkpoint('own', :T1, 's', '1'), idem_renew('own', :T1) IS NOT NULL AS renewed;
SELECT (idem_status('own')).owner, (idem_status('own')).status;
SELECT idem_complete('own', :T1, '"mine"');
SELECT outcome, result_json FROM idem_claim('own', '{"a": 1}');
SELECT tried($$SELECT count(*) FROM idem_record$$), tried($$UPDATE idem_record_open SET attempts = 0$$), tried($$DELETE FROM idem_record$$), tried($$TRUNCATE idem_record_1$$),
       tried($$INSERT INTO idem_ring VALUES (1, 'empty')$$), tried($$SELECT count(*) FROM idem_audit$$), tried($$SELECT count(*) FROM idem_stats$$), tried($$SELECT * FROM idem_reap()$$);
SELECT make_states('theirs', '{"a": 1}', :T1);
RESET ROLE;
CREATE FUNCTION handle(request jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT request';
SELECT state, fingerprint('theirs_' || state) AS before INTO TEMP before FROM states;
-- another role: 42501 in every state, with the same words, before a conflict is told; and nothing changes
SET ROLE regress_idem_other;
\set VERBOSITY default
SELECT outcome FROM idem_claim('theirs_succeeded', '{"a": 1}');
SELECT outcome FROM idem_claim('theirs_live', '{"a": 2}');
SELECT idem_complete('theirs_live', :T1);
SELECT (idem_status('theirs_failed')).status;
\set VERBOSITY sqlstate
CREATE FUNCTION pg_temp.words(query text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    detail text;
    hint text;
BEGIN
    EXECUTE query;
    RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN concat_ws('|', SQLSTATE, SQLERRM, detail, hint);
END
$$;
SELECT words, count(*) FROM states, unnest(ARRAY[
    $$SELECT idem_claim(%1$L, '{"a": 1}')$$, $$SELECT idem_claim(%1$L)$$, $$SELECT idem_claim(%1$L, '{"a": 1}', 'other')$$,
    $$SELECT idem_claim(%1$L, '{"a": 1}', token => '00000000-0000-4000-8000-000000000001')$$, $$SELECT idem_claim(%1$L, '{"a": 1}', wait => '10 s')$$,
    $$SELECT idem_complete(%1$L, '00000000-0000-4000-8000-000000000001', '{"done": true}')$$, $$SELECT idem_complete(%1$L, '00000000-0000-4000-8000-000000000009')$$,
    $$SELECT idem_fail(%1$L, '00000000-0000-4000-8000-000000000001', 'permanent')$$, $$SELECT idem_release(%1$L, '00000000-0000-4000-8000-000000000001')$$,
    $$SELECT idem_renew(%1$L, '00000000-0000-4000-8000-000000000001')$$, $$SELECT idem_checkpoint(%1$L, '00000000-0000-4000-8000-000000000001', 's', '1')$$,
    $$SELECT idem_once(%1$L, '{"a": 1}')$$, $$SELECT idem_once_many(ARRAY[%1$L])$$, $$SELECT idem_claim_many(ARRAY['absent', %1$L], ARRAY['1', '{"a": 1}']::jsonb[])$$,
    $$SELECT idem_complete_many(ARRAY[%1$L], ARRAY['00000000-0000-4000-8000-000000000001']::uuid[])$$, $$SELECT idem_execute(%1$L, '{"a": 1}', 'handle(jsonb)')$$,
    $$SELECT idem_status(%1$L)$$]) query,
    pg_temp.words(format(query, 'theirs_' || state)) words GROUP BY words;
SELECT count(*) FROM idem_claim_due(max_records => 1000) WHERE key LIKE 'theirs%';
-- what is absent is theirs to claim
SELECT outcome FROM idem_claim('others', '{"a": 1}', token => :T1);
SELECT (idem_status('others')).owner;
RESET ROLE;
SELECT count(*) AS untouched FROM before WHERE before = fingerprint('theirs_' || state);
-- also what time has made of them is told to nobody else
SET idempotency.clock_offset = '100 s';
SELECT set_config('role', 'regress_idem_other', false);
SELECT count(*), min(words) FROM states, pg_temp.words(format($$SELECT idem_claim(%L, '{"a": 1}')$$, 'theirs_' || state)) words;
SELECT count(*) FROM idem_claim_due(max_records => 1000) WHERE key LIKE 'theirs%';
RESET ROLE;
RESET idempotency.clock_offset;
SELECT count(*) AS untouched FROM before WHERE before = fingerprint('theirs_' || state);
-- members of the owner may do as the owner; the owner not as its members
SET ROLE regress_idem_member;
SELECT outcome FROM idem_claim('theirs_live', '{"a": 1}');
SELECT idem_complete('theirs_live', :T1, '1');
SELECT (idem_status('theirs_failed')).status;
SELECT outcome FROM idem_claim('members', token => :T1);
SET ROLE regress_idem_client;
SELECT outcome FROM idem_claim('members');
RESET ROLE;
-- superusers may, and the record stays the role's
SELECT outcome FROM idem_claim('theirs_retry_waiting', '{"a": 1}');
SET idempotency.clock_offset = '100 s';
SELECT outcome FROM idem_claim('theirs_retry_due', '{"a": 1}', token => :T2);
RESET idempotency.clock_offset;
SELECT owner FROM idem_status('theirs_retry_due');
-- current_user counts: SECURITY DEFINER functions claim for their owner
CREATE FUNCTION claim_as_owner(key text) RETURNS text LANGUAGE sql SECURITY DEFINER AS 'SELECT outcome FROM idem_claim(key)';
ALTER FUNCTION claim_as_owner(text) OWNER TO regress_idem_client;
SET ROLE regress_idem_nobody;
SELECT claim_as_owner('through a definer'), claim_as_owner('through a definer');
RESET ROLE;
SELECT owner FROM idem_status('through a definer');
-- monitors see counts, not records
SET ROLE regress_idem_monitor;
SELECT count(*) > 0 AS counts FROM idem_stats;
SELECT tried($$SELECT (idem_status('own')).status$$), tried($$SELECT outcome FROM idem_claim('x')$$), tried($$SELECT count(*) FROM idem_record$$);
RESET ROLE;
SELECT attname FROM pg_attribute WHERE attrelid = 'idem_stats'::regclass AND attname ~ 'result|request|message|progress|token|key';
-- operators see every record and act on it, but do not run it
SET ROLE regress_idem_operator;
SELECT (idem_status('own')).result_json, (SELECT count(*) > 0 FROM idem_record) AS records, tried($$UPDATE idem_record SET attempts = 0$$), tried($$DELETE FROM idem_audit$$), tried($$TRUNCATE idem_audit$$);
SELECT outcome FROM idem_claim('own', '{"a": 1}');
SELECT idem_complete('others', :T1);
SELECT idem_revoke('others', 'test');
SELECT action, current_user_name, session_user_name = session_user AS session FROM idem_audit WHERE idempotency_key = 'others';
RESET ROLE;
-- the audit can only be added to, also by superusers
SELECT tried('UPDATE idem_audit SET reason = reason'), tried('DELETE FROM idem_audit'), tried('TRUNCATE idem_audit');

-- errors never quote a request, a result or an error text (C51)
SELECT outcome FROM idem_claim('secret', '{"card": "s3cr3t"}', token => :T1);
SELECT outcome FROM idem_claim('secret', '{"card": "s3cr3t 2"}');
SELECT count(*), count(*) FILTER (WHERE words = 'no error') AS no_error, count(*) FILTER (WHERE words ~ 's3cr3t') AS quoted FROM unnest(ARRAY[
    $$SELECT idem_claim('secret', '{"card": "s3cr3t"}', lease => '0')$$, $$SELECT (idem_claim('secret 2', '{"card": "s3cr3t"}')).*$$,
    $$SELECT idem_complete('secret', '00000000-0000-4000-8000-000000000009', '"s3cr3t"')$$, $$SELECT idem_complete('no key', '00000000-0000-4000-8000-000000000009', '"s3cr3t"')$$,
    $$SELECT idem_complete('secret', '00000000-0000-4000-8000-000000000001', to_jsonb(repeat('s3cr3t', 1000000)))$$,
    $$SELECT idem_fail('secret', '00000000-0000-4000-8000-000000000009', 'permanent', 's3cr3t', 's3cr3t')$$, $$SELECT idem_fail('secret', '00000000-0000-4000-8000-000000000001', 'permanent', 'm', repeat('s3cr3t', 100))$$,
    $$SELECT idem_checkpoint('secret', '00000000-0000-4000-8000-000000000009', 's3cr3t', '"s3cr3t"')$$]) query, pg_temp.words(query) words;

-- a role that is gone
CREATE ROLE regress_idem_gone;
SELECT idem_grant('regress_idem_gone', 'client');
SET ROLE regress_idem_gone;
SELECT outcome FROM idem_claim('orphan', token => :T1);
RESET ROLE;
DROP OWNED BY regress_idem_gone;
DROP ROLE regress_idem_gone;
SET ROLE regress_idem_client;
SELECT outcome FROM idem_claim('orphan');
RESET ROLE;
SELECT outcome FROM idem_claim('orphan');
SELECT idem_complete('orphan', :T1);
SELECT owner::text ~ '^\d+$' AS number FROM idem_status('orphan');

SELECT * FROM idem_check();
DROP VIEW member_function, member_relation;
DROP OWNED BY regress_idem_nobody, regress_idem_client, regress_idem_other, regress_idem_member, regress_idem_monitor, regress_idem_operator, "regress idem ""odd"" ' role";
DROP ROLE regress_idem_nobody, regress_idem_client, regress_idem_other, regress_idem_member, regress_idem_monitor, regress_idem_operator, "regress idem ""odd"" ' role";
