"""Writes the corpus of the bundled search server: one line per invented person, city and firm.

    python assets/laptop/make_corpus.py            rewrites src/agentrl/tools/servers/corpus.jsonl

Every name is one capitalised word, every document has the same sentences in the same order, so that questions of one
or several hops can be generated from the file alone:

    person    Amos was born in Emba and works at Zephyr.
    city      Emba is a city in Wessia with mayor Gina. Emba has 42 bridges.
    firm      Zephyr is a firm in Norn with boss Gina. Zephyr has 17 trucks.

Each document also carries its facts as fields (`kind`, `city`, `firm`, `country`, `mayor`, `boss`, `bridges`,
`trucks`), which the server ignores. Same seed, same file.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parents[2] / "src" / "agentrl" / "tools" / "servers" / "corpus.jsonl"
NUM_PEOPLE, NUM_CITIES, NUM_FIRMS, NUM_COUNTRIES = 80, 40, 30, 8
_ONSETS = ("b", "br", "d", "dr", "g", "gl", "h", "j", "k", "kr", "l", "m", "n", "p", "r", "s", "t", "tr", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")
_ENDINGS = {
    "person": ("mon", "lin", "dra", "vik", "nel", "sha", "rit", "bel"),
    "city": ("burg", "ford", "ville", "mouth", "stead", "ham"),
    "firm": ("tex", "corp", "max", "ware", "lux", "dyne"),
    "country": ("land", "stan", "onia", "mark"),
}


def make_names(kind: str, count: int, *, taken: set[str], rng: random.Random) -> list[str]:
    """Distinct invented names: random syllables and an ending that tells the kind."""
    names: list[str] = []
    while len(names) < count:
        stem = rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(("", rng.choice(_ONSETS) + rng.choice(_VOWELS)))
        if stem in taken:
            continue
        taken.add(stem)
        names.append((stem + rng.choice(_ENDINGS[kind])).capitalize())
    return names


def make_documents(seed: int) -> list[dict[str, Any]]:
    """All documents, people first."""
    rng = random.Random(seed)
    taken: set[str] = set()
    people = make_names("person", NUM_PEOPLE, taken=taken, rng=rng)
    cities = make_names("city", NUM_CITIES, taken=taken, rng=rng)
    firms = make_names("firm", NUM_FIRMS, taken=taken, rng=rng)
    countries = make_names("country", NUM_COUNTRIES, taken=taken, rng=rng)
    documents: list[dict[str, Any]] = []
    for name in people:
        city, firm = rng.choice(cities), rng.choice(firms)
        text = f"{name} was born in {city} and works at {firm}."
        documents.append({"title": name, "text": text, "kind": "person", "city": city, "firm": firm})
    for name in cities:
        country, mayor, bridges = rng.choice(countries), rng.choice(people), rng.randint(11, 99)
        text = f"{name} is a city in {country} with mayor {mayor}. {name} has {bridges} bridges."
        facts = {"country": country, "mayor": mayor, "bridges": bridges}
        documents.append({"title": name, "text": text, "kind": "city", **facts})
    for name in firms:
        country, boss, trucks = rng.choice(countries), rng.choice(people), rng.randint(11, 99)
        text = f"{name} is a firm in {country} with boss {boss}. {name} has {trucks} trucks."
        facts = {"country": country, "boss": boss, "trucks": trucks}
        documents.append({"title": name, "text": text, "kind": "firm", **facts})
    return [{"id": f"d{index:03d}", **document} for index, document in enumerate(documents)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="write the corpus of the bundled search server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=CORPUS)
    flags = parser.parse_args()
    lines = [json.dumps(document, ensure_ascii=False) for document in make_documents(flags.seed)]
    flags.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
