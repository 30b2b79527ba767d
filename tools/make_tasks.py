"""Writes the tasks that come with tfkit: `python tools/make_tasks.py`.

All sentences are made from the words below. Every text consists of letters, blanks and full stops, which the characters
of `tinyshakespeare` can express.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tfkit" / "data" / "tasks"
NOUNS = ("key", "book", "horse", "letter", "garden", "river", "sailor", "window", "painter", "bird", "tower", "soldier")
JOINS = ("near", "behind", "beside", "below", "above")
ENDS = ("old", "small", "quiet", "lost", "red", "dry", "strong", "cold")
VERBS = (("is", "are"), ("was", "were"), ("looks", "look"), ("seems", "seem"))
STARTS = ("He saw the", "They gave us the", "I never had the")
WORDS = """
    brother candle castle circle corner danger dinner doctor family father finger flower forest friend garden hammer
    island jacket kitchen ladder letter market master minute mirror mother mountain needle number orange palace people
    pocket prince queen question river school season second shadow silver sister spring stone stranger street summer
    sword table thing thunder window winter wonder world
    """.split()  # noqa: SIM905
NAMES = ("Tom", "Ann", "Sam", "Ben", "Eve", "Kate", "Paul", "Rose")
THINGS = ("lamp", "book", "coin", "rope", "bell", "cup", "map", "ring")


def agreement(generator: random.Random) -> Iterator[dict[str, Any]]:
    """Yield subjects with a noun of the other number between subject and verb: `The keys near the book are`."""
    for number in range(200):
        subject, other = generator.sample(NOUNS, 2)
        plural = number % 2
        nouns = (f"{subject}s", other) if plural else (subject, f"{other}s")
        end = generator.choice(ENDS)
        choices = [f" {verb} {end}." for verb in generator.choice(VERBS)]
        answer = plural
        if generator.random() < 0.5:
            choices, answer = choices[::-1], 1 - answer
        yield {
            "prompt": f"The {nouns[0]} {generator.choice(JOINS)} the {nouns[1]}",
            "choices": choices,
            "answer": answer,
        }


def spelling(generator: random.Random) -> Iterator[dict[str, Any]]:
    """Yield words, each with three words of the same letters in a different order."""
    for start in STARTS:
        for word in WORDS:
            choices = {word}
            while len(choices) < 4:
                choices.add("".join(generator.sample(word, len(word))))
            texts = sorted(choices)
            generator.shuffle(texts)
            yield {"prompt": start, "choices": [f" {text}." for text in texts], "answer": texts.index(word)}


def recall(generator: random.Random) -> Iterator[dict[str, Any]]:
    """Yield sentences about several people, of which the last repeats the beginning of an earlier sentence."""
    for _ in range(150):
        names, things = generator.sample(NAMES, 4), generator.sample(THINGS, 4)
        facts = [f"{name} has the {thing}." for name, thing in zip(names, things, strict=True)]
        chosen = generator.randrange(4)
        yield {"source": f"{' '.join(facts)} {names[chosen]} has the", "target": f" {things[chosen]}."}


def main() -> None:
    """Write one file for each function above."""
    FOLDER.mkdir(exist_ok=True)
    for make in (agreement, spelling, recall):
        rows = make(random.Random(0))
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (FOLDER / f"{make.__name__}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
