"""What a part of a self-test found. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_spac.tools.machine.checks import Finding


@dataclass(frozen=True)
class CheckOutcome:
    """A line of the report, and what was measured for it.

    Attributes:
        finding: as ``vllm-spac doctor`` has them.
        numbers: by name, with their unit in it.
    """

    finding: Finding
    numbers: dict[str, float] = field(default_factory=dict)
