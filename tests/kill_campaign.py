"""Hundreds of `kill -9` against real processes, and the proof of what they did not do.

world ─► blow: one instant, one or several victims ─► successors ─► the same Records and steps go on (timed)
             ▲                                                          │
             └────────── nothing lost, doubled, skipped ◄───────────────┘
after `kills_per_run` kills: calm, everything compared once more, audit, next run on the same server
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from agentrl.inspector.audit import audit_run
from agentrl.store import open_store
from kill_plan import Blow, Cast, plan_blows
from kill_reader import DONE, Findings, Reader, Shadow, check_records, check_training
from kill_world import LEASE_S, DatabaseServer, World, database_server, make_tasks, wait_until, world

BOUND_S = LEASE_S + 2.0
POINT_WITHIN_S = 6.0
RECOVERY_WITHIN_S = 40.0
CALM_WITHIN_S = 40.0
START_WITHIN_S = 90.0
POLL_S = 0.03
TRAINER = "trainer_0"


@dataclass(slots=True, kw_only=True)
class Kill:
    """One process that was ended."""

    kind: str  # role of the victim
    point: str  # where its blow fell
    num_together: int
    recovery_s: float | None  # None: it held nothing at that moment
    bound_s: float | None  # lease + 2 s from when every part was there again; None: a trainer has no lease
    findings: Findings  # of the check after its blow, shared by all kills of it


@dataclass(slots=True, kw_only=True)
class Campaign:
    """What happened so far. `tell` gets one line per blow."""

    seed: int
    cast: Cast
    tell: Callable[[str], None]
    kills: list[Kill] = field(default_factory=list)
    at_the_end: Findings = field(default_factory=Findings)  # of the checks and the audit of each run at its end
    num_turns: int = 0
    num_records: int = 0
    num_steps: int = 0
    num_runs: int = 0
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """Every broken promise, late recoveries included."""
        found = {id(kill.findings): list(kill.findings) for kill in self.kills}
        late = [
            f"{kill.kind} at {kill.point}: back after {kill.recovery_s:.1f} s"
            for kill in self.kills
            if kill.recovery_s is not None and kill.recovery_s > (kill.bound_s or RECOVERY_WITHIN_S)
        ]
        return [*(text for texts in found.values() for text in texts), *self.at_the_end, *late]


def run_campaign(
    folder: Path, *, campaign: Campaign, num_kills: int, kills_per_run: int, num_victims: tuple[int, int]
) -> None:
    """Kill `num_kills` processes; `campaign` is up to date after every blow."""
    blows = plan_blows(campaign.seed, cast=campaign.cast, num_victims=num_victims)
    started = time.monotonic()
    with database_server(folder) as database:
        while len(campaign.kills) < num_kills:
            wanted = min(num_kills, len(campaign.kills) + kills_per_run)
            torment_run(database, campaign=campaign, blows=blows, until_kills=wanted)
            campaign.seconds = time.monotonic() - started


def torment_run(database: DatabaseServer, *, campaign: Campaign, blows: Iterator[Blow], until_kills: int) -> None:
    """One run, from its first Task to its audit."""
    run_name = f"kills_{campaign.seed}_{campaign.num_runs}"
    asyncio.run(insert_tasks(database.server.uri, run_name))
    with world(database, run_name=run_name, cast=campaign.cast) as run:
        reader = Reader(run.uri, database=run_name)
        try:
            shadow = Shadow(reader, folder=run.folder)
            assert wait_until(lambda: reader.last_step() is not None, within_s=START_WITHIN_S), f"see {run.folder}"
            while len(campaign.kills) < until_kills:
                suffer(run, next(blows), reader=reader, shadow=shadow, campaign=campaign)
            calm_down(run, reader=reader)
            conclude(run, reader=reader, shadow=shadow, campaign=campaign)
        finally:
            reader.close()


async def insert_tasks(uri: str, run_name: str) -> None:
    """What there is to do."""
    store = open_store(uri, database=run_name)
    await store.prepare()
    await store.insert_tasks(make_tasks())
    await store.close()


def suffer(run: World, blow: Blow, *, reader: Reader, shadow: Shadow, campaign: Campaign) -> None:
    """One blow, the recovery from it, and the check."""
    shadow.note()
    victims = {name: pid_of(run, name) for name in blow.victims}
    fell_at, struck_at = strike(run, blow, victims=victims)
    database_away_s = bring_back(run, victims, struck_at=struck_at)
    recoveries, nobody_s = watch_recovery(run, victims, reader=reader, struck_at=struck_at)
    findings = check(run, reader=reader, shadow=shadow, everything=False)
    bound_s = BOUND_S + max(database_away_s, nobody_s)
    for name in victims:
        campaign.kills.append(
            Kill(
                kind=name.split("_")[0],
                point=fell_at,
                num_together=len(victims),
                recovery_s=recoveries[name],
                bound_s=None if name == TRAINER else bound_s,
                findings=findings,
            )
        )
    shown = ", ".join(f"{name} {seconds(recoveries[name])}" for name in victims)
    broken = "".join(f"\n    {text}" for text in findings)
    campaign.tell(f"{len(campaign.kills):4d} kills  {fell_at}: {shown}  ({shadow.num_turns} turns){broken}")


def bring_back(run: World, victims: Mapping[str, int], *, struck_at: float) -> float:
    """Start successors; seconds for which there was no database."""
    with ThreadPoolExecutor(1) as supervisor:
        coming = supervisor.submit(run.restart_database) if "database" in victims else None
        for actor in run.actors:
            if actor.name in victims:
                actor.wait()
        run.revive()
        if coming is None:
            return 0.0
        coming.result()
    return time.monotonic() - struck_at


def pid_of(run: World, name: str) -> int:
    """The process that fills this place."""
    if name == "database":
        return run.database_pid()
    return next(actor.process.pid for actor in run.actors if actor.name == name)


def strike(run: World, blow: Blow, *, victims: Mapping[str, int]) -> tuple[str, float]:
    """Kill them; where it fell, and the monotonic time of it."""
    order = sorted(victims, key=lambda name: name == blow.at)  # who kills dies last
    if blow.point is None or blow.at is None:
        time.sleep(blow.delay_s)
        return "any instant", kill_all([victims[name] for name in order])
    armed, fired = run.folder / f"{blow.at}.armed", run.folder / f"{blow.at}.fired"
    told = {"point": blow.point, "delay_s": blow.delay_s, "victims": [victims[name] for name in order]}
    unfinished = armed.with_suffix(".new")
    unfinished.write_text(json.dumps(told))
    unfinished.rename(armed)
    wait_until(fired.exists, within_s=POINT_WITHIN_S)
    if not fired.exists():
        armed.unlink(missing_ok=True)
        if not wait_until(fired.exists, within_s=0.1):
            return f"any instant ({blow.point} did not come)", kill_all([victims[name] for name in order])
    struck_at = float(fired.read_text())
    fired.unlink()
    return f"{blow.at.split('_')[0]} {blow.point}", struck_at


def kill_all(pids: list[int]) -> float:
    """SIGKILL to each; when."""
    struck_at = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return struck_at


# --- recovery ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Held:
    """A Task that was being worked on, and how far it was: generation -> turns, for Records that were not finished."""

    fence: int
    must_change_hands: bool
    open_turns: dict[int, int]


def watch_recovery(
    run: World, victims: Mapping[str, int], *, reader: Reader, struck_at: float
) -> tuple[dict[str, float | None], float]:
    """Seconds until everything each victim held went on: a new turn or result of the same Record, the same step.

    With it, seconds for which there was no engine or no sampler at all.
    """
    waiting = held_by(victims, reader=reader)
    plan = reader.last_step()
    missing = [role for role in ("engine", "sampler") if is_missing(run, role, reader=reader)]
    nobody_s = 0.0
    recoveries: dict[str, float | None] = {name: None for name, tasks in waiting.items() if not tasks}
    deadline = time.monotonic() + RECOVERY_WITHIN_S
    while len(recoveries) < len(victims) and time.monotonic() < deadline:
        if missing:
            missing = [role for role in missing if is_missing(run, role, reader=reader)]
            nobody_s = time.monotonic() - struck_at
        for name in victims.keys() - recoveries.keys():
            if name == TRAINER:
                is_back = step_went_on(run, plan, reader=reader)
            else:
                for task_id in went_on(waiting[name], reader=reader):
                    del waiting[name][task_id]
                is_back = not waiting[name]
            if is_back:
                recoveries[name] = time.monotonic() - struck_at
        time.sleep(POLL_S)
    return {name: recoveries.get(name, math.inf) for name in victims}, nobody_s


def is_missing(run: World, role: str, *, reader: Reader) -> bool:
    """Whether none of the processes there are now has told the database of itself."""
    present = reader.serving_pids() if role == "engine" else reader.working_pids()
    return present.isdisjoint(actor.process.pid for actor in run.find(role))


def held_by(victims: Mapping[str, int], *, reader: Reader) -> dict[str, dict[str, Held]]:
    """What each sampler had claimed; for an engine and the database, everything that living samplers work on.

    While the database is away leases go on: what is given back by now was held by one of the samplers that died.
    """
    samplers = {name: pid for name, pid in victims.items() if name.startswith("sampler")}
    query: dict[str, Any] = {"split": "train", "status": "running"}
    if samplers and "database" in victims:
        query |= {"status": {"$in": ["running", "pending"]}, "fence": {"$gt": 0}}
    tasks = reader.tasks(query, "status", "owner", "fence", "num_generations")
    records = states_of(tasks, reader=reader)
    held: dict[str, dict[str, Held]] = {name: {} for name in victims if name != TRAINER}
    for task in tasks:
        is_given_back = task["status"] == "pending"
        dead = [name for name, pid in samplers.items() if is_given_back or f"-{pid}-" in task["owner"]]
        open_turns = {k: num for k, (status, num) in records[task["_id"]].items() if status == "running"}
        for name in dead or held.keys() - samplers.keys():
            held[name][task["_id"]] = Held(fence=task["fence"], must_change_hands=bool(dead), open_turns=open_turns)
    return held


def states_of(tasks: Sequence[Mapping[str, Any]], *, reader: Reader) -> dict[str, dict[int, tuple[str, int]]]:
    """Task -> generation -> (status, number of turns) of its Records; as just begun where there is none yet."""
    states = {task["_id"]: dict.fromkeys(range(task["num_generations"]), ("running", 0)) for task in tasks}
    ids = [f"{task_id}/g{k}" for task_id, generations in states.items() for k in generations]
    for record in reader.records({"_id": {"$in": ids}}):
        states[record["task_id"]][record["generation"]] = (record["status"], record["num_turns"])
    return states


def went_on(held: Mapping[str, Held], *, reader: Reader) -> list[str]:
    """The Tasks all of whose Records have a new turn or a result, under a new owner where the old one died."""
    tasks = reader.tasks({"_id": {"$in": list(held)}}, "status", "fence", "num_generations")
    records = states_of(tasks, reader=reader)
    return [task["_id"] for task in tasks if has_gone_on(task, held[task["_id"]], records[task["_id"]])]


def has_gone_on(task: Mapping[str, Any], held: Held, records: Mapping[int, tuple[str, int]]) -> bool:
    """Of one Task. Where only the settlement was left to do, that is what counts."""
    if task["status"] in DONE:
        return True
    if not held.open_turns or (held.must_change_hands and task["fence"] == held.fence):
        return False
    states = [(records[k], num_turns) for k, num_turns in held.open_turns.items()]
    return all(status != "running" or num_turns > before for (status, num_turns), before in states)


def step_went_on(run: World, plan: Mapping[str, Any] | None, *, reader: Reader) -> bool:
    """Whether the step that was planned is committed, or, without one, the new trainer is ready for the next."""
    (trainer,) = run.find("trainer")
    if plan is not None and plan["status"] == "planned":
        return any(step["_id"] == plan["_id"] and step["status"] == "committed" for step in reader.steps())
    is_ready = (run.folder / f"{trainer.name}.{trainer.process.pid}.ready").exists()
    return is_ready or reader.phase(trainer.process.pid).startswith("step")


# --- proof ------------------------------------------------------------------------------------------------------------


def check(run: World, *, reader: Reader, shadow: Shadow, everything: bool) -> Findings:
    """All promises that can be checked while the run goes on."""
    checkpoint = run.folder / "checkpoint.json"
    weights = json.loads(checkpoint.read_text()) if checkpoint.exists() else None
    twice, skipped = check_training(reader, weights=weights)
    lost = shadow.check(everything=everything)
    return Findings(lost=lost, duplicated=check_records(reader), trained_twice=twice, skipped=skipped)


def calm_down(run: World, *, reader: Reader) -> None:
    """Let samplers give back what they hold and the trainer finish what is settled."""
    run.stop("sampler")

    def is_trained() -> bool:
        step = reader.last_step()
        left = reader.tasks({"split": "train", "status": "settled"}, "_id")
        return step is not None and step["status"] == "committed" and len(left) < run.config.algo.tasks_per_step

    assert wait_until(is_trained, within_s=CALM_WITHIN_S), f"the trainer does not finish; see {run.folder}"
    run.stop("trainer")
    run.stop("engine")


def conclude(run: World, *, reader: Reader, shadow: Shadow, campaign: Campaign) -> None:
    """Compare everything once more, audit, and count."""
    findings = check(run, reader=reader, shadow=shadow, everything=True)
    findings.audit += asyncio.run(audit(run))
    for name in ("lost", "duplicated", "trained_twice", "skipped", "audit"):
        getattr(campaign.at_the_end, name).extend(getattr(findings, name))
    campaign.num_runs += 1
    campaign.num_turns += shadow.num_turns
    campaign.num_records += len(reader.records({}))
    campaign.num_steps += len(reader.steps())
    broken = "".join(f"\n    {text}" for text in findings)
    campaign.tell(f"     run {campaign.num_runs} ended: {shadow.num_turns} turns, {len(reader.steps())} steps{broken}")


async def audit(run: World) -> list[str]:
    """What `agentrl audit` says."""
    store = open_store(run.uri, database=run.run_name)
    await store.prepare()
    report = await audit_run(store, config=run.config, run_dir=run.run_dir)
    await store.close()
    return [f"audit, {item.check} {item.subject}: {item.message}" for part in report.results for item in part.findings]


def seconds(value: float | None) -> str:
    """For people."""
    return "held nothing" if value is None else f"{value:.2f} s"


# --- table ------------------------------------------------------------------------------------------------------------


def table(campaign: Campaign) -> str:
    """Markdown, by kind of victim."""
    heads = ["killed", "kills", "of them together", "recovery: median", "worst", "turns lost", "Records doubled"]
    heads += ["trained twice", "skipped"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    kinds = sorted({kill.kind for kill in campaign.kills})
    lines += [row(kind, [kill for kill in campaign.kills if kill.kind == kind]) for kind in kinds]
    return "\n".join([*lines, row("**all**", campaign.kills)])


def row(name: str, kills: list[Kill]) -> str:
    """One line of the table."""
    times = sorted(kill.recovery_s for kill in kills if kill.recovery_s is not None)
    findings = {id(kill.findings): kill.findings for kill in kills}.values()
    broken = [
        sum(len(getattr(each, name)) for each in findings)
        for name in ("lost", "duplicated", "trained_twice", "skipped")
    ]
    shown = [f"{median(times):.2f} s", f"{times[-1]:.2f} s"] if times else ["", ""]
    together = sum(kill.num_together > 1 for kill in kills)
    return f"| {' | '.join(map(str, [name, len(kills), together, *shown, *broken]))} |"
