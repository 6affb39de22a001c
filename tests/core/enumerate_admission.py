"""Walks all states of all tiny schedulers, and says how many there were.

    python tests/core/enumerate_admission.py [--seconds N] [--part K/N] [--sharing yes|no] [--at-once 2|3]
                                             [--policy P] [--blocks N] [--kinds N --seed N] [--max-states N] [--jobs N]

Without options it walks everything: up to 8 blocks of 2 tokens, prompts up to 5 and `max_tokens` up to 6, chunks of 1
and 2, one and two steps in flight, with and without decode steps between chunks, two and three requests at once, each
of the three policies. Where nothing is shared, any number of requests may follow each other; with shared prefixes two
or three arrive in all, and of two that arrive one may go on from the answer of the other, too. That takes hours;
`--seconds` begins no further search after that time, `--part 2/8` takes every eighth one, `--max-states` leaves a
search after so many, and `--kinds 4` lets only four kinds of requests arrive in each, drawn anew for each by `--seed`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import pathlib
import random
import sys
import time
from collections.abc import Iterator

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from scheduler_svc.core.config import KvAdmission
from tests.core.exploring import Counts, Search
from tests.core.tiny_worlds import Setup

ALL_STREAMS = ("own", "shared", "continued")
TWO_STREAMS = ALL_STREAMS[:2]


def all_setups() -> list[Setup]:
    """Those with few states first."""
    return sorted(_setups(), key=lambda setup: (setup.num_usable, setup.max_num_seqs, len(setup.streams)))


def _setups() -> Iterator[Setup]:
    for policy, num_usable, chunk, depth, is_bounded, max_num_seqs in itertools.product(
        KvAdmission, range(1, 9), (1, 2), (1, 2), (False, True), (2, 3)
    ):
        for streams in (("own",), ALL_STREAMS if max_num_seqs == 2 else TWO_STREAMS):
            # With one request of max_model_len in all of KV memory, and with two.
            for share in (1, 2) if num_usable > 1 else (1,):
                max_requests = None if len(streams) == 1 else max_num_seqs
                yield Setup(
                    num_usable, chunk, depth, is_bounded, max_num_seqs, policy, streams, max_requests, share
                )  # fmt: skip


def search(setup: Setup, num_kinds: int | None = None, seed: int = 0, max_states: int | None = None) -> Counts:
    """Walks one setup, with all kinds of requests or some of them."""
    kinds = setup.kinds()
    if num_kinds is not None:
        kinds = random.Random(f"{seed} {setup}").sample(kinds, min(num_kinds, len(kinds)))
    return Search(setup, kinds, max_states=max_states).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no search after this time")
    parser.add_argument("--part", default="1/1", help="K/N: only every N-th search, from the K-th on")
    parser.add_argument("--sharing", choices=("yes", "no"), help="only with, or only without shared prefixes")
    parser.add_argument("--at-once", type=int, choices=(2, 3), help="only with so many requests at once")
    parser.add_argument("--policy", type=KvAdmission, choices=KvAdmission, help="only this one")
    parser.add_argument("--blocks", type=int, help="only with so many usable blocks")
    parser.add_argument("--max-states", type=int, help="of one search")
    parser.add_argument("--kinds", type=int, help="so many kinds of requests in each search; all if not given")
    parser.add_argument("--seed", type=int, default=0, help="for the choice of kinds")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    part, num_parts = map(int, options.part.split("/"))
    setups = all_setups()
    chosen = [setup for setup in setups if _is_chosen(setup, options)][part - 1 :: num_parts]
    deadline = time.monotonic() + options.seconds
    total, num_done = Counts(), 0
    with multiprocessing.Pool(options.jobs) as pool:
        work = [(setup, options.kinds, options.seed, options.max_states, deadline) for setup in chosen]
        for setup, counts in pool.imap_unordered(_search_in_time, work):
            if counts is None:
                continue
            num_done += counts.is_complete and options.kinds is None
            total = total + counts
            print(
                f"{counts.states:>9} states {counts.steps:>10} steps {counts.questions:>10} questions "
                f"{'' if counts.is_complete else '(not all)'} {setup}",
                flush=True,
            )
    print(
        f"{num_done} of {len(setups)} searches in full; {total.states} states, {total.steps} steps and "
        f"{total.questions} questions to three policies in all; no request lacked a block, nothing stood still"
    )
    return 0


def _is_chosen(setup: Setup, options: argparse.Namespace) -> bool:
    wanted = (
        ({"yes": True, "no": False, None: None}[options.sharing], setup.is_sharing),
        (options.at_once, setup.max_num_seqs),
        (options.policy, setup.kv_admission),
        (options.blocks, setup.num_usable),
    )
    return all(value in (None, found) for value, found in wanted)


def _search_in_time(work: tuple[Setup, int | None, int, int | None, float]) -> tuple[Setup, Counts | None]:
    setup, num_kinds, seed, max_states, deadline = work
    gc.disable()  # copies are no part of a cycle, and there are millions
    if time.monotonic() > deadline:
        return setup, None
    return setup, search(setup, num_kinds, seed, max_states)


if __name__ == "__main__":
    raise SystemExit(main())
