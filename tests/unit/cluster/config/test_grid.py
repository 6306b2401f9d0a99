"""The file of candidates: what each stands for, and what is refused by name."""

import pytest

from ridgeline.cluster.config.grid import both_variants, read_grid
from ridgeline.cluster.config.loader import ConfigError
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.contracts.section import MIB


def _read(tmp_path, text: str, **base):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    return read_grid(path, RidgelineConfig(**base))


def test_a_candidate_is_the_configuration_with_its_overrides_in_its_mode_alone(tmp_path):
    grid = _read(
        tmp_path,
        """
colocated:
  as-configured:
  one-replica:
    pools: {colocated: {workers: 1, cores_per_worker: 2, kv_cache_bytes: 2 GiB}}
""",
        server={"port": 8123},
        engine_args={"max_logprobs": 50},
    )
    plain, one = grid["colocated"]
    assert [each.name for each in grid["disaggregated"]] == ["as-configured"], "a mode that is left out"
    pool = one.config.pools.colocated
    assert (pool.workers, pool.cores_per_worker, pool.kv_cache_bytes) == (1, 2, 2048 * MIB)
    assert pool.max_num_seqs == plain.config.pools.colocated.max_num_seqs == 72
    assert one.config.engine_args == {"max_logprobs": 50}
    for mode, candidates in grid.items():
        for each in candidates:
            assert (each.config.mode, each.config.fixed_mode, each.config.server.port) == (mode, True, 8123)
    both = both_variants(one, grid["disaggregated"][0])
    assert (both.pools.colocated, both.pools.prefill) == (pool, plain.config.pools.prefill)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "baseline: {plain: {}}",
            "baseline: Extra inputs are not permitted; its keys are colocated, disag",
        ),
        ("colocated: {}", "colocated: needs a candidate, such as as-configured: {}"),
        ("colocated: [plain]", "colocated: Input should be a valid dictionary"),
        ("colocated: {x: {engine: {steps: 1}}}", "candidate x of colocated sets engine: it may set pools.colocated"),
        ("colocated: {x: {model: {dtype: auto}}}", "candidate x of colocated sets model"),
        ("colocated: {x: {ray: {share_cores: true}}}", "candidate x of colocated sets ray"),
        ("colocated: {x: {pools: {decode: {workers: 1}}}}", "candidate x of colocated sets pools.decode"),
        ("disaggregated: {x: {pools: {colocated: {workers: 1}}}}", "candidate x of disaggregated sets pools.colocated"),
        (
            "colocated: {x: {pools: {colocated: {max_steps: 1}}}}",
            "candidate x of colocated: pools.colocated.max_steps: Extra inputs are not permitted",
        ),
        (
            "colocated: {x: {pools: {colocated: {max_num_batched_tokens: 8}}}}",
            "candidate x of colocated: pools.colocated.max_num_batched_tokens (8) cannot give every one of",
        ),
        ("colocated: {x: {pools: {colocated: {resources: {r: 1}}}}}", "candidate x of colocated: resources are those"),
        ("colocated: {x: {}, x: {}}", "grid.yaml:1: x is there already"),
        ("colocated: {x: ", "is not valid YAML"),
        ("colocated: !other {}", "is not valid YAML"),
        ("colocated: \x01", "is not valid YAML"),
        ("colocated: &a {x: *a}", "is not valid YAML"),
        ("colocated: {? [x] : {}}", "is not valid YAML"),
        ("colocated: {x: {engine_args: {revision: 2026-13-45}}}", "is not valid YAML"),
        ("- colocated", "grid.yaml: the file: Input should be a valid dictionary"),
    ],
)
def test_a_candidate_that_is_impossible_is_refused_by_name(tmp_path, text, sentence):
    with pytest.raises(ConfigError) as refused:
        _read(tmp_path, text)
    (problem,) = refused.value.problems
    assert sentence in problem


def test_problems_of_all_candidates_are_told_at_once_and_a_missing_file_by_its_name(tmp_path):
    with pytest.raises(ConfigError) as refused:
        _read(tmp_path, "colocated: {x: {model: {}}}\ndisaggregated: {y: {server: {}}}")
    assert len(refused.value.problems) == 2
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        read_grid(tmp_path / "none.yaml", RidgelineConfig())
