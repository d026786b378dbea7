"""The trainer: a killed run ends as an uninterrupted one, and a scorer learns through its choice of tokens."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts import run, succeed

from gpu_lod.errors import CheckpointError, InputError, UnsupportedError
from gpu_lod.vlm import ContextualizedRelevance, GumbelTopK, Trainer

SCRIPT = """
import os, random, signal
import numpy as np
import torch
from gpu_lod.vlm import ContextualizedRelevance, GumbelTopK, Trainer

torch.set_num_threads(1)

def train(folder, dies):
    torch.manual_seed(3); np.random.seed(4); random.seed(5)
    scorer, select = ContextualizedRelevance(4, patch=4, hidden=8), GumbelTopK(6)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def loss(step):
        if step == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        features = torch.randn(2, 16, 3) * (1 + random.random()) + float(np.random.rand())
        relevance = scorer(torch.randn(2, 40, 16, 16), torch.randn(2, 4))
        return select(relevance).take(features).mean(1).square().sum()

    trainer = Trainer(scorer, optimizer, folder, {"lr": 0.01}, scheduler, every=5)
    print(trainer.step)
    print([value.hex() for value in trainer.fit(loss, 16)])
    print([value.hex() for value in torch.cat([p.detach().flatten() for p in scorer.parameters()]).double().tolist()])
"""


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Killed at step 13, after the checkpoint of step 10: the same losses and weights to the last bit."""
    cut, whole = str(tmp_path / "cut"), str(tmp_path / "whole")
    killed = run(f"{SCRIPT}\ntrain({cut!r}, 13)")
    assert killed.returncode == -9, killed.stderr
    lines = succeed(f"{SCRIPT}\ntrain({cut!r}, -1); train({whole!r}, -1)").splitlines()
    assert lines[0] == "10" and lines[3] == "0"
    assert lines[1].count("0x") == 16 and lines[1:3] == lines[4:]


def little(folder: Path, config: Any = None, **how: Any) -> Trainer:
    torch.manual_seed(1)
    module = torch.nn.Linear(3, 1)
    return Trainer(module, torch.optim.Adam(module.parameters()), folder, config or {"lr": 0.001}, every=2, **how)


