"""What people look at: trajectories, tables, progress, reward curves. Reads a `ReadStore`, never changes anything."""

from agentrl.inspector.progress import RunProgress, render_progress, render_status
from agentrl.inspector.records import render_records
from agentrl.inspector.trajectory import Trajectory, load_trajectory, render_trajectory

__all__ = [
    "RunProgress",
    "Trajectory",
    "load_trajectory",
    "render_progress",
    "render_records",
    "render_status",
    "render_trajectory",
]
