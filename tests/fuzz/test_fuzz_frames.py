"""A few hundred malformed transfer frames; `make fuzz` runs many more."""

import pytest

from tools.fuzz.campaigns import IN_PROCESS

SEED = 0


@pytest.mark.parametrize("campaign", IN_PROCESS, ids=lambda campaign: campaign.name.replace(" ", "-"))
def test_what_a_hostile_source_sends_ends_in_the_documented_error_and_touches_nothing_else(campaign):
    assert campaign.run(400, SEED) >= 400
