#!/usr/bin/python3
"""A small payment service, to be called by the workers of the tests.

  downstream.py --journal FILE [--mode deduplicates|reference|blind]

Listens on 127.0.0.1, prints "port N", and ends when its standard input does.  Each
charge is a line of JSON in the journal, synced before the answer: a kill loses none.

  mode           POST /charges again under a key        GET /charges?key=K
  deduplicates   the first answer again; 422 for        what is known under K
                 another body
  reference      charges again                          the charges that bear K
  blind          charges again                          501

POST /faults {"drop_answer": 2, "seconds": 30} sets how many of the next POST /charges suffer:
  unavailable    503, nothing is done
  slow_before    nothing is done for so many seconds, or until the next POST /faults
  declined       402, for good
  broken         500, after the work
  slow_after     no answer for so long, after the work
  drop_answer    the connection is closed after the work, without an answer
and how many of the next GET /charges do:
  lookup_down    503
GET /state tells how many requests are in work, and how often each key was posted.
"""
import argparse
import collections
import http.server
import json
import os
import socket
import sys
import threading
import urllib.parse


class Journal:
    """What the service has done: in memory, and in a file that is only added to."""

    def __init__(self, path):
        self.lock = threading.Lock()
        self.entries = collections.defaultdict(list)    # by key
        self.number = 0
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with open(path, 'rb') as old:
            content = old.read()
        whole = content.rfind(b'\n') + 1
        os.ftruncate(self.file, whole)                  # half a line was never answered
        for line in content[:whole].splitlines():
            self._take(json.loads(line))

    def _take(self, entry):
        self.entries[entry['key']].append(entry)
        self.number += 1

    def add(self, entry):
        """The caller holds the lock."""
        os.write(self.file, json.dumps(entry).encode() + b'\n')
        os.fsync(self.file)
        self._take(entry)
        return entry


class Service:
    def __init__(self, mode, journal):
        self.mode = mode
        self.journal = journal
        self.lock = threading.Lock()
        self.faults = collections.Counter()
        self.seconds = 60.0
        self.released = threading.Event()
        self.in_work = 0
        self.posts = collections.Counter()

    def set_faults(self, faults):
        with self.lock:
            self.seconds = faults.pop('seconds', self.seconds)
            self.faults = collections.Counter(faults)
            self.released.set()
            self.released = threading.Event()

    def suffers(self, fault):
        with self.lock:
            if self.faults[fault] <= 0:
                return False
            self.faults[fault] -= 1
            return True

    def charge(self, key, request, declined):
        """Does the work, or finds that it was done; status and body of the answer."""
        with self.journal.lock:
            known = self.journal.entries.get(key)
            if self.mode == 'deduplicates' and known:
                if known[0]['request'] != request:
                    return 422, {'error': 'key_reused'}
                return answer(known[0])
            if declined and self.mode != 'deduplicates':
                return 402, {'error': 'card_declined'}
            entry = {'what': 'declined' if declined else 'charge', 'key': key, 'request': request,
                     'id': f'ch_{self.journal.number + 1}'}
            return answer(self.journal.add(entry))

    def find(self, key):
        if self.mode == 'blind':
            return 501, {'error': 'no_lookup'}
        with self.journal.lock:
            known = list(self.journal.entries.get(key, ()))
        if not known:
            return 404, {'error': 'not_found'}
        return 200, {'answers': [answer(entry)[1] for entry in known]}

    def state(self):
        with self.lock:
            return 200, {'in_work': self.in_work, 'posts': self.posts}


def answer(entry):
    if entry['what'] == 'declined':
        return 402, {'error': 'card_declined'}
    return 201, {'id': entry['id'], 'amount': entry['request']['amount'], 'currency': entry['request']['currency']}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        pass

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        return json.loads(self.rfile.read(int(self.headers.get('Content-Length', 0))))

    def do_GET(self):
        service = self.server.service
        url = urllib.parse.urlsplit(self.path)
        if url.path == '/state':
            self.reply(*service.state())
        elif url.path != '/charges':
            self.reply(404, {'error': 'no_such_page'})
        elif service.suffers('lookup_down'):
            self.reply(503, {'error': 'unavailable'})
        else:
            self.reply(*service.find(urllib.parse.parse_qs(url.query)['key'][0]))

    def do_POST(self):
        if self.path == '/faults':
            self.server.service.set_faults(self.body())
            self.reply(200, {})
        elif self.path == '/charges':
            self.charges(self.server.service)
        else:
            self.reply(404, {'error': 'no_such_page'})

    def charges(self, service):
        key = self.headers.get('Idempotency-Key')
        request = self.body()
        if not key:
            self.reply(400, {'error': 'no_key'})
            return
        with service.lock:
            service.in_work += 1
            service.posts[key] += 1
        try:
            self.work(service, key, request)
        except OSError:                 # the client has gone
            self.close_connection = True
        finally:
            with service.lock:
                service.in_work -= 1

    def work(self, service, key, request):
        if service.suffers('unavailable'):
            self.reply(503, {'error': 'unavailable'})
            return
        if service.suffers('slow_before'):
            service.released.wait(service.seconds)
        status, body = service.charge(key, request, service.suffers('declined'))
        if service.suffers('broken'):
            status, body = 500, {'error': 'internal'}
        if service.suffers('slow_after'):
            service.released.wait(service.seconds)
        if service.suffers('drop_answer'):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.reply(status, body)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--journal', required=True)
    parser.add_argument('--mode', choices=['deduplicates', 'reference', 'blind'], default='deduplicates')
    args = parser.parse_args()

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.daemon_threads = True
    server.service = Service(args.mode, Journal(args.journal))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f'port {server.server_address[1]}', flush=True)
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == '__main__':
    main()
