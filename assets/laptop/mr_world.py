"""The little world of the reflection example: people who share a first name, and a search that returns one of them.

    Who is the boss of Bramon the baker?
        search("Bramon")           -> "Tolford Bramon is a singer at Zephtex. See [Kedham Bramon]."    another Bramon
        search("Kedham Bramon")    -> "Kedham Bramon is a baker at Nortex. See [Luburg Bramon]."       the baker
        search("Nortex")           -> "Nortex has boss Ginlin."
        Ginlin

Family names come first. Three people share each first name. A search for the first name alone returns always the same
one of them, who is the one that was asked for only one time in three; each document names the next of the three.
Whether it is the right one shows only in the document's text, and the search knows titles only, so no query finds the
baker at once. Stopping at the wrong person gives a plausible wrong answer.

The world has two halves that share no first name, no firm and no boss, hence no person: one to train on, one held out.
Family names and trades are words of both. Everything follows from the random generator that is passed in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from make_corpus import make_names

from agentrl.tools.servers.corpus_files import Document

NUM_FIRST_NAMES, NUM_FAMILY_NAMES, NUM_FIRMS = 120, 40, 60
NAMESAKES = 3  # people who share a first name
HELD_OUT_PART = 4  # one in so many first names, firms and bosses is held out
TRADES = ("baker", "dancer", "driver", "farmer", "painter", "singer", "teacher", "writer")
QUESTIONS = {  # kind -> the question
    "firm": "Where works {first} the {trade}?",
    "boss": "Who is the boss of {first} the {trade}?",
}
KIND_WEIGHTS = {"firm": 1, "boss": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What can be called something; the first names, firms and bosses of one half, and the family names of both."""

    first: Sequence[str]
    family: Sequence[str]
    firms: Sequence[str]
    bosses: Sequence[str]

    def half(self, *, is_held_out: bool) -> Names:
        """The names of one half of the world."""

        def keep(names: Sequence[str]) -> list[str]:
            return [name for index, name in enumerate(names) if (index % HELD_OUT_PART == 0) == is_held_out]

        return Names(first=keep(self.first), family=self.family, firms=keep(self.firms), bosses=keep(self.bosses))

    def all(self) -> list[str]:
        """Every name, sorted."""
        return sorted({*self.first, *self.family, *self.firms, *self.bosses})


@dataclass(frozen=True, slots=True, kw_only=True)
class Firm:
    """A firm and what its document says."""

    name: str
    boss: str

    @property
    def text(self) -> str:
        """The document."""
        return f"{self.name} has boss {self.boss}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """One of the people who share a first name. `see` is the title of the next one's document."""

    first: str
    family: str
    trade: str
    firm: Firm
    see: str

    @property
    def title(self) -> str:
        """Family and first name: what a search finds exactly this person by."""
        return f"{self.family} {self.first}"

    @property
    def text(self) -> str:
        """The document."""
        return f"{self.title} is a {self.trade} at {self.firm.name}. See [{self.see}]."


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about the `place`-th of the people that a search for the first name leads to."""

    kind: str  # a key of QUESTIONS
    people: Sequence[Person]  # in the order in which one document leads to the next
    place: int

    @property
    def text(self) -> str:
        """What is asked."""
        return QUESTIONS[self.kind].format(first=self.people[0].first, trade=self.people[self.place].trade)

    @property
    def answer(self) -> str:
        """The right answer."""
        return answer_about(self.people[self.place], kind=self.kind)

    @property
    def num_calls(self) -> int:
        """Searches of the shortest way to the answer that sees it in a document."""
        return self.place + 1 + (self.kind != "firm")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """People by first name, and firms."""

    people: Sequence[Sequence[Person]]
    firms: Sequence[Firm]

    def documents(self) -> Iterator[Document]:
        """The corpus. Of equally good documents a search prefers the first, so the order decides whom a name finds."""
        for namesakes in self.people:
            for person in namesakes:
                yield Document(id=person.title, title=person.title, text=person.text)
        for firm in self.firms:
            yield Document(id=firm.name, title=firm.name, text=firm.text)


def draw_names() -> Names:
    """All names of the example, always the same."""
    rng, taken = random.Random("names of mr_search"), set[str]()
    return Names(
        first=make_names("person", NUM_FIRST_NAMES, taken=taken, rng=rng),
        family=make_names("city", NUM_FAMILY_NAMES, taken=taken, rng=rng),
        firms=make_names("firm", NUM_FIRMS, taken=taken, rng=rng),
        bosses=make_names("person", NUM_FIRMS, taken=taken, rng=rng),
    )


def corpus_half(*, is_held_out: bool) -> World:
    """One half of the world that the search server's corpus describes."""
    part = "heldout" if is_held_out else "train"
    return deal_world(draw_names().half(is_held_out=is_held_out), rng=random.Random(f"world of mr_search {part}"))


def draw_question(world: World, *, rng: random.Random) -> Question:
    """One question."""
    kind = rng.choices(list(KIND_WEIGHTS), weights=list(KIND_WEIGHTS.values()))[0]
    return Question(kind=kind, people=rng.choice(world.people), place=rng.randrange(NAMESAKES))


def deal_world(names: Names, *, rng: random.Random) -> World:
    """Deal out family names, trades, firms and bosses to the first names."""
    bosses = rng.sample(names.bosses, len(names.firms))
    firms = [Firm(name=name, boss=boss) for name, boss in zip(names.firms, bosses, strict=True)]
    return World(people=[_deal_people(first, names.family, firms, rng=rng) for first in names.first], firms=firms)


def answer_about(person: Person, *, kind: str) -> str:
    """The answer to a question of this kind if it were about this person."""
    return {"firm": person.firm.name, "boss": person.firm.boss}[kind]


def _deal_people(first: str, families: Sequence[str], firms: Sequence[Firm], *, rng: random.Random) -> list[Person]:
    chosen = rng.sample(families, NAMESAKES)
    trades, employers = rng.sample(TRADES, NAMESAKES), rng.sample(firms, NAMESAKES)
    return [
        Person(
            first=first,
            family=family,
            trade=trades[index],
            firm=employers[index],
            see=f"{chosen[(index + 1) % NAMESAKES]} {first}",
        )
        for index, family in enumerate(chosen)
    ]
