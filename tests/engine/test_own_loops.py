"""Loops that compute their own gradients: equal to the plain torch loop, under every policy, on every engine."""

import functools

import pytest
import torch

import paceline
from paceline import InputError, Program, WorkerError, launch
from paceline.aggregation import Aggregation
from paceline.checkpoint.reader import Checkpoint
from paceline.core.registry import family_of
from tests.combinations import OPTIONS
from tests.engine import own_loops
from tests.engine.own_loops import (
    ADAMW,
    BOUND,
    GAN_OPTIMIZERS,
    SGD,
    Gan,
    LogKeeper,
    batches_loop,
    clipping_loop,
    equal,
    gan_loop,
    loop,
    make_model,
    reporting_loop,
)

FAMILY = family_of(Aggregation)
assert FAMILY is not None
POLICIES = sorted(FAMILY.entries)


@pytest.mark.parametrize("name", ["virtual", "local"])
@pytest.mark.parametrize("make", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_equals_the_plain_loop(engines, name, make, replicas):
    run = launch(loop, Program(model=make_model, optimizer=make), f"replicas={replicas}", engine=engines[name])
    equal(run.state, own_loops.plain(make))
    assert run.summary["updates"] == 18


@pytest.mark.parametrize("name", ["virtual", "local"])
def test_clips_as_the_plain_loop_clips(engines, name):
    alone = launch(clipping_loop, Program(model=make_model, optimizer=SGD), "replicas=1", engine=engines[name])
    equal(alone.state, own_loops.plain(SGD, BOUND))
    # Of several replicas the run clips, by the norm of the whole update.
    run = launch(loop, Program(model=make_model, optimizer=SGD, clip_norm=BOUND), "replicas=2", engine=engines[name])
    equal(run.state, own_loops.plain(SGD, BOUND))


@pytest.mark.parametrize("name", ["virtual", "local"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_several_optimizers_equal_the_plain_loop(engines, name, replicas):
    run = launch(gan_loop, Program(model=Gan, optimizer=GAN_OPTIMIZERS), f"replicas={replicas}", engine=engines[name])
    equal(run.state, own_loops.plain_gan())
    assert run.summary["updates"] == 36


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"hogwild", "sandblaster"}))
@pytest.mark.parametrize("make", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_equals_steps_of_paceline_under_every_policy(policy, make):
    strategy = f"replicas=3 aggregation={policy}{OPTIONS.get(policy, '')}"
    program = own_loops.program(optimizer=make)
    settings = {"engine": "virtual", "steps": 8, "delay": "fraction=0.5 normal:mean=0,std=0.02"}
    run = launch(batches_loop, program, strategy, **settings)
    expected = paceline.train(program, strategy, **settings)
    equal(run.state, expected.state)
    assert run.summary["gradients"] == expected.summary["gradients"]
    assert [r.train_loss for r in run.history] == pytest.approx([r.train_loss for r in expected.history])


@pytest.mark.parametrize("policy", POLICIES)
def test_one_local_replica_equals_steps_of_paceline(engine, policy):
    strategy = f"replicas=1 aggregation={policy}{OPTIONS.get(policy, '')}"
    program = (
        own_loops.program(global_batch_size=24, batch_size=None) if policy == "sandblaster" else own_loops.program()
    )
    run = launch(batches_loop, program, strategy, engine=engine, steps=8)
    equal(run.state, paceline.train(program, strategy, engine=engine, steps=8).state)


def test_the_batch_norm_of_an_own_loop_travels(engines):
    def model():
        first = torch.nn.Linear(8, 6, bias=False)  # of a bias BatchNorm leaves nothing but rounding
        return torch.nn.Sequential(first, torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()

    program = own_loops.program(model=model)
    for engine in engines.values():
        run = launch(batches_loop, program, "replicas=2", engine=engine, epochs=2)
        equal(run.state, paceline.train(program, "replicas=2", engine=engine, epochs=2).state)


def test_the_budget_ends_the_loop_and_the_model_has_the_last_a(engines, tmp_path):
    def endless(worker):
        model, optimizer = worker.model, worker.optimizer
        generator = torch.Generator().manual_seed(worker.replica)
        steps = 0
        try:
            while True:
                optimizer.zero_grad()
                model(torch.randn(4, 8, dtype=torch.float64, generator=generator)).square().mean().backward()
                optimizer.step()
                steps += 1
        finally:
            torch.save((steps, {name: tensor.clone() for name, tensor in model.state_dict().items()}), tmp_path / "end")

    for name, engine in engines.items():
        run = launch(endless, Program(model=make_model, optimizer=SGD), "replicas=1", engine=engine, steps=5)
        steps, state = torch.load(tmp_path / "end")
        assert steps == run.summary["updates"] == 5
        if name == "local":
            equal(run.state, state)


@pytest.mark.parametrize("name", ["virtual", "local"])
@pytest.mark.parametrize("kind", ["step", "own"])
def test_passes_over_batches_end_with_the_budget(engines, name, kind, tmp_path):
    def endless(worker):
        passes = 0
        try:
            while passes < 3:  # without an end of its own it would never return
                for batch in worker.batches():
                    if kind == "step":
                        worker.step(batch)
                        continue
                    worker.optimizer.zero_grad()
                    worker.backward(torch.nn.functional.cross_entropy(worker.model(batch.input), batch.target))
                    worker.optimizer.step()
                passes += 1
        finally:
            (tmp_path / f"{worker.replica}").write_text(str(passes))

    run = launch(endless, own_loops.program(), "replicas=2", engine=engines[name], steps=4)
    assert run.summary["updates"] == 4
    assert [(tmp_path / name).read_text() for name in "01"] == ["1", "1"]  # what follows the last pass is run


def test_a_loop_only_reads_the_parameters(engines):
    def writing(worker, keep):
        weight = worker.model[0].weight
        before = weight.detach().clone()
        for batch in worker.batches():
            weight.data.fill_(100.0)
            if not keep:
                weight.data.copy_(before)  # as averaged weights are for an evaluation
            worker.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(worker.model(batch.input), batch.target).backward()
            worker.optimizer.step()
            before = weight.detach().clone()

    written, restored = (functools.partial(writing, keep=keep) for keep in (True, False))
    with pytest.raises(
        InputError, match=r"replica 0 has written 0\.weight, a parameter of A, which replicas only read"
    ):
        launch(written, own_loops.program(), "replicas=2", engine="virtual", steps=2)
    run = launch(restored, own_loops.program(), "replicas=2", engine="virtual", steps=2)
    equal(run.state, paceline.train(own_loops.program(), "replicas=2", engine="virtual", steps=2).state)
    with pytest.raises(
        WorkerError, match=r"0 killed by SIGSEGV: it may have written a parameter of A, .*Program\(model"
    ):
        launch(written, own_loops.program(), "replicas=1", engine=engines["local"], steps=2)


def test_versions_of_several_optimizers(engine, tmp_path):
    def noted(worker):
        gan_loop(worker)
        versions = {name: each.version for name, each in worker.optimizers.items()}
        (tmp_path / "versions").write_text(repr(versions))

    launch(noted, Program(model=Gan, optimizer=GAN_OPTIMIZERS), "replicas=1", engine=engine)
    assert (tmp_path / "versions").read_text() == "{'generator': 12, 'discriminator': 24}"


def test_what_a_scheduler_of_the_program_writes_is_kept(engine):
    scheduled = own_loops.program(scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3))
    run = launch(batches_loop, scheduled, "replicas=2", engine=engine, steps=6)
    equal(run.state, paceline.train(scheduled, "replicas=2", engine=engine, steps=6).state)
    with pytest.raises(InputError, match="leave one of the two out"):
        launch(loop, Program(model=make_model, optimizer=SGD, scheduler=scheduled.scheduler), engine=engine)


def test_evaluates_in_the_mode_of_evaluation(engine):
    def checked(worker):
        for module in worker.model.modules():
            module.train()
        scores = worker.evaluate()
        assert worker.model.training
        assert set(scores) == {"test_loss", "test_accuracy"}
        batches_loop(worker)
        assert worker.evaluate()["test_loss"] < scores["test_loss"]

    run = launch(checked, own_loops.program(test=own_loops.data()), "replicas=2", engine=engine, epochs=20)
    assert run.summary["test_accuracy"] > 0.5


@pytest.mark.parametrize(
    ("strategy", "settings", "says"),
    [
        ("replicas=1 stages=2", {}, "all of the model on one worker"),
        ("replicas=2 accumulate=2", {}, "call backward\\(\\) several times"),
        ("replicas=2 compile=true", {}, "compile=true"),
        ("replicas=2", {"noise_scale": True}, "worker.step"),
    ],
)
def test_refuses_what_own_gradients_cannot_do(engine, strategy, settings, says):
    with pytest.raises((InputError, WorkerError), match=says):
        launch(batches_loop, own_loops.program(), strategy, steps=2, engine=engine, **settings)


def loads(optimizer):
    optimizer.load_state_dict({"state": {}, "param_groups": []})


def adds(optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1})


