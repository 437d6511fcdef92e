"""Draws a recording: where the time went, and one step by thread."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vllm_spac.timeline.chrome import thread_order, thread_titles
from vllm_spac.timeline.recorder import Kind
from vllm_spac.timeline.recording import Recording
from vllm_spac.timeline.split import GENERATING, PROMPTS, median_step, split

_COLORS = {  # by kind; those of the split's parts follow
    Kind.LAYER: "tab:blue",
    Kind.WAIT: "tab:red",
    Kind.WAIT_AHEAD: "tab:orange",
    Kind.WAIT_CPU: "tab:purple",
    Kind.UPDATE: "tab:olive",
    Kind.DRAFT: "tab:green",
    Kind.LOAD: "indianred",
    Kind.HOST_LOAD: "sandybrown",
    Kind.CPU: "mediumpurple",
}
_PARTS = {
    "waiting for loads": "tab:red",
    "waiting for CPU experts": "tab:purple",
    "experts": "tab:blue",
    "rest of the forward": "lightsteelblue",
    "policies and predictors": "tab:olive",
    "drafts": "tab:green",
    "sampling and the rest of the step": "silver",
    "between steps": "gainsboro",
}
_HEIGHTS = dict.fromkeys((Kind.WAIT, Kind.WAIT_AHEAD, Kind.WAIT_CPU), 0.5)  # inside of layers; 0.8 for others
_LOADS = (Kind.LOAD, Kind.HOST_LOAD)


def draw(recording: Recording, path: Path, title: str) -> None:
    """Draws the time of a token and of a step with prompts above the step of median duration, by thread.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from vllm_spac.system.pictures import save_picture

    titles = thread_titles(recording)
    size, ratios = (12, 3.6 + 0.35 * len(titles)), (1.6, 0.6 + 0.35 * len(titles))
    figure, (above, below) = pyplot.subplots(2, figsize=size, height_ratios=ratios, layout="constrained")
    _draw_split(above, recording)
    above.set_title(title)
    _draw_step(below, recording, titles)
    save_picture(figure, path)


def _draw_split(axes, recording: Recording) -> None:
    labels: list[str] = []
    for kinds, what in ((GENERATING, "generating"), (PROMPTS, "with prompts")):
        found = split(recording, kinds)
        if not found.steps:
            continue
        each = found.tokens if kinds == GENERATING and found.tokens else found.steps
        unit = "token" if kinds == GENERATING and found.tokens else "step"
        left = 0.0
        for name, value in found.parts.items():
            width = value / each / 1e6
            axes.barh(len(labels), width, left=left, color=_PARTS[name], label=None if labels else name)
            left += width
        labels.append(f"{what}: a {unit}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    if labels:
        axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)


def _draw_step(axes, recording: Recording, titles: list[str]) -> None:
    span = median_step(recording, GENERATING) or median_step(recording, PROMPTS)
    if span is None:
        axes.set_axis_off()
        return
    order = thread_order(recording)
    inside = (recording.end > span[0]) & (recording.start < span[1])
    for kind, color in _COLORS.items():
        found = np.flatnonzero(inside & (recording.kind == kind))
        for thread in np.unique(recording.thread[found]).tolist():
            of_thread = found[recording.thread[found] == thread]
            begins = (recording.start[of_thread] - span[0]) / 1e6
            bars = list(zip(begins.tolist(), (recording.duration[of_thread] / 1e6).tolist(), strict=True))
            place = order.index(thread)
            height = 0.2 if place == 0 and kind in _LOADS else _HEIGHTS.get(kind, 0.8)
            axes.broken_barh(bars, (place - height / 2, height), color=color)
    axes.set_yticks(range(len(titles)), [titles[thread] for thread in order], fontsize=8)
    axes.set(xlim=(0, (span[1] - span[0]) / 1e6), ylim=(len(titles) - 0.4, -0.6))
    axes.set_xlabel("milliseconds of the step of median duration (blue: layers, with waits and loads in them)")
