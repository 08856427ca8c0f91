-- Everything that the extension keeps, one line each.
\pset null '~'
SET search_path = public;
SELECT 'extension', extname, extversion FROM pg_extension WHERE extname = 'idempotency';
SELECT 'record', tableoid::regclass, r FROM idem_record r ORDER BY idempotency_key COLLATE "C";
SELECT 'ring', r FROM idem_ring r ORDER BY slice;
SELECT 'policy', r FROM idem_policy r ORDER BY operation COLLATE "C";
SELECT 'audit', r FROM idem_audit r ORDER BY id;
SELECT 'function', p.oid::regprocedure, proacl FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
	JOIN pg_extension e ON e.oid = d.refobjid AND extname = 'idempotency' ORDER BY p.oid::regprocedure::text COLLATE "C";
-- 17 has one more privilege of owners, m
SELECT 'table', c.oid::regclass, replace(relacl::text, 'Dxtm/', 'Dxt/') FROM pg_class c WHERE relname LIKE 'idem\_%' AND relkind IN ('r', 'p', 'v') ORDER BY c.oid::regclass::text COLLATE "C";
SELECT 'index', indexdef FROM pg_indexes WHERE tablename LIKE 'idem\_%' ORDER BY indexdef COLLATE "C";
SELECT 'digest', idem_digest('{"b": 1.50, "a": [null, "é"]}'), idem_key('a', 'b', 'c'), idem_downstream_key('k', 's');
SELECT 'check', c FROM idem_check() c;
