"""The public names of tf.estimator and what belongs to it, in all versions that had them.

Sources: `_api/v1` and `_api/v2` of the package tensorflow_estimator 2.15.0; `_api/v2` and its
`compat/v1` of tensorflow 2.15.1 for feature columns, summaries and hooks; the golden file
tensorflow.estimator.pbtxt of tensorflow 1.13 for boosted trees; `contrib/distribute/__init__.py` of
tensorflow 1.11 (002bd0b).
"""

from __future__ import annotations

__all__ = ["SYMBOLS"]

_ESTIMATOR = """
BaselineClassifier BaselineEstimator BaselineRegressor BestExporter BinaryClassHead
BoostedTreesClassifier BoostedTreesEstimator BoostedTreesRegressor CheckpointSaverHook
CheckpointSaverListener DNNClassifier DNNEstimator DNNLinearCombinedClassifier
DNNLinearCombinedEstimator DNNLinearCombinedRegressor DNNRegressor Estimator EstimatorSpec EvalSpec
Exporter FeedFnHook FinalExporter FinalOpsHook GlobalStepWaiterHook Head LatestExporter
LinearClassifier LinearEstimator LinearRegressor LoggingTensorHook LogisticRegressionHead ModeKeys
MultiClassHead MultiHead MultiLabelHead NanLossDuringTrainingError NanTensorHook
PoissonRegressionHead ProfilerHook RegressionHead RunConfig SecondOrStepTimer SessionRunArgs
SessionRunContext SessionRunHook SessionRunValues StepCounterHook StopAtStepHook SummarySaverHook
TrainSpec VocabInfo WarmStartSettings add_metrics classifier_parse_example_spec
regressor_parse_example_spec train_and_evaluate
"""
_EXPERIMENTAL = """
InMemoryEvaluatorHook KMeans LinearSDCA RNNClassifier RNNEstimator
build_raw_supervised_input_receiver_fn call_logit_fn dnn_logit_fn_builder linear_logit_fn_builder
make_early_stopping_hook make_stop_at_checkpoint_step_hook stop_if_higher_hook stop_if_lower_hook
stop_if_no_decrease_hook stop_if_no_increase_hook
"""
_EXPORT = """
ClassificationOutput EvalOutput ExportOutput PredictOutput RegressionOutput ServingInputReceiver
TensorServingInputReceiver build_parsing_serving_input_receiver_fn
build_raw_serving_input_receiver_fn
"""
_TPU = "InputPipelineConfig RunConfig TPUConfig TPUEstimator TPUEstimatorSpec"
_TRAIN = """
CheckpointSaverHook CheckpointSaverListener FeedFnHook FinalOpsHook GlobalStepWaiterHook
LoggingTensorHook NanLossDuringTrainingError NanTensorHook ProfilerHook Scaffold SecondOrStepTimer
SessionRunArgs SessionRunContext SessionRunHook SessionRunValues StepCounterHook StopAtStepHook
SummarySaverHook VocabInfo create_global_step get_global_step get_or_create_global_step
"""
_COLUMNS = """
bucketized_column categorical_column_with_hash_bucket categorical_column_with_identity
categorical_column_with_vocabulary_file categorical_column_with_vocabulary_list crossed_column
embedding_column indicator_column make_parse_example_spec numeric_column
sequence_categorical_column_with_hash_bucket sequence_categorical_column_with_identity
sequence_categorical_column_with_vocabulary_file sequence_categorical_column_with_vocabulary_list
sequence_numeric_column shared_embeddings weighted_categorical_column
"""
_SUMMARY = """
SummaryWriter audio create_file_writer create_noop_writer flush graph histogram image record_if
scalar should_record_summaries text trace_export trace_off trace_on write
"""
_SUMMARY_V1 = """
Event FileWriter FileWriterCache SessionLog Summary SummaryDescription TaggedRunMetadata
all_v2_summary_ops audio get_summary_description histogram image initialize merge merge_all scalar
tensor_summary text
"""
_CONTRIB = """
AllReduceCrossTowerOps CollectiveAllReduceStrategy CrossTowerOps DistributeConfig
DistributionStrategy MirroredStrategy Monitor OneDeviceStrategy ParameterServerStrategy
ReductionToOneDeviceCrossTowerOps StandardInputStep StandardSingleLossStep Step TPUStrategy
TowerContext UpdateContext get_cross_tower_context get_distribution_strategy get_loss_reduction
get_tower_context has_distribution_strategy require_tower_context run_standard_tensorflow_server
"""


def _under(prefix: str, names: str) -> list[str]:
    return [f"{prefix}.{name}" for name in names.split()]


# Where tf.compat.v1 has a name, too, the page's row for the newer spelling stands for both.
SYMBOLS = [
    *_under("tf.estimator", _ESTIMATOR),
    *_under("tf.estimator.experimental", _EXPERIMENTAL),
    *_under("tf.estimator.export", _EXPORT),
    *_under("tf.compat.v1.estimator.inputs", "numpy_input_fn pandas_input_fn"),
    *_under("tf.compat.v1.estimator.tpu", _TPU),
    "tf.compat.v1.estimator.tpu.experimental.EmbeddingConfigSpec",
    "tf.keras.estimator.model_to_estimator",
    *_under("tf.compat.v1.train", _TRAIN),
    *_under("tf.feature_column", _COLUMNS),
    *_under("tf.compat.v1.feature_column", "input_layer linear_model shared_embedding_columns"),
    *_under("tf.summary", _SUMMARY),
    *_under("tf.summary.experimental", "get_step set_step summary_scope write_raw_pb"),
    *_under("tf.compat.v1.summary", _SUMMARY_V1),
    *_under("tf.contrib.distribute", _CONTRIB),
]
