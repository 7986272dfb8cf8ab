import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.inspector.curves import LEVELS, moving_mean, sparkline, text_plot, write_reward_picture

VALUES = st.lists(st.floats(-2, 3, allow_nan=False), min_size=1, max_size=200)


@given(VALUES)
def test_a_sparkline_has_one_block_per_value_and_keeps_their_order(values):
    line = sparkline(values, low=0.0, high=1.0)
    assert len(line) == len(values)
    heights = [LEVELS.index(block) for block in line]
    for (a, block_a), (b, block_b) in zip(
        zip(values, heights, strict=True), sorted(zip(values, heights, strict=True)), strict=True
    ):
        assert (a <= b) or (block_a >= block_b)


def test_a_sparkline_spans_the_blocks():
    assert sparkline([-1, 0, 0.5, 1, 2], low=0, high=1) == "▁▁▅██"
    assert sparkline([1, 1], low=1, high=1) == "▁▁"


@given(VALUES, st.integers(1, 80), st.integers(1, 12))
def test_a_plot_fits_its_width_and_height(values, width, height):
    lines = text_plot(values, width=width, height=height, low=-2, high=3).splitlines()
    assert len(lines) == height + 2
    assert all(len(line) <= width + 8 for line in lines[:-1])


def test_a_plot_is_as_high_as_its_values():
    plot = text_plot([0.0, 0.5, 1.0], width=10, height=2, low=0.0, high=1.0)
    assert plot.splitlines() == ["  1.00 ┤  █", "  0.50 ┤ ██", "  0.00 └───", "  step  1 3"]
    assert text_plot([], width=10, height=2, low=0, high=1) == "no steps yet"


def test_a_moving_mean_looks_back_only():
    assert moving_mean([1, 2, 3, 4], window=2) == pytest.approx([1, 1.5, 2.5, 3.5])


def test_the_picture_is_a_png_of_readable_size(tmp_path):
    path = tmp_path / "reward.png"
    write_reward_picture(path, rewards=[0.1, 0.4, 0.9], title="demo")
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", header[16:24])
    assert width >= 900
    assert height >= 500
    assert list(tmp_path.iterdir()) == [path]