def loss_of(trainer: Trainer) -> Any:
    return lambda step: trainer.module(torch.full((1, 3), float(step))).square().sum()


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies half way through a checkpoint leaves the one before."""
    trainer = little(tmp_path)
    trainer.fit(loss_of(trainer), 4)
    save = torch.save

    def half(state: Any, file: Any) -> None:
        save(state, file)
        file.truncate(file.tell() // 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(loss_of(trainer), 8)
    monkeypatch.setattr(torch, "save", save)
    again = little(tmp_path)
    assert again.step == 4 and again.losses == trainer.losses[:4]
    again.fit(loss_of(again), 8)
    assert again.step == 8 and little(tmp_path).step == 8


def test_random_numbers_go_on(tmp_path: Path) -> None:
    trainer = little(tmp_path)
    random.gauss(0, 1), np.random.randn()  # both keep a second one for later
    trainer.save()
    expected = torch.rand(3).tolist(), np.random.randn(3).tolist(), [random.gauss(0, 1) for _ in range(3)]
    again = little(tmp_path)
    torch.manual_seed(9), np.random.seed(9), random.seed(9)
    again.fit(loss_of(again), 0)
    assert (torch.rand(3).tolist(), np.random.randn(3).tolist(), [random.gauss(0, 1) for _ in range(3)]) == expected


def test_steps_done_are_not_done_again(tmp_path: Path) -> None:
    trainer = little(tmp_path)
    trainer.close()  # no log to finish
    first = trainer.fit(loss_of(trainer), 3)
    assert little(tmp_path).step == 3, "the last step is saved, whatever `every`"
    assert trainer.fit(loss_of(trainer), 3) == first and trainer.fit(lambda step: 1 / 0, 2) == first


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"config": {"lr": 0.1}}, r"lr was 0.001 and is 0.1\. Use another folder"),
        ({"config": {"lr": 0.001, "budget": 64}}, "budget was not there and is 64"),
        ({"config": {"lr": 0.001, "few": True}}, "few was not there and is true"),
    ],
)
def test_another_configuration_is_refused(tmp_path: Path, change: Any, hint: str) -> None:
    little(tmp_path).save()
    with pytest.raises(CheckpointError, match=hint):
        little(tmp_path, **change)


def test_what_is_no_checkpoint_of_this_run(tmp_path: Path) -> None:
    trainer = little(tmp_path)
    trainer.save()
    other = torch.nn.Linear(4, 1)
    with pytest.raises(CheckpointError, match="other parameters"):
        Trainer(other, torch.optim.Adam(other.parameters()), tmp_path, {"lr": 0.001})
    schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 3)
    with pytest.raises(CheckpointError, match="no scheduler"):
        Trainer(trainer.module, trainer.optimizer, tmp_path, {"lr": 0.001}, schedule)
    with pytest.raises(CheckpointError, match="the optimizer Adam, not SGD"):
        Trainer(trainer.module, torch.optim.SGD(trainer.module.parameters(), momentum=0.9), tmp_path, {"lr": 0.001})
    whole = trainer.path.read_bytes()
    for key in ("scheduler", "losses", "random"):
        state = torch.load(trainer.path, weights_only=True)
        del state[key]
        torch.save(state, trainer.path)
        with pytest.raises(CheckpointError, match=f"cannot be read.*{key}"):
            little(tmp_path)
        trainer.path.write_bytes(whole)
    trainer.path.write_bytes(whole[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        little(tmp_path)


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="config is not JSON"):
        little(tmp_path, {"lr": torch.rand(1)})
    trainer = little(tmp_path)
    trainer.fit(loss_of(trainer), 2)
    weight = trainer.module.weight
    for value, hint in (
        (weight.sum() * float("nan"), "is nan"),
        (weight[0], "is tensor"),
        (torch.tensor(1.0), "has no gradients"),
        (1.0, "is a float"),
    ):
        with pytest.raises(InputError, match=f"the loss of step 2 {hint}"):
            trainer.fit(lambda step, value=value: value, 4)
    assert little(tmp_path).step == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made a folder"):
        little(tmp_path / "file")
    module, optimizer = trainer.module, trainer.optimizer
    with pytest.raises(InputError, match="module is a Adam; expected a torch Module"):
        Trainer(optimizer, module, tmp_path, {})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="optimizer is a generator"):
        Trainer(module, module.parameters(), tmp_path, {})  # type: ignore[arg-type]
    for scheduler in (0.1, module, optimizer):
        with pytest.raises(InputError, match=f"scheduler is a {type(scheduler).__name__}"):
            little(tmp_path, scheduler=scheduler)
    with pytest.raises(InputError, match="log is 'yes'"):
        little(tmp_path, log="yes")
    with pytest.raises(InputError, match="folder is 3"):
        little(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="loss is tensor"):
        trainer.fit(weight.sum(), 4)


def test_gradients_that_are_not_finite_reach_nothing(tmp_path: Path) -> None:
    """Though their loss is finite, and a checkpoint is due: the run goes on where a good loss comes."""
    trainer = little(tmp_path)

    def loss(step: int, bad: int = 19) -> torch.Tensor:
        values = trainer.module(torch.ones(2, 3))
        return values.square().mean() + ((values[0] - values[1]).square().sum().sqrt() if step == bad else 0)

    with pytest.raises(InputError, match="loss of step 19 is finite and its gradients are not"):
        trainer.fit(loss, 30)
    weights = [weight.detach().clone() for weight in trainer.module.parameters()]
    assert all(torch.isfinite(weight).all() for weight in weights) and trainer.step == 19
    assert len(torch.load(trainer.path, weights_only=True)["losses"]) == 18
    again = little(tmp_path)
    assert again.step == 18 and len(again.fit(loss_of(again), 30)) == 30


def test_sparse_gradients(tmp_path: Path) -> None:
    """Of an embedding, its module's only parameter: rows that no step reads stay as they are."""
    module = torch.nn.Embedding(5, 2, sparse=True)
    before = module.weight.detach().clone()
    trainer = Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), tmp_path, {})
    read = torch.tensor([1, 3, 1])
    trainer.fit(lambda step: module(read).square().sum(), 2)
    assert (module.weight != before).any(dim=1).tolist() == [False, True, False, True, False]
    with pytest.raises(InputError, match="its gradients are not"):
        trainer.fit(lambda step: (module(read) - module(read).detach()).norm(dim=1).sqrt().sum(), 3)
    assert Trainer(module, trainer.optimizer, tmp_path, {}).step == 2


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    trainer = little(tmp_path)
    trainer.fit(loss_of(trainer), 3)
    before = trainer.path.read_bytes()
    with torch.no_grad():
        trainer.module.weight[0, 1] = torch.inf
    with pytest.raises(CheckpointError, match="after step 3 the weights hold NaN"):
        trainer.save()
    assert trainer.path.read_bytes() == before


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    trainer = little(tmp_path / "there")
    shutil.rmtree(tmp_path / "there")
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        trainer.fit(loss_of(trainer), 1)


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    """Of a checkpoint whose optimizer has other groups, when the module is loaded already."""
    little(tmp_path).save()
    module = torch.nn.Linear(3, 1)
    groups = [{"params": [module.weight]}, {"params": [module.bias], "lr": 0.5}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    weights = [weight.detach().clone() for weight in module.parameters()]
    with pytest.raises(CheckpointError, match="has other parameters"):
        Trainer(module, optimizer, tmp_path, {"lr": 0.001})
    assert all(map(torch.equal, weights, module.parameters()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


def test_schedulers_that_look_at_the_loss_and_optimizers_that_call_it(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    trainer = Trainer(module, optimizer, tmp_path / "a", {}, scheduler)
    trainer.fit(lambda step: module(torch.ones(3)).sum() * 0 + 1, 3)
    assert optimizer.param_groups[0]["lr"] == 0.025  # the loss did not fall twice
    with pytest.raises(InputError, match="LBFGS takes its steps by a closure"):
        Trainer(module, torch.optim.LBFGS(module.parameters()), tmp_path / "b", {})


def test_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for TensorBoard, which need not be installed."""
    rows: list[tuple[str, float, int]] = []
    purged = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            purged.append(purge_step)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            rows.append((name, value, step))

        def close(self) -> None:
            rows.append(("closed", 0.0, 0))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    trainer = little(tmp_path, log=True)
    losses = trainer.fit(loss_of(trainer), 2)
    assert rows == [row for step in (0, 1) for row in (("loss", losses[step], step), ("learning rate", 0.001, step))]
    trainer.close()
    assert rows[-1][0] == "closed" and len(trainer.fit(loss_of(trainer), 4)) == 4
    little(tmp_path, log=True)
    assert purged == [0, 4], "what came after the checkpoint is logged again"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[train\]'"):
        little(tmp_path, log=True)
    little(tmp_path)  # needs none


def test_a_scorer_learns_through_its_choice(tmp_path: Path) -> None:
    """Four of sixteen patches hold what the query asks for. The loss sees only the mean of what a frozen encoder makes
    of the chosen patches; after training nearly all chosen ones are right."""
    torch.manual_seed(0)
    scorer, select = ContextualizedRelevance(4, patch=2, hidden=16), GumbelTopK(4, noise=0.2)
    encoder = torch.nn.Linear(16, 8).requires_grad_(False)
    kinds, queries = torch.randn(3, 16), torch.randn(3, 4)

    def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        asked = torch.randint(0, 3, (16,))
        which = (asked[:, None] + torch.randint(1, 3, (16, 16))) % 3
        right = torch.rand(16, 16).argsort(1)[:, :4]
        which = which.scatter(1, right, asked[:, None].expand(-1, 4))
        maps = torch.zeros(16, 40, 8, 8)
        semantic = kinds[which].view(16, 4, 4, 16).permute(0, 3, 1, 2)
        maps[:, 17:33] = semantic.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return maps, asked, which

    def loss(step: int) -> torch.Tensor:
        maps, asked, which = batch()
        taken = select(scorer(maps, queries[asked])).take(encoder(kinds[which]))
        return (taken.mean(1) - encoder(kinds[asked])).square().mean()

    optimizer = torch.optim.Adam(scorer.parameters(), lr=0.03)
    losses = Trainer(scorer, optimizer, tmp_path, {}, every=1000).fit(loss, 60)
    select.eval()
    maps, asked, which = batch()
    right = which.gather(1, select(scorer(maps, queries[asked])).indices) == asked[:, None]
    assert float(right.float().mean()) > 0.9 and sum(losses[-5:]) < 0.5 * sum(losses[:5]), json.dumps(losses)


def test_a_checkpoint_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    kinds = torch.optim.lr_scheduler
    trainer = Trainer(module, optimizer, tmp_path, {}, kinds.StepLR(optimizer, 1))
    trainer.fit(lambda step: module(torch.ones(3)).sum(), 2)
    with pytest.raises(CheckpointError, match="with the scheduler StepLR, not CosineAnnealingLR"):
        Trainer(module, optimizer, tmp_path, {}, kinds.CosineAnnealingLR(optimizer, 5))
    assert Trainer(module, optimizer, tmp_path, {}, kinds.StepLR(optimizer, 1)).step == 2


def test_numbers_of_numpy_are_read_again(tmp_path: Path) -> None:
    """In learning rates and in factors of schedulers; what else of numpy's a state holds is refused at once."""

    def made(folder: Path) -> Trainer:
        torch.manual_seed(1)
        module = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=np.logspace(-3, -1, 3)[1])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / np.sqrt(step + 1))
        return Trainer(module, optimizer, folder, {}, schedule, every=2)

    whole, cut = made(tmp_path / "whole"), made(tmp_path / "cut")
    expected = whole.fit(loss_of(whole), 6)
    cut.fit(loss_of(cut), 4)
    again = made(tmp_path / "cut")
    assert again.step == 4 and again.fit(loss_of(again), 6) == expected

    class Kept(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return np.arange(3)

        def set_extra_state(self, state: Any) -> None: ...

    module = Kept(3, 1)
    trainer = Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), tmp_path / "kept", {}, every=1)
    with pytest.raises(CheckpointError, match=r"cannot be written: it could not be read again, .* numpy arrays"):
        trainer.fit(loss_of(trainer), 1)
    assert not trainer.path.exists()
    trainer = little(tmp_path / "lambda")
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    trainer.scheduler.own = lambda: 0  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"cannot be written: .*lambda"):
        trainer.save()


