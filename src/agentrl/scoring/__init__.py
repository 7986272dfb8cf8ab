"""From a completion to a score: find the answer in the model's text, compare it with the ground truth.

Importing this package is cheap; what a scorer needs is imported when it first runs.
"""

from agentrl.scoring.answers import ANSWER_SCHEMAS, check_answer_schema, extract_answer
from agentrl.scoring.expression import parse_expression
from agentrl.scoring.factory import (
    FORMAT_SCORER,
    MCPScorerFactory,
    ScoreRequest,
    ScoringContext,
    load_scorers,
    score_answer,
    score_request,
)
from agentrl.scoring.judge import Judge, JudgeCall
from agentrl.scoring.user_functions import checked_score

__all__ = [
    "ANSWER_SCHEMAS",
    "FORMAT_SCORER",
    "Judge",
    "JudgeCall",
    "MCPScorerFactory",
    "ScoreRequest",
    "ScoringContext",
    "check_answer_schema",
    "checked_score",
    "extract_answer",
    "load_scorers",
    "parse_expression",
    "score_answer",
    "score_request",
]
