"""What has to hold after a death, read from the evidence alone. An empty list means that it does."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.faults.story import ORDERS

Said = tuple[str, str, Any]


def judge(evidence: dict[str, Any], said: list[Said], mode: str, *, earlier: int = 0) -> list[str]:
    """Everything that is wrong, in words. `earlier` is how much was done before the story began."""
    return [
        *_lost(evidence, said, earlier),
        *_results(evidence, said),
        *_work(evidence),
        *_effects(evidence, said, mode),
    ]


def judge_frozen(life: dict[str, Any]) -> list[str]:
    """The same of an owner that was only asleep: whatever it and its heirs were told, there is one result."""
    wrong = []
    if "kept out" in life["after"]:
        return [f"kept out: {life['after']}"]
    after, between = life["after"], life["between"]
    refused = ["LeaseLostError"]
    wrong += [f"error: {said}" for said in life["said"] if said[0] == "error" and said[1] not in refused]
    said = [(what, order, value) for what, order, value in life["said"] if what != "error"] + between.get("later", [])
    wrong += _results(after, said)
    if not after["whole"]:
        wrong.append("the file or its chain is damaged")
    most = {"retry": 3, "guard": 1, "dedup": 1}[life["plan"]["mode"]]
    for order in ORDERS:
        state, times = after["ended"]["items"][order][0], len(after["effects"].get(order, ()))
        if state not in ("succeeded", "quarantined"):
            wrong.append(f"lost: {order} never ends")
        if times > most or (times == 0 and state == "succeeded"):
            wrong.append(f"effect: {order} happened {times} times")
    return wrong


def _lost(evidence: dict[str, Any], said: list[Said], earlier: int) -> Iterator[str]:
    """What was acknowledged before the death is there after it."""
    if not evidence["whole"]:
        yield "the file or its chain is damaged"
    found = evidence["found"]
    if (left := sum(name.startswith("earlier") for name in found["items"])) != earlier:
        yield f"lost: {left} are left of {earlier} that were done before"
    for what, order, value in said:
        item = found["items"].get(order)
        match what:
            case "enqueued" if item is None or ["admission", order] not in found["events"]:
                yield f"lost: {order} was accepted"
            case "claimed" if item is None or item[1] < value:
                yield f"lost: {order} was claimed"
            case "recorded" if _key(found, order) != ["done", json.dumps(value)]:
                yield f"lost: the result of {order} was recorded"
            case "settled" if (
                item is None
                or item[0] != ("quarantined" if value is None else "succeeded")
                or ["settled", order] not in found["events"]
            ):
                yield f"lost: {order} was settled"


def _results(evidence: dict[str, Any], said: list[Said]) -> Iterator[str]:
    """One recorded result for each order, the same for everybody who was told of one."""
    ended = evidence["ended"]
    records = Counter(_order(key) for key in ended["records"])
    answers: dict[str, set[str]] = {}
    for what, order, value in [*said, *evidence["later"]]:
        if what == "recorded":
            answers.setdefault(order, set()).add(value)
    for order in ORDERS:
        if records[order] > 1:
            yield f"twice: {order} has {records[order]} recorded results"
        if len(answers.get(order, ())) > 1:
            yield f"differing: {order} was answered {sorted(answers[order])}"


def _work(evidence: dict[str, Any]) -> Iterator[str]:
    """Held work comes back by its lease and not before; everything ends."""
    found, ended = evidence["found"], evidence["ended"]
    for order in ORDERS:
        state, fence, crashes, _ = found["items"].get(order, ["absent", 0, 0, None])
        if state == "running" and order in evidence["before_the_lease"]:
            yield f"lease: {order} was taken while it was held"
        if order not in ended["items"] or ended["items"][order][0] not in ("succeeded", "quarantined"):
            yield f"lost: {order} never ends"
        elif state == "running" and ended["items"][order][1:3] != [fence + 1, crashes + 1]:
            yield f"lease: {order} did not come back as a crash with a higher fence"


def _effects(evidence: dict[str, Any], said: list[Said], mode: str) -> Iterator[str]:
    """As the mode declares."""
    for order in ORDERS:
        times = len(evidence["effects"].get(order, ()))
        item, key = evidence["ended"]["items"].get(order), _key(evidence["ended"], order)
        recorded_before = _key(evidence["found"], order)[0] == "done"
        if recorded_before and times != 1:
            yield f"effect: {order} was on record, and happened {times} times"
        match mode:
            case "retry" if not 1 <= times <= 2:
                yield f"effect: {order} happened {times} times in two lives"
            case "dedup" if times != 1:
                yield f"effect: {order} happened {times} times"
            case "guard" if times > 1:
                yield f"effect: {order} happened {times} times"
            case "guard" if times == 0 and key[0] != "unknown":
                yield f"effect: {order} never happened, and nobody is asked"
        if (key[0] == "unknown") != (item is not None and item[0] == "quarantined"):
            yield f"unknown: {order} is not left to a person"
        if mode != "guard" and key[0] != "done":
            yield f"lost: {order} has no result"
    if not all(evidence["resolved"]):
        yield "unknown: a person cannot resolve it"


def _order(key: str) -> str:
    return key.removeprefix("charge:").partition("/")[0]


def _key(state: dict[str, Any], order: str) -> list[Any]:
    matching = [value for key, value in state["keys"].items() if _order(key) == order]
    return matching[0] if matching else ["absent", None]
