#!/usr/bin/python3
"""Writes the demo's input: one payment request a line, as they reach the service.

  requests.py COUNT SEED > requests.jsonl

Of the payments, a quarter arrive more than once, some with another amount under the
same key, in shuffled order; and for some deliveries something goes wrong ("fate").
"""
import json
import random
import sys


def main():
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    rnd = random.Random(seed)
    lines = []
    payment = 0
    while len(lines) < count:
        payment += 1
        account = rnd.randint(51, 55) if rnd.random() < 0.02 else rnd.randint(1, 50)
        amount = round(rnd.uniform(2, 200), 2)
        position = len(lines)
        deliveries = 1 if rnd.random() < 0.75 else rnd.randint(2, 6)
        for n in range(deliveries):
            fate = rnd.choices(['ok', 'dies after claim', 'dies before commit', 'answer lost', 'transient error'],
                               [88, 2, 3, 4, 3])[0]
            sent = amount
            if n > 0 and rnd.random() < 0.12:
                sent = round(amount + 1, 2)                  # same key, other request
            form = rnd.choices(['two transactions', 'stored function', 'idem_execute'], [50, 25, 25])[0]
            lines.append((position + rnd.randint(0, 40) * (n > 0), {
                'key': f'tenant-{account % 7}:charge:order-{payment}',
                'request': {'payment': f'order-{payment}', 'account': account, 'amount': sent},
                'fate': fate, 'form': form}))
    lines.sort(key=lambda line: line[0])
    for _, line in lines[:count]:
        print(json.dumps(line))


main()
