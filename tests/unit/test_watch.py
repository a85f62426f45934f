"""A run that waits without end is ended from the side, whatever its main thread does."""

import itertools
import queue
import signal
import time

import pytest

from opd_recipes.watch import RunStopped, Watch

PROCESSES = {"server_0", "agent_loop_worker_0"}


def sleep():
    time.sleep(20)


def wait_for_a_lock():
    queue.Queue().get(timeout=20)


def compute():
    while True:
        sum(range(1000))


@pytest.mark.parametrize("wait", [sleep, wait_for_a_lock, compute])
def test_a_death_ends_it(wait):
    looks = itertools.count()
    steps = itertools.count()

    def alive():
        return PROCESSES if next(looks) < 3 else {"server_0"}

    began = time.monotonic()
    watch = Watch(lambda: next(steps), limit=60, alive=alive, pause=0.05)
    with pytest.raises(RunStopped, match="processes of the run have died: agent_loop_worker_0$"), watch:
        wait()
    assert time.monotonic() - began < 5


def test_a_stall_ends_it():
    watch = Watch(lambda: 7, limit=0.3, alive=lambda: PROCESSES, pause=0.05)
    with pytest.raises(RunStopped, match=r"nothing has come in 0.3 seconds \(opd.stall_timeout\)"), watch:
        sleep()


def test_a_run_that_goes_on_is_left_alone_and_so_is_one_that_is_over():
    steps = itertools.count()
    before = signal.getsignal(signal.SIGUSR1)
    with Watch(lambda: next(steps), limit=0.2, alive=lambda: PROCESSES, pause=0.05):
        time.sleep(0.6)
    time.sleep(0.4)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_new_processes_and_one_that_is_only_not_listed_once_do_not_matter():
    looks = iter([PROCESSES, PROCESSES | {"reward"}, {"server_0"}, PROCESSES, {"agent_loop_worker_0"}])
    steps = itertools.count()
    with Watch(lambda: next(steps), limit=60, alive=lambda: next(looks, PROCESSES), pause=0.05):
        time.sleep(0.6)


def test_an_error_of_the_run_itself_comes_through():
    with pytest.raises(KeyError), Watch(lambda: 0, limit=60, alive=lambda: PROCESSES, pause=0.05):
        raise KeyError("its own")


def test_an_error_that_a_death_has_caused_names_the_death():
    looks = iter([PROCESSES, {"server_0"}])
    watch = Watch(lambda: 0, limit=60, alive=lambda: next(looks), pause=60)
    with pytest.raises(RunStopped, match="have died: agent_loop_worker_0") as error, watch:
        raise KeyError("no answers")
    assert isinstance(error.value.__cause__, KeyError)
