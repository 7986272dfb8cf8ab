import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tools.servers.corpus_files import CorpusError, Document
from agentrl.tools.servers.search import BUNDLED_CORPUS, NO_RESULTS, SearchIndex, load_corpus

DOCUMENTS = [
    {"id": "1", "title": "Emba", "text": "Emba is a city in Wessia with mayor Gina."},
    {
        "id": "2",
        "title": "Zephyr",
        "text": "Zephyr is a firm in Norn with boss Gina. Zephyr mentions Emba, Emba and Emba.",
    },
    {"id": "3", "title": "New Emba", "text": "New Emba has 42 bridges."},
    {"id": "4", "title": "emba", "text": "Emba is also a river."},
]
INDEX = SearchIndex(Document(**row) for row in DOCUMENTS)


def search(query, *, top_k=1, max_chars=1000):
    return INDEX.search(query, top_k=top_k, max_chars=max_chars)


def test_a_title_in_any_letter_case_finds_its_documents_first():
    assert search("  eMBA ") == "Emba is a city in Wessia with mayor Gina.\nEmba is also a river."
    assert search("new  emba") == "New Emba has 42 bridges."


def test_other_queries_are_ranked_by_their_words():
    assert search("which firm has a boss") == DOCUMENTS[1]["text"]
    assert search("bridges", top_k=3) == "New Emba has 42 bridges."
    assert len(search("gina", top_k=2).split("\n")) == 2


def test_texts_are_not_searched_where_titles_are_all_that_counts():
    titles = SearchIndex((Document(**row) for row in DOCUMENTS), titles_only=True)
    assert titles.search("gina new", top_k=3, max_chars=1000) == "New Emba has 42 bridges."
    assert titles.search("gina", top_k=3, max_chars=1000) == NO_RESULTS
    assert titles.search('title : "gina"', top_k=3, max_chars=1000) == NO_RESULTS


@pytest.mark.parametrize("query", ["", "   ", "qqq", "???", '"', "NOTHING -here*"])
def test_a_query_that_matches_nothing_says_so(query):
    assert search(query) == NO_RESULTS


def test_the_answer_is_cut():
    assert search("Emba", max_chars=10) == "Emba is a "


@given(st.text(max_size=300))
def test_no_query_breaks_the_index(query):
    assert search(query)


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "1", "title": "x"}', '{"id": [], "title": "x", "text": "y"}'])
def test_a_bad_corpus_line_is_named(tmp_path, line):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "1", "title": "x", "text": "y"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"corpus\.jsonl:3"):
        load_corpus(path)


def test_the_bundled_corpus_is_what_its_script_writes():
    script = Path(__file__).parents[4] / "assets" / "laptop" / "make_corpus.py"
    spec = importlib.util.spec_from_file_location("make_corpus", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = [json.loads(line) for line in BUNDLED_CORPUS.read_text(encoding="utf-8").splitlines()]
    assert module.make_documents(0) == written


def test_every_name_in_the_bundled_corpus_that_can_be_asked_for_has_one_document():
    rows = [json.loads(line) for line in BUNDLED_CORPUS.read_text(encoding="utf-8").splitlines()]
    index = SearchIndex(load_corpus(BUNDLED_CORPUS))
    assert len(index) == len(rows) == len({row["title"] for row in rows}) == 150
    for row in rows:
        assert row["title"].istitle()
        for name in [row["title"], *(row[key] for key in ("city", "firm", "mayor", "boss") if key in row)]:
            answer = index.search(name, top_k=1, max_chars=1000)
            assert answer.startswith(f"{name} ")
            assert "\n" not in answer
