# Build from the repository root: docker build -f release/containers/cuda.Dockerfile -t stratagem:cuda .
# CUDA comes with JAX's wheels; the host needs a driver of version 525 or later and NVIDIA's
# container toolkit. Not yet run on a GPU.
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ARG EXTRAS=cuda,checkpoint,ray,observe
RUN useradd --create-home --uid 1000 trainer
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/stratagem-*.whl)[${EXTRAS}]" && rm -r /wheels
USER 1000
WORKDIR /home/trainer
ENV KERAS_BACKEND=jax PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN stratagem --version
CMD ["stratagem", "devices"]
