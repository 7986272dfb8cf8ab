"""Two agents in one Record, both of them the policy: a solver answers, a critic accepts or objects, the solver revises.

    agentrl tasks load RUN --train_file questions.jsonl
    agentrl sample RUN --sampler_module assets/examples/solver_and_critic.py

with rows such as {"id": "q1", "query": "What is 6 times 7?", "answer": "42", "scorer": "math"}.

Each agent sees only what it was told and said itself. In the database they are two branches of the Record, and two
training rows: both are rewarded with the score of the answer that the critic let pass.
"""

from __future__ import annotations

from agentrl.chat import Message
from agentrl.rollout import Conversation, MCPSampler, RolloutResult, initial_messages
from agentrl.scoring import extract_answer
from agentrl.types import StopReason

CRITIC_PROMPT = (
    "Somebody answered a question. Check the answer. If it is right, reply with the word ACCEPT alone; else say in one "
    "sentence what is wrong with it."
)


class SolverAndCritic(MCPSampler):
    """One question, argued until the critic accepts. Scored like any Record, by the Task's own scorer."""

    async def run(self) -> RolloutResult:
        """Rounds of answer and review until the critic accepts or the turns are used up."""
        solver = Conversation(self.record, committed=self.committed, agent=self.agent, name="solver")
        critic = solver.beside("critic")
        question = initial_messages(self.task, rollout=self.agent.rollout)
        review: list[Message] = [{"role": "system", "content": CRITIC_PROMPT}]
        answer = None
        for _ in range(self.agent.rollout.max_turns // 2):
            proposal = await solver.ask(question)
            if proposal is None:
                return solver.end(StopReason.CONTEXT_LIMIT)
            answer = extract_answer(proposal.parsed.content, schema=self.task.answer_schema)
            shown = f"Question: {self.task.query}\nAnswer: {answer if answer is not None else 'none'}"
            opinion = await critic.ask([*review, {"role": "user", "content": shown}])
            if opinion is None:
                return solver.end(StopReason.CONTEXT_LIMIT)
            if answer is not None and opinion.parsed.content.strip() == "ACCEPT":
                return solver.end(StopReason.ANSWER, answer=answer)
            review = []
            question = [{"role": "user", "content": f"A reviewer objects: {opinion.parsed.content}\nAnswer again."}]
        return solver.end(StopReason.MAX_TURNS, answer=answer)