@pytest.mark.parametrize(
    ("change", "says"), [(loads, "would not get to A; load the state before"), (adds, "has added")]
)
def test_refuses_changes_of_an_optimizer_that_do_not_travel(engine, change, says):
    def changed(worker):
        change(worker.optimizer)
        batches_loop(worker)

    with pytest.raises(InputError, match=says):
        launch(changed, own_loops.program(), "replicas=1", steps=2, engine=engine)


@pytest.mark.parametrize("change", [{"nesterov": True}, {"params": []}])
def test_refuses_options_that_do_not_travel(engine, change):
    def changed(worker):
        worker.optimizer.param_groups[0].update(change)
        batches_loop(worker)

    with pytest.raises(InputError, match="added parameters to its optimizer, or changed an option that is no number"):
        launch(changed, own_loops.program(), engine=engine, steps=2)


def test_schedulers_may_keep_figures_in_groups(engine):
    def cycled(worker):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(worker.optimizer, 0.5, total_steps=20)
        for batch in worker.batches():
            torch.nn.functional.cross_entropy(worker.model(batch.input), batch.target).backward()
            worker.optimizer.step()
            worker.optimizer.zero_grad()
            scheduler.step()

    assert launch(cycled, own_loops.program(), "replicas=2", engine=engine, steps=8).summary["updates"] == 8


