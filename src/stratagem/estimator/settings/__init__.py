"""What an Estimator is told: its run configuration, its strategies, its task in a cluster."""

from stratagem.estimator.settings.cluster_task import ClusterTask, cluster_task, model_dir_of_task
from stratagem.estimator.settings.distribute_config import DistributeConfig, check_strategy
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.settings.strategy_choice import (
    close_made,
    made_strategy,
    strategy_of_training,
)

__all__ = [
    "ClusterTask",
    "DistributeConfig",
    "RunConfig",
    "check_strategy",
    "close_made",
    "cluster_task",
    "made_strategy",
    "model_dir_of_task",
    "strategy_of_training",
]
