"""20,000 random steps from one seed: every read, every count and every output checked after each of them."""

from __future__ import annotations

from tests.core.traffic import Episode, Tally

STEPS = 20_000
STEPS_OF_AN_EPISODE = 250


def test_twenty_thousand_random_steps_break_an_invariant() -> None:
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
    assert all(count > 50 for count in rare.values()), f"the run went through too little: {rare}"
    reasons = ["no_free_blocks", "watermark", "max_num_seqs", "token_budget", "never_fits", "queue_full"]
    assert all(tally.counts[f"refused_{reason}"] > 5 for reason in reasons), tally.counts
