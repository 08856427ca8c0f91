/*
 * generate.js -- rows for test/t/020_digest_node.pl, in COPY's text format.
 *
 *   node generate.js numbers SEED COUNT     spelling, text of JavaScript
 *   node generate.js documents SEED COUNT   document, ignore, canonical, digest, keyed digest
 *   node generate.js keys SEED COUNT        key, step, downstream key
 *   node generate.js one TEXT               canonical text and digest of one document
 *   node generate.js downstream KEY STEP    downstream key of the two
 *
 * What is expected comes from JavaScript itself (String() of a number,
 * JSON.stringify() of a string, sort() of names) and from node's crypto, not
 * from the extension's code.
 */
'use strict';

const crypto = require('crypto');
const fs = require('fs');

const SECRET = 'a secret of the test';

/* ---- pseudo-random numbers: the same from the same seed everywhere ---- */

let state;

function next32() {				/* mulberry32 */
	state = (state + 0x6D2B79F5) | 0;
	let t = Math.imul(state ^ (state >>> 15), 1 | state);
	t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
	return (t ^ (t >>> 14)) >>> 0;
}

function below(n) {
	return Math.floor(next32() / 4294967296 * n);
}

function pick(list) {
	return list[below(list.length)];
}

/* ---- doubles ---- */

const view = new DataView(new ArrayBuffer(8));

function fromBits(high, low) {
	view.setUint32(0, high);
	view.setUint32(4, low);
	return view.getFloat64(0);
}

function anyDouble() {
	return fromBits(next32(), next32());
}

const kinds = [
	/* denormals */
	() => fromBits(next32() & 0x800FFFFF, next32()),
	/* near 2^53 and below */
	() => 9007199254740992 + (below(4096) - 2048),
	() => Math.floor(next32() / 4294967296 * 2 ** below(70)),
	/* powers of ten and two and their neighbours */
	() => Number('1e' + (below(632) - 323)),
	() => 2 ** (below(2098) - 1074),
	() => neighbour(Number('1e' + (below(632) - 323))),
	() => neighbour(2 ** (below(2098) - 1074)),
	/* amounts, and the places where the layout changes */
	() => below(100000000) / 100,
	() => Number((below(1000000) + 1) + 'e' + (below(40) - 20)),
];

function neighbour(x) {
	view.setFloat64(0, x);
	view.setBigUint64(0, BigInt.asUintN(64, view.getBigUint64(0) + BigInt(below(5) - 2)));
	return view.getFloat64(0);
}

function finiteDouble() {
	for (;;) {
		const x = below(2) ? anyDouble() : pick(kinds)();
		if (Number.isFinite(x))
			return below(8) === 0 ? -x : x;
	}
}

/* Another way to write the decimal number that "text" is. */
function respell(text) {
	const [, sign, whole, , fraction = '', , exponent = '0'] =
		/^(-?)(\d+)(\.(\d+))?(e([+-]?\d+))?$/.exec(text);
	const digits = (whole + fraction).replace(/^0+/, '') || '0';
	const zeros = '0'.repeat(below(5));
	const point = below(digits.length) + 1;		/* digits before the point */
	const power = Number(exponent) - fraction.length + (digits.length - point);
	const tail = digits.slice(point) + zeros;

	return sign + digits.slice(0, point) + (tail === '' ? '' : '.' + tail) +
		pick(['e', 'E']) + (power >= 0 ? pick(['', '+']) : '') + power;
}

/* ---- documents ---- */

const alphabets = [
	'abc', '0123456789', 'aZ-_.', '/~', '"\\', '\b\t\n\f\r\u0000\u0001\u001f\u007f'.replace('\0', ''),
	'\u00e4\u00f6\u0301', '\u20ac\u2028\u2029', '\u4e2d\u6587', '\u05d3\u0627', '\ud7ff\ue000\ufb33\ufffd\uffff',
];
const pairs = ['\ud83d\ude00', '\ud800\udc00', '\udbff\udfff', '\ud834\udd1e'];

