"""A short slice of the campaign, by a fixed seed: one fault of each kind."""

from __future__ import annotations

import campaign
import pytest
from campaign_faults import FAULTS, clean
from dist_worlds import MESHES

from tinyllm.dist.comm import spawn


def test_one_fault_of_each_kind() -> None:
    tally = campaign.campaign(len(FAULTS), seed=20)
    assert tally.wrong == []
    assert dict(tally.runs) == dict.fromkeys(FAULTS, 1)


@pytest.mark.parametrize("mesh", MESHES)
def test_mixed_operations_repeat_to_the_bit_over_any_mesh(mesh: str) -> None:
    runs = [
        spawn(clean, 3, 5, 300, mesh=MESHES[name], method="forkserver") for name in ("pipe", mesh)
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1, "ranks return chunks of their own, too"