def test_refuses_both_ways_of_steps(engine):
    def both(worker):
        for batch in worker.batches():
            worker.optimizer.zero_grad()
            worker.step(batch)

    with pytest.raises((InputError, WorkerError), match="one of them"):
        launch(both, own_loops.program(), engine=engine, steps=2)


def test_refuses_a_program_with_something_missing_where_no_loop_makes_the_steps():
    with pytest.raises(InputError, match=r"Program\(loss=…\) is missing"):
        paceline.train(Program(model=make_model, optimizer=SGD, train=own_loops.data()), steps=1)
    with pytest.raises(InputError, match=r"Program\(train=…\) is missing"):
        paceline.train(Program(model=make_model, loss=torch.nn.functional.cross_entropy, optimizer=SGD), steps=1)
    with pytest.raises(InputError, match="several step when a loop says so"):
        paceline.train(own_loops.program(model=Gan, optimizer=GAN_OPTIMIZERS), steps=1)
    with pytest.raises(InputError, match=r"discriminator\.0\.weight belongs to no optimizer"):
        launch(gan_loop, Program(model=Gan, optimizer={"generator": SGD}))
    with pytest.raises(InputError, match="no submodule 'critic'"):
        launch(gan_loop, Program(model=Gan, optimizer={"critic": SGD}))


def test_a_policy_on_losses_asks_for_them():
    def silent(worker):
        for batch in worker.batches():
            torch.nn.functional.cross_entropy(worker.model(batch.input), batch.target).backward()
            worker.optimizer.step()

    with pytest.raises((InputError, WorkerError), match=r"worker\.backward\(loss\)"):
        launch(
            silent,
            own_loops.program(),
            "replicas=2 aggregation=smooth-switch:threshold=loss-driven",
            engine="virtual",
            steps=4,
        )
    assert launch(silent, own_loops.program(), "replicas=2", engine="virtual", steps=4).summary["updates"] == 4


@pytest.mark.parametrize(
    ("name", "policy"),
    [("virtual", "synchronous"), ("local", "synchronous"), ("local", "asynchronous"), ("virtual", "asynchronous")],
)
def test_main_takes_what_loops_log_and_ends_when_one_asks(engines, name, policy):
    kept_logs = LogKeeper()
    strategy = f"replicas=2 aggregation={policy}"
    run = launch(
        reporting_loop, own_loops.program(), strategy, engine=engines[name], steps=100_000, callbacks=[kept_logs]
    )
    assert run.summary["stopped"] == "five are enough"
    for replica in (0, 1):
        steps = [step for own, step, _ in kept_logs.logged if own == replica]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= (5 if replica else 4 * (policy == "synchronous"))  # the other goes its own pace else
    assert all(values["replica"] == replica for replica, _, values in kept_logs.logged)


def test_a_stop_needs_no_callback(engine):
    run = launch(reporting_loop, own_loops.program(), "replicas=2", engine=engine, steps=100_000)
    assert run.summary["stopped"] == "five are enough"


def test_figures_have_names(engine):
    with pytest.raises(InputError, match="has no names"):
        launch(lambda worker: worker.log(0.5), own_loops.program(), engine=engine, steps=2)


@pytest.mark.parametrize("name", ["virtual", "local"])
def test_a_loop_goes_on_with_a_checkpoint_of_train_and_the_other_way_round(engines, name, tmp_path):
    program, settings = own_loops.program(), {"engine": engines[name], "checkpoint": tmp_path / "ckpt"}
    expected = paceline.train(program, "replicas=2", engine=engines[name], steps=9)
    paceline.train(program, "replicas=2", steps=3, **settings)
    launch(batches_loop, program, "replicas=2", steps=6, resume=True, **settings)
    run = paceline.train(program, "replicas=2", steps=9, resume=True, **settings)
    equal(run.state, expected.state)


def test_a_resumed_loop_has_its_options_and_versions(engine, tmp_path):
    def slower(worker):
        worker.optimizer.param_groups[0]["lr"] = 0.05
        batches_loop(worker)
        (tmp_path / "version").write_text(str(worker.optimizer.version))

    settings = {"engine": engine, "checkpoint": tmp_path / "ckpt"}
    whole = launch(slower, own_loops.program(), "replicas=2", engine=engine, steps=8)
    launch(slower, own_loops.program(), "replicas=2", steps=4, **settings)
    equal(launch(slower, own_loops.program(), "replicas=2", steps=8, resume=True, **settings).state, whole.state)
    assert (tmp_path / "version").read_text() == "8"
    names = Checkpoint.open(sorted((tmp_path / "ckpt").glob("step-*"))[-1]).names()
    assert "loop/step_options" in names
