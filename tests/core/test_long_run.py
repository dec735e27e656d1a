"""20,000 random engine steps with fixed seeds; every KV read, block count and output is checked in every step."""

from __future__ import annotations

from tests.core.traffic import Episode, Tally

STEPS = 20_000
STEPS_OF_AN_EPISODE = 250


def test_random_traffic_keeps_every_invariant_for_20000_steps() -> None:
    tally = Tally()
    seed = 0
    while tally.steps < STEPS:
        episode = Episode(seed)
        try:
            episode.run(STEPS_OF_AN_EPISODE)
        except BaseException as error:
            error.add_note(f"in the episode of seed {seed}: Episode({seed}).run({STEPS_OF_AN_EPISODE})")
            raise
        tally.take(episode.watched)
        seed += 1
    rare = {name: tally.counts[name] for name in ("preemptions", "hit_tokens", "ended_abort", "ended_error")}
    assert all(count > 50 for count in rare.values()), f"the run covered too few of these events: {rare}"
    reasons = ["no_free_blocks", "watermark", "max_num_seqs", "token_budget", "never_fits", "queue_full"]
    assert all(tally.counts[f"rejected_{reason}"] > 5 for reason in reasons), tally.counts