function randomString() {
	let s = '';
	for (let n = below(7); n > 0; n--)
		s += below(6) === 0 ? pick(pairs) : pick([...pick(alphabets)]);
	return s;
}

/* A string as some sender might write it. */
function spellString(s) {
	const units = [];
	for (let i = 0; i < s.length; i++)
		units.push(s[i]);
	if (below(2))
		return JSON.stringify(s);
	return '"' + units.map(u => {
		const hex = u.charCodeAt(0).toString(16).padStart(4, '0');
		return '\\u' + (below(2) ? hex.toUpperCase() : hex);
	}).join('') + '"';
}

function space() {
	return below(4) ? '' : pick([' ', '\n', '\t', '\r', '  ']);
}

/* A decimal number beyond doubles, with its canonical text put together by hand. */
function exactNumber() {
	let digits = String(1 + below(9));
	for (let n = 18 + below(40); n > 0; n--)
		digits += below(10);
	digits += 1 + below(9);
	const e = below(80) - 20;		/* exponent of the first digit */
	let text;
	if (e >= 21 || e < -6)
		text = digits[0] + '.' + digits.slice(1) + 'e' + (e < 0 ? '-' : '+') + Math.abs(e);
	else if (e < 0)
		text = '0.' + '0'.repeat(-e - 1) + digits;
	else if (digits.length > e + 1)
		text = digits.slice(0, e + 1) + '.' + digits.slice(e + 1);
	else
		text = digits + '0'.repeat(e + 1 - digits.length);
	return text;
}

/*
 * A random value as a tree of {kind, ...}: what it means, apart from how it is
 * spelled.
 */
function randomValue(depth) {
	const kind = below(depth > 5 ? 6 : depth === 0 ? 12 : 9);
	switch (kind) {
		case 0: return {kind: 'literal', text: pick(['true', 'false', 'null'])};
		case 1: case 2: return {kind: 'string', value: randomString()};
		case 3: return {kind: 'number', text: exactNumber()};
		case 4: case 5: return {kind: 'number', text: String(finiteDouble())};
		case 6: {
			const elements = [];
			for (let n = below(depth < 2 ? 6 : 3); n > 0; n--)
				elements.push(randomValue(depth + 1));
			return {kind: 'array', elements};
		}
		default: {
			const members = new Map();
			for (let n = below(depth < 2 ? pick([2, 5, 12]) : 3); n > 0; n--)
				members.set(randomString(), randomValue(depth + 1));
			return {kind: 'object', members};
		}
	}
}

/* The JSON text that a sender sends. */
function spell(v) {
	switch (v.kind) {
		case 'literal': return v.text;
		case 'string': return spellString(v.value);
		case 'number': return below(2) ? v.text : respell(v.text);
		case 'array':
			return '[' + space() + v.elements.map(e => spell(e) + space()).join(',' + space()) + ']';
		default: {
			const parts = [];
			for (const [name, value] of v.members) {
				/* now and then a duplicate that the later one replaces */
				if (below(20) === 0)
					parts.push(spellString(name) + ':"overwritten"');
				parts.push(spellString(name) + space() + ':' + space() + spell(value));
			}
			return '{' + space() + parts.join(space() + ',' + space()) + space() + '}';
		}
	}
}

