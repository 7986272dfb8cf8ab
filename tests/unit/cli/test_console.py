import os

import pytest

from agentrl.cli.console import UnwindingConsole


def test_a_reader_that_left_is_an_error_the_caller_can_clean_up_after():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as file:
        console = UnwindingConsole(file=file)
        with pytest.raises(BrokenPipeError):
            console.print("one line")
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
