"""Objects with tensors from one process to another, through files."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
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
    assert written(files) == 1
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


@pytest.mark.parametrize("large", [False, True])
def test_ten_thousands_of_tensors_take_few_files_and_mappings(
    files: TensorFiles, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """A process may have some 65,000 mappings; a list of samples or a deep model has more tensors than that."""
    if large:  # buffers that would have a file of their own, were there not so many
        monkeypatch.setattr("hydra_tune.engine.transfer.OWN_FILE", 1)
        monkeypatch.setattr("hydra_tune.engine.transfer.MOST_OWN", 10)
    samples = [(torch.tensor([float(i), 1.0]), torch.tensor([i, i])) for i in range(40_000)]
    arrived = unpack(pack(samples, files))
    assert written(files) == (11 if large else 1)
    mapped = Path("/proc/self/maps").read_text().count(str(files.directory))
    assert mapped == written(files)
    assert all(x[0] == i and y.tolist() == [i, i] for i, (x, y) in enumerate(arrived))
    storages = {x.untyped_storage().nbytes() for x, _ in arrived}
    assert storages == {8}, "each is a storage of its own, not the whole file"
    arrived[7][0][0] = -1.0
    assert samples[7][0][0] == 7.0
    assert arrived[8][0][0] == 8.0
    del samples, arrived
    gc.collect()
    assert written(files) == 0


def test_a_large_buffer_has_a_file_of_its_own(files: TensorFiles) -> None:
    small, large = torch.ones(10), torch.ones(1 << 18)
    arrived = unpack(pack([small, large], files))
    assert written(files) == 2
    del large
    gc.collect()
    assert written(files) == 1, "it is freed without the others"
    assert arrived[1].sum() == 1 << 18


def test_arrays_and_tensors_share_a_file(files: TensorFiles) -> None:
    arrays = [np.arange(20_000, dtype=dtype).reshape(100, 200) for dtype in (np.float32, np.float64)]
    tensor = torch.arange(5)
    arrived = unpack(pack([*arrays, tensor], files))
    assert written(files) == 1
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(arrived, arrays, strict=False))
    assert arrived[2].tolist() == [0, 1, 2, 3, 4]


def test_what_could_not_be_packed_leaves_no_file_and_is_written_again(files: TensorFiles) -> None:
    tensor = torch.arange(5.0)
    with pytest.raises(TypeError):
        pack([tensor, (each for each in ())], files)
    assert written(files) == 0
    assert unpack(pack(tensor, files)).tolist() == tensor.tolist()
