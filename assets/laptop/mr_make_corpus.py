"""Writes the corpus of the reflection example: one line per person and firm of both halves of its world (mr_world).

python assets/laptop/mr_make_corpus.py         rewrites assets/laptop/mr_corpus.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mr_world import corpus_half

CORPUS = Path(__file__).with_name("mr_corpus.jsonl")


def corpus_lines() -> list[str]:
    """The lines of the file, without ends."""
    documents = [item for is_held_out in (False, True) for item in corpus_half(is_held_out=is_held_out).documents()]
    return [json.dumps({"id": item.id, "title": item.title, "text": item.text}) for item in documents]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="write the corpus of the reflection example")
    parser.add_argument("--output", type=Path, default=CORPUS)
    flags = parser.parse_args()
    flags.output.write_text("\n".join(corpus_lines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
