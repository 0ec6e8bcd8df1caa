"""End of rounds of local updates in loops of scheduled functions, and in real processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from tests.unit.parameter_server.local_models import FIT, X, Y, dense, training_apart


def test_join_sends_what_workers_have_trained() -> None:
    method = sg.local_updates.LocalSGD(period=100)
    with training_apart(method, 2) as strategy:
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            variable = sg.Variable(np.zeros(3, "float32"))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([variable])

        def step(gradient: Any) -> None:
            optimizer.apply([gradient], [variable])

        def work(size: float) -> None:
            strategy.run(step, args=(np.full(3, size, "float32"),))

        for worker, size in ((0, 1.0), (0, 2.0), (1, 5.0)):
            coordinator.schedule(work, args=(size,), worker=worker)
        while not coordinator.wait(1.0):
            pass
        np.testing.assert_array_equal(variable.value, np.zeros(3))
        coordinator.join()
        np.testing.assert_array_equal(variable.value, np.full(3, -4.0))  # the mean of -3 and -5
        coordinator.join()  # nothing more
        np.testing.assert_array_equal(variable.value, np.full(3, -4.0))
        assert int(optimizer.iterations) == 2  # of the worker that is ahead


def test_join_sends_nothing_without_local_updates(coordinator) -> None:
    value = coordinator.schedule(pow, args=(2, 3))
    coordinator.join(progress=True)
    assert value.fetch() == 8


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [False, True])
def test_worker_that_is_killed_comes_back_with_the_global_model(synchronous: bool) -> None:
    method = sg.local_updates.DiLoCo(period=4, outer_momentum=0.5)
    with sg.ParameterServerStrategy(
        synchronous=synchronous, num_workers=2, num_servers=1, local_updates=method
    ) as strategy:
        assert strategy.local_updates == method
        with strategy.scope():
            model = dense(keras.optimizers.Adam(0.01))
        before = model.evaluate(X, Y, verbose=0)[0]
        coordinator = ClusterCoordinator(strategy)
        pid = coordinator.schedule(os.getpid, worker=1).fetch()

        class Killer(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == 3 and self.epoch == 2:
                    os.kill(pid, signal.SIGKILL)

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch

        history = model.fit(X, Y, callbacks=[Killer()], **(FIT | {"epochs": 8})).history
        assert model.evaluate(X, Y, verbose=0)[0] < before
        assert history["loss"][-1] < history["loss"][0]
        assert coordinator.schedule(os.getpid, worker=1).fetch() != pid
        rounds = strategy.placement.remote.variables.client.staleness()
        assert sum(rounds.values()) >= 16 if synchronous else sum(rounds.values()) > 0
