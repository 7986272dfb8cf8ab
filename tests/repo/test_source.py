"""House rules a machine can check."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("assets/**/*.py")])
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 450
TEXT_SUFFIXES = {".py", ".md", ".sh", ".toml", ".yml", ".txt"}
CATCH_ALL_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_readable(path):
    text = path.read_text(encoding="utf-8")
    assert path.name not in CATCH_ALL_NAMES
    assert text.count("\n") <= MAX_FILE_LINES
    for function in functions(ast.parse(text)):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= MAX_FUNCTION_LINES, f"{function.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_unfinished_function_and_no_unbounded_catch(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise):
            assert "NotImplementedError" not in ast.dump(node)
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "a bare except"


def test_every_unit_test_file_mirrors_a_source_file_or_package():
    for path in ROOT.glob("tests/unit/**/test_*.py"):
        relative = path.relative_to(ROOT / "tests" / "unit")
        package = ROOT / "src" / "agentrl" / relative.parent
        assert package.is_dir(), path


def test_no_file_holds_a_path_of_one_machine():
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    home = re.compile(r"(?<![\w.])/(?:root|home|" + "wor" + r"k)/\w")
    for path in (ROOT / name for name in listed.splitlines()):
        if path.is_file() and path.stat().st_size < 400_000 and path.suffix in TEXT_SUFFIXES:
            assert not home.search(path.read_text(encoding="utf-8")), path