def test_a_folder_is_one_process_s(tmp_path: Path) -> None:
    other = f"""
        import torch
        from gpu_lod.errors import CheckpointError
        from gpu_lod.vlm import Trainer

        module = torch.nn.Linear(3, 1)
        try:
            Trainer(module, torch.optim.Adam(module.parameters()), {str(tmp_path)!r}, {{"lr": 0.001}})
        except CheckpointError as error:
            assert "another process trains in" in str(error)
            print("refused")
        else:
            print("taken")
    """
    trainer, second = little(tmp_path), little(tmp_path)
    del trainer
    assert succeed(other).strip() == "refused" and second.step == 0
    del second
    assert succeed(other).strip() == "taken"


def test_all_that_is_trained_is_in_the_module(tmp_path: Path) -> None:
    one, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    with pytest.raises(InputError, match=r"not the module's.*ModuleList"):
        Trainer(one, torch.optim.Adam([*one.parameters(), *other.parameters()]), tmp_path, {})
    both = torch.nn.ModuleList([one, other])
    Trainer(both, torch.optim.Adam(both.parameters()), tmp_path, {}).save()
    turned = torch.optim.Adam([*other.parameters(), *one.parameters()])
    with pytest.raises(CheckpointError, match="in another order"):
        Trainer(both, turned, tmp_path, {})