function token(name) {
	return '/' + String(name).replace(/~/g, '~0').replace(/\//g, '~1');
}

/* RFC 8785 (JCS), without the places whose JSON Pointer is in "ignore". */
function canonical(v, ignore = new Set(), at = '') {
	switch (v.kind) {
		case 'literal': case 'number': return v.text;
		case 'string': return JSON.stringify(v.value);
		case 'array':
			return '[' + v.elements
				.map((e, i) => [at + token(i), e])
				.filter(([path]) => !ignore.has(path))
				.map(([path, e]) => canonical(e, ignore, path)).join(',') + ']';
		default:
			return '{' + [...v.members.keys()].sort()
				.filter(name => !ignore.has(at + token(name)))
				.map(name => JSON.stringify(name) + ':' +
					canonical(v.members.get(name), ignore, at + token(name))).join(',') + '}';
	}
}

/* Pointers to some places of the document, and some to nowhere. */
function somePointers(v) {
	const places = [];
	(function walk(v, at) {
		if (at !== '')
			places.push(at);
		if (v.kind === 'array')
			v.elements.forEach((e, i) => walk(e, at + token(i)));
		if (v.kind === 'object')
			v.members.forEach((e, name) => walk(e, at + token(name)));
	})(v, '');
	const pointers = [];
	for (let n = below(5); n > 0; n--) {
		const place = places.length > 0 ? pick(places) : '';
		pointers.push(below(4) ? place : place + pick(['/-', '/00', '/x', '/', '/1e0', '/ 1']));
	}
	return pointers.filter(p => p !== '');
}

/* ---- output ---- */

function sha256(text) {
	return crypto.createHash('sha256').update(text, 'utf8').digest('hex');
}

function hmac(text) {
	return crypto.createHmac('sha256', SECRET).update(text, 'utf8').digest('hex');
}

/* RFC 9562 version 8 out of SHA-256 over the two texts, each after its length. */
function downstreamKey(key, step) {
	const hash = crypto.createHash('sha256');
	for (const text of [key, step]) {
		const bytes = Buffer.from(text, 'utf8');
		const length = Buffer.alloc(4);
		length.writeUInt32BE(bytes.length);
		hash.update(length).update(bytes);
	}
	const b = hash.digest().subarray(0, 16);
	b[6] = (b[6] & 0x0f) | 0x80;
	b[8] = (b[8] & 0x3f) | 0x80;
	return b.toString('hex').replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
}

function copyField(s) {
	return s.replace(/[\\\t\n\r]/g, c => ({'\\': '\\\\', '\t': '\\t', '\n': '\\n', '\r': '\\r'})[c]);
}

let pending = [];

function emit(...fields) {
	pending.push(fields.map(copyField).join('\t') + '\n');
	if (pending.length === 10000)
		flush();
}

function flush() {
	fs.writeSync(1, pending.join(''));
	pending = [];
}

const rows = {
	numbers() {
		const x = finiteDouble();
		/* JSON has no other sign of zero in JavaScript's output */
		const text = String(x);
		if (JSON.stringify(x) !== text)
			throw new Error('JSON.stringify and String differ');
		emit(below(2) ? text : Object.is(x, -0) ? '-0' : respell(text), text);
	},
	documents() {
		const v = randomValue(0);
		const ignore = somePointers(v);
		const text = canonical(v, new Set(ignore));
		emit(spell(v), JSON.stringify(ignore), text, '01' + sha256(text), '81' + hmac(text));
	},
	keys() {
		const key = 'k' + randomString(), step = 's' + randomString();
		emit(key, step, downstreamKey(key, step));
	},
};

const [mode, seed, count] = process.argv.slice(2);

if (mode === 'one') {
	/* for documents without numbers that need care */
	const tree = x =>
		x === null || typeof x === 'boolean' ? {kind: 'literal', text: String(x)} :
		typeof x === 'string' ? {kind: 'string', value: x} :
		typeof x === 'number' ? {kind: 'number', text: String(x)} :
		Array.isArray(x) ? {kind: 'array', elements: x.map(tree)} :
		{kind: 'object', members: new Map(Object.entries(x).map(([k, e]) => [k, tree(e)]))};
	const text = canonical(tree(JSON.parse(seed)));
	process.stdout.write(text + '\n01' + sha256(text) + '\n');
} else if (mode === 'downstream') {
	process.stdout.write(downstreamKey(seed, count) + '\n');
} else {
	state = Number(seed) | 0;
	for (let i = 0; i < Number(count); i++)
		rows[mode]();
	flush();
}
