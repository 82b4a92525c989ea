"""Objects with tensors from one process to another, through files."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from hydra_tune.engine.transfer import TensorFiles, pack, unpack

pytestmark = pytest.mark.smoke


@pytest.fixture
def files(tmp_path: Path) -> TensorFiles:
    place = tmp_path / "tensors"
    place.mkdir()
    return TensorFiles(place, "t")


def written(files: TensorFiles) -> int:
    return len(list(files.directory.iterdir()))


def test_a_model_arrives_equal_and_of_its_own(files: TensorFiles) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    arrived = unpack(pack(model, files))
    for name, tensor in model.state_dict().items():
        assert torch.equal(arrived.state_dict()[name], tensor)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in arrived.parameters())
    with torch.no_grad():
        arrived[0].weight.add_(1)
    assert not torch.equal(arrived[0].weight, model[0].weight), "a change over there must not be seen here"


def test_tied_weights_stay_tied(files: TensorFiles) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    arrived = unpack(pack(model, files))
    assert arrived["head"].weight is arrived["embed"].weight


def test_views_of_one_storage_share_it_again(files: TensorFiles) -> None:
    base = torch.arange(12.0)
    a, b = unpack(pack((base[2:8], base.view(3, 4).t()), files))
    assert a.tolist() == [2, 3, 4, 5, 6, 7]
    a[0] = 100
    assert b[2, 0] == 100


def test_what_goes_out_twice_is_written_once_and_again_when_changed(files: TensorFiles) -> None:
    data = TensorDataset(torch.randn(100, 5), torch.arange(100))
    pack(data, files)
    pack((data, nn.Identity()), files)
    assert written(files) == 2
    data.tensors[0].mul_(2)
    assert torch.equal(unpack(pack(data, files)).tensors[0], data.tensors[0])


def test_files_go_when_the_tensors_do(files: TensorFiles) -> None:
    model = nn.Linear(50, 50)
    arrived = unpack(pack(model, files))
    del model
    gc.collect()
    assert written(files) == 0
    assert arrived.weight.shape == (50, 50), "what was mapped stays usable"


def test_functions_from_a_script_travel(files: TensorFiles) -> None:
    factor = torch.tensor(3.0)
    arrived = unpack(pack(lambda x: x * factor, files))
    assert arrived(2) == 6


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
    st.lists(st.integers(0, 4), max_size=3),
    st.booleans(),
)
def test_any_dtype_and_shape(dtype: torch.dtype, shape: list[int], transpose: bool) -> None:
    import tempfile

    tensor = (torch.randn(tuple(shape)) * 3).to(dtype)
    if transpose and tensor.ndim > 1:
        tensor = tensor.transpose(0, 1)
    with tempfile.TemporaryDirectory() as place:
        arrived = unpack(pack(tensor, TensorFiles(Path(place), "t")))
        assert torch.equal(arrived, tensor)
        assert arrived.dtype == tensor.dtype
        assert arrived.stride() == tensor.stride()
        del tensor


def test_a_generator_arrives_where_it_stands(files: TensorFiles) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    packed = pack([generator, generator], files)
    gc.collect()
    one, other = unpack(packed)
    assert one is other
    assert torch.equal(torch.rand(5, generator=one), torch.rand(5, generator=generator))
