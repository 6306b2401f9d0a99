"""Marks of tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
