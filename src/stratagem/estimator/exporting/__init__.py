"""Prediction as compiled programs that need no model function."""

from stratagem.estimator.exporting.export_output import (
    ClassificationOutput,
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)
from stratagem.estimator.exporting.export_programs import (
    check_receiver,
    make_variables,
    signatures_of,
    write_export,
)
from stratagem.estimator.exporting.exported_model import (
    ExportedModel,
    Signature,
    load_exported,
    read_signatures,
    write_signatures,
)
from stratagem.estimator.exporting.serving import (
    InputSpec,
    ServingInputReceiver,
    build_raw_serving_input_receiver_fn,
)

__all__ = [
    "ClassificationOutput",
    "ExportOutput",
    "ExportedModel",
    "InputSpec",
    "PredictOutput",
    "RegressionOutput",
    "ServingInputReceiver",
    "Signature",
    "build_raw_serving_input_receiver_fn",
    "check_receiver",
    "load_exported",
    "make_variables",
    "read_signatures",
    "signatures_of",
    "write_export",
    "write_signatures",
]
