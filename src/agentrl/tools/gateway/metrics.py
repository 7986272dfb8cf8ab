"""Counts of the gateway in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from agentrl.tools.guard import BreakerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1}


class GatewayMetrics:
    """What happened since the gateway started. Labels are names of the configuration, never of a request."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._refused: Counter[str] = Counter()
        self._buckets: Counter[tuple[str, int]] = Counter()
        self._seconds: Counter[str] = Counter()
        self._failures_in_a_row: Counter[str] = Counter()

    def count_call(self, *, server: str, tool: str, status: str, seconds: float, is_server_failure: bool) -> None:
        """One call that reached a tool, or was refused for its arguments."""
        self._calls[server, tool, status] += 1
        self._buckets[server, bisect_left(_BUCKETS_S, seconds)] += 1
        self._seconds[server] += seconds  # type: ignore[assignment]  # a Counter adds floats as well
        self._failures_in_a_row[server] = self._failures_in_a_row[server] + 1 if is_server_failure else 0

    def count_refused(self, reason: str) -> None:
        """One request that was turned away before any tool."""
        self._refused[reason] += 1

    def failures_in_a_row(self, server: str) -> int:
        """Calls of a server that failed for its own fault, since the last that did not."""
        return self._failures_in_a_row[server]

    def num_calls(self, server: str) -> int:
        """All calls of a server."""
        return sum(count for (name, _, _), count in self._calls.items() if name == server)

    def render(self, *, in_flight: int, waiting: int, breakers: Mapping[str, BreakerState]) -> str:
        """All metrics. `breakers`: how those of the servers stand."""
        lines = [
            *_family("agentrl_gateway_in_flight", "gauge", "Calls that run now.", [({}, in_flight)]),
            *_family("agentrl_gateway_waiting", "gauge", "Calls that wait for a slot.", [({}, waiting)]),
            *_family(
                "agentrl_gateway_breaker_open",
                "gauge",
                "Whether calls of a server are refused at once (1), or the next one tries (0.5).",
                (({"server": server}, _BREAKER_VALUES[state]) for server, state in sorted(breakers.items())),
            ),
            *_family(
                "agentrl_gateway_calls_total",
                "counter",
                "Calls by outcome.",
                (
                    ({"server": server, "tool": tool, "status": status}, count)
                    for (server, tool, status), count in sorted(self._calls.items())
                ),
            ),
            *_family(
                "agentrl_gateway_refused_total",
                "counter",
                "Requests turned away before any tool.",
                (({"reason": reason}, count) for reason, count in sorted(self._refused.items())),
            ),
            *self._durations(),
        ]
        return "\n".join(lines) + "\n"

    def _durations(self) -> Iterator[str]:
        name = "agentrl_gateway_call_seconds"
        yield f"# HELP {name} Duration of calls."
        yield f"# TYPE {name} histogram"
        for server in sorted(self._seconds):
            total = 0
            for index, bound in enumerate([*map(str, _BUCKETS_S), "+Inf"]):
                total += self._buckets[server, index]
                yield _line(f"{name}_bucket", {"server": server, "le": bound}, total)
            yield _line(f"{name}_sum", {"server": server}, round(self._seconds[server], 6))
            yield _line(f"{name}_count", {"server": server}, total)


def _family(name: str, kind: str, text: str, values: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        yield _line(name, labels, value)


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
