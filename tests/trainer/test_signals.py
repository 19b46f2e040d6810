"""SIGTERM and Ctrl-C finish the step, save once and leave; the run goes on as if nothing had been."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.tiny import Kill, Tiny, assert_same_run, digest, examples, lines, run, saved_steps, tiny_config
from trainer import CheckpointConfig, DataConfig
from trainer.safety.signals import StopRequest, listen

CHANGES = {"train_for": "10 steps", "checkpoint": CheckpointConfig(every="5 steps", keep=20)}


class Send(Kill):
    """Sends this process a signal once the metrics of `step` are there."""

    def __init__(self, step, number):
        super().__init__(step)
        self._number = number

    def on_step(self, step, metrics):
        if step == self._step:
            os.kill(os.getpid(), self._number)


class SendInEvaluation(Send):
    """Sends it in the middle of the hooks of `step`."""

    def on_step(self, step, metrics):
        pass

    def due(self, step, stop):
        return step == self._step and stop is None

    def on_state(self, step, state):
        os.kill(os.getpid(), self._number)


def fit(workdir, *hooks, **changes):
    trainer = Tiny(tiny_config(**{**CHANGES, **changes}), workdir)
    trainer.extra_hooks = hooks
    return trainer.fit(), trainer


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    run(workdir, **CHANGES)
    return workdir


@pytest.mark.parametrize(
    ("hook", "saved"),
    [
        (Send(3, signal.SIGTERM), [4]),  # the metrics of 3 are read when step 4 is under way
        (Send(7, signal.SIGINT), [5, 8]),
        (SendInEvaluation(4, signal.SIGTERM), [4, 5]),
        (SendInEvaluation(5, signal.SIGTERM), [5, 6]),
    ],
)
def test_a_signal_saves_once_at_a_step_boundary_and_the_run_resumes_exactly(straight, tmp_path, hook, saved):
    """Case C75: in a step and between the hooks of one."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop, trainer = fit(tmp_path, hook)
    assert stop.exit_code == 75 and not stop.finished
    assert stop.reason == f"stopped by {hook._number.name}"
    assert saved_steps(tmp_path)[-1] == trainer._step <= saved[-1]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    stop, _ = fit(tmp_path)
    assert stop.exit_code == 0
    assert digest(tmp_path, 10) == digest(straight, 10)
    extra = set(saved_steps(tmp_path)) - set(saved_steps(straight))
    assert len(extra) <= 1
    for step in extra:
        (tmp_path / "checkpoints" / str(step) / "manifest.json").unlink()
    assert_same_run(tmp_path, straight)


class Stalled:
    """A map-style dataset whose example `index` waits until `release` is set."""

    def __init__(self, index):
        self.reached, self.release = threading.Event(), threading.Event()
        self._index = index

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == self._index and not self.release.is_set():
            self.reached.set()
            self.release.wait(60)
        return {name: array[index] for name, array in examples(32).items()}


@pytest.mark.parametrize(("index", "step"), [(20, 2), (3, 0)])
def test_a_signal_while_the_input_stalls_does_not_wait_for_it(tmp_path, index, step):
    """Case C75: the state after the last complete step is saved while the third, or the first, batch is awaited."""
    stalled, dispatched, found = Stalled(index), threading.Event(), []
    manifest = tmp_path / "cut" / "checkpoints" / str(step) / "manifest.json"

    class Dispatched(Kill):
        def on_step(self, seen, metrics):
            if seen == step - 1:  # step 2 is under way when the metrics of step 1 come
                dispatched.set()

    def send():
        found.append(stalled.reached.wait(60) and (not step or dispatched.wait(60)))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        give_up = time.monotonic() + 30
        while not manifest.exists() and time.monotonic() < give_up:
            time.sleep(0.05)
        found.append(manifest.exists())
        stalled.release.set()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    stop, trainer = fit(tmp_path / "cut", Dispatched(0), data=DataConfig(stalled, shuffle=False))
    thread.join()
    assert found == [True, True]
    assert stop.exit_code == 75
    assert saved_steps(tmp_path / "cut") == [trainer._step] == [step]

    stalled.release.set()
    fit(tmp_path / "cut", data=DataConfig(stalled, shuffle=False))
    fit(tmp_path / "straight", data=DataConfig(stalled, shuffle=False))
    assert lines(tmp_path / "cut") == lines(tmp_path / "straight")
    assert digest(tmp_path / "cut", 10) == digest(tmp_path / "straight", 10)


def test_elsewhere_than_in_the_main_thread_no_handler_is_set():
    found = []

    def work():
        with listen() as request:
            found.append((request.stop, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(None, signal.getsignal(signal.SIGTERM))]


def test_the_second_signal_leaves_at_once():
    """With 128 + its number, whatever the run is doing."""
    code = """
import os, signal, time
from trainer.safety.signals import listen
with listen() as request:
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.stop.reason == "stopped by SIGTERM"
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 130


def test_the_first_signal_asks_for_an_end_that_goes_on():
    request = StopRequest()
    assert request.stop is None
    request.handle(signal.SIGINT, None)
    assert request.stop.exit_code == 75 and "SIGINT" in request.stop.reason
