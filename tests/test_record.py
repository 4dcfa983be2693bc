"""The recorder, and that its folders are read back as they were written."""

import torch
from torch import nn

from tplab.align.check.folder import read_recorded
from tplab.record import record


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_two_ranks_are_read_back_as_they_ran(tmp_path):
    models = [Toy(), Toy()]
    ids = torch.arange(5)
    with torch.inference_mode():
        outputs = [model.head(model(ids)) for model in models]
        for rank, model in enumerate(models):
            with record(tmp_path / "run", rank=rank, world_size=2) as rec:
                rec.parameters(model)
                rec.watch(model)
                rec.inputs(ids, ids)
                model.head(model(ids))
    found = read_recorded(tmp_path / "run")
    assert found.world_size == 2
    for rank, model in enumerate(models):
        call, = found.ranks[rank].calls
        assert call.status == "done" and call.last == "head" and call.inside == ""
        assert call.input_ids.tolist() == call.positions.tolist() == ids.tolist() and call.sequences is None
        began = [(entry.name, entry.kind) for entry in call.entries[:3]]
        assert began == [("", "in"), ("embed", "in"), ("embed", "out")]
        assert torch.equal(call.entries[-1].tensor(), outputs[rank])
        for name, weight in model.named_parameters():
            assert torch.equal(found.ranks[rank].parameters[name].tensor(), weight)
