import io

import pytest
from rich.console import Console

from agentrl.inspector.plain import plain, without_controls


@pytest.mark.parametrize("hostile", ["\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "a\rb", "\u202eevil", "\x08\x08"])
def test_no_control_character_reaches_the_terminal(hostile):
    shown = without_controls(f"before {hostile} after")
    assert shown.isprintable()
    assert shown.startswith("before ")
    assert shown.endswith(" after")


@pytest.mark.parametrize("text", ["two\nlines\tand a tab", "naïve 数学　问题", "👩‍🔬 1 000 €"])
def test_ordinary_text_of_any_language_stays_as_it_is(text):
    assert without_controls(text) == text


def test_square_brackets_are_shown_and_not_taken_for_markup():
    console = Console(file=io.StringIO(), width=80)
    console.print(plain("[/no] [bold]tag[/bold]"))
    assert console.file.getvalue() == "[/no] [bold]tag[/bold]\n"
