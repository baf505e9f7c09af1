"""Sizes of instances: numbers for plain ones, and something else for the others."""

import pickle

import pytest

from hetero_gateway.planner.sizes import Size, as_size, layer_partition


def vllm_partition(layers: int, stages: int) -> list[int]:
    """vllm/distributed/utils.py, get_pp_indices, in other words."""
    found = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        found[-i] += 1
    return found


def test_tensor_parallelism_alone_is_a_number() -> None:
    assert Size(4) == 4
    assert {4: "found"}[Size(4)] == "found"
    assert as_size(4).plain
    assert f"tp{Size(4)}" == "tp4"


def test_as_many_accelerators_shared_out_otherwise_are_another_size() -> None:
    size = Size(2, 2)
    assert size != 4
    assert size != Size(1, 4)
    assert len({4, size, Size(1, 4), Size(1, data=4, experts=True)}) == 4
    assert size <= 4
    assert sum((size, Size(4), 1)) == 9
    assert pickle.loads(pickle.dumps(size)) == size


def test_over_machines_it_is_what_it_takes_of_one() -> None:
    size = Size(4, 4, machines=2)
    assert int(size) == 8
    assert size.accelerators == 16
    assert f"tp{size}" == "tp4-pp4-on2"
    with pytest.raises(ValueError, match="no size"):
        Size(1, 3, machines=2)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8, 16])
def test_layers_are_shared_out_as_vllm_does(stages: int) -> None:
    for layers in range(stages, 130):
        assert list(layer_partition(layers, stages)) == vllm_partition(layers, stages)
