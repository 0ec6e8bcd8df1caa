"""Ray on this machine, as for parameter servers; trainers that notice each loss at once."""

from collections.abc import Iterator

import pytest

from stratagem.group.transport import connection
from stratagem.input.service import trainer
from tests.unit.parameter_server.conftest import ray_cluster as ray_cluster


@pytest.fixture(scope="module", autouse=True)
def look_often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_POLL_S", 0.02)
        patch.setattr(connection, "_SILENCE_S", 0.05)
        yield
