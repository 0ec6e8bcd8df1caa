# Trains a network on handwritten digits from R, on as many devices or workers as a strategy names.
#
#   RETICULATE_PYTHON=.venv/bin/python Rscript examples/r/digits.R
#
# With TF_CONFIG in the environment of several such processes they train together. In R it is set by
#   Sys.setenv(TF_CONFIG = jsonlite::toJSON(list(
#     cluster = list(worker = c("host0:2222", "host1:2222")),
#     task = list(type = "worker", index = 0L)), auto_unbox = TRUE))

library(reticulate)

sg <- import("stratagem") # before keras, because it selects the JAX backend
keras <- import("keras")
digits <- import("sklearn.datasets")$load_digits(return_X_y = TRUE)

# By NumPy, because reticulate 1.28 does not convert arrays of NumPy 2.
x_train <- import("numpy")$divide(digits[[1]], 16)
y_train <- digits[[2]]

strategy <- sg$MultiWorkerMirroredStrategy() # without TF_CONFIG as sg$MirroredStrategy()
keras$utils$set_random_seed(7L)

with(strategy$scope(), {
  model <- keras$Sequential()
  model$add(keras$layers$Input(tuple(64L)))
  model$add(keras$layers$Dense(256L, activation = "relu"))
  model$add(keras$layers$Dropout(0.4))
  model$add(keras$layers$Dense(128L, activation = "relu"))
  model$add(keras$layers$Dropout(0.3))
  model$add(keras$layers$Dense(10L, activation = "softmax"))
})

model$compile(
  loss = "sparse_categorical_crossentropy",
  optimizer = "rmsprop",
  metrics = list("accuracy")
)

history <- model$fit(
  x_train, y_train,
  epochs = 15L, batch_size = 128L, validation_split = 0.2, verbose = 0L
)

accuracy <- tail(unlist(history$history$val_accuracy), 1)
cat(sprintf("%d replicas, validation accuracy %.2f\n", strategy$num_replicas_in_sync, accuracy))
