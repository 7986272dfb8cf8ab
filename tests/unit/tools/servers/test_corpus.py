import bz2
import gzip
import json
import os
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tools.servers.corpus import corpus_tools, open_index
from agentrl.tools.servers.corpus_files import CorpusError, Document, html_text, read_corpus, wiki_text
from agentrl.tools.servers.corpus_index import DocumentIndex, index_path
from agentrl.tools.servers.serving import OperationError

WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo/>
<page><title>Emba</title><ns>0</ns><id>12</id><revision><id>900</id><text>{{Infobox|{{x}}}}'''Emba''' is a
[[city|large city]] in [[Wessia]].&lt;ref&gt;A book&lt;/ref&gt;
== History ==
[[File:a.png|thumb|A [[bridge]]]]It has [https://example.org 42 bridges].</text></revision></page>
<page><title>Old</title><ns>0</ns><id>13</id><redirect title="Emba"/><revision><text>#REDIRECT</text></revision></page>
<page><title>Talk:Emba</title><ns>1</ns><id>14</id><revision><text>talk</text></revision></page></mediawiki>"""


def documents(path):
    return {document.id: (document.title, document.text) for document in read_corpus(path)}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tools(index, **limits):
    return {tool.name: tool.run for tool in corpus_tools(index, **{"top_k": 5, "max_chars": 50, **limits})}


def test_a_folder_is_read_file_by_file_without_hidden_and_other_files(tmp_path):
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    (tmp_path / "a.md").write_text("intro\n# The Title\nbody", encoding="utf-8")
    (tmp_path / "sub" / "b.html").write_text("<title>B &amp; C</title><style>x{}</style><p>one<p>two", encoding="utf-8")
    (tmp_path / "sub" / "c.txt").write_bytes(b"caf\xe9")
    (tmp_path / "sub" / "d.bin").write_bytes(b"\0")
    (tmp_path / "sub" / ".git" / "e.txt").write_text("hidden", encoding="utf-8")
    assert documents(tmp_path) == {
        "a.md": ("The Title", "intro\n# The Title\nbody"),
        "sub/b.html": ("B & C", "one\ntwo"),
        "sub/c.txt": ("c", "caf�"),
    }


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".gz", gzip.open), (".bz2", bz2.open)])
def test_jsonl_and_wiki_dumps_are_read_compressed_as_well(tmp_path, suffix, opener):
    rows = tmp_path / f"rows.jsonl{suffix}"
    with opener(rows, "wb") as file:
        file.write(b'{"id": "a", "title": "T", "text": "x"}\n\n{"contents": "\\"Emba\\"\\nIs a city"}\n')
    assert documents(rows) == {"a": ("T", "x"), "3": ("Emba", '"Emba"\nIs a city')}
    dump = tmp_path / f"dump.xml{suffix}"
    with opener(dump, "wb") as file:
        file.write(WIKI.encode())
    assert documents(dump) == {"12": ("Emba", "Emba is a\nlarge city in Wessia.\nHistory\nIt has 42 bridges.")}


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", "{", "a.jsonl:1: not JSON"),
        ("a.jsonl", '{"id": "1"}', '"text"'),
        ("a.xml", "<page>", "not a MediaWiki"),
        ("a.xml", "", "not a MediaWiki"),
        ("a.pdf", "x", "not a corpus"),
        ("a.jsonl", '{"id": "1", "text": "x"}\n{"id": "1", "text": "y"}', "same id"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused_by_name_and_leaves_no_index(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CorpusError, match=problem):
        open_index(path, is_in_memory=False)
    assert not index_path(path).exists()


def test_an_xml_bomb_is_refused(tmp_path):
    levels = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    path = tmp_path / "bomb.xml"
    path.write_text(f'<!DOCTYPE x [<!ENTITY l0 "{"x" * 1000}">{levels}]><x><page>&l9;</page></x>', encoding="utf-8")
    with pytest.raises(CorpusError, match="not a MediaWiki"):
        list(read_corpus(path))


@given(st.text(max_size=300))
def test_no_markup_breaks_the_readers(markup):
    assert isinstance(html_text(markup)[1], str)
    assert isinstance(wiki_text(markup), str)


def test_the_index_is_built_once_and_again_when_the_corpus_changes(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"id": "1", "text": "one"}])
    DocumentIndex.beside(path).close()
    built = index_path(path).stat().st_ino
    assert len(DocumentIndex.beside(path)) == 1
    assert index_path(path).stat().st_ino == built
    write_jsonl(path, [{"id": "1", "text": "one"}, {"id": "2", "text": "two"}])
    assert len(DocumentIndex.beside(path)) == 2


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + bytes(200)])
def test_a_broken_index_and_an_unfinished_one_are_built_again(tmp_path, content):
    path = write_jsonl(tmp_path / "c.jsonl", [{"id": "1", "text": "one"}])
    index_path(path).write_bytes(content)
    index_path(path).with_name(index_path(path).name + ".unfinished").write_bytes(content)
    assert DocumentIndex.beside(path).get("1") == Document(id="1", title="one", text="one")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        ".c.jsonl.agentrl-index",
        ".c.jsonl.agentrl-index.lock",
        "c.jsonl",
    ]


BUILD = """
import sys
from pathlib import Path
from agentrl.tools.servers.corpus_index import DocumentIndex, index_path
path = Path(sys.argv[1])
DocumentIndex.beside(path).close()
print(index_path(path).stat().st_ino)
"""


def test_servers_that_start_together_build_the_index_once(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"id": str(n), "text": f"word{n} " * 50} for n in range(3000)])
    command = [sys.executable, "-c", BUILD, str(path)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    inodes = [builder.communicate(timeout=60)[0] for builder in builders]
    assert len(set(inodes)) == 1
    assert inodes[0].strip().isdigit()


async def test_search_gives_ids_that_fetch_reads_piece_by_piece():
    text = "A long text about bridges. " * 10
    index = DocumentIndex.in_memory([
        Document(id="x/1", title="Bridges", text=text), Document(id="2", title="Other", text="bridges and more"),
    ])  # fmt: skip
    run = tools(index)
    found = await run["search"]({"query": "bridges"})
    assert found.startswith("id: x/1\ntitle: Bridges\n")
    assert found.count("id: ") == 2
    assert (await run["search"]({"query": "bridges", "max_results": 1})).count("id: ") == 1
    whole, start = "", 0
    while True:
        piece, _, rest = (await run["fetch"]({"id": "x/1", "start": start})).partition("\n[")
        whole += piece
        if not rest:
            break
        start = int(rest.rpartition("= ")[2].rstrip("]"))
    assert whole == f"Bridges\n\n{text}"
    assert await run["search"]({"query": "?!"}) == "No results."


@pytest.mark.parametrize(
    ("arguments", "problem"), [({"id": "nothing"}, "no document"), ({"id": "1", "start": 999}, "beyond the end")]
)
async def test_what_cannot_be_fetched_says_why(arguments, problem):
    index = DocumentIndex.in_memory([Document(id="1", title="t", text="x")])
    with pytest.raises(OperationError, match=problem):
        await tools(index)["fetch"](arguments)


def test_documents_are_ranked_by_their_words_and_ties_keep_the_order_of_the_corpus():
    index = DocumentIndex.in_memory(
        Document(id=str(n), title=f"t{n}", text="common word" if n else "common rare word") for n in range(5)
    )
    assert [document.id for document in index.rank("rare common", top_k=3)] == ["0", "1", "2"]


@given(st.text(max_size=200))
def test_no_query_breaks_the_index(query):
    index = DocumentIndex.in_memory([Document(id="1", title="t", text="x")])
    index.hits(query, top_k=3)
    index.get(query.encode("utf-8", "replace").decode())
    index.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_corpus_in_a_read_only_folder_is_indexed_in_memory(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"id": "1", "text": "one"}])
    tmp_path.chmod(0o500)
    assert len(open_index(path, is_in_memory=False)) == 1
    tmp_path.chmod(0o700)


def test_the_kept_index_is_only_read(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"id": "1", "text": "one"}])
    index = DocumentIndex.beside(path)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        index._database.execute("DELETE FROM documents")
