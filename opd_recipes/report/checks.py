"""What is wrong with a run, from its metrics and configuration: each warning with its numbers, its meaning and what to do.

Thresholds are those of docs/metrics.md where it has one. "Recent" is the mean over the last tenth of the steps, at least one
and at most twenty of them; "at the start" is the same of the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from opd_recipes.report.accuracy import Accuracy, accuracies
from opd_recipes.report.reading import Run
from opd_recipes.report.words import number, percent, points

#: Steps from which trends are judged.
TREND_STEPS = 10
#: Fall of the crop's accuracy that is no noise, as a fraction; smaller falls count where a fifth of the accuracy is gone.
CROP_FALL, SMALL_FALL = 0.10, 0.05
MASS, CORRECTION, CAPPED, ENTROPY = 0.9, 0.05, 0.01, 0.01
#: Response lengths below which an answer of fixed form (one word, one letter) is nothing to worry about, in tokens.
SHORT_LIMIT = 16
#: Share of the student in an averaging teacher, after all steps, below which it has stayed the base model; and the rate from
#: which it is the student itself.
TEACHER_MOVED, TEACHER_RATE = 0.1, 0.5
#: Share of the time above which work that trains nothing is worth a look.
OVERHEAD = 0.5

#: Parts of a step in which a model works.
MODEL_TIME = ("gen", "old_log_prob", "ref", "values", "reward", "update_actor", "update_critic")


@dataclass(frozen=True)
class Alert:
    """Args:
    title: What is wrong, in a few words.
    numbers: The evidence.
    meaning: Why it matters.
    action: What to do.
    severe: Whether the result cannot be used as it is; otherwise it is worth a look.
    """

    title: str
    numbers: str
    meaning: str
    action: str
    severe: bool = False


Check = Callable[[Run], Iterator[Alert]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def alerts_of(run: Run) -> list[Alert]:
    """All alerts, the severe ones first."""
    found = [alert for look in CHECKS for alert in look(run)]
    return sorted(found, key=lambda alert: not alert.severe)


def ends(series: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Means over the first and over the last tenth of a series that is not empty."""
    size = min(20, max(1, len(series) // 10))
    first, last = ([value for _, value in part] for part in (series[:size], series[-size:]))
    return sum(first) / size, sum(last) / size


def recent(run: Run, key: str) -> float | None:
    series = run.finite(key)
    return ends(series)[1] if series else None


@check
def not_finite(run: Run) -> Iterator[Alert]:
    watched = [
        key for key in run.names() if key.startswith(("actor/", "opd/", "train/")) and not key.endswith("grad_norm")
    ]
    bad = {key: [step for step, value in run.series(key) if math.isnan(value)] for key in watched}
    bad = {key: steps for key, steps in bad.items() if steps}
    if bad:
        first = min(min(steps) for steps in bad.values())
        named = ", ".join(f"{key} at {len(steps)} steps" for key, steps in list(bad.items())[:4])
        yield Alert(
            "Values that are not finite",
            f"{named}{' and others' if len(bad) > 4 else ''}; the first at step {first}",
            "From a loss that is not a number no gradient can be taken; means over such steps say nothing.",
            f"Look at the rollouts of step {first} and the log around it; lower the learning rate, and check that no "
            "probability was computed in 16 bits.",
            severe=True,
        )


@check
def skipped_updates(run: Run) -> Iterator[Alert]:
    series = run.finite("opd/skipped_updates")
    count = int(series[-1][1]) if series else 0
    if count > 0:
        first = next(step for step, value in series if value > 0)
        yield Alert(
            "Skipped updates",
            f"{count} updates in {len(series)} steps had a gradient that was not finite, the first at step {first}",
            "Neither student nor teacher moved in them. A few are harmless; many mean that training is unstable.",
            "Lower actor_rollout_ref.actor.optim.lr or raise the warm-up; the run stops by itself after "
            "opd.max_skipped_updates in a row.",
            severe=count > 0.05 * len(series),
        )


@check
def failed_rollouts(run: Run) -> Iterator[Alert]:
    series = [(step, value) for step, value in run.finite("opd/failed_rollouts") if value > 0]
    if series:
        yield Alert(
            "Failed rollouts",
            f"{sum(value for _, value in series):.0f} rollouts in {len(series)} steps, the first at step {series[0][0]}",
            "These rows are missing from the training data of their step (data.on_bad_row=skip).",
            "The rollout worker's log says why; python -m data_prep check finds such rows beforehand.",
        )


@check
def crop_collapse(run: Run) -> Iterator[Alert]:
    for found in accuracies(run):
        crop = found.crop
        if len(crop) < 2:
            continue
        start, end = crop[0][1], crop[-1][1]
        if start - end > CROP_FALL or (start - end > SMALL_FALL and end < 0.8 * start):
            yield Alert(
                "The teacher's view gets worse" + found.of,
                f"Accuracy on the crop fell from {percent(start)} (step {crop[0][0]}) to {percent(end)} (step {crop[-1][0]}), "
                f"{points(end - start)}{_gap_words(found)}",
                "The student loses what it could do on the evidence, so the teacher that averages it gets worse, too: the "
                "collapse that papers report of a teacher that is the live student. A gap that closes this way does not count.",
                "Take the checkpoint before the fall. Then a slower teacher (lower opd.teacher.rate, or opd/teacher=frozen) or "
                "a lower learning rate.",
                severe=True,
            )


def _gap_words(found: Accuracy) -> str:
    gap = found.gap
    return f"; the gap went from {points(gap[0][1])} to {points(gap[-1][1])}" if len(gap) > 1 else ""


@check
def entropy_collapse(run: Run) -> Iterator[Alert]:
    series = run.finite("opd/entropy")
    if len(series) >= TREND_STEPS:
        start, end = ends(series)
        if end < ENTROPY and end < 0.1 * start:
            yield Alert(
                "The student's entropy has collapsed",
                f"{number(start)} nats per token at the start, {number(end)} now",
                "It says nearly the same to everything, so its rollouts show the teacher nothing new.",
                "Read the rollouts; take an earlier checkpoint, and lower the learning rate or set opd.divergence.kind=jsd "
                "where it is reverse_kl, which narrows the student most.",
                severe=True,
            )


@check
def response_length(run: Run) -> Iterator[Alert]:
    series, clipped = run.finite("response_length/mean"), run.finite("response_length/clip_ratio")
    if len(series) < TREND_STEPS:
        return
    start, end = ends(series)
    words = f"Mean response length {number(start)} tokens at the start, {number(end)} now"
    limit = run.setting("data.max_response_length")
    if end < 0.1 * start and start >= 4:
        yield Alert(
            "Responses have become almost empty",
            words,
            "The shortest way to agree with the teacher is to say nothing; the divergence is then low for no good reason.",
            "Take an earlier checkpoint. Set opd.objective.aggregation=token_mean, or a lower learning rate.",
            severe=True,
        )
    elif clipped and _at_limit(*ends(clipped), limit, end):
        before, now = ends(clipped)
        yield Alert(
            "Responses run into the limit",
            f"{percent(now)} of the responses end at {limit or 'the longest'} tokens ({percent(before)} at the start). {words}",
            "Cut responses have no end, so the student never learns to stop, and each costs the full time.",
            "Read the longest rollouts for repetition; raise data.max_response_length only if they say something.",
            severe=now > 0.5,
        )
    elif not 0.5 <= end / max(start, 1e-9) <= 2:
        yield Alert(
            "Response length drifts",
            f"{words}: {number(end / max(start, 1e-9))} times as long",
            "Comparisons at other lengths are not equal: the time of a step changes with it, and so may the accuracy.",
            "Read the rollouts before and after; compare with a baseline of equal length.",
        )


def _at_limit(before: float, now: float, limit: object, length: float) -> bool:
    if isinstance(limit, int | float) and limit < SHORT_LIMIT:
        return False
    return now > 0.2 and (now - before > 0.1 or now > 0.5) and length >= SHORT_LIMIT


@check
def mass(run: Run) -> Iterator[Alert]:
    kept, topk = recent(run, "opd/student_mass"), run.setting("opd.divergence.topk", "K")
    support = run.setting("opd.divergence.support", "student")
    if kept is not None and kept < MASS:
        whose = "teacher's" if support == "teacher" else "student's"
        yield Alert(
            "Much of the student lies outside the compared tokens",
            f"The student has {percent(kept)} of its probability on the {whose} top-{topk} (healthy: above {percent(MASS)})",
            "What lies outside is compared as one lump, or not at all; the student may move there unseen.",
            "Raise opd.divergence.topk, or set opd.divergence.support=union where the divergence allows it.",
        )


@check
def correction(run: Run) -> Iterator[Alert]:
    if run.setting("opd.divergence.kind") != "bc_reverse_kl":
        return
    ours, theirs = recent(run, "opd/student_mass"), recent(run, "opd/teacher_mass")
    if ours is not None and theirs is not None and theirs - ours > CORRECTION:
        yield Alert(
            "The bias correction is large",
            f"Its mean, the teacher's mass on the kept tokens less the student's, is {number(theirs - ours)} "
            f"(healthy: below {CORRECTION})",
            "The loss then pulls mass into the kept tokens more than it matches the two models (RP-OPSD, arXiv 2607.24447).",
            "Raise opd.divergence.topk; see whether the student's view is so small that the two hardly agree.",
        )


@check
def importance(run: Run) -> Iterator[Alert]:
    capped, weight = recent(run, "opd/importance_capped"), recent(run, "opd/importance_weight")
    gap, cap = recent(run, "opd/rollout_gap"), run.setting("opd.objective.rollout_is_cap")
    if capped is not None and capped > CAPPED:
        more = "" if weight is None else f", mean weight {number(weight)}"
        more += "" if gap is None else f", mean difference of the log-probs {number(gap)}"
        yield Alert(
            "Importance weights are truncated",
            f"{percent(capped)} of the tokens are at the cap (opd.objective.rollout_is_cap={cap}; healthy: below "
            f"{percent(CAPPED)}){more}",
            "The engine that samples and the one that trains disagree about the same tokens: training is no longer on-policy, "
            "and the correction is cut.",
            "Compare temperature, precision (actor_rollout_ref.rollout.dtype) and image limits of both; an old vLLM weight "
            "sync shows the same.",
            severe=capped > 0.1,
        )


@check
def teacher_moves(run: Run) -> Iterator[Alert]:
    kind, steps = run.setting("opd.teacher.kind"), max(run.total_steps or 0, run.last_step)
    skipped = run.finite("opd/skipped_updates")
    taken = steps - (skipped[-1][1] if skipped else 0)
    rate = run.setting("opd.teacher.rate", 0.05)
    if kind == "ema" and isinstance(rate, int | float) and steps >= 2 * TREND_STEPS:
        share = 1 - (1 - rate) ** max(taken, 0)
        if share < TEACHER_MOVED:
            yield Alert(
                "The teacher hardly moves",
                f"With opd.teacher.rate={rate:g} it is {percent(share)} the student's weights after {taken:.0f} updates, and "
                f"{percent(1 - share)} still the base model's",
                "It stays the base model, so the student can get no better than that on the crop.",
                "Raise opd.teacher.rate (the papers have 0.05), or say opd/teacher=frozen if that is meant.",
            )
        elif rate >= TEACHER_RATE:
            yield Alert(
                "The teacher follows at once",
                f"opd.teacher.rate={rate:g} is the student's share in each update; the papers have 0.05",
                "The teacher is nearly the live student, which collapses in the papers. Elsewhere 0.95 is the teacher's share.",
                f"Set opd.teacher.rate={1 - rate:.2g} if the slow average is meant.",
            )
    every = run.setting("opd.teacher.every")
    if kind == "progressive" and isinstance(every, int) and every > steps:
        yield Alert(
            "The teacher never moves",
            f"opd.teacher.every={every}, and the run has {steps} steps",
            "It stays the base model.",
            "Lower opd.teacher.every, or say opd/teacher=frozen if that is meant.",
        )


@check
def overhead(run: Run) -> Iterator[Alert]:
    parts = time_parts(run)
    total = sum(parts.values())
    rest = {name: seconds for name, seconds in parts.items() if name not in MODEL_TIME}
    if total > 0 and sum(rest.values()) > OVERHEAD * total:
        largest = sorted(rest.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{name.replace('_', ' ')} {percent(seconds / total)}" for name, seconds in largest)
        yield Alert(
            "Most of the time trains nothing",
            f"{percent(sum(rest.values()) / total)} of the time after the first step is neither rollout nor update: {listed}",
            "Machines wait: for validation, checkpoints, weights that are copied, data, or for one slow worker.",
            "Raise trainer.test_freq or trainer.save_freq, give data more workers (data.dataloader_num_workers), or put "
            "rollouts and training on machines that are nearer to each other.",
        )


def time_parts(run: Run) -> dict[str, float]:
    """Seconds of each part, summed over the steps but the first, in which everything is set up; too few steps: empty."""
    steps = [values for step, values in run.metrics.items() if "timing_s/step" in values][1:]
    if len(steps) < 5:
        return {}
    sums: dict[str, float] = {}
    for values in steps:
        for name, seconds in split_step(values).items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


def split_step(values: dict[str, float]) -> dict[str, float]:
    """Seconds of the parts of one step, of what is left of it (``other``), and of validation, which comes behind it."""
    timed = {key.removeprefix("timing_s/"): value for key, value in values.items() if key.startswith("timing_s/")}
    timed = {name: value for name, value in timed.items() if math.isfinite(value)}
    step = timed.pop("step", 0.0)
    behind = {name: timed.pop(name) for name in ("testing",) if name in timed}
    return {**timed, "other": max(0.0, step - sum(timed.values())), **behind}
