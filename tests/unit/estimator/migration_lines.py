"""One line of code per row of the table in docs/guides/estimator.md, by its first name."""

from __future__ import annotations

__all__ = ["LINES"]

LINES = {
    # Estimators
    "tf.estimator.Estimator": 'sg.estimator.Estimator(model_fn, folder, config, {"units": 4})',
    "tf.estimator.EstimatorSpec": 'sg.estimator.EstimatorSpec("infer", predictions=x)',
    "tf.estimator.ModeKeys": 'assert sg.estimator.ModeKeys.PREDICT == "infer"',
    "tf.estimator.RunConfig": (
        "sg.estimator.RunConfig(folder, save_checkpoints_steps=10, train_distribute=strategy)"
    ),
    "tf.estimator.TrainSpec": "sg.estimator.TrainSpec(data, max_steps=100)",
    "tf.estimator.EvalSpec": "sg.estimator.EvalSpec(data, steps=None, throttle_secs=60)",
    "tf.estimator.train_and_evaluate": (
        "sg.estimator.train_and_evaluate(estimator, sg.estimator.TrainSpec(data, "
        "max_steps=1), sg.estimator.EvalSpec(data, steps=1))"
    ),
    "tf.estimator.WarmStartSettings": (
        'sg.estimator.WarmStartSettings(estimator.latest_checkpoint(), ".*kernel")'
    ),
    "tf.estimator.VocabInfo": (
        'sg.estimator.WarmStartSettings(folder, vars_to_warm_start="^(?!.*embedding)")'
    ),
    "tf.estimator.add_metrics": (
        'sg.estimator.add_metrics(estimator, lambda labels, predictions: {"mean": '
        "mean_of(predictions)})"
    ),
    "tf.keras.estimator.model_to_estimator": "sg.estimator.model_to_estimator(keras_model)",
    # Pre-made estimators
    "tf.estimator.LinearClassifier": "sg.estimator.LinearClassifier(columns, n_classes=3)",
    "tf.estimator.LinearRegressor": "sg.estimator.LinearRegressor(columns)",
    "tf.estimator.DNNClassifier": "sg.estimator.DNNClassifier([8, 4], columns)",
    "tf.estimator.DNNRegressor": "sg.estimator.DNNRegressor([8, 4], columns, dropout=0.1)",
    "tf.estimator.DNNLinearCombinedClassifier": (
        "sg.estimator.DNNLinearCombinedClassifier(linear_feature_columns=columns, "
        "dnn_feature_columns=columns, dnn_hidden_units=[8])"
    ),
    "tf.estimator.DNNLinearCombinedRegressor": (
        "sg.estimator.DNNLinearCombinedRegressor(linear_feature_columns=columns, "
        "dnn_feature_columns=columns, dnn_hidden_units=[8])"
    ),
    "tf.estimator.LinearEstimator": "sg.estimator.LinearEstimator(head, columns)",
    "tf.estimator.DNNEstimator": "sg.estimator.DNNEstimator(head, [8], columns)",
    "tf.estimator.DNNLinearCombinedEstimator": (
        "sg.estimator.DNNLinearCombinedEstimator(head, dnn_feature_columns=columns, "
        "dnn_hidden_units=[8])"
    ),
    "tf.estimator.BaselineClassifier": "sg.estimator.BaselineClassifier(n_classes=3)",
    "tf.estimator.BaselineRegressor": "sg.estimator.BaselineRegressor()",
    "tf.estimator.BaselineEstimator": "sg.estimator.BaselineEstimator(head)",
    "tf.estimator.BoostedTreesClassifier": "ensemble.HistGradientBoostingClassifier(max_iter=1)",
    "tf.estimator.BoostedTreesRegressor": "ensemble.HistGradientBoostingClassifier(max_iter=1)",
    "tf.estimator.BoostedTreesEstimator": "ensemble.HistGradientBoostingClassifier(max_iter=1)",
    "tf.estimator.experimental.RNNClassifier": (
        "sg.estimator.model_to_estimator(compiled(keras.layers.LSTM(2)))"
    ),
    "tf.estimator.experimental.RNNEstimator": (
        "sg.estimator.model_to_estimator(compiled(keras.layers.LSTM(2)))"
    ),
    "tf.estimator.experimental.KMeans": "cluster.KMeans(2, n_init=1)",
    "tf.estimator.experimental.LinearSDCA": (
        'sg.estimator.LinearClassifier(columns, optimizer="Ftrl")'
    ),
    # Heads
    "tf.estimator.Head": "assert isinstance(head, sg.estimator.Head)",
    "tf.estimator.BinaryClassHead": "sg.estimator.BinaryClassHead()",
    "tf.estimator.MultiClassHead": "sg.estimator.MultiClassHead(3)",
    "tf.estimator.RegressionHead": "sg.estimator.RegressionHead()",
    "tf.estimator.MultiLabelHead": "keras.losses.BinaryCrossentropy(from_logits=True)",
    "tf.estimator.MultiHead": "sg.estimator.model_to_estimator(keras_model)",
    "tf.estimator.PoissonRegressionHead": "sg.estimator.PoissonRegressionHead()",
    "tf.estimator.LogisticRegressionHead": "sg.estimator.LogisticRegressionHead()",
    "tf.estimator.experimental.call_logit_fn": "keras.layers.Dense(1)(x)",
    "tf.estimator.experimental.dnn_logit_fn_builder": (
        "keras.Sequential([sg.feature_column.DenseFeatures(columns), "
        "keras.layers.Dense(1)])(encoded)"
    ),
    "tf.estimator.experimental.linear_logit_fn_builder": (
        "sg.feature_column.LinearModel(columns)(encoded)"
    ),
    # Input
    "tf.compat.v1.estimator.inputs.numpy_input_fn": (
        'sg.estimator.numpy_input_fn({"x": x}, y, shuffle=True)'
    ),
    "tf.compat.v1.estimator.inputs.pandas_input_fn": (
        "assert callable(sg.estimator.pandas_input_fn)"
    ),
    "tf.estimator.classifier_parse_example_spec": 'sg.input.Dataset(({"x": x}, y), batch_size=4)',
    "tf.estimator.regressor_parse_example_spec": 'sg.input.Dataset(({"x": x}, y), batch_size=4)',
    # Hooks
    "tf.estimator.SessionRunHook": "run(sg.estimator.SessionRunHook())",
    "tf.estimator.SessionRunArgs": 'sg.estimator.SessionRunArgs({"loss": "loss"})',
    "tf.estimator.SessionRunContext": (
        'assert hasattr(sg.estimator.SessionRunContext, "request_stop")'
    ),
    "tf.estimator.SessionRunValues": (
        'assert sg.estimator.SessionRunValues({"loss": 1.0}).results["loss"] == 1'
    ),
    "tf.estimator.LoggingTensorHook": (
        'run(sg.estimator.LoggingTensorHook(["loss"], every_n_iter=1))'
    ),
    "tf.estimator.StepCounterHook": (
        "run(sg.estimator.StepCounterHook(every_n_steps=1, output_dir=folder))"
    ),
    "tf.estimator.StopAtStepHook": "run(sg.estimator.StopAtStepHook(num_steps=1))",
    "tf.estimator.NanTensorHook": 'run(sg.estimator.NanTensorHook("loss"))',
    "tf.estimator.NanLossDuringTrainingError": (
        "assert issubclass(sg.estimator.NanLossDuringTrainingError, RuntimeError)"
    ),
    "tf.estimator.CheckpointSaverHook": (
        "run(sg.estimator.CheckpointSaverHook(estimator.model_dir, save_steps=1))"
    ),
    "tf.estimator.CheckpointSaverListener": (
        "estimator.train(data, steps=1, saving_listeners=[sg.estimator.CheckpointSaverListener()])"
    ),
    "tf.estimator.SummarySaverHook": (
        'run(sg.estimator.SummarySaverHook(save_steps=1, output_dir=folder, summary_op="loss"))'
    ),
    "tf.estimator.GlobalStepWaiterHook": "run(sg.estimator.GlobalStepWaiterHook(0))",
    "tf.estimator.FinalOpsHook": 'run(sg.estimator.FinalOpsHook("global_step"))',
    "tf.estimator.FeedFnHook": "estimator.train(data, steps=1)",
    "tf.estimator.ProfilerHook": "sg.estimator.ProfilerHook(save_steps=100, output_dir=folder)",
    "tf.estimator.SecondOrStepTimer": (
        "assert sg.estimator.SecondOrStepTimer(every_steps=2).should_trigger_for_step(0)"
    ),
    "tf.compat.v1.train.Scaffold": (
        "sg.estimator.Scaffold(init_fn=lambda scaffold, session: None)"
    ),
    "tf.compat.v1.train.create_global_step": "sg.estimator.get_or_create_global_step()",
    "tf.compat.v1.train.get_global_step": "sg.train.get_global_step()",
    "tf.compat.v1.train.get_or_create_global_step": "sg.train.get_or_create_global_step()",
    "tf.estimator.experimental.make_early_stopping_hook": (
        "sg.estimator.experimental.make_early_stopping_hook(estimator, lambda: False)"
    ),
    "tf.estimator.experimental.stop_if_higher_hook": (
        'sg.estimator.experimental.stop_if_higher_hook(estimator, "accuracy", 0.9)'
    ),
    "tf.estimator.experimental.stop_if_lower_hook": (
        'sg.estimator.experimental.stop_if_lower_hook(estimator, "loss", 0.1)'
    ),
    "tf.estimator.experimental.stop_if_no_decrease_hook": (
        'sg.estimator.experimental.stop_if_no_decrease_hook(estimator, "loss", 100)'
    ),
    "tf.estimator.experimental.stop_if_no_increase_hook": (
        'sg.estimator.experimental.stop_if_no_increase_hook(estimator, "accuracy", 100)'
    ),
    "tf.estimator.experimental.InMemoryEvaluatorHook": (
        "estimator.train(data, steps=1).evaluate(data, steps=1)"
    ),
    "tf.estimator.experimental.make_stop_at_checkpoint_step_hook": (
        "estimator.train(data, max_steps=1)"
    ),
    # Export
    "tf.estimator.Exporter": 'class Own(sg.estimator.Exporter): name, export = "own", print',
    "tf.estimator.FinalExporter": 'sg.estimator.FinalExporter("final", receiver_fn)',
    "tf.estimator.LatestExporter": 'sg.estimator.LatestExporter("latest", receiver_fn)',
    "tf.estimator.BestExporter": (
        "sg.estimator.BestExporter(serving_input_receiver_fn=receiver_fn)"
    ),
    "tf.estimator.export.ServingInputReceiver": (
        'sg.estimator.export.ServingInputReceiver(keras.Input((4,)), {"x": keras.Input((4,))})'
    ),
    "tf.estimator.export.TensorServingInputReceiver": (
        'sg.estimator.export.ServingInputReceiver(keras.Input((4,)), {"x": keras.Input((4,))})'
    ),
    "tf.estimator.export.build_raw_serving_input_receiver_fn": (
        'sg.estimator.export.build_raw_serving_input_receiver_fn({"x": x})'
    ),
    "tf.estimator.export.build_parsing_serving_input_receiver_fn": (
        'sg.estimator.export.build_raw_serving_input_receiver_fn({"x": x})'
    ),
    "tf.estimator.experimental.build_raw_supervised_input_receiver_fn": (
        'sg.estimator.export.build_raw_serving_input_receiver_fn({"x": x})'
    ),
    "tf.estimator.export.ExportOutput": (
        "assert issubclass(sg.estimator.export.PredictOutput, sg.estimator.export.ExportOutput)"
    ),
    "tf.estimator.export.PredictOutput": 'sg.estimator.export.PredictOutput({"logits": x})',
    "tf.estimator.export.ClassificationOutput": (
        "sg.estimator.export.ClassificationOutput(scores=x)"
    ),
    "tf.estimator.export.RegressionOutput": "sg.estimator.export.RegressionOutput(x)",
    "tf.estimator.export.EvalOutput": "estimator.evaluate(data, steps=1)",
    # TPUs
    "tf.compat.v1.estimator.tpu.TPUEstimator": (
        "sg.estimator.Estimator(model_fn, config=sg.estimator.RunConfig(train_distribute=strategy))"
    ),
    "tf.compat.v1.estimator.tpu.TPUEstimatorSpec": (
        'sg.estimator.EstimatorSpec("infer", predictions=x)'
    ),
    "tf.compat.v1.estimator.tpu.RunConfig": (
        "sg.estimator.RunConfig(folder, train_distribute=strategy)"
    ),
    "tf.compat.v1.estimator.tpu.TPUConfig": (
        'assert "steps_per_run" in signature(sg.TPUStrategy).parameters'
    ),
    "tf.compat.v1.estimator.tpu.InputPipelineConfig": (
        "sg.InputOptions(per_replica_buffer_size=4)"
    ),
    "tf.compat.v1.estimator.tpu.experimental.EmbeddingConfigSpec": (
        'sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"embedding": "central"})'
    ),
    # Feature columns
    "tf.feature_column.numeric_column": 'sg.feature_column.numeric_column("x")',
    "tf.feature_column.bucketized_column": (
        "sg.feature_column.bucketized_column(columns[0], [0.0, 1.0])"
    ),
    "tf.feature_column.categorical_column_with_identity": (
        'sg.feature_column.categorical_column_with_identity("kind", 3)'
    ),
    "tf.feature_column.categorical_column_with_vocabulary_list": (
        'sg.feature_column.categorical_column_with_vocabulary_list("word", ["a", "b"])'
    ),
    "tf.feature_column.categorical_column_with_vocabulary_file": (
        'sg.feature_column.categorical_column_with_vocabulary_file("word", vocabulary)'
    ),
    "tf.feature_column.categorical_column_with_hash_bucket": (
        'sg.feature_column.categorical_column_with_hash_bucket("word", 10)'
    ),
    "tf.feature_column.crossed_column": 'sg.feature_column.crossed_column(["word", "kind"], 10)',
    "tf.feature_column.weighted_categorical_column": (
        'sg.feature_column.weighted_categorical_column(words, "weight")'
    ),
    "tf.feature_column.indicator_column": "sg.feature_column.indicator_column(words)",
    "tf.feature_column.embedding_column": "sg.feature_column.embedding_column(words, 4)",
    "tf.feature_column.shared_embeddings": "sg.feature_column.shared_embeddings([words], 4)",
    "tf.compat.v1.feature_column.shared_embedding_columns": (
        "sg.feature_column.shared_embeddings([words], 4)"
    ),
    "tf.compat.v1.feature_column.input_layer": (
        "sg.feature_column.DenseFeatures(columns)(encoded)"
    ),
    "tf.compat.v1.feature_column.linear_model": "sg.feature_column.LinearModel(columns)(encoded)",
    "tf.feature_column.make_parse_example_spec": 'sg.input.Dataset({"x": x}, batch_size=4)',
    "tf.feature_column.sequence_numeric_column": "keras.layers.Masking()(x[:, :, None])",
    "tf.feature_column.sequence_categorical_column_with_hash_bucket": (
        "keras.layers.Embedding(10, 4, mask_zero=True)(y[:, None])"
    ),
    "tf.feature_column.sequence_categorical_column_with_vocabulary_file": (
        "keras.layers.Embedding(10, 4, mask_zero=True)(y[:, None])"
    ),
    "tf.feature_column.sequence_categorical_column_with_vocabulary_list": (
        "keras.layers.Embedding(10, 4, mask_zero=True)(y[:, None])"
    ),
    "tf.feature_column.sequence_categorical_column_with_identity": (
        "keras.layers.Embedding(10, 4, mask_zero=True)(y[:, None])"
    ),
    # Summaries
    "tf.summary.scalar": 'with writer.as_default(step=1): sg.summary.scalar("loss", 0.5)',
    "tf.summary.histogram": 'with writer.as_default(step=1): sg.summary.histogram("weights", x)',
    "tf.summary.image": (
        'with writer.as_default(step=1): sg.summary.image("picture", x[None, :, :, None])'
    ),
    "tf.summary.text": 'with writer.as_default(step=1): sg.summary.text("note", "*hello*")',
    "tf.summary.audio": 'assert "metadata" in signature(sg.summary.write).parameters',
    "tf.summary.write": 'assert "tag" in signature(sg.summary.write).parameters',
    "tf.summary.SummaryWriter": "assert isinstance(writer, sg.summary.SummaryWriter)",
    "tf.summary.create_file_writer": "sg.summary.create_file_writer(folder).close()",
    "tf.summary.create_noop_writer": "sg.summary.create_noop_writer()",
    "tf.summary.record_if": (
        "with sg.summary.record_if(False): assert not sg.summary.should_record_summaries()"
    ),
    "tf.summary.should_record_summaries": "sg.summary.should_record_summaries()",
    "tf.summary.flush": "writer.flush()",
    "tf.summary.graph": "jax.jit(jnp.sum).lower(x).as_text()",
    "tf.summary.trace_on": "assert callable(jax.profiler.start_trace)",
    "tf.summary.trace_export": "assert callable(jax.profiler.stop_trace)",
    "tf.summary.trace_off": "assert callable(jax.profiler.stop_trace)",
    "tf.summary.experimental.get_step": "sg.summary.experimental.get_step()",
    "tf.summary.experimental.set_step": "sg.summary.experimental.set_step(None)",
    "tf.summary.experimental.summary_scope": (
        'with writer.as_default(step=1): sg.summary.scalar("scope/loss", 0.5)'
    ),
    "tf.summary.experimental.write_raw_pb": "assert callable(sg.summary.write)",
    "tf.compat.v1.summary.FileWriter": "sg.summary.create_file_writer(folder).close()",
    "tf.compat.v1.summary.FileWriterCache": "sg.summary.create_file_writer(folder).close()",
    "tf.compat.v1.summary.tensor_summary": (
        'assert "tensor" in signature(sg.summary.write).parameters'
    ),
    "tf.compat.v1.summary.merge": (
        'with writer.as_default(step=1): sg.summary.scalar("loss", 0.5)'
    ),
    "tf.compat.v1.summary.merge_all": (
        'with writer.as_default(step=1): sg.summary.scalar("loss", 0.5)'
    ),
    "tf.compat.v1.summary.all_v2_summary_ops": (
        'with writer.as_default(step=1): sg.summary.scalar("loss", 0.5)'
    ),
    "tf.compat.v1.summary.initialize": (
        'with writer.as_default(step=1): sg.summary.scalar("loss", 0.5)'
    ),
    "tf.compat.v1.summary.Event": 'importlib.import_module("tensorboard.compat.proto.event_pb2")',
    "tf.compat.v1.summary.Summary": (
        'importlib.import_module("tensorboard.compat.proto.event_pb2")'
    ),
    "tf.compat.v1.summary.SummaryDescription": (
        'importlib.import_module("tensorboard.compat.proto.event_pb2")'
    ),
    "tf.compat.v1.summary.SessionLog": (
        'importlib.import_module("tensorboard.compat.proto.event_pb2")'
    ),
    "tf.compat.v1.summary.TaggedRunMetadata": (
        'importlib.import_module("tensorboard.compat.proto.event_pb2")'
    ),
    "tf.compat.v1.summary.get_summary_description": (
        'importlib.import_module("tensorboard.compat.proto.event_pb2")'
    ),
    # tf.contrib.distribute of TensorFlow 1.11 and 1.12
    "tf.contrib.distribute.MirroredStrategy": 'sg.MirroredStrategy(["cpu:0", "cpu:1"])',
    "tf.contrib.distribute.CollectiveAllReduceStrategy": "sg.CollectiveAllReduceStrategy()",
    "tf.contrib.distribute.OneDeviceStrategy": 'sg.OneDeviceStrategy("cpu:0")',
    "tf.contrib.distribute.ParameterServerStrategy": (
        'assert "independent" in signature(sg.ParameterServerStrategy).parameters'
    ),
    "tf.contrib.distribute.TPUStrategy": (
        'assert "steps_per_run" in signature(sg.TPUStrategy).parameters'
    ),
    "tf.contrib.distribute.DistributionStrategy": "assert isinstance(strategy, sg.Strategy)",
    "tf.contrib.distribute.DistributeConfig": (
        "sg.estimator.DistributeConfig(train_distribute=strategy, eval_distribute=strategy)"
    ),
    "tf.contrib.distribute.CrossTowerOps": (
        "assert issubclass(sg.NcclAllReduce, sg.CrossDeviceOps)"
    ),
    "tf.contrib.distribute.AllReduceCrossTowerOps": "sg.NcclAllReduce()",
    "tf.contrib.distribute.ReductionToOneDeviceCrossTowerOps": "sg.ReductionToOneDevice()",
    "tf.contrib.distribute.TowerContext": 'assert hasattr(sg.ReplicaContext, "merge_call")',
    "tf.contrib.distribute.UpdateContext": (
        "assert isinstance(strategy.extended, sg.StrategyExtended)"
    ),
    "tf.contrib.distribute.get_tower_context": "sg.get_replica_context()",
    "tf.contrib.distribute.get_cross_tower_context": "sg.in_cross_replica_context()",
    "tf.contrib.distribute.require_tower_context": "sg.get_replica_context()",
    "tf.contrib.distribute.get_distribution_strategy": "sg.get_strategy()",
    "tf.contrib.distribute.has_distribution_strategy": "sg.has_strategy()",
    "tf.contrib.distribute.get_loss_reduction": "assert callable(sg.compute_average_loss)",
    "tf.contrib.distribute.run_standard_tensorflow_server": (
        "assert callable(sg.run_standard_tensorflow_server)"
    ),
    "tf.contrib.distribute.Monitor": "estimator.train(data, steps=1)",
    "tf.contrib.distribute.Step": "assert callable(strategy.run_steps)",
    "tf.contrib.distribute.StandardInputStep": "assert callable(strategy.run_steps)",
    "tf.contrib.distribute.StandardSingleLossStep": "assert callable(strategy.run_steps)",
}
