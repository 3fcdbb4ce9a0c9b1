"""The two decisions of adaptive batching that minimise flow time: the sum over all items of the time from arrival to answer.

A pass costs `fixed_s` and `item_s` for each item in it, and all its items have their answers when it ends.

How many of those that wait to take. With n items there and lots of sizes Q1, Q2, ... every item waits for the lots before its own and
for all of its own. The optimum (Dobson, Karmarkar and Rummel, "Batching to minimize flow times on one machine", Management Science 33,
1987; Santos and Magazine, Operations Research Letters 4, 1985) is lots that shrink by r = fixed_s / item_s each:

    L = ceil(-1/2 + sqrt(1/4 + 2 n / r))        lots
    Q1 = n / L + (L - 1) r / 2                  the first of them, about sqrt(2 n r) for large n

So all are taken while n <= r, and with a backlog the first lot grows until the fixed cost is a vanishing part of it.

What comes later is delayed by each pass too, as long as the machine is not idle in between: at a load of `load` (the share of the time
that full batches would need for all that comes) a second of work that n items make necessary delays not n but n / (1 - load), which is
the number of all items of the busy period (M/G/1). So the lot is that of n / (1 - load) items, of which n are there: the machine's time is
spared where it is short, and near load 1 all are taken.

How long to wait for one more. k items wait, the next one comes at rate h, and n_pass more would come during the pass if it started now.
To wait dt delays the k, and those n_pass too, since they wait for the end of the pass: (k + n_pass) dt. With probability h dt somebody
comes meanwhile and joins. That one would have waited for the pass and then needed one of its own: it saves `fixed_s`; each of the k
waits `item_s` longer for it. So an arrival gains

    gain_s = fixed_s - k item_s

and waiting pays while h gain_s > k + n_pass. Where the rate changes with time, the wait is the one with the largest expected surplus
`sum over dt of P(nobody yet) (h gain_s - k - n_pass) dt`. At an arrival one decides anew: k has grown and the gain has fallen (looking
ahead by one arrival is optimal in such a monotone case: Chow and Robbins, 1961).

Two things follow. A client that sends one item at a time makes h = 0 while its item waits: it is never made to wait. And where items come
independently of each other (Poisson), n_pass = h (fixed_s + k item_s), which is more than h gain_s: nobody is made to wait either, however
fast they come. Batches form from what comes during a pass. Waiting pays where arrivals cluster: bursts, and clients that ask again
when a batch is done.
"""

import math
from collections.abc import Iterable
from typing import Final

# A pass that costs less than this part of an item costs nothing.
_LEAST_RATIO: Final = 1e-6


def first_lot(n: int, fixed_s: float, item_s: float, load: float) -> int:
    """How many of `n` items that wait to compute first: at least 1, at most `n`."""
    assert n >= 1
    if n * item_s <= fixed_s or load >= 1.0:
        return n
    if fixed_s <= _LEAST_RATIO * item_s:
        return 1
    ratio = fixed_s / item_s
    n_all = n / (1.0 - load)
    n_lots = max(1, math.ceil(math.sqrt(0.25 + 2.0 * n_all / ratio) - 0.5))
    return max(1, min(n, math.floor(n_all / n_lots + (n_lots - 1) * ratio / 2.0 + 0.5)))


def worth_waiting_s(ahead: Iterable[tuple[float, float]], n_delayed: float, gain_s: float) -> float:
    """How long to wait for another item; 0.0: not at all.

    `ahead`: for so many seconds arrivals have this rate, then the next one. `n_delayed`: k + n_pass.
    """
    best = surplus = elapsed_s = best_s = 0.0
    nobody_yet = 1.0
    for seconds, rate in ahead:
        still_nobody = math.exp(-rate * seconds)
        waited_s = seconds if rate * seconds < 1e-9 else (1.0 - still_nobody) / rate
        surplus += nobody_yet * (rate * gain_s - n_delayed) * waited_s
        nobody_yet *= still_nobody
        elapsed_s += seconds
        if surplus > best:
            best, best_s = surplus, elapsed_s
    return best_s
