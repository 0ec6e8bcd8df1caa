"""Pre-made estimators: linear models and deep networks over feature columns."""

from stratagem.estimator.premade.baseline import (
    BaselineClassifier,
    BaselineEstimator,
    BaselineRegressor,
)
from stratagem.estimator.premade.dnn import DNNClassifier, DNNEstimator, DNNRegressor
from stratagem.estimator.premade.dnn_linear_combined import (
    DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor,
)
from stratagem.estimator.premade.linear import LinearClassifier, LinearEstimator, LinearRegressor

__all__ = [
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "DNNClassifier",
    "DNNEstimator",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
]
