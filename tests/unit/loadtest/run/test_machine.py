"""What is noticed of other work on the machine of a run."""

import psutil
import pytest

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.run.machine import busy_note, parse_cores


@pytest.mark.parametrize(("percent", "said"), [(0.0, False), (19.0, False), (57.4, True), (100.0, True)])
def test_other_work_on_the_cores_is_said_with_its_share(monkeypatch, percent, said):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)
    note = busy_note()
    assert (note is not None) == said
    assert note is None or note.startswith(f"other work took {percent:.0f} % of this machine's cores")


@pytest.mark.parametrize("text", ["1-0", "0,1-0", "one", ","])
def test_cores_that_name_none_are_refused_and_not_taken_for_all(text):
    with pytest.raises(LoadTestError, match="are not understood: give a list such as 0-1,3"):
        parse_cores(text)