def test_buffers_that_hold_nan_are_not_saved(tmp_path: Path) -> None:
    """But for those that did so before: a loss that is refused has gone through BatchNorm."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    module.register_buffer("unset", torch.full((2,), math.nan))
    trainer = Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), tmp_path, {}, every=1)

    def loss(step: int, bad: bool = False) -> torch.Tensor:
        data = torch.rand(4, 3)
        return trainer.module(data * math.nan if bad else data).square().sum()

    trainer.fit(loss, 1)
    with pytest.raises(InputError, match="is nan"):
        trainer.fit(lambda step: loss(step, bad=True), 2)
    with pytest.raises(CheckpointError, match=r"after step 2 0\.running_mean, 0\.running_var of the module hold NaN"):
        trainer.fit(loss, 2)
    assert Trainer(module, trainer.optimizer, tmp_path, {}).step == 1


def test_buffers_that_hold_no_nan_or_nothing_yet(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LazyBatchNorm1d(affine=False))
    for dtype in (torch.float8_e4m3fn, torch.int64, torch.bool):
        module.register_buffer(str(dtype)[6:], torch.ones(2).to(dtype))
    trainer = Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), tmp_path, {})
    trainer.fit(lambda step: trainer.module(torch.rand(4, 3)).square().sum(), 2)
    assert Trainer(module, trainer.optimizer, tmp_path, {}).step == 2


def test_what_cuts_a_step_off_is_not_saved_half(tmp_path: Path) -> None:
    """A save from within a step, or after one that was interrupted, goes on as if that had not begun; of one that
    changes weights there is none."""

    def made(folder: Path) -> tuple[Trainer, Any]:
        torch.manual_seed(1)
        trainer = Trainer(module := torch.nn.Linear(3, 1), torch.optim.Adam(module.parameters()), folder, {}, every=99)
        return trainer, lambda step: module(torch.rand(2, 3)).square().sum()

    trainer, loss = made(tmp_path / "whole")
    expected = trainer.fit(loss, 6)

    trainer, loss = made(tmp_path / "within")
    trainer.fit(lambda step: (loss(step), trainer.save() if step == 3 else None)[0], 6)
    torch.rand(7)
    again, loss = made(tmp_path / "within")
    assert again.step == 6
    trainer, loss = made(tmp_path / "cut")

    def stopped(step: int) -> torch.Tensor:
        value: torch.Tensor = loss(step)
        if step == 3:
            raise KeyboardInterrupt
        return value

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(stopped, 6)
    trainer.save()
    again, loss = made(tmp_path / "cut")
    assert again.step == 3
    again.save()  # before it draws anything
    again, loss = made(tmp_path / "cut")
    assert again.fit(loss, 6) == expected

    trainer, loss = made(tmp_path / "changing")
    trainer.fit(loss, 2)
    trainer.save()
    step = trainer.optimizer.step

    def halfway(*args: Any) -> None:
        step(*args)
        raise KeyboardInterrupt

    trainer.optimizer.step = halfway  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(loss, 4)
    with pytest.raises(CheckpointError, match="step 2 was cut off while it changed the weights"):
        trainer.save()
    again, loss = made(tmp_path / "changing")
    assert again.fit(loss, 6) == expected


def test_random_numbers_of_more_gpus_than_there_are(tmp_path: Path) -> None:
    trainer = little(tmp_path)
    trainer.fit(loss_of(trainer), 2)
    state = torch.load(trainer.path, weights_only=True)
    state["random"]["cuda"] = [torch.get_rng_state()[:16]] * 3
    torch.save(state, trainer.path)
    again = little(tmp_path)
    if torch.cuda.device_count() < 3:
        assert again.fit(loss_of(again), 3)


def test_schedulers_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    kinds = torch.optim.lr_scheduler

    def made(parts: int) -> Trainer:
        torch.manual_seed(parts)
        module = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        each = [kinds.ConstantLR(optimizer) for _ in range(parts)]
        schedule = kinds.SequentialLR(optimizer, each, list(range(1, parts)))
        kept[:] = module, module.weight.detach().clone()
        return Trainer(module, optimizer, tmp_path, {}, schedule)

    kept: list[Any] = []
    trainer = made(3)
    trainer.fit(loss_of(trainer), 2)
    with pytest.raises(CheckpointError, match="of other parameters"):
        made(2)
    assert torch.equal(kept[0].weight, kept[1])


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_names_that_no_folder_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be made a folder"):
        little(tmp_path / name)
