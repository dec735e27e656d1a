"""Runs millions of random engine steps with the checks of the test suite: `make soak`.

    python -m tests.core.soak [--steps N] [--seconds S] [--seed S] [--episode N]

Ends after --steps or --seconds, whichever comes first. A violation prints the seed and exits with status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.core.traffic import Episode, Tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Random engine steps on a KV pool that checks every read.")
    parser.add_argument("--steps", type=int, default=2_000_000, help="end after N steps (default: 2 million)")
    parser.add_argument("--seconds", type=float, default=3600, help="end after S seconds (default: 3600)")
    parser.add_argument("--seed", type=int, default=1_000_000, help="seed of the first episode; the next ones count up")
    parser.add_argument("--episode", type=int, default=500, help="steps per engine (default: 500)")
    arguments = parser.parse_args()
    return soak(arguments.steps, arguments.seconds, arguments.seed, arguments.episode)


def soak(steps: int, seconds: float, seed: int, episode_steps: int) -> int:
    tally = Tally()
    start = reported = time.monotonic()
    while tally.steps < steps and time.monotonic() - start < seconds:
        episode = Episode(seed)
        try:
            episode.run(episode_steps)
        except Exception:
            traceback.print_exc()
            print(f"FAILED; reproduce with: --seed {seed} --steps 1 --episode {episode_steps}")
            return 1
        tally.take(episode.watched)
        seed += 1
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            print(f"{report(tally, reported - start)}; next seed {seed}", flush=True)
    print(f"{report(tally, time.monotonic() - start)}: no violation")
    print("  " + ", ".join(f"{name} {count:,}" for name, count in sorted(tally.counts.items())))
    return 0


def report(tally: Tally, seconds: float) -> str:
    return f"{tally.steps:,} steps, {tally.tokens:,} tokens in {seconds:.0f} s ({tally.steps / seconds:,.0f} steps/s)"


if __name__ == "__main__":
    sys.exit(main())
