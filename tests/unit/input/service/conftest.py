"""Ray on this machine, as for parameter servers."""

from tests.unit.parameter_server.conftest import ray_cluster as ray_cluster
