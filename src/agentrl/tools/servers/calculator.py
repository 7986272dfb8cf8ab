"""MCP server with one tool, `calculator(expression)`: ONE operation on two integers, exact, without eval.

    "37*24" -> "888"    "-7 // 2" -> "-4"    "84/2" -> "42"    "7/2" -> "error: 7/2 is not an integer"

One operation per call, so that a problem of several steps takes several calls. Numbers are bounded, so that no call
is slow: at most `MAX_DIGITS` digits each.
"""

from __future__ import annotations

import argparse
import re

from agentrl.tools.servers.serving import OperationError, add_transport_flags, make_server, serve, text_tool

MAX_DIGITS = 100
_EXPRESSION = re.compile(r"\s*([+-]?[0-9]+)\s*(//|[-+*/])\s*([+-]?[0-9]+)\s*")


def evaluate(expression: str) -> str:
    """Value of `<integer> <+ - * / //> <integer>`. Raises OperationError with a text for the model."""
    match = _EXPRESSION.fullmatch(expression) if len(expression) <= 4 * MAX_DIGITS else None
    if match is None:
        raise OperationError("expected one operation on two integers, like 37*24")
    left_text, operator, right_text = match.groups()
    if max(len(left_text), len(right_text)) > MAX_DIGITS:
        raise OperationError(f"numbers may have at most {MAX_DIGITS} digits")
    return str(_apply(operator, int(left_text), int(right_text)))


def _apply(operator: str, left: int, right: int) -> int:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if right == 0:
        raise OperationError("division by zero")
    if operator == "/" and left % right:
        raise OperationError(f"{left}/{right} is not an integer")
    return left // right


def main() -> None:
    """Command line of the server."""
    parser = argparse.ArgumentParser(description="MCP server: one arithmetic operation on integers")
    add_transport_flags(parser)
    tool = text_tool(
        "calculator",
        argument="expression",
        description="Compute one operation (+ - * / //) on two integers, e.g. 37*24",
        run=evaluate,
    )
    serve(make_server("calculator", tool), parser.parse_args())


if __name__ == "__main__":
    main()
