"""A module whose import fails, and fails in another way when it is tried again, as PyTorch's do."""

import tests.support

if hasattr(tests.support, "has_failed"):
    raise AssertionError("the second attempt is not the first")
tests.support.has_failed = True
raise LookupError("the first cause")
