"""Formats the results of a quality sweep: a table and a summary in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vllm_spac.errors import printable
from vllm_spac.system.host_memory import gib
from vllm_spac.tools.evaluation.points import AGREEMENT, PERPLEXITY, SPECULATED, Point, loads


def point_of(item: dict) -> Point:
    """Returns the point of one result; older results, without ``mass_of``, use a mass of the routers' scores."""
    mass_of = item.get("mass_of", None if item["mass"] is None else "scores")
    return Point(item["ranking"], item["coverage"], item["budget"], item["mass"], mass_of, item.get("votes_alpha"))


def table(results: dict) -> Table:
    """Returns a table of all points, with generation where it was run.

    ``read``: bytes per generated token over those without a budget.
    """
    reference, natural = results["reference"], results["natural"]
    caption = (
        f"no budget: perplexity {reference['perplexity']:.3f} over {reference['tokens']:,} tokens, "
        f"{natural['distinct']:.1f} distinct experts per layer and step of {results['window']} rows"
    )
    found = Table(
        title=escape(printable(results["title"])),
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    speeds = {point_of(item): item for item in results["generation"] if item.get("ranking")}
    names = ["ranking", "coverage", "bound", "perplexity", "agreement", "KL", "dropped", "experts", "bytes saved"]
    for name in names + (["accepted", "tokens/s", "hits", "read"] if speeds else []):
        found.add_column(name, justify="left" if name in ("ranking", "coverage") else "right")
    last = None
    pairs = list(dict.fromkeys((item["ranking"], item["coverage"]) for item in results["points"]))
    for item in sorted(results["points"], key=lambda i: (pairs.index((i["ranking"], i["coverage"])), i["distinct"])):
        pair = item["ranking"], item["coverage"]
        if last not in (None, pair):
            found.add_section()
        last = pair
        read = loads(item, results["generation"])
        found.add_row(*pair, *_cells(item, natural), *_speed(speeds.get(point_of(item)), read))
    return found


def sentences(results: dict) -> list[str]:
    """Returns the findings: the cheapest point that keeps the quality, and whether the rankings are in order."""
    found = [_verdict(results)]
    exact = next((item for item in results["generation"] if not item.get("ranking")), None)
    if exact:
        verified = f", {exact['distinct']:.1f} distinct experts per layer and verify step" if exact["distinct"] else ""
        found.append(
            f"generation without a budget: {exact['tokens_per_second']:.1f} tokens/s, acceptance length "
            f"{exact['acceptance_length']:.3f}{verified}"
        )
        found += _dear(results)
        found += [_speculated(item, exact) for item in results["generation"] if item.get("ranking") == SPECULATED]
    found += [_order(pair) for pair in _pairs((results["reconstruction"] or {}).get("order", ()))]
    return found + _same(results["points"])


def _cells(item: dict, natural: dict) -> tuple[str, ...]:
    return (
        point_of(item).label,
        f"{100 * item['perplexity_change']:+.2f}%",
        f"{100 * item['agreement']:.2f}%",
        f"{item['kl']:.4f}",
        f"{100 * item['dropped']:.1f}%",
        f"{item['distinct']:.1f}",
        f"{100 * saved(item, natural):.1f}%",
    )


def _speed(item: dict | None, read: float | None) -> tuple[str, ...]:
    if item is None:
        return ()
    shown = "" if read is None else f"{read:.2f} x"
    speed = f"{item['tokens_per_second']:.1f}"
    return f"{item['acceptance_length']:.2f}", speed, f"{100 * item['hit_rate']:.0f}%", shown


def saved(item: dict, natural: dict) -> float:
    """Returns the share of a verify step's expert bytes that a point saves."""
    return 1 - item["distinct"] / natural["distinct"]


def _verdict(results: dict) -> str:
    natural, chosen = results["natural"], results["verdict"]
    asked = f"top-1 agreement of {100 * AGREEMENT:g}% and perplexity within {100 * PERPLEXITY:g}%"
    if chosen is None:
        near = max(results["points"], key=lambda item: item["agreement"])
        return (
            f"no budget of this sweep keeps a {asked}; the closest, {_named(near)}, has {_quality(near)} and saves "
            f"{100 * saved(near, natural):.1f}% of the bytes"
        )
    step = results["step_bytes_per_expert"]
    return (
        f"{_named(chosen)} keeps a {asked} with the fewest experts: {_quality(chosen)}; {chosen['distinct']:.1f} of "
        f"{natural['distinct']:.1f} distinct experts per layer, which saves {100 * saved(chosen, natural):.1f}% of the "
        f"bytes ({gib(step * (natural['distinct'] - chosen['distinct']))} of {gib(step * natural['distinct'])} "
        "per step)"
    )


def _dear(results: dict) -> list[str]:
    """Names the budgets that cost more loads than they save."""
    read = [(item, loads(item, results["generation"])) for item in results["points"]]
    named = ", ".join(f"{_named(item)} ({ratio:.2f} x)" for item, ratio in read if ratio is not None and ratio > 1)
    if not named:
        return []
    return [f"cost more loads than they save, in bytes per token over no budget: {named}"]


def _speculated(item: dict, exact: dict) -> str:
    """Bytes and tokens of speculated execution, beside those of the exact model with the same reads ahead."""
    both = [f"{gib(each['bytes_per_token'])} per token at {100 * each['hit_rate']:.0f}% hits" for each in (item, exact)]
    return (
        f"generation with speculated execution, {item['coverage']}: {both[0]} (exact: {both[1]}), "
        f"{item['tokens_per_second']:.1f} tokens/s, {100 * item['dropped']:.1f}% of the routing weight dropped, "
        f"{100 * item['equal']:.0f}% of the tokens before the first that differs"
    )


def _named(item: dict) -> str:
    if point_of(item).speculated:
        return f"speculated execution, {item['coverage']}"
    return f"{item['ranking']}, {item['coverage']}, {point_of(item).label}"


def _quality(item: dict) -> str:
    agreed, change = (
        f"{100 * item[name]:{sign}.2f} +- {100 * item[f'{name}_error']:.2f}%"
        for name, sign in (("agreement", ""), ("perplexity_change", "+"))
    )
    return f"agreement {agreed}, perplexity {change} (standard errors over tokens)"


def _pairs(order: Sequence[dict]) -> list[list[dict]]:
    pairs = dict.fromkeys((item["better"], item["worse"], item["coverage"]) for item in order)
    return [[i for i in order if (i["better"], i["worse"], i["coverage"]) == pair] for pair in pairs]


def _order(items: Sequence[dict]) -> str:
    first, broken = items[0], [item for item in items if not item["holds"]]
    claim = f"reconstruction error, {first['coverage']}: {first['better']} <= {first['worse']}"
    if not broken:
        return f"{claim} at every budget"
    gaps = ", ".join(
        f"B={i['budget']} ({100 * i['difference']:+.2f} +- {100 * i['standard_error']:.2f} points)" for i in broken
    )
    other = first["better"] == "oracle" and first["coverage"] != "truncation"
    return f"{claim} does not hold at {gaps}{'; the oracle minimises the error of truncation' if other else ''}"


def _same(points: Sequence[dict]) -> list[str]:
    """Reports that ``resident`` ranked like ``router``: in prefill, all or none of a layer's experts are resident."""
    resident, router = (
        {point_of(p | {"ranking": ""}): p["perplexity"] for p in points if p["ranking"] == name}
        for name in ("resident", "router")
    )
    if not resident or resident != {key: router.get(key) for key in resident}:
        return []
    return ["resident ranked like router: while a prompt is read a layer finds all or none of its experts resident"]
