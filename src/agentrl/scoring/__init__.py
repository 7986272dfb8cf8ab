"""From a completion to a score: find the answer in the model's text, compare it with the ground truth.

Importing this package is cheap; what a scorer needs is imported when it first runs.
"""

from agentrl.scoring.answers import ANSWER_SCHEMAS, check_answer_schema, extract_answer
from agentrl.scoring.factory import MCPScorerFactory, load_scorers, score_answer

__all__ = [
    "ANSWER_SCHEMAS",
    "MCPScorerFactory",
    "check_answer_schema",
    "extract_answer",
    "load_scorers",
    "score_answer",
]
