"""Names of `tf.estimator.export`: inputs and outputs of exported models."""

from stratagem.estimator.exporting.export_output import ClassificationOutput as ClassificationOutput
from stratagem.estimator.exporting.export_output import ExportOutput as ExportOutput
from stratagem.estimator.exporting.export_output import PredictOutput as PredictOutput
from stratagem.estimator.exporting.export_output import RegressionOutput as RegressionOutput
from stratagem.estimator.exporting.serving import ServingInputReceiver as ServingInputReceiver
from stratagem.estimator.exporting.serving import (
    build_raw_serving_input_receiver_fn as build_raw_serving_input_receiver_fn,
)
