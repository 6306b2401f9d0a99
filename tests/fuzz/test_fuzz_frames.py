"""A few hundred malformed transfer frames; `make fuzz` runs many more."""

import pytest

from tools.fuzz.campaign import run
from tools.fuzz.targets import in_process

SEED = 0


@pytest.mark.parametrize("campaign", in_process(), ids=lambda campaign: campaign.name.replace(" ", "-"))
def test_what_a_hostile_source_sends_ends_in_the_documented_error_and_touches_nothing_else(campaign):
    assert run(campaign, 400, SEED) >= 400
