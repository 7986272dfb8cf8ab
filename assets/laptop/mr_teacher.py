"""The flawed teacher whose demonstrations the reflection example's model imitates before reinforcement learning.

It reads and copies well and decides badly. The worst habit is that of language models: it takes the first document for
the right one and rarely compares it with the question. Asked to reflect, it mostly repeats its answer, sometimes looks
at the next document just so, and rarely compares. Where it does compare, it says so and then does the right thing; so
all a good policy needs is there, with a small probability, inside an episode and after a reflection.

Demonstrations are of one long episode or of several short ones, so that one start model serves both ways of training.
They show worlds dealt anew from all names: the model learns to read every name and nothing about its bearers. Beside
them are drills of the two skills that decisions rest on, copying and comparing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mr_world import NAMESAKES, Names, Person, Question, World, answer_about, deal_world, draw_question

from agentrl.tools.servers.search import SearchIndex

LESSONS_PER_WORLD = 200
SINGLE_SHARE = 0.3  # lessons of one episode
SINGLE_CALLS = 6  # searches of it
EPISODE_CALLS = 2  # searches of each of several episodes
NUM_EPISODES_WEIGHTS = {1: 2, 2: 2, 3: 4, 4: 1, 5: 1, 6: 1}
COPYING_SHARE = 0.08  # lessons that repeat words
COPYING_WORDS = 12
COMPARING_SHARE = 0.35  # lessons that compare documents with a description
HASTY_DRILL_SHARE = 0.4  # of these comparisons, those that come after a reflection on a hasty answer
REFLECTION = "Look again."
LAST_CALL = "Answer now."
MAX_RESULT_CHARS = 400
ARGUMENT_NAMES = {"search": "query"}

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaws:
    """How often the teacher decides well; everything else is a habit that mostly fails."""

    gives_up: float = 0.05  # at the start: "unknown" without a search
    stops_early: float = 0.2  # answers a question about the firm with the firm
    compares: float = 0.15  # after a person's document: is it who was asked for?
    compares_again: float = 0.15  # the same after a reflection
    moves_on: float = 0.4  # after a reflection without comparing: the next document, else the same answer again


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A conversation to imitate, and the answer of each episode."""

    query: str
    completions: tuple[str, ...]  # without end of turn
    replies: tuple[tuple[Message, ...], ...]  # the messages between one completion and the next
    answers: tuple[str, ...] = ()
    is_drill: bool = False
    system_prompt: None = None


class Teacher:
    """Draws lessons. Same generator state, same lessons."""

    def __init__(self, names: Names, *, rng: random.Random, flaws: Flaws | None = None) -> None:
        self._names = names
        self._words = names.all()
        self._rng = rng
        self._flaws = flaws or Flaws()

    def lessons(self, count: int) -> Iterator[Lesson]:
        """`count` lessons, drills among them."""
        for index in range(count):
            if index % LESSONS_PER_WORLD == 0:
                world = deal_world(self._names, rng=self._rng)
                search = SearchIndex(world.documents(), titles_only=True)
            share = self._rng.random()
            if share < COPYING_SHARE:
                yield self._copying()
            elif share < COPYING_SHARE + COMPARING_SHARE:
                yield self._comparing(world)
            else:
                yield self._lesson(world, search)

    def _lesson(self, world: World, search: SearchIndex) -> Lesson:
        question = draw_question(world, rng=self._rng)
        if self._rng.random() < SINGLE_SHARE:
            return self.solve(question, search, num_episodes=1, calls_per_episode=SINGLE_CALLS)
        weights = NUM_EPISODES_WEIGHTS
        num_episodes = self._rng.choices(list(weights), weights=list(weights.values()))[0]
        return self.solve(question, search, num_episodes=num_episodes, calls_per_episode=EPISODE_CALLS)

    def solve(self, question: Question, search: SearchIndex, *, num_episodes: int, calls_per_episode: int) -> Lesson:
        """The teacher's attempts at a question."""
        attempt = _Attempt(
            question=question, search=search, flaws=self._flaws, rng=self._rng, calls_per_episode=calls_per_episode
        )
        for _ in range(num_episodes):
            attempt.run_episode()
        return attempt.lesson()

    def _copying(self) -> Lesson:
        """Repeat the user's words: the cheapest way to learn to copy, held-out names included."""
        text = " ".join(self._rng.choices(self._words, k=COPYING_WORDS))
        drill = _Conversation()
        drill.say(text)
        return drill.lesson(query=text, is_drill=True)

    def _comparing(self, world: World) -> Lesson:
        """Say of one document after the other whether it is about whom the user describes, up to the one that is.

        Some remarks come at once, some after a reflection on a hasty answer, with or without a search for the firm.
        """
        question = draw_question(world, rng=self._rng)
        drill = _Conversation()
        shown = question.people[: question.place + 1]
        for person in shown:
            if person is not shown[0]:
                drill.hear(_result(person.text))
            if self._happens(HASTY_DRILL_SHARE):
                hasty_answer = person.firm.name
                if question.kind == "boss" and self._happens(0.5):
                    drill.say(call_text(person.firm.name))
                    drill.hear(_result(person.firm.text))
                    hasty_answer = person.firm.boss
                drill.say(answer_text(hasty_answer))
                drill.hear(_asked(REFLECTION))
            drill.say(remark_on(person, wanted=shown[-1].trade))
        query = f"{question.text} {shown[0].text}"
        return drill.lesson(query=query, is_drill=True)

    def _happens(self, probability: float) -> bool:
        return self._rng.random() < probability


