"""A few hundred malformed gRPC messages and HTTP requests at real servers; `make fuzz` runs many more."""

import pytest

from ridgeline.cluster.model_store import DEFAULT_MODEL_NAME, prepare_model
from tools.child import running
from tools.fuzz.campaigns import MEBIBYTE, Footprint, connected

SEED = 0
EXAMPLES = {
    "KV source": 200,
    "worker": 100,
    "tasks at decode": 150,
    "tasks at prefill": 100,
    "HTTP": 250,
    "OpenAPI": 12,
}
MOST_GROWTH_BYTES = 150 * MEBIBYTE
"""In so short a run caches are still being filled; the long one has the tight limit."""


@pytest.fixture(scope="module")
def under_test():
    with (
        running("tools.fuzz.server", str(prepare_model(DEFAULT_MODEL_NAME))) as server,
        connected(server) as connected_server,
    ):
        yield connected_server


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_malformed_input_is_answered_or_refused_and_the_server_goes_on_as_before(under_test, name):
    (campaign,) = (campaign for campaign in under_test.campaigns if campaign.name == name)
    before = Footprint.of(under_test.server.pid)
    campaign.run(EXAMPLES[name], SEED)
    under_test.require_unharmed()
    after = Footprint.of(under_test.server.pid)
    assert after.rss_bytes - before.rss_bytes < MOST_GROWTH_BYTES, f"{before}, then {after}"
