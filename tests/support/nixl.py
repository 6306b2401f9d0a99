"""What tests of the `nixl` transport need: its package, which is optional."""

import pytest

from ridgeline.kv_transfer.nixl.library import why_missing

needs_nixl = pytest.mark.skipif(why_missing() is not None, reason=f"{why_missing()}")