def remark_on(person: Person, *, wanted: str) -> str:
    """What the teacher says who compares a document with the description in the question.

    Continuing ` baker` as the document does, or else as the question does, is what an induction head does anyway: even
    a tiny model learns to compare this way.
    """
    return f"Looking for the {wanted}" + (f" at {person.firm.name}" if person.trade == wanted else "?")


@dataclass(slots=True)
class _Conversation:
    """What was said so far."""

    completions: list[str] = field(default_factory=list)
    replies: list[list[Message]] = field(default_factory=list)

    def say(self, completion: str) -> None:
        """The assistant's turn."""
        self.completions.append(completion)
        self.replies.append([])

    def hear(self, message: Message) -> None:
        """A message that follows the last completion."""
        self.replies[-1].append(message)

    def lesson(self, *, query: str, answers: Sequence[str] = (), is_drill: bool = False) -> Lesson:
        """All of it as a lesson."""
        return Lesson(
            query=query,
            completions=tuple(self.completions),
            replies=tuple(map(tuple, self.replies[:-1])),
            answers=tuple(answers),
            is_drill=is_drill,
        )


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """The teacher at work on one question."""

    question: Question
    search: SearchIndex
    flaws: Flaws
    rng: random.Random
    calls_per_episode: int
    said: _Conversation = field(default_factory=_Conversation)
    answers: list[str] = field(default_factory=list)
    place: int | None = None  # whose document was read last
    has_read_firm: bool = False  # that person's
    calls_left: int = 0

    def run_episode(self) -> None:
        """One episode, up to its answer."""
        self.calls_left = self.calls_per_episode
        if self.answers:
            self.said.hear(_asked(REFLECTION))
            self._reflect()
        elif self._happens(self.flaws.gives_up):
            self._answer("unknown")
        else:
            self._read(0)

    def lesson(self) -> Lesson:
        """What was said so far."""
        return self.said.lesson(query=self.question.text, answers=self.answers)

    def _reflect(self) -> None:
        """What the teacher makes of another chance."""
        if self.place is None:
            self._read(0) if self._happens(self.flaws.moves_on) else self._answer(self.answers[-1])
        elif self._happens(self.flaws.compares_again):
            self._compare()
        elif self._happens(self.flaws.moves_on):
            self._read(self._next_place())
        else:
            self._answer(self.answers[-1])

    def _read(self, place: int, *, remark: str = "") -> None:
        """Read a person's document and go on from there."""
        title = self.question.people[0].first if self.place is None else self.question.people[place].title
        self.place, self.has_read_firm = place, False
        if not self._search(title, remark=remark):
            person = self.question.people[place]
            self._answer(person.firm.name if self.question.kind == "firm" else "unknown")
        elif self._happens(self.flaws.compares):
            self._compare()
        else:
            self._settle()

    def _compare(self) -> None:
        """Compare the person read about last with the question, and do the right thing."""
        wanted = self.question.people[self.question.place].trade
        remark = remark_on(self.question.people[self.place], wanted=wanted)
        if self.place == self.question.place:
            self._settle(remark=remark, is_hasty=False)
        else:
            self._read(self._next_place(), remark=remark)

    def _settle(self, *, remark: str = "", is_hasty: bool = True) -> None:
        """Answer as if this were the right person."""
        person = self.question.people[self.place]
        if self.question.kind == "firm" or (is_hasty and self._happens(self.flaws.stops_early)):
            self._answer(person.firm.name, remark=remark)
            return
        if not self.has_read_firm:
            self.has_read_firm = True
            self._search(person.firm.name, remark=remark)
            remark = ""
        self._answer(answer_about(person, kind=self.question.kind), remark=remark)

    def _search(self, query: str, *, remark: str) -> bool:
        """Search; whether another search is allowed afterwards."""
        self.said.say(remark + call_text(query))
        self.said.hear(_result(self.search.search(query, top_k=1, max_chars=MAX_RESULT_CHARS)))
        self.calls_left -= 1
        if not self.calls_left:
            self.said.hear(_asked(LAST_CALL))
        return self.calls_left > 0

    def _answer(self, text: str, *, remark: str = "") -> None:
        self.answers.append(text)
        self.said.say(remark + answer_text(text))

    def _next_place(self) -> int:
        return (self.place + 1) % NAMESAKES

    def _happens(self, probability: float) -> bool:
        return self.rng.random() < probability


def call_text(query: str) -> str:
    """A search as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': {'query': query}})}\n</tool_call>"


def answer_text(answer: str) -> str:
    """An answer as the model writes it."""
    return f"<answer>{answer}</answer>"


def _result(text: str) -> Message:
    return {"role": "tool", "name": "search", "content": text}


def _asked(text: str) -> Message:
    return {"role": "user", "content": text}
